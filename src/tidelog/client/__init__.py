"""A small client of a Tidelog server: blocking, and nothing to install for it."""

from __future__ import annotations

from tidelog.client.channel import RemoteChannel, RemoteMessage
from tidelog.client.http import Client
from tidelog.client.queue import RemoteExtended, RemoteJob, RemoteQueue, RemoteSettled

__all__ = ["Client", "RemoteChannel", "RemoteExtended", "RemoteJob", "RemoteMessage", "RemoteQueue", "RemoteSettled"]
