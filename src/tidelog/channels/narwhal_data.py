"""Import of the channels of a narwhal data directory, and export into one.

    narwhal                                        Tidelog
    <data_dir>/<sha256 of the handler>/            <data>/channels/<sha256 of !handler@domain>/
        metadata.bin   postcard                        metadata.bin   envelope and MessagePack
        <seq>.log      ───── byte for byte ─────       <seq>.log
        <seq>.idx      derived from the log            <seq>.idx
        cursor.bin     ───── byte for byte ─────       cursor.bin
                                                       imported.bin   the original metadata, sizes of index files

Both check everything before they write: an import reads the metadata of all channels and the checksum of every
message, an export the names and numbers that narwhal accepts. Each channel then appears as a whole: its metadata is
written last, and both programs remove a directory without metadata.

narwhal has hash maps in its metadata and optional settings, and preallocates index files to a size that depends on its
configuration. `imported.bin` keeps what Tidelog does not need of that. An export of a channel that was not changed has
the bytes of the files that were imported; of a changed one, the order and the unset settings that still apply.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

import numpy as np

from tidelog.addresses import check_path
from tidelog.channels import rules
from tidelog.channels.channel_state import ChannelState
from tidelog.channels.manager import ChannelManager
from tidelog.channels.rules import ChannelLimits
from tidelog.channels.store import CURSOR_FILE, IMPORT_FILE, METADATA_FILE
from tidelog.commitlog import LogConfig, vectorized
from tidelog.commitlog.codecs import narwhal
from tidelog.commitlog.codecs.narwhal import NarwhalCodec
from tidelog.disk.durability import DISK_FULL_ERRNOS, read_file, replace_file
from tidelog.disk.interface import Disk, join
from tidelog.disk.posix import PosixDisk
from tidelog.errors import (
    AlreadyExists,
    BadInput,
    Corrupt,
    Damaged,
    DiskFull,
    Forbidden,
    NotFound,
    Throttled,
    WriteFailed,
)
from tidelog.formats.narwhal_channel import (
    Acl,
    ImportRecord,
    IndexSize,
    NarwhalChannel,
    NarwhalConfig,
    decode_import_record,
    decode_narwhal_channel,
    encode_import_record,
    encode_narwhal_channel,
    narwhal_directory_name,
)
from tidelog.formats.rows import Rows, ScanResult, ScanStop, copy_values
from tidelog.formats.small_files import (
    CHANNEL_MAGIC,
    CURSOR_BYTES,
    METADATA_BYTES_MAX,
    ChannelAcl,
    ChannelConfig,
    ChannelMeta,
    encode_cursor,
)
from tidelog.types import Buffer

_DIRECTORY_PATTERN: Final = re.compile(r"[0-9a-f]{64}")
_LOG_PATTERN: Final = re.compile(r"([0-9]{20})\.log")
_COPY_BYTES: Final = 1 << 20
_SENDERS_ROWS: Final = 1 << 16
_ACTIVE_INDEX_BYTES: Final = narwhal.index_capacity(narwhal.SEGMENT_BYTES_MAX)  # as a running server has it
# Names that narwhal accepts; those of Tidelog are wider.
_NARWHAL_HANDLER: Final = re.compile(r"[A-Za-z0-9/]{1,256}")
_NARWHAL_DOMAIN: Final = re.compile(
    r"(?:localhost|(?:(?:[A-Za-z0-9-]{1,63}\.)+[A-Za-z]{2,63}|\[[0-9A-Fa-f:]+\]|[0-9]{1,3}(?:\.[0-9]{1,3}){3})"
    r"(?::[0-9]{1,5})?)"
)


class ImportedChannel(NamedTuple):
    """One channel of an import."""

    channel: str
    messages: int
    first_seq: int | None  # None: no messages
    last_seq: int | None
    is_new: bool  # False: it existed and was skipped
    notes: tuple[str, ...]


class ExportedChannel(NamedTuple):
    """One channel of an export, and the name of its directory in narwhal's data directory."""

    channel: str
    directory: str
    messages: int
    notes: tuple[str, ...]


