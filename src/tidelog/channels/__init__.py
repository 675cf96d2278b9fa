"""Channels: durable publish/subscribe and fifo channels with owners, members, access lists and history.

A program gets a `Channel` handle from `tidelog.open(…).channel`. How the modules work together:

    channel         the handle: one channel as one user sees it, with publish, subscribe and history. Read this first
    membership      join, leave, access lists, settings, delete
    manager         all channels of one directory: shards, restore, tick, close; the hook
    channel_state   one open channel: its group commit, fan-out, the event queue of a subscriber, the fifo cursor
    rules           decisions without I/O: names, access lists, limits, membership changes
    store           messages and metadata on disk, and their check
    narwhal_data    import of narwhal's data directories, and export into one
    metrics         counters and durations
"""

from __future__ import annotations

from tidelog.channels.channel import Channel, ChannelInfo, HistoryPage
from tidelog.channels.channel_state import Ack, ChannelEvent, Presence, PublishFuture, Subscription, SubscriptionEnded
from tidelog.channels.manager import Authenticate, ChannelManager, Hook, Validate
from tidelog.channels.narwhal_data import ExportedChannel, ImportedChannel, export_narwhal, import_narwhal
from tidelog.channels.rules import OPERATOR, ChannelLimits, Operator
from tidelog.channels.store import Message
from tidelog.formats.small_files import ChannelAcl, ChannelConfig, ChannelMeta

__all__ = [
    "OPERATOR",
    "Ack",
    "Authenticate",
    "Channel",
    "ChannelAcl",
    "ChannelConfig",
    "ChannelEvent",
    "ChannelInfo",
    "ChannelLimits",
    "ChannelManager",
    "ChannelMeta",
    "ExportedChannel",
    "HistoryPage",
    "Hook",
    "ImportedChannel",
    "Message",
    "Operator",
    "Presence",
    "PublishFuture",
    "Subscription",
    "SubscriptionEnded",
    "Validate",
    "export_narwhal",
    "import_narwhal",
]
