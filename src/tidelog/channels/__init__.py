"""Channels: durable rooms with owners, members, access lists and history. The door is `tidelog.open(…).channel`."""

from __future__ import annotations

from tidelog.channels.channel import Channel, ChannelInfo
from tidelog.channels.channel_state import Ack, PublishFuture
from tidelog.channels.manager import OPERATOR, Authenticate, ChannelManager, Hook, Operator, Validate
from tidelog.channels.message_log import Message
from tidelog.channels.messaging import HistoryPage
from tidelog.channels.rules import ChannelLimits
from tidelog.channels.subscription import ChannelEvent, Presence, Subscription, SubscriptionEnded
from tidelog.formats.channel_meta import ChannelAcl, ChannelConfig, ChannelMeta

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
    "HistoryPage",
    "Hook",
    "Message",
    "Operator",
    "Presence",
    "PublishFuture",
    "Subscription",
    "SubscriptionEnded",
    "Validate",
]