class _Segment(NamedTuple):
    """A message log file: the part of it that is copied, and its index."""

    first: int
    end: int
    entries: bytes | None  # of its index; None: damaged, the log derives what it can
    index_bytes: int  # of narwhal's file
    records: int
    last_seq: int


class NarwhalSource(NamedTuple):
    """One channel in narwhal's directory, completely checked."""

    directory: str
    meta: ChannelMeta
    record: ImportRecord
    segments: list[_Segment]
    cursor: bytes | None
    notes: tuple[str, ...]


# ── import ────────────────────────────────────────────────────────────────────────────────────────


def import_narwhal(
    channels: ChannelManager,
    source: str,
    *,
    domain: str,
    skip_existing: bool = False,
    accept_damage: bool = False,
    disk: Disk | None = None,
) -> list[ImportedChannel]:
    """Import every channel of a narwhal data directory, as `!handler@domain`, with its owner, members, access lists,
    settings, messages and, for a fifo channel, position.

    Everything is checked before the first channel is written. narwhal must be stopped; its directory is only read.

    Args:
        skip_existing: leave out channels that exist here, instead of AlreadyExists. Continues an interrupted import.
        accept_damage: import damaged message logs too. The damage stays damage: reading it raises Corrupt.

    Raises:
        Corrupt, UnknownLayout: a file is damaged or of another layout; nothing was changed.
        BadInput, AlreadyExists, Throttled: a name or a limit does not allow it; nothing was changed.
    """
    disk = disk or PosixDisk()
    _check_domain(channels, domain)
    found = read_channels(source, domain=domain, limits=channels.limits, accept_damage=accept_damage, disk=disk)
    return write_channels(channels, found, skip_existing=skip_existing, disk=disk)


def read_channels(
    source: str, *, domain: str, limits: ChannelLimits, accept_damage: bool = False, disk: Disk | None = None
) -> list[NarwhalSource]:
    """Read and check every channel of a narwhal data directory: the first half of an import, which writes nothing."""
    disk = disk or PosixDisk()
    if not rules.is_domain(domain):
        raise BadInput(f"{domain!r} is no domain; nothing was imported, give the domain of the narwhal server")
    with _translate_os_errors(source, "nothing was imported"):
        return [
            _read_source(disk, join(source, name), name, domain, limits, accept_damage=accept_damage)
            for name in _list_directories(disk, source)
        ]


def write_channels(
    channels: ChannelManager, found: Collection[NarwhalSource], *, skip_existing: bool = False, disk: Disk | None = None
) -> list[ImportedChannel]:
    """Write channels that were read: the second half of an import."""
    existing = [each for each in found if _exists(channels, each.meta.handler)]
    taken = {each.meta.handler for each in existing}
    sources = [each for each in found if each.meta.handler not in taken]
    if existing and not skip_existing:
        raise AlreadyExists(
            f"{existing[0].meta.handler} exists already, {len(existing)} of {len(found)} channels do; nothing was "
            "imported, skip existing ones or import into another directory"
        )
    used, limit = channels.channel_count(), channels.limits.channels_max
    if used + len(sources) > limit:
        raise Throttled("channels_max", max=limit, used=used, asked=len(sources))
    for each in sources:
        _write_channel(channels, disk or PosixDisk(), each)
    results = [_describe(each, is_new=True) for each in sources] + [_describe(each, is_new=False) for each in existing]
    return sorted(results)


def _check_domain(channels: ChannelManager, domain: str) -> None:
    if channels.limits.domain not in (None, domain):
        raise Forbidden(f"channels here are in the domain {channels.limits.domain}; nothing was imported")
    if not channels.limits.auth:
        raise Forbidden("channels persist only where users are authenticated (auth); nothing was imported")


