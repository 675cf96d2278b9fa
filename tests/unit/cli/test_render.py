"""How answers look, to a person and to a program."""

from __future__ import annotations

import io
import sys

import pytest

from tidelog.cli import render
from tidelog.cli.render import Screen
from tidelog.commitlog import Damage, RecoveryReport, SegmentInfo
from tidelog.commitlog.codec import Fault


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


DAMAGE = Damage("seg-1.data", Fault(3, 5, 77, "checksum mismatch"))
SEALED = SegmentInfo(1, 4001, True, 1_500_000, 80_000, "ok", 1_700_000_000_000_000, 1_700_000_005_000_000)
EMPTY = SegmentInfo(4001, 4001, False, 0, 0, "ok", None, None)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (64 << 20, "67.1 MB"),
        (10**12, "1.0 TB"),
    ],
)
def test_a_size_is_said_in_the_unit_a_person_would_choose(number: int, said: str) -> None:
    assert render.format_bytes(number) == said


def test_ranges_counts_and_times_are_said_in_words() -> None:
    assert render.format_seqs(1, 1) == "no records, next seq 1"
    assert render.format_seqs(7, 8) == "seq 7"
    assert render.format_seqs(7, 1007) == "seqs 7 to 1006"
    assert [render.plural(number, "record") for number in (0, 1, 2000)] == ["0 records", "1 record", "2,000 records"]
    assert render.format_time(1_700_000_000_000_001) == "2023-11-14T22:13:20.000001Z"
    assert render.format_time(0) is None
    assert render.format_time(None) is None
    assert render.format_time_range(1_700_000_000_000_000, 1_700_000_005_999_999) == "2023-11-14 22:13:20 to 22:13:25"
    assert (
        render.format_time_range(1_700_000_000_000_000, 1_700_100_000_000_000)
        == "2023-11-14 22:13:20 to 2023-11-16 02:00:00"
    )
    assert render.format_time_range(None, None) == "-"


def test_damage_names_its_file_its_byte_its_seqs_and_its_reason() -> None:
    assert render.damage_line(DAMAGE) == "seg-1.data at byte 77, seqs 3 to 4: checksum mismatch"
    assert render.damage_fields(DAMAGE) == {
        "file": "seg-1.data",
        "pos": 77,
        "first_seq": 3,
        "last_seq": 4,
        "reason": "checksum mismatch",
    }


def test_a_report_keeps_everything_it_found() -> None:
    report = RecoveryReport(3, 12, "torn", ["a"], ["b"], ["c"], [DAMAGE])
    assert render.report_fields(report) == {
        "clean": False,
        "cut_bytes": 12,
        "cut_reason": "torn",
        "rebuilt": ["a"],
        "swept": ["b"],
        "quarantined": ["c"],
        "damage": [render.damage_fields(DAMAGE)],
    }


def test_a_segment_is_one_row_and_one_object() -> None:
    row = ["1", "4000", "sealed", "1.5 MB", "80.0 kB", "ok", "2023-11-14 22:13:20 to 22:13:25"]
    assert render.segment_row(SEALED) == row
    assert render.segment_row(EMPTY) == ["4001", "-", "active", "0 B", "0 B", "ok", "-"]
    assert len(row) == len(render.SEGMENT_TITLES)
    assert render.segment_fields(SEALED)["last_ts"] == "2023-11-14T22:13:25.000000Z"
    assert render.segment_fields(EMPTY)["last_seq"] is None


def test_a_table_takes_no_text_for_markup_and_has_no_colours_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    Screen(json=False).print_table(("name", ">size"), [("[red]a[/red]:smile:", "1")])
    said = capsys.readouterr().out
    assert "[red]a[/red]:smile:" in said
    assert "\x1b" not in said


def test_colours_are_for_terminals_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    pipe, terminal = io.StringIO(), Terminal()
    for stream in (pipe, terminal):
        render.make_console(stream).print("x", style="bold")
    assert pipe.getvalue() == "x\n"
    assert "\x1b[1m" in terminal.getvalue()


@pytest.mark.parametrize(("json", "drawn"), [(False, True), (True, False)])
def test_a_bar_is_drawn_on_a_terminal_and_never_with_json(
    json: bool, drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    for total in (None, 10):
        with Screen(json=json).progress_bar("working", total=total) as bar:
            bar(5, total)
    assert ("working" in terminal.getvalue()) is drawn


def test_no_bar_is_drawn_into_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    with Screen(json=False).progress_bar("working", total=3) as bar:
        bar(1, 3)
    assert capsys.readouterr() == ("", "")


def test_remarks_go_to_standard_error_and_are_left_out_with_json(capsys: pytest.CaptureFixture[str]) -> None:
    for json in (False, True):
        screen = Screen(json=json)
        screen.print_note("a remark")
        screen.print_result({"a": 1}, "a sentence")
    assert capsys.readouterr() == ('a sentence\n{"a": 1}\n', "a remark\n")


def test_a_path_that_the_terminal_cannot_show_does_not_end_the_command(
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    Screen(json=False).print_result({}, "log \udcff")
    assert capsysbinary.readouterr().out == b"log \\udcff\n"
