"""Backups of whole databases: list, verify, prune, restore. `Database.backup` makes them.

    >>> import tidelog
    >>> from tidelog import backup
    >>> with tidelog.open("data") as db:
    ...     made = db.backup("backups")
    >>> backup.verify("backups").problems
    []
    >>> backup.restore("backups", "restored").id == made.id
    True

A target is a directory, or an address that pyarrow opens, such as `s3://bucket/prefix`. It holds the backups of one
database.
"""

from __future__ import annotations

from tidelog.engine.backup_target import (
    BackupInfo,
    BackupListing,
    PruneResult,
    VerifyResult,
    list_backups,
)
from tidelog.engine.backup_target import prune_backups as prune
from tidelog.engine.backup_target import verify_backup as verify
from tidelog.engine.restore import RestoreResult
from tidelog.engine.restore import restore_backup as restore

__all__ = [
    "BackupInfo",
    "BackupListing",
    "PruneResult",
    "RestoreResult",
    "VerifyResult",
    "list_backups",
    "prune",
    "restore",
    "verify",
]
