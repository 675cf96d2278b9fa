"""The commands of `tidelog log`, through `main`, on real files."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.kit.commands import Run, json_result, runner

from tidelog.cli.log import limit_records, read_lines
from tidelog.cli.main import main
from tidelog.cli.render import Screen
from tidelog.commitlog import SegmentedLog
from tidelog.commitlog.codecs import CODEC_NAMES
from tidelog.errors import TooLarge
from tidelog.formats.rows import Rows


@pytest.fixture
def run(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `tidelog log …` in a directory of its own."""
    return runner(capsysbinary, monkeypatch, "log", directory=tmp_path)


def numbers(count: int) -> bytes:
    return b"".join(b"no %d\n" % number for number in range(count))


def fill(run: Run, codec: str = "tide", count: int = 300) -> None:
    """A log of a few segments in `a`, quickly."""
    words = ("--codec", codec, "--sync", "interval", "--segment-bytes", 1200, "--batch", 10)
    assert run("append", "a", *words, stdin=numbers(count))[0] == 0


# ── append ────────────────────────────────────────────────────────────────────────────────────────


class Slow:
    """A source that gives these pieces, one a read."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = iter((*pieces, b""))

    def read1(self, size: int, /) -> bytes:
        assert size > 0
        return next(self._pieces)


@pytest.mark.parametrize(
    ("pieces", "batches"),
    [
        ([], []),
        ([b"a\nb\n"], [[b"a", b"b"]]),
        ([b"a\nb"], [[b"a"], [b"b"]]),
        ([b"a", b"b", b"c\nd", b"\n"], [[b"abc"], [b"d"]]),
        ([b"\n\n"], [[b"", b""]]),
        ([b"a\r\n\x00\xff\n"], [[b"a\r", b"\x00\xff"]]),
        ([b"1\n2\n3\n4\n5\n6\n7\n"], [[b"1", b"2", b"3"], [b"4", b"5", b"6"], [b"7"]]),
        ([b"a\n", b"b\n"], [[b"a"], [b"b"]]),
    ],
)
def test_lines_come_in_batches_and_none_waits_for_the_next(pieces: list[bytes], batches: list[list[bytes]]) -> None:
    assert list(read_lines(Slow(*pieces), 3, 100)) == batches


def test_a_line_without_an_end_is_refused_before_it_fills_the_memory() -> None:
    source = Slow(*[b"x" * 60] * 5)
    with pytest.raises(TooLarge, match="a line of standard input is 120 bytes, the limit is 100"):
        list(read_lines(source, 3, 100))


def test_append_writes_a_record_a_line_and_says_the_seqs(run: Run) -> None:
    assert run("append", "a", stdin=b"x\n\ny") == (0, "wrote 3 records, seqs 1 to 3\n", "")
    assert run("append", "a", stdin=b"z\n") == (0, "wrote 1 record, seq 4\n", "")
    assert run("append", "a") == (0, "nothing was written, the next seq is 5\n", "")
    assert run("cat", "a") == (0, "x\n\ny\nz\n", "")


def test_append_says_every_batch_as_it_is_written_when_asked(run: Run) -> None:
    code, out, err = run("append", "a", "--batch", 2, "--acks", stdin=numbers(5))
    assert (code, out) == (0, "seqs 1 to 2\nseqs 3 to 4\nseq 5\n")
    assert err == "wrote 5 records, seqs 1 to 5\n"
    _, out, err = run("append", "a", "--batch", 2, "--acks", "--json", stdin=numbers(3))
    assert [json.loads(line) for line in out.splitlines()] == [
        {"first": 6, "last": 7, "records": 2, "next_seq": 8},
        {"first": 8, "last": 8, "records": 1, "next_seq": 9},
    ]
    assert err == ""


def test_append_answers_in_json(run: Run) -> None:
    assert json_result(run("append", "a", "--json", stdin=numbers(5))) == {
        "first": 1,
        "last": 5,
        "records": 5,
        "next_seq": 6,
    }
    empty = {"first": None, "last": None, "records": 0, "next_seq": 6}
    assert json_result(run("append", "a", "--json")) == empty


def test_append_keeps_node_and_tag_and_the_segment_size(run: Run) -> None:
    words = ("--node", "grün", "--tag", "t", "--segment-bytes", "1k", "--batch", 10, "--sync", "each")
    assert run("append", "a", *words, stdin=numbers(50))[0] == 0
    with SegmentedLog.open("a", read_only=True) as log:
        assert len(log.segments) > 2
        assert {(record.node, record.tag) for record in log} == {("grün".encode(), b"t")}


def test_a_stream_is_one_record_newlines_and_all(run: Run) -> None:
    assert run("append", "a", "--stream", "--tag", "t", stdin=b"x\ny\n") == (0, "wrote 1 record, seq 1\n", "")
    assert json_result(run("append", "a", "--stream", "--acks", "--json"))["last"] == 2, "an empty record is one"
    with SegmentedLog.open("a", read_only=True) as log:
        assert [(record.data, record.tag) for record in log] == [(b"x\ny\n", b"t"), (b"", b"")]


@pytest.mark.parametrize("stdin", [b"x\n", b""])
def test_append_refuses_when_the_next_seq_is_not_the_expected_one(run: Run, stdin: bytes) -> None:
    assert run("append", "a", "--expect", 1, "--batch", 2, stdin=numbers(5))[0] == 0
    code, out, err = run("append", "a", "--expect", 7, stdin=stdin)
    assert (code, out) == (2, "")
    assert err == (
        "tidelog: a: expected to write seq 7 but the next one is 6; nothing was written, read from 6 and decide again\n"
    )


def test_column_that_the_layout_cannot_store_is_refused(run: Run) -> None:
    code, _, err = run("append", "a", "--codec", "rustlog", "--tag", "t", stdin=b"x\n")
    assert code == 2
    assert "the rustlog layout cannot store a tag" in err


def test_an_error_after_some_batches_says_what_was_written_before_it(run: Run) -> None:
    words = ("append", "a", "--segment-bytes", 100, "--batch", 2)
    long = b"x" * 1000
    code, out, err = run(*words, stdin=b"a\nb\nc\n" + long + b"\n")
    assert (code, out) == (2, "")
    assert err.startswith("tidelog: a: a record is 1000 bytes, the limit is 150; ")
    assert err.endswith("; wrote 2 records, seqs 1 to 2\n")
    code, _, err = run(*words, "--json", stdin=b"a\nb\nc\n" + long + b"\n")
    error = json.loads(err)
    assert (code, error["error"], error["written"]) == (2, "too_large", False)
    assert error["acked"] == {"first": 3, "last": 4, "records": 2, "next_seq": 5}


def test_an_interrupt_says_exactly_what_was_written(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    class Interrupted(Slow):
        def read1(self, size: int, /) -> bytes:
            if not (piece := super().read1(size)):
                raise KeyboardInterrupt
            return piece

    def keyboard(*pieces: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=Interrupted(*pieces), isatty=lambda: False))

    keyboard(b"a\nb\n", b"c\nd")
    assert main(["log", "append", "a"]) == 130
    assert capsysbinary.readouterr().err == b"tidelog: interrupted; wrote 3 records, seqs 1 to 3\n"
    keyboard(b"part of a stream")
    assert main(["log", "append", "a", "--stream"]) == 130
    assert capsysbinary.readouterr().err == b"tidelog: interrupted; nothing was written, the next seq is 4\n"
    keyboard(b"e\n")
    assert main(["log", "append", "a", "--json"]) == 130
    error = json.loads(capsysbinary.readouterr().err)
    assert (error["error"], error["acked"]["records"]) == ("interrupted", 1)
    assert run("cat", "a")[1] == "a\nb\nc\ne\n"


# ── cat ───────────────────────────────────────────────────────────────────────────────────────────


def test_cat_respects_from_and_limit(run: Run) -> None:
    fill(run, count=500)
    assert run("cat", "a", "--from", 499)[1] == "no 498\nno 499\n"
    assert run("cat", "a", "--from", 495, "--limit", 2)[1] == "no 494\nno 495\n"
    assert run("cat", "a", "--limit", 0)[1] == ""
    assert run("cat", "a", "--limit", 300)[1] == numbers(300).decode()
    assert run("cat", "a", "--from", 501) == (0, "", ""), "the end is a place to wait at, not an error"


def test_cat_beyond_the_end_names_the_valid_range(run: Run) -> None:
    run("append", "a", stdin=numbers(5))
    for seq in (0, 7):
        code, out, err = run("cat", "a", "--from", seq)
        assert (code, out) == (2, "")
        assert err == f"tidelog: a: seq {seq} is out of range, it holds [1, 6); ask for a seq inside it\n"


def test_a_limit_stops_the_reading_itself(run: Run) -> None:
    run("append", "a", stdin=numbers(10))

    def batches() -> Iterator[Rows]:
        with SegmentedLog.open("a", read_only=True) as log:
            yield from log.batches(1, 4)
        raise AssertionError("read on after the limit")

    assert [len(rows) for rows in limit_records(batches(), 3)] == [3]
    assert list(limit_records(batches(), 0)) == []


def test_cat_gives_json_with_what_a_record_has_and_nothing_else(run: Run) -> None:
    run("append", "a", "--codec", "laminar", stdin="grün\n".encode())
    assert run("cat", "a", "--json")[1] == '{"seq":0,"ts":null,"data":"grün"}\n'
    run("append", "b", "--node", "n", "--tag", "t", stdin=b"a\xff\n")
    record = json.loads(run("cat", "b", "--json")[1])
    assert record.pop("ts").endswith("Z")
    assert record == {
        "seq": 1,
        "data_base64": base64.b64encode(b"a\xff").decode(),
        "node": "n",
        "tag": "t",
    }
    run("append", "c", "--codec", "narwhal", "--node", "\udcff", stdin=b"a\n")
    assert json.loads(run("cat", "c", "--json")[1])["node_base64"] == base64.b64encode(b"\xff").decode()


def test_cat_prints_bytes_as_they_are(run: Run, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    run("append", "a", stdin=b"\x00\xff\r\n")
    assert main(["log", "cat", "a"]) == 0
    assert capsysbinary.readouterr().out == b"\x00\xff\r\n"


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)


def data_files() -> list[Path]:
    """The data files of the log in `a`, oldest first."""
    found = [file for file in Path("a").iterdir() if file.suffix in (".data", ".log", ".store")]
    return sorted(found, key=lambda file: int("".join(filter(str.isdigit, file.stem))))


def damaged(run: Run, codec: str) -> tuple[Path, int]:
    """A log with one flipped bit in the data of a record in its second segment; the file and the byte."""
    fill(run, codec)
    file = data_files()[1]
    at = file.read_bytes().index(b"no ", file.stat().st_size // 2)
    flip(file, at)
    return file, at


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_damage_ends_cat_with_1_and_can_be_passed_over(run: Run, codec: str) -> None:
    damaged(run, codec)
    code, out, err = run("cat", "a")
    assert code == 1
    assert err.startswith("tidelog: a/")
    whole, served = numbers(300).decode().splitlines(), out.splitlines()
    assert 0 < len(served) < 300
    assert served == whole[: len(served)], "everything before the damage came out"
    code, out, err = run("cat", "a", "--skip-damage")
    assert (code, err) == (0, "skipped 1 damaged place; see tidelog log verify\n")
    assert len(served) < len(out.splitlines()) < 300
    assert set(out.splitlines()) < set(whole)


# ── inspect, verify, repair ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_inspect_shows_every_segment_and_that_nothing_is_wrong(run: Run, codec: str) -> None:
    fill(run, codec)
    first = 0 if codec in ("rustlog", "laminar") else 1
    fields = json_result(run("inspect", "a", "--json"))
    assert (fields["codec"], fields["lowest"], fields["highest"], fields["seqs"]) == (codec, first, first + 300, 300)
    segments = fields["segments"]
    assert len(segments) > 2
    assert [segment["sealed"] for segment in segments] == [True] * (len(segments) - 1) + [False]
    assert all(left["last_seq"] + 1 == right["first_seq"] for left, right in pairwise(segments))
    assert {segment["index"] for segment in segments} == {"ok"}
    assert fields["bytes"] == sum(segment["data_bytes"] + segment["side_bytes"] for segment in segments)
    assert fields["recovery"]["clean"] is True
    assert (fields["first_ts"] is None) == (codec == "laminar")

    code, out, _ = run("inspect", "a")
    assert code == 0
    assert out.startswith(f"a: a {codec} log, {len(segments)} segments, seqs {first} to {first + 299}, ")
    assert out.count("sealed") == len(segments) - 1
    assert out.endswith("recovery has nothing to do\n")


def test_inspect_says_what_recovery_would_do_and_changes_nothing(run: Run) -> None:
    run("append", "a", stdin=numbers(3))
    data = next(Path("a").glob("*.data"))
    data.write_bytes(data.read_bytes() + b"\x01torn")
    before = {file.name: file.read_bytes() for file in Path("a").iterdir()}
    code, out, _ = run("inspect", "a")
    assert code == 0
    assert "repair does it now" in out
    assert "cut 5 bytes" in out
    assert json_result(run("inspect", "a", "--json"))["recovery"]["cut_bytes"] == 5
    assert {file.name: file.read_bytes() for file in Path("a").iterdir()} == before


def test_inspect_of_an_empty_log(run: Run) -> None:
    run("append", "a")
    code, out, _ = run("inspect", "a")
    assert code == 0
    assert out.startswith("a: a tide log, 1 segment, no records, next seq 1, 0 B\n")


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_verify_finds_nothing_in_a_log_that_is_whole(run: Run, codec: str) -> None:
    fill(run, codec)
    code, out, err = run("verify", "a")
    assert (code, err) == (0, "")
    assert out.startswith("a: no damage, 300 records in ")
    fields = json_result(run("verify", "a", "--codec", codec, "--json"))
    assert (fields["ok"], fields["records"], fields["damage"], fields["notes"]) == (True, 300, [], [])


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_verify_names_the_first_bad_place_and_exits_with_1(run: Run, codec: str) -> None:
    file, at = damaged(run, codec)
    code, out, err = run("verify", "a")
    assert (code, err) == (1, "")
    assert out.startswith(f"a: damage in {file.name} at byte ")
    assert "the records around it can be read" in out
    code, out, _ = run("verify", "a", "--json")
    fields = json.loads(out)
    assert (code, fields["ok"]) == (1, False)
    (damage,) = fields["damage"]
    assert damage["file"] == file.name
    assert 0 <= at - damage["pos"] < 256, "in the frame that holds the byte"
    assert damage["first_seq"] <= damage["last_seq"]
    assert damage["reason"]


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_damage_in_a_records_head_is_named_by_seqs_that_its_segment_holds(run: Run, codec: str) -> None:
    """Method: flip every bit between two records' data, one at a time; in some layouts that is where a seq lies."""
    fill(run, codec)
    segment = json_result(run("inspect", "a", "--json"))["segments"][1]
    file = data_files()[1]
    whole = file.read_bytes()
    middle = whole.index(b"no ", len(whole) // 2)
    for at in range(whole.rindex(b"no ", 0, middle) + 5, middle):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :])
        for damage in json.loads(run("verify", "a", "--json")[1])["damage"]:
            assert damage["file"] == file.name
            assert segment["first_seq"] <= damage["first_seq"] <= damage["last_seq"] <= segment["last_seq"], at