def _list_directories(disk: Disk, source: str) -> list[str]:
    """Return the names of the channels' directories. Those without metadata are leftovers for narwhal too."""
    check_path(source)
    stat = disk.stat(source)
    if stat is None:
        raise NotFound(f"there is no directory {source}; nothing was changed, check the path")
    if not stat.is_dir:
        raise BadInput(f"{source} is a file, not a data directory of narwhal; nothing was changed")
    names = [name for name in disk.list_dir(source) if _DIRECTORY_PATTERN.fullmatch(name)]
    names = [name for name in names if disk.stat(join(source, f"{name}/{METADATA_FILE}")) is not None]
    if not names:
        raise NotFound(
            f"{source} holds no channel of narwhal (a directory of 64 hex digits with {METADATA_FILE}); nothing was "
            "changed, check the path"
        )
    return names


def _exists(channels: ChannelManager, channel: str) -> bool:
    with channels.locked(channel) as shard:
        return channel in shard.channels or rules.directory_name(channel) in channels.report.skipped


def _read_source(
    disk: Disk, directory: str, name: str, domain: str, limits: ChannelLimits, *, accept_damage: bool
) -> NarwhalSource:
    path = join(directory, METADATA_FILE)
    original = _read_bounded(disk, path, METADATA_BYTES_MAX)
    if original.startswith(CHANNEL_MAGIC):
        raise BadInput(f"{path} was written by Tidelog, not by narwhal; nothing was changed, check the path")
    decoded = decode_narwhal_channel(original, path)
    if narwhal_directory_name(decoded.handler) != name:
        raise Corrupt(
            path,
            pos=0,
            reason=f"it describes the channel {decoded.handler}, which has another directory",
            next_step="nothing was changed, restore the directory's name",
        )
    meta = _to_tidelog(decoded, domain, limits.default_config(), path)
    notes: list[str] = []
    segments = _read_segments(disk, directory, notes, accept_damage=accept_damage)
    cursor = None
    if decoded.is_fifo:
        stat = disk.stat(join(directory, CURSOR_FILE))
        if stat is not None and stat.size == CURSOR_BYTES:
            cursor = read_file(disk, join(directory, CURSOR_FILE))
        else:
            notes.append("there is no usable cursor.bin: the queue waits for its owner to clear it, as in narwhal")
    sizes = [IndexSize(segment.first, segment.index_bytes) for segment in segments]
    return NarwhalSource(directory, meta, ImportRecord(original, meta.config, sizes), segments, cursor, tuple(notes))


def _read_bounded(disk: Disk, path: str, bytes_max: int) -> bytes:
    stat = disk.stat(path)
    if stat is None or stat.is_dir:
        raise Damaged(f"{path} is missing; nothing was changed")
    if stat.size > bytes_max:
        raise Corrupt(
            path, pos=0, reason=f"{stat.size} bytes are more than {bytes_max}", next_step="nothing was changed"
        )
    return read_file(disk, path) or b""


def _read_segments(disk: Disk, directory: str, notes: list[str], *, accept_damage: bool) -> list[_Segment]:
    """Check every message of a channel and return the files to copy."""
    matches = [match for name in sorted(disk.list_dir(directory)) if (match := _LOG_PATTERN.fullmatch(name))]
    names = [match[0] for match in matches if (stat := disk.stat(join(directory, match[0]))) and stat.size]
    segments: list[_Segment] = []
    codec = NarwhalCodec(LogConfig())
    if names:
        with _mapped(disk, join(directory, names[0])) as data:
            codec.detect_layout([names[0]], lambda _: data)
    above = 0
    for name in names:
        first, path = int(name[:20]), join(directory, name)
        if first <= above:
            raise Corrupt(path, pos=0, reason=f"the segment before it reaches to seq {above}", next_step=_REPAIR)
        with _mapped(disk, path) as data:
            result = vectorized.scan_records(narwhal.LAYOUT, data, above=first - 1)
            segment = _check_segment(disk, codec, path, first, data, result, name == names[-1], notes, accept_damage)
            if segment is not None:
                segments.append(segment)
                above = segment.last_seq
            del result
    return segments


