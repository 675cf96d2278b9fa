"""Lost files and rotten bits of every codec's log: detected or harmless, never silent, and no seq is given twice (D13).

Method: from a log of each shape, closed or killed, every file is removed, and every set of files of one segment; and
one bit of every byte is turned over. After each, the history goes on: verify, read, append until sealed, kill, restart,
and all reads are compared with what was written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain, combinations

import pytest
from tests.crash.oracle import Oracle
from tests.crash.workloads import PATH, SMALL_RECORD_BYTES, LogHarness, compact, drop_old, open_log, survivors

from tidelog.commitlog import SegmentedLog, recovery, verify
from tidelog.commitlog.codecs import make_codec
from tidelog.commitlog.segment import SealedSegment
from tidelog.config import LogConfig
from tidelog.errors import Error
from tidelog.testing import ManualClock, SimDisk

Tell = Callable[[str, int], None]
CODECS = ("tide", "rustlog", "laminar", "narwhal")


def plain(bench: LogHarness, log: SegmentedLog) -> None:
    for _ in range(3):
        bench.append_many(log, 3, 60)
        bench.append(log, SMALL_RECORD_BYTES)
        log.seal()
    bench.append_many(log, 2, 60)
    bench.append(log, SMALL_RECORD_BYTES)


def compacted(bench: LogHarness, log: SegmentedLog) -> None:
    for _ in range(3):
        bench.append_many(log, 4, 60, keys=3)
        log.seal()
    compact(bench, log)
    bench.append(log, SMALL_RECORD_BYTES)


def truncated(bench: LogHarness, log: SegmentedLog) -> None:
    plain(bench, log)
    mark = log.lowest + 6
    bench.oracle.on_truncate_started(mark)
    log.truncate(mark)
    bench.oracle.on_truncated(mark)
    bench.append_many(log, 2, 60)
    log.seal()
    bench.append(log, SMALL_RECORD_BYTES)


def retained(bench: LogHarness, log: SegmentedLog) -> None:
    plain(bench, log)
    log.offsets.commit("group", log.lowest + 5)
    drop_old(bench, log, lambda: log.drop_below(log.lowest + 4))
    bench.append(log, SMALL_RECORD_BYTES)


SHAPES = {shape.__name__: shape for shape in (plain, compacted, truncated, retained)}


@cache
def written(codec: str, shape: str, closed: bool) -> tuple[SimDisk, dict[int, bytes], int]:
    """A disk, what can be read on it, and one past the last seq that was given."""
    bench = LogHarness(codec, SimDisk(), Oracle(), sync="batch")
    log = bench.open()
    SHAPES[shape](bench, log)
    highest = log.highest
    if closed:
        log.close()
    return bench.disk.reboot(), dict(bench.oracle.must), highest


def losses(codec: str, disk: SimDisk) -> Iterator[tuple[str, ...]]:
    """Every file by itself, and every set of files of one segment."""
    known = make_codec(codec, LogConfig())
    segments: dict[int, list[str]] = {}
    for path in disk.tree():
        found = known.parse_file_name(path.rpartition("/")[2])
        if found is None:
            yield (path,)
        else:
            segments.setdefault(found[0], []).append(path)
    for paths in segments.values():
        yield from chain.from_iterable(combinations(paths, size) for size in range(1, len(paths) + 1))


def read(held: dict[int, bytes], log: SegmentedLog) -> tuple[dict[int, bytes], bool]:
    """What can be read, and whether a reader that does not pass over damage is told."""
    found = survivors(log, skip_damage=True)
    wrong = {seq: data for seq, data in found.items() if held.get(seq) != data}
    assert not wrong, f"reads {wrong}, which was not written there"
    try:
        list(log)
    except Error:
        return found, True
    return found, False


def judge(codec: str, disk: SimDisk, held: dict[int, bytes], highest: int, *, closed: bool) -> str:
    """What came of it: refused, told or harmless. The history goes on: append until sealed, kill, restart."""
    try:
        told = not verify(PATH, codec, disk=disk).ok
        log = open_log(codec, disk, ManualClock())
    except Error:
        return "refused"
    report = log.report
    told = told or bool(report.damage or report.quarantined or report.cut_bytes)
    found, failed = read(held, log)
    told = told or failed
    missing = set(held) - set(found)
    assert told or not missing, f"seqs {sorted(missing)} are gone and nothing says so: {report.lines()}"
    now = dict(held)
    for number in range(4):
        data = b"after the loss %d" % number
        seq = log.append(data)
        # The end of a log that was killed may be cut as an unfinished write, and then its seqs are free.
        torn = not closed and report.cut_bytes and all(gone >= seq for gone in missing)
        assert seq >= highest or torn, f"seq {seq} is given again, {highest - 1} was the last"
        now[seq] = data
        found[seq] = data
        if number == 1:
            log.seal()
    disk = disk.reboot()  # killed
    for _ in range(2):
        with open_log(codec, disk, ManualClock()) as log:
            again, failed = read(now, log)
            assert again == found, f"after a restart {sorted(set(found) ^ set(again))} differ"
            if missing and not (report.quarantined or report.cut_bytes):
                assert failed, f"seqs {sorted(missing)} are not missed any more"
                assert not verify(PATH, codec, disk=disk).ok
    return "told" if told else "harmless"


def run(codec: str, cases: Iterator[tuple[str, str, bool, SimDisk]], kind: str, record_count: Tell) -> None:
    outcomes: Counter[str] = Counter()
    for where, shape, closed, disk in cases:
        _, held, highest = written(codec, shape, closed)
        try:
            outcomes[judge(codec, disk, held, highest, closed=closed)] += 1
        except Exception as wrong:
            state = "closed" if closed else "killed"
            raise AssertionError(f"{codec} {shape} {state}, {where}: {wrong}") from wrong
    for outcome, count in outcomes.items():
        record_count(f"{kind} {outcome}", count)
    assert outcomes["told"], "something is lost that matters"


def lost(codec: str, *, step: int) -> Iterator[tuple[str, str, bool, SimDisk]]:
    number = 0
    for shape in SHAPES:
        for closed in (True, False):
            base, _, _ = written(codec, shape, closed)
            for paths in losses(codec, base):
                number += 1
                if number % step:
                    continue
                disk = base.reboot()
                for path in paths:
                    disk.remove(path)
                disk.sync_dir(PATH)
                yield f"without {', '.join(paths)}", shape, closed, disk


def flipped(
    codec: str, *, step: int, bits: Callable[[int], tuple[int, ...]]
) -> Iterator[tuple[str, str, bool, SimDisk]]:
    number = 0
    for shape in SHAPES:
        for closed in (True, False):
            base, _, _ = written(codec, shape, closed)
            for path, content in base.tree().items():
                for pos in range(len(content)):
                    number += 1
                    if number % step:
                        continue
                    for bit in bits(pos):
                        disk = base.reboot()
                        disk.flip_bit(path, pos, bit)
                        yield f"{path} byte {pos} bit {bit}", shape, closed, disk


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
def test_a_lost_file_is_detected_or_harmless(codec: str, record_count: Tell) -> None:
    run(codec, lost(codec, step=3), "lost files", record_count)


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
def test_a_rotten_bit_is_detected_or_harmless(codec: str, record_count: Tell) -> None:
    run(codec, flipped(codec, step=97, bits=lambda pos: (pos * 5 % 8,)), "rotten bits", record_count)


@pytest.mark.sweep
@pytest.mark.parametrize("codec", CODECS)
def test_every_lost_file_and_set_of_files(codec: str, record_count: Tell) -> None:
    run(codec, lost(codec, step=1), "lost files", record_count)


@pytest.mark.sweep
@pytest.mark.parametrize("codec", CODECS)
def test_every_byte_with_a_rotten_bit(codec: str, record_count: Tell) -> None:
    run(codec, flipped(codec, step=1, bits=lambda pos: (pos * 5 % 8,)), "rotten bits", record_count)


def nothing_is_named(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recovery, "load_manifest", lambda *_: None)


def lost_records_are_holes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SealedSegment, "read_salvage", lambda self, _shape: self.files.codec.salvage(b"", [], 0, 0))


def seqs_are_not_reserved(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recovery, "_seq_above", lambda _files, base, _manifest: base + 1)


@pytest.mark.parametrize("bug", [nothing_is_named, lost_records_are_holes, seqs_are_not_reserved])
def test_the_sweep_of_lost_files_catches(
    bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for codec in CODECS:
        written(codec, "plain", True)
    bug(monkeypatch)
    with pytest.raises(AssertionError):
        run("rustlog", lost("rustlog", step=1), "lost files", lambda _what, _count: None)
