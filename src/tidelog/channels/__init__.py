"""Channels: durable rooms with owners, members, access lists and history. The door is `tidelog.open(…).channel`."""

from __future__ import annotations

from tidelog.channels import changes, talk
from tidelog.channels.delivery import Cut, Event, Presence, Subscription
from tidelog.channels.door import Channel, ChannelState, Engine, open
from tidelog.channels.hook import Authenticate, Hook, Validate
from tidelog.channels.limits import ChannelLimits
from tidelog.channels.manager import OPERATOR, ChannelManager, Operator
from tidelog.channels.messages import Message
from tidelog.channels.pending import Ack, Pending
from tidelog.channels.talk import History
from tidelog.formats.channel import Acl, Config, Meta

__all__ = [
    "OPERATOR",
    "Ack",
    "Acl",
    "Authenticate",
    "Channel",
    "ChannelLimits",
    "ChannelManager",
    "ChannelState",
    "Config",
    "Cut",
    "Engine",
    "Event",
    "History",
    "Hook",
    "Message",
    "Meta",
    "Operator",
    "Pending",
    "Presence",
    "Subscription",
    "Validate",
    "changes",
    "open",
    "talk",
]
