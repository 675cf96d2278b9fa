"""The write-ahead log: every change is written here before it is acknowledged.

A topic's frames go to one shard, chosen by the topic's id. A shard is one ordered stream of frames in the files of one
directory. Read `group_commit` first, then `shard`.

    group_commit  queue, commit lock and futures: `GroupCommit`, `CommitFuture`; channels use it too
    shard         writes and syncs commits in batches, with or without a writer thread: `Commit`, `Shard`
    writer        the active file: write, sync, rotate, preallocate; what happens on a full disk
    recovery      replays the files after a restart, and distinguishes an unfinished write from damage
    paths         names of files and directories; CURRENT and NEWEST, which prove that a file existed
"""

from tidelog.wal.group_commit import CommitFuture, GroupCommit
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
from tidelog.wal.shard import SYNC_BUCKETS_US, Commit, Shard, ShardStats
from tidelog.wal.writer import Writer

__all__ = [
    "SINGLE_SHARD_KEY",
    "SYNC_BUCKETS_US",
    "Commit",
    "CommitFuture",
    "FrameWindow",
    "GatheredRange",
    "GroupCommit",
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
