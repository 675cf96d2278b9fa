"""Who may open a directory, and what stops an opening (G20, G30, G47, G48, G57).

Row T18 of the fault matrix, and what is outside its columns: descriptors and memory that run out, a
file system that takes no writes, a close that fails.
"""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.kit import processes
from tests.unit.engine.fault_harness import FaultHarness, expect_state, open_engine, scenarios_for, view
from tests.unit.engine.fault_matrix import cells
from tests.unit.engine.fault_outcomes import EXPECT, check_restart, check_restarts, check_usable
from tests.unit.engine.fault_rows import PATH, Scenario, seal_all

import tidelog
from tidelog.engine import manifest
from tidelog.errors import Damaged, Error, Locked, Unavailable
from tidelog.testing import DiskCall, ManualClock, SimDisk

LOCK = f"{PATH}/.tidelog.lock"


@pytest.fixture(scope="module")
def harness() -> FaultHarness:
    """An engine that was closed, all of its segments complete."""
    return FaultHarness(Scenario(prepare=seal_all))


# ── T18, the lock ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("fresh", [True, False], ids=["a new directory", "an old one"])
@pytest.mark.parametrize(("row", "outcome", "times"), [*cells("NS", only="T18"), *cells("EW", only="T18")])
def test_a_lock_that_cannot_be_taken(
    row: str, outcome: str, times: str, fresh: bool, harness: FaultHarness, request: pytest.FixtureRequest
) -> None:
    """G30: refused with an error of ours, nothing is changed, and later it works."""
    assert (row, outcome) == ("T18", "REF")
    error = errno.ENOSPC if "-NS-" in request.node.callspec.id else errno.EIO
    disk, clock = (SimDisk(), ManualClock()) if fresh else harness.new_machine()
    disk.make_dir(PATH)
    before = disk.digest()
    disk.fail("lock", error=error, times=1 if times == "once" else None)
    with pytest.raises(Error) as refused:
        harness.open(disk, clock)
    assert not isinstance(refused.value, Locked), refused.value
    assert disk.digest() == before
    disk.clear_faults()
    expect_state(view(harness.open(disk, clock), clock), [{} if fresh else harness.after], "healthy again")


@pytest.mark.parametrize(("row", "outcome"), cells("C±", only="T18"))
def test_a_crash_around_the_lock(row: str, outcome: str, harness: FaultHarness) -> None:
    """A lock is its holder's life: after a crash it is free, whether its file is there or not."""
    assert (row, outcome) == ("T18", "OK")
    disk = SimDisk(trace=True)
    images: list[SimDisk] = []
    disk.on_op = lambda _: images.extend((disk.reboot(), disk.crash_image("none"), disk.crash_image("all")))
    log = open_engine(disk, ManualClock())
    disk.on_op = None
    assert sum(words == f"create {LOCK}" for words in disk.trace) == 1
    log.topic("f").append(b"a")
    for image in images:
        again = open_engine(image, ManualClock())
        assert again.topics() == []
        again.close()
    held, clock = harness.new_machine()
    harness.open(held, clock).topic("f").append(b"x")
    for image in (held.reboot(), held.crash_image("none"), held.crash_image("all")):
        check_usable(harness, image, "the holder was killed")


@pytest.mark.parametrize(("row", "outcome"), cells("BF", only="T18"))
def test_what_is_written_in_the_lock_is_nothing(row: str, outcome: str, harness: FaultHarness) -> None:
    assert (row, outcome) == ("T18", "OK")
    for content in (b"", b"pid=1\n", b"pid=\xff", bytes(4096), b"\xff" * 10):
        disk, _ = harness.new_machine()
        disk.write_file(LOCK, content)
        assert check_restart(harness, disk, [harness.after], f"{content[:8]!r}").clean
        check_usable(harness, disk, f"{content[:8]!r}")


def test_a_second_engine_is_refused_and_changes_nothing(harness: FaultHarness) -> None:
    """G30. Readers are welcome beside the writer."""
    disk, clock = harness.new_machine()
    with harness.open(disk, clock) as log:
        before = disk.digest()
        for _ in range(2):
            with pytest.raises(Locked, match="nothing was changed"):
                harness.open(disk, clock)
        assert disk.digest() == before
        with harness.open(disk, clock, read_only=True) as reader:
            expect_state(view(reader, clock), [harness.after], "a reader beside the writer")
        assert disk.digest() == before, "a reader changed something"
        log.topic("f").append(b"goes on")
        held = view(log, clock)
    expect_state(view(harness.open(disk, clock), clock), [held], "the next writer")


