"""Which place options name."""

from __future__ import annotations

from tidelog.disk.store import opened
from tidelog.errors import BadInput
from tidelog.spark.logs import LogPlace
from tidelog.spark.options import Options
from tidelog.spark.path import PathPlace
from tidelog.spark.place import Place
from tidelog.spark.server import ServerPlace
from tidelog.spark.store import StorePlace


def of(options: Options, *, retry: bool = True) -> Place:
    """`retry`: a server that is away is asked again for a while. Without, a wrong address is an error at once."""
    if options.server is not None:
        retry_ms = options.retry_ms if retry else 0
        return ServerPlace(options.server, options.key, retry_ms=retry_ms, strong=options.strong)
    assert options.path is not None, "options name a path or a server"
    if options.is_store:
        if options.strong:
            raise BadInput(
                f"option consistency is 'strong': {options.path} is an object store, where no reader can sync what a "
                "writer has; nothing was read, leave it out or read from the server"
            )
        if options.codec == "tide":
            return StorePlace(options.path)
        disk, path = opened(options.path)
        return LogPlace(path, options.codec, disk=disk)
    if options.codec != "tide":
        return LogPlace(options.path, options.codec)
    return PathPlace(options.path, strong=options.strong)
