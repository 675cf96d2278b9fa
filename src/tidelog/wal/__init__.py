"""The write-ahead log: every change is written here before it is acknowledged.

A topic's frames go to one shard, chosen by the topic's id. A shard is one ordered stream of frames in the files of one
directory. Read `group_commit` first.

    group_commit  queues commits, writes and syncs them in batches: `Commit`, `Shard`
    future        the caller's handle on the outcome of its commit
    writer        the active file: write, sync, rotate, preallocate; what happens on a full disk
    recovery      replays the files after a restart, and distinguishes an unfinished write from damage
    paths         names of files and directories; CURRENT and NEWEST, which prove that a file existed
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
