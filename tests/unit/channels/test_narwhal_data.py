"""Channels of narwhal: import, export, and the metadata file in postcard.

`tests/golden/foreign/narwhal` holds directories that narwhal 0.7.0 left, and what it had stored in them. The
independent reader below knows narwhal's layouts and shares no code with the package.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from tests.unit.channels.conftest import ChannelEnv

import tidelog
import tidelog.channels
from tidelog.channels import Channel, ChannelLimits, ChannelManager, export_narwhal, import_narwhal
from tidelog.channels.store import ChannelCheck
from tidelog.cli.main import main
from tidelog.errors import (
    AlreadyExists,
    BadInput,
    Corrupt,
    CursorLost,
    Damaged,
    Error,
    Forbidden,
    NotFound,
    ReadOnly,
    Throttled,
    UnknownLayout,
    WriteFailed,
)
from tidelog.formats.narwhal_channel import NAMES_MAX, decode_narwhal_channel, encode_narwhal_channel
from tidelog.testing import ManualClock, SimDisk
from tidelog.testing.machine import DiskCall

FOREIGN = Path(__file__).parents[2] / "golden" / "foreign" / "narwhal"
CONTENTS = json.loads((FOREIGN / "contents.json").read_text())
CHANNELS = {
    f"{kind}/{channel['directory']}": channel
    for kind in ("stopped", "server")
    for channel in CONTENTS[kind]
    if (FOREIGN / kind / channel["directory"]).exists()
}
KINDS = {"stopped": "example.org", "server": "localhost"}


# ── an independent reader of narwhal's files ──────────────────────────────────────────────────────


class Entry(NamedTuple):
    seq: int
    ts_ms: int
    sender: str
    digest: str


class Postcard:
    """A decoder of the six fields, from the description of the layout alone."""

    def __init__(self, data: bytes) -> None:
        self.stream = io.BytesIO(data)

    def varint(self) -> int:
        value = shift = 0
        while True:
            (byte,) = self.stream.read(1)
            value |= (byte & 127) << shift
            if not byte & 128:
                return value
            shift += 7

    def string(self) -> str:
        return self.stream.read(self.varint()).decode()

    def some(self) -> bool:
        return self.stream.read(1) == b"\1"

    def channel(self) -> dict[str, Any]:
        found: dict[str, Any] = {"handler": self.string(), "owner": self.string() if self.some() else None}
        config: dict[str, Any] = {}
        for name in ("max_clients", "max_payload_size", "max_persist_messages", "persist", "message_flush_interval"):
            value = self.varint() if self.some() else None
            config[name] = bool(value) if name == "persist" and value is not None else value
        acl = {}
        for kind in ("join", "publish", "read"):
            listed = []
            for _ in range(self.varint()):
                domain = self.string()
                users = [self.string() for _ in range(self.varint())]
                listed += [f"{user}@{domain}" for user in users] or [domain]
            acl[kind] = sorted(listed)
        found |= {"config": config, "acl": acl, "members": [self.string() for _ in range(self.varint())]}
        found["channel_type"] = ("PubSub", "Fifo")[self.varint()]
        assert not self.stream.read()
        return found


def read_messages(directory: Path) -> Iterator[Entry]:
    """Every message as narwhal's recovery and history read it, with the rules of its index."""
    last = 0
    paths = sorted(directory.glob("*.log"))
    for path in paths:
        data, pos, base, since, index = path.read_bytes(), 0, int(path.stem), 0, b""
        while pos < len(data):
            seq, ts_ms, sender_size, size = struct.unpack_from("<QQHI", data, pos)
            assert seq > last
            end = pos + 22 + sender_size + size
            assert zlib.crc32(data[pos:end]) == struct.unpack_from("<I", data, end)[0]
            if pos == 0 or since >= 4096:
                index, since = index + struct.pack("<IQ", seq - base, pos), 0
            since += end + 4 - pos
            payload = data[pos + 22 + sender_size : end]
            yield Entry(
                seq, ts_ms, data[pos + 22 : pos + 22 + sender_size].decode(), hashlib.sha256(payload).hexdigest()
            )
            pos, last = end + 4, seq
        stored = path.with_suffix(".idx").read_bytes()
        assert stored[: len(index)] == index
        assert len(stored) % 12 == 0
        assert not any(stored[len(index) :])
        assert len(stored) == len(index) or path == paths[-1], "only the active index is preallocated"


