"""Pages for the wire say what pages for programs say: the same records, gap, cursor and counts."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from tests.implementations import both_implementations as both_implementations
from tests.implementations import implementation
from tests.unit.engine.harness import CLASSES, EngineHarness, InterposingDisk

from tidelog.engine import (
    SEQ_MAX,
    EngineConfig,
    FieldSelection,
    Topic,
    batch_encoder,
    json_pages,
)
from tidelog.engine import (
    segment as parts,
)
from tidelog.engine.topic import topic_operations
from tidelog.errors import BadInput, BatchTooLarge, TooLarge

LIMITS = EngineConfig()


def filled(world: EngineHarness, durability: str = "disk", **config: Any) -> Topic:
    topic = world.log.topic("t", durability=durability, **config)
    topic.append(
        [{"n": 1}, "two", None, [4]], tag=["a", None, "b", None], node="x", meta=[{"k": "v"}, None, None, None]
    )
    topic.append([b"\x00", 6.5], node=[None, "y"])
    return topic


def same(topic: Topic, from_seq: int = 0, limit: int = 100, node: str | None = None) -> None:
    nodes = frozenset((node.encode(),)) if node else frozenset()
    page = topic.read(from_seq, limit, node=node)
    text = topic_operations(topic).read_json(from_seq, limit, 1 << 20, nodes=nodes, show=FieldSelection(tags=True))
    assert (text.gap, text.next_from_seq, text.head_seq, text.earliest_seq, text.counts) == page[1:]
    assert text.caught_up == page.caught_up
    for found, record in zip(json.loads(b"[%b]" % text.text), page.records, strict=True):
        assert (found["$seq"], found["$ts"]) == (record.seq, record.ts_ms)
        assert (found.get("$tag"), found.get("$node"), found.get("meta")) == (record.tag, record.node, record.meta)
        assert found["data"] == ("AA==" if record.data == b"\x00" else record.data)


@pytest.mark.parametrize("durability", CLASSES)
def test_text_and_records_say_the_same(durability: str) -> None:
    world = EngineHarness()
    topic = filled(world, durability)
    topic.delete(match="a")
    for _ in range(2):
        for from_seq in range(8):
            same(topic, from_seq)
            same(topic, from_seq, limit=2, node="x")
        world.log.checkpoint()


@pytest.mark.parametrize("durability", CLASSES)
def test_with_and_without_the_kernel_pages_are_the_same_bytes(durability: str) -> None:
    said: list[list[object]] = []
    for compiled in (True, False):
        with implementation(compiled=compiled):
            topic = filled(EngineHarness(), durability)
            show = FieldSelection(tags=True)
            said.append([topic_operations(topic).read_json(at, 3, 1 << 20, show=show) for at in range(7)])
            said.append([b"".join(topic_operations(topic).scan().iter_json_lines(show))])
    assert said[:2] == said[2:]


class Short:
    """Reads pages by the fast path and by a scan, which must agree, and counts how many records came by the
    first."""

    def __init__(self, topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
        self._topic, self._patch, self._real = topic, monkeypatch, json_pages._read_fast
        self._page: Any = None

    def _looked(self, *given: Any, **more: Any) -> Any:
        self._page = self._real(*given, **more)
        return self._page

    def __call__(self, at: int, limit: int = 100, bytes_max: int = 1 << 20, **show: bool) -> int:
        self._page = None
        said = []
        for way in (self._looked, lambda *_, **__: None):
            self._patch.setattr(json_pages, "_read_fast", way)
            said.append(
                topic_operations(self._topic).read_json(
                    at, limit, bytes_max, nodes=frozenset((b"x",)), show=FieldSelection(**show)
                )
            )
        self._patch.setattr(json_pages, "_read_fast", self._real)
        assert said[0] == said[1]
        return 0 if self._page is None else int(self._page.counts.rows)

    def everywhere(self, first: int, stop: int, step: int = 1) -> int:
        """From all cursors of a range, or every third; how many pages came by the short way."""
        came = 0
        for at in range(max(first, 0), stop, step):
            for limit, bytes_max, show in (
                (2, 1 << 20, {}),
                (100, 1 << 20, {"tags": True, "meta": False}),
                (100, 3, {}),
                (100, 300, {}),
                (100, 1 << 20, {"data": False}),
            ):
                came += self(at, limit, bytes_max, **show) > 0
        return came


@pytest.mark.parametrize("durability", CLASSES)
@pytest.mark.usefixtures("both_implementations")
def test_the_short_way_to_the_newest_write_says_what_a_scan_says(
    durability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Method: after each of many different writes and deletes, from every cursor around it; and the short way is taken
    where it is meant to be."""
    topic = EngineHarness().log.topic("t", durability=durability, cap_records=1000)
    short = Short(topic, monkeypatch)
    writes: list[tuple[Any, dict[str, Any], int]] = [
        ([{"n": 1}], {}, 1),
        (["two", None, [5.5, "ü"]], {}, 3),
        ([1], {"tag": "a"}, 0),
        ([1, 2], {"tag": "a"}, 0),
        ([1], {"node": "x"}, 0),
        ([1, 2], {"node": "x"}, 0),
        ([1, 2], {"node": [None, "x"]}, 0),
        ([1], {"meta": {"k": 1}}, 0),
        ([b"\x00"], {}, 0),
        ([1, b"\x01", 2], {}, 0),
        (list(range(64)), {}, 64),
        (list(range(65)), {}, 65),
        (["x" * 70_000, "y"], {}, 2 if durability == "ephemeral" else 0),
        ([7], {}, 1),
    ]
    topic.append([0])
    for records, options, count in writes:
        before = topic.head_seq
        topic.append(records, **options)
        assert short(before) == count, records
        short.everywhere(before - 3, topic.head_seq + 2, 1 if count < 60 else 7)
    head = topic.head_seq
    topic.append([1, 2, 3])
    topic.delete(seqs=[head + 2])
    assert [short(at) for at in range(head, head + 5)] == [0, 0, 1, 0, 0], "after what was deleted"
    topic.append(list(range(999)))
    topic.append([1])
    assert topic.state().evict_floor == head + 4
    assert [short(at) for at in (head, head + 3, topic.head_seq - 1)] == [0, 100, 1]
    topic.append(list(range(50)))
    topic.read(0)  # makes the floor durable, where that is needed
    assert [short(at) for at in (head + 3, head + 53)] == [0, 100], "in one batch, and only some of it is left"


