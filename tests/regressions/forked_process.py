"""Processes that open a directory, fork, and let the child try everything: what each was told is printed as JSON.

    python forking.py <scenario> <path>

A scenario is the parent. `forked(work)` runs `work` in a child made by `os.fork` and returns what it was told: the name
of the error it raised and the error's text, or "returned" and the result. The child exits as its scenario says.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable
from threading import Event, Thread
from typing import Any

import tidelog
from tidelog.commitlog import PartitionedLog, SegmentedLog
from tidelog.database import engine_of
from tidelog.disk.posix import FsyncThread
from tidelog.errors import Error

Outcome = tuple[str, str]
LIMIT_S = 60
USER = "ann@example.org"
CHANNEL = "!room@example.org"


def outcome(work: Callable[[], object]) -> Outcome:
    try:
        return "returned", str(work())
    except Error as error:
        return type(error).__name__ if error.written is False else f"written: {error.written}", str(error)


def run_in_child(work: Callable[[], object], *, at_exit: bool = False, fork: Callable[[], int] = os.fork) -> Outcome:
    """What `work` came to in a child. `at_exit`: the child leaves as a program does, with its exit handlers."""
    reading, writing = os.pipe()
    child = fork()
    if child == 0:
        signal.alarm(LIMIT_S)  # a child that waits for a lock of its parent's is killed, and the parent sees it
        os.close(reading)
        said = outcome(work)
        os.write(writing, json.dumps(said).encode())
        os.close(writing)
        if at_exit:
            sys.exit(0)
        os._exit(0)
    os.close(writing)
    heard = b""
    while more := os.read(reading, 1 << 16):
        heard += more
    os.close(reading)
    _, status = os.waitpid(child, 0)
    if status:
        return "died", str(status)
    name, text = json.loads(heard)
    return name, text


def try_operations(operations: dict[str, Callable[[], object]]) -> None:
    """What each door came to in one child that is gone at once, and in another that exits as a program does."""
    for at_exit in (False, True):
        kind, text = run_in_child(
            lambda: json.dumps([(name, *outcome(door)) for name, door in operations.items()]), at_exit=at_exit
        )
        assert kind == "returned", (kind, text)
        for name, *rest in json.loads(text):
            say("door", name, *rest)


def appended(path: str, number: int) -> Outcome:
    del path
    return outcome(lambda: TOPIC[0].append({"child": number}).first_seq)


TOPIC: list[tidelog.Topic] = []
RESULTS: list[Any] = []


def say(*words: object) -> None:
    RESULTS.append(words)


# ── scenarios ─────────────────────────────────────────────────────────────────────────────────────


def multiprocessing_children(path: str) -> None:
    """Three children of a pool, as any prefork server has them; then the parent writes."""
    log = tidelog.open(path)
    TOPIC.append(log.topic("jobs", durability="fsync"))
    with multiprocessing.get_context("fork").Pool(3) as pool:
        say("children", pool.starmap(appended, [(path, number) for number in range(3)]))
    say("parent", [TOPIC[0].append({"parent": number}).first_seq for number in range(5)])
    log.close()


def engine(path: str, shards: str = "1") -> None:
    """Every door of an engine, in a child; the parent goes on after each."""
    log = tidelog.open(path, wal_shards=int(shards))
    topic = log.topic("events", durability="fsync")
    topic.append([b"1", b"2"])
    disk = log.topic("plain", durability="disk")
    disk.append(b"1")
    queue = log.queue("work", durability="fsync")
    queue.put({"n": 1})
    job = queue.claim("me", 1)[0]
    log.router("copies", "events", "copy")
    channel = log.channel(CHANNEL, user=USER).join(persist=True)
    channel.publish(b"hello")
    group = topic.group("billing")
    group.commit(1)
    disk.append(b"2")
    calm = tidelog.open(f"{path}-calm", threads=False)
    staged = calm.topic("events").append_nowait(b"1")
    following = topic.follow(timeout=0.0, on_gap="skip")
    next(following)
    doors: dict[str, Callable[[], object]] = {
        "append": lambda: topic.append(b"x"),
        "append_nowait": lambda: topic.append_nowait(b"x"),
        "append to disk": lambda: disk.append(b"x"),
        "wait for the parent's token": staged.wait,
        "read": lambda: topic.read(0),
        "follow": lambda: list(following),
        "new follow": lambda: list(topic),
        "to_arrow": topic.to_arrow,
        "scan": lambda: list(topic.scan().iter_arrow_batches()),
        "state": topic.state,
        "delete": lambda: topic.delete(before_seq=2),
        "seal": topic.seal,
        "seek": lambda: topic.seek(0),
        "segments": topic.segments,
        "topic": lambda: log.topic("other"),
        "find": lambda: log.find("events"),
        "topics": log.topics,
        "names": log.names,
        "drop": lambda: log.drop("events"),
        "configure": lambda: log.configure("events", {"cap_records": 1}),
        "gaps": log.gaps,
        "tick": log.tick,
        "checkpoint": log.checkpoint,
        "staging": lambda: engine_of(log).staging,
        "put": lambda: queue.put({"n": 2}),
        "claim": lambda: queue.claim("child", 1),
        "ack": lambda: queue.ack("me", job),
        "nack": lambda: queue.nack("me", job),
        "counts": queue.counts,
        "history": lambda: queue.history().read(),
        "router": lambda: log.router("more", "events", "copy2"),
        "routers": log.routers,
        "drop_router": lambda: log.drop_router("copies"),
        "group": lambda: group.commit(2),
        "group state": lambda: group.state(),
        "channel": lambda: log.channel(CHANNEL, user=USER).publish(b"x"),
        "channel handle": lambda: channel.publish(b"x"),
        "channel history": lambda: channel.history(),
        "join": lambda: log.channel("!new@example.org", user=USER).join(),
        "leave": channel.leave,
        "channels": lambda: log.channels,
    }
    try_operations(doors)
    say("close", *run_in_child(log.close, at_exit=True))
    say("parent", topic.append(b"3").first_seq, disk.append(b"3").first_seq, queue.put({"n": 2}).first_seq)
    say("published", channel.publish(b"there").seq)
    say("acked", queue.ack("me", job).count)
    say("staged", staged.wait().first_seq)
    calm.close()
    log.close()


def leaving(path: str) -> None:
    """Children that leave the blocks they were forked in, and exit as programs do."""
    with tidelog.open(path) as log:
        topic = log.topic("events", durability="fsync")
        topic.append(b"1")
        with SegmentedLog.open(f"{path}-log", "tide", sync="interval") as segmented:
            segmented.append(b"1")
            for _ in range(3):
                if os.fork() == 0:
                    signal.alarm(LIMIT_S)
                    break
                say("child", os.waitstatus_to_exitcode(os.wait()[1]))
            else:
                say("locked", outcome(lambda: tidelog.open(path)), outcome(lambda: SegmentedLog.open(f"{path}-log")))
                say("parent", topic.append(b"2").first_seq, segmented.append(b"2"))
                return
    sys.exit(0)


def read_only(path: str) -> None:
    """A child opens its own handle beside the parent, which goes on writing; a reader's handle is its own too."""
    log = tidelog.open(path)
    topic = log.topic("events", durability="fsync")
    topic.append([b"1", b"2"])

    def look() -> list[int]:
        with tidelog.open(path, read_only=True) as mine:
            return [record.seq for record in mine.topic("events", create=False).read(0).records]

    say("own", *run_in_child(look, at_exit=True))
    reader = tidelog.open(path, read_only=True)
    theirs = reader.topic("events", create=False)
    say("inherited", *run_in_child(lambda: theirs.read(0)))
    say("refresh", *run_in_child(reader.refresh))
    say("writer", *run_in_child(lambda: tidelog.open(path)))
    say("parent", topic.append(b"3").first_seq, len(theirs.read(0).records))
    log.close()


