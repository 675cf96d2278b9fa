"""Backends of the source: where topics are read from.

    interface      what planning and reading need of a backend, and the data sent to executors; byte ranges of segment
                   files, for servers and object stores. Read this first
    directory      a data directory, or a copy of one in an object store; read-only
    server         a server, over HTTP; commitlog: a segmented log of any codec

This module chooses the backend."""

from __future__ import annotations

from tidelog.disk.object_store import open_object_store
from tidelog.errors import BadInput
from tidelog.spark.backends.commitlog import CommitLogBackend
from tidelog.spark.backends.directory import DirectoryBackend
from tidelog.spark.backends.interface import Backend
from tidelog.spark.backends.server import ServerBackend
from tidelog.spark.options import Options


def open_backend(options: Options, *, retry: bool = True) -> Backend:
    """Open the backend that the options name. Without `retry` an unreachable server raises at once."""
    location = options.location
    if location.is_server:
        retry_ms = options.retry_ms if retry else 0
        return ServerBackend(location.address, location.key, retry_ms=retry_ms, strong=options.is_strong)
    if location.is_object_store:
        if options.is_strong:
            raise BadInput(
                f"option consistency is 'strong': {location} is an object store, where no reader can sync what a "
                "writer has; nothing was read, leave it out or read from the server"
            )
        disk, path = open_object_store(location.address)
        if options.codec == "tide":
            return DirectoryBackend(path, disk=disk, is_object_store=True)
        return CommitLogBackend(path, options.codec, disk=disk)
    if options.codec != "tide":
        return CommitLogBackend(location.address, options.codec)
    return DirectoryBackend(location.address, strong=options.is_strong)