@pytest.mark.parametrize("durability", CLASSES)
@pytest.mark.usefixtures("both_implementations")
def test_the_short_way_to_records_of_batches_says_what_a_scan_says(
    durability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Method: batches of many sizes among other writes, over parts in memory and, where the class has any, segments;
    from every cursor, before and after deletes and a hole."""
    world = EngineHarness(segment_events_max=40)
    topic = world.log.topic("t", durability=durability)
    short = Short(topic, monkeypatch)
    for size in (3, 1, 2, 30, 4, 5, 40, 2, 2, 50, 7):
        topic.append([{"n": size, "text": "ü" * at} for at in range(size)])
    topic.append([1, 2], tag="a")
    topic.append([1, 2], node="x")
    topic.append([1, b"\x00"])
    for _ in range(30):
        topic.append([1, 2])
    assert short.everywhere(0, topic.head_seq + 2, 3) > 50
    assert short(4, 32) == 32, "of two batches"
    assert short(4, 32, 500) == 0, "by its bytes"
    assert not short(topic.head_seq - 60), "of thirty: a scan is quicker"
    for _ in range(2):
        world.log.checkpoint()
        short.everywhere(0, 8)  # checks what was sealed
    assert short.everywhere(1, topic.head_seq + 2, 3) > 35
    assert short(43, 36) == 36, "of segments and of memory alike"
    topic.delete(seqs=[20, 61, 90])
    short.everywhere(0, topic.head_seq + 2, 5)
    assert [short(at, 3) for at in (15, 17, 18, 19, 20, 58)] == [3, 0, 0, 0, 3, 0]


def test_a_gap_is_reported_in_both() -> None:
    topic = filled(EngineHarness(), cap_records=2)
    assert topic_operations(topic).read_json(0, 10, 1 << 20, show=FieldSelection()).gap is not None
    same(topic)


def test_memory_is_quick_and_files_are_not() -> None:
    """What `can_read_without_blocking` allows reads no file and syncs no floor."""
    world = EngineHarness()
    topic = filled(world)
    assert all(topic_operations(topic).can_read_without_blocking(seq) for seq in range(7))
    topic.seal()
    world.log.checkpoint()
    assert not topic_operations(topic).can_read_without_blocking(0)
    assert topic_operations(topic).can_read_without_blocking(6), "there is nothing to read"
    topic.append(b"in memory")
    assert topic_operations(topic).can_read_without_blocking(6)


def sealed(world: EngineHarness, segments: int = 2, **config: Any) -> Topic:
    """Segments of four records each, none of which was looked at."""
    topic = world.log.topic("t", **config)
    for number in range(segments):
        topic.append([number, "b", "c", b"\xff"], node="n")
        topic.seal()
    world.log.checkpoint()
    return topic


def look(topic: Topic, from_seq: int = 0, limit: int = 4) -> bytes:
    return topic_operations(topic).read_json(from_seq, limit, 1 << 20, show=FieldSelection()).text


def quick(topic: Topic, limit: int = 4) -> list[bool]:
    return [
        topic_operations(topic).can_read_without_blocking(from_seq, limit, 1 << 20)
        for from_seq in range(0, topic.head_seq, 4)
    ]


def test_a_segment_that_was_read_before_is_quick() -> None:
    """And reading it then uses no name on the disk."""
    disk = InterposingDisk()
    world = EngineHarness(disk)
    topic = sealed(world)
    assert quick(topic) == [False, False]
    first = look(topic)
    assert quick(topic) == [True, False]
    assert not topic_operations(topic).can_read_without_blocking(0, 5, 1 << 20), "it would reach into one that was not"
    assert not topic_operations(topic).can_read_without_blocking(0), "a reader that excludes nodes may have to scan far"
    look(topic, 4)
    assert quick(topic, 100) == [True, True]
    steps = disk.steps
    assert topic_operations(topic).can_read_without_blocking(0, 4, 1 << 20)
    assert look(topic) == first
    assert disk.steps == steps


@pytest.mark.parametrize("why", ["unmapped", "deleted", "absent", "growing", "large", "unchecked"])
def test_a_segment_that_may_block_is_refused(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = EngineHarness()
    topic = sealed(world, 1)
    look(topic)
    assert quick(topic) == [True]
    (segment,) = (part for part in topic._state.index.parts if isinstance(part, parts.Segment))
    if why == "unmapped":
        topic._state.context.mmap_cache.clear()
    elif why == "deleted":
        topic.delete(seqs=[2])
    elif why == "absent":
        monkeypatch.setattr(parts, "is_resident", lambda _: False)
    elif why == "growing":
        segment.is_sealed = False
    elif why == "large":
        monkeypatch.setattr(parts, "RESIDENT_READ_BYTES_MAX", 100)
    else:
        segment._verified_chunks.clear()
    assert quick(topic) == [False]


@pytest.mark.parametrize("why", ["", "unmapped", "deleted", "absent", "growing", "large", "unchecked"])
def test_a_segment_of_batches_is_found_without_its_index(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Method: once it was found, the index is said not to be in memory. Everything else counts as before."""
    world = EngineHarness()
    topic = world.log.topic("t")
    for size in (100, 1, 70, 2, 300):
        topic.append([{"n": at} for at in range(size)] if size > 1 else [[0], [1]])
    topic.seal()
    world.log.checkpoint()
    short = Short(topic, monkeypatch)
    assert not short(0, 100), "not checked yet"
    assert topic_operations(topic).can_read_without_blocking(0, 100, 1 << 20)
    (segment,) = (part for part in topic._state.index.parts if isinstance(part, parts.Segment))
    index_bytes = len(segment.shape().index)
    asked: list[int] = []

    def is_resident(view: memoryview) -> bool:
        asked.append(len(view))
        return why != "absent" and len(view) != index_bytes

    monkeypatch.setattr(parts, "is_resident", is_resident)
    if why == "unmapped":
        topic._state.context.mmap_cache.clear()
    elif why == "deleted":
        topic.delete(seqs=[150])
    elif why == "growing":
        segment.is_sealed = False
    elif why == "large":
        monkeypatch.setattr(parts, "RESIDENT_READ_BYTES_MAX", 100)
    elif why == "unchecked":
        segment._verified_chunks.clear()
    now = [topic_operations(topic).read_cached_json(at, 120, 1 << 20) for at in range(0, topic.head_seq, 50)]
    free = {"": range(10), "deleted": [0, *range(3, 10)]}.get(why, ())  # of what is deleted
    assert [page is not None for page in now] == [number in free for number in range(10)]
    found = [topic_operations(topic).can_read_without_blocking(at, 120, 1 << 20) for at in range(0, topic.head_seq, 50)]
    assert found == [not why] * len(found)
    if not why:
        assert index_bytes not in asked
        assert now == [
            topic_operations(topic).read_json(at, 120, 1 << 20, show=FieldSelection())
            for at in range(0, topic.head_seq, 50)
        ]
        assert not topic_operations(topic).can_read_without_blocking(0, 120, 1000), (
            "too much for it: by the index, which is not there"
        )
        assert [short(at, 120) for at in range(0, topic.head_seq, 50)] == [120] * 8 + [74, 24]
        assert short.everywhere(0, topic.head_seq + 1, 40) > 20


def test_whether_a_segment_is_in_memory_is_asked_for_many_pages_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Method: the answers to chunks and to pages are counted, and the clock is moved."""
    world = EngineHarness()
    topic = world.log.topic("t")
    for _ in range(3):
        topic.append(["x" * 1000] * 950)
    topic.seal()
    world.log.checkpoint()
    chunks: list[bool] = []
    pages_: list[bool] = []

    def is_resident(view: memoryview) -> bool:
        if len(view) < 600_000:
            pages_.append(True)
            return True
        chunks.append(warm)
        return warm

    def turn() -> int:
        return sum(topic_operations(topic).read_cached_json(at, 100, 1 << 20) is not None for at in range(0, 2850, 100))

    warm = True
    for at in range(0, 2850, 950):
        look(topic, at, 950)
        assert topic_operations(topic).can_read_without_blocking(at, 100, 1 << 20)
    monkeypatch.setattr(parts, "is_resident", is_resident)
    assert turn() == turn() == 29
    assert (len(chunks), pages_) == (3, []), "once for each, whatever reads"
    world.clock.tick(51)
    warm = False
    assert turn() == 29
    assert len(chunks) > 6, "not believed any more"
    assert len(pages_) == 29, "part of it is not there: page by page"


@pytest.mark.parametrize(
    "record", [{"data": b"x"}, {"data": 1, "tag": "t"}, {"data": 1, "node": "n"}, {"data": 1, "meta": {"k": 1}}]
)
def test_a_segment_with_other_records_is_not(record: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a scan reads needs the index."""
    world = EngineHarness()
    topic = world.log.topic("t")
    topic.append([1] * 100)
    data = record.pop("data")
    topic.append([data, data], **record)
    topic.seal()
    world.log.checkpoint()
    look(topic, 0, 102)
    assert topic_operations(topic).can_read_without_blocking(0, 100, 1 << 20)
    (segment,) = (part for part in topic._state.index.parts if isinstance(part, parts.Segment))
    index_bytes = len(segment.shape().index)
    monkeypatch.setattr(parts, "is_resident", lambda view: len(view) != index_bytes)
    assert not topic_operations(topic).can_read_without_blocking(0, 100, 1 << 20)


def test_a_floor_that_is_not_durable_is_not_quick() -> None:
    world = EngineHarness()
    topic = world.log.topic("t", cap_records=1)
    topic.append([1, 2])
    assert [topic_operations(topic).is_floor_durable, topic_operations(topic).can_read_without_blocking(0)] == [
        False,
        False,
    ]
    topic.state()
    assert topic_operations(topic).is_floor_durable
    assert topic_operations(topic).can_read_without_blocking(0)


def test_what_is_due_to_expire_is_not_quick() -> None:
    world = EngineHarness()
    topic = world.log.topic("t", ttl_ms=10)
    topic.append(1)
    seen = [topic_operations(topic).needs_expiry]
    world.clock.tick(11)
    seen += [topic_operations(topic).needs_expiry, topic_operations(topic).can_read_without_blocking(0)]
    topic.state()
    assert [*seen, topic_operations(topic).needs_expiry] == [False, True, False, False]


def test_a_scan_gives_the_same_as_lines_and_as_columns() -> None:
    world = EngineHarness(segment_events_max=3)
    topic = filled(world)
    world.log.checkpoint()
    topic.append([7, 8])
    for from_seq, to_seq, limit in ((0, None, SEQ_MAX), (1, 5, SEQ_MAX), (0, None, 3), (8, None, SEQ_MAX)):
        lines = topic_operations(topic).scan(from_seq, to_seq, limit=limit)
        texts = [json.loads(line) for piece in lines.iter_json_lines(FieldSelection()) for line in piece.splitlines()]
        columns = topic_operations(topic).scan(from_seq, to_seq, limit=limit)
        seqs = [seq for batch in columns.iter_arrow_batches() for seq in batch.column("seq").to_pylist()]
        assert [text["$seq"] for text in texts] == seqs
        assert lines.counts == columns.counts
        assert lines.counts.rows == len(seqs) == len(range(from_seq, min(to_seq or 8, 8))[:limit])
        assert sum(lines.counts) == lines.next_from_seq - from_seq
        assert isinstance(next(iter(columns.iter_arrow_batches()), pa.record_batch({})), pa.RecordBatch)


def test_texts_are_held_to_the_same_limits() -> None:
    def made(*datas: bytes, tag: str | None = None, meta: dict[str, Any] | None = None) -> batch_encoder.Batch:
        many = list(datas)
        return batch_encoder.batch_from_texts(LIMITS, many, True, [tag] * len(many), None, [meta] * len(many))

    assert made(b"1", b"2").weight == 2
    with pytest.raises(BadInput, match="at least one"):
        made()
    with pytest.raises(BatchTooLarge):
        made(*[b"1"] * 10_001)
    with pytest.raises(TooLarge):
        made(b"1" * ((1 << 20) + 1))
    assert len(made(b"1" * (1 << 20))) == 1
    with pytest.raises(BadInput, match="tag"):
        made(b"1", tag="x" * 257)
    with pytest.raises(BadInput, match="64"):
        made(b"1", meta=dict.fromkeys(map(str, range(65)), 1))


@pytest.mark.parametrize("text", [b"1e400", b'"\\ud800"', b"-1e999"])
def test_a_number_the_fast_decoder_cannot_hold_still_comes_out(text: bytes) -> None:
    world = EngineHarness()
    topic = world.log.topic("t")
    topic_operations(topic).submit(batch_encoder.batch_from_texts(LIMITS, [text], True, None, None, None)).wait()
    assert topic.read(0).records[0].data == json.loads(text)
    assert topic_operations(topic).read_json(0, 1, 100, show=FieldSelection()).text.endswith(b'"data":' + text + b"}")


@pytest.mark.parametrize("text", [b"%b", b"-%b", b'{"a":[%b]}'])
def test_an_integer_of_more_digits_than_python_converts_comes_out(text: bytes) -> None:
    """It was accepted and then reported as damage, by every read of its page."""
    world = EngineHarness()
    topic = world.log.topic("t")
    digits = b"9" * 5_000
    topic_operations(topic).submit(
        batch_encoder.batch_from_texts(LIMITS, [text % digits, b"1"], True, None, None, None)
    ).wait()
    first, second = topic.read(0).records
    assert first.data == json.loads(text % b"1e999")
    assert second.data == 1
