"""The deletion vector, against a Python set."""

from __future__ import annotations

import struct
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidelog.errors import BadInput, Corrupt, NewerFormat
from tidelog.formats import sealed_segment, small_files
from tidelog.formats.sealed_segment import DeletionVector

quick = settings(max_examples=150, deadline=None, database=None)


@pytest.mark.parametrize("seed", range(40))
def test_a_vector_is_a_set_of_seqs(seed: int) -> None:
    random = Random(seed)
    base, size = random.randrange(1000), random.randrange(1, 70)
    vector, model = DeletionVector(base, size), set[int]()
    for _ in range(8):
        if random.random() < 0.5:
            seqs = [random.randrange(base, base + size) for _ in range(random.randrange(6))]
            new = vector.mark(seqs if random.random() < 0.5 else np.array(seqs, np.int64))
        else:
            first, stop = random.randrange(base - 5, base + size + 5), random.randrange(base - 5, base + size + 5)
            seqs = [seq for seq in range(first, stop) if base <= seq < base + size]
            new = vector.mark(range(max(first, base), min(stop, base + size)))
        assert new == len(set(seqs) - model), "only what was not deleted before is new"
        model |= set(seqs)
        assert vector.count == len(model)
        assert vector.seqs().tolist() == sorted(model)
        back = sealed_segment.decode_deletion_vector(sealed_segment.encode_deletion_vector(vector))
        assert (back.base, back.size, back.seqs().tolist()) == (base, size, sorted(model))
        assert sealed_segment.encode_deletion_vector(back) == sealed_segment.encode_deletion_vector(vector)


def test_the_same_deletions_give_the_same_bytes_in_any_order() -> None:
    one, two = DeletionVector(1, 20), DeletionVector(1, 20)
    one.mark([3, 9])
    one.mark(range(5, 7))
    two.mark(range(5, 6))
    two.mark([9, 6, 3, 3])
    assert sealed_segment.encode_deletion_vector(one) == sealed_segment.encode_deletion_vector(two)


def test_a_seq_outside_the_segment_cannot_be_marked() -> None:
    vector = DeletionVector(10, 5)
    for seq in (9, 15, -1):
        with pytest.raises(BadInput, match="outside"):
            vector.mark([12, seq])
    assert vector.count == 0, "refused as a whole"
    assert vector.mark(range(10, 15)) == 5


@pytest.mark.parametrize(("base", "size"), [(-1, 5), (0, -1), (0, 1 << 32), ((1 << 63) - 2, 2)])
def test_a_vector_that_could_not_be_decoded_is_refused(base: int, size: int) -> None:
    with pytest.raises(BadInput):
        DeletionVector(base, size)


def test_an_empty_vector_and_the_highest_seqs_decode() -> None:
    for base, size in ((7, 0), ((1 << 63) - 2, 1)):
        back = sealed_segment.decode_deletion_vector(sealed_segment.encode_deletion_vector(DeletionVector(base, size)))
        assert (back.base, back.size, back.count) == (base, size, 0)


def test_a_decoded_vector_can_be_marked_further() -> None:
    vector = DeletionVector(1, 9)
    vector.mark([1])
    back = sealed_segment.decode_deletion_vector(sealed_segment.encode_deletion_vector(vector))
    back.mark([9])
    assert back.seqs().tolist() == [1, 9]
    assert vector.seqs().tolist() == [1]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "too short"),
        (bytes(15), "too short"),
        (struct.pack("<QII", 1, 9, 0) + bytes(1), "do not fit its bitmap"),
        (struct.pack("<QII", 1, 9, 0) + bytes(3), "do not fit its bitmap"),
        (struct.pack("<QII", 1, (1 << 32) - 1, 0), "do not fit its bitmap"),
        (struct.pack("<QII", (1 << 63) - 1, 9, 0) + bytes(2), "do not fit its bitmap"),
        (struct.pack("<QII", 1, 9, 1) + b"\0\2", "bits after the last seq"),
        (struct.pack("<QII", 1, 9, 1) + b"\3\0", "1 deletions, its bitmap 2"),
    ],
)
def test_an_inconsistent_body_is_corrupt_with_a_reason(body: bytes, words: str) -> None:
    with pytest.raises(Corrupt, match=words):
        sealed_segment.decode_deletion_vector(
            small_files.wrap_file(sealed_segment.DELETIONS_MAGIC, sealed_segment.DELETIONS_VERSION, body), "seg-1.del"
        )


@quick
@given(st.binary(max_size=60), st.booleans())
def test_random_bytes_are_a_vector_or_a_typed_error(buf: bytes, wrapped: bool) -> None:
    if wrapped:
        buf = small_files.wrap_file(sealed_segment.DELETIONS_MAGIC, sealed_segment.DELETIONS_VERSION, buf)
    try:
        vector = sealed_segment.decode_deletion_vector(buf)
    except (Corrupt, NewerFormat):
        return
    assert sealed_segment.encode_deletion_vector(vector) == buf
