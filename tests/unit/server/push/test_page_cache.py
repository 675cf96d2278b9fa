"""Pages are encoded once for equal requests (S3), and are never older than their request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from threading import Event
from typing import Any

import pytest
from tests.unit.server.fakes import ServerHarness, let_idle, run_scenario

from tidelog.engine import FieldSelection, Topic
from tidelog.engine.topic import topic_operations
from tidelog.errors import Corrupt, TopicNotFound
from tidelog.server.push import page_cache
from tidelog.server.push.page_cache import EncodedPage, PageCache, ReadOptions

VIEW = ReadOptions(256, 262_144, frozenset(), FieldSelection())


class Rendered:
    """Counts how often a page was made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, before: Callable[[], object] = lambda: None) -> None:
        self.count = 0
        real = page_cache.read_page

        def render(topic: Topic, from_seq: int, view: ReadOptions) -> EncodedPage:
            self.count += 1
            before()
            return real(topic, from_seq, view)

        monkeypatch.setattr(page_cache, "read_page", render)


async def body(world: ServerHarness, topic: Topic, from_seq: int = 0, view: ReadOptions = VIEW) -> bytes:
    page = await world.service.push.page_cache.get(topic, from_seq, view, world.service.run_blocking)
    return page.body


def records(text: bytes) -> list[int]:

    return [record["$seq"] for record in json.loads(b"{" + text)["records"]] if text else []


