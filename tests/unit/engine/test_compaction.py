"""Compaction: which records go, which stay, and what readers, the gap log and the table show of it."""

from __future__ import annotations

from contextlib import suppress
from threading import Thread
from typing import Any

import pytest
from tests.unit.engine.harness import CLASSES, LOGGED, RESTARTS, TINY, EngineHarness, Restart

from tidelog.engine import Engine, Topic, compaction
from tidelog.engine.compaction import Compactor
from tidelog.engine.config import TopicConfig
from tidelog.errors import BadInput, Corrupt, ReadOnly
from tidelog.testing import DiskCall

DAY_MS = 86_400_000


def live(topic: Topic) -> list[int]:
    return [record.seq for record in topic.read(0, 10_000).records]


def table(topic: Topic) -> dict[str, int]:
    return {row.key: row.record.seq for row in topic.latest()}


def keyed(log: Engine, name: str = "t", **config: Any) -> Topic:
    return log.topic(name, **{"compaction": "/id", "durability": "fsync", **config})


def put(topic: Topic, *keys: object) -> None:
    for key in keys:
        topic.append({"id": key, "n": topic.head_seq})


@pytest.mark.parametrize("durability", CLASSES)
def test_only_the_newest_record_of_each_key_stays(durability: str) -> None:
    world = EngineHarness(**TINY)
    topic = keyed(world.log, durability=durability)
    put(topic, "a", "b", "a", "c", "a")
    topic.append(["no key", 5])
    times = {record.seq: record.ts_ms for record in topic.read(0, 100).records}
    done = topic.compact()
    assert (done.records, done.tombstones, done.compacted_to) == (2, 0, 7)
    assert live(topic) == [2, 4, 5, 6, 7]
    assert {record.seq: record.ts_ms for record in topic.read(0, 100).records}.items() <= times.items()
    assert topic.read(0, 100).gap is None, "what compaction removes is no loss"
    (row,) = topic.gaps()
    assert (row.cause, row.first, row.last, row.records, row.bytes) == ("compaction", 1, 3, 2, done.bytes)
    assert topic.compact() == (0, 0, 0, 7)


@pytest.mark.parametrize("how", RESTARTS)
@pytest.mark.parametrize("durability", LOGGED)
def test_progress_and_removals_survive_a_restart(how: Restart, durability: str) -> None:
    world = EngineHarness(**TINY)
    topic = keyed(world.log, durability=durability)
    put(topic, *"abcabcab")
    topic.compact()
    world.log.checkpoint()
    put(topic, "a")
    topic.compact()
    world.log.tick()
    kept = live(topic)
    topic = world.restart(how).topic("t", create=False)
    assert live(topic) == kept == [6, 8, 9]
    read_before = world.log.context.compaction_stats.read_bytes
    world.clock.tick(20_000)
    world.log.tick()
    assert world.log.context.compaction_stats.read_bytes == read_before, "nothing is new, so nothing is read"
    assert table(topic) == {"c": 6, "b": 8, "a": 9}


def test_a_later_run_reads_only_what_is_new() -> None:
    world = EngineHarness(**TINY)
    topic = keyed(world.log)
    put(topic, *map(str, range(40)))
    topic.compact()
    stats = world.log.context.compaction_stats
    before = stats.read_bytes
    topic.append({"id": "3", "n": 0})
    topic.compact()
    assert 0 < stats.read_bytes - before < 50


def test_values_that_are_keys() -> None:
    world = EngineHarness()
    topic = keyed(world.log, compaction="/user/id")
    values: list[Any] = ["x", 7, "7", True, 1.5, "é", 10**20]
    for value in values:
        topic.append({"user": {"id": value}})
    without: list[Any] = [
        *(None, 5, [1], {"user": 3}, {"user": {}}, {"user": {"id": None}}, {"user": {"id": ""}}),
        *({"user": {"id": [1]}}, {"user": {"id": {"a": 1}}}, b'{"user":{"id":"x"}}'),
    ]
    for value in without:
        topic.append(value)
    assert table(topic) == {"x": 1, "7": 3, "true": 4, "1.5": 5, "é": 6, str(10**20): 7}
    topic.compact()
    assert topic.count == len(values) + len(without) - 1, "7 and '7' are one key; a record without a key stays"


