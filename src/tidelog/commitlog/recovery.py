"""Recovery: open the files of a log after a crash, a kill, or damage.

Rules, in order of authority:
  1. Bytes that may contain an acked record are never dropped: a cut that is not plainly a torn last record is copied
     to `quarantine/` first, and the report lists it.
  2. The last segment is the active one. It is scanned whole and cut at the first bad record. If that record was durable
     (the manifest has the durable size), the segment is not cut: it becomes a sealed one and a new one is started.
  3. A sealed segment is never changed. Damage in it is reported, and all other records are served.
  4. Derived files are rebuilt beside the old ones and renamed into place.
  5. Temporaries, and segments that the manifest lists as being removed, are swept; unknown names are left alone.
     A segment that the manifest names, or that a side file proves, and whose files are missing is damage: it stays in
     the list, its seqs raise Corrupt, and they are never assigned again.
  6. An unknown layout is an error (UnknownLayout) before anything is changed. The end of an active segment of another
     program is cut only where it is plainly an unfinished write, or on request.

With `writable=False` nothing on disk changes: cuts are logical, rebuilt indexes stay in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from tidelog.commitlog.codec import Codec, Fault, RecoveredSegment, Salvage
from tidelog.commitlog.codecs import guess_codec, rustlog
from tidelog.commitlog.segment import ActiveSegment, LogFiles, SealedSegment, created_us, finish_replacements, map_file
from tidelog.disk.durability import WriteLatch, read_file, remove_if_exists, replace_file
from tidelog.disk.interface import Disk, File, Mode, join
from tidelog.errors import Corrupt, Damaged, Error, Unavailable, UnknownLayout
from tidelog.formats import small_files
from tidelog.formats.rows import Rows, ScanStop
from tidelog.formats.small_files import UNKNOWN_BYTES, LogManifest, ManifestEntry
from tidelog.types import Buffer

QUARANTINE_DIR = "quarantine"
_READ_ATTEMPTS_MAX = 64
_OFFSETS_FILE = ".consumer_offsets"
_TEMPORARIES = frozenset(
    (".cleaner_checkpoint.tmp", f"{_OFFSETS_FILE}.tmp", ".next_seq.tmp", f"{small_files.MANIFEST_NAME}.tmp")
)
_LOST_SEGMENT_MARGIN_SEQS = 1 << 20  # added to the estimate for a lost segment without a manifest
_RECORDS_PER_INDEX_BYTE_MAX = 16  # at most, in a sparse index
_READ_CHUNK_BYTES = 8 << 20  # of one read while a whole segment is verified


class Damage(NamedTuple):
    """A fault and the file it is in."""

    file: str
    fault: Fault


@dataclass(slots=True)
class RecoveryReport:
    """Findings and repairs of an open. Printed by the command line."""

    segments: int = 0
    cut_bytes: int = 0
    cut_reason: str = ""
    rebuilt: list[str] = field(default_factory=list)
    swept: list[str] = field(default_factory=list)
    quarantined: list[str] = field(default_factory=list)
    damage: list[Damage] = field(default_factory=list)
    next_seq_floor: int = 0  # seqs below this one were found in the cut bytes and are not assigned again
    cut_suspect: bool = False  # the cut may be more than one unfinished write: records may follow the bad one
    has_unexplained_tail: bool = False  # the cut may be records of another program: readers raise at the end
    notes: list[str] = field(default_factory=list)  # unusual, harmless, and left as it is
    index_rebuilds: int = 0  # segments whose derived files were built again from the data
    index_rebuild_us: int = 0

    @property
    def clean(self) -> bool:
        """Whether nothing was repaired and nothing is damaged."""
        return not (self.cut_bytes or self.rebuilt or self.swept or self.quarantined or self.damage)

    def lines(self) -> list[str]:
        """Return the report as text, one finding per line."""
        lines = []
        if self.cut_bytes:
            lines.append(f"cut {self.cut_bytes} bytes of an unfinished write ({self.cut_reason})")
        lines += self.notes
        lines += [f"rebuilt {name}" for name in self.rebuilt]
        lines += [f"swept {name}" for name in self.swept]
        lines += [f"kept the cut bytes in {name}" for name in self.quarantined]
        lines += [
            f"damage in {file} at byte {fault.pos}{fault.seqs_text}: {fault.reason}" for file, fault in self.damage
        ]
        return lines


class DirectorySnapshot(NamedTuple):
    """One state of a directory: its file names, and its manifest, which every change of the log replaces."""

    names: tuple[str, ...]
    manifest: bytes | None


class RecoveredLog(NamedTuple):
    sealed: list[SealedSegment]
    active: ActiveSegment | None
    report: RecoveryReport
    manifest: LogManifest | None = None
    next_base: int | None = None  # where numbering continues; None: at the end of the active segment, or of a new log


def load_manifest(disk: Disk, directory: str) -> LogManifest | None:
    """Return the manifest of the log in this directory; None for a log of another program or of an older version.
    Raises Corrupt or NewerFormat where it cannot be read."""
    path = join(directory, small_files.MANIFEST_NAME)
    content = read_file(disk, path)
    return None if content is None else small_files.decode_manifest(content, path)


def detect_codec(disk: Disk, directory: str, names: Sequence[str]) -> str | None:
    """Return the codec that wrote this directory, from its manifest or from its file names."""
    with suppress(Corrupt):
        if small_files.MANIFEST_NAME in names and (manifest := load_manifest(disk, directory)) is not None:
            return manifest.codec
    return guess_codec(names)


def read_directory(files: LogFiles) -> DirectorySnapshot:
    """Read the current state of the directory."""
    names = tuple(files.disk.list_dir(files.directory))
    return DirectorySnapshot(names, read_file(files.disk, join(files.directory, small_files.MANIFEST_NAME)))


class SegmentListing(NamedTuple):
    bases: list[int]  # of the segments that exist, or that other files prove to have existed
    suffixes_by_base: dict[int, set[str]]  # the files of each; "" is the data file
    leftovers: list[int]  # files without a segment, of an interrupted creation or removal


def list_segments(files: LogFiles, names: Sequence[str], manifest: LogManifest | None) -> SegmentListing:
    """Separate the segments of a directory from leftovers of interrupted steps.

    A base that the manifest names is a segment, whether its files exist or not; one that it lists as being removed is
    not. Another one whose files are all empty never contained a record. Any other was written by a program that keeps
    no manifest, or its data was lost: a side file with content is evidence.
    """
    codec = files.codec
    parts: dict[int, set[str]] = {}
    for name in names:
        if (known := codec.parse_file_name(name)) is not None:
            parts.setdefault(known[0], set()).add(known[1])
    named = _named_bases(manifest)
    removing = set(manifest.removing) if manifest is not None else set()
    # A segment exists where its index does if the index is authoritative; otherwise where its data does.
    leader = codec.side_suffixes[0] if 0 in codec.authoritative_sides else ""
    bases = set(named)
    for base in set(parts) - named - removing:
        if manifest is None:
            counts = leader in parts[base] or _has_content(files, base, parts[base])
        else:
            dropped = leader not in parts[base] and "" not in parts[base] and base < min(named, default=0)
            counts = not dropped and _has_content(files, base, parts[base])
        if counts:
            bases.add(base)
    return SegmentListing(sorted(bases), parts, sorted(set(parts) - bases))


def _named_bases(manifest: LogManifest | None) -> set[int]:
    if manifest is None:
        return set()
    return {entry.base for entry in (*manifest.segments, *([manifest.active] if manifest.active else []))}


def _has_content(files: LogFiles, base: int, suffixes: set[str]) -> bool:
    """Whether any file of a segment except `.created` contains more than preallocated zeros."""
    paths = [
        files.side_path(base, suffix) if suffix else files.data_path(base)
        for suffix in suffixes - {files.codec.created_suffix}
    ]
    return any(any(read_file(files.disk, path) or b"") for path in paths)


def recover_log(
    files: LogFiles, latch: WriteLatch, *, writable: bool, verify: bool, repair: bool = False
) -> RecoveredLog:
    """Recover every readable record and report the rest. `repair` also cuts an unexplained end."""
    if writable:
        _detect_layout(files)
        return _recover_once(files, latch, writable=True, verify=verify, repair=repair)
    return recover_for_reading(files, latch, verify=verify)[0]


def recover_for_reading(files: LogFiles, latch: WriteLatch, *, verify: bool) -> tuple[RecoveredLog, DirectorySnapshot]:
    """`recover_log` for a reader, beside a writer at any step. Damage counts only if the directory did not change
    while it was read."""
    for _ in range(_READ_ATTEMPTS_MAX):
        before = read_directory(files)
        recovered: RecoveredLog | None = None
        try:
            _detect_layout(files)
            recovered = _recover_once(files, latch, writable=False, verify=verify, repair=False)
        except (OSError, Error):
            if read_directory(files) == before:
                raise
        else:
            after = read_directory(files)
            if after == before:
                return recovered, after
            removed = _snapshot_bases(files, before) - _snapshot_bases(files, after)
            if not (removed or recovered.report.damage or recovered.report.cut_suspect):
                return recovered, before  # the older one: a read that finds damage later reads the directory again
        if recovered is not None:
            if recovered.active is not None:
                recovered.active.close()
            for base in (segment.base for segment in recovered.sealed):
                files.drop_cached(base)
    raise Unavailable(f"{files.directory} changes faster than it can be opened; nothing was changed, try again")


def _snapshot_bases(files: LogFiles, snapshot: DirectorySnapshot) -> set[int]:
    return {known[0] for name in snapshot.names if (known := files.codec.parse_file_name(name)) is not None}


def _detect_layout(files: LogFiles) -> None:
    """Let the codec detect the variant of its layout from the files. Nothing is changed."""

    def read(name: str) -> Buffer | None:
        return map_file(files.disk, join(files.directory, name))

    try:
        files.codec.detect_layout(files.disk.list_dir(files.directory), read)
    except UnknownLayout as error:
        raise UnknownLayout(f"{files.directory}: {error}") from None


def _recover_once(files: LogFiles, latch: WriteLatch, *, writable: bool, verify: bool, repair: bool) -> RecoveredLog:
    report = RecoveryReport()
    manifest = _load_manifest_or_report(files, report, writable=writable)
    names = files.disk.list_dir(files.directory)
    listing = list_segments(files, names, manifest)
    if writable and listing.bases and not repair:
        last = listing.bases[-1]
        is_foreign = files.codec.is_foreign(listing.suffixes_by_base.get(last, ()))
        if last in listing.suffixes_by_base and (is_foreign or _continued_from(files, last, manifest) is not None):
            _check_tail_explained(files, last, manifest)
    if writable and (finished := finish_replacements(files, listing.bases)):
        report.rebuilt += finished
        names = files.disk.list_dir(files.directory)
        listing = list_segments(files, names, manifest)
    if writable:
        _remove_leftovers(files, names, listing, report)
    sealed = _open_sealed_segments(files, listing.bases, manifest, report, writable=writable, verify=verify)
    active, next_base = None, None
    if listing.bases:
        active, retired, next_base = _open_last_segment(
            files, latch, listing.bases[-1], manifest, report, writable=writable
        )
        if retired is not None:
            sealed.append(retired)
    if manifest is not None and manifest.offsets and files.disk.stat(join(files.directory, _OFFSETS_FILE)) is None:
        reason = "the file is missing: the committed offsets of consumers are lost"
        report.damage.append(Damage(_OFFSETS_FILE, Fault(0, 0, 0, reason)))
    if writable:
        # Names that a killed process created or removed may not be durable yet, and later acks depend on them.
        files.disk.sync_dir(files.directory)
    report.segments = len(listing.bases)
    return RecoveredLog(sealed, active, report, manifest, next_base)


def _open_sealed_segments(
    files: LogFiles,
    bases: Sequence[int],
    manifest: LogManifest | None,
    report: RecoveryReport,
    *,
    writable: bool,
    verify: bool,
) -> list[SealedSegment]:
    """Open every segment but the last. Where no manifest names the next one, seqs between the two may be lost."""
    sealed: list[SealedSegment] = []
    named = _named_bases(manifest)
    entries = {} if manifest is None else {entry.base: entry for entry in manifest.segments}
    if manifest is not None and manifest.active is not None:
        entries[manifest.active.base] = manifest.active
    open_one = partial(_open_sealed, files, manifest=manifest)
    for base, stop in pairwise(bases):
        hole: SealedSegment | None = None
        if stop not in named:
            # Opened without writing first: an index that is filled up to the next segment would hide lost records.
            first = open_one(base, stop, entries.get(base), RecoveryReport(), writable=False, verify=False)
            hole = _find_missing_seqs(files, first, manifest, report)
            files.drop_cached(base)
            stop = first.stop
            if first.lost_reason and hole is first:
                sealed.append(first)
                continue
        sealed.append(open_one(base, stop, entries.get(base), report, writable=writable, verify=verify))
        if hole is not None:
            sealed.append(hole)
    return sealed


def _continued_from(files: LogFiles, base: int, manifest: LogManifest | None) -> int | None:
    """Return the byte where another program has continued a segment of ours, or None.

    The manifest of a closed log has the exact size of its active segment, and is replaced before the next append. So
    bytes after that size are not ours."""
    if manifest is None or not manifest.clean or manifest.active is None or manifest.active.base != base:
        return None
    stat, known = files.disk.stat(files.data_path(base)), manifest.active.data_bytes
    return known if stat is not None and stat.size > known >= 0 else None


def _recover_data(
    files: LogFiles, base: int, content: Buffer, sides: Sequence[bytes | None], manifest: LogManifest | None
) -> RecoveredSegment:
    start = _continued_from(files, base, manifest)
    if start is None:
        return files.codec.recover(content, sides, base)
    return files.codec.recover_continued(content, sides, base, start)


def _check_tail_explained(files: LogFiles, base: int, manifest: LogManifest | None) -> None:
    """Raise before anything is changed where the end of another program's active segment would have to be cut, and is
    not plainly an unfinished write."""
    content = map_file(files.disk, files.data_path(base)) or b""
    recovered = _recover_data(files, base, content, _read_sides(files, base), manifest)
    if recovered.has_unexplained_tail:
        error = Damaged(
            f"{files.data_path(base)}: {len(content) - recovered.end} bytes from byte {recovered.end} on "
            f"(seq {recovered.next_seq}) are not readable records ({recovered.reason}) "
            "and not plainly an unfinished write; nothing was changed. "
            "`tidelog log repair` cuts them and keeps them in quarantine; `tidelog log restore` copies the records "
            "before them"
        )
        error.written = False
        raise error


def _load_manifest_or_report(files: LogFiles, report: RecoveryReport, *, writable: bool) -> LogManifest | None:
    """Load the manifest; None and a report where it is damaged. It is quarantined before a new one is written."""
    try:
        return load_manifest(files.disk, files.directory)
    except Corrupt as error:
        reason = f"{error.reason}; lost segment files are known only as far as the other files prove them"
        report.damage.append(Damage(small_files.MANIFEST_NAME, Fault(0, 0, error.pos, reason)))
        if writable:
            path = join(files.directory, small_files.MANIFEST_NAME)
            report.quarantined.append(_quarantine(files, small_files.MANIFEST_NAME, read_file(files.disk, path) or b""))
        return None


def _find_missing_seqs(
    files: LogFiles, segment: SealedSegment, manifest: LogManifest | None, report: RecoveryReport
) -> SealedSegment | None:
    """Without a manifest: find the seqs between two segments that no file contains. Compaction explains them where its
    checkpoint is past them; otherwise files were lost."""
    if segment.salvage is not None or segment.lost_reason:
        return None
    reach, stop = files.codec.end_seq(segment.content()), segment.stop
    if segment.rebuilt_sides is not None:
        content = map_file(files.disk, files.data_path(segment.base)) or b""
        sides = _read_sides(files, segment.base)
        reach = _recover_data(files, segment.base, content, sides, manifest).next_seq
    if reach >= stop:
        return None
    text = read_file(files.disk, join(files.directory, rustlog.CLEANER_CHECKPOINT_NAME))
    with suppress(Corrupt):
        if text is not None and rustlog.decode_cleaner_checkpoint(text).last_cleaned_seq >= stop:
            return None
    reason = "no file contains these records and nothing shows that they were removed"
    report.damage.append(Damage(files.codec.data_name(reach), Fault(reach, stop, 0, reason)))
    if reach == segment.base:
        segment.lost_reason = reason
        return segment
    segment.stop = reach
    return SealedSegment(files, reach, stop, 0, 0, lost_reason=reason)


def _remove_leftovers(files: LogFiles, names: Sequence[str], listing: SegmentListing, report: RecoveryReport) -> None:
    """Remove the files of interrupted steps. `_recover_once` syncs the directory at its end; names that a power cut
    restores before that are swept again."""
    disk, codec, directory = files.disk, files.codec, files.directory
    for name in names:
        if not codec.is_temporary(name) and name not in _TEMPORARIES:
            continue
        remove_if_exists(disk, join(directory, name))
        report.swept.append(name)
    for base in listing.leftovers:
        for suffix in sorted(listing.suffixes_by_base[base]):
            name = codec.side_name(base, suffix) if suffix else codec.data_name(base)
            remove_if_exists(disk, join(directory, name))
            report.swept.append(name)


def _quarantine(files: LogFiles, name: str, content: Buffer) -> str:
    directory = join(files.directory, QUARANTINE_DIR)
    files.disk.make_dir(directory)
    replace_file(files.disk, join(directory, name), content)
    return f"{QUARANTINE_DIR}/{name}"


def _read_sides(files: LogFiles, base: int) -> list[bytes | None]:
    return [read_file(files.disk, files.side_read_path(base, suffix)) for suffix in files.codec.side_suffixes]


def rebuild_sides(
    files: LogFiles, base: int, recovered: RecoveredSegment, report: RecoveryReport | None = None
) -> None:
    """Write the derived side files that a scan computed: beside the old ones, then renamed over them."""
    codec = files.codec
    for number, (suffix, content) in enumerate(zip(codec.side_suffixes, recovered.sides, strict=True)):
        if number in codec.authoritative_sides:
            continue  # cannot be derived
        path = files.side_path(base, suffix)
        if read_file(files.disk, path) == content:
            continue
        replace_file(files.disk, path, content, temporary=f"{path}.rebuilding")
        if report is not None:
            report.rebuilt.append(codec.side_name(base, suffix))
    files.drop_cached(base)


def _open_sealed(
    files: LogFiles,
    base: int,
    stop: int,
    entry: ManifestEntry | None,
    report: RecoveryReport,
    *,
    writable: bool,
    verify: bool,
    manifest: LogManifest | None = None,
) -> SealedSegment:
    codec, disk = files.codec, files.disk
    stat = disk.stat(files.data_path(base))
    extra = read_file(disk, files.side_path(base, codec.footer_suffix)) if codec.footer_suffix else None
    sides = [disk.stat(files.side_read_path(base, suffix)) for suffix in codec.side_suffixes]
    segment = SealedSegment(
        files, base, stop, stat.size if stat else 0, sum(side.size for side in sides if side), extra
    )
    segment.authoritative_side_bits = sum(
        1 << n for n, side in enumerate(sides) if side is not None and n in codec.authoritative_sides
    )
    segment.complete_bytes = segment.size if stat is not None else UNKNOWN_BYTES
    if entry is not None:
        segment.complete_bytes, segment.authoritative_side_bits = entry.data_bytes, entry.sides
    if entry is not None and stat is not None:
        _report_missing_sides(segment, [side is not None for side in sides], report)
    if stat is None and segment.complete_bytes != 0:
        segment.lost_reason = "the data file is missing"
        report.damage.append(Damage(codec.data_name(base), Fault(base, stop, 0, segment.lost_reason)))
        return segment
    if (start := _continued_from(files, base, manifest)) is not None:
        _extend_sides(segment, start, report, writable=writable)
    index_fault, tail_fault = codec.check_sealed(segment.content())
    if verify and index_fault is None and 0 not in codec.authoritative_sides:
        index_fault = _index_mismatch(segment)
    if 0 in codec.authoritative_sides:
        if index_fault is not None or tail_fault is not None or segment.size < segment.complete_bytes:
            name = codec.side_name(base, codec.side_suffixes[0])
            _salvage_segment(segment, report, name)
            _report_contradiction(segment, tail_fault or Fault(base, base, 0, index_fault or ""), report, name)
    elif segment.size < segment.complete_bytes or (tail_fault is not None and codec.footer_suffix):
        _salvage_segment(segment, report)
        if tail_fault is not None:
            _report_contradiction(segment, tail_fault, report, codec.data_name(base))
    elif index_fault is not None or tail_fault is not None:
        _rebuild_index(segment, report, writable=writable)
    if segment.salvage is None and verify:
        report.damage += [Damage(codec.data_name(base), fault) for fault in find_segment_faults(segment)[0]]
    return segment


def _extend_sides(segment: SealedSegment, start: int, report: RecoveryReport, *, writable: bool) -> None:
    """Let the side files of a segment cover what another program appended to it before it started the next one."""
    files, base, codec = segment.files, segment.base, segment.files.codec
    sides = _read_sides(files, base)
    recovered = codec.recover_continued(map_file(files.disk, files.data_path(base)) or b"", sides, base, start)
    if recovered.stop is not ScanStop.END or tuple(sides) == recovered.sides:
        return
    content = codec.fill_holes(recovered.sides, base, segment.stop, recovered.end)
    if not writable:
        segment.rebuilt_sides = content
        return
    for suffix, old, new in zip(codec.side_suffixes, sides, content, strict=True):
        path = files.side_path(base, suffix)
        if old != new:
            replace_file(files.disk, path, new, temporary=f"{path}.rebuilding")
            report.rebuilt.append(codec.side_name(base, suffix))
    files.drop_cached(base)


def _report_missing_sides(segment: SealedSegment, present: Sequence[bool], report: RecoveryReport) -> None:
    """Report missing authoritative side files of a segment. Its records are served, unchecked."""
    codec = segment.files.codec
    for number, (suffix, is_there) in enumerate(zip(codec.side_suffixes, present, strict=True)):
        if (
            number > 0
            and segment.authoritative_side_bits >> number & 1
            and not is_there
            and number in codec.authoritative_sides
        ):
            reason = "the file is missing: the records cannot be checked against it any more"
            report.damage.append(
                Damage(codec.side_name(segment.base, suffix), Fault(segment.base, segment.base, 0, reason))
            )


def _salvage_segment(segment: SealedSegment, report: RecoveryReport, file: str | None = None) -> None:
    """Find the readable records of a segment without its index, and report the rest."""
    segment.salvage = segment.read_salvage(segment.content())
    name = file or segment.files.codec.data_name(segment.base)
    report.damage += [Damage(name, fault) for fault in segment.salvage.faults]


def _report_contradiction(segment: SealedSegment, fault: Fault, report: RecoveryReport, file: str) -> None:
    """Report files that contradict each other although every record in the data can be read. Where the footer has a
    larger data size, the rest of the segment is lost."""
    salvage = segment.salvage
    if salvage is None or salvage.faults:
        return
    lost = fault._replace(seq=segment.base, resume=segment.base)
    if segment.files.codec.footer_suffix:
        after = int(salvage.rows.seq[-1]) + 1 if len(salvage.rows) else segment.base
        lost = fault._replace(seq=after, resume=max(segment.stop, after))
        segment.salvage = Salvage(salvage.rows, [lost])
    report.damage.append(Damage(file, lost))


def _rebuild_index(segment: SealedSegment, report: RecoveryReport, *, writable: bool) -> None:
    """Rebuild the index of a sealed segment from its data. Where the data is damaged nothing is written: an index
    without the damaged records would hide that they existed."""
    start_us = segment.files.counters.clock.monotonic_us()
    _rebuild_sealed_sides(segment, report, writable=writable)
    report.index_rebuilds += 1
    report.index_rebuild_us += segment.files.counters.clock.monotonic_us() - start_us


def _rebuild_sealed_sides(segment: SealedSegment, report: RecoveryReport, *, writable: bool) -> None:
    files, base = segment.files, segment.base
    codec, disk = files.codec, files.disk
    sides = _read_sides(files, base)
    recovered = codec.recover(map_file(disk, files.data_path(base)) or b"", sides, base)
    if recovered.stop is not ScanStop.END:
        _salvage_segment(segment, report)
        return
    recovered = recovered._replace(sides=codec.fill_holes(recovered.sides, base, segment.stop, recovered.end))
    if not writable:
        kept = [side if number in codec.authoritative_sides else None for number, side in enumerate(sides)]
        segment.rebuilt_sides = tuple(
            old if old is not None else new for old, new in zip(kept, recovered.sides, strict=True)
        )
        report.rebuilt.append(f"{codec.side_name(base, codec.side_suffixes[0])} (in memory)")
        return
    rebuild_sides(files, base, recovered, report)
    if codec.footer_suffix:
        segment.footer = codec.build_footer(segment.content())
        if segment.footer is not None:
            replace_file(disk, files.side_path(base, codec.footer_suffix), segment.footer)
            report.rebuilt.append(codec.side_name(base, codec.footer_suffix))


def expected_sides(segment: SealedSegment) -> tuple[bytes, ...] | None:
    """Return the exact bytes that the derived side files of a sealed segment must have; None if the data is damaged."""
    content, codec = segment.content(), segment.files.codec
    sides = [None if side is None else bytes(side) for side in content.sides]
    recovered = codec.recover(content.data.fetch(0, content.data.size), sides, segment.base)
    if recovered.stop is not ScanStop.END:
        return None
    return codec.fill_holes(recovered.sides, segment.base, segment.stop, recovered.end)


def reload_segment(segment: SealedSegment) -> None:
    """Read a segment again whose files were being replaced when the disk failed. Its current data is valid; its sides
    are rebuilt in memory."""
    files, base = segment.files, segment.base
    files.drop_cached(base)
    data = map_file(files.disk, files.data_path(base)) or memoryview(b"")
    recovered = files.codec.recover(data, _read_sides(files, base), base)
    segment.rebuilt_sides = files.codec.fill_holes(recovered.sides, base, segment.stop, recovered.end)
    segment.size, segment.footer = len(data), None
    segment.reset()


def _index_mismatch(segment: SealedSegment) -> str | None:
    expected = expected_sides(segment)
    if expected is None or segment.content().index == expected[0]:
        return None
    return "the index does not match its data"


def find_segment_faults(
    segment: SealedSegment, on_rows: Callable[[Rows], None] | None = None
) -> tuple[list[Fault], int]:
    """Read a whole sealed segment: return its faults and how many records are good; `on_rows` gets those."""
    faults, records = list[Fault](), 0
    for chunk in segment.chunks(segment.content(), _READ_CHUNK_BYTES):
        records += len(chunk.rows)
        if on_rows is not None:
            on_rows(chunk.rows)
        if chunk.fault is not None:
            faults.append(chunk.fault)
    if segment.salvage is not None:
        faults += [fault for fault in segment.salvage.faults if fault.resume <= fault.seq]
    return faults, records


def _open_last_segment(
    files: LogFiles,
    latch: WriteLatch,
    base: int,
    manifest: LogManifest | None,
    report: RecoveryReport,
    *,
    writable: bool,
) -> tuple[ActiveSegment | None, SealedSegment | None, int | None]:
    """Open the last segment as the active one; where records of it are lost, as a sealed one with damage, and return
    where numbering continues. A damaged one is not cut, and no seq that may have been acked is assigned again."""
    codec, disk = files.codec, files.disk
    known = manifest.active if manifest is not None else None
    if known is not None and known.base != base:
        known = None
    data = disk.stat(files.data_path(base))
    sides = [disk.stat(files.side_read_path(base, suffix)) for suffix in codec.side_suffixes]
    has_records = known is None or known.data_bytes > 0 or not (manifest and manifest.clean)
    if has_records and (data is None or (sides[0] is None and 0 in codec.authoritative_sides)):
        empty = known is None and not _has_content(files, base, {"", *codec.side_suffixes})
        if not empty:
            stop = _seq_above(files, base, manifest if known is not None else None)
            what = codec.data_name(base) if data is None else codec.side_name(base, codec.side_suffixes[0])
            exact = known is not None and manifest is not None and manifest.clean
            reason = (
                "the file is missing" if exact else "the file is missing; how many of these were written is unknown"
            )
            lost = SealedSegment(files, base, stop, data.size if data else 0, 0, lost_reason=reason)
            lost.authoritative_side_bits = known.sides if known is not None else 0
            report.damage.append(Damage(what, Fault(base, stop, 0, reason)))
            return None, lost, stop
    scan: ActiveScan | None = None
    if known is not None and manifest is not None and (data is not None or known.data_bytes):
        scan = _scan_active(files, base, manifest)
        retired = _seal_damaged_active(files, known, manifest, scan, report)
        if retired is not None:
            return None, retired, retired.stop
    if data is None and not writable:
        return None, None, base
    active = open_active(files, latch, base, report, writable=writable, scan=scan)
    return active, None, report.next_seq_floor or None


def _seq_above(files: LogFiles, base: int, manifest: LogManifest | None) -> int:
    """Return a seq above all that a lost segment may have contained."""
    if manifest is not None:
        return max(manifest.reserved, manifest.next_seq, base + 1)
    sides = [files.disk.stat(files.side_path(base, suffix)) for suffix in files.codec.side_suffixes]
    data = files.disk.stat(files.data_path(base))
    per_byte = 1 if 0 in files.codec.authoritative_sides else _RECORDS_PER_INDEX_BYTE_MAX
    indexed = sum(side.size * per_byte for side in sides if side)
    return base + _LOST_SEGMENT_MARGIN_SEQS + indexed + (data.size if data else 0)


class ActiveScan(NamedTuple):
    """The last segment, read once: its bytes, its sides, and the scan of them."""

    content: bytes
    sides: list[bytes | None]
    recovered: RecoveredSegment


def _scan_active(files: LogFiles, base: int, manifest: LogManifest | None = None) -> ActiveScan:
    content, sides = read_file(files.disk, files.data_path(base)) or b"", _read_sides(files, base)
    return ActiveScan(content, sides, _recover_data(files, base, content, sides, manifest))


def _seal_damaged_active(
    files: LogFiles, entry: ManifestEntry, manifest: LogManifest, scan: ActiveScan, report: RecoveryReport
) -> SealedSegment | None:
    """Return the active segment as a sealed one if durable records of it are damaged or missing."""
    codec, base = files.codec, entry.base
    content, sides, recovered = scan
    lacks_side = any(
        entry.sides >> n & 1 and side is None for n, side in enumerate(sides) if n in codec.authoritative_sides
    )
    short = recovered.end < entry.data_bytes or (manifest.clean and recovered.next_seq < manifest.next_seq)
    if not (lacks_side or short):
        return None
    stop = _seq_above(files, base, manifest)
    size = sum(len(side) for side in sides if side is not None)
    segment = SealedSegment(
        files, base, stop, len(content), size, complete_bytes=entry.data_bytes, authoritative_side_bits=entry.sides
    )
    _report_missing_sides(segment, [side is not None for side in sides], report)
    _salvage_segment(segment, report)
    return segment


def open_active(
    files: LogFiles,
    latch: WriteLatch,
    base: int,
    report: RecoveryReport,
    *,
    writable: bool,
    scan: ActiveScan | None = None,
) -> ActiveSegment:
    codec, disk = files.codec, files.disk
    mode: Mode = "write" if writable else "read"
    if disk.stat(files.data_path(base)) is None:
        if not writable:
            raise Damaged(f"{files.data_path(base)} is missing; nothing was changed, repair the log or restore it")
        disk.open(files.data_path(base), "create").close()
        disk.sync_dir(files.directory)
        report.rebuilt.append(codec.data_name(base))
    data = disk.open(files.data_path(base), mode)
    try:
        scan = scan or _scan_active(files, base)
        recovered, tail_bytes = scan.recovered, len(scan.content) - scan.recovered.end
        report.notes += [f"{codec.data_name(base)}: {note}" for note in recovered.notes]
        if tail_bytes > 0:
            report.cut_bytes += tail_bytes
            report.cut_reason = recovered.reason or "bytes after the last record"
            report.cut_suspect = recovered.stop is ScanStop.BAD and any(scan.content[recovered.end :])
            report.has_unexplained_tail = recovered.has_unexplained_tail
            _search_cut_bytes(codec, scan, base, report)
        if writable:
            _repair_active(files, base, data, scan, report)
        sides: list[File | None] = []
        for suffix in codec.side_suffixes:
            path = files.side_read_path(base, suffix)
            sides.append(disk.open(path, mode) if disk.stat(path) is not None else None)
    except BaseException:
        data.close()
        raise
    report.damage += [Damage(codec.data_name(base), fault) for fault in recovered.faults]
    created = created_us(files, base) or recovered.first_ts_us
    stat = disk.stat(files.data_path(base))
    last_write_us = recovered.last_ts_us or (stat.modified_ms * 1000 if stat else created)
    return ActiveSegment(
        files, latch, base, recovered, data=data, sides=sides, created_us=created, last_write_us=last_write_us
    )


def _search_cut_bytes(codec: Codec, scan: ActiveScan, base: int, report: RecoveryReport) -> None:
    """Look for good records in the bytes to be cut. After a bad one they may have been acked: then it is not an
    unfinished write, and their seqs are not assigned again."""
    content, sides, recovered = scan
    rows, faults = codec.salvage(content, sides, base, recovered.next_seq + len(content))
    bad = min((fault.pos for fault in faults if fault.pos >= recovered.end), default=len(content))
    if len(rows) and int(rows.frame_pos[-1]) > bad:
        report.cut_suspect = True
    if report.cut_suspect and len(rows) and int(rows.seq[-1]) >= recovered.next_seq:
        report.next_seq_floor = int(rows.seq[-1]) + 1


def _repair_active(files: LogFiles, base: int, data: File, scan: ActiveScan, report: RecoveryReport) -> None:
    """Cut the data to the recovered end and bring the side files in line with it."""
    codec, disk = files.codec, files.disk
    content, sides, recovered = scan
    # A footer is stale because the segment grows again. A side that this log does not write is stale because new
    # records would be missing in it, and a later log that writes it would take them for torn.
    stale = (*codec.stale_suffixes, *([codec.footer_suffix] if codec.footer_suffix else []))
    removed = [remove_if_exists(disk, files.side_path(base, suffix)) for suffix in stale]
    if any(removed):
        disk.sync_dir(files.directory)
    cut = content[recovered.end :]
    if cut:
        if report.cut_suspect:
            name = f"{codec.data_name(base)}.{recovered.end}"
            report.quarantined.append(_quarantine(files, name, cut))
            if 0 in codec.authoritative_sides and sides[0]:
                # Without the index the boundaries of the cut records are unknown.
                index = f"{codec.side_name(base, codec.side_suffixes[0])}.{recovered.end}"
                report.quarantined.append(_quarantine(files, index, sides[0]))
        data.truncate(recovered.end)
    # Also without a cut: bytes of a killed process may not be durable yet, and from here on they count as recovered.
    data.sync()
    for number, (suffix, expected, old) in enumerate(zip(codec.side_suffixes, recovered.sides, sides, strict=True)):
        path, size = files.side_path(base, suffix), len(expected)
        if old is not None and old[:size] == expected and not any(old[size:]):
            if len(old) > size and not (codec.index_prealloc_bytes and number == 0):
                with closing(disk.open(path, "write")) as file:
                    file.truncate(size)
                    file.sync()
                report.rebuilt.append(codec.side_name(base, suffix))
            elif number in codec.authoritative_sides:
                with closing(disk.open(path, "write")) as file:
                    file.sync()
        elif old is not None and codec.writes_index_on_seal and number == 0 and expected.startswith(old):
            with closing(disk.open(path, "write")) as file:  # not reported: a killed process always leaves it short
                file.write(len(old), memoryview(expected)[len(old) :])
        else:
            replace_file(disk, path, expected, temporary=f"{path}.rebuilding")
            report.rebuilt.append(codec.side_name(base, suffix))
            report.index_rebuilds += 1
