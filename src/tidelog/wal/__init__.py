"""The write-ahead log: what is acknowledged is here first.

A topic's frames go to one shard by its id; a shard is one ordered stream of frames in one group of
files. `Shard` commits, `Writer` writes its files, `read` brings them back after a restart.
"""

from tidelog.wal.commit import Commit
from tidelog.wal.file import Writer
from tidelog.wal.names import FLAT, Position, directory, file_name, files, groups, keys, path_of, shard_of
from tidelog.wal.replay import Cut, Lost, Replay, Window, cut, read
from tidelog.wal.shard import Shard
from tidelog.wal.stats import SYNC_US, Stats
from tidelog.wal.stored import Gathered, Stored
from tidelog.wal.token import Token

__all__ = [
    "FLAT",
    "SYNC_US",
    "Commit",
    "Cut",
    "Gathered",
    "Lost",
    "Position",
    "Replay",
    "Shard",
    "Stats",
    "Stored",
    "Token",
    "Window",
    "Writer",
    "cut",
    "directory",
    "file_name",
    "files",
    "groups",
    "keys",
    "path_of",
    "read",
    "shard_of",
]
