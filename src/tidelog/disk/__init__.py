"""The interface to the operating system: the only package that touches files, file locks and directories.

Read `interface` first: the `Disk` and `File` protocols, and which call survives which crash. `posix` implements them
with system calls, and runs syncs in a thread for an event loop; `memory` implements them in memory, `object_store` for
reading from S3 and similar stores. `segment_store` is the interface to stores of whole objects, which keep segments of
the cold tier: a directory or, through `object_store`, a bucket; `bounded_store` adds time limits and retries.
`backup_store` keeps objects of backups in a directory or in such a store.
`durability` builds on any disk: atomic file replacement, and the latch that stops writing after a failed sync.
`process` defers signals during a commit, invalidates handles in forked children, and covers the rest of the machine:
environment, programs, processors, page cache.
"""