def expected_messages(channel: dict[str, Any]) -> list[Entry]:
    found = []
    for message in channel["messages"]:
        if "sha256" in message:
            digest = message["sha256"]
        else:
            data = message["text"].encode() if "text" in message else bytes.fromhex(message["hex"])
            digest = hashlib.sha256(data).hexdigest()
        found.append(Entry(message["seq"], message["timestamp_ms"], message["from"], digest))
    return found


def tree(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


@pytest.fixture
def open_channels(tmp_path: Path) -> Iterator[Callable[..., ChannelManager]]:
    opened: list[tidelog.Database] = []

    def make(name: str = "data", **limits: Any) -> ChannelManager:
        while opened:
            opened.pop().close()
        limits = {"segment_bytes": 1 << 20, **limits}
        opened.append(tidelog.open(str(tmp_path / name), threads=False, channels=ChannelLimits(**limits)))
        return opened[-1].channels

    yield make
    for database in opened:
        database.close()


def history(manager: ChannelManager, name: str) -> list[Entry]:
    """All messages, read page by page."""
    found, first = list[Entry](), None
    while True:
        page = Channel(manager, name, tidelog.channels.OPERATOR).history(first)
        found += [Entry(m.seq, m.ts_ms, m.sender, hashlib.sha256(m.payload).hexdigest()) for m in page.messages]
        if not page.messages or page.next_seq > page.last_seq:
            return found
        first = page.next_seq


# ── import and export of what narwhal wrote ───────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
def test_every_channel_of_narwhal_is_imported(kind: str, open_channels: Callable[..., ChannelManager]) -> None:
    source, domain = FOREIGN / kind, KINDS[kind]
    before, manager = tree(source), open_channels()
    imported = {each.channel: each for each in import_narwhal(manager, str(source), domain=domain)}
    wanted = {f"!{c['handler']}@{domain}": c for name, c in CHANNELS.items() if name.startswith(kind)}
    assert imported.keys() == wanted.keys()
    for restart in (False, True):
        manager = open_channels() if restart else manager
        assert manager.channel_names() == sorted(wanted)
        for name, channel in wanted.items():
            meta, entries = manager.meta(name), expected_messages(channel)
            assert (meta.owner, list(meta.members)) == (channel["owner"], sorted(channel["members"]))
            acl = {key: list(getattr(meta.acl, key)) for key in ("join", "publish", "read")}
            assert acl == {key: sorted(listed) for key, listed in channel["acl"].items()}
            settings = channel.get("config") or channel["config_set"]
            for key, value in settings.items():
                if value is not None and key != "type":
                    assert getattr(meta.config, key) == value
            assert meta.config.type == channel["channel_type"].lower()
            assert (imported[name].messages, imported[name].is_new) == (len(entries), True)
            if meta.config.type == "pubsub" and entries:
                assert history(manager, name) == entries
    assert tree(source) == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("opened", [False, True])
def test_an_unchanged_channel_is_exported_with_the_same_bytes(
    kind: str, opened: bool, open_channels: Callable[..., ChannelManager], tmp_path: Path
) -> None:
    manager, domain = open_channels(), KINDS[kind]
    import_narwhal(manager, str(FOREIGN / kind), domain=domain)
    if opened:  # other limits, logs opened for writing and closed again
        manager = open_channels(clients_max=7, persist_messages_max=9)
        for name in manager.channel_names():
            if manager.meta(name).config.type == "pubsub":
                history(manager, name)
        manager = open_channels()
    done = export_narwhal(manager, str(tmp_path / "out"), domain=domain)
    assert len(done) == len(manager.channel_names())
    exported, wanted = tree(tmp_path / "out"), tree(FOREIGN / kind)
    assert exported.keys() == wanted.keys()
    for file, content in wanted.items():
        assert exported[file] == content, file


def test_a_queue_goes_on_where_narwhal_stopped(open_channels: Callable[..., ChannelManager], tmp_path: Path) -> None:
    manager = open_channels()
    import_narwhal(manager, str(FOREIGN / "server"), domain="localhost")
    tasks = next(channel for channel in CONTENTS["server"] if channel["channel_type"] == "Fifo")
    waiting = [entry for entry in expected_messages(tasks) if entry.seq >= tasks["cursor_next_seq"]]
    queue = Channel(manager, "!tasks@localhost", "alice@localhost")
    assert len(queue) == len(waiting)
    popped = queue.pop()
    assert (popped.seq, hashlib.sha256(popped.payload).hexdigest()) == (waiting[0].seq, waiting[0].digest)
    queue.push(b"more")
    export_narwhal(manager, str(tmp_path / "out"))
    directory = tmp_path / "out" / tasks["directory"]
    cursor = (directory / "cursor.bin").read_bytes()
    assert struct.unpack("<QI4x", cursor) == (waiting[1].seq, zlib.crc32(cursor[:8]))
    entries = list(read_messages(directory))
    assert entries[:-1] == expected_messages(tasks)
    assert entries[-1].digest == hashlib.sha256(b"more").hexdigest()


def test_a_queue_without_a_cursor_waits_for_its_owner(open_channels: Callable[..., ChannelManager]) -> None:
    manager = open_channels()
    imported = import_narwhal(manager, str(FOREIGN / "stopped"), domain="example.org")
    assert any("cursor.bin" in note for each in imported if each.channel == "!jobs@example.org" for note in each.notes)
    owner = Channel(manager, "!jobs@example.org", "dora@example.org")
    worker = Channel(manager, "!jobs@example.org", "worker-1@example.org")
    with pytest.raises(CursorLost):
        worker.pop()
    assert owner.clear() == 0
    owner.push(b"next")
    assert worker.pop().seq == 41


def test_what_was_changed_here_is_what_narwhal_would_read(
    open_channels: Callable[..., ChannelManager], tmp_path: Path
) -> None:
    """Publish over several segments, change members, lists and settings, export, and read with the reader above."""
    manager = open_channels(segment_bytes=1 << 17)
    import_narwhal(manager, str(FOREIGN / "stopped"), domain="example.org")
    harbour = Channel(manager, "!harbour@example.org", "alice@example.org")
    harbour.change_acl("publish", add=["zoe@example.org", "other.example"])
    harbour.change_acl("join", remove=["carol@other.example"])
    harbour.configure(max_clients=40)
    harbour.invite("bert@example.org")
    payloads = [bytes([n % 251]) * 3000 for n in range(90)]
    for payload in payloads:
        harbour.publish(payload)
    fresh = Channel(manager, "!new/one@example.org", "zoe@example.org")
    fresh.join(persist=True)
    fresh.publish(b"hello")
    export_narwhal(manager, str(tmp_path / "out"))
    directory = tmp_path / "out" / hashlib.sha256(b"harbour").hexdigest()
    decoded = Postcard((directory / "metadata.bin").read_bytes()).channel()
    assert decoded["config"] == {
        "max_clients": 40,
        "max_payload_size": 65536,
        "max_persist_messages": 10000,
        "persist": True,
        "message_flush_interval": 0,
    }
    assert decoded["acl"] == {
        "join": ["example.org"],
        "publish": ["alice@example.org", "bob@example.org", "other.example", "zoe@example.org"],
        "read": [],
    }
    members = ["alice@example.org", "bert@example.org", "bob@example.org", "carol@other.example"]
    assert decoded["members"] == members
    entries = list(read_messages(directory))
    assert entries[:400] == expected_messages(CHANNELS[f"stopped/{directory.name}"])
    assert [entry.digest for entry in entries[400:]] == [hashlib.sha256(payload).hexdigest() for payload in payloads]
    assert [entry.seq for entry in entries[400:]] == list(range(401, 491))
    assert len(sorted(directory.glob("*.log"))) > 5
    created = tmp_path / "out" / hashlib.sha256(b"new/one").hexdigest()
    assert Postcard((created / "metadata.bin").read_bytes()).channel() == {
        "handler": "new/one",
        "owner": "zoe@example.org",
        "config": {
            "max_clients": 100,
            "max_payload_size": 65536,
            "max_persist_messages": 1000,
            "persist": True,
            "message_flush_interval": 0,
        },
        "acl": {"join": [], "publish": [], "read": []},
        "members": ["zoe@example.org"],
        "channel_type": "PubSub",
    }
    assert (created / f"{1:020d}.idx").stat().st_size == 393_228, "as a running server preallocates it"
    # And back: a second import reads what the first export wrote.
    again = open_channels("again")
    import_narwhal(again, str(tmp_path / "out"), domain="example.org")
    assert history(again, "!harbour@example.org") == entries


def test_the_last_message_of_an_emptied_queue_does_not_confuse_narwhal(env: ChannelEnv) -> None:
    """Method: a queue whose log has no message left gets a cursor that fits an empty log."""
    queue = env.channel("ann@localhost", "!jobs@localhost")
    queue.join(persist=True, type="fifo", max_persist_messages=200)
    for _ in range(3):
        for _ in range(100):
            queue.push(b"x")
        for _ in range(100):
            queue.pop()
    directory = env.manager.store.directory(tidelog.channels.rules.directory_name("!jobs@localhost"))
    sizes = [env.disk.stat(f"{directory}/{name}") for name in env.disk.list_dir(directory) if name.endswith(".log")]
    assert sum(stat.size for stat in sizes if stat) == 0, "the arrangement: every message was popped and dropped"
    (done,) = export_narwhal(env.manager, "out", disk=env.disk)
    assert "start at 1" in done.notes[0]
    cursor = env.disk.read_file(f"out/{done.directory}/cursor.bin")
    assert struct.unpack("<QI4x", cursor) == (1, zlib.crc32(cursor[:8]))


# ── refusals ──────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def source(tmp_path: Path) -> Path:
    shutil.copytree(FOREIGN / "stopped", tmp_path / "narwhal")
    return tmp_path / "narwhal"


def directory_of(source: Path, handler: str) -> Path:
    return source / hashlib.sha256(handler.encode()).hexdigest()


def test_an_import_that_meets_an_existing_channel_changes_nothing(
    source: Path, open_channels: Callable[..., ChannelManager]
) -> None:
    manager = open_channels()
    Channel(manager, "!gaps@example.org", "zoe@example.org").join(persist=True)
    with pytest.raises(AlreadyExists, match=r"!gaps@example\.org exists already, 1 of 6"):
        import_narwhal(manager, str(source), domain="example.org")
    assert manager.channel_names() == ["!gaps@example.org"]
    imported = import_narwhal(manager, str(source), domain="example.org", skip_existing=True)
    assert [each.channel for each in imported if not each.is_new] == ["!gaps@example.org"]
    assert len(manager.channel_names()) == 6
    assert manager.meta("!gaps@example.org").owner == "zoe@example.org"


def _bad_sources() -> dict[str, tuple[Callable[[Path], object], type[Error], str]]:
    def change(handler: str, file: str, edit: Callable[[bytes], bytes]) -> Callable[[Path], object]:
        def run(source: Path) -> None:
            path = directory_of(source, handler) / file
            path.write_bytes(edit(path.read_bytes()))

        return run

    first = f"{1:020d}.log"
    return {
        "five fields": (change("gaps", "metadata.bin", lambda data: data[:-1]), Corrupt, "before version 0.7"),
        "trailing byte": (change("gaps", "metadata.bin", lambda data: data + b"\0"), Corrupt, "follow the last field"),
        "long number": (change("gaps", "metadata.bin", lambda data: b"\x84\0" + data[1:]), Corrupt, "shortest form"),
        "another handler": (
            change("gaps", "metadata.bin", lambda data: data.replace(b"gaps", b"caps")),
            Corrupt,
            "another",
        ),
        "user": (change("gaps", "metadata.bin", lambda data: data.replace(b"alice@", b"al ce@")), BadInput, "al ce@"),
        "persist off": (
            change("orphan", "metadata.bin", lambda data: data.replace(b"\x05\x01\x01\x00", b"\x05\x01\x00\x00")),
            Corrupt,
            "persist is off",
        ),
        "a byte of a message": (
            change("harbour", first, lambda data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:]),
            Corrupt,
            "checksum",
        ),
        "text": (change("jobs", first, lambda _: b"2026-01-01 INFO started\n" * 40), UnknownLayout, "narwhal"),
        "sender": (
            change("jobs", first, lambda _: _entry(1, b"\xff@example.org", b"x")),
            Corrupt,
            "not UTF-8",
        ),
        "overlapping segments": (
            lambda source: shutil.copy(
                directory_of(source, "harbour") / first, directory_of(source, "harbour") / f"{2:020d}.log"
            ),
            Corrupt,
            "seq",
        ),
    }


