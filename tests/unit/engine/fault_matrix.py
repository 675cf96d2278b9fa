"""The fault matrix of the topics engine, word for word, and which of its cells a test is for.

    TW  torn write            SW  short write         NS  no space
    EW  error on write        EF  error on sync       C±  crash before and after each call
    BF  a bit flips           LU  unsynced bytes are lost, any subset
    RR  names reordered or not persisted              CJ  the clock jumps

    OK   as if nothing happened                       ERR  refused, nothing visible, the engine stays writable
    RO   refused, the shard latched until restart     PFX  what was acked is intact, an unacked tail may vanish
    O/N  exactly the old or the new state             OLD  the old state, the new one is passed over
    RB   made again from its source, nothing lost     CUT  cut at the first bad frame, nothing acked is lost
    DET  damage is reported, never served            REF  refuses to open
    –    no such call is made

A test carries the id of its cell: `T7-EF-dropped-once` is row T7, column EF. Rows T12 to T14 are tiers:
`test_tiers.py` here and in `tests/crash/topics`.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import pytest

COLUMNS: Final = ("TW", "SW", "NS", "EW", "EF", "C±", "BF", "LU", "RR", "CJ")
TABLE: Final = """
| T1 | topics WAL batch write | CUT | OK | ERR | RO | – | PFX | DET | PFX | – | OK |
| T2 | topics group fdatasync | – | – | RO | – | RO | PFX | – | PFX | – | OK |
| T3 | topics rotation + CURRENT | CUT | OK | ERR | RO | RO | O/N | OK | O/N | O/N | OK |
| T4 | checkpoint: append `.data` | RB | OK | ERR | ERR | ERR | RB | DET | RB | RB | OK |
| T5 | `.idx` append / rebuild | RB | OK | ERR | ERR | ERR | RB | RB | RB | RB | – |
| T6 | CheckpointMark barrier | CUT | OK | ERR | RO | RO | PFX | DET | PFX | – | OK |
| T7 | snapshot write and swap | OLD | OK | ERR | ERR | ERR | O/N | OLD | O/N | O/N | OK |
| T8 | prune snapshots, drop WAL files | – | – | – | – | ERR | OK | – | OK | OK | – |
| T9 | segment seal | RB | OK | ERR | ERR | ERR | RB | DET | RB | RB | OK |
| T10 | delete: frame, then flag byte | O/N | – | ERR | RO | RO | O/N | DET | O/N | – | OK |
| T11 | evict watermark, segment drop | CUT | OK | ERR | RO | RO | OK | DET | OK | OK | OK |
| T15 | topic delete, `.deleted`, unlink | CUT | OK | ERR | RO | RO | O/N | DET | O/N | O/N | OK |
| T16 | recovery: read and replay | CUT | – | – | – | – | OK | DET | – | OK | OK |
| T17 | recovery: cut, re-extend, reopen | – | – | REF | REF | REF | OK | – | OK | OK | – |
| T18 | directory lock | – | – | REF | REF | – | OK | OK | – | – | – |
"""


def _parsed() -> dict[str, dict[str, str]]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE.strip().splitlines()]
    return {row: dict(zip(COLUMNS, outcomes, strict=True)) for row, _, *outcomes in rows}


MATRIX: Final = _parsed()

Times = Literal["once", "forever"]
TIMES: Final[tuple[Times, ...]] = ("once", "forever")
MODES: Final = ("dropped", "reverted", "kept")
NAMES: Final = "names"  # the sync of a directory, which fails in one way only

SYNCS: Final = {  # what each row syncs: files, in the three modes, and names
    "T2": MODES,
    "T3": (*MODES, NAMES),
    "T4": (*MODES, NAMES),
    "T5": (*MODES, NAMES),
    "T6": MODES,
    "T7": (*MODES, NAMES),
    "T8": (NAMES,),
    "T9": (*MODES, NAMES),
    "T10": MODES,
    "T11": MODES,
    "T15": MODES,
    "T17": (*MODES, NAMES),
}


def rows(column: str) -> list[str]:
    """The rows that have something to test in a column."""
    return [row for row, outcomes in MATRIX.items() if outcomes[column] != "–"]


def cells(column: str, *, without: str = "", only: str = "") -> list[Any]:
    """One test a cell; two where an error strikes once or for ever, and so for each way in which a sync fails."""
    found = []
    for row in rows(column):
        if row in without.split() or (only and row not in only.split()):
            continue
        outcome = MATRIX[row][column]
        if column == "EF":
            found += [
                pytest.param(row, outcome, mode, times, id=f"{row}-EF-{mode}-{times}")
                for mode in SYNCS[row]
                for times in TIMES
            ]
        elif column in ("NS", "EW"):
            found += [pytest.param(row, outcome, times, id=f"{row}-{column}-{times}") for times in TIMES]
        else:
            found.append(pytest.param(row, outcome, id=f"{row}-{column.replace('±', '')}"))
    return found