def test_verify_lists_damage_in_the_order_of_the_log(run: Run) -> None:
    damaged(run, "tide")
    files = data_files()
    flip(files[0], 30)
    code, out, _ = run("verify", "a", "--json")
    assert code == 1
    assert [damage["file"] for damage in json.loads(out)["damage"]] == [files[0].name, files[1].name]
    assert f"\n  and in {files[1].name} at byte " in run("verify", "a")[1]


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_a_flipped_bit_is_damage_also_in_the_active_segment(run: Run, codec: str) -> None:
    """Synced records with whole records behind them: calling that an unfinished write would hide a loss."""
    for number in range(3):
        run("append", "a", "--codec", codec, stdin=b"record %d\n" % number)
    (file,) = data_files()
    flip(file, file.read_bytes().index(b"record 1"))
    code, out, _ = run("verify", "a")
    assert code == 1, out


def test_an_unfinished_write_is_a_note_and_no_damage(run: Run) -> None:
    run("append", "a", stdin=numbers(3))
    data = next(Path("a").glob("*.data"))
    data.write_bytes(data.read_bytes() + b"\x01torn")
    code, out, _ = run("verify", "a")
    assert code == 0
    assert "\nnote: an unfinished write of 5 bytes" in out


def test_repair_after_a_crash_prints_its_repairs(run: Run) -> None:
    fill(run)
    last = sorted(Path("a").glob("*.data"))[-1]
    last.write_bytes(last.read_bytes() + b"\x01torn")
    index = sorted(Path("a").glob("*.idx"))[0]
    index.unlink()
    code, out, err = run("repair", "a")
    assert (code, err) == (0, "")
    assert out.startswith("a is whole now: seqs 1 to 300 (tide)\n")
    assert "  cut 5 bytes" in out
    assert f"  rebuilt {index.name}\n" in out
    assert run("repair", "a")[1] == "a was whole: seqs 1 to 300 (tide)\n"
    assert json_result(run("repair", "a", "--json"))["clean"] is True
    assert json_result(run("verify", "a", "--json"))["notes"] == []


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_repair_keeps_damage_that_it_cannot_repair_and_exits_with_1(run: Run, codec: str) -> None:
    file, _ = damaged(run, codec)
    before = file.read_bytes()
    code, out, _ = run("repair", "a")
    assert code == 1
    assert out.startswith("a still has damage: ")
    assert f"  damage in {file.name} at byte " in out
    code, out, _ = run("repair", "a", "--json")
    assert (code, json.loads(out)["ok"]) == (1, False)
    assert file.read_bytes() == before


