"""The seam to named groups of consumers: where one stands, and how it is told that a query went on.

A place that keeps groups has a `groups`; today's have none, and asking for one is refused before anything is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from tidelog.errors import BadInput
from tidelog.spark.offsets import Spot
from tidelog.spark.place import Place


class Groups(Protocol):
    def fetch(self, group: str, topic: str) -> int | None:
        """The seq the group reads next; None: it has not read this topic."""
        ...

    def commit(self, group: str, spots: Mapping[str, Spot]) -> None:
        """The group has passed everything before these."""
        ...


@runtime_checkable
class Keeps(Protocol):
    groups: Groups


def of(place: Place, option: str, group: str) -> Groups:
    """The groups of a place, or BadInput."""
    if isinstance(place, Keeps):
        return place.groups
    raise BadInput(
        f"option {option}: this version of tidelog keeps no groups of consumers, so there is no {group!r}; nothing was "
        "read, give startingOffsets as seqs, earliest or latest"
    )
