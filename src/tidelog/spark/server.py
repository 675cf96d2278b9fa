"""[shell] Topics behind a server, without a disk in common: its listing of files, ranges of them, the tail as Arrow.

driver      GET …/segments                     what lies in files; of an index only the entries where a cut may fall
executor    GET …/segments/{base}/data, idx    the bytes of a stretch, frames checked one by one
            GET …/records                      the tail, and whatever lies in no file any more
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from http.client import HTTPException
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidelog.engine import Counts
from tidelog.errors import Corrupt, NotFound, TopicNotFound, Unavailable
from tidelog.formats import deletions, idx
from tidelog.spark import ranges
from tidelog.spark.groups import ServerGroups
from tidelog.spark.options import IS_JSON
from tidelog.spark.place import Found, Inlined, Segment, Sight, Wanted, share, weight
from tidelog.spark.ranges import BLOCK
from tidelog.spark.stretches import Bools, Lost, Stretch
from tidelog.spark.wire import Away, Wire, broken, name

_PAGE: Final = 1000
_decode = msgspec.json.decode


class ServerPlace:
    timed = kinded = True

    def __init__(
        self, server: str, key: str | None, *, retry_ms: int = 0, wire: Wire | None = None, strong: bool = False
    ) -> None:
        """`strong`: plans end with the last record that survives a power cut."""
        self._consistency = {"consistency": "strong"} if strong else {}
        self._server, self._wire = server, wire or Wire(server, key, retry_ms=retry_ms)

    def refresh(self) -> None:
        """Every look asks the server."""

    def close(self) -> None:
        self._wire.close()

    @property
    def groups(self) -> ServerGroups:
        return ServerGroups(self._wire)

    # ── planning ──────────────────────────────────────────────────────────────────────────────

    def names(self) -> list[str]:
        found: list[str] = []
        query: dict[str, object] = {"page_size": _PAGE}
        while True:
            page = self._wire.get("/v0/topics", **query)
            found += [row["topic"] for row in page["topics"]]
            if not page.get("next_cursor"):
                return found
            query["cursor"] = page["next_cursor"]

    def look(self, topic: str) -> Sight | None:
        path = f"/v0/topics/{name(topic)}"
        try:
            listing = self._wire.get(f"{path}/segments", sums="false", **self._consistency)
            state = self._wire.get(path, touch="false")
        except TopicNotFound:
            return None
        head, tail = listing["head_seq"], listing["tail"]["from_seq"]
        segments = [self._segment(path, row) for row in listing["segments"]]
        return Sight(
            topic,
            listing["epoch"],
            1,
            head + 1,
            listing["earliest_seq"],
            listing["evict_floor"],
            segments,
            weight(head - tail, state["count"], state["bytes"]),
        )

    def _segment(self, path: str, row: dict[str, Any]) -> Segment:
        base, stop, size = row["base"], row["stop"], row["files"]["data"]["bytes"]
        where = f"{path}/segments/{base}"

        @lru_cache(maxsize=64)
        def block(number: int) -> NDArray[np.void]:
            lo, hi = number * BLOCK, min((number + 1) * BLOCK, stop - base)
            return idx.read(self._wire.part(f"{where}/idx", lo * idx.ENTRY_BYTES, hi * idx.ENTRY_BYTES))

        def at(seq: int) -> int:
            place = seq - base
            return size if seq >= stop else int(block(place // BLOCK)["frame_offset"][place % BLOCK])

        def dead() -> Bools | None:
            if "del" not in row["files"]:
                return None
            vector = deletions.decode(self._wire.content(f"{where}/del"))
            found = np.zeros(stop - base, bool)
            which = vector.seqs() - base
            found[which[which < len(found)]] = True
            return found

        return Segment(base, stop, size, row["sealed"], at, dead)

    def seek(self, topic: str, ts_ms: int) -> int:
        return int(self._wire.post(f"/v0/topics/{name(topic)}/seek", {"ts": ts_ms})["seq"])

    def lost(self, topic: str, first: int) -> Lost | None:
        said = self._wire.post(f"/v0/topics/{name(topic)}/diff", {"from_seq": first - 1, "limit": 1})
        return _lost(topic, said["tombstone"])

    def settle(self, topic: str, first: int, stop: int) -> tuple[Counts, tuple[Lost, ...]]:
        retry = self._wire.retry()
        while True:
            try:
                return self._settled(topic, first, stop)
            except Away as error:
                retry.again(error)

    def _settled(self, topic: str, first: int, stop: int) -> tuple[Counts, tuple[Lost, ...]]:
        for found, about in self._records(topic, first, stop, frozenset(("seq",))):
            if found is not None:
                reason = f"{topic}: {found.num_rows} records where none should be"
                raise Corrupt(self._server, pos=0, reason=reason)
            if "counts" in about:
                lost = _losses(topic, about)
                return share(Counts(**about["counts"]), lost, first, stop), lost
        raise AssertionError("a stream ends with its counts or raises")

    def dropped_at(self, topic: str, epoch: int) -> int | None:
        query: dict[str, object] = {"limit": _PAGE}
        while True:
            try:
                page = self._wire.get(f"/v0/topics/{name(topic)}/gaps", **query)
            except TopicNotFound:
                return None
            for row in page["gaps"]:
                if row["cause"] == "drop" and row["topic_id"] == epoch:
                    return int(row["last"])
            if not page.get("next_cursor"):
                return None
            query["cursor"] = page["next_cursor"]

    def inline(self, topic: str, first: int, stop: int) -> Inlined | None:  # noqa: ARG002
        return None  # executors ask the server as well as a driver can

    # ── reading ───────────────────────────────────────────────────────────────────────────────

    def read(self, stretch: Stretch, wanted: Wanted, *, verify: bool) -> Iterator[Found]:
        if stretch.file is None:
            yield from self._again(stretch, stretch.first, wanted)
            return
        where, at = f"/v0/topics/{name(stretch.topic)}/segments/{stretch.file.base}", stretch.first

        def part(kind: str, lo: int, hi: int) -> bytes:
            return self._wire.part(f"{where}/{kind}", lo, hi)

        try:
            for found, until in ranges.of_file(part, where, stretch, stretch.file, verify=verify):
                yield found
                at = until
        except NotFound:
            yield from self._again(stretch, at, wanted)

    def _again(self, stretch: Stretch, first: int, wanted: Wanted) -> Iterator[Found]:
        """Seqs from `first` to the end of the stretch as records, with what was lost or deleted since."""
        at = first
        while at < stretch.stop:
            asked = _Asked(stretch, at)
            retry = self._wire.retry()
            while asked.next_seq is None:
                try:
                    before = asked.passed
                    for found in self._asked(asked, wanted):
                        if asked.passed > before:
                            retry.progress()
                        yield found
                except Away as error:
                    retry.again(error)
            at = asked.next_seq

    def _asked(self, asked: _Asked, wanted: Wanted) -> Iterator[Found]:
        """One request for the rest of a stretch. Rows that an earlier request has handed over before it broke off are
        passed over."""
        stretch, start = asked.stretch, asked.start
        hidden = 0
        try:
            for batch, about in self._records(stretch.topic, start, stretch.stop, wanted):
                if about.get("epoch", stretch.epoch) != stretch.epoch:
                    yield asked.none_left("recreated")
                    return
                if batch is not None:
                    seqs = batch.column("seq").to_numpy()
                    known = int(np.searchsorted(seqs, asked.passed, "right"))
                    kept, dead = batch.slice(known), asked.dead
                    if dead is not None:
                        alive = ~dead[seqs - stretch.first]
                        kept = kept.filter(pa.array(alive[known:]))
                        hidden += int((~alive).sum())
                    asked.passed = max(asked.passed, int(seqs[-1])) if len(seqs) else asked.passed
                    asked.rows += kept.num_rows
                    yield Found(kept if kept.num_rows else None, Counts())
                if "counts" not in about:
                    continue
                lost, counts = _losses(stretch.topic, about), Counts(**about["counts"])
                if about["head_seq"] < stretch.stop - 1:
                    raise Unavailable(
                        f"{stretch.topic} ends at seq {about['head_seq']} on {self._server}, the query was planned "
                        f"up to {stretch.stop - 1}; nothing was written, run it again"
                    )
                next_seq = int(about["next_from_seq"]) + 1
                # Rows of a request that broke off which this one does not have: they were removed in between, and
                # are among its counts, but they were handed over.
                twice = asked.rows - (counts.rows - hidden)
                if not counts.rows and not asked.rows and next_seq >= stretch.stop:
                    clipped = tuple(_until(each, min(each.last, stretch.stop - 1)) for each in lost)
                    yield Found(None, share(counts, lost, start, stretch.stop), clipped)
                else:
                    yield Found(None, _without(counts._replace(rows=0), twice) + Counts(deleted=hidden), lost)
                asked.next_seq = next_seq
        except TopicNotFound:
            yield asked.none_left("dropped")

    def _records(
        self, topic: str, first: int, stop: int, wanted: Wanted
    ) -> Iterator[tuple[pa.RecordBatch | None, dict[str, Any]]]:
        """Batches of records, and what the stream says: before the first, and behind the last with its counts."""
        shown = {f"include_{word}": str(not wanted.isdisjoint(columns)).lower() for word, columns in _SHOWN}
        query = {"from_seq": first - 1, "to_seq": stop - 1, "format": "arrow", **shown}
        with self._wire.stream(f"/v0/topics/{name(topic)}/records", query=query) as answer:
            try:
                with pa.ipc.open_stream(answer) as reader:
                    yield None, _said(reader.schema.metadata)
                    while True:
                        batch, about = reader.read_next_batch_with_custom_metadata()
                        if about is not None:
                            answer.read()
                            yield None, _said(about)
                            return
                        yield batch, {}
            except (StopIteration, pa.ArrowInvalid, HTTPException, OSError) as error:
                raise broken(self._server, error) from error


_SHOWN: Final = (("data", ("data", IS_JSON)), ("tags", ("tag",)), ("meta", ("meta",)))


def _said(metadata: dict[bytes, bytes] | None) -> dict[str, Any]:
    found = {key.decode(): value for key, value in (metadata or {}).items()}
    return {key: value.decode() if key == "topic" else _decode(value) for key, value in found.items()}


def _lost(topic: str, gap: dict[str, Any] | None) -> Lost | None:
    if gap is None:
        return None
    return Lost(topic, gap["gap_from"], gap["gap_to"], gap["reason"], gap["earliest_seq"], gap["head_seq"])


def _losses(topic: str, about: dict[str, Any]) -> tuple[Lost, ...]:
    """All that the end of a stream says was lost."""
    gaps = about["gaps"] if "gaps" in about else [about["gap"]]  # a server of an earlier version says the first alone
    return tuple(lost for gap in gaps if (lost := _lost(topic, gap)) is not None)


def _until(lost: Lost, last: int) -> Lost:
    return Lost(lost.topic, lost.first, last, lost.cause, lost.earliest, lost.head)


class _Asked:
    """Seqs of a stretch that are being asked for, across requests that break off."""

    def __init__(self, stretch: Stretch, start: int) -> None:
        self.stretch, self.start, self.dead = stretch, start, stretch.dead()
        self.passed = start - 1  # the last seq that was looked at
        self.rows = 0  # that were handed over
        self.next_seq: int | None = None  # where the next one begins, once this is answered in full

    def none_left(self, cause: str) -> Found:
        """The rest is gone with its topic."""
        self.next_seq = self.stretch.stop
        lost = Lost(self.stretch.topic, self.passed + 1, self.stretch.stop - 1, cause, 1, 0)
        gone = self.stretch.stop - self.start - self.rows
        return Found(None, Counts(evicted=gone), (lost,) if self.passed + 1 < self.stretch.stop else ())


def _without(counts: Counts, rows: int) -> Counts:
    """Counts less so many seqs that were handed over as rows before they were removed."""
    found = counts._asdict()
    for cause in ("deleted", "evicted", "expired", "holes"):
        taken = min(found[cause], rows)
        found[cause], rows = found[cause] - taken, rows - taken
    return Counts(**found)
