"""Tidelog for asyncio: the objects of `tidelog.open` and `tidelog.connect` with coroutines and async iterators.

    async with tidelog.aio.open("data") as database:
        orders = await database.topic("orders")
        await orders.append({"sku": "A"})

    embedded    a directory of this process: calls run on a few threads, the event loop waits for no disk
    remote      a server: the calls of `tidelog.client` on asyncio streams
    producer    records of many tasks in batches; typed: topics of one type
    follow      the loops over a topic; groups: those over a consumer group; worker: a function for every job
    threads     the pool of threads, and what a cancelled call has done; waiting: what tasks wait with

Methods, results and errors are those of the blocking objects; single values such as `topic.head_seq` are in `state()`.
A cancelled call is done or not done. If it had begun to change something it is finished first, and the `CancelledError`
has the outcome as its `__cause__`: `WriteCancelled` with `result`, or the error. Without a cause nothing was changed.
"""

from __future__ import annotations

from tidelog.aio.embedded import AsyncChannel, AsyncDatabase, AsyncGroup, AsyncQueue, AsyncTopic, open
from tidelog.aio.producer import AsyncDelivery, AsyncProducer
from tidelog.aio.remote import (
    AsyncRemoteChannel,
    AsyncRemoteDatabase,
    AsyncRemoteGroup,
    AsyncRemoteQueue,
    AsyncRemoteTopic,
    connect,
)
from tidelog.aio.typed import AsyncTypedTopic
from tidelog.aio.worker import AsyncWorker

__all__ = [
    "AsyncChannel",
    "AsyncDatabase",
    "AsyncDelivery",
    "AsyncGroup",
    "AsyncProducer",
    "AsyncQueue",
    "AsyncRemoteChannel",
    "AsyncRemoteDatabase",
    "AsyncRemoteGroup",
    "AsyncRemoteQueue",
    "AsyncRemoteTopic",
    "AsyncTopic",
    "AsyncTypedTopic",
    "AsyncWorker",
    "connect",
    "open",
]
