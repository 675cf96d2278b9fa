"""The interface to the operating system: the only package that touches files, file locks and directories.

Read `interface` first: the `Disk` and `File` protocols, and which call survives which crash. `posix` implements them
with system calls, `memory` in memory, `object_store` for reading from S3 and similar stores. `durability` builds on any
disk: atomic file replacement, and the latch that stops writing after a failed sync. `fsync_thread` runs syncs for an
event loop. `interrupts` defers signals during a commit, `fork` invalidates handles in forked children, `host` covers
the rest of the machine: environment, programs, processors, page cache.
"""
