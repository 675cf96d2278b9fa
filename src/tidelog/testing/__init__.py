"""The test kit, shipped and supported: a clock that stands still and a disk that loses power.

`tidelog.testing.disk_contract` holds the suite that every Disk passes; it needs pytest, so it is
imported by its own name.
"""

from __future__ import annotations

from tidelog.testing.clock import ManualClock
from tidelog.testing.crash_images import ALL_POLICIES, Policy
from tidelog.testing.machine import DiskCall, PowerOff, SyncMode
from tidelog.testing.simulated_disk import CrashImage, SimDisk

__all__ = [
    "ALL_POLICIES",
    "CrashImage",
    "DiskCall",
    "ManualClock",
    "Policy",
    "PowerOff",
    "SimDisk",
    "SyncMode",
]
