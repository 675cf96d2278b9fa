"""The crash images: exactly the legal ones, each once, the same ones from the same seed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, combinations
from random import Random
from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidelog.testing import ALL_POLICIES, Policy, SimDisk

Written: TypeAlias = tuple[int, bytes]  # a write at a position
Call: TypeAlias = Written | int  # or a cut


def subsets(numbers: list[int]) -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(combinations(numbers, count) for count in range(len(numbers) + 1))


def legal_contents(durable: bytes, calls: list[Call]) -> set[bytes]:
    """Every content a power cut may leave, by brute force over single bytes. Shares no code with the disk."""
    steps: list[Call] = []
    end = len(durable)
    for call in calls:
        if isinstance(call, int):
            if call != end:
                steps.append(call)
            end = call
            continue
        pos, data = call
        while data:
            taken = 512 - pos % 512
            if pos + len(data[:taken]) > end:
                end = pos + len(data[:taken])
                steps.append(end)
            steps.append((pos, data[:taken]))
            pos, data = pos + taken, data[taken:]
    sizes = [number for number, step in enumerate(steps) if isinstance(step, int)]
    pieces = [number for number, step in enumerate(steps) if not isinstance(step, int)]
    contents = set()
    for count in range(len(sizes) + 1):
        for kept in subsets(pieces):
            cells, end = dict(enumerate(durable)), len(durable)
            for number, step in enumerate(steps):
                if isinstance(step, int):
                    if number in sizes[:count]:
                        if step < end:
                            cells = {pos: byte for pos, byte in cells.items() if pos < step}
                        end = step
                elif number in kept:
                    cells.update(enumerate(step[1], step[0]))
            contents.add(bytes(cells.get(pos, 0) for pos in range(end)))
    return contents


def run(durable: bytes, calls: list[Call]) -> SimDisk:
    disk = SimDisk()
    disk.write_file("a", durable)
    file = disk.open("a", "write")
    for call in calls:
        if isinstance(call, int):
            file.truncate(call)
        else:
            file.write(*call)
    return disk


def contents(disk: SimDisk, policies: tuple[Policy, ...], seed: int = 0) -> set[bytes]:
    return {image.disk.read_file("a") for image in disk.images(policies, Random(seed))}


CALLS = st.lists(
    st.one_of(
        st.integers(0, 700),
        st.tuples(st.integers(0, 700), st.binary(min_size=1, max_size=9).map(lambda b: b * 40)),
    ),
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([b"", b"d" * 300, b"d" * 700]), CALLS)
def test_every_image_is_one_that_the_rules_allow(durable: bytes, calls: list[Call]) -> None:
    legal = legal_contents(durable, calls)
    disk = run(durable, calls)
    assert contents(disk, ALL_POLICIES) <= legal
    assert disk.crash_image(Random(3)).read_file("a") in legal


@pytest.mark.parametrize(
    "calls",
    [
        [(0, b"n" * 700)],
        [(500, b"n" * 30), 505, (505, b"m" * 20)],
        [(0, b"n" * 600), 100, (50, b"m" * 100)],
        [600, 10, (511, b"nn")],
    ],
)
def test_chance_reaches_every_image_that_the_rules_allow(calls: list[Call]) -> None:
    disk = run(b"d" * 520, calls)
    reached = set().union(*(contents(disk, ("random",), seed) for seed in range(40)))
    assert reached == legal_contents(b"d" * 520, calls)


def test_a_tiny_case_gives_exactly_its_images_with_their_labels() -> None:
    disk = SimDisk()
    disk.make_dir("d")
    disk.open("d/a", "create").write(0, b"x")
    made = [(image.label, image.disk.tree()) for image in disk.images(("none", "prefixes", "all"))]
    assert made == [
        ("none", {}),
        ("prefixes 1/3, up to link a in d", {"d/a": b""}),
        ("prefixes 2/3, up to size 1 of d/a", {"d/a": b"\0"}),
        ("prefixes 3/3, up to d/a@0+1", {"d/a": b"x"}),
    ]
    assert [image.disk.tree() for image in disk.images(("only_one",))] == [{"d/a": b""}, {}]
    every = [image.disk.tree() for image in disk.images()]
    assert sorted(every, key=repr) == sorted([{}, {"d/a": b""}, {"d/a": b"\0"}, {"d/a": b"x"}], key=repr)


def test_prefixes_follow_the_order_in_which_the_whole_disk_was_used() -> None:
    disk = SimDisk()
    disk.write_file("a", b"--")
    disk.write_file("b", b"-")
    one, other = disk.open("a", "write"), disk.open("b", "write")
    one.write(0, b"1")
    other.write(0, b"2")
    one.write(1, b"3")
    seen = [b"".join(image.disk.tree().values()) for image in disk.images(("prefixes",))]
    assert seen == [b"---", b"1--", b"1-2", b"132"]


def test_all_but_one_and_only_one_respect_the_logs() -> None:
    disk = SimDisk()
    disk.make_dir("d")
    for name in "abc":
        disk.open(f"d/{name}", "create")
    assert [tuple(image.disk.list_dir("d")) for image in disk.images(("all_but_one",))] == [
        (),
        ("a",),
        ("a", "b"),
    ]
    only = [tuple(image.disk.list_dir("d")) for image in disk.images(("only_one",))]
    assert only == [("a",), ("a", "b"), ("a", "b", "c")]


def test_all_but_one_and_only_one_pick_single_sectors() -> None:
    disk = run(b"o" * 1536, [(0, b"n" * 1536)])
    o, n = b"o" * 512, b"n" * 512
    assert contents(disk, ("all_but_one",)) == {o + n + n, n + o + n, n + n + o}
    assert contents(disk, ("only_one",)) == {n + o + o, o + n + o, o + o + n}


def test_torn_last_tears_only_the_last_write() -> None:
    disk = run(b"o" * 1536, [(0, b"m" * 1536), (512, b"n" * 1024)])
    m, n = b"m" * 512, b"n" * 512
    assert contents(disk, ("torn_last",)) == {m + m + m, m + n + m}


def test_directories_are_tried_with_all_data_and_with_none() -> None:
    disk = SimDisk()
    disk.write_file("d/a", b"old")
    disk.open("d/a", "write").write(0, b"new")
    disk.rename("d/a", "d/b")
    made = [image.disk.tree() for image in disk.images(("directories",))]
    assert made == [{"d/a": b"new"}, {"d/b": b"new"}, {"d/a": b"old"}, {"d/b": b"old"}]


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_with_nothing_pending_there_is_at_most_one_image(policy: Policy) -> None:
    disk = SimDisk()
    disk.write_file("a", b"abc")
    made = [image.disk.tree() for image in disk.images((policy,))]
    assert made == ([] if policy in ("all_but_one", "only_one", "torn_last") else [{"a": b"abc"}])


def busy() -> SimDisk:
    disk = SimDisk()
    for name in "xyz":
        disk.make_dir(name)
        for number in range(3):
            disk.open(f"{name}/{number}", "create").write(0, bytes([65 + number]) * 1300)
        disk.rename(f"{name}/0", f"{name}/2")
    return disk


def test_no_two_images_of_one_call_are_alike() -> None:
    digests = [image.disk.digest() for image in busy().images()]
    assert len(digests) > 100
    assert len(set(digests)) == len(digests)


def test_the_same_seed_gives_the_same_images_and_another_seed_others() -> None:
    def made(seed: int) -> list[tuple[str, bytes]]:
        return [(image.label, image.disk.digest()) for image in busy().images(("random",), Random(seed))]

    assert made(1) == made(1)
    assert made(1) != made(2)
    assert busy().crash_image(Random(7)).digest() == busy().crash_image(Random(7)).digest()


@pytest.mark.parametrize("limit", [1, 2, 10, 50])
def test_a_limit_draws_a_sample_by_seed_that_holds_the_extremes(limit: int) -> None:
    def made(seed: int) -> list[bytes]:
        return [image.disk.digest() for image in busy().images(ALL_POLICIES, Random(seed), limit=limit)]

    disk = busy()
    sample = made(1)
    assert sample == made(1)
    assert 0 < len(sample) <= limit
    assert set(sample) <= {image.disk.digest() for image in disk.images(ALL_POLICIES, Random(1))}
    extremes = {disk.crash_image("none").digest(), disk.crash_image("all").digest()}
    assert limit == 1 or extremes <= set(sample)
    assert limit < 10 or sample != made(2)


def test_images_that_differ_in_advisory_files_alone_are_one() -> None:
    def images(advisory: frozenset[str]) -> set[tuple[bytes, bytes]]:
        disk = SimDisk()
        disk.advisory_files = advisory
        files = [disk.open(name, "create") for name in ("data", "SYNCED")]
        for file in files:
            file.write(0, b"old")
            file.sync()
        disk.sync_dir("")
        for content in (b"one", b"two"):
            for file in files:
                file.write(0, content)
        found = {(image.disk.read_file("data"), image.disk.read_file("SYNCED")) for image in disk.images()}
        assert {data for data, _ in found} == {b"old", b"one", b"two"}
        return found

    every, merged = images(frozenset()), images(frozenset({"SYNCED"}))
    assert merged < every
    assert len(merged) < len(every) == 9
    assert {(b"old", b"old"), (b"two", b"two")} <= merged
