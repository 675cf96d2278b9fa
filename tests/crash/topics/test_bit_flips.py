"""One bit turned over in every byte of a small data directory: told, harmless or refused; never a wrong record
(G33, G34, G42, G52, G56–G58, G65, G66, G80).

What was cut as a torn tail is told by the report, and then the topic may be an earlier one of its states. After each
flip the history goes on: appends until segments are sealed, checkpoints, kills and closes; whatever could be read
before is read again, byte for byte, and what could not be read is never read as something else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache

import pytest
from tests.crash.topics.oracle import Row, row
from tests.crash.topics.workloads import EngineHarness, open_engine

from tidelog.engine import Engine, Record, Topic
from tidelog.engine.checkpoint import SegmentWriter
from tidelog.errors import Error
from tidelog.testing import ManualClock, SimDisk

Tell = Callable[[str, int], None]
Rows = dict[str, dict[int, Row]]
PARTS = 4


@cache
def small_directory(shards: int = 1) -> tuple[SimDisk, Rows, Rows]:
    """A disk with every kind of file there is, what can be read on it, and all that was ever written."""
    bench = EngineHarness(SimDisk(), shards=shards)
    bench.open()
    bench.create("f", durability="fsync")
    bench.create("d", durability="disk", ttl_ms=60_000)
    ever: Rows = {"f": {}, "d": {}}

    def write(name: str, *records: object, tag: str) -> None:
        bench.append(name, records, [tag] * len(records), metas=[{"k": 1}] * len(records))
        ever[name] |= bench.oracle.lives[name].now.rows

    write("f", b"one", {"n": 2}, b"three", b"four", b"five", tag="x:1")
    write("d", b"alpha", [1, 2, 3], tag="y")
    bench.delete("f", seqs=[2, 4])
    bench.checkpoint()
    write("f", b"six", b"seven", tag="x:2")
    write("d", {"deep": {"er": None}}, tag="y")
    bench.delete("f", match="x:2")
    bench.seal("d")
    write("f", b"stays in a segment that is not sealed yet", tag="s")
    bench.checkpoint()
    bench.checkpoint()
    write("f", b"eight", {"n": 9}, tag="z")
    bench.delete("d", before_seq=2)
    write("d", b"beta", tag="y")
    bench.tick()
    truth = {name: dict(life.now.rows) for name, life in bench.oracle.lives.items()}
    return bench.disk.crash_image("all"), truth, ever


def flipped(
    step: int,
    part: int,
    bits: Callable[[int], range | tuple[int, ...]],
    shards: int = 1,
    endings: tuple[str, ...] = ("",),
) -> Iterator[tuple[str, SimDisk]]:
    base, _, _ = small_directory(shards)
    for path, content in base.tree().items():
        if not path.endswith(endings):
            continue
        end = len(content.rstrip(b"\0")) + 64  # of the zeros that a WAL file is filled with, the first few
        for pos in range(part, min(len(content), end), step * PARTS):
            for bit in bits(pos):
                disk = base.reboot()
                disk.flip_bit(path, pos, bit)
                yield f"{path} byte {pos} bit {bit}", disk


def clock() -> ManualClock:
    return ManualClock()


def judge(disk: SimDisk, *, read_only: bool, shards: int = 1) -> str:
    """What came of a flip: refused, told or harmless."""
    _, truth, ever = small_directory(shards)
    try:
        log = open_engine(disk, clock(), shards, read_only=read_only)
    except Error:
        return "refused"
    told = not log.report.clean
    found, errors = read_all(log)
    told = told or errors
    assert set(found) <= set(truth), f"topics {set(found) - set(truth)} were made up"
    for name, rows in found.items():
        wrong = [seq for seq, kept in rows.items() if ever[name].get(seq) != kept]
        assert not wrong, f"{name}: seqs {wrong} read {[rows[seq] for seq in wrong]}"
    assert told or found == truth, f"records are missing or back, and nobody was told: {log.report.lines()}"
    if not read_only:
        go_on(log, disk, found, shards, told=told)
    return "told" if told else "harmless"


def read_all(log: Engine) -> tuple[Rows, bool]:
    """Every record that can be read, and whether some could not."""
    errors, found = False, {}
    for state in log.topics():
        found[state.topic], failed = read_topic(log.topic(state.topic, create=False))
        errors = errors or failed
    return found, errors


def read_topic(topic: Topic) -> tuple[dict[int, Row], bool]:
    """All at once; where that does not go, record by record around what cannot be read."""
    try:
        return rows_of(topic.read(0, 1_000).records), False
    except Error:
        pass
    rows: dict[int, Row] = {}
    cursor = 0
    while cursor < topic.head_seq:
        try:
            page = topic.read(cursor, 1)
        except Error:
            cursor += 1
            continue
        rows |= rows_of(page.records)
        cursor = max(page.next_from_seq, cursor + 1)
    return rows, True


def rows_of(records: list[Record]) -> dict[int, Row]:
    return {found.seq: row(found.ts_ms, found.data, found.tag, found.node, found.meta) for found in records}


def go_on(log: Engine, disk: SimDisk, found: Rows, shards: int, *, told: bool) -> None:
    """Write until segments are sealed, make checkpoints and restart, in turns: all that was read stays as it was, and
    nothing is made up. Where nothing was told at first, all that is written is there too."""
    _, _, ever = small_directory(shards)
    known = {name: dict(rows) for name, rows in found.items()}
    made: Rows = {name: {} for name in found}
    for turn in range(3):
        for name in found:
            for number in range(5):
                data = f"{name} {turn} {number}".encode()
                with suppress(Error):  # a topic whose figures do not read may refuse
                    done = log.topic(name, create=False).append(data)
                    assert done.first_seq not in known[name], f"{name}: seq {done.first_seq} is given again"
                    made[name][done.first_seq] = row(clock().now_us() // 1_000, data, None, None, None)
        known = {name: known[name] | made[name] for name in known}
        if turn != 1:
            log.checkpoint()
        for restarted in (False, True):
            if restarted:
                if turn == 2:
                    log.close()
                log = open_engine(disk := disk.reboot(), clock(), shards)
            _held(log, known, ever, made, f"turn {turn}, {'restarted' if restarted else 'running'}", told=told)


def _held(log: Engine, known: Rows, ever: Rows, made: Rows, when: str, *, told: bool) -> None:
    """What is read now against all that was read or written before."""
    after, errors = read_all(log)
    for name, rows in after.items():
        right = ever[name] | made[name]
        wrong = [seq for seq, kept in rows.items() if right.get(seq) != kept]
        assert not wrong, f"{name}, {when}: seqs {wrong} read {[rows[seq] for seq in wrong]}"
        back = [seq for seq in rows if seq not in known[name]]
        assert not back, f"{name}, {when}: seqs {back} came back"
        gone = [seq for seq in known[name] if seq not in rows]
        assert not gone, f"{name}, {when}: seqs {gone} were readable and are not"
    assert told or not errors, f"{when}: something does not read, and nothing was wrong before"


def run(flips: Iterator[tuple[str, SimDisk]], record_count: Tell, *, read_only: bool, shards: int = 1) -> None:
    outcomes: Counter[str] = Counter()
    for where, disk in flips:
        try:
            outcomes[judge(disk, read_only=read_only, shards=shards)] += 1
        except Exception as wrong:
            raise AssertionError(f"{where}, {'reading' if read_only else 'writing'}: {wrong}") from wrong
    for outcome, count in outcomes.items():
        record_count(f"bit flips {outcome}{'' if read_only else ', gone on from'}", count)
    assert outcomes["told"] or outcomes["refused"]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("read_only", [True, False], ids=["reading", "writing"])
def test_a_flipped_bit_is_never_a_wrong_record(part: int, read_only: bool, record_count: Tell) -> None:
    shards = 1 + part % 2
    step = 62 if read_only else 262
    run(flipped(step, part, lambda pos: (pos * 5 % 8,), shards), record_count, read_only=read_only, shards=shards)


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("read_only", [True, False], ids=["reading", "writing"])
def test_every_bit_of_every_byte(part: int, read_only: bool, shards: int, record_count: Tell) -> None:
    run(flipped(1, part, lambda _: range(8), shards), record_count, read_only=read_only, shards=shards)


@pytest.mark.slow
@pytest.mark.parametrize("bug", ["unverified footers", "an unread index"])
def test_a_seal_that_verifies_nothing_is_found(bug: str, monkeypatch: pytest.MonkeyPatch, record_count: Tell) -> None:
    """Planted: a footer is made over the bytes as they are."""
    if bug == "unverified footers":
        monkeypatch.setattr(SegmentWriter, "_find_unverified", lambda *_: None)
    else:
        monkeypatch.setattr(SegmentWriter, "_find_unverified", lambda *_: "it is not checked")
        monkeypatch.setattr(SegmentWriter, "_rebuild_index", lambda self, stop, _: b"\0" * 20 * (stop - self.base))
    unsealed = flipped(3, 1, lambda pos: (pos * 5 % 8,), endings=(".data", ".idx"))
    with pytest.raises(AssertionError):
        run(unsealed, record_count, read_only=False)


def test_the_small_directory_has_every_kind_of_file() -> None:
    base, truth, _ = small_directory()
    names = list(base.tree())
    for kind in (
        ".data",
        ".idx",
        ".foot",
        ".del",
        ".log",
        "CURRENT",
        "snapshot.0000.bin",
        "snapshot.0002.bin",
        "delta.0003.bin",
    ):
        assert any(name.endswith(kind) for name in names), f"no {kind} among {names}"
    assert all(truth.values())
