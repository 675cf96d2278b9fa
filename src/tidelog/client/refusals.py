"""What a server refused of a channel, as the engine in this process would raise it."""

from __future__ import annotations

from typing import Any

from tidelog import errors
from tidelog.errors import Error


def refusal(code: str, message: str, detail: dict[str, Any]) -> Error | None:
    """What a server refused of a channel, as the engine would raise it; None where it is about something else."""
    channel, user = str(detail.get("channel", "")), str(detail.get("user", ""))
    match code:
        case "forbidden":
            return errors.Forbidden(message)
        case "not_a_member":
            return errors.NotMember(channel, user)
        case "user_in_channel":
            return errors.AlreadyMember(channel, user)
        case "channel_not_found":
            return errors.ChannelNotFound(channel)
        case "channel_full":
            return errors.ChannelFull(channel, limit=int(detail.get("limit", 0)))
        case "queue_full":
            return errors.FifoFull(channel, limit=int(detail.get("limit", 0)))
        case "queue_empty":
            return errors.FifoEmpty(channel)
        case "wrong_type":
            return errors.WrongType(channel, type=str(detail.get("type")), wanted=str(detail.get("wanted")))
        case "persistence_not_enabled":
            return errors.NotPersistent(channel)
        case "cursor_recovery_required":
            return errors.CursorLost(channel, reason=str(detail.get("reason")))
        case "channel_offline":
            return errors.ChannelOffline(channel, reason=str(detail.get("reason")))
        case "rejected":
            return errors.Rejected(message)
        case "hook_failed":
            return errors.HookFailed(message)
        case _:
            return None
