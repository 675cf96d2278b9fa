"""Tidelog: a durable event log for Python and Spark.

`tidelog.open` gives a program durable topics and channels. The segmented log library is `tidelog.commitlog`; every
error a caller can see is in `tidelog.errors`.
"""

from tidelog.channels import Channel, ChannelLimits, Engine, open
from tidelog.engine import Gap, Record, Topic
from tidelog.errors import Error
from tidelog.version import __version__

__all__ = ["Channel", "ChannelLimits", "Engine", "Error", "Gap", "Record", "Topic", "__version__", "open"]
