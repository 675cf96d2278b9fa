"""Every control operation beside publishing, on each channel that it can run on, cut at every disk operation.

An arrangement is: which operation, on which kind of channel, what happened to the channel before, which of three
channels it is, and how many shards there are. A member's message is queued and not committed when the operation
begins, and the other channels are published to before and after it. At every disk operation of it the power fails or
the process is killed; every crash state is compared with the model, and one in `every` goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any, NamedTuple

from tests.crash.channels.model import ChannelModel, ModelChannel
from tests.crash.channels.random_runs import LIMITS, read_channels, run_operation

from tidelog.channels import Channel, ChannelManager
from tidelog.channels.channel_state import PublishFuture
from tidelog.errors import Error
from tidelog.testing import ManualClock, SimDisk

NAMES = ("!a@x.org", "!b/c@x.org", "!d@y.org")
OWNER, MEMBER, GUEST = "bob@x.org", "cid@y.org", "ann@x.org"
Op = tuple[Any, ...]

KINDS: dict[str, dict[str, Any]] = {
    "pubsub": {"persist": True},
    "slow pubsub": {"persist": True, "message_flush_interval": 500},
    "fifo": {"persist": True, "type": "fifo"},
    "slow fifo": {"persist": True, "type": "fifo", "message_flush_interval": 500},
    "memory": {},
}
_LISTED = ["x.org", "y.org"]
CONTROLS: dict[str, Callable[[str], Op]] = {
    "join": lambda name: ("join", name, GUEST, None, {}),
    "invite": lambda name: ("join", name, GUEST, OWNER, {}),
    "kick": lambda name: ("leave", name, MEMBER, OWNER),
    "leave": lambda name: ("leave", name, MEMBER, None),
    "owner leaves": lambda name: ("leave", name, OWNER, None),
    "delete": lambda name: ("delete", name, OWNER),
    "allow": lambda name: ("acl", name, OWNER, "publish", _LISTED, []),
    "allow reading": lambda name: ("acl", name, OWNER, "read", _LISTED, []),
    "persist": lambda name: ("configure", name, OWNER, {"persist": True}),
    "stop persisting": lambda name: ("configure", name, OWNER, {"persist": False}),
    "fifo": lambda name: ("configure", name, OWNER, {"type": "fifo", "persist": True}),
    "keep fewer": lambda name: ("configure", name, OWNER, {"max_persist_messages": 2}),
    "sync later": lambda name: ("configure", name, OWNER, {"message_flush_interval": 300}),
    "sync at once": lambda name: ("configure", name, OWNER, {"message_flush_interval": 0}),
    "clear": lambda name: ("clear", name, OWNER),
    "pop": lambda name: ("pop", name, MEMBER),
    "tick": lambda _: ("tick", 600),
}
STATES_BEFORE = ("new", "messages", "sealed", "closed", "killed", "cut")


class Case(NamedTuple):
    control: str
    kind: str
    before: str
    place: int  # which of the channels
    shards: int


def cases() -> list[Case]:
    """Every arrangement: an operation that a kind of channel refuses is one too, and changes nothing."""
    return [Case(*each) for each in product(CONTROLS, KINDS, STATES_BEFORE, range(len(NAMES)), (1, 2))]


class RuleViolated(Exception):
    """A crash state is not what the model says."""


class CrashInstant(NamedTuple):
    label: str
    disk: SimDisk
    killed: bool  # only the process: what was written is there
    worlds: list[ChannelModel]


class Arrangement:
    def __init__(self, case: Case, seed: object, *, images: int = 2, every: int = 5) -> None:
        self.case, self.random, self.images, self.every = case, Random(f"{seed} {case}"), images, every
        self.name = NAMES[case.place]
        self.limits = replace(LIMITS, shards=case.shards)
        self.clock, self.world = ManualClock(), ChannelModel()
        self.disk = SimDisk(clock=self.clock)
        self.disk.make_dir("data")
        self.manager = self._open(self.disk)
        self.states = 0
        self._instants: list[CrashInstant] = []
        self._known: dict[tuple[bytes, bool], list[list[dict[str, ModelChannel]]]] = {}  # worlds that were allowed
        self._worlds: list[ChannelModel] = []

    def _open(self, disk: SimDisk) -> ChannelManager:
        return ChannelManager(disk, "data", self.clock, limits=self.limits)

    # ── history ───────────────────────────────────────────────────────────────────────────────

    def run(self) -> int:
        """How many crash states were compared."""
        self._prepare()
        pending = self._submit()
        self._worlds = [self.world]
        self.disk.on_op = self._on_disk_operation
        self.do(CONTROLS[self.case.control](self.name))
        self._finish_publish(pending)
        self._publish(self.name)
        self.disk.on_op = None
        for name in NAMES:
            self._publish(name)
        self._on_disk_operation(self.disk.op_count + 1)
        for number, instant in enumerate(self._instants):
            self._check_crash_state(instant, goes_on=number % self.every == 0)
        return self.states

    def _prepare(self) -> None:
        case = self.case
        for number, name in enumerate(NAMES):
            config = KINDS[case.kind] if number == case.place else {"persist": True}
            self.do(("join", name, OWNER if number == case.place else f"o{number}@z.org", None, config))
        self.do(("join", self.name, MEMBER, None, {}))
        for _ in range(0 if case.before == "new" else 2 if case.before == "messages" else 5):
            for name in NAMES:
                self._publish(name)
        if case.before != "new":
            self.do(("pop", self.name, MEMBER))
        if case.before in ("closed", "killed", "cut"):
            if case.before == "closed":
                self.manager.close()
            self._restart(self.disk.crash_image(self.random) if case.before == "cut" else self.disk.reboot())
            if case.kind == "memory":  # it is gone, and made again with what its numbers were
                for user in (OWNER, MEMBER):
                    self.do(("join", self.name, user, None, {}))

    def _restart(self, disk: SimDisk) -> None:
        self.disk, self.manager = disk.reboot(), self._open(disk)
        seen = read_channels(self.manager)
        if (wrong := self.world.matches(seen)) is not None:
            raise RuleViolated(f"before: {wrong}")
        self.world = self.world.restarted(seen)
        self.disk = disk

    def _publish(self, name: str) -> None:
        chan = self.world.channels.get(name)
        if chan is not None:
            verb = "push" if chan.config["type"] == "fifo" else "publish"
            self.do((verb, name, chan.owner, self.random.randbytes(12), *((1,) if verb == "publish" else ())))

    def _submit(self) -> PublishFuture | None:
        """A message of a member that no thread commits yet."""
        chan = self.world.channels[self.name]
        if chan.config["type"] == "fifo":
            return None
        payload = self.random.randbytes(12)
        self.world = deepcopy(self.world)
        self.world._take(self.world.channels[self.name], MEMBER, payload, sync=False)
        return Channel(self.manager, self.name, MEMBER).submit([payload])

    def _finish_publish(self, pending: PublishFuture | None) -> None:
        """The operation committed the message that was queued, or its channel is gone."""
        if pending is None:
            return
        before = self.world.channels.get(self.name)
        try:
            ack = pending.wait()
        except Error as error:
            if before is not None or error.code != "channel_not_found":
                raise RuleViolated(f"the queued message: {error}") from error
            return
        if before is None:
            return  # it was delivered before the channel ended
        after = deepcopy(self.world)
        chan = after.channels[self.name]
        slow = KINDS[self.case.kind].get("message_flush_interval", 0) > 0  # when it was submitted
        if ack.durable == slow and chan.config["persist"] and pending.seq in chan.may:
            raise RuleViolated(f"the queued message: {ack} of a channel that syncs {'later' if slow else 'at once'}")
        if ack.durable and chan.config["persist"] and pending.seq in chan.may:
            chan.durable = max(chan.durable, pending.seq)
        self.world, self._worlds = after, [after]

    def do(self, op: Op) -> None:
        code, after, answer = self.world.apply(op)
        self._worlds = [self.world, after]
        if op[0] in ("publish", "push"):
            self._worlds.append(after.unsynced(self.world))
        try:
            found = run_operation(self.manager, self.clock, op)
        except Error as error:
            if error.code != code:
                raise RuleViolated(f"{op}: {error.code} ({error}) and not {code}") from error
        else:
            if code is not None or found != answer:
                raise RuleViolated(f"{op}: {found} and not {code or answer}")
        self.world, self._worlds = after, [after]

    # ── crash states ──────────────────────────────────────────────────────────────────────────

    def _on_disk_operation(self, op: int) -> None:
        for image in self.disk.images(random=self.random, limit=self.images):
            self._add_crash_state(CrashInstant(f"before op {op}, {image.label}", image.disk, False, self._worlds))
        self._add_crash_state(CrashInstant(f"before op {op}, a kill", self.disk.reboot(), True, self._worlds))

    def _add_crash_state(self, instant: CrashInstant) -> None:
        """Skip what is compared already: the same bytes, kind of crash and worlds. After an ack fewer are allowed."""
        known = self._known.setdefault((instant.disk.digest(), instant.killed), [])
        allowed = [world.channels for world in instant.worlds]
        if allowed not in known:
            known.append(allowed)
            self._instants.append(instant)

    def _check_crash_state(self, instant: CrashInstant, *, goes_on: bool) -> None:
        self.states += 1
        try:
            manager = self._open(instant.disk)
            seen = read_channels(manager)
        except Error as error:
            raise RuleViolated(f"{instant.label}: it does not open: {error}") from error
        worlds = [_all_written(world) for world in instant.worlds] if instant.killed else instant.worlds
        if instant.killed and len(worlds) > 2:  # a publish: its message may have its seq and not be written
            worlds = [worlds[0], worlds[1], *instant.worlds]
        wrong = [world.matches(seen) for world in worlds]
        if manager.report.skipped or all(wrong):
            raise RuleViolated(f"{instant.label}: {wrong} {manager.report.skipped}")
        if goes_on:
            self._check_usable(instant, manager, worlds[wrong.index(None)].restarted(seen))

    def _check_usable(self, instant: CrashInstant, manager: ChannelManager, world: ChannelModel) -> None:
        """The crash state is used: members join, publish and change the channel again, and it is opened once more."""
        outer = self.manager, self.world, self._worlds
        self.manager, self.world = manager, world
        try:
            for name in NAMES:
                self._publish(name)
            if self.name not in self.world.channels:
                self.do(("join", self.name, OWNER, None, {"persist": True}))
            self._publish(self.name)
            self.do(("tick", 600))
            manager.close()
            again = self._open(instant.disk)
            seen = read_channels(again)
            again.close()
            if (wrong := _all_written(self.world).matches(seen)) is not None:
                raise RuleViolated(wrong)
        except RuleViolated as wrong:
            raise RuleViolated(f"{instant.label}, going on: {wrong}") from wrong
        finally:
            self.manager, self.world, self._worlds = outer


def _all_written(world: ChannelModel) -> ChannelModel:
    """After a kill, or a clean close: nothing that was accepted is lost."""
    after = deepcopy(world)
    for chan in after.channels.values():
        chan.durable = chan.next_seq - 1
    return after


def run_case(case: Case, seed: object, **more: Any) -> int:
    """Run one arrangement; how many crash states it had."""
    try:
        return Arrangement(case, seed, **more).run()
    except RuleViolated as wrong:
        raise AssertionError(f"seed {seed!r}, {case}: {wrong}") from wrong


def sample_cases(seed: object) -> list[Case]:
    """A few arrangements: every operation, and with it every kind, state before, channel and number of shards."""
    random, every = Random(f"{seed}"), cases()
    random.shuffle(every)
    found, missing = list[Case](), {(field, value) for case in every for field, value in case._asdict().items()}
    for case in [*every, *every]:
        fresh = missing & set(case._asdict().items())
        if ("control", case.control) in fresh or (len(fresh) > 0 and len(found) >= len(CONTROLS)):
            found.append(case)
            missing -= fresh
    return found
