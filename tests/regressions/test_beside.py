"""A reader beside a writer sees no damage where there is none, at whatever disk operation of the other it looks.

Method: a disk that calls a hook before every operation. At each operation of the writer a reader opens, verifies and
reads the log; and at each operation of a reader the writer does all of its step at once (issue 17, 2.6).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from tidelog.commitlog import SegmentedLog, verify
from tidelog.commitlog.segment import LogFiles
from tidelog.errors import Error, OutOfRange, SeqMissing
from tidelog.testing import ManualClock, SimDisk
from tidelog.types import Record

CODECS = ("tide", "rustlog", "laminar", "narwhal")
_CALLS = frozenset(
    ("open", "stat", "names", "remove", "rename", "sync_dir", "read", "write", "map", "cut", "sync", "size")
)


class Hooked:
    """A disk, or a file of it, that calls `hook` before every operation."""

    def __init__(self, inner: Any, hook: Callable[[], None]) -> None:
        self._inner, self._hook = inner, hook

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in _CALLS:
            return found

        def call(*args: Any) -> Any:
            self._hook()
            result = found(*args)
            return Hooked(result, self._hook) if name == "open" else result

        return call


def open_log(codec: str | None, disk: Any, **settings: Any) -> SegmentedLog:
    return SegmentedLog.open("log", codec, disk=disk, clock=ManualClock(), index_every=2, **settings)


def key(record: Record) -> bytes:
    return record.data.split(b" ")[0]


def written(codec: str, disk: Any) -> tuple[SegmentedLog, dict[int, bytes]]:
    log, held = open_log(codec, disk), {}
    for number in range(3):
        for i in range(4):
            data = b"%d of segment %d" % (i % 2, number)
            held[log.append(data)] = data
        if number < 2:
            log.seal()
    return log, held


STEPS: dict[str, Callable[[SegmentedLog], object]] = {
    "truncate inside the active segment": lambda log: log.truncate(log.highest - 2),
    "truncate inside a sealed segment": lambda log: log.truncate(log.lowest + 2),
    "truncate at a segment": lambda log: log.truncate(log.lowest + 4),
    "compact": lambda log: log.compact(key),
    "drop": lambda log: log.drop_below(log.lowest + 4),
    "seal": lambda log: log.seal(),
    "expire": lambda log: log.remove_expired(0),
}


def look(codec: str, disk: Any, held: dict[int, bytes]) -> None:
    """Open, read and verify; every record that is there is right."""
    with open_log(None, disk, read_only=True) as reader:
        assert reader.codec == codec
        assert not reader.report.damage, reader.report.lines()
        assert not reader.report.cut_suspect
        found = {record.seq: record.data for record in reader}
        assert found.items() <= held.items()
    verdict = verify("log", disk=disk)
    assert verdict.ok, verdict.damage


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("codec", CODECS)
def test_a_reader_at_every_operation_of_a_writer_sees_no_damage(codec: str, step: str) -> None:
    disk, busy, looks = SimDisk(), True, 0

    def hook() -> None:
        nonlocal busy, looks
        if not busy:
            busy, looks = True, looks + 1
            look(codec, disk, held)
            busy = False

    log, held = written(codec, Hooked(disk, hook))
    log._log_state.clock.tick(10)  # type: ignore[attr-defined]
    busy = False
    STEPS[step](log)
    busy = True
    assert looks > 3
    look(codec, disk, held)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("codec", CODECS)
def test_an_open_reader_at_every_operation_of_a_writer_sees_no_damage(codec: str, step: str) -> None:
    """Method: the reader opened before the step, so what it has mapped is older than what it finds."""
    disk, busy = SimDisk(), True

    def hook() -> None:
        nonlocal busy
        if busy:
            return
        busy = True
        for seq in held:
            try:
                assert reader.read(seq).data == held[seq]
            except OutOfRange:
                assert step != "seal"
            except SeqMissing:
                assert step == "compact"
        busy = False

    log, held = written(codec, Hooked(disk, hook))
    log._log_state.clock.tick(10)  # type: ignore[attr-defined]
    reader = open_log(codec, disk, read_only=True, maps_max=1, index_cache=1)
    busy = False
    STEPS[step](log)
    hook()
    busy = True


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("codec", CODECS)
def test_a_writer_at_every_operation_of_a_reader_is_not_taken_for_damage(codec: str, step: str, every: int) -> None:
    """`make test` takes one operation in three, another one for each codec and step."""
    for operation in range((CODECS.index(codec) + list(STEPS).index(step)) % every, 400, every):
        disk, left = SimDisk(), operation
        log, held = written(codec, disk)
        log._log_state.clock.tick(10)  # type: ignore[attr-defined]

        def hook(log: SegmentedLog = log) -> None:
            nonlocal left
            left -= 1
            if left == -1:
                STEPS[step](log)

        look_loosely(codec, Hooked(disk, hook), held)
        log.close()
        if left >= 0:
            assert operation > 20
            return
    pytest.fail("the reader never came to its end")


def look_loosely(codec: str, disk: Any, held: dict[int, bytes]) -> None:
    """`look`, for a reader from under which records may be taken: that is OutOfRange, and nothing else."""
    with open_log(None, disk, read_only=True) as reader:
        assert reader.codec == codec
        assert not reader.report.damage, reader.report.lines()
        with suppress(OutOfRange):
            assert {record.seq: record.data for record in reader}.items() <= held.items()
    try:
        verdict = verify("log", disk=disk)
    except OutOfRange:
        return
    assert verdict.ok, verdict.damage


def test_the_crash_state_of_a_laminar_swap_is_not_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SimDisk()
    log, held = written("laminar", disk)
    log.compact(key)
    after = {record.seq: record.data for record in log}
    disk = SimDisk()
    log, held = written("laminar", disk)
    states = 0

    def examine(_: int) -> None:
        nonlocal states
        for image in disk.images(limit=20):
            states += 1
            assert verify("log", disk=image.disk).ok, image.label
            with open_log(None, image.disk, read_only=True) as reader:
                found = {record.seq: record.data for record in reader}
            assert after.items() <= found.items() <= held.items()

    disk.on_op = examine
    log.compact(key)
    disk.on_op = None
    assert states > 20
    monkeypatch.setattr(LogFiles, "side_read_path", LogFiles.side_path)
    disk = SimDisk()
    log, held = written("laminar", disk)
    disk.on_op = examine
    with pytest.raises((Error, AssertionError)):  # planted: a reader that takes the old index for the new store
        log.compact(key)