def test_equal_requests_share_one_page(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Rendered(monkeypatch)

    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a")
        topic.append([1, 2, 3])
        first = await body(world, topic)
        assert first == (
            b'"topic":"a","from_seq":0,"to_seq":3,"head_seq":3,"records":[{"$seq":1,"$ts":1700000000000,"data":1},'
            b'{"$seq":2,"$ts":1700000000000,"data":2},{"$seq":3,"$ts":1700000000000,"data":3}]}'
        )
        assert await body(world, topic) is first
        assert made.count == 1
        others = [
            await body(world, topic, 1),
            await body(world, topic, 0, VIEW._replace(limit=2)),
            await body(world, topic, 0, VIEW._replace(bytes_max=1)),
            await body(world, topic, 0, VIEW._replace(show=FieldSelection(data=False))),
            await body(world, topic, 0, VIEW._replace(nodes=frozenset((b"n",)))),
            await body(world, world.topic("b")),
        ]
        assert made.count == 1 + len(others), "each of these is another question"
        assert [records(text) for text in others] == [[2, 3], [1, 2], [1], [1, 2, 3], [1, 2, 3], []]

    run_scenario(scenario)


def test_deleted_record_is_not_returned_from_the_cache() -> None:
    """G70, contract 2.7. Method: the page with it was requested just before, and is cached."""

    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a")
        topic.append([1, 2, 3], tag=["x", "y", "x"])
        assert records(await body(world, topic)) == [1, 2, 3]
        topic.delete(match="y")
        assert records(await body(world, topic)) == [1, 3]
        topic.delete(before_seq=2)
        assert records(await body(world, topic)) == [3]
        topic.delete(seqs=[3])
        assert records(await body(world, topic)) == []

    run_scenario(scenario)


def test_write_and_delete_invalidate_a_page_with_the_same_record_count() -> None:
    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a")
        topic.append([1, 2])
        assert records(await body(world, topic)) == [1, 2]
        topic.append([3])
        topic.delete(seqs=[2])
        assert records(await body(world, topic)) == [1, 3]

    run_scenario(scenario)


def test_expired_records_are_not_returned_and_their_gap_is() -> None:
    """Contract 3.3: exact for every reader, also where nothing was written since."""

    async def scenario(world: ServerHarness) -> None:
        topic = world.topic("a", ttl_ms=1000)
        topic.append([1])
        world.clock.tick(600)
        topic.append([2])
        assert records(await body(world, topic)) == [1, 2]
        world.clock.tick(500)
        assert not topic_operations(topic).is_floor_durable, "the loss has to be made durable first, off the loop"
        page = await world.service.push.page_cache.get(topic, 0, VIEW, world.service.run_blocking)
        assert records(page.body) == [2]
        assert page.gap is not None
        assert page.gap.reason == "ttl"

    run_scenario(scenario)


def test_page_changes_when_a_topic_stops_filtering_by_node() -> None:
    async def scenario(world: ServerHarness) -> None:
        view = VIEW._replace(nodes=frozenset((b"me",)))
        topic = world.topic("a")
        topic.append([1, 2], node=["me", "you"])
        assert records(await body(world, topic, 0, view)) == [2]
        world.topic("a", dedupe_node=False)
        assert records(await body(world, topic, 0, view)) == [1, 2]

    run_scenario(scenario)


def test_recreated_topic_has_its_own_pages_and_dropped_topic_has_none() -> None:
    async def scenario(world: ServerHarness) -> None:
        old = world.topic("a")
        old.append([1])
        assert records(await body(world, old)) == [1]
        world.engine.drop("a")
        with pytest.raises(TopicNotFound):
            await body(world, old)
        new = world.topic("a")
        new.append([7])
        assert b'"data":7' in await body(world, new)

    run_scenario(scenario)


def test_cache_is_bounded_in_bytes_and_pages_and_evicts_the_oldest() -> None:
    async def scenario(world: ServerHarness) -> None:
        kept = PageCache(bytes_max=1000, pages_max=3)
        world.service.push.page_cache = kept
        topic = world.topic("a")
        topic.append(["x" * 200] * 4)
        first = await body(world, topic, 3)
        size = len(first)
        for from_seq in (2, 1):
            await body(world, topic, from_seq, VIEW._replace(limit=1))
        assert (len(kept), kept.bytes) == (3, 3 * size)
        assert await body(world, topic, 3) is first
        await body(world, topic, 0, VIEW._replace(limit=1))
        assert (len(kept), kept.bytes) == (3, 3 * size), "number"
        assert await body(world, topic, 3) is not first, "the oldest went"
        await body(world, topic, 0)
        assert kept.bytes <= 1000, "a page of its own size does not stay"
        assert len(kept) == 0

    run_scenario(scenario)


def cold(world: ServerHarness, count: int = 3) -> Topic:
    """A topic whose records lie in a sealed segment."""
    topic = world.topic("a")
    topic.append(list(range(1, count + 1)))
    topic.seal()
    world.engine.checkpoint()
    assert not topic_operations(topic).can_read_without_blocking(0)
    return topic


def test_page_from_disk_is_read_once_off_the_loop_for_all_waiters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Method: the reading thread is blocked until all readers have requested the page."""
    go = Event()
    made = Rendered(monkeypatch, lambda: go.wait(30))

    async def scenario(world: ServerHarness) -> None:
        topic = cold(world)
        requests = [asyncio.ensure_future(body(world, topic)) for _ in range(10)]
        await asyncio.sleep(0)
        requests[0].cancel()
        await asyncio.sleep(0)
        go.set()
        results = await asyncio.gather(*requests[1:])
        assert requests[0].cancelled(), "a reader that leaves does not cancel the read of the others"
        assert made.count == 1
        assert all(text is results[0] for text in results)
        assert records(results[0]) == [1, 2, 3]
        assert await body(world, topic) is results[0]

    run_scenario(scenario)


def test_delete_during_a_disk_read_is_visible_to_later_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go = Event()
    Rendered(monkeypatch, lambda: go.wait(30))

    async def scenario(world: ServerHarness) -> None:
        topic = cold(world)
        early = asyncio.ensure_future(body(world, topic))
        await asyncio.sleep(0)
        await world.service.run_blocking(lambda: topic.delete(seqs=[2]))
        late = asyncio.ensure_future(body(world, topic))
        await asyncio.sleep(0)
        go.set()
        assert records(await late) == [1, 3]
        await early
        assert records(await body(world, topic)) == [1, 3]

    run_scenario(scenario)


def test_error_of_a_shared_read_reaches_all_waiters_and_is_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged() -> None:
        raise Corrupt("a segment", pos=7, reason="planted")

    trouble: list[Any] = []

    async def scenario(world: ServerHarness) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: trouble.append(context))
        topic = cold(world)
        with monkeypatch.context() as patch:
            Rendered(patch, damaged)
            requests = [asyncio.ensure_future(body(world, topic)) for _ in range(3)]
            lonely = asyncio.ensure_future(body(world, topic, 1))
            await asyncio.sleep(0)
            lonely.cancel()
            results = await asyncio.gather(*requests, return_exceptions=True)
            assert [type(error) for error in results] == [Corrupt] * 3
            await let_idle()
        assert records(await body(world, topic)) == [1, 2, 3]

    run_scenario(scenario)
    assert not trouble, "no reader was left, and the error is not logged"


def test_peers_with_equal_frames_share_one_object_and_few_frames_are_cached() -> None:
    page = EncodedPage("a", b'"records":[]}', 1, None, 1, 1)
    made: list[bytes] = []

    def make(page: EncodedPage) -> bytes:
        made.append(page.body)
        return b"{" + page.body

    first = page.frame(b"x", make)
    assert page.frame(b"x", make) is first
    assert len(made) == 1
    for key in (b"y", b"z", b"z"):
        assert page.frame(key, make) == first
    assert len(made) == 4, "the third is made for everybody anew: what a page keeps is bounded"
