"""The segmented log against a list: any order of verbs, crashes and reopenings gives what the list gives.

The model is a dict of seq to data and three numbers. It shares no code with the library. Every
crash keeps a random subset of what was not synced; the policy is `batch`, so everything acked
was synced and the model loses nothing.
"""

from __future__ import annotations

from contextlib import suppress
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tidelog.commitlog import SegmentedLog
from tidelog.errors import OutOfRange, SeqMissing, StreamBroken, UnexpectedSeq
from tidelog.testing import ManualClock, SimDisk
from tidelog.types import Record

CODECS = ("tide", "rustlog", "laminar", "narwhal")
PATH = "log"
datas = st.binary(max_size=90) | st.binary(min_size=400, max_size=700)


def key_of(record: Record) -> bytes | None:
    return key(record.data)


def key(data: bytes) -> bytes | None:
    """Few keys, so that most records are superseded some day; some records have none."""
    return b"%d" % (len(data) % 4) if len(data) % 5 else None


class LogMachine(RuleBasedStateMachine):
    codec = "tide"

    @initialize(cache=st.sampled_from([None, 0, 1]))
    def begin(self, cache: int | None) -> None:
        self.disk, self.clock, self.cache = SimDisk(), ManualClock(), cache
        self.open()
        self.held: dict[int, bytes] = {}
        self.lowest = self.next = self.log.highest

    def open(self) -> None:
        self.log = SegmentedLog.open(
            PATH,
            self.codec,
            disk=self.disk,
            clock=self.clock,
            segment_bytes_max=600,
            index_every=3,
            index_cache=self.cache,
        )

    @rule(data=datas)
    def append(self, data: bytes) -> None:
        assert self.log.append(data) == self.next
        self._took([data])

    @rule(batch=st.lists(datas, max_size=6))
    def append_many(self, batch: list[bytes]) -> None:
        assert self.log.append_many(batch) == range(self.next, self.next + len(batch))
        self._took(batch)

    @rule(batch=st.lists(st.binary(max_size=30), min_size=1, max_size=8))
    def append_many_and_seal(self, batch: list[bytes]) -> None:
        self.append_many(batch)
        self.seal()

    @rule(chunks=st.lists(st.binary(max_size=200), max_size=4))
    def append_stream(self, chunks: list[bytes]) -> None:
        assert self.log.append_stream(chunks) == self.next
        self._took([b"".join(chunks)])

    @rule(size=st.integers(2500, 4000))
    def append_stream_that_is_too_long(self, size: int) -> None:
        with pytest.raises(StreamBroken):
            self.log.append_stream([bytes(size // 2), bytes(size)])

    @rule(off=st.integers(-3, 3).filter(bool))
    def append_where_something_else_is_expected(self, off: int) -> None:
        with pytest.raises(UnexpectedSeq):
            self.log.append(b"no", expected=self.next + off)

    def _took(self, batch: list[bytes]) -> None:
        for data in batch:
            self.held[self.next] = data
            self.next += 1
        self.clock.tick(1)

    @rule()
    def seal(self) -> None:
        self.log.seal()

    @precondition(lambda self: self.next > self.lowest)
    @rule(at=st.floats(0, 0.999))
    def truncate(self, at: float) -> None:
        mark = self.lowest + int(at * (self.next - self.lowest))
        self.log.truncate(mark)
        self.held = {seq: data for seq, data in self.held.items() if seq < mark}
        self.next = mark

    @rule(keep=st.integers(0, 4000))
    def retain(self, keep: int) -> None:
        edges = [segment.start for segment in self.log.segments]
        self.log.retain(keep_bytes=keep)
        assert self.log.lowest in edges, "retention drops whole segments"
        assert len(self.log.segments) == 1 or self.log.size <= keep, "and as many as it takes"
        self._rose()

    def _rose(self) -> None:
        assert self.log.lowest >= self.lowest, "the lowest seq only rises"
        self.lowest = self.log.lowest
        self.held = {seq: data for seq, data in self.held.items() if seq >= self.lowest}

    @rule()
    def compact(self) -> None:
        edge = self.log.segments[-1].start
        newest = {key(data): seq for seq, data in sorted(self.held.items()) if seq < edge}
        self.log.compact(key_of)
        self.held = {
            seq: data for seq, data in self.held.items() if seq >= edge or key(data) is None or newest[key(data)] == seq
        }
        self._rose()

    @rule()
    def reopen(self) -> None:
        self.log.close()
        self.open()
        assert self.log.report.clean

    @rule(seed=st.integers(0, 2**32))
    def crash(self, seed: int) -> None:
        self.disk = self.disk.crash_image(Random(seed))
        self.open()
        assert not self.log.report.damage

    @rule()
    def kill(self) -> None:
        self.disk = self.disk.reboot()
        self.open()

    @rule(seq=st.integers(-2, 60))
    def read_one(self, seq: int) -> None:
        if seq in self.held:
            assert self.log.read(seq).data == self.held[seq]
        else:
            inside = self.lowest <= seq < self.next
            with pytest.raises(SeqMissing if inside else OutOfRange):
                self.log.read(seq)

    @rule(at=st.floats(0, 1), limit=st.integers(1, 5), budget=st.integers(1, 1500))
    def read_a_page(self, at: float, limit: int, budget: int) -> None:
        first = self.lowest + int(at * (self.next - self.lowest))
        page = self.log.read_range(first, limit=limit, bytes_max=budget)
        expected = [seq for seq in sorted(self.held) if seq >= first]
        got = [record.seq for record in page.records]
        assert got == expected[: len(got)]
        assert len(got) <= limit
        assert not got or sum(len(record.data) for record in page.records[1:]) <= budget
        if not got:
            assert not expected, "an empty page means the end"

    @invariant()
    def holds_what_the_list_holds(self) -> None:
        assert (self.log.lowest, self.log.highest) == (self.lowest, self.next)
        assert {record.seq: record.data for record in self.log} == self.held
        table = self.log.to_arrow()
        assert table["seq"].to_pylist() == sorted(self.held)
        assert table["data"].to_pylist() == [self.held[seq] for seq in sorted(self.held)]

    def teardown(self) -> None:
        with suppress(AttributeError):
            self.log.close()


@pytest.mark.slow
@pytest.mark.parametrize("examples", [12, pytest.param(80, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("codec", CODECS)
def test_the_log_is_a_list_that_survives(codec: str, examples: int) -> None:
    machine = type(f"{codec.title()}Machine", (LogMachine,), {"codec": codec})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