def _entry(seq: int, sender: bytes, payload: bytes) -> bytes:
    data = struct.pack("<QQHI", seq, 1_760_000_000_000, len(sender), len(payload)) + sender + payload
    return data + struct.pack("<I", zlib.crc32(data))


BAD_SOURCES = _bad_sources()


@pytest.mark.parametrize("name", BAD_SOURCES)
def test_a_bad_source_is_an_error_and_nothing_is_imported(
    name: str, source: Path, open_channels: Callable[..., ChannelManager]
) -> None:
    damage, error, text = BAD_SOURCES[name]
    damage(source)
    before, manager = tree(source), open_channels()
    with pytest.raises(error, match=text):
        import_narwhal(manager, str(source), domain="example.org")
    assert manager.channel_names() == []
    assert tree(source) == before


def test_an_unfinished_last_message_is_left_out_as_narwhal_does(
    source: Path, open_channels: Callable[..., ChannelManager]
) -> None:
    log = directory_of(source, "notices") / f"{1:020d}.log"
    log.write_bytes(log.read_bytes() + _entry(26, b"alice@example.org", b"cut")[:-3])
    manager = open_channels()
    imported = {each.channel: each for each in import_narwhal(manager, str(source), domain="example.org")}
    assert "unfinished message" in imported["!notices@example.org"].notes[0]
    assert imported["!notices@example.org"].last_seq == 25
    assert len(history(manager, "!notices@example.org")) == 25


