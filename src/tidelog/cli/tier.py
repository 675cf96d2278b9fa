"""`tidelog tier …`: where segments are, and moving them to the cold store and back."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from tidelog.cli.command import DATABASE, Commands, add_command, add_group
from tidelog.cli.render import Screen, format_bytes, plural
from tidelog.cli.target import open_for_reading, open_target, target_place
from tidelog.engine.tiers import Moved

_DESCRIPTION = """\
Old segments of topics can move to a cold store: another directory, or a bucket. A server or a program that is
opened with one moves them by itself; these commands show where they are and move them by hand.

exit codes: 0 done, 1 damage, 2 refused or failed, 130 interrupted
"""

_FIRST_STEPS = """\
start here:
  $ seq 100 | tidelog topic write data orders
  $ tidelog tier relocate data --cold /mnt/cold --keep 0
  $ tidelog tier status data
  $ tidelog tier recall data --topic orders
"""


def add(commands: Commands) -> None:
    """Add the `tier` group to the command line."""
    short = "the cold store: where segments are, and moving them"
    verbs = add_group(commands, "tier", summary=short, description=_DESCRIPTION, first_steps=_FIRST_STEPS)
    parser = _add(
        verbs,
        "status",
        status,
        summary="show where segments are",
        description="Show how much is on the disk and how much in the cold store, and with --segments each segment. "
        "Reads only.",
        examples="tidelog tier status data\ntidelog tier status data --segments --topic orders --json\n"
        "tidelog tier status --server http://127.0.0.1:4000",
    )
    parser.add_argument("--segments", action="store_true", help="list every sealed segment")
    parser = _add(
        verbs,
        "relocate",
        relocate,
        summary="move old segments to the cold store",
        description="Copy sealed segments to the cold store, read them back, and remove them from the disk: all but "
        "the newest,\nas the settings say. Segments that were recalled move too.",
        examples="tidelog tier relocate data --cold s3://bucket/prefix\ntidelog tier relocate data --topic orders "
        "--keep 0\ntidelog tier relocate --server http://127.0.0.1:4000 --topic orders",
    )
    parser.add_argument("--keep", type=int, metavar="N", help="so many of the newest sealed segments stay on the disk")
    parser.add_argument("--compression", choices=("none", "zstd"), help="of objects; for a directory (none)")
    parser = _add(
        verbs,
        "recall",
        recall,
        summary="bring segments back from the cold store",
        description="Copy segments back to the disk, where they stay until they are relocated by hand.",
        examples="tidelog tier recall data\ntidelog tier recall data --topic orders --from 1 --to 50000",
    )
    parser.add_argument("--from", dest="first", type=int, default=0, metavar="SEQ", help="the first seq that is needed")
    parser.add_argument("--to", dest="last", type=int, metavar="SEQ", help="the last seq that is needed")
    _add(
        verbs,
        "claim",
        claim,
        summary="take the cold store from another copy of this database",
        description="A copy of a directory names the same objects. Only the directory that holds the claim may write "
        "and delete\nin the store; this gives the claim to DATABASE.",
        examples="tidelog tier claim data",
    )


def _add(verbs: Commands, name: str, run: Any, *, summary: str, description: str, examples: str) -> ArgumentParser:
    parser = add_command(verbs, name, run, DATABASE, summary=summary, description=description, examples=examples)
    parser.add_argument(
        "--cold", metavar="ADDRESS", help="the cold store of a directory; without it, the one it used last"
    )
    parser.add_argument("--topic", metavar="TOPIC", help="of this topic only")
    return parser


def status(args: Namespace, screen: Screen) -> int:
    """Print totals, and one line a segment with --segments."""
    with open_target(args, screen, write=False, **_settings(args)) as log:
        fields = log.tier_status()._asdict()
        places = [place._asdict() for place in log.segment_places(args.topic)] if args.segments else []
    screen.print_result({**fields, **({"segments": places} if args.segments else {})})
    if screen.json:
        return 0
    if places:
        rows = [
            [it["topic"], f"{it['first_seq']:,}", f"{it['bytes']:,}", it["tier"], it["object"] or ""] for it in places
        ]
        screen.print_table(("topic", ">first seq", ">bytes", "tier", "object"), rows)
    print(f"cold store: {fields['store'] or 'none'}")
    print(f"on the disk: {plural(fields['hot_segments'], 'segment')}, {format_bytes(fields['hot_bytes'])}")
    print(
        f"in the store: {plural(fields['cold_segments'], 'segment')}, {format_bytes(fields['cold_bytes'])} in "
        f"{format_bytes(fields['object_bytes'])}"
    )
    return 0


def relocate(args: Namespace, screen: Screen) -> int:
    """Move segments to the store, and print how many."""
    compression = {} if args.compression is None else {"cold_compression": args.compression}
    with open_target(args, screen, write=True, **_settings(args, writes=True), **compression) as log:
        return _print_moved(args, screen, log.relocate(args.topic, keep_segments=args.keep), "moved to the cold store")


def recall(args: Namespace, screen: Screen) -> int:
    """Bring segments back, and print how many."""
    with open_target(args, screen, write=True, **_settings(args, writes=True)) as log:
        moved = log.recall(args.topic, first_seq=args.first, last_seq=args.last)
        return _print_moved(args, screen, moved, "recalled")


def claim(args: Namespace, screen: Screen) -> int:
    """Take the claim on the store."""
    with open_target(args, screen, write=True, **_settings(args, writes=True)) as log:
        log.claim_cold_store()
        place, store = target_place(args), log.tier_status().store
        screen.print_result({"path": place, "store": store}, f"{place} holds the claim")
    return 0


def _settings(args: Namespace, *, writes: bool = False) -> dict[str, Any]:
    """The settings for an open. A command that moves segments needs the store, also the one that DIR used last."""
    if args.cold is not None:
        return {"cold": args.cold}
    if args.server or not writes:
        return {}
    with open_for_reading(args.dir, Screen(json=False)) as log:
        store = log.tier_status().store
    return {} if store is None else {"cold": store}


def _print_moved(args: Namespace, screen: Screen, moved: Moved, done: str) -> int:
    fields = {"segments": moved.segments, "bytes": moved.bytes}
    failed = [{"topic": topic, "first_seq": base, "reason": reason} for topic, base, reason in moved.failed]
    for row in failed:
        screen.print_note(f"{row['topic']}: segment {row['first_seq']} was not moved: {row['reason']}")
    text = f"{plural(moved.segments, 'segment')} {done}, {format_bytes(moved.bytes)}"
    screen.print_result({"path": target_place(args), **fields, "failed": failed}, text)
    return 2 if failed else 0
