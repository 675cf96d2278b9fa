"""Records as users have them: JSON, no two alike, half of each its own and half the keys and words that all share.

A thousand records over and over would be a dictionary to a Parquet writer, and its file a list of numbers.
"""

from __future__ import annotations

import json
from random import Random

_SHARED = (
    '{"kind":"order placed","currency":"EUR","channel":"web shop","note":"to be delivered with the next round","id":"'
)


def events(size: int, number: int, count: int) -> list[bytes]:
    """The `number`-th batch of records of this size; the same one in every run."""
    shared = (_SHARED.encode() if size > 2 * len(_SHARED) else b'{"kind":"order placed","currency":"EUR","id":"').ljust(
        size // 2, b" "
    )
    own = size - len(shared) - 2
    blob = Random(f"{size}/{number}").randbytes(count * own // 2 + 1).hex().encode()
    return [shared + blob[at : at + own] + b'"}' for at in range(0, count * own, own)]


def orders(number: int, count: int) -> list[bytes]:
    """A batch of records with fields of every kind, for typed columns."""
    random = Random(number)
    return [
        json.dumps(
            {
                "n": number * count + each,
                "user": f"u{random.randrange(10_000)}",
                "price": random.randrange(100_000) / 100,
                "text": random.randbytes(40).hex(),
            }
        ).encode()
        for each in range(count)
    ]