@pytest.mark.parametrize(
    ("pointer", "data"),
    [
        ("/a~1b/m~0n", {"a/b": {"m~n": "k"}}),
        ("/list/1", {"list": ["x", "k"]}),
        ("/0", ["k"]),
        ("/0", {"0": "k"}),
        ("/a//b", {"a": {"": {"b": "k"}}}),
        ("/x", {"x": "k", "y": "\n"}),
        ('/say "a"', {'say "a"': "k"}),
        ("/back\\slash/tab\t", {"back\\slash": {"tab\t": "k"}}),
    ],
)
def test_a_json_pointer_leads_to_the_key(pointer: str, data: object) -> None:
    world = EngineHarness()
    topic = keyed(world.log, compaction=pointer)
    topic.append([data, {"other": 1}])
    assert table(topic) == {"k": 1}


@pytest.mark.parametrize(
    "bad", ["latest", "user/id", "/a~2", "/a~", "", 5, ["/a"], "/" * 33, "/" + "x" * 2000, "/\ud800"]
)
def test_a_bad_rule_for_keys_is_refused(bad: object) -> None:
    with pytest.raises(BadInput, match="compaction is"):
        TopicConfig.make({"compaction": bad})


def test_a_queue_has_no_compaction() -> None:
    with pytest.raises(BadInput, match="a queue has no compaction"):
        TopicConfig.make({"type": "queue", "compaction": "latest_by_tag"})


def test_a_config_names_compaction_only_where_it_is_set() -> None:
    assert b"compaction" not in TopicConfig().to_json()
    config = TopicConfig.make({"compaction": "/a", "tombstone_delay_ms": 5})
    assert config.to_json().endswith(b'"compaction":"/a","tombstone_delay_ms":5}')
    assert TopicConfig.from_json(config.to_json()) == config


def test_a_topic_without_compaction_has_no_table() -> None:
    topic = EngineHarness().log.topic("t")
    for call in (topic.latest, topic.compact, lambda: topic.latest("a")):
        with pytest.raises(BadInput, match="has no compaction"):
            call()


@pytest.mark.parametrize("data", [None, b""])
def test_a_tombstone_removes_its_key_and_then_itself(data: object) -> None:
    world = EngineHarness(**TINY)
    topic = keyed(world.log, compaction="latest_by_tag", tombstone_delay_ms=1_000)
    topic.append(["v1", "v2"], tag="k")
    topic.append("other", tag="o")
    topic.append(data, tag="k")
    assert table(topic) == {"o": 3}
    assert topic.compact().records == 2
    assert live(topic) == [3, 4]
    world.restart("kill")
    topic = world.log.topic("t", create=False)
    world.clock.tick(999)
    world.log.tick()
    assert live(topic) == [3, 4], "a millisecond is missing"
    world.clock.tick(1)
    assert topic.compact()[:3] == (1, 4 if data is None else 0, 1)
    assert live(topic) == [3]
    assert table(topic) == {"o": 3}


def test_the_background_removes_a_tombstone_that_is_due_after_a_restart() -> None:
    world = EngineHarness(**TINY)
    topic = keyed(world.log, tombstone_delay_ms=30_000)
    topic.append({"id": "a"}, meta={"tombstone": True})
    topic.compact()
    world.restart("reopen")
    world.clock.tick(31_000)
    world.log.tick()
    assert live(world.log.topic("t", create=False)) == []
    assert world.log.context.compaction_stats.tombstones == 1


def test_a_tombstone_stays_as_long_as_a_group_holds_what_it_replaced() -> None:
    world = EngineHarness(**TINY)
    topic = keyed(world.log, tombstone_delay_ms=10)
    group = topic.group("g")
    group.hold(1 << 20)
    put(topic, "a")
    topic.append({"id": "a"}, meta={"tombstone": True})
    world.clock.tick(1_000)
    assert topic.compact().records == 0
    assert table(topic) == {}
    group.commit(1)
    assert topic.compact()[:1] == (1,)
    assert live(topic) == [2]
    group.commit(2)
    assert topic.compact().tombstones == 1
    assert live(topic) == []


