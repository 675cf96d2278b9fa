"""[shell] The hook: one callable of the embedding program that may authenticate a user and look at a payload.

    hook(Authenticate(user, token))            the user's name, perhaps another one; None or False refuses
    hook(Validate(channel, user, payload))     None or True takes the payload as it is, bytes replace it, False refuses

A hook that raises an error of `tidelog.errors` has refused with it. Whatever else it raises, and any answer
that is none of these, is HookFailed: nothing was accepted. It runs in the caller's thread, without a lock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from tidelog.channels.metrics import Metrics
from tidelog.channels.names import check_user
from tidelog.errors import Error, Forbidden, HookFailed, Rejected


class Authenticate(NamedTuple):
    user: str
    token: str | None


class Validate(NamedTuple):
    channel: str
    user: str
    payload: bytes


Hook: TypeAlias = Callable[[Authenticate | Validate], object]


def authenticated(hook: Hook, metrics: Metrics, user: str, token: str | None) -> str:
    """Who this is; Forbidden where the hook does not know."""
    with metrics.counted("auth_attempts"):
        answer = _asked(hook, Authenticate(user, token))
        if answer is None or answer is False:
            raise Forbidden(f"{user} was not authenticated; nothing was done, check the name and the token")
        if answer is True:
            return user
        if not isinstance(answer, str):
            raise HookFailed(f"the hook named no user but {type(answer).__name__}; nothing was done, mend it and retry")
        return check_user(answer)


def validated(hook: Hook, metrics: Metrics, channel: str, user: str, payload: bytes) -> bytes:
    """The payload to take; Rejected where the hook takes none."""
    try:
        answer = _asked(hook, Validate(channel, user, payload))
    except HookFailed:
        metrics.add("hook_payloads", "error")
        raise
    except Error:
        metrics.add("hook_payloads", "invalid")
        raise
    if answer is None or answer is True:
        metrics.add("hook_payloads", "valid")
        return payload
    if isinstance(answer, bytes):
        metrics.add("hook_payloads", "valid_altered")
        return answer
    if answer is False:
        metrics.add("hook_payloads", "invalid")
        raise Rejected(f"{channel}: the payload was not accepted; nothing was written, send another")
    metrics.add("hook_payloads", "error")
    raise HookFailed(
        f"{channel}: the hook answered {type(answer).__name__}; nothing was written, retry when it is mended"
    )


def _asked(hook: Hook, question: Authenticate | Validate) -> object:
    try:
        return hook(question)
    except Error:
        raise
    except Exception as error:  # the rim of somebody else's code: whatever it is, it is not ours to die of
        raise HookFailed(f"the hook broke off ({type(error).__name__}: {error}); nothing was done, retry") from error
