"""The test kit, shipped and supported: a clock that stands still and a disk that loses power.

`tidelog.testing.contract` holds the suite that every Disk passes; it needs pytest, so it is
imported by its own name.
"""

from __future__ import annotations

from tidelog.testing.clock import ManualClock
from tidelog.testing.faults import Call, SyncMode
from tidelog.testing.images import ALL, Policy
from tidelog.testing.machine import PowerOff
from tidelog.testing.simdisk import Image, SimDisk

__all__ = [
    "ALL",
    "Call",
    "Image",
    "ManualClock",
    "Policy",
    "PowerOff",
    "SimDisk",
    "SyncMode",
]