def test_accepted_damage_stays_damage(source: Path, open_channels: Callable[..., ChannelManager]) -> None:
    log = directory_of(source, "harbour") / f"{146:020d}.log"
    data = bytearray(log.read_bytes())
    data[6000] ^= 1
    log.write_bytes(data)
    manager = open_channels()
    imported = {
        each.channel: each for each in import_narwhal(manager, str(source), domain="example.org", accept_damage=True)
    }
    assert "was imported as it is" in imported["!harbour@example.org"].notes[0]
    with pytest.raises(Corrupt):
        history(manager, "!harbour@example.org")
    with pytest.raises(Damaged):
        export_narwhal(manager, str(source.parent / "out"), names=["!harbour@example.org"])


def test_limits_and_wrong_targets_are_refused(
    source: Path, open_channels: Callable[..., ChannelManager], tmp_path: Path
) -> None:
    manager = open_channels(channels_max=3)
    with pytest.raises(Throttled):
        import_narwhal(manager, str(source), domain="example.org")
    with pytest.raises(BadInput, match="no domain"):
        import_narwhal(manager, str(source), domain="not a domain")
    with pytest.raises(NotFound, match="no directory"):
        import_narwhal(manager, str(tmp_path / "missing"), domain="example.org")
    with pytest.raises(NotFound, match="no channel of narwhal"):
        import_narwhal(manager, str(tmp_path), domain="example.org")
    with pytest.raises(BadInput, match="is a file"):
        import_narwhal(manager, str(directory_of(source, "gaps") / "metadata.bin"), domain="example.org")
    assert manager.channel_names() == []
    with pytest.raises(NotFound, match="no channel that persists"):
        export_narwhal(manager, str(tmp_path / "out"))
    with pytest.raises(Forbidden):
        import_narwhal(open_channels(domain="other.example"), str(source), domain="example.org")
    with pytest.raises(Forbidden):
        import_narwhal(open_channels(auth=False), str(source), domain="example.org")
    manager = open_channels()
    import_narwhal(manager, str(source), domain="example.org")
    with pytest.raises(BadInput, match="not an empty directory"):
        export_narwhal(manager, str(source))
    with pytest.raises(BadInput, match="written by Tidelog"):
        import_narwhal(manager, manager.store.root, domain="example.org")
    Channel(manager, "!gaps@other.example", "zoe@example.org").join(persist=True)
    with pytest.raises(BadInput, match="one channel of narwhal"):
        export_narwhal(manager, str(tmp_path / "out"))
    assert len(export_narwhal(manager, str(tmp_path / "out"), domain="other.example")) == 1
    for name, user, reason in (
        ("!a_b@example.org", "zoe@example.org", "letters, digits and /"),
        ("!ab@example.org", "zoe@host", "the domain of zoe@host"),
    ):
        Channel(manager, name, user).join(persist=True)
        with pytest.raises(BadInput, match=reason):
            export_narwhal(manager, str(tmp_path / "out2"), names=[name])
    assert not (tmp_path / "out2").exists()


