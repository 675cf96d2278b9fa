"""One run: random operations on channels, power cuts anywhere, and after every restart the model as judge."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from tests.crash.channels.model import CLIENTS, KEEP, PAYLOAD, PER_CLIENT, ChannelModel, ChannelView

from tidelog.channels import OPERATOR, Channel, ChannelLimits, ChannelManager, membership
from tidelog.errors import Error
from tidelog.testing import ManualClock, PowerOff, SimDisk

NAMES = ("!a@x.org", "!b/c@x.org", "!d@y.org")
USERS = ("ann@x.org", "bob@x.org", "cid@y.org", "dee@y.org", "eva@z.org")
ENTRIES = (*USERS, "x.org", "y.org")
LIMITS = ChannelLimits(
    clients_max=CLIENTS,
    channels_per_client_max=PER_CLIENT,
    payload_bytes_max=PAYLOAD,
    persist_messages_max=KEEP,
    history_max=1_000,
    shards=2,
    logs_open_max=2,
    segment_bytes=400,
)


def draw_operation(random: Random, world: ChannelModel) -> tuple[Any, ...]:
    """One operation; mostly one that somebody may do, or hardly any run would get deep."""
    name, user = random.choice(NAMES), random.choice(USERS)
    weights: tuple[float, ...] = (6, 1, 1, 0.5, 0.5, 0.5, 0.2, 0.2, 0.2, 0.5)
    if world.channels and random.random() < 0.8:
        name = random.choice(sorted(world.channels))
        chan = world.channels[name]
        user = chan.owner if random.random() < 0.7 else random.choice(sorted(chan.members))
        fifo = chan.config["type"] == "fifo"
        weights = (3, 1 if fifo else 9, 1.5, 2, 4, 1.5, 7 if fifo else 0.2, 5 if fifo else 0.2, 0.5, 1)
    verb = random.choices(
        ("join", "publish", "leave", "acl", "configure", "delete", "push", "pop", "clear", "tick"), weights
    )[0]
    payload = random.randbytes(random.choice((0, 1, 12, 12, 12, PAYLOAD, PAYLOAD + 1)))
    match verb:
        case "join":
            slow, fifo = {"message_flush_interval": 500}, {"type": "fifo"}
            config = (
                {} if random.random() < 0.2 else random.choice(({}, {}, slow, fifo, slow | fifo)) | {"persist": True}
            )
            who = random.choice(USERS)
            return "join", name, who, random.choice((None, None, user)) if name in world.channels else None, config
        case "publish":
            return "publish", name, user, payload, random.choice((0, 1, 1))
        case "leave":
            return "leave", name, user, random.choice((None, None, random.choice(USERS)))
        case "acl":
            kind, some = random.choice(("join", "publish", "read")), random.sample(ENTRIES, random.randint(0, 3))
            return ("acl", name, user, kind, some, []) if random.random() < 0.4 else ("acl", name, user, kind, [], some)
        case "configure":
            return (
                *("configure", name, user),
                random.choice(
                    (
                        {"persist": True},
                        {"persist": True},
                        {"persist": False},
                        {"message_flush_interval": random.choice((0, 300))},
                        {"max_clients": random.randint(0, CLIENTS)},
                        {"max_persist_messages": random.randint(0, KEEP)},
                        {"type": "fifo", "persist": True},
                        {"type": "pubsub"},
                    )
                ),
            )
        case "push":
            return "push", name, user, payload
        case "tick":
            return "tick", random.choice((100, 400, 600))
        case _:
            return verb, name, user


def run_operation(manager: ChannelManager, clock: ManualClock, op: tuple[Any, ...]) -> Any:
    """Carry one operation out; what it answers."""
    match op:
        case "join", name, user, by, config:
            membership.join(manager, name, user, by=by, config=config)
        case "leave", name, user, by:
            membership.leave(manager, name, user, by=by)
        case "delete", name, user:
            membership.delete(manager, name, user)
        case "acl", name, user, kind, add, remove:
            membership.set_acl(manager, name, user, kind, add=add, remove=remove)
        case "configure", name, user, fields:
            membership.configure(manager, name, user, fields)
        case "publish", name, user, payload, qos:
            pending = Channel(manager, name, user).submit([payload], qos=qos)
            return pending.wait().seq
        case "push", name, user, payload:
            return Channel(manager, name, user).push(payload).seq
        case "pop", name, user:
            found = Channel(manager, name, user).pop()
            return found.seq, found.sender, found.payload
        case "clear", name, user:
            return Channel(manager, name, user).clear()
        case "tick", ms:
            clock.tick(ms)
            manager.tick()
    return None


def read_channels(manager: ChannelManager) -> dict[str, ChannelView]:
    """Everything a restart finds."""
    found = {}
    for name in manager.channel_names():
        meta = manager.meta(name)
        with manager.locked(name):
            log = manager.get_channel(name).message_log()
            first, last = log.first_seq, log.last_seq
            read = log.read(first, limit=1_000, bytes_max=1 << 20) if last >= first else []
        found[name] = ChannelView(
            meta.owner,
            list(meta.members),
            {field: getattr(meta.config, field) for field in meta.config.__struct_fields__},
            {kind: list(getattr(meta.acl, kind)) for kind in ("join", "publish", "read")},
            {message.seq: (message.sender, message.payload) for message in read},
            first,
            last,
            len(Channel(manager, name, OPERATOR)) if meta.config.type == "fifo" else None,
        )
    return found


def run_random(seed: int, *, lives: int = 3, ops: int = 14, shards: int = 2) -> tuple[int, str | None]:
    """How many operations were carried out, and what went wrong first, if anything did."""
    random, clock, world, count = Random(seed), ManualClock(), ChannelModel(), 0
    disk, limits = SimDisk(clock=clock), replace(LIMITS, shards=shards)
    disk.make_dir("data")
    for life in range(lives):
        manager = ChannelManager(disk, "data", clock, limits=limits)
        fatal, op = random.randrange(ops), tuple[Any, ...]()
        maybe = [world]  # worlds that a restart may find
        try:
            for number in range(ops):
                op = draw_operation(random, world)
                if number == fatal:
                    disk.cut_power_at(disk.op_count + random.randint(1, 12))
                code, after, answer = world.apply(op)
                maybe, count = [world, after], count + 1
                if op[0] in ("publish", "push"):
                    maybe.append(after.unsynced(world))
                try:
                    told = run_operation(manager, clock, op)
                except Error as error:
                    if error.code != code:
                        return count, f"life {life}: {op}: {error.code} ({error}) and not {code}"
                else:
                    if code is not None or told != answer:
                        return count, f"life {life}: {op}: {told} and not {code or answer}"
                world, maybe = after, [after]
            if random.random() < 0.3:
                manager.close()
        except PowerOff:
            pass
        clock.tick(random.randint(0, 1_000))
        disk = disk.crash_image(random.choice(("none", "all", random, random, random)))
        try:
            again = ChannelManager(disk, "data", clock, limits=limits)
            seen = read_channels(again)
            again.close()
        except Error as error:
            return count, f"life {life}: after {op}: it does not open: {error}"
        wrong = [each.matches(seen) for each in maybe]
        if again.report.skipped or all(wrong):
            return count, f"life {life}: after {op}: {wrong} {again.report.skipped}"
        world = maybe[wrong.index(None)].restarted(seen)
        disk = disk.reboot()
    return count, None