def test_a_group_without_a_hold_does_not_stop_compaction() -> None:
    topic = keyed(EngineHarness().log)
    topic.group("g").commit(0)
    put(topic, "a", "a")
    assert topic.compact().records == 1


def test_records_that_a_router_has_not_forwarded_stay() -> None:
    world = EngineHarness(**TINY)
    topic = keyed(world.log, "source")
    put(topic, "a")
    world.log.router("r", "source", "dest")
    put(topic, "a", "a")
    assert topic.compact().records == 1, "the first was written before the router"
    world.log.checkpoint()
    assert topic.compact().records == 1
    assert [record.data["n"] for record in world.log.topic("dest").read(0, 10).records] == [1, 2]


def test_a_delete_of_the_newest_record_deletes_the_key() -> None:
    for compacted in (False, True):
        world = EngineHarness(**TINY)
        topic = keyed(world.log)
        put(topic, *"abab")
        if compacted:
            topic.compact()
        assert topic.delete(seqs=[4]).deleted == (1 if compacted else 2)
        assert table(topic) == {"a": 3}
        assert topic.latest("b") is None
        world.restart("kill")
        topic = world.log.topic("t", create=False)
        assert table(topic) == {"a": 3}, "an older value never comes back"
        topic.compact()
        assert live(topic) == [3]


def test_a_delete_of_an_older_record_leaves_the_key() -> None:
    topic = keyed(EngineHarness().log)
    put(topic, *"aab")
    topic.delete(seqs=[1])
    assert table(topic) == {"a": 2, "b": 3}


def test_a_delete_by_tag_takes_the_older_records_of_a_key_with_it() -> None:
    topic = keyed(EngineHarness().log)
    topic.append({"id": "a"}, tag="old")
    topic.append({"id": "a"}, tag="new")
    topic.append({"id": "b"}, tag="old")
    topic.delete(match="new")
    assert table(topic) == {"b": 3}
    assert live(topic) == [3]


def test_a_record_that_was_deleted_before_compaction_was_configured_does_not_count() -> None:
    world = EngineHarness(**TINY)
    topic = world.log.topic("t")
    for _ in range(4):
        put(topic, "a")
    topic.seal()
    world.log.checkpoint()
    topic.delete(seqs=[4])
    keyed(world.log)
    assert table(topic) == {"a": 3}
    topic.compact()
    assert live(topic) == [3]


def test_another_rule_for_keys_starts_again() -> None:
    world = EngineHarness(**TINY)
    topic = world.log.topic("t", compaction="/id", durability="fsync")
    for n in range(6):
        topic.append({"id": n, "group": n % 2})
    assert topic.compact().records == 0
    world.log.checkpoint()
    world.log.topic("t", compaction="/group")
    assert table(topic) == {"0": 5, "1": 6}
    assert topic.compact().records == 4
    world.log.topic("t", compaction=None)
    with pytest.raises(BadInput):
        topic.latest()


@pytest.mark.parametrize("harm", ["remove", "flip", "truncate", "foreign"])
def test_a_key_file_that_is_lost_or_damaged_is_built_again(harm: str) -> None:
    world = EngineHarness(**TINY)
    topic = keyed(world.log)
    put(topic, *"abcdabce")
    topic.seal()
    world.log.checkpoint()
    expected = table(topic)
    world.log.close()
    files = world.files(".key")
    assert len(files) == 2
    content = world.disk.tree()[files[0]]
    if harm == "remove":
        world.disk.remove(files[0])
    else:
        harmed = {
            "flip": content[:70] + bytes([content[70] ^ 1]) + content[71:],
            "truncate": content[:-3],
            "foreign": world.disk.tree()[files[1]],
        }[harm]
        file = world.disk.open(files[0], "write")
        file.truncate(0)
        file.write(0, harmed)
        file.sync()
        file.close()
    world.log = world.open(world.disk)
    topic = world.log.topic("t", create=False)
    assert table(topic) == expected
    assert world.log.context.key_tables.rebuilt_count == 1
    assert world.disk.tree()[files[0]] == content, "it is written again"
    assert world.log.health().ok


