"""Where topics are read from: the backend that the options name.

    interface      what planning and reading need of a backend, and what is sent to executors. Read this first
    directory      a data directory, read-only; object_store: a copy of one in a bucket
    server         a server, over HTTP; commitlog: a segmented log of any codec
    range_reader   byte ranges of segment files, for server and object_store

This module chooses the backend."""

from __future__ import annotations

from tidelog.disk.object_store import open_object_store
from tidelog.errors import BadInput
from tidelog.spark.backends.commitlog import CommitLogBackend
from tidelog.spark.backends.directory import DirectoryBackend
from tidelog.spark.backends.interface import Backend
from tidelog.spark.backends.object_store import ObjectStoreBackend
from tidelog.spark.backends.server import ServerBackend
from tidelog.spark.options import Options


def open_backend(options: Options, *, retry: bool = True) -> Backend:
    """`retry`: a server that is away is asked again for a while. Without, a wrong address is an error at once."""
    if options.server is not None:
        retry_ms = options.retry_ms if retry else 0
        return ServerBackend(options.server, options.key, retry_ms=retry_ms, strong=options.is_strong)
    assert options.path is not None, "options name a path or a server"
    if options.is_object_store:
        if options.is_strong:
            raise BadInput(
                f"option consistency is 'strong': {options.path} is an object store, where no reader can sync what a "
                "writer has; nothing was read, leave it out or read from the server"
            )
        if options.codec == "tide":
            return ObjectStoreBackend(options.path)
        disk, path = open_object_store(options.path)
        return CommitLogBackend(path, options.codec, disk=disk)
    if options.codec != "tide":
        return CommitLogBackend(options.path, options.codec)
    return DirectoryBackend(options.path, strong=options.is_strong)
