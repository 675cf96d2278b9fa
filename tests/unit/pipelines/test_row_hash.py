"""A sum of rows is the same in any order and in any pieces, and different for whatever is different."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from random import Random

import numpy as np
import pyarrow as pa
import pytest

from tidelog.pipelines import row_hash


def table(count: int = 500) -> pa.RecordBatch:
    chance = Random(1)
    return pa.record_batch(
        {
            "seq": pa.array(range(count), pa.int64()),
            "data": pa.array([chance.randbytes(chance.randint(0, 60)) for _ in range(count)], pa.binary()),
            "tag": pa.array([None if each % 3 else f"tag-{each}" for each in range(count)]),
            "meta": pa.array(
                [[("a", str(each)), ("b", None)][: each % 3] if each % 5 else None for each in range(count)],
                pa.map_(pa.string(), pa.string()),
            ),
            "half": pa.array([None if each % 7 == 0 else each / 2 for each in range(count)]),
            "ok": pa.array([each % 2 == 0 for each in range(count)]),
            "day": pa.array([date(2026, 1, 1 + each % 28) for each in range(count)]),
            "ts": pa.array([datetime(2026, 1, 1, 0, 0, each % 60, tzinfo=UTC) for each in range(count)]),
            "price": pa.array([Decimal(each) / 100 for each in range(count)], pa.decimal128(10, 2)),
            "deep": pa.array(
                [{"x": [each, None], "y": {"z": str(each)}} if each % 4 else None for each in range(count)]
            ),
        }
    )


def test_a_sum_does_not_mind_the_order_or_the_pieces() -> None:
    batch = table()
    rows = row_hash.hash_rows(batch)
    turned = batch.take(pa.array(np.random.default_rng(3).permutation(len(batch))))
    parts = [row_hash.sum_hashes(row_hash.hash_rows(batch.slice(at, 77))) for at in range(0, len(batch), 77)]
    assert row_hash.sum_hashes(row_hash.hash_rows(turned)) == row_hash.sum_hashes(rows) == sum(parts) & row_hash.MASK_64
    assert row_hash.sum_hashes(row_hash.hash_rows(batch.select(batch.schema.names[::-1]))) == row_hash.sum_hashes(rows)


def test_every_row_has_a_fingerprint_of_its_own() -> None:
    assert len(set(row_hash.hash_rows(table()).tolist())) == 500


def test_a_row_that_is_there_twice_does_not_cancel_out() -> None:
    batch = table()
    one = row_hash.sum_hashes(row_hash.hash_rows(batch))
    twice = pa.concat_batches([batch, batch.slice(3, 1), batch.slice(3, 1)])
    assert row_hash.sum_hashes(row_hash.hash_rows(twice)) != one


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())])
def test_how_a_text_is_kept_does_not_matter(kind: pa.DataType) -> None:
    plain = pa.array(["a", None, "", "longer than twelve bytes"])
    other = plain.dictionary_encode() if pa.types.is_dictionary(kind) else plain.cast(kind)
    assert row_hash.hash_values(plain).tolist() == row_hash.hash_values(other).tolist()


@pytest.mark.parametrize("sizes", [[0], [0, 1, 7, 8, 9, 300], [1], [8], [100], [104], [5000, 3]])
def test_all_ways_to_sum_words_agree(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """One for rows of one size, one for many rows, one for long ones: which is taken must not show. Another row beside
    them takes rows of one size off the first way."""
    chance = Random(2)
    datas = [chance.randbytes(chance.choice(sizes)) for _ in range(700)]
    found = []
    for many in (1, 1 << 40):
        monkeypatch.setattr(row_hash, "_BY_POSITION_MIN_ROWS", many)
        found.append(row_hash.hash_values(pa.array(datas, pa.binary())).tolist())
        found.append(row_hash.hash_values(pa.array([*datas, b"x" * 17], pa.binary())).tolist()[:-1])
    assert found[0] == found[1] == found[2] == found[3]


def test_any_byte_that_changes_is_seen() -> None:
    """Method: every bit of a text, every pair of bytes that trade places, and bytes that move to the next row."""
    text = bytes(range(40))
    seen = {row_hash.hash_values(pa.array([text]))[0]}
    changed = [bytes([*text[:at], text[at] ^ (1 << bit), *text[at + 1 :]]) for at in range(40) for bit in range(8)]
    traded = [
        bytes([*text[:a], text[b], *text[a + 1 : b], text[a], *text[b + 1 :]])
        for a in range(40)
        for b in range(a + 1, 40)
    ]
    others = [*changed, *traded, text + b"\0", text[:-1], b"\0" + text]
    seen |= set(row_hash.hash_values(pa.array(others)).tolist())
    assert len(seen) == len(others) + 1
    moved = [pa.record_batch({"a": pa.array(pair)}) for pair in (["ab", "c"], ["a", "bc"])]
    assert row_hash.sum_hashes(row_hash.hash_rows(moved[0])) != row_hash.sum_hashes(row_hash.hash_rows(moved[1]))


def test_nothing_empty_and_zero_are_three_things() -> None:
    texts = row_hash.hash_values(pa.array([None, "", "0"]))
    numbers = row_hash.hash_values(pa.array([None, 0, 1]))
    lists = row_hash.hash_values(pa.array([None, [], [None], [0]]))
    assert [len(set(found.tolist())) for found in (texts, numbers, lists)] == [3, 3, 4]


def test_a_sum_is_frozen() -> None:
    """It is kept in tables, so it never changes."""
    assert f"{row_hash.sum_hashes(row_hash.hash_rows(table(100))):016x}" == "69d8643feed4bb8f"
