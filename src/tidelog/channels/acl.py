"""[policy] Access lists: whether a name is on one, and what a change makes of it. Decides, touches nothing.

Rules, in order of authority:
  1. An empty list lets everybody.
  2. A user who is listed may.
  3. Where users of a domain are listed, a listing of that whole domain counts for nothing: users win.
  4. A bare domain lets all its users.

The owner is not exempt: one who is missing from a list that is not empty may not either.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from tidelog.channels.names import check_entry, domain_of
from tidelog.errors import BadInput
from tidelog.formats.channel import Acl, Kind

KINDS: tuple[Kind, ...] = ("join", "publish", "read")


def allows(listed: tuple[str, ...], user: str) -> bool:
    """Whether a sorted list lets this user."""
    if not listed or _has(listed, user):
        return True
    domain = domain_of(user)
    return _has(listed, domain) and not any("@" in entry and domain_of(entry) == domain for entry in listed)


def listed_for(acl: Acl, kind: str) -> tuple[str, ...]:
    """One of the three lists, or BadInput."""
    if kind not in KINDS:
        raise BadInput(f"there is no access list {kind!r}, there are {', '.join(KINDS)}; nothing was changed")
    found: tuple[str, ...] = getattr(acl, kind)
    return found


def changed(listed: tuple[str, ...], *, add: Iterable[object] = (), remove: Iterable[object] = ()) -> tuple[str, ...]:
    """The list after a change, sorted. Adding what is there and removing what is not change nothing."""
    gone = {check_entry(entry) for entry in remove}
    return tuple(sorted(({*listed} | {check_entry(entry) for entry in add}) - gone))


def users_in(listed: tuple[str, ...]) -> int:
    """How many users stand on a list; domains do not count against its limit."""
    return sum("@" in entry for entry in listed)


def _has(listed: tuple[str, ...], name: str) -> bool:
    at = bisect_left(listed, name)
    return at < len(listed) and listed[at] == name
