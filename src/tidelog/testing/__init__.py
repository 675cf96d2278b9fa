"""The test kit, shipped and supported: a manual clock and a disk that loses power.

Read `simulated_disk` first: `SimDisk` implements the Disk protocol in memory. `machine` has its clock, power, operation
numbers and injected faults; `crash_images` has its inodes, which keep durable and pending bytes apart, and lists the
trees that a restart could find. `simulated_store` is a store of segments that fails and hangs. `fault_fs` is the
simulated disk below the kernel, as a FUSE file system. `disk_contract` is the suite that every Disk passes; it needs
pytest, so it is imported by its own name.
"""

from __future__ import annotations

from tidelog.testing.crash_images import ALL_POLICIES, Policy
from tidelog.testing.machine import DiskCall, ManualClock, PowerOff, SyncMode
from tidelog.testing.simulated_disk import CrashImage, SimDisk
from tidelog.testing.simulated_store import SimStore

__all__ = [
    "ALL_POLICIES",
    "CrashImage",
    "DiskCall",
    "ManualClock",
    "Policy",
    "PowerOff",
    "SimDisk",
    "SimStore",
    "SyncMode",
]