HOLDER = """
import sys, tidelog
with tidelog.open(sys.argv[1]) as log:
    log.topic("f", durability="fsync").append(b"theirs")
    print("open", flush=True)
    sys.stdin.readline()
"""


def test_another_process_holds_the_lock(tmp_path: Path) -> None:
    """G30, on a real file system."""
    place = str(tmp_path / "data")
    holder = processes.Popen(
        [sys.executable, "-c", HOLDER, place], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(Locked, match="another process"):
            tidelog.open(place)
        with tidelog.open(place, read_only=True) as reader:
            assert [record.data for record in reader.topic("f", create=False).read().records] == [b"theirs"]
        holder.kill()
    with tidelog.open(place, threads=False) as log:
        assert [record.data for record in log.topic("f").read().records] == [b"theirs"]
        log.topic("f").append(b"ours")


# ── descriptors run out, the file system takes no writes ──────────────────────────────────────────

ERRNOS = [errno.EMFILE, errno.EROFS, errno.ESTALE]


@pytest.mark.parametrize("most", [3, pytest.param(100, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("error", ERRNOS, ids=errno.errorcode.get)
@pytest.mark.parametrize("times", ["once", "forever"])
@pytest.mark.parametrize("row", ["T1", "T3", "T4", "T7", "T9", "T10", "T15", "T17"])
def test_other_errors_are_treated_as_errors_on_write(row: str, times: str, error: int, most: int) -> None:
    """EMFILE, EROFS, ESTALE. Method: column EW once more, at about `most` calls, other ones for each error; opening a
    file that is there can fail, too."""
    outcome = {"T1": "RO", "T3": "RO", "T10": "RO", "T15": "RO", "T17": "REF"}.get(row, "ERR")
    for harness in scenarios_for(row, "EW")[:1]:
        calls = "create rename" if error == errno.EMFILE and row != "T1" else "write create rename"
        strikes = list(harness.failures(calls, times, error))
        step = max(len(strikes) // most, 1)
        for strike in strikes[ERRNOS.index(error) % step :: step]:
            EXPECT[outcome](harness, strike)


@pytest.mark.parametrize("error", [errno.EMFILE, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["open", "read"])
def test_a_file_that_cannot_be_opened_or_read_stops_the_opening(call: DiskCall, error: int) -> None:
    """G57: an existing directory is never taken for a fresh one, and nothing is changed."""
    harness = scenarios_for("T16", "C±")[0]
    refused = 0
    for words in ("/wal-", "/meta/", ".del", ".idx", ".data", ".foot"):
        for at in (1, 2, 3):
            disk, clock = harness.new_machine()
            before = disk.digest()
            disk.fail(call, at, error, path=words)
            log = None
            with suppress(Error):
                log = harness.open(disk, clock)
            assert log is not None or call == "open" or disk.digest() == before, f"{words} number {at}"
            refused += log is None
            disk.clear_faults()
            expect_state(view(log or harness.open(disk, clock), clock), [harness.after], f"{words} number {at}")
    assert refused


@pytest.mark.parametrize("error", [errno.EMFILE, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["open", "read"])
@pytest.mark.parametrize("suffix", [".data", ".idx", ".foot"])
def test_a_segment_that_cannot_be_opened_or_read_raises_for_its_reader(
    suffix: str, call: DiskCall, error: int, harness: FaultHarness
) -> None:
    """Raised as an error of ours, and later it reads; writers do not notice."""
    disk, clock = harness.new_machine()
    log = harness.open(disk, clock)
    topic = log.topic("other")
    disk.fail(call, error=error, times=None, path=suffix)
    for read in (topic.read, topic.to_arrow, lambda: list(topic)):
        with pytest.raises((Unavailable, Damaged)):
            read()
    assert topic.append(b"goes on").first_seq == harness.after["other"].head + 1
    disk.clear_faults()
    assert len(topic.read().records) == len(harness.after["other"].rows) + 1


def test_a_file_system_that_takes_no_writes_can_be_read(harness: FaultHarness) -> None:
    """EROFS on every call that changes something: a writer is refused, a reader is not."""
    disk, clock = harness.new_machine()
    calls: list[DiskCall] = [
        "create",
        "write",
        "cut",
        "reserve",
        "sync",
        "sync_dir",
        "rename",
        "remove",
        "mkdir",
        "lock",
    ]
    for call in calls:
        disk.fail(call, error=errno.EROFS, times=None)
    before = disk.digest()
    with pytest.raises(Error):
        harness.open(disk, clock)
    with harness.open(disk, clock, read_only=True) as reader:
        expect_state(view(reader, clock), [harness.after], "read_only")
        reader.refresh()
        expect_state(view(reader, clock), [harness.after], "read_only, refreshed")
    assert disk.digest() == before


# ── what is left after it ─────────────────────────────────────────────────────────────────────────


def test_an_opening_leaves_what_a_manifest_names_and_no_more() -> None:
    """G83, G84. Method: a checkpoint broke off, the files of a dropped topic stayed, an index is gone."""
    harness = scenarios_for("T16", "C±")[0]
    disk, clock = harness.new_machine()
    harness.open(disk, clock)
    loaded = manifest.load_newest(disk, PATH)
    named = {
        f"{PATH}/topics/{topic.id:08X}/seg-{segment.base:016d}": (segment.size, (segment.stop - segment.base) * 20)
        for topic in (*loaded.rows_before(), *loaded.manifest.topics)
        for segment in topic.segments
        if topic.name in harness.after or topic.name.startswith("_tidelog.")
    }
    found = {path: len(content) for path, content in disk.tree().items() if path.startswith(f"{PATH}/topics/")}
    for path, size in found.items():
        stem, _, suffix = path.rpartition(".")
        assert stem in named, f"{path} is named by no manifest"
        if suffix in ("data", "idx"):
            assert size == named[stem][suffix == "idx"], f"{path} has {size} bytes"
    assert {f"{stem}.{suffix}" for stem in named for suffix in ("data", "idx")} <= found.keys()
    assert all(name.endswith(".bin") for name in disk.list_dir(f"{PATH}/meta"))
    own = {f"{topic.id:08X}" for topic in loaded.manifest.topics if topic.name.startswith("_tidelog.")}
    assert set(disk.list_dir(f"{PATH}/topics")) <= own | {f"{seen.id:08X}" for seen in harness.after.values()}


# ── closing ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("call", ["cut", "sync", "write", "create", "rename", "sync_dir", "remove"])
@pytest.mark.parametrize("times", ["once", "forever"])
def test_a_close_that_fails_says_so_and_lets_go(times: str, call: DiskCall, harness: FaultHarness) -> None:
    """G20: raised as an error of ours; unlocked; what was acked is there for the next one."""
    for at in (1, 2, 3):
        disk, clock = harness.new_machine()
        log = harness.open(disk, clock)
        log.topic("f").append(b"six")
        log.topic("d").append([b"gamma", b"delta"])
        held = view(log, clock)
        disk.fail(call, at, times=1 if times == "once" else None)
        with suppress(Error):
            log.close()
        disk.clear_faults()
        check_restarts(harness, disk, [held], f"{call} {at} failed", least=harness.base)
        expect_state(view(harness.open(disk, clock), clock), [held], f"{call} {at} failed, and the next one opens it")


# ── memory runs out in recovery ───────────────────────────────────────────────────────────────────

SITES = [
    "tidelog.formats.control_frames.decode",
    "tidelog.formats.sealed_segment.decode_deletion_vector",
    "tidelog.formats.segment_index.build_entries",
    "tidelog.formats.scan.decode_records",
    "tidelog.formats.scan.scan_headers",
    "tidelog.formats.scan.scan_records",
    "tidelog.formats.small_files.unwrap_snapshot",
    "tidelog.formats.small_files.decode_msgpack",
    "tidelog.engine.topic_state.TopicIndex",
    "tidelog.engine.manifest.read_file",
    "tidelog.engine.startup.Shard",
    "tidelog.engine.startup.Writer",
    "tidelog.engine.startup.replace_file",
    "tidelog.engine.segment.map_file",
    "tidelog.wal.recovery._WalFileReader.read",
]


@pytest.mark.parametrize("site", SITES)
def test_memory_runs_out_in_recovery(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """G47, G48. Method: every call of a site that allocates fails once; the opening ends, unlocked, and the next one
    finds everything."""
    harness = scenarios_for("T16", "C±")[0]
    calls = 0
    fails_at = 0
    real: Callable[..., Any] = _resolve(site)

    def allocate(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise MemoryError(f"call {calls} of {site}")
        return real(*args, **kwargs)

    monkeypatch.setattr(site, allocate)
    harness.open(*harness.new_machine())
    assert calls, f"{site} is not called"
    for fails_at in range(1, calls + 1, max(calls // 4, 1)):
        calls = 0
        disk, clock = harness.new_machine()
        with pytest.raises((MemoryError, Error)):
            harness.open(disk, clock)
        check_restart(harness, disk.crash_image("none"), [harness.after], f"{site} {fails_at}", least=harness.base)
        expect_state(view(harness.open(disk, clock), clock), [harness.after], f"{site} {fails_at}, tried again")


def _resolve(site: str) -> Any:
    found: Any = tidelog
    for name in site.split(".")[1:]:
        found = getattr(found, name)
    return found
