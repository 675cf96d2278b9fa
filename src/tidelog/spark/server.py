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
from tidelog.spark.wire import Wire, broken, name

_PAGE: Final = 1000
_decode = msgspec.json.decode


class ServerPlace:
    timed = kinded = True

    def __init__(self, server: str, key: str | None, *, wire: Wire | None = None) -> None:
        self._server, self._wire = server, wire or Wire(server, key)

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
            listing = self._wire.get(f"{path}/segments", sums="false")
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
            with self._wire.stream(f"{where}/del") as answer:
                vector = deletions.decode(answer.read())
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
        for found, about in self._records(topic, first, stop, frozenset(("seq",))):
            if found is not None:
                reason = f"{topic}: {found.num_rows} records where none should be"
                raise Corrupt(self._server, pos=0, reason=reason)
            if "counts" in about:
                lost = _losses(topic, about)
                return share(Counts(**about["counts"]), lost, first, stop), lost
        raise AssertionError("a stream ends with its counts or raises")

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
        dead, at = stretch.dead(), first
        while at < stretch.stop:
            hidden, start = 0, at
            try:
                for batch, about in self._records(stretch.topic, at, stretch.stop, wanted):
                    if about.get("epoch", stretch.epoch) != stretch.epoch:
                        yield _none_left(stretch, at, "recreated")
                        return
                    if batch is not None:
                        kept = batch
                        if dead is not None:
                            kept = batch.filter(pa.array(~dead[batch.column("seq").to_numpy() - stretch.first]))
                            hidden += batch.num_rows - kept.num_rows
                        yield Found(kept if kept.num_rows else None, Counts())
                    if "counts" not in about:
                        continue
                    lost, counts = _losses(stretch.topic, about), Counts(**about["counts"])
                    at = int(about["next_from_seq"]) + 1
                    if about["head_seq"] < stretch.stop - 1:
                        raise Unavailable(
                            f"{stretch.topic} ends at seq {about['head_seq']} on {self._server}, the query was planned "
                            f"up to {stretch.stop - 1}; nothing was written, run it again"
                        )
                    if not counts.rows and at >= stretch.stop:
                        clipped = tuple(_until(each, min(each.last, stretch.stop - 1)) for each in lost)
                        yield Found(None, share(counts, lost, start, stretch.stop), clipped)
                    else:
                        yield Found(None, counts._replace(rows=0) + Counts(deleted=hidden), lost)
            except TopicNotFound:
                yield _none_left(stretch, at, "dropped")
                return

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


def _none_left(stretch: Stretch, first: int, cause: str) -> Found:
    lost = Lost(stretch.topic, first, stretch.stop - 1, cause, 1, 0)
    return Found(None, Counts(evicted=stretch.stop - first), (lost,))
