"""The file of a segment's tag index: what is written is read, block by block, and nothing else is believed."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidelog.engine.tag_search import TagIndex
from tidelog.errors import Corrupt, NewerFormat
from tidelog.formats import tag_index

TAGS = st.lists(st.none() | st.binary(max_size=12), max_size=60)


def made(tags: list[bytes | None], base: int = 7, foot: int = 5) -> bytes:
    index = TagIndex.build(pa.array(tags, pa.binary()))
    return tag_index.encode(base, foot, len(tags), index.to_block())


def rows(tags: list[bytes | None]) -> dict[bytes, list[int]]:
    found: dict[bytes, list[int]] = {}
    for row, tag in enumerate(tags):
        if tag:
            found.setdefault(tag, []).append(row)
    return dict(sorted(found.items()))


@settings(deadline=None)
@given(TAGS)
def test_every_tag_decodes_with_its_rows(tags: list[bytes | None]) -> None:
    content = made(tags)
    assert tag_index.decode(content) == rows(tags)
    found = tag_index.decode_directory(content, len(content))
    assert (found.base, found.footer_xxh3, found.records, found.tags) == (7, 5, len(tags), len(rows(tags)))


@pytest.mark.parametrize("count", [1, 100, 5_000, 70_000])
def test_blocks_are_about_four_kibibytes_and_each_is_read_alone(count: int) -> None:
    tags: list[bytes | None] = [b"tag-%08d" % (number * 7_919 % count) for number in range(count)]
    content = made(tags)
    found = tag_index.decode_directory(content[: tag_index.directory_end(content)], len(content))
    sizes = [stop - start for start, stop in pairwise(found.block_pos.tolist())]
    assert all(tag_index.BLOCK_BYTES <= size < 2 * tag_index.BLOCK_BYTES for size in sizes[:-1])
    assert found.nbytes <= 40 * (count // 150 + 2), "the directory has an entry a block, not a tag"
    first = [found.first_tag(number) for number in range(found.blocks)]
    assert first == sorted(first)
    number = found.blocks // 2
    some = tag_index.decode_block(found, number, content[found.block_pos[number] : found.block_pos[number + 1]])
    assert some.tag(0) == first[number]


def test_tag_with_very_many_rows_has_a_block_of_its_size() -> None:
    tags: list[bytes | None] = [*[b"all"] * 30_000, b"one"]
    assert tag_index.decode(made(tags)) == {b"all": list(range(30_000)), b"one": [30_000]}


def test_newer_version_is_named_and_a_changed_version_byte_is_damage() -> None:
    content = bytearray(made([b"a"]))
    content[4] = 2
    with pytest.raises(Corrupt, match="checksum"):
        tag_index.decode(bytes(content))
    lead = tag_index.directory_end(content)
    content[40:48] = tag_index._checksum(bytes(content[:40]), bytes(content[48:lead])).to_bytes(8, "little")
    with pytest.raises(NewerFormat):
        tag_index.decode(bytes(content))


@pytest.mark.parametrize("tags", [[b"a", None, b"bb", b"a"], [], [b"x" * 300] * 40 + [b"y" * 5000]])
def test_every_changed_byte_and_every_cut_is_detected(tags: list[bytes | None]) -> None:
    content = made(tags)
    step = max(len(content) // 300, 1)
    for at in range(0, len(content), step):
        changed = bytearray(content)
        changed[at] ^= 1 << at % 8
        with pytest.raises((Corrupt, NewerFormat)):
            tag_index.decode(bytes(changed))
        with pytest.raises((Corrupt, NewerFormat)):
            tag_index.decode(content[:at])
    with pytest.raises(Corrupt):
        tag_index.decode(content + b"\0")


def test_row_that_the_segment_does_not_have_is_damage() -> None:
    index = TagIndex.build(pa.array([b"a", b"b"], pa.binary()))
    content = tag_index.encode(1, 0, 1, index.to_block())
    with pytest.raises(Corrupt, match="row"):
        tag_index.decode(content)
    assert np.array_equal(index.find_exact(b"b"), [1])