_REPAIR: Final = "nothing was changed; let narwhal repair it, or accept the damage"


def _check_segment(
    disk: Disk,
    codec: NarwhalCodec,
    path: str,
    first: int,
    data: Buffer,
    result: ScanResult,
    is_last: bool,
    notes: list[str],
    accept_damage: bool,
) -> _Segment | None:
    rows, size = result.rows, len(data)
    _check_senders(path, rows)
    stat = disk.stat(f"{path[:-4]}.idx")
    index_bytes = 0 if stat is None else stat.size
    last_seq = int(rows.seq[-1]) if len(rows) else first - 1
    if result.stop is ScanStop.END:
        return _Segment(first, size, _tidelog_index(rows, first), index_bytes, len(rows), last_seq)
    more = codec.salvage(data, (None,), first, 1 << 62).rows
    if is_last and len(more) == len(rows):
        notes.append(f"{path}: the last {size - result.end} bytes are an unfinished message and were left out")
        if not len(rows):
            return None
        return _Segment(first, result.end, _tidelog_index(rows, first), index_bytes, len(rows), last_seq)
    if not accept_damage:
        raise Corrupt(path, pos=result.end, reason=result.reason, next_step=_REPAIR)
    notes.append(f"{path}: damage at byte {result.end} ({result.reason}) was imported as it is")
    return _Segment(first, size, None, index_bytes, len(more), int(more.seq[-1]) if len(more) else first)


def _check_senders(path: str, rows: Rows) -> None:
    if rows.node is None:
        return
    for lo in range(0, len(rows), _SENDERS_ROWS):
        for sender in {*copy_values(rows.buf, rows.node.slice(lo, lo + _SENDERS_ROWS))}:
            try:
                sender.decode()
            except UnicodeDecodeError as error:
                raise Corrupt(
                    path, pos=0, reason=f"the sender {sender!r:.60} is not UTF-8", next_step=_REPAIR
                ) from error


