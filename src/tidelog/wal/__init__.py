"""The write-ahead log: what is acknowledged is here first.

A topic's frames go to one shard by its id; a shard is one ordered stream of frames in one group of
files. `Shard` commits, `Writer` writes its files, `read` brings them back after a restart.
"""

from tidelog.wal.future import CommitFuture
from tidelog.wal.group_commit import SYNC_BUCKETS_US, Commit, Shard, ShardStats
from tidelog.wal.paths import (
    SINGLE_SHARD_KEY,
    GatheredRange,
    Position,
    WalRange,
    file_name,
    file_path,
    list_file_numbers,
    list_shard_keys,
    shard_directory,
    shard_for_topic,
    shard_keys,
)
from tidelog.wal.recovery import FrameWindow, LostRange, Replay, TornTail, prepare_for_writing, replay_shard
from tidelog.wal.writer import Writer

__all__ = [
    "SINGLE_SHARD_KEY",
    "SYNC_BUCKETS_US",
    "Commit",
    "CommitFuture",
    "FrameWindow",
    "GatheredRange",
    "LostRange",
    "Position",
    "Replay",
    "Shard",
    "ShardStats",
    "TornTail",
    "WalRange",
    "Writer",
    "file_name",
    "file_path",
    "list_file_numbers",
    "list_shard_keys",
    "prepare_for_writing",
    "replay_shard",
    "shard_directory",
    "shard_for_topic",
    "shard_keys",
]
