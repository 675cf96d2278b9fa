"""Queues against dicts: any order of verbs, clock jumps, failures, crashes and restarts gives what the dicts give.

A job of the model is one object that says everything of it. It shares no code with the engine: what can be claimed is
found by looking at every job, what comes next by sorting them. The running engine must hand out exactly these jobs.

After a restart (the queues are of class fsync, so nothing that was told is lost):
    leases not durable      no job is held, no delay is known, every count is 0                     G93
    leases durable          what was written of leases, counts and delays holds again; what time has ended  G94, G95
                            may hold again as it was, if the clock went back and nobody was given the job since
In both: an acked job never returns, no unacked one is lost, no lease id is ever given twice.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

import tidelog
from tidelog.database import engine_of
from tidelog.engine import ClaimRequest, Engine, Queue
from tidelog.engine.queues.leases import LeaseTable
from tidelog.engine.queues.queue import operations_of
from tidelog.errors import DiskFull, Error
from tidelog.testing import ManualClock, SimDisk

PATH: Final = "data"
WAL_FILE: Final = "/wal-"  # in the path of every file of the WAL, and of no hint beside them
TINY: Final[dict[str, Any]] = {
    "wal_file_bytes": 4096,
    "segment_events_max": 5,
    "segment_bytes_max": 900,
    "head_reserve": 3,
    "maps_max": 2,
    "queue_history_records": 20,
}
LEASE_MS: Final = 1_000
MOST_DELIVERIES: Final = 3
QUEUES: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "durable": {"leases_durable": True},
    "capped": {"cap_records": 6, "leases_durable": True},
}


class Held(NamedTuple):
    node: str
    lease_id: int
    deadline: int
    conn: object


@dataclass
class Job:
    seq: int
    priority: int = 0
    run_at: int | None = None
    lease: Held | None = None
    until: int | None = None  # not to be had before
    count: int = 0
    back: bool = False  # not fresh
    logged: Held | None = None  # what a restart finds, where leases are durable
    logged_until: int | None = None

    def is_ready(self) -> bool:
        return self.lease is None and self.until is None

    def key(self) -> tuple[int, bool, int]:
        return -self.priority, not self.back, self.seq


@dataclass
class Model:
    durable: bool
    cap: int
    jobs: dict[int, Job] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)  # acked or dead-lettered
    ids: set[int] = field(default_factory=set)
    dead: list[int] = field(default_factory=list)
    head: int = 0

    def sweep(self, now: int) -> None:
        for job in self.jobs.values():
            if job.until is not None and job.until <= now:
                job.until, job.back = None, True
            if job.lease is not None and now > job.lease.deadline:
                job.lease, job.back = None, True

    def claim(self, now: int, wants: list[ClaimRequest]) -> list[list[int]]:
        """Which seqs each gets. What was delivered too often is dead then, by seq as in an answer."""
        self.sweep(now)
        dead: list[int] = []
        ready = sorted((job for job in self.jobs.values() if job.is_ready()), key=Job.key)
        shares: list[list[int]] = [[] for _ in wants]
        turn = 0
        for job in ready:
            open_for = [n for n, want in enumerate(wants) if len(shares[n]) < want.count_max]
            if not open_for:
                break
            if job.count >= MOST_DELIVERIES:
                dead.append(job.seq)
                self.gone.add(job.seq)
                del self.jobs[job.seq]
                continue
            turn = next(n for n in (*open_for, *open_for) if n >= turn) if max(open_for) >= turn else open_for[0]
            shares[turn].append(job.seq)
            turn += 1
        self.dead += sorted(dead)
        return [sorted(share) for share in shares]

    def restart(self, found: LeaseTable) -> None:
        """`found` is asked only for what time has ended: whether that was written down nobody can tell from outside."""
        for job in self.jobs.values():
            if not self.durable:
                job.count, job.logged, job.logged_until = 0, None, None
            if job.lease is None and job.seq not in found.leased:
                job.logged = None
            if job.until is None and job.seq not in found.delayed:
                job.logged_until = None
            job.lease = job.logged and job.logged._replace(conn=None)
            job.until = job.logged_until if job.logged_until is not None else job.run_at if not job.count else None
            job.back = job.count > 0


seqs = st.lists(st.integers(1, 30), min_size=1, max_size=4)
names = st.sampled_from(["plain", "durable", "durable", "capped"])
nodes = st.sampled_from("aab")
hows = st.sampled_from(["reopen", "kill", "crash"])
stales = st.sampled_from([False, False, False, True])


class QueueMachine(RuleBasedStateMachine):
    log: Engine

    @initialize(shards=st.sampled_from([1, 2]), capacity=st.none())
    def begin(self, shards: int, capacity: int | None = None) -> None:
        self.clock, self.shards = ManualClock(), shards
        self.disk = SimDisk(clock=self.clock)
        self.disk.capacity_bytes = capacity
        self.models = {
            name: Model(bool(config.get("leases_durable")), int(config.get("cap_records", 0)))
            for name, config in QUEUES.items()
        }
        self.open()
        for name, config in QUEUES.items():
            fields: dict[str, Any] = {
                "lease_ms": LEASE_MS,
                "max_deliveries": MOST_DELIVERIES,
                "dead_letter": f"dead-{name}",
            }
            self.log.topic(f"dead-{name}", durability="fsync")
            self.log.queue(name, durability="fsync", **fields, **config)

    def open(self) -> None:
        self.log = engine_of(
            tidelog.open(PATH, disk=self.disk, clock=self.clock, threads=False, wal_shards=self.shards, **TINY)
        )

    def queue(self, name: str) -> Queue:
        return self.log.queue(name, create=False)

    @property
    def now(self) -> int:
        return self.clock.now_us() // 1000

    # Verbs.

    @rule(
        name=names,
        count=st.integers(1, 4),
        delay=st.sampled_from([None, None, None, 1, 700]),
        priority=st.sampled_from([0, 0, 0, 5, -5]),
    )
    def put(self, name: str, count: int, delay: int | None, priority: int) -> None:
        model = self.models[name]
        model.sweep(self.now)
        self.queue(name).counts()  # what has come before is looked at now: order follows when it is
        done = self.queue(name).put(["x"] * count, delay_ms=delay, priority=priority)
        assert done.first_seq == model.head + 1
        run_at = None if delay is None else self.now + delay
        for seq in done.seqs:
            model.jobs[seq] = Job(seq, priority, run_at, until=run_at)
        model.head = done.last_seq
        while model.cap and len(model.jobs) > model.cap:
            del model.jobs[min(model.jobs)]

    @rule(name=names, asked=st.lists(st.tuples(nodes, st.integers(1, 4), st.booleans()), min_size=1, max_size=3))
    def claim(self, name: str, asked: list[tuple[str, int, bool]]) -> None:
        model = self.models[name]
        wants = [
            ClaimRequest(node, most, LEASE_MS + n, node if tied else None) for n, (node, most, tied) in enumerate(asked)
        ]
        shares = model.claim(self.now, wants)
        for want, share, leased in zip(
            wants, shares, operations_of(self.queue(name)).claim_for_all(wants), strict=True
        ):
            assert leased.seqs == share, f"{name}: {leased.seqs} for {want}, expected {share}"
            assert [job.seq for job in leased.jobs()] == share
            for seq, lease_id, deadline, count in zip(
                leased.seqs, leased.lease_ids, leased.deadlines, leased.deliveries, strict=True
            ):
                job = model.jobs[seq]
                assert job.is_ready(), "nobody holds it"
                assert lease_id not in model.ids, "an id is given once"
                model.ids.add(lease_id)
                job.lease = job.logged = Held(want.node, lease_id, deadline, want.connection)
                assert want.lease_ms is not None
                assert deadline == self.now + want.lease_ms
                job.count, job.until, job.logged_until = job.count + 1, None, None
                assert count == job.count

    def held(
        self, name: str, node: str, asked: list[int], stale: bool
    ) -> tuple[list[int], list[int | None], list[int]]:
        """What a node asks for: seqs, each with its lease id, without one, or with a stale one; and what it gets."""
        model = self.models[name]
        model.sweep(self.now)
        ids: list[int | None] = []
        meant: list[int] = []
        for seq in asked:
            job = model.jobs.get(seq)
            mine = job is not None and job.lease is not None and job.lease.node == node and seq not in meant
            lease_id = job.lease.lease_id if job is not None and job.lease is not None else 1
            ids.append(lease_id + 1_000_000 if stale else lease_id if seq % 2 else None)
            if mine and not stale:
                meant.append(seq)
        return asked, ids, meant

    @staticmethod
    def skipped(asked: list[int], meant: list[int]) -> list[int]:
        left, out = list(meant), []
        for seq in asked:
            if seq in left:
                left.remove(seq)
            else:
                out.append(seq)
        return out

    def some(self, name: str, node: str, asked: list[int]) -> list[int]:
        """Seqs that are mostly of jobs which this node holds."""
        held = self.models[name].jobs.items()
        mine = sorted(seq for seq, job in held if job.lease is not None and job.lease.node == node)
        return [mine[seq % len(mine)] if mine and seq % 7 else seq for seq in asked]

    @rule(name=names, node=nodes, asked=seqs, stale=stales)
    def ack(self, name: str, node: str, asked: list[int], stale: bool) -> None:
        asked, ids, meant = self.held(name, node, self.some(name, node, asked), stale)
        done = self.queue(name).ack(node, asked, ids)
        assert (done.count, done.skipped) == (len(meant), self.skipped(asked, meant))
        for seq in meant:
            del self.models[name].jobs[seq]
            self.models[name].gone.add(seq)
        assert (done.ready, done.in_flight) == self.expected(name)

    @rule(name=names, node=nodes, asked=seqs, delay=st.sampled_from([0, 1, 400]), stale=stales)
    def nack(self, name: str, node: str, asked: list[int], delay: int, stale: bool) -> None:
        asked, ids, meant = self.held(name, node, self.some(name, node, asked), stale)
        done = self.queue(name).nack(node, asked, ids, delay_ms=delay)
        assert (done.count, done.skipped) == (len(meant), self.skipped(asked, meant))
        for seq in meant:
            job = self.models[name].jobs[seq]
            job.lease = job.logged = None
            job.until = job.logged_until = self.now + delay if delay else None
            job.back = True
        assert (done.ready, done.in_flight) == self.expected(name)

    @rule(name=names, node=nodes, asked=seqs, ms=st.sampled_from([100, 1_500]), stale=stales)
    def extend(self, name: str, node: str, asked: list[int], ms: int, stale: bool) -> None:
        asked, ids, meant = self.held(name, node, self.some(name, node, asked), stale)
        done = self.queue(name).extend(node, asked, ids, lease_ms=ms)
        assert done == (len(meant), self.skipped(asked, meant), dict.fromkeys(meant, self.now + ms))
        for seq in meant:
            job = self.models[name].jobs[seq]
            assert job.lease is not None
            job.lease = job.logged = job.lease._replace(deadline=self.now + ms)

    @rule(name=names, conn=nodes)
    def release(self, name: str, conn: str) -> None:
        model = self.models[name]
        self.queue(name).counts()
        model.sweep(self.now)
        mine = [job for job in model.jobs.values() if job.lease is not None and job.lease.conn == conn]
        assert operations_of(self.queue(name)).count_leases(conn) == len(mine)
        assert operations_of(self.queue(name)).release_connection(conn) == len(mine)
        for job in mine:
            job.lease = job.logged = None
            job.back = True
        self.put(name, 1, None, 0)  # nobody waits for a release to be written: what comes behind it is synced with it

    @rule(name=names, asked=seqs)
    def delete(self, name: str, asked: list[int]) -> None:
        self.queue(name).topic.delete(seqs=asked)
        for seq in asked:
            self.models[name].jobs.pop(seq, None)

    @rule(
        name=names,
        node=nodes,
        verb=st.sampled_from(["ack", "nack", "extend", "claim", "claim", "put"]),
        asked=seqs,
        after=st.integers(0, 2),
        seed=st.integers(0, 1 << 32),
        how=st.sampled_from(["go on", "go on", "reopen", "kill", "crash"]),
    )
    def fail(self, name: str, node: str, verb: str, asked: list[int], after: int, seed: int, how: str) -> None:
        """There is no room on the disk, and nothing latches (decision 0021). `after` 0: for the next file of the WAL;
        a put that needs it is refused, any other verb gets a small file. Else: for a write to a file, after none or
        20 of its bytes; every verb is refused, and nothing happened."""
        model, queue = self.models[name], self.queue(name)
        if verb == "claim":
            self.put(name, 2, None, 0)
        elif verb != "put":
            self.claim(name, [(node, 2, False)])
        model.sweep(self.now)
        queue.counts()
        asked = self.some(name, node, asked)
        buries = any(job.is_ready() and job.count >= MOST_DELIVERIES for job in model.jobs.values())
        if verb == "claim" and (buries or not model.durable):
            return  # told by other rules
        mine = [seq for seq in asked if (job := model.jobs.get(seq)) and job.lease and job.lease.node == node]
        if not mine and verb in ("ack", "nack", "extend"):
            return
        if verb in ("nack", "extend") and not model.durable:
            return
        if verb == "claim" and not any(job.is_ready() for job in model.jobs.values()):
            return
        if after == 0:
            self.fail_next_file(name, node, verb, asked)
            if how != "go on":
                self.restart(how, seed, self.shards)
            return
        self.disk.fail("write", at=1, error=28, path=WAL_FILE, partial=20 * (after - 1))
        call: Callable[[], object] = {
            "ack": lambda: queue.ack(node, asked),
            "nack": lambda: queue.nack(node, asked, delay_ms=50),
            "extend": lambda: queue.extend(node, asked, lease_ms=900),
            "claim": lambda: queue.claim(node, 3),
            "put": lambda: queue.put("never"),
        }[verb]
        with pytest.raises(DiskFull) as failed:
            call()
        self.disk.clear_faults()
        self.is_refused(failed.value)
        if verb == "put":
            model.head = queue.topic._state.last_assigned_seq  # its seq stays a hole
        if verb == "claim":
            for job in model.jobs.values():  # what was handed out for a moment is not fresh any more
                job.back |= (
                    job.is_ready() and job.seq in queue._state.leases._claimable and not self.is_fresh(queue, job)
                )
        if how != "go on":
            self.restart(how, seed, self.shards)

    def fail_next_file(self, name: str, node: str, verb: str, asked: list[int]) -> None:
        """The verb as ever, while the next file of the WAL cannot be made in its full size."""
        before = self.found_full()
        self.disk.fail("reserve", at=1, error=28, path=WAL_FILE)
        refused: DiskFull | None = None
        try:
            match verb:
                case "ack":
                    self.ack(name, node, asked, False)
                case "nack":
                    self.nack(name, node, asked, 50, False)
                case "extend":
                    self.extend(name, node, asked, 900, False)
                case "claim":
                    self.claim(name, [(node, 3, False)])
                case _:
                    self.put(name, 1, None, 0)
        except DiskFull as error:
            refused = error
        self.disk.clear_faults()
        assert (refused is not None) == (verb == "put" and self.found_full() > before)
        if refused is not None:
            self.is_refused(refused)
            self.models[name].head = self.queue(name).topic._state.last_assigned_seq  # its seq stays a hole

    def is_refused(self, error: DiskFull) -> None:
        assert error.written is False
        assert not any(shard.is_latched for shard in self.log.shards)

    def found_full(self) -> int:
        """How often a write found no room since the engine was opened."""
        return sum(shard.writer.disk_full_count for shard in self.log.shards)

    @staticmethod
    def is_fresh(queue: Queue, job: Job) -> bool:
        return bool(queue._state.leases._claimable[job.seq][1])

    @rule(name=names, most=st.integers(1, 6), seed=st.integers(0, 1 << 32), how=hows)
    def claim_and_restart(self, name: str, most: int, seed: int, how: str) -> None:
        self.claim(name, [("a", most, False)])
        self.restart(how, seed, self.shards)

    @rule(name=names, most=st.integers(1, 6), delay=st.sampled_from([0, 400]))
    def claim_and_nack(self, name: str, most: int, delay: int) -> None:
        self.claim(name, [("a", most, False)])
        self.nack(name, "a", list(range(1, 7)), delay, False)

    @rule(name=names, most=st.integers(1, 6), seed=st.integers(0, 1 << 32), how=hows)
    def extend_and_restart(self, name: str, most: int, seed: int, how: str) -> None:
        self.claim(name, [("a", most, False)])
        self.extend(name, "a", list(range(1, 7)), 1_500, False)
        self.restart(how, seed, self.shards)

    @rule(name=names, most=st.integers(1, 3))
    def wear_out(self, name: str, most: int) -> None:
        """Deliver the same jobs until they are delivered too often."""
        for _ in range(MOST_DELIVERIES + 1):
            self.claim_and_nack(name, most, 0)

    @rule(name=names, count=st.integers(2, 4), each=st.integers(2, 4))
    def share(self, name: str, count: int, each: int) -> None:
        """Several come at once for less than they ask for."""
        self.put(name, count, None, 0)
        self.claim(name, [("a", each, False), ("b", each, False), ("a", each, True)])

    @rule(name=names, most=st.integers(1, 3))
    def hold_to_the_end(self, name: str, most: int) -> None:
        """At its deadline a lease is still its holder's."""
        self.put(name, most, None, 0)
        self.claim(name, [("a", most, False)])
        self.clock.tick(LEASE_MS)

    # Time and trouble.

    @rule(ms=st.sampled_from([1, 99, 400, 1_000, 1_001, 5_000]))
    def wait(self, ms: int) -> None:
        self.clock.tick(ms)

    @rule(ms=st.sampled_from([-5_000, -300, 300, 5_000]))
    def jump(self, ms: int) -> None:
        for name, model in self.models.items():
            self.queue(name).counts()
            model.sweep(self.now)
        self.clock.set_us(self.clock.now_us() + ms * 1000)

    @rule()
    def checkpoint(self) -> None:
        self.log.checkpoint()

    @rule()
    def tick(self) -> None:
        self.log.tick()

    @rule(how=hows, seed=st.integers(0, 1 << 32), shards=st.sampled_from([1, 2]))
    def restart(self, how: str, seed: int, shards: int) -> None:
        if how == "reopen":
            self.log.close()
        else:
            self.disk = self.disk.reboot() if how == "kill" else self.disk.crash_image(Random(seed))
        self.shards = shards
        self.open()
        for name, model in self.models.items():
            assert self.queue(name).topic.head_seq >= max(model.jobs, default=0)
            model.head = self.queue(name).topic.head_seq
            model.restart(self.queue(name)._state.leases)
            model.sweep(self.now)

    # Looking.

    def expected(self, name: str) -> tuple[int, int]:
        model = self.models[name]
        model.sweep(self.now)
        ready = sum(job.is_ready() for job in model.jobs.values())
        return ready, sum(job.lease is not None for job in model.jobs.values())

    @invariant()
    def is_what_the_dicts_say(self) -> None:
        if not hasattr(self, "log"):
            return
        for name, model in self.models.items():
            queue = self.queue(name)
            ready, in_flight, dead = queue.counts()
            assert (ready, in_flight) == self.expected(name), f"{name}: {model.jobs}"
            assert dead == len(model.dead)
            live = [record.seq for record in queue.topic.read(0, 1_000).records]
            assert live == sorted(model.jobs), "no job is lost, and none that is done comes back"
            assert model.gone.isdisjoint(live)
            letters = self.log.topic(f"dead-{name}").read(0, 1_000).records
            assert [int((letter.meta or {})["$dead_letter_src_seq"]) for letter in letters] == model.dead
            due = [job.lease.deadline + 1 for job in model.jobs.values() if job.lease is not None]
            due += [job.until for job in model.jobs.values() if job.until is not None]
            assert queue.next_due_ms() == min(due, default=None)

    def teardown(self) -> None:
        with suppress(AttributeError, Error):
            self.log.close()


def run(examples: int, steps: int, *, derandomize: bool, shrink: bool = True) -> None:
    run_state_machine_as_test(
        QueueMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=derandomize,
            database=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
            report_multiple_bugs=shrink,
            phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize("examples", [16, pytest.param(80, marks=pytest.mark.sweep)])
def test_queues_are_dicts_that_survive(examples: int) -> None:
    """G93, G94, G95; leases, counts, order, dead letters."""
    run(examples, 40, derandomize=True)


@pytest.mark.sweep
def test_queues_are_dicts_that_survive_for_long() -> None:
    """The same for much longer, and with other choices each time; a failure prints how to see it again."""
    run(2_000, 80, derandomize=False)
