"""A small client of a Tidelog server: blocking, and nothing to install for it."""

from __future__ import annotations

from tidelog.client.channel import RemoteChannel, RemoteMessage
from tidelog.client.http import Client
from tidelog.client.queue import RemoteAckResult, RemoteExtendResult, RemoteJob, RemoteQueue

__all__ = [
    "Client",
    "RemoteAckResult",
    "RemoteChannel",
    "RemoteExtendResult",
    "RemoteJob",
    "RemoteMessage",
    "RemoteQueue",
]
