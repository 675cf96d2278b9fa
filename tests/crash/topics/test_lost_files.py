"""Lost files of a data directory: told, refused or harmless, never silent, and no seq is given twice (D13).

Method: every file of a small directory is removed in turn, every set of files of one segment, and every pair of files
(`make crash`; one loss in three and a sample of the pairs in `make test`). Then the history goes on: append,
checkpoint, restart, and all reads are compared with what was written. A writer that is refused is opened with
`accept_loss` and goes on in the same way.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain, combinations, islice
from random import Random

import pytest
from tests.crash.topics.test_bit_flips import Rows, clock, read_all, small_directory
from tests.crash.topics.workloads import PATH, open_engine
from tests.kit.sampling import SEED

from tidelog.engine.check import check_directory
from tidelog.errors import Error
from tidelog.testing import SimDisk

Tell = Callable[[str, int], None]
STATES = ("killed", "closed", "closed twice")
_SEGMENT = re.compile(r"(.*/topics/.*/seg-\d+)\.\w+")


def losses(base: SimDisk) -> Iterator[tuple[str, ...]]:
    """Every file by itself, every set of files of one segment, and every directory's files."""
    segments: dict[str, list[str]] = {}
    directories: dict[str, list[str]] = {}
    for path in base.tree():
        directories.setdefault(path.rpartition("/")[0], []).append(path)
        if (found := _SEGMENT.fullmatch(path)) is not None:
            segments.setdefault(found[1], []).append(path)
        else:
            yield (path,)
    for paths in segments.values():
        yield from chain.from_iterable(combinations(paths, size) for size in range(1, len(paths) + 1))
    yield from (tuple(paths) for paths in directories.values())


def pairs(base: SimDisk) -> list[tuple[str, ...]]:
    """Every two files."""
    return list(combinations(sorted(base.tree()), 2))


def sampled_pairs(base: SimDisk, state: str, shards: int) -> list[tuple[str, ...]]:
    """Some of them, drawn by the case, and each pair of a WAL file and a file that proves it."""
    every = pairs(base)
    proofs = [pair for pair in every if "/CURRENT" in "".join(pair) or "/NEWEST" in "".join(pair)]
    proofs = [pair for pair in proofs if pair[0].rpartition("/")[0] == pair[1].rpartition("/")[0]]
    return sorted({*proofs, *Random(f"{state}/{shards}/{SEED}").sample(every, 4)})


def judge(base: SimDisk, paths: tuple[str, ...], shards: int) -> str:
    _, truth, ever = small_directory(shards)
    disk = base.reboot()
    for path in paths:
        disk.remove(path)
        disk.sync_dir(path.rpartition("/")[0])
    reader = "refused"
    with suppress(Error):
        reader = shown(disk.reboot(), read_only=True, shards=shards)[1]
    hurt = any(finding.damage for finding in check_directory(PATH, disk=disk.reboot()))
    assert hurt or reader == "harmless", f"a reader is {reader}, and `check` finds no damage"
    accepted = False
    try:
        found, outcome = shown(disk.reboot(), read_only=False, shards=shards)
        log = open_engine(disk := disk.reboot(), clock(), shards)
    except Error:
        assert reader in ("refused", "told"), f"a writer is refused, a reader is not told: {reader}"
        if reader == "refused":
            return "refused"
        found, outcome, accepted = shown(disk.reboot(), read_only=True, shards=shards)[0], "told", True
        log = open_engine(disk := disk.reboot(), clock(), shards, accept_loss=True)
        found = {name: found.get(name, {}) | rows for name, rows in read_all(log)[0].items()}
    heads = {name: max(rows) for name, rows in ever.items()}
    for number in range(6):
        for name in truth:
            try:
                seq = log.topic(name).append(b"after %d" % number).first_seq
            except Error:
                assert outcome == "told", f"{name} cannot be written and nothing was said"
                continue
            assert seq > heads[name] or name not in found, (
                f"{name}: seq {seq} is given again, {heads[name]} was the last"
            )
            heads[name] = max(heads[name], seq)
        try:
            log.checkpoint()
        except Error:
            assert outcome == "told", "a checkpoint fails and nothing was said"
    again, failed = read_all(open_engine(disk.reboot(), clock(), shards))
    for name, rows in again.items():
        if name not in truth:
            continue
        wrong = [seq for seq, kept in rows.items() if seq in ever[name] and ever[name][seq] != kept]
        assert not wrong, f"{name}: after a restart seqs {wrong} read otherwise"
        gone = set(found.get(name, {})) - set(rows)
        assert not gone or failed, f"{name}: after a restart seqs {sorted(gone)} are gone"
    return "accepted" if accepted else outcome