@contextmanager
def _translate_os_errors(path: str, consequence: str) -> Iterator[None]:
    """Raise an OSError as an error of Tidelog."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL_ERRNOS:
            raise DiskFull(f"{path}: no space on the device; {consequence}, free space and retry") from error
        raise WriteFailed(f"{path}: {error}; {consequence}, check the path, its owner and the disk") from error


@contextmanager
def _mapped(disk: Disk, path: str) -> Iterator[memoryview]:
    file = disk.open(path)
    try:
        yield file.map()
    finally:
        file.close()


def _tidelog_index(rows: Rows, first: int) -> bytes:
    index, _ = narwhal.encode_index(rows.seq, rows.frame_pos, _record_ends(rows), first)
    return index


def _narwhal_index(rows: Rows, first: int) -> bytes:
    """The index as narwhal writes it: its first entry has the seq of the first message."""
    index = np.frombuffer(bytearray(_tidelog_index(rows, first)), narwhal.INDEX)
    if len(rows):
        index["relative"][0] = int(rows.seq[0]) - first
    return index.tobytes()


def _record_ends(rows: Rows) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return rows.data.pos + rows.data.size + narwhal.CRC_BYTES


def _to_tidelog(channel: NarwhalChannel, domain: str, defaults: ChannelConfig, path: str) -> ChannelMeta:
    """Return the channel as Tidelog stores it; unset settings get the defaults."""
    config = channel.config
    handler = f"!{channel.handler}@{domain}"
    try:
        rules.check_channel(handler)
        users = [*channel.members, *([] if channel.owner is None else [channel.owner])]
        for user in users:
            rules.check_user(user)
        acl = ChannelAcl(*(_to_entries(entries) for entries in (channel.join, channel.publish, channel.read)))
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from error
    if not config.persist:
        raise Corrupt(path, pos=0, reason="persist is off, and narwhal stores no such channel", next_step=_REPAIR)

    def chosen(value: int | None, default: int) -> int:
        return default if value is None else value

    settings = ChannelConfig(
        chosen(config.max_clients, defaults.max_clients),
        chosen(config.max_payload_size, defaults.max_payload_size),
        max(chosen(config.max_persist_messages, defaults.max_persist_messages), 1),
        True,
        chosen(config.message_flush_interval, 0),
        "fifo" if channel.is_fifo else "pubsub",
    )
    return ChannelMeta(handler, channel.owner, settings, acl, tuple(sorted(channel.members)))


def _to_entries(entries: Acl) -> tuple[str, ...]:
    names = [f"{user}@{domain}" for domain, users in entries for user in users]
    names += [domain for domain, users in entries if not users]
    return tuple(sorted(rules.check_entry(name) for name in names))


def _write_channel(channels: ChannelManager, disk: Disk, source: NarwhalSource) -> None:
    """Copy a channel. It exists when its metadata does; until then the next start removes its files."""
    handler, store = source.meta.handler, channels.store
    target = store.directory(rules.directory_name(handler))

    def copy_files() -> None:
        for segment in source.segments:
            name = f"{segment.first:020d}.log"
            _copy_file(disk, join(source.directory, name), store.disk, join(target, name), segment.end)
            if segment.entries is not None:
                _write_file(store.disk, join(target, f"{name[:-4]}.idx"), segment.entries)
        if source.cursor is not None:
            _write_file(store.disk, join(target, CURSOR_FILE), source.cursor)
        _write_file(store.disk, join(target, IMPORT_FILE), encode_import_record(source.record))
        store.disk.sync_dir(target)

    with channels.exclusive(handler) as shard:
        if handler in shard.channels:
            raise AlreadyExists(f"{handler} was created meanwhile; it was not imported, import it again elsewhere")
        state = channels.new_channel_state(source.meta)
        store.save(source.meta, None, before_commit=copy_files)
        channels.add_channel(shard, state)
        channels.memberships.restore(source.meta.members, handler)


def _copy_file(source_disk: Disk, source: str, target_disk: Disk, target: str, size: int) -> None:
    """Copy the first `size` bytes of a file; durable on return, but for its name."""
    reader = source_disk.open(source)
    try:
        writer = target_disk.open(target, "create")
        try:
            for pos in range(0, size, _COPY_BYTES):
                piece = reader.read(pos, min(_COPY_BYTES, size - pos))
                if len(piece) != min(_COPY_BYTES, size - pos):
                    raise Damaged(f"{source} became shorter while it was copied; stop the program that writes it")
                writer.write(pos, piece)
            writer.sync()
        finally:
            writer.close()
    finally:
        reader.close()


def _write_file(disk: Disk, path: str, content: bytes) -> None:
    file = disk.open(path, "create")
    try:
        file.write(0, content)
        file.sync()
    finally:
        file.close()


def _describe(source: NarwhalSource, *, is_new: bool) -> ImportedChannel:
    segments = source.segments
    return ImportedChannel(
        source.meta.handler,
        sum(segment.records for segment in segments),
        segments[0].first if segments else None,
        segments[-1].last_seq if segments else None,
        is_new,
        source.notes,
    )


# ── export ────────────────────────────────────────────────────────────────────────────────────────


def export_narwhal(
    channels: ChannelManager,
    target: str,
    *,
    domain: str | None = None,
    names: Collection[str] | None = None,
    disk: Disk | None = None,
) -> list[ExportedChannel]:
    """Write channels that persist into `target`, a new or empty directory, as a data directory of narwhal 0.7.

    All names and numbers are checked before anything is written. A channel appears when its metadata does; narwhal
    removes directories without. The channels here are not changed.

    Args:
        domain: only its channels. narwhal serves one domain: two channels of one handler cannot be exported together.
        names: only these channels.

    Raises:
        BadInput: narwhal would not accept a name or a number, or `target` is in use; nothing was written.
        ChannelNotFound: there is no such channel; nothing was written.
        Damaged: messages of a channel cannot be read; the channels before it are complete.
    """
    disk = disk or PosixDisk()
    chosen = list(names) if names is not None else channels.channel_names()
    metas = [meta for meta in map(channels.meta, chosen) if domain in (None, rules.domain_of(meta.handler))]
    metas = [meta for meta in metas if meta.config.persist]
    if not metas:
        raise NotFound("there is no channel that persists to export; nothing was written, check the names")
    _check_exportable(metas)
    plans = [(meta, encode_narwhal_channel(_to_narwhal(meta, _load_record(channels, meta)))) for meta in metas]
    with _translate_os_errors(target, "the export is incomplete: remove it before you try again"):
        _prepare_target(disk, target)
        return [_export_channel(channels, disk, target, meta, encoded) for meta, encoded in plans]


def _check_exportable(metas: Iterable[ChannelMeta]) -> None:
    handlers: dict[str, str] = {}
    for meta in metas:
        handler = _bare_handler(meta)
        if not _NARWHAL_HANDLER.fullmatch(handler):
            raise BadInput(f"{meta.handler}: a handler of narwhal has only letters, digits and /; nothing was written")
        if (other := handlers.setdefault(handler, meta.handler)) != meta.handler:
            raise BadInput(
                f"{other} and {meta.handler} would be one channel of narwhal; nothing was written, choose a domain"
            )
        for name in (meta.handler, *meta.members, *meta.acl.join, *meta.acl.publish, *meta.acl.read):
            if not _NARWHAL_DOMAIN.fullmatch(rules.domain_of(name)):
                raise BadInput(
                    f"{meta.handler}: narwhal does not accept the domain of {name} (a dotted name, an address or "
                    "localhost); nothing was written"
                )


def _bare_handler(meta: ChannelMeta) -> str:
    return meta.handler[1:].partition("@")[0]


def _load_record(channels: ChannelManager, meta: ChannelMeta) -> ImportRecord | None:
    path = join(channels.store.directory(rules.directory_name(meta.handler)), IMPORT_FILE)
    content = read_file(channels.store.disk, path)
    try:
        return None if content is None else decode_import_record(content, path)
    except Corrupt as error:
        step = "nothing was exported; remove it to export the channel without its original form"
        raise Corrupt(path, pos=error.pos, reason=error.reason, next_step=step) from error


def _to_narwhal(meta: ChannelMeta, record: ImportRecord | None) -> NarwhalChannel:
    """Return the channel as narwhal stores it; values that are as imported keep their form."""
    config = meta.config
    settings = NarwhalConfig(
        config.max_clients,
        config.max_payload_size,
        config.max_persist_messages,
        config.persist,
        config.message_flush_interval,
    )
    members = tuple(sorted(meta.members, key=lambda user: user.partition("@")))
    before = None
    if record is not None:
        before = decode_narwhal_channel(record.metadata, IMPORT_FILE)
        kept = {
            name: getattr(before.config, name)
            for name in NarwhalConfig._fields
            if getattr(record.config, name) == getattr(config, name)
        }
        settings = settings._replace(**kept)
        if {*members} == {*before.members}:
            members = before.members
    lists = [
        _to_domains(entries, () if before is None else original)
        for entries, original in zip(
            (meta.acl.join, meta.acl.publish, meta.acl.read),
            ((), (), ()) if before is None else (before.join, before.publish, before.read),
            strict=True,
        )
    ]
    return NarwhalChannel(
        _bare_handler(meta), meta.owner, settings, lists[0], lists[1], lists[2], members, config.type == "fifo"
    )


def _to_domains(entries: Iterable[str], original: Acl) -> Acl:
    """Group an access list by domain: first in the original order, new entries sorted after it."""
    users_by_domain: dict[str, set[str]] = {}
    for entry in entries:
        user, _, domain = entry.rpartition("@")
        users_by_domain.setdefault(domain, set()).update([user] if user else ())
    order = {domain: list(users) for domain, users in original}
    domains = [domain for domain in order if domain in users_by_domain]
    domains += sorted({*users_by_domain} - {*order})
    return tuple((domain, _in_order(users_by_domain[domain], order.get(domain, []))) for domain in domains)


def _in_order(names: set[str], original: list[str]) -> tuple[str, ...]:
    return (*(name for name in original if name in names), *sorted(names - {*original}))


def _prepare_target(disk: Disk, target: str) -> None:
    check_path(target)
    stat = disk.stat(target)
    if stat is not None and (not stat.is_dir or disk.list_dir(target)):
        raise BadInput(f"{target} exists and is not an empty directory; nothing was written, choose another")
    disk.make_dir(target)


def _export_channel(
    channels: ChannelManager, disk: Disk, target: str, meta: ChannelMeta, encoded: bytes
) -> ExportedChannel:
    name = narwhal_directory_name(_bare_handler(meta))
    directory = join(target, name)
    disk.make_dir(directory)
    with channels.exclusive(meta.handler):
        state = channels.get_idle_channel(meta.handler)
        sizes = {size.first: size.bytes for size in (_load_record(channels, meta) or _NO_RECORD).indexes}
        messages = _export_messages(channels, state, disk, directory, sizes)
        notes = _export_cursor(channels, state, disk, directory, messages)
    disk.sync_dir(directory)
    replace_file(disk, join(directory, METADATA_FILE), encoded)
    disk.sync_dir(target)
    return ExportedChannel(meta.handler, name, messages, notes)


_NO_RECORD: Final = ImportRecord(b"", ChannelConfig(0, 0, 0, False, 0, "pubsub"), [])


def _export_messages(
    channels: ChannelManager, state: ChannelState, disk: Disk, directory: str, sizes: dict[int, int]
) -> int:
    """Copy the message log, segment by segment; return the number of messages. The channel's lock is held."""
    source = channels.store.directory(rules.directory_name(state.handler))
    log = state.message_log()  # recovers after a crash
    if log.damage:
        raise Damaged(f"{state.handler}: {log.damage[0]}; it was not exported, `tidelog check` shows all of it")
    if not log.is_synced:
        log.sync()
    names = [name for name in sorted(channels.store.disk.list_dir(source)) if _LOG_PATTERN.fullmatch(name)]
    messages = 0
    for name in names:
        first, path = int(name[:20]), join(source, name)
        stat = channels.store.disk.stat(path)
        if stat is None or not stat.size:
            continue
        with _mapped(channels.store.disk, path) as data:
            result = vectorized.scan_records(narwhal.LAYOUT, data, above=first - 1)
            index, count, end = _narwhal_index(result.rows, first), len(result.rows), result.end
            del result
        is_active = name == names[-1]
        prealloc = max(sizes.get(first, _ACTIVE_INDEX_BYTES) - len(index), 0) if is_active else 0
        _copy_file(channels.store.disk, path, disk, join(directory, name), end)
        _write_file(disk, join(directory, f"{name[:-4]}.idx"), index + bytes(prealloc))
        messages += count
    return messages


def _export_cursor(
    channels: ChannelManager, state: ChannelState, disk: Disk, directory: str, messages: int
) -> tuple[str, ...]:
    if state.meta.config.type != "fifo":
        return ()
    path = join(channels.store.directory(rules.directory_name(state.handler)), CURSOR_FILE)
    content = read_file(channels.store.disk, path)
    if content is None:
        return ("there is no cursor.bin: the queue waits for its owner to clear it",)
    if not messages:
        # narwhal removes empty files and starts at 1; a higher cursor would contradict that.
        _write_file(disk, join(directory, CURSOR_FILE), encode_cursor(1))
        return ("the queue is empty: its numbers start at 1 again",)
    _write_file(disk, join(directory, CURSOR_FILE), content)
    return ()
