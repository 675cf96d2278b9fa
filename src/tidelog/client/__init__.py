"""Blocking client of a Tidelog server, without dependencies of its own.

`http` has the HTTP client with retries, streams and error mapping: read it first. `queue` and `channel` have the
methods of their embedded counterparts. The CLI, Spark sources and sinks and pipelines use the same client.

A request that may have been executed and whose response was lost raises `InDoubt`; safe requests are retried.
"""

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