def test_a_reader_may_not_import(source: Path, open_channels: Callable[..., ChannelManager], tmp_path: Path) -> None:
    open_channels()
    open_channels("other")
    with (
        tidelog.open(str(tmp_path / "data"), read_only=True) as database,
        pytest.raises(ReadOnly),
    ):
        import_narwhal(database.channels, str(source), domain="example.org")


def test_a_backup_has_everything_that_an_export_needs(open_channels: Callable[..., ChannelManager]) -> None:
    manager = open_channels()
    import_narwhal(manager, str(FOREIGN / "server"), domain="localhost")
    (name,) = manager.store.list_channels(sweep=False).live
    files = manager.store.open_files(name)
    copied = {file.path.rpartition("/")[2] for file in files}
    for file in files:
        if not isinstance(file.content, bytes):
            file.content.close()
    assert {"metadata.bin", "cursor.bin", "imported.bin", f"{1:020d}.log"} <= copied


def test_a_damaged_record_of_the_import_is_found_and_can_be_removed(
    open_channels: Callable[..., ChannelManager], tmp_path: Path
) -> None:
    manager = open_channels()
    import_narwhal(manager, str(FOREIGN / "server"), domain="localhost")
    (record,) = (tmp_path / "data" / "channels").rglob("imported.bin")
    assert list(ChannelCheck(str(tmp_path / "data"))) == []
    record.write_bytes(record.read_bytes()[:-1])
    (finding,) = ChannelCheck(str(tmp_path / "data"))
    assert (finding.damage, "only an export" in finding.reason) == (True, True)
    with pytest.raises(Corrupt, match="remove it"):
        export_narwhal(manager, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    record.unlink()
    (done,) = export_narwhal(manager, str(tmp_path / "out"))
    decoded = Postcard((tmp_path / "out" / done.directory / "metadata.bin").read_bytes()).channel()
    assert (decoded["handler"], decoded["members"]) == ("tasks", ["alice@localhost", "bob@localhost"])


# ── every byte of the metadata ────────────────────────────────────────────────────────────────────


def test_every_cut_of_metadata_is_found_and_every_change_means_what_it_says() -> None:
    """The layout has no checksum: a changed byte is found, or it is another valid channel. No two files mean one."""
    for name in CHANNELS:
        whole = (FOREIGN / name / "metadata.bin").read_bytes()
        assert encode_narwhal_channel(decode_narwhal_channel(whole, "it")) == whole
        for size in range(len(whole)):
            with pytest.raises(Corrupt):
                decode_narwhal_channel(whole[:size], "it")
        for at in range(len(whole)):
            for value in (0, 1, 2, 0x7F, 0x80, 0xFF, whole[at] ^ 1, whole[at] ^ 0x80):
                changed = whole[:at] + bytes([value]) + whole[at + 1 :]
                try:
                    decoded = decode_narwhal_channel(changed, "it")
                except Corrupt:
                    continue
                assert encode_narwhal_channel(decoded) == changed


def test_counts_are_bounded_before_anything_is_decoded() -> None:
    head = b"\x01a\x00" + bytes(5)
    for members in (b"\xff\xff\xff\xff\x0f", b"\xff\xff\xff\xff\xff\x01"):
        with pytest.raises(Corrupt):
            decode_narwhal_channel(head + bytes(3) + members, "it")
    with pytest.raises(Corrupt, match=f"more than {NAMES_MAX}"):
        decode_narwhal_channel(head + bytes(3) + b"\x81\x80\x40" + bytes(NAMES_MAX + 2), "it")
    with pytest.raises(Corrupt, match="more than"):
        decode_narwhal_channel(b"\xff\xff\x03" + b"a" * 65535, "it")


# ── crashes ───────────────────────────────────────────────────────────────────────────────────────


TASKS = next(channel for name, channel in CHANNELS.items() if name.startswith("server/"))


def check_queue(disk: SimDisk) -> tuple[str, ...]:
    """The channels that a restart finds. What is missing is imported again; then the queue is complete."""
    manager = ChannelManager(disk, "data", ManualClock())
    found = tuple(manager.channel_names())
    assert not manager.report.skipped
    import_narwhal(manager, str(FOREIGN / "server"), domain="localhost", skip_existing=True)
    queue = Channel(manager, "!tasks@localhost", "alice@localhost")
    assert len(queue) == len(TASKS["messages"]) - TASKS["popped"]
    assert queue.pop().seq == TASKS["cursor_next_seq"]
    manager.close()
    return found


def test_a_power_cut_during_an_import_leaves_whole_channels_only() -> None:
    """Method: look at what a restart may find before every disk operation. A channel that exists has everything."""
    disk = SimDisk()
    disk.make_dir("data")
    manager = ChannelManager(disk, "data", ManualClock())
    seen: dict[bytes, tuple[str, ...]] = {}

    def examine(op: int) -> None:
        for image in disk.images(random=Random(op), limit=12):
            if (key := image.disk.digest()) not in seen:
                seen[key] = check_queue(image.disk)

    disk.on_op = examine
    import_narwhal(manager, str(FOREIGN / "server"), domain="localhost")
    disk.on_op = None
    assert check_queue(disk.crash_image("none")) == ("!tasks@localhost",), "durable when it returns"
    assert {*seen.values()} == {(), ("!tasks@localhost",)}
    assert len(seen) > 20


@pytest.mark.parametrize("call", ["create", "write", "sync", "rename", "sync_dir"])
def test_a_failing_disk_imports_nothing_and_the_next_import_works(call: DiskCall) -> None:
    for at in range(1, 9):
        disk = SimDisk()
        disk.make_dir("data/channels")
        manager = ChannelManager(disk, "data", ManualClock())
        disk.fail(call, at, errno.EIO, 1, "channels")
        done = False
        with suppress(WriteFailed):  # the last of these calls may be one that the import does not make
            import_narwhal(manager, str(FOREIGN / "server"), domain="localhost")
            done = True
        assert manager.channel_names() == (["!tasks@localhost"] if done else [])
        disk.clear_faults()
        manager.close()
        check_queue(disk.reboot())


# ── the command line ──────────────────────────────────────────────────────────────────────────────


def test_the_commands_import_and_export(tmp_path: Path, capsys: pytest.CaptureFixture[str], source: Path) -> None:
    data, out = str(tmp_path / "data"), str(tmp_path / "out")
    assert main(["channel", "import", data, str(source), "--domain", "example.org"]) == 0
    assert "imported 6 channels with 607 messages" in capsys.readouterr().out
    assert main(["channel", "import", data, str(source), "--domain", "example.org"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["channel", "import", data, str(source), "--domain", "example.org", "--skip-existing", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["skipped"] == 6
    assert main(["channel", "export", data, out, "--domain", "example.org"]) == 0
    assert "6 channels with 607 messages" in capsys.readouterr().out
    assert tree(Path(out)) == tree(source)
    assert main(["channel", "export", data, out]) == 2
    assert main(["channel", "export", data, str(tmp_path / "one"), "--channel", "!gaps@example.org", "--json"]) == 0
    (channel,) = json.loads(capsys.readouterr().out)["channels"]
    assert (channel["channel"], channel["messages"]) == ("!gaps@example.org", 60)
    (directory_of(source, "gaps") / "metadata.bin").write_bytes(b"\xff")
    assert main(["channel", "import", str(tmp_path / "no"), str(source), "--domain", "example.org"]) == 1
    assert "the file ends before its handler; nothing was changed" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
