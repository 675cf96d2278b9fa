"""What channels must be, in plain dicts and sets. Shares no code with the library it judges.

`World.apply` says what an operation comes to: the code of the error, or None and the world afterwards. `World.matches`
holds a restarted directory against it: metadata exactly, messages between what must and what may have survived.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

PER_CLIENT, CLIENTS, PAYLOAD, KEEP = 2, 4, 40, 6


def defaults() -> dict[str, Any]:
    return {
        "max_clients": CLIENTS,
        "max_payload_size": PAYLOAD,
        "max_persist_messages": KEEP,
        "persist": False,
        "message_flush_interval": 0,
        "type": "pubsub",
    }


@dataclass
class ModelChannel:
    owner: str = ""
    members: set[str] = field(default_factory=set)
    config: dict[str, Any] = field(default_factory=defaults)
    acl: dict[str, set[str]] = field(default_factory=lambda: {"join": set(), "publish": set(), "read": set()})
    may: dict[int, tuple[str, bytes]] = field(default_factory=dict)  # every message that was ever taken
    durable: int = 0  # every seq up to it must survive
    next_seq: int = 1
    cursor: int = 1
    holes: set[int] = field(default_factory=set)  # seqs that a crash took and that are not given again
    limits: list[tuple[int, int]] = field(default_factory=list)  # earlier limits, each with the last seq

    @property
    def waiting(self) -> list[int]:
        return sorted(seq for seq in self.may if seq >= self.cursor)

    def floor(self, end: int) -> int:
        """The lowest seq that a pubsub channel must still have when its log ends at `end`. A limit that was raised
        since does not bring back what the lower one dropped."""
        limits: list[tuple[int, int]] = [*self.limits, (end, self.config["max_persist_messages"])]
        return max(min(last, end) - messages + 1 for last, messages in limits)

    def fresh_hole(self, found: ChannelView) -> set[int]:
        """The seqs at the end of what a restart found that it has no message of."""
        newest = max((found.first - 1, *found.messages, *(seq for seq in self.holes if seq <= found.last)))
        return set(range(newest + 1, found.last + 1))

    def allowed(self, kind: str, user: str) -> bool:
        listed, domain = self.acl[kind], user.split("@")[1]
        if not listed:
            return True
        if user in listed:
            return True
        named = {entry.split("@")[1] for entry in listed if "@" in entry}
        return domain in listed and domain not in named


@dataclass
class ChannelView:
    """What a restart found of one channel."""

    owner: str | None
    members: list[str]
    config: dict[str, Any]
    acl: dict[str, list[str]]
    messages: dict[int, tuple[str, bytes]]
    first: int
    last: int
    waiting: int | None  # fifo


class ChannelModel:
    def __init__(self) -> None:
        self.channels: dict[str, ModelChannel] = {}

    def apply(self, op: tuple[Any, ...]) -> tuple[str | None, ChannelModel, Any]:
        """The error's code, or None; the world afterwards; what is answered."""
        after = deepcopy(self)
        code, answer = getattr(after, f"_{op[0]}")(*op[1:])
        return (code, self, None) if code else (None, after, answer)

    def unsynced(self, before: ChannelModel) -> ChannelModel:
        """This world, an operation after `before`, when the power fails before the operation's sync: its message has a
        seq, and nothing more is durable than before."""
        world = deepcopy(self)
        for name, chan in world.channels.items():
            if name in before.channels:
                chan.durable = before.channels[name].durable
        return world

    def _count(self, user: str) -> int:
        return sum(user in chan.members for chan in self.channels.values())

    def _join(self, name: str, user: str, by: str | None, config: dict[str, Any]) -> tuple[str | None, Any]:
        chan = self.channels.get(name)
        if chan is None:
            if by is not None:
                return "channel_not_found", None
            chan = ModelChannel(config=defaults() | config)
            if self._count(user) >= PER_CLIENT:
                return "throttled", None
            chan.owner, chan.members = user, {user}
            self.channels[name] = chan
            return None, None
        if by is not None and by != chan.owner:
            return "forbidden", None
        if not chan.allowed("join", user):
            return "forbidden", None
        if user in chan.members:
            return "user_in_channel", None
        if len(chan.members) >= chan.config["max_clients"]:
            return "channel_full", None
        if self._count(user) >= PER_CLIENT:
            return "throttled", None
        chan.members.add(user)
        return None, None

    def _leave(self, name: str, user: str, by: str | None) -> tuple[str | None, Any]:
        chan = self.channels.get(name)
        if chan is None:
            return "channel_not_found", None
        if by is not None and by != chan.owner:
            return "forbidden", None
        if user not in chan.members:
            return "not_a_member", None
        chan.members.discard(user)
        if not chan.members or (user == chan.owner and chan.config["type"] == "fifo"):
            del self.channels[name]
        elif user == chan.owner:
            chan.owner = sorted(chan.members)[0]
        return None, None

    def _delete(self, name: str, user: str) -> tuple[str | None, Any]:
        chan = self.channels.get(name)
        if chan is None:
            return "channel_not_found", None
        if user != chan.owner:
            return "forbidden", None
        del self.channels[name]
        return None, None

    def _acl(self, name: str, user: str, kind: str, add: list[str], remove: list[str]) -> tuple[str | None, Any]:
        chan = self.channels.get(name)
        if chan is None:
            return "channel_not_found", None
        if user != chan.owner:
            return "forbidden", None
        listed = (chan.acl[kind] | set(add)) - set(remove)
        if sum("@" in entry for entry in listed) > chan.config["max_clients"]:
            return "forbidden", None
        chan.acl[kind] = listed
        return None, None

    def _configure(self, name: str, user: str, changes: dict[str, Any]) -> tuple[str | None, Any]:
        chan = self.channels.get(name)
        if chan is None:
            return "channel_not_found", None
        if user != chan.owner:
            return "forbidden", None
        config = chan.config | changes
        if chan.config["type"] == "fifo" != config["type"]:
            return "bad_input", None
        if config["type"] == "fifo" and not config["persist"]:
            return "bad_input", None
        if config["persist"] and not config["max_persist_messages"]:
            return "bad_input", None
        if chan.config["persist"] != config["persist"]:
            chan.may, chan.durable = {}, chan.next_seq - 1  # a log begins, or is gone; numbering goes on
        if config["type"] == "fifo" and chan.config["type"] != "fifo":
            chan.cursor, chan.durable = chan.next_seq, chan.next_seq - 1
        if chan.config["max_persist_messages"] != config["max_persist_messages"]:
            chan.limits.append((chan.next_seq - 1, chan.config["max_persist_messages"]))
        chan.config = config
        return None, None

    def _publish(self, name: str, user: str, payload: bytes, qos: int) -> tuple[str | None, Any]:
        chan = self.channels.get(name)
        if chan is None:
            return "channel_not_found", None
        if chan.config["type"] != "pubsub":
            return "wrong_type", None
        if user not in chan.members:
            return "not_a_member", None
        if not chan.allowed("publish", user):
            return "forbidden", None
        if len(payload) > chan.config["max_payload_size"]:
            return "too_large", None
        seq = self._take(chan, user, payload, sync=qos == 1)
        return None, seq

    def _take(self, chan: ModelChannel, user: str, payload: bytes, *, sync: bool) -> int:
        seq, chan.next_seq = chan.next_seq, chan.next_seq + 1
        if chan.config["persist"]:
            chan.may[seq] = (user, payload)
            if sync and chan.config["message_flush_interval"] == 0:
                chan.durable = seq
        return seq

    def _push(self, name: str, user: str, payload: bytes) -> tuple[str | None, Any]:
        chan = self.channels.get(name)
        if chan is None:
            return "channel_not_found", None
        if chan.config["type"] != "fifo":
            return "wrong_type", None
        if user not in chan.members:
            return "not_a_member", None
        if user != chan.owner:
            return "forbidden", None
        if len(payload) > chan.config["max_payload_size"]:
            return "too_large", None
        if len(chan.waiting) >= chan.config["max_persist_messages"]:
            return "queue_full", None
        return None, self._take(chan, user, payload, sync=True)

    def _pop(self, name: str, user: str) -> tuple[str | None, Any]:
        chan = self.channels.get(name)
        if chan is None:
            return "channel_not_found", None
        if chan.config["type"] != "fifo":
            return "wrong_type", None
        if user not in chan.members:
            return "not_a_member", None
        if not chan.allowed("read", user):
            return "forbidden", None
        if not chan.waiting:
            return "queue_empty", None
        seq = chan.waiting[0]
        chan.cursor, chan.durable = seq + 1, chan.next_seq - 1
        return None, (seq, *chan.may[seq])

    def _clear(self, name: str, user: str) -> tuple[str | None, Any]:
        chan = self.channels.get(name)
        if chan is None:
            return "channel_not_found", None
        if chan.config["type"] != "fifo":
            return "wrong_type", None
        if user != chan.owner:
            return "forbidden", None
        waited, chan.cursor, chan.durable = len(chan.waiting), chan.next_seq, chan.next_seq - 1
        return None, waited

    def _tick(self, ms: int) -> tuple[str | None, Any]:
        for chan in self.channels.values():
            if ms >= chan.config["message_flush_interval"]:
                chan.durable = chan.next_seq - 1
        return None, None

    # ── after a restart ───────────────────────────────────────────────────────────────────────

    def matches(self, seen: dict[str, ChannelView]) -> str | None:
        """What is wrong with what a restart found, or None."""
        kept = {name: chan for name, chan in self.channels.items() if chan.config["persist"]}
        if kept.keys() != seen.keys():
            return f"channels {sorted(seen)} and not {sorted(kept)}"
        for name, chan in kept.items():
            found = seen[name]
            told = (found.owner, found.members, found.config, found.acl)
            lists = {kind: sorted(listed) for kind, listed in chan.acl.items()}
            if told != (chan.owner, sorted(chan.members), chan.config, lists):
                return f"{name} is {told}"
            if wrong := self._messages(chan, found):
                return f"{name}: {wrong}"
        return None

    @staticmethod
    def _messages(chan: ModelChannel, found: ChannelView) -> str | None:
        # What a power cut left after a record that it took is not served, and its seqs are not given again: a hole
        # from there to the end, of nothing that was durable.
        fresh = chan.fresh_hole(found)
        end = min(fresh, default=found.last + 1) - 1
        if end < chan.durable:
            return f"it ends at {end}, and {chan.durable} was durable"
        if found.last >= chan.next_seq:
            return f"it ends at {found.last}, and only {chan.next_seq - 1} were given out"
        if set(found.messages) != set(range(found.first, end + 1)) - chan.holes:
            return f"it holds {sorted(found.messages)} of {found.first} to {end}, without {sorted(chan.holes)}"
        for seq, said in found.messages.items():
            if seq in chan.may and chan.may[seq] != said:
                return f"seq {seq} reads {said}"
            if seq not in chan.may and chan.config["type"] == "pubsub":
                return f"seq {seq} reads {said}, which nobody said since it persists"
        floor = chan.floor(end) if chan.config["type"] == "pubsub" else chan.cursor
        lost = [seq for seq in chan.may if floor <= seq <= end and seq not in found.messages]
        if lost:
            return f"seqs {lost} were dropped, and it keeps what lies behind {floor}"
        if found.waiting is not None and found.waiting != sum(seq >= chan.cursor for seq in found.messages):
            return f"{found.waiting} wait in it, and its cursor was {chan.cursor} of {found.last}"
        return None

    def restarted(self, seen: dict[str, ChannelView]) -> ChannelModel:
        """The world as it goes on: what survived is there, and durable."""
        world = ChannelModel()
        for name, found in seen.items():
            chan = deepcopy(self.channels[name])
            chan.may = {seq: said for seq, said in chan.may.items() if seq in found.messages}
            chan.holes |= chan.fresh_hole(found)
            chan.durable, chan.next_seq = found.last, found.last + 1
            world.channels[name] = chan
        return world