def released(path: str) -> None:
    """A child that lives on does not keep the parent's lock: the next writer opens after the parent closed."""
    log = tidelog.open(path)
    segmented = SegmentedLog.open(f"{path}-log", "tide")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(LIMIT_S)
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    log.close()
    segmented.close()
    with tidelog.open(path) as again, SegmentedLog.open(f"{path}-log") as other:
        say("again", again.topic("events").append(b"1").first_seq, other.append(b"1"))
    os.close(reading)
    os.close(writing)
    say("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def segmented(path: str, codec: str) -> None:
    """Every door of a segmented log and of its offsets."""
    log = SegmentedLog.open(path, codec, sync="interval")
    log.append_many([b"1", b"2"])
    log.offsets.commit("g", 1)
    doors: dict[str, Callable[[], object]] = {
        "append": lambda: log.append(b"x"),
        "append_stream": lambda: log.append_stream([b"x"]),
        "sync": log.sync,
        "sync_beside": log.sync_concurrently,
        "tick": log.tick,
        "seal": log.seal,
        "truncate": lambda: log.truncate(log.lowest),
        "read": lambda: log.read(log.lowest),
        "records": lambda: list(log),
        "to_arrow": log.to_arrow,
        "retain": lambda: log.retain(keep_bytes=0),
        "remove_expired": lambda: log.remove_expired(0),
        "drop_below": lambda: log.drop_below(1 << 40),
        "compact": lambda: log.compact(lambda record: record.data),
        "remove": log.remove,
        "commit": lambda: log.offsets.commit("g", 2),
        "fetch": lambda: log.offsets.fetch("g"),
        "size": lambda: log.size,
        "segments": lambda: log.segments,
    }
    try_operations(doors)
    say("close", *run_in_child(log.close, at_exit=True))
    first = log.append(b"3")
    say("parent", [record.data.decode() for record in log], first - log.lowest)
    log.close()
    with SegmentedLog.open(path) as again:
        say("again", [record.data.decode() for record in again], again.offsets.fetch("g"))


def partitioned(path: str) -> None:
    """Every door of many logs under one directory."""
    log = PartitionedLog.open(path)
    log.create_topic("t", 2)
    log.append("t", 0, b"1")
    log.offsets.commit("g", 1, topic="t")
    part = log.partition("t", 0)
    doors: dict[str, Callable[[], object]] = {
        "append": lambda: log.append("t", 0, b"x"),
        "unopened": lambda: log.append("t", 1, b"x"),
        "partition": lambda: part.append(b"x"),
        "create": lambda: log.create_topic("u", 1),
        "describe": lambda: log.describe("t"),
        "lag": lambda: log.lag("g", "t", 0),
        "retain": lambda: log.retain("t", keep_bytes=0),
        "commit": lambda: log.offsets.commit("g", 9, topic="t"),
        "topics": log.topics,
    }
    try_operations(doors)
    say("close", *run_in_child(log.close, at_exit=True))
    say("parent", log.append("t", 0, b"2"), log.append("t", 1, b"1"), log.offsets.fetch("g", topic="t"))
    log.close()


def unseen(path: str) -> None:
    """A fork by C code, of which Python hears nothing: files compare process ids before they change."""
    log = tidelog.open(path, threads=False)
    topic = log.topic("events", durability="fsync")
    topic.append(b"1")
    segmented = SegmentedLog.open(f"{path}-log", "tide", sync="each")
    segmented.append(b"1")
    doors: dict[str, Callable[[], object]] = {
        "append": lambda: topic.append(b"x"),
        "checkpoint": log.checkpoint,
        "drop": lambda: log.drop("events"),
        "append to a log": lambda: segmented.append(b"x"),
        "truncate": lambda: segmented.truncate(segmented.lowest),
        "remove": segmented.remove,
        "commit": lambda: segmented.offsets.commit("g", 1),
        "channel": lambda: log.channel(CHANNEL, user=USER).join(persist=True),
        "close": log.close,
    }
    for name, door in doors.items():
        say("door", name, *run_in_child(door, fork=ctypes.CDLL(None).fork))
    say("parent", topic.append(b"2").first_seq, [segmented.append(b"2") - segmented.lowest])
    log.close()
    segmented.close()


def beside(path: str) -> None:
    """The pipes of a thread that syncs: a child can neither end it nor take its word."""
    made = FsyncThread("test")
    with open(path, "wb") as file:
        for number in range(3):
            say("child", *run_in_child(made.close, at_exit=number == 1))
            made.request(file.fileno())
            made.wait(LIMIT_S)
            say("synced", made.result() is None)
    made.close()


def crowded(path: str, forks: str) -> None:
    """Forks while threads hold every kind of lock: no child waits for one, and nothing acked is lost or doubled."""
    log = tidelog.open(path, wal_shards=2, wal_file_bytes=1 << 15, checkpoint_bytes=1 << 16, segment_events_max=50)
    names = ["f", "d"]
    for name, durability in zip(names, ("fsync", "disk"), strict=True):
        log.topic(name, durability=durability)  # type: ignore[arg-type]
    plain = SegmentedLog.open(f"{path}-log", "tide", sync="interval", segment_bytes_max=1 << 14)
    over = Event()
    acked: dict[str, list[int]] = {name: [] for name in (*names, "log")}

    def write(name: str) -> None:
        topic = log.topic(name)
        while not over.is_set():
            acked[name].append(topic.append(b"%d" % len(acked[name])).first_seq)

    def write_plain() -> None:
        while not over.is_set():
            acked["log"].append(plain.append(b"%d" % len(acked["log"])))

    def keep() -> None:
        while not over.is_set():
            log.checkpoint()

    threads = [Thread(target=write, args=(name,)) for name in names]
    threads += [Thread(target=write_plain), Thread(target=keep)]
    for thread in threads:
        thread.start()
    doors: list[Callable[[], object]] = [
        lambda: log.topic("f").append(b"child"),
        lambda: log.topic("d").read(0),
        lambda: plain.append(b"child"),
        lambda: log.checkpoint(),
        lambda: plain.read(plain.lowest),
    ]
    heard: dict[str, int] = {}
    for number in range(int(forks)):
        name, _ = run_in_child(doors[number % len(doors)], at_exit=number % 3 == 0)
        heard[name] = heard.get(name, 0) + 1
    over.set()
    for thread in threads:
        thread.join()
    log.close()
    plain.close()
    say("heard", heard)
    with tidelog.open(path) as again, SegmentedLog.open(f"{path}-log") as other:
        for name in names:
            rows = again.topic(name, create=False).to_arrow()
            found = dict(zip(rows["seq"].to_pylist(), rows["data"].to_pylist(), strict=True))
            wanted = {seq: b"%d" % number for number, seq in enumerate(acked[name])}
            say("rows", name, len(wanted), found == wanted)
        found = {record.seq: record.data for record in other}
        say("rows", "log", len(found), found == {seq: b"%d" % number for number, seq in enumerate(acked["log"])})
        say("damage", again.report.damage, other.report.lines())


def main(scenario: str, path: str, *more: str) -> None:
    warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads is what is tested here
    parent = os.getpid()
    globals()[scenario](path, *more)
    if os.getpid() == parent:
        sys.stdout.write(json.dumps(RESULTS))


if __name__ == "__main__":
    main(*sys.argv[1:])