def shown(disk: SimDisk, *, read_only: bool, shards: int) -> tuple[Rows, str]:
    """What an open shows, and whether a loss is told."""
    _, truth, ever = small_directory(shards)
    log = open_engine(disk, clock(), shards, read_only=read_only)
    told = bool(log.report.damage or log.report.cut or log.report.quarantined)
    found, failed = read_all(log)
    for name in [name for name in found if name.startswith("recovered-")]:
        assert told, f"{name} is there and nothing says why"
        del found[name]  # the ledger of gaps, which lost its name: no record of it is in `truth`
    for name, rows in found.items():
        wrong = [seq for seq, kept in rows.items() if ever.get(name, {}).get(seq) != kept]
        assert not wrong, f"{name}: seqs {wrong} read otherwise"
    missing = {name: sorted(set(rows) - set(found.get(name, {}))) for name, rows in truth.items()}
    lost = {name: seqs for name, seqs in missing.items() if seqs}
    back = {name: sorted(set(rows) - set(truth[name])) for name, rows in found.items() if set(rows) - set(truth[name])}
    assert told or failed or not (lost or back), f"lost {lost}, back {back}, and nothing says so: {log.report.lines()}"
    return found, "told" if told or failed else "harmless"


@pytest.mark.slow
@pytest.mark.parametrize("step", [12, pytest.param(1, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("state", STATES)
def test_lost_file_is_reported_refused_or_harmless(state: str, shards: int, step: int, record_count: Tell) -> None:
    base = directory_in(state, shards)
    first = (2 * STATES.index(state) + shards + 6 * SEED) % step  # over all cases of two seeds every loss occurs
    outcomes = judge_all(base, islice(losses(base), first, None, step), shards, record_count)
    assert outcomes["told"]
    assert outcomes["accepted"] or step > 1


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("state", STATES)
def test_some_pairs_of_lost_files_are_reported_refused_or_harmless(state: str, shards: int, record_count: Tell) -> None:
    base = directory_in(state, shards)
    judge_all(base, sampled_pairs(base, state, shards), shards, record_count)


@pytest.mark.slow
@pytest.mark.parametrize(("state", "shards"), [("killed", 1), ("closed twice", 2)])
def test_every_pair_of_lost_files_of_manifests(state: str, shards: int, record_count: Tell) -> None:
    """Bases and deltas: a manifest with a hole is never used."""
    base = directory_in(state, shards)
    judge_all(base, (pair for pair in pairs(base) if all("/meta/" in path for path in pair)), shards, record_count)


@pytest.mark.sweep
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("state", STATES)
def test_every_pair_of_lost_files_is_reported_refused_or_harmless(state: str, shards: int, record_count: Tell) -> None:
    base = directory_in(state, shards)
    outcomes = judge_all(base, pairs(base), shards, record_count)
    assert outcomes["told"]
    assert outcomes["accepted"]


def directory_in(state: str, shards: int) -> SimDisk:
    base = small_directory(shards)[0].reboot()
    for _ in range(STATES.index(state)):
        open_engine(base, clock(), shards).close()
    return base


def judge_all(base: SimDisk, lost: Iterable[tuple[str, ...]], shards: int, record_count: Tell) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    for paths in lost:
        try:
            outcomes[judge(base, paths, shards)] += 1
        except Exception as wrong:
            raise AssertionError(f"without {', '.join(paths)}: {wrong}") from wrong
    for outcome, count in outcomes.items():
        record_count(f"lost files {outcome}", count)
    return outcomes