@pytest.mark.parametrize("call", ["create", "write", "sync", "rename", None])
def test_key_files_that_cannot_be_written_again_do_not_stop_a_compaction(call: DiskCall | None) -> None:
    """All key files are lost, and the first one that is built again meets a fault."""
    world = EngineHarness(**TINY)
    topic = keyed(world.log)
    for _ in range(4):
        put(topic, *"abcd")
    topic.seal()
    world.log.checkpoint()
    world.log.close()
    before = {path: world.disk.tree()[path] for path in world.files(".key")}
    assert len(before) == 4
    for path in before:
        world.disk.remove(path)
    world.log = world.open(world.disk)
    topic = world.log.topic("t", create=False)
    if call is not None:
        world.disk.fail(call, path=f"{min(before)}.tmp", times=1)
    assert topic.compact().records == 12
    lost = {min(before)} if call is not None else set()
    assert {path: world.disk.tree()[path] for path in world.files(".key")} == {
        path: content for path, content in before.items() if path not in lost
    }
    assert world.files(".tmp") == []
    assert table(topic) == {"a": 13, "b": 14, "c": 15, "d": 16}
    world.restart("crash")
    assert table(world.log.topic("t", create=False)) == {"a": 13, "b": 14, "c": 15, "d": 16}


def test_steps_of_a_compaction_share_a_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "_FRAME_RECORDS", 10)
    world = EngineHarness()
    topic = keyed(world.log)
    put(topic, *("k" * 61))
    shard = world.log.shards[0]
    before = shard.stats.fsyncs
    assert topic.compact().records == 60
    assert shard.stats.fsyncs - before <= 3, "six frames, and how far it is"


