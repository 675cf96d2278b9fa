"""Limits of all channels of one directory. Built once at the edge and announced to whoever connects."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from tidelog.errors import BadInput
from tidelog.formats.channel import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelLimits:
    """Ceilings, and what a new channel starts with."""

    auth: bool = True
    """Users are who they say they are. Without it membership means nothing across a restart, so nothing is kept
    and nothing is restored."""

    domain: str | None = None
    """Channels of other domains are refused; None takes them all."""

    channels_max: int = 5_000
    """A join that would make one more channel is refused. What is restored is never refused."""

    clients_max: int = 100
    """Default and ceiling of a channel's `max_clients`."""

    channels_per_client_max: int = 100
    """How many channels a user may join; restored memberships are kept whatever it says."""

    payload_bytes_max: int = 64 << 10
    """Default and ceiling of a channel's `max_payload_size`."""

    persist_messages_max: int = 1_000
    """Default and ceiling of a channel's `max_persist_messages`; 0: no channel persists."""

    flush_interval_ms_max: int = 60_000
    """Ceiling of a channel's `message_flush_interval`: how far back a power cut may reach."""

    history_max: int = 100
    """Messages in one answer; a page says where the next one begins."""

    queue_max: int = 2_048
    """What a subscriber may have waiting. One more, and it is cut off with an event that says so."""

    shards: int = 16
    """Channels are pinned to one of these by a hash of their name; those of one shard take turns."""

    logs_open_max: int = 128
    """How many message logs stay open; each holds three descriptors. Others are opened when they are needed."""

    segment_bytes: int = 8 << 20
    """A message log is sealed past this, or when it holds half of what is kept, and dropped segment by segment."""

    def __post_init__(self) -> None:
        for name in ("channels_max", "clients_max", "payload_bytes_max", "history_max", "queue_max"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} is {getattr(self, name)}, it must be at least 1")
        for name in ("channels_per_client_max", "shards", "logs_open_max", "segment_bytes"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} is {getattr(self, name)}, it must be at least 1")
        for name in ("persist_messages_max", "flush_interval_ms_max"):
            if getattr(self, name) < 0:
                raise BadInput(f"{name} is {getattr(self, name)}, it must not be negative")
        if self.payload_bytes_max > self.segment_bytes:
            raise BadInput(
                f"payload_bytes_max ({self.payload_bytes_max}) must not exceed segment_bytes ({self.segment_bytes}): "
                "such a message would fit no segment"
            )

    def fresh(self) -> Config:
        """The settings of a channel that nobody has configured."""
        return Config(self.clients_max, self.payload_bytes_max, self.persist_messages_max, False, 0, "pubsub")

    def announce(self) -> dict[str, object]:
        """What a client should know before it asks for more."""
        return asdict(self)
