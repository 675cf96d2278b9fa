"""Blocking client of a Tidelog server, without dependencies of its own.

`http` has the HTTP client with retries, streams and error mapping: read it first. `database` has the topics, queues and
channels of a server, with the methods and results of their embedded counterparts. The CLI, Spark sources and sinks and
pipelines use the same client.

A request that may have been executed and whose response was lost raises `InDoubt`; safe requests are retried.
"""

from __future__ import annotations

from tidelog.client.database import KEY_USER, RemoteChannel, RemoteDatabase, RemoteQueue, RemoteTopic
from tidelog.client.http import Client

__all__ = ["KEY_USER", "Client", "RemoteChannel", "RemoteDatabase", "RemoteQueue", "RemoteTopic"]