def test_a_tombstone_is_logged_after_the_records_that_it_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames with a due tombstone wait for each other: one that fails ends the run before the next."""
    monkeypatch.setattr(compaction, "_FRAME_RECORDS", 2)
    world = EngineHarness()
    topic = keyed(world.log, tombstone_delay_ms=1)
    put(topic, *"aaaaaa")
    topic.append({"id": "a"}, meta={"tombstone": True})
    world.clock.tick(10)
    pending: list[int] = []
    wait = compaction._Run._wait_for_logged

    def count(run: compaction._Run) -> None:
        pending.append(len(run._logged))
        wait(run)

    monkeypatch.setattr(compaction._Run, "_wait_for_logged", count)
    assert topic.compact().records == 7
    assert max(pending) == 1


def test_a_tombstone_whose_index_entry_is_damaged_is_not_removed() -> None:
    world = EngineHarness(**TINY, compaction_interval_ms=1)
    topic = keyed(world.log, tombstone_delay_ms=DAY_MS)
    topic.append({"id": "a"}, meta={"tombstone": True})
    put(topic, "b", "c", "d")
    topic.compact()
    world.log.checkpoint()
    world.log.close()
    (path,) = [path for path in world.files(".idx") if "/00000001/" in path]
    file = world.disk.open(path, "write")
    file.write(8, (1).to_bytes(8, "little"))  # the time of the first record: 1970
    file.sync()
    file.close()
    world.log = world.open(world.disk)
    topic = world.log.topic("t", create=False)
    with suppress(Corrupt):
        topic.compact()
    assert 1 in live(topic)


def test_a_run_stops_when_the_directory_is_closed() -> None:
    world = EngineHarness(**TINY)
    topic = keyed(world.log)
    put(topic, *"aaaaaaaa")
    topic.seal()
    compactor = Compactor(world.log.context, lambda _: compactor.stop())
    compactor.run_due()
    assert live(topic) == list(range(1, 9)), "it stopped before it removed anything"
    Compactor(world.log.context).run_due()
    assert live(topic) == [8]


def test_a_damaged_segment_is_reported_and_does_not_stop_other_topics() -> None:
    world = EngineHarness(**TINY, compaction_interval_ms=1)
    for name in ("bad", "good"):
        topic = keyed(world.log, name)
        put(topic, *"aaaaaaaa")
        topic.seal()
    world.log.checkpoint()
    world.log.close()
    (directory,) = {path.rsplit("/", 1)[0] for path in world.files(".data") if "/00000001/" in path}
    for path in world.files(".key") + world.files(".data"):
        if path.startswith(directory):
            file = world.disk.open(path, "write")
            file.write(60, b"\xff\xff\xff\xff")
            file.close()
    world.log = world.open(world.disk)
    world.clock.tick(20_000)
    with pytest.raises(Corrupt):
        world.log.tick()
    assert live(world.log.topic("good", create=False)) == [8]
    (task,) = [task for task in world.log.health().tasks if task.name == "compaction"]
    assert task.failing == 1
    assert "segment" in str(task.last_error)


def test_the_table_in_pages_has_every_key_once() -> None:
    world = EngineHarness(**TINY, key_index_bytes=1 << 10)
    topic = keyed(world.log)
    put(topic, *(f"key-{n % 50}" for n in range(120)))
    seen: list[str] = []
    after = None
    while True:
        page = topic.latest().page(7, after)
        assert len(page.records) <= 7
        seen += [row.key for row in page.records]
        after = page.next_after
        if after is None:
            break
        put(topic, seen[0])  # a write to a key that was read does not bring it back
    assert sorted(seen) == sorted({f"key-{n}" for n in range(50)})
    assert {row.key for row in topic.latest(prefix="key-1")} == {"key-1", *(f"key-1{n}" for n in range(10))}
    assert topic.latest("key-1", prefix="x") is None
    with pytest.raises(BadInput, match="cursor"):
        topic.latest().page(after="nonsense")
    for bad in ("", 5, b"key"):
        with pytest.raises(BadInput, match="a key is text"):
            topic.latest(bad)  # type: ignore[arg-type]


def test_the_table_as_arrow() -> None:
    topic = keyed(EngineHarness().log)
    put(topic, "a", "b", "a")
    found = topic.latest().to_arrow()
    assert found.column_names == ["key", "seq", "ts", "node", "tag", "meta", "data", "json"]
    assert found["key"].to_pylist() == ["b", "a"]
    assert found["seq"].to_pylist() == [2, 3]
    assert keyed(EngineHarness().log).latest().to_arrow().num_rows == 0


def test_a_read_only_engine_shows_the_table_and_does_not_compact() -> None:
    world = EngineHarness(**TINY)
    put(keyed(world.log), *"abab")
    topic = world.reader().topic("t", create=False)
    assert table(topic) == {"a": 3, "b": 4}
    with pytest.raises(ReadOnly):
        topic.compact()


def test_a_dropped_topic_of_the_same_name_leaves_no_keys() -> None:
    world = EngineHarness()
    put(keyed(world.log), "a")
    assert table(world.log.topic("t")) == {"a": 1}
    world.log.drop("t")
    assert table(keyed(world.log)) == {}


def test_writers_readers_and_compaction_run_together() -> None:
    world = EngineHarness(segment_events_max=50)
    topic = keyed(world.log, durability="memory")
    failures: list[BaseException] = []
    rounds = 40

    def write() -> None:
        for n in range(rounds):
            topic.append([{"id": f"k{k}", "n": n} for k in range(10)])

    def run(call: Any) -> None:
        try:
            for _ in range(rounds):
                call()
        except BaseException as error:
            failures.append(error)

    def look() -> None:
        page = topic.latest().page(100)
        assert len(page.records) in (0, 10), page

    threads = [Thread(target=write), Thread(target=run, args=(topic.compact,)), Thread(target=run, args=(look,))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    topic.compact()
    assert {row.record.data["n"] for row in topic.latest()} == {rounds - 1}
    assert topic.count == 10
