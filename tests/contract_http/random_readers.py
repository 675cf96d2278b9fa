"""Readers of a real server that come and go at random, and a record of what each of them must have seen.

One writer a topic writes, deletes, and drops; it knows the outcome of every request, also of one that a restart of the
server cut off. Readers follow topics by SSE, WebSocket and long poll. They close, reset or abandon their connections
and continue from the last position they were given. What a reader got must be complete: every seq up to its position
is a record, inside a gap that the server reported, deleted, or was never written. Nothing comes twice or out of order.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from random import Random
from socket import SHUT_RDWR
from typing import Any, Final

from websockets.exceptions import ConnectionClosed, InvalidHandshake

from tests.contract_http.api import Api, topic_path
from tests.contract_http.client import JSON, ConnectionEnded, dumps
from tests.contract_http.server import Server
from tests.contract_http.sse_client import SseStream, parse_event
from tests.contract_http.websocket_client import Socket

BATCH_MAX: Final = 20
CAP_RECORDS: Final = 40  # more than a batch: a writer can look up the outcome of its last write
TOPIC_LIVES: Final = "lives"  # the topic that is dropped and made again
LIFE_OPERATIONS_MAX: Final = 60
CONFIGS: Final[dict[str, dict[str, object]]] = {
    "disk": {"durability": "disk"},
    "fsync": {"durability": "fsync"},
    "capped": {"durability": "disk", "cap_records": CAP_RECORDS},
    "memory-capped": {"durability": "memory", "cap_records": CAP_RECORDS},
    TOPIC_LIVES: {"durability": "disk"},
}
CONNECTION_ERRORS: Final = (
    OSError,
    ConnectionEnded,
    ConnectionClosed,
    InvalidHandshake,
)  # the server restarts; OSError has time-outs too


class Interrupted(Exception):
    """The server did not take the request; the client tries again."""

    def __init__(self, status: int = 0) -> None:
        super().__init__(status)
        self.status = status


def expect_status(reply: Any, *statuses: int) -> dict[str, Any]:
    """Return the body of an answer with one of these statuses; a server that stops, starts or is full is no answer."""
    if reply.status in (429, 503, 507):
        raise Interrupted(reply.status)
    assert reply.status in statuses, (reply.status, reply.body[:300])
    body: dict[str, Any] = reply.json()
    return body


@dataclass
class TopicLife:
    """A topic from its creation to its drop, as its writer knows it."""

    written: dict[int, int] = field(default_factory=dict)  # seq → number of the record
    tags: dict[int, str] = field(default_factory=dict)
    deleted: set[int] = field(default_factory=set)  # also those whose delete is under way

    @property
    def head(self) -> int:
        return max(self.written, default=0)


@dataclass
class Position:
    """What one reader has got of one topic."""

    topic: str
    cursor: int = 0
    life: int | None = None  # known from the first record
    received: dict[int, int] = field(default_factory=dict)
    gaps: list[tuple[int, int]] = field(default_factory=list)

    def gap(self, gap_from: int, gap_to: int, reason: str) -> None:
        assert self.cursor < gap_from <= gap_to, (self.topic, self.cursor, gap_from, gap_to)
        assert reason in ("cap", "from_seq_too_old"), reason
        self.gaps.append((gap_from, gap_to))
        self.cursor = gap_to

    def page(self, from_seq: int, to_seq: int, records: list[dict[str, Any]]) -> None:
        assert self.cursor <= from_seq <= to_seq, (self.topic, self.cursor, from_seq, to_seq)
        last = from_seq
        for record in records:
            seq, (life, number) = record["$seq"], record["data"]
            assert last < seq <= to_seq, (self.topic, last, seq, to_seq)
            assert self.life in (None, life), "a topic that was made again is another one"
            self.life, last = life, seq
            self.received[seq] = number
        self.cursor = to_seq


class ReaderScenario:
    """The server, its topics, and everything that the writers did."""

    def __init__(self, server: Server, seed: int, configs: dict[str, dict[str, object]] = CONFIGS) -> None:
        self.server, self.seed, self.configs = server, seed, configs
        self.over = threading.Event()  # writers stop
        self.written_all = threading.Event()  # all of them have: readers go on to the head and stop
        self.failed = threading.Event()
        self.errors: list[BaseException] = []
        self.lives: dict[str, list[TopicLife]] = {name: [] for name in configs}
        self.readers: list[Reader] = []
        self.refused: Counter[int] = Counter()  # writes, by the status that refused them

    @property
    def stopped(self) -> bool:
        return self.over.is_set() or self.failed.is_set()

    def run(self, seconds: float, disturb: Sequence[Callable[[], object]]) -> None:
        """Write and read for so long, with these disturbances on the way. Then let every reader reach the head, and
        check what each of them got."""
        with self.server.client() as api:
            for name, config in self.configs.items():
                self.lives[name].append(TopicLife())
                api.create_topic(name, **config)
        writers = [Writer(self, name, Random(f"{self.seed}/{name}")) for name in self.configs]
        kinds: list[type[Reader]] = [SseReader] * 3 + [SocketReader] * 2 + [PollReader] * 2
        self.readers = [kind(self, Random(f"{self.seed}/reader {at}")) for at, kind in enumerate(kinds)]
        writing = [threading.Thread(target=self._guarded, args=(writer.run,)) for writer in writers]
        reading = [threading.Thread(target=self._guarded, args=(reader.run,)) for reader in self.readers]
        for thread in (*writing, *reading):
            thread.start()
        try:
            for act in disturb:
                self.failed.wait(seconds / (len(disturb) + 1))
                if not self.failed.is_set():
                    act()
            self.failed.wait(seconds / (len(disturb) + 1))
        except BaseException as error:
            self.errors.append(error)
            self.failed.set()
        self.over.set()
        self._join(writing)
        self.written_all.set()
        self._join(reading)
        if self.errors:
            raise AssertionError(f"seed {self.seed}: {self.errors[0]!r}") from self.errors[0]
        self._check()

    def _join(self, threads: list[threading.Thread]) -> None:
        for thread in threads:
            thread.join(120)
            if thread.is_alive():
                self.errors.append(AssertionError("a client hangs"))
                self.failed.set()

    def _guarded(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:
            self.errors.append(error)
            self.failed.set()

    def _check(self) -> None:
        with self.server.client() as api:
            earliest = {name: api.state(name)["earliest_seq"] for name in self.configs}
        for reader in self.readers:
            for position in (*reader.archived, *reader.positions.values()):
                self._check_position(position, earliest)

    def _check_position(self, position: Position, earliest: dict[str, int]) -> None:
        lives = self.lives[position.topic]
        if position.life is None:
            assert not position.received
            return
        life = lives[position.life]
        where = (self.seed, position.topic, position.life)
        assert position.received.items() <= life.written.items(), (where, "records that were not written")
        lost: set[int] = set()
        for gap_from, gap_to in position.gaps:
            assert "cap_records" in self.configs[position.topic], (where, "a gap where nothing can be lost")
            assert gap_to < earliest[position.topic], (where, "a gap over records that are still there")
            lost.update(range(gap_from, gap_to + 1))
        assert not lost & position.received.keys(), where
        passed = {seq for seq in life.written if seq <= position.cursor}
        missing = passed - position.received.keys() - lost - life.deleted
        assert not missing, (where, "lost in silence", sorted(missing)[:20], len(missing))

    @property
    def counts(self) -> dict[str, int]:
        positions = [p for r in self.readers for p in (*r.archived, *r.positions.values())]
        return {
            "records that random readers received": sum(len(position.received) for position in positions),
            "gaps that random readers were shown": sum(len(position.gaps) for position in positions),
            "reconnects of random readers": sum(reader.reconnects for reader in self.readers),
            "topics dropped under random readers": sum(len(lives) - 1 for lives in self.lives.values()),
        }


class Writer:
    """The only writer of one topic."""

    def __init__(self, world: ReaderScenario, topic: str, random: Random) -> None:
        self._world, self._topic, self._random = world, topic, random
        self._number = 0

    @property
    def _life(self) -> TopicLife:
        return self._world.lives[self._topic][-1]

    def run(self) -> None:
        operations = 0  # since the last drop: by chance alone a short run may have none
        while not self._world.stopped:
            chosen = self._random.random()
            operations += 1
            if self._topic == TOPIC_LIVES and (chosen >= 0.97 or operations > LIFE_OPERATIONS_MAX):
                self._drop()
                operations = 0
            elif chosen < 0.92:
                self._until_done(self._write)
            elif chosen < 0.96:
                tag = self._tag()
                self._delete({seq for seq, known in self._life.tags.items() if known == tag}, match=tag)
            else:
                before = self._random.randrange(self._life.head + 2)
                self._delete({seq for seq in self._life.written if seq < before}, before_seq=before)
            self._world.over.wait(self._random.random() * 0.01)

    def _tag(self) -> str:
        return f"tag-{self._random.randrange(8)}"

    def _until_done(self, act: Callable[[Api], None]) -> None:
        while not self._world.failed.is_set():
            try:
                with self._world.server.client() as api:
                    act(api)
                return
            except (*CONNECTION_ERRORS, Interrupted) as error:
                if isinstance(error, Interrupted):
                    self._world.refused[error.status] += 1
                self._world.failed.wait(0.02)

    def _write(self, api: Api) -> None:
        life, number = len(self._world.lives[self._topic]) - 1, self._number
        count = self._random.randint(1, BATCH_MAX)
        tags = [self._tag() for _ in range(count)]
        self._number += count
        records = [{"data": [life, number + at], "tag": tag} for at, tag in enumerate(tags)]
        try:
            done = expect_status(api.try_write(self._topic, *records), 200)
        except BaseException:
            self._until_done(self._look_up)
            raise
        first = done["first_seq"]
        self._life.written.update((first + at, number + at) for at in range(count))
        self._life.tags.update((first + at, tag) for at, tag in enumerate(tags))

    def _look_up(self, api: Api) -> None:
        """Find out what became of a write whose answer did not come."""
        reply = api.post(
            topic_path(self._topic, "/diff"), {"from_seq": self._life.head, "limit": 1000, "include_tags": True}
        )
        found = expect_status(reply, 200)
        for record in found["records"]:
            self._life.written[record["$seq"]] = record["data"][1]
            self._life.tags[record["$seq"]] = record["$tag"]

    def _delete(self, seqs: Collection[int], **what: object) -> None:
        self._life.deleted.update(seqs)
        self._until_done(lambda api: discard(expect_status(api.post(topic_path(self._topic, "/delete"), what), 200)))

    def _drop(self) -> None:
        """Drop the topic, and make another one when the readers that cannot tell the two apart have noticed."""
        for reader in self._world.readers:
            if not reader.detects_recreation:
                reader.must_notice.set()
        self._until_done(lambda api: discard(expect_status(api.delete(topic_path(self._topic)), 200, 404)))
        while any(reader.must_notice.is_set() for reader in self._world.readers):
            if self._world.failed.wait(0.005):
                return
        self._world.lives[self._topic].append(TopicLife())
        self._until_done(
            lambda api: discard(
                expect_status(api.put(topic_path(self._topic), self._world.configs[self._topic]), 200, 201)
            )
        )


def discard(_: object) -> None:
    """For a call whose value is not needed."""


class Reader(ABC):
    """A client that follows topics until the end, over many connections."""

    detects_recreation = False  # the server tells it that a topic is another one of the same name

    def __init__(self, world: ReaderScenario, random: Random) -> None:
        self.world, self.random = world, random
        names = sorted(random.sample(sorted(world.configs), random.randint(2, len(world.configs))))
        self.positions = {name: Position(name) for name in names}
        self.archived: list[Position] = []
        self.must_notice = threading.Event()  # that the topic of many lives was dropped
        self.reconnects = 0

    def run(self) -> None:
        while not self.world.failed.is_set() and not self._at_end():
            try:
                self.read(self.random.choice((1, 2, 5, 20, 100)))
            except (*CONNECTION_ERRORS, Interrupted):
                self.world.failed.wait(0.02)
            self.reconnects += 1
            self.world.failed.wait(self.random.choice((0, 0, 0.02, 0.3)))  # away: topics change meanwhile
            if TOPIC_LIVES not in self.positions:
                self.must_notice.clear()
        self.must_notice.clear()
        self.leave_all()

    def _at_end(self) -> bool:
        """Whether everything was read that the writers have written."""
        if not self.world.written_all.is_set():
            return False
        heads = {name: lives[-1].head for name, lives in self.world.lives.items()}
        return all(position.cursor >= heads[name] for name, position in self.positions.items())

    def restart(self, topic: str) -> None:
        """Begin again at the first record: the topic was dropped, or may have been."""
        self.archived.append(self.positions[topic])
        self.positions[topic] = Position(topic)
        if topic == TOPIC_LIVES:
            self.must_notice.clear()

    @abstractmethod
    def read(self, count: int) -> None:
        """Connect, take so many events, and leave."""

    def leave_all(self) -> None:  # noqa: B027 - a reader may have nothing open
        """Close what is still open."""


class SseReader(Reader):
    """Follows by a watch session. It comes back with the id of the last event that it has seen."""

    detects_recreation = True

    def __init__(self, world: ReaderScenario, random: Random) -> None:
        super().__init__(world, random)
        self._url, self._last_id = "", ""
        self._abandoned: list[SseStream] = []  # connections that the server takes for open

    def read(self, count: int) -> None:
        if not self._last_id or self.random.random() < 0.1:
            self._new_session()
        headers = {"Last-Event-ID": self._last_id} if self._last_id else {}
        stream = self.world.server.events(self._url, headers=headers)
        if stream.refusal is not None:
            assert stream.refusal.status in (404, 429, 503), stream.refusal
            self._last_id = ""  # the session did not outlive a restart
            raise Interrupted
        try:
            for _ in range(count):
                if not (raw := stream.frame(1.0)):
                    self._last_id = ""  # nothing is left to follow
                    return
                if not raw.startswith(b":") and not self._event(raw):
                    return
        except TimeoutError:
            pass
        finally:
            self._leave(stream)

    def _new_session(self) -> None:
        if TOPIC_LIVES in self.positions:
            self.restart(TOPIC_LIVES)
        topics = {name: {"from_seq": position.cursor} for name, position in self.positions.items()}
        with self.world.server.client() as api:
            limit = self.random.choice((1, 3, 256))
            made = expect_status(api.post("/v0/watch?lenient=true", {"topics": topics, "limit": limit}), 200)
        self._url, self._last_id = made["stream_url"], ""

    def _event(self, raw: bytes) -> bool:
        event = parse_event(raw)
        data = event.data
        self._last_id = raw.split(b"\n", 1)[0].removeprefix(b"id: ").decode()
        if event.name == "error":
            assert data["code"] == "server_shutting_down", data
            return False
        position = self.positions[data["topic"]]
        if event.name == "tombstone" and data["reason"] == "recreated":
            assert data["topic"] == TOPIC_LIVES
            self.restart(TOPIC_LIVES)
            position = self.positions[TOPIC_LIVES]
        elif event.name == "tombstone":
            position.gap(data["gap_from"], data["gap_to"], data["reason"])
        elif event.name == "record":
            position.page(data["from_seq"], data["to_seq"], data["records"])
        elif event.name == "topic-deleted":
            assert data["topic"] == TOPIC_LIVES
            return False
        assert event.id[data["topic"]] >= position.cursor
        position.cursor = event.id[data["topic"]]
        return True

    def _leave(self, stream: SseStream) -> None:
        chosen = self.random.random()
        if chosen < 0.3 and len(self._abandoned) < 5:
            self._abandoned.append(stream)
        elif chosen < 0.6:
            stream.wire.abort()
        else:
            stream.wire.close()
        if self._abandoned and self.random.random() < 0.3:
            self._abandoned.pop(0).wire.close()

    def leave_all(self) -> None:
        for stream in self._abandoned:
            stream.wire.close()


class SocketReader(Reader):
    """Follows by a WebSocket. It subscribes from its own position."""

    def read(self, count: int) -> None:
        socket = Socket(self.world.server)
        with socket.raw:
            for name, position in self.positions.items():
                socket.send(op="subscribe", topic=name, from_seq=position.cursor, limit=self.random.choice((1, 3, 256)))
            try:
                for _ in range(count + len(self.positions)):
                    if not self._message(socket.receive(1.0)):
                        return
            except TimeoutError:
                pass
            if self.random.random() < 0.5:
                socket.raw.socket.shutdown(SHUT_RDWR)  # no closing handshake

    def _message(self, said: dict[str, Any]) -> bool:
        op = said["op"]
        if op == "error":
            assert said["code"] in ("server_shutting_down", "topic_not_found"), said
            if said["code"] == "topic_not_found":
                self.restart(TOPIC_LIVES)
            return False
        if op == "subscribed":
            return True
        position = self.positions[said["topic"]]
        if op == "tombstone":
            position.gap(said["gap_from"], said["gap_to"], said["reason"])
        elif op == "record":
            position.page(said["from_seq"], said["to_seq"], said["records"])
        elif op == "topic_deleted":
            assert said["topic"] == TOPIC_LIVES
            self.restart(TOPIC_LIVES)
            return False
        else:
            assert op == "caught_up", said
            position.cursor = max(position.cursor, said["head_seq"])
        return True


class PollReader(Reader):
    """Follows one topic at a time by long polls, some of which it gives up."""

    def read(self, count: int) -> None:
        with self.world.server.client() as api:
            for _ in range(count):
                position = self.positions[self.random.choice(list(self.positions))]
                wait_ms = self.random.choice((0, 0, 50, 200))
                body = {"from_seq": position.cursor, "wait_ms": wait_ms, "limit": self.random.choice((1, 10, 1000))}
                if self.random.random() < 0.1:
                    api.begin("POST", topic_path(position.topic, "/diff"), dumps(body), [JSON])
                    api.connection.abort()
                    return
                reply = api.post(topic_path(position.topic, "/diff"), body)
                if reply.status == 404:
                    assert position.topic == TOPIC_LIVES
                    self.restart(TOPIC_LIVES)
                    return
                found = expect_status(reply, 200)
                if (gap := found["tombstone"]) is not None:
                    position.gap(gap["gap_from"], gap["gap_to"], gap["reason"])
                position.page(position.cursor, found["next_from_seq"], found["records"])