@pytest.mark.parametrize("codec", ["tide", "rustlog", "narwhal"])
def test_repair_rebuilds_an_index_that_is_not_what_its_data_gives(run: Run, codec: str) -> None:
    """Method: damage the index of a sealed segment at places spread over it, one at a time. The data is whole, so
    all of it can be mended."""
    run("append", "a", "--codec", codec, "--sync", "interval", "--segment-bytes", "16k", stdin=numbers(2000))
    index = sorted([*Path("a").glob("*.idx"), *Path("a").glob("*.index")])[0]
    whole = index.read_bytes()
    for at in range(0, len(whole), max(len(whole) // 12, 1)):
        flip(index, at)
        assert index.name in run("verify", "a")[1], at
        run("repair", "a")
        assert index.read_bytes() == whole, at
        assert run("verify", "a")[1].startswith("a: no damage, 2,000 records in "), at


# ── seal, truncate, retain, compact ───────────────────────────────────────────────────────────────


def test_seal_says_what_it_sealed_and_that_there_was_nothing(run: Run) -> None:
    run("append", "a", stdin=numbers(3))
    assert run("seal", "a") == (0, "sealed seqs 1 to 3\n", "")
    assert run("seal", "a") == (0, "nothing to seal: the active segment is empty\n", "")
    assert json_result(run("seal", "a", "--json")) == {"sealed": False, "first": None, "last": None}


def test_truncate_forgets_the_end_and_says_what(run: Run) -> None:
    run("append", "a", stdin=numbers(10))
    assert run("truncate", "a", "--to", 8) == (0, "removed seqs 8 to 10; the next seq is 8\n", "")
    forgot = {"forgotten": 2, "first": 6, "last": 7, "next_seq": 6}
    assert json_result(run("truncate", "a", "--to", 6, "--json")) == forgot
    assert run("cat", "a")[1] == numbers(5).decode()
    code, _, err = run("truncate", "a", "--to", 9)
    assert code == 2
    assert "it holds [1, 6)" in err


def test_retain_drops_by_age_and_by_size_and_keeps_past_the_high_watermark(run: Run) -> None:
    fill(run, count=800)
    segments = json_result(run("inspect", "a", "--json"))["segments"]
    assert json_result(run("retain", "a", "--keep", "1w", "--json"))["segments"] == 0
    kept = json_result(run("retain", "a", "--keep-ms", 0, "--high-watermark", segments[2]["first_seq"], "--json"))
    assert (kept["segments"], kept["lowest"]) == (2, segments[2]["first_seq"])
    assert "high watermark" in kept["because"]
    code, out, _ = run("retain", "a", "--keep-bytes", "2k")
    assert code == 0
    assert out.startswith("dropped ")
    code, out, _ = run("retain", "a", "--keep-bytes", "2k")
    assert out.startswith("dropped nothing; the log starts at seq ")


def test_retain_wants_to_know_what_to_keep(run: Run) -> None:
    run("append", "a", stdin=numbers(3))
    code, _, err = run("retain", "a")
    assert code == 2
    assert "give --keep, --keep-ms or --keep-bytes" in err


def test_compact_keeps_the_newest_record_of_every_key(run: Run) -> None:
    run("append", "a", "--codec", "rustlog", stdin=b"a=1\nb=1\nno key\na=2\nb=\n")
    code, out, err = run("compact", "a", "--key", "prefix:=")
    assert (code, out[:18]) == (0, "dropped 0 records ")
    assert err == "seqs 0 to 4 are in the active segment, which is never compacted; tidelog log seal a closes it\n"
    run("seal", "a")
    fields = json_result(run("compact", "a", "--key", "prefix:=", "--json"))
    assert (fields["dropped"], fields["kept"], fields["segments"], fields["unsealed"]) == (2, 3, 1, 0)
    assert fields["bytes_after"] < fields["bytes_before"]
    assert run("cat", "a")[1] == "no key\na=2\nb=\n"
    assert json_result(run("compact", "a", "--key", "prefix:=", "--tombstones", "--json"))["dropped"] == 1
    assert run("cat", "a")[1] == "no key\na=2\n"


def test_compact_by_tag_and_by_a_field(run: Run) -> None:
    for tag in ("x", "y", "x"):
        run("append", "a", "--tag", tag, stdin=b'{"id":"%s"}\n' % tag.encode())
    run("seal", "a")
    assert json_result(run("compact", "a", "--key", "json:id", "--json"))["dropped"] == 1
    assert json_result(run("compact", "a", "--key", "tag", "--json"))["dropped"] == 0
    with SegmentedLog.open("a", read_only=True) as log:
        assert [(record.seq, record.tag) for record in log] == [(2, b"y"), (3, b"x")]


def test_compact_by_tag_is_refused_where_records_have_none(run: Run) -> None:
    run("append", "a", "--codec", "laminar", stdin=numbers(3))
    code, _, err = run("compact", "a", "--key", "tag")
    assert code == 2
    assert "the laminar layout has no tag; nothing was dropped" in err


# ── convert, restore ──────────────────────────────────────────────────────────────────────────────


def test_convert_writes_every_record_in_another_layout(run: Run) -> None:
    run("append", "a", stdin=numbers(300))
    fields = json_result(run("convert", "a", "b", "--to", "laminar", "--renumber", "--json"))
    assert (fields["codec"], fields["lowest"], fields["highest"], fields["seqs"]) == ("laminar", 0, 300, 300)
    assert run("cat", "b")[1] == numbers(300).decode()
    code, out, _ = run("convert", "b", "c", "--to", "rustlog")
    assert code == 0
    assert out.startswith("c: a rustlog log, seqs 0 to 299, ")


def test_convert_drops_a_column_only_with_drop_and_leaves_no_partial_copy(run: Run) -> None:
    run("append", "a", "--tag", "t", "--node", "n", stdin=numbers(3))
    code, _, err = run("convert", "a", "b", "--to", "narwhal")
    assert code == 2
    assert "records have a tag and the narwhal layout cannot store it" in err
    assert json_result(run("convert", "a", "b", "--to", "narwhal", "--drop", "tag", "--json"))["seqs"] == 3, (
        "nothing is in the way"
    )
    code, _, err = run("convert", "a", "b", "--to", "narwhal", "--drop", "tag")
    assert code == 2
    assert err == "tidelog: b exists already and is not empty; nothing was written, name a new directory\n"
    with SegmentedLog.open("b", read_only=True) as log:
        assert {(record.node, record.tag) for record in log} == {(b"n", b"")}


def test_a_copy_that_is_whole_is_not_called_incomplete(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    run("append", "a", stdin=numbers(3))
    with monkeypatch.context() as patch:
        patch.setattr(Screen, "print_result", full)
        assert run("convert", "a", "b", "--to", "tide") == (2, "", "tidelog: [Errno 28] No space left on device\n")
    assert run("cat", "b")[1] == numbers(3).decode()


def test_convert_refuses_a_seq_that_the_target_does_not_have(run: Run) -> None:
    run("append", "a", "--codec", "rustlog", stdin=numbers(3))
    code, _, err = run("convert", "a", "b", "--to", "tide")
    assert code == 2
    assert "seq 0 does not exist in the tide layout" in err


def test_restore_copies_up_to_a_seq_or_a_time(run: Run) -> None:
    fill(run)
    code, out, _ = run("restore", "a", "b", "--to-offset", 250)
    assert code == 0
    assert out.startswith("b: a tide log, seqs 1 to 250, ")
    assert out.endswith("; 50 later seqs left out\n")
    assert run("cat", "b")[1] == numbers(250).decode()
    with SegmentedLog.open("a", read_only=True) as log:
        ts_us = log.read(300).ts_us
    assert json_result(run("restore", "a", "c", "--to-time", ts_us, "--json"))["highest"] == 301
    assert json_result(run("restore", "a", "d", "--to-time", "2000-01-01T00:00:00Z", "--json"))["highest"] == 1
    code, _, err = run("restore", "a", "b", "--to-offset", 5)
    assert code == 2
    assert "b exists already and is not empty" in err


def test_restore_by_time_is_refused_where_records_have_none(run: Run) -> None:
    run("append", "a", "--codec", "laminar", stdin=numbers(3))
    code, _, err = run("restore", "a", "b", "--to-time", 5)
    assert code == 2
    assert "the laminar layout stores no time per record" in err
    assert not Path("b").exists()


# ── every command ─────────────────────────────────────────────────────────────────────────────────

NEEDS = {
    "truncate": ["--to", "1"],
    "compact": ["--key", "tag"],
    "retain": ["--keep", "1d"],
    "convert": ["new", "--to", "tide"],
    "restore": ["new", "--to-offset", "1"],
}
COMMANDS = ("cat", "inspect", "verify", "repair", "seal", "truncate", "compact", "retain", "convert", "restore")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_mistyped_path_is_an_error_and_makes_nothing(run: Run, command: str) -> None:
    Path("empty").mkdir()
    Path("file").write_bytes(b"")
    for path in ("nowhere", "empty", "file"):
        code, out, err = run(command, path, *NEEDS.get(command, []))
        assert (code, out) == (2, "")
        assert err.startswith("tidelog: ")
        assert path in err
    assert sorted(entry.name for entry in Path().rglob("*")) == ["empty", "file"]


@pytest.mark.parametrize("command", ["append", *COMMANDS])
def test_another_codec_than_the_log_has_is_refused_and_changes_nothing(run: Run, command: str) -> None:
    run("append", "a", stdin=numbers(3))
    before = {file.name: file.read_bytes() for file in Path("a").iterdir()}
    code, _, err = run(command, "a", *NEEDS.get(command, []), "--codec", "narwhal", stdin=b"x\n")
    assert code == 2
    assert "a holds a tide log, not a narwhal one" in err
    assert {file.name: file.read_bytes() for file in Path("a").iterdir()} == before


@pytest.mark.parametrize("command", ["append", "repair", "seal", "truncate", "compact", "retain"])
def test_a_second_writer_is_refused_and_changes_nothing(run: Run, command: str) -> None:
    with SegmentedLog.open("a") as log:
        log.append_many([b"a", b"b"])
        before = {file.name: file.read_bytes() for file in Path("a").iterdir()}
        code, out, err = run(command, "a", *NEEDS.get(command, []), "--json", stdin=b"x\n")
        assert (code, out, json.loads(err)["error"]) == (2, "", "locked")
        assert {file.name: file.read_bytes() for file in Path("a").iterdir()} == before


@pytest.mark.parametrize("command", ["cat", "inspect", "verify", "convert", "restore"])
def test_a_reader_works_beside_a_writer(run: Run, command: str) -> None:
    with SegmentedLog.open("a") as log:
        log.append_many([b"a", b"b"])
        assert run(command, "a", *NEEDS.get(command, []))[0] == 0
