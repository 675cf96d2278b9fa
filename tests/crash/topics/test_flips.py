"""One bit turned over in every byte of a small data directory: told, harmless or refused; never a wrong record
(G33, G34, G42, G52, G56–G58, G65, G66, G80).

What was cut as a torn tail is told by the report, and then the topic may be an earlier one of its states.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache

import pytest
from tests.crash.topics.oracle import Row, row
from tests.crash.topics.workloads import Bench, open_engine

from tidelog.engine import Engine, Record, Topic
from tidelog.errors import Error
from tidelog.testing import ManualClock, SimDisk

Tell = Callable[[str, int], None]
Rows = dict[str, dict[int, Row]]
PARTS = 4


@cache
def small_directory() -> tuple[SimDisk, Rows, Rows]:
    """A disk with every kind of file there is, what can be read on it, and all that was ever written."""
    bench = Bench(SimDisk())
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
    bench.checkpoint()
    write("f", b"eight", {"n": 9}, tag="z")
    bench.delete("d", before_seq=2)
    write("d", b"beta", tag="y")
    bench.tick()
    truth = {name: dict(life.now.rows) for name, life in bench.oracle.lives.items()}
    return bench.disk.crash_image("all"), truth, ever


def flipped(step: int, part: int, bits: Callable[[int], range | tuple[int, ...]]) -> Iterator[tuple[str, SimDisk]]:
    base, _, _ = small_directory()
    for path, content in base.tree().items():
        for pos in range(part, len(content), step * PARTS):
            for bit in bits(pos):
                disk = base.reboot()
                disk.flip(path, pos, bit)
                yield f"{path} byte {pos} bit {bit}", disk


def clock() -> ManualClock:
    return ManualClock()


def judge(disk: SimDisk, *, read_only: bool) -> str:
    """What came of a flip: refused, told or harmless."""
    _, truth, ever = small_directory()
    try:
        log = open_engine(disk, clock(), 1, read_only=read_only)
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
        go_on(log, disk, found)
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


def go_on(log: Engine, disk: SimDisk, found: Rows) -> None:
    """Write to it where it lets us; afterwards nothing that was read is different."""
    _, _, ever = small_directory()
    written: dict[str, int] = {}
    for name in found:
        try:
            written[name] = log.topic(name, create=False).append(b"after the flip").first_seq
        except Error:
            continue
    try:
        log.close()
        again = open_engine(disk.reboot(), clock(), 1)
    except Error:
        return
    after, _ = read_all(again)
    for name, rows in after.items():
        new = written.get(name, 0)
        wrong = [seq for seq, kept in rows.items() if seq != new and ever[name].get(seq) != kept]
        assert not wrong, f"{name}: after a write and a close seqs {wrong} read {[rows[seq] for seq in wrong]}"
        back = [seq for seq in rows if seq != new and seq not in found.get(name, ())]
        assert not back, f"{name}: seqs {back} came back with the second opening"


def run(flips: Iterator[tuple[str, SimDisk]], tell: Tell, *, read_only: bool) -> None:
    outcomes: Counter[str] = Counter()
    for where, disk in flips:
        try:
            outcomes[judge(disk, read_only=read_only)] += 1
        except Exception as wrong:
            raise AssertionError(f"{where}, {'reading' if read_only else 'writing'}: {wrong}") from wrong
    for outcome, count in outcomes.items():
        tell(f"bit flips {outcome}", count)
    assert outcomes["told"] or outcomes["refused"]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("read_only", [True, False], ids=["reading", "writing"])
def test_a_flipped_bit_is_never_a_wrong_record(part: int, read_only: bool, tell: Tell) -> None:
    run(flipped(9, part, lambda pos: (pos * 5 % 8,)), tell, read_only=read_only)


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("read_only", [True, False], ids=["reading", "writing"])
def test_every_bit_of_every_byte(part: int, read_only: bool, tell: Tell) -> None:
    run(flipped(1, part, lambda _: range(8)), tell, read_only=read_only)


def test_the_small_directory_has_every_kind_of_file() -> None:
    base, truth, _ = small_directory()
    names = list(base.tree())
    for kind in (".data", ".idx", ".foot", ".del", ".log", "CURRENT", "snapshot.0001.bin", "snapshot.0002.bin"):
        assert any(name.endswith(kind) for name in names), f"no {kind} among {names}"
    assert all(truth.values())
