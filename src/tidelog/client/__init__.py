"""Client of a Tidelog server, without dependencies of its own.

    database        `connect`, `RemoteDatabase` and its topics, queues, groups and channels: read it first
    …_calls         what each method sends and what it makes of the response; `wire` has the common bodies
    events          event streams
    core            the HTTP client without I/O: retries, errors, one call at a time
    http            its blocking shell: connections

Methods, results and errors are those of the embedded objects (`tidelog.protocols`). The CLI, Spark and pipelines use
the same client. A request that may have been executed and whose response was lost raises `InDoubt`; safe requests, and
writes, which have a key, are retried.
"""

from __future__ import annotations

from tidelog.client.channel_calls import KEY_USER
from tidelog.client.database import RemoteChannel, RemoteDatabase, RemoteGroup, RemoteQueue, RemoteTopic, connect
from tidelog.client.http import Client

__all__ = [
    "KEY_USER",
    "Client",
    "RemoteChannel",
    "RemoteDatabase",
    "RemoteGroup",
    "RemoteQueue",
    "RemoteTopic",
    "connect",
]
