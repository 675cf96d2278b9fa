"""What claimers and workers say to a queue: the bodies of claim, ack, nack, extend and redrive."""

from __future__ import annotations

from typing import Any, Final

from msgspec import Struct

from tidelog.wire.requests import U32, U64, within

CLAIM_MAX: Final = 1_000  # jobs of one claim; more is this many
CLAIM_BYTES_MAX: Final = 8 << 20  # data of one claim's jobs: what would be more stays for the next; one job in any case
SEQS_MAX: Final = 1_000  # of one ack, nack or extend; more is refused
NODE_BYTES_MAX: Final = 128
DELAY_MS_MAX: Final = 86_400_000
REDRIVE_MAX: Final = 10_000  # records of one redrive; more is this many
REDRIVE_S_MAX: Final = 30  # and no more than a rate allows in so many seconds


class Claim(Struct):
    node: str
    max: U32 = 1
    lease_ms: U64 | None = None

    def __post_init__(self) -> None:
        within(self.lease_ms)


class Ack(Struct, kw_only=True):
    node: str
    seqs: list[U64]
    lease_ids: list[str] = []

    def __post_init__(self) -> None:
        within(max(self.seqs, default=0))


class Nack(Ack, kw_only=True):
    delay_ms: U64 = 0

    def __post_init__(self) -> None:
        within(self.delay_ms, max(self.seqs, default=0))


class Extend(Ack, kw_only=True):
    lease_ms: U64

    def __post_init__(self) -> None:
        within(self.lease_ms, max(self.seqs, default=0))


class Redrive(Struct):
    to: str | None = None
    match: Any = None
    limit: U32 = 1_000
    rate: U32 | None = None
