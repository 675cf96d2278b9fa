"""The commands of `tidelog topic`, through `main`, on real files."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from tests.kit.commands import Run, json_result, runner

import tidelog
from tidelog.cli import topic as topic_look
from tidelog.cli.main import main
from tidelog.cli.topic import ACK_MEANING, describe_counts, gap_line, join_batches, parse_json_lines, would_delete
from tidelog.disk.posix import PosixFile
from tidelog.engine import Counts, Gap
from tidelog.engine import read as engine_read
from tidelog.engine.read import WalWatch
from tidelog.errors import BadInput, BatchTooLarge
from tidelog.testing import ManualClock


@pytest.fixture
def run(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `tidelog topic …` in a directory of its own."""
    return runner(capsysbinary, monkeypatch, "topic", directory=tmp_path)


def objects(result: tuple[int, str, str]) -> list[dict[str, Any]]:
    code, out, err = result
    assert (code, err) == (0, "")
    return [json.loads(line) for line in out.splitlines()]


def refused(result: tuple[int, str, str]) -> str:
    code, out, err = result
    assert (code, out, err.count("\n")) == (2, "", 1)
    return err


def files(path: str = "d") -> dict[str, bytes]:
    """Every file of a directory; the lock says who wrote last and is no part of it."""
    return {str(file): file.read_bytes() for file in Path(path).rglob("*") if file.is_file() and file.name[0] != "."}


def fill(**topics: dict[str, Any]) -> None:
    """Topics in `d`: records, and what they are appended and configured with."""
    with tidelog.open("d", wal_file_bytes=1 << 16, segment_events_max=8) as log:
        for name, how in topics.items():
            config = {key: value for key, value in how.items() if key not in ("records", "tag", "node", "meta")}
            topic = log.topic(name, **config)
            for number, record in enumerate(how["records"]):
                tag = how.get("tag")
                topic.append(
                    [record],
                    tag=tag[number] if isinstance(tag, list) else tag,
                    node=how.get("node"),
                    meta=how.get("meta"),
                )


def held(topic: str) -> list[Any]:
    with tidelog.open("d", read_only=True) as log:
        return [record.data for record in log.topic(topic, create=False) if isinstance(record, tidelog.Record)]


# ── write ─────────────────────────────────────────────────────────────────────────────────────────


def test_write_makes_the_topic_writes_a_record_a_line_and_says_the_seqs_and_what_they_meant(run: Run) -> None:
    code, out, err = run("write", "d", "t", stdin=b"x\n\ny")
    assert (code, err) == (0, "")
    assert out.splitlines() == ["wrote 3 records, seqs 1 to 3", f"class disk: {ACK_MEANING['disk']}"]
    assert run("write", "d", "t") == (0, "nothing was written, the next seq is 4\n", "")
    assert held("t") == [b"x", b"", b"y"]


@pytest.mark.parametrize("durability", ["fsync", "disk", "memory", "ephemeral"])
def test_write_ends_with_what_an_ack_of_the_class_meant(durability: str, run: Run) -> None:
    """G1, G11: what the line says of the records is so when the command has ended."""
    fields = json_result(run("write", "d", "t", "--class", durability, "--json", stdin=b"a\nb\n"))
    assert fields == {
        "topic": "t",
        "first": 1,
        "last": 2,
        "records": 2,
        "next_seq": 3,
        "class": durability,
        "meant": ACK_MEANING[durability],
    }
    assert held("t") == ([] if durability == "ephemeral" else [b"a", b"b"])


def test_write_keeps_tag_and_node_and_writes_json_as_values(run: Run) -> None:
    lines = b'{"a": [1, null]}\n\n"text"\n  7\n'
    assert run("write", "d", "t", "--json-lines", "--tag", "grün", "--node", "n", stdin=lines)[0] == 0
    with tidelog.open("d", read_only=True) as log:
        records = log.topic("t", create=False).read().records
    assert [record.data for record in records] == [{"a": [1, None]}, "text", 7]
    assert {(record.tag, record.node) for record in records} == {("grün", "n")}


def test_a_line_that_is_no_json_is_named_and_its_batch_is_not_written(run: Run) -> None:
    code, out, err = run("write", "d", "t", "--json-lines", "--batch", 2, stdin=b"1\n2\n\n3\n4\n{\n")
    assert (code, out) == (2, "")
    assert "line 6 of standard input is not JSON" in err
    assert err.endswith("; wrote 3 records, seqs 1 to 3\n")
    assert held("t") == [1, 2, 3]


def test_json_lines_are_counted_over_all_batches_and_empty_ones_left_out() -> None:
    assert list(parse_json_lines([[b"1", b" "], [b""], [b"[2]"]])) == [[1], [[2]]]
    with pytest.raises(BadInput, match="line 3 "):
        list(parse_json_lines([[b"1", b"2"], [b"x"]]))


def test_write_says_every_batch_as_it_is_acked_when_asked(run: Run) -> None:
    code, out, err = run("write", "d", "t", "--batch", 2, "--acks", stdin=b"1\n2\n3\n")
    assert (code, out) == (0, "seqs 1 to 2\nseq 3\n")
    assert err.splitlines() == ["wrote 3 records, seqs 1 to 3", f"class disk: {ACK_MEANING['disk']}"]
    assert objects(run("write", "d", "t", "--acks", "--json", stdin=b"4\n")) == [
        {"first": 4, "last": 4, "records": 1, "next_seq": 5}
    ]


def test_class_is_for_a_topic_that_is_made(run: Run) -> None:
    fill(t={"records": [b"x"], "durability": "fsync"})
    assert run("write", "d", "t", "--class", "fsync", stdin=b"y\n")[0] == 0
    said = refused(run("write", "d", "t", "--class", "disk", stdin=b"z\n"))
    assert "t has class fsync" in said
    assert "tidelog topic config d t durability=disk" in said
    assert held("t") == [b"x", b"y"]


def test_without_create_nothing_is_made(run: Run, tmp_path: Path) -> None:
    assert "there is nothing at d" in refused(run("write", "d", "t", "--no-create", stdin=b"x\n"))
    assert list(tmp_path.iterdir()) == []
    fill(t={"records": [b"x"]})
    before = files()
    assert "there is no topic 'u'" in refused(run("write", "d", "u", "--no-create", stdin=b"x\n"))
    assert [name for name in files() if "topics/" in name] == [name for name in before if "topics/" in name]
    assert run("write", "d", "t", "--no-create", stdin=b"y\n")[0] == 0


def test_a_key_makes_one_write_of_all_lines(run: Run) -> None:
    assert list(join_batches([[1], [2, 3]])) == [[1, 2, 3]]
    assert list(join_batches([])) == []
    with pytest.raises(BatchTooLarge, match="10001 lines under one key"):
        list(join_batches([[0] * 10_000, [0]]))
    _, out, _ = run("write", "d", "t", "--key", "k", "--batch", 1, "--acks", stdin=b"1\n2\n3\n")
    assert out == "seqs 1 to 3\n"


def test_a_refusal_by_the_topic_says_what_was_written_before_it(run: Run) -> None:
    """G12: the refused write takes no seq."""
    fill(t={"records": [b"x"], "cap_records": 3, "discard": "reject"})
    code, _, err = run("write", "d", "t", "--batch", 1, "--json", stdin=b"1\n2\n3\n")
    error = json.loads(err)
    assert (code, error["error"], error["written"]) == (2, "topic_full", False)
    assert error["acked"] == {"first": 2, "last": 3, "records": 2, "next_seq": 4}
    assert held("t") == [b"x", b"1", b"2"]


# ── ls, show ──────────────────────────────────────────────────────────────────────────────────────


def test_ls_lists_topics_by_name(run: Run) -> None:
    fill(b={"records": [b"x"] * 5, "cap_records": 2}, a={"records": [], "durability": "fsync"})
    code, out, err = run("ls", "d")
    assert (code, err) == (0, "")
    assert [line.split() for line in out.splitlines()[2:]] == [
        ["a", "fsync", "0", "0", "B", "-", "-", "-"],
        ["b", "disk", "2", "2", "B", "4", "5", "3"],
        ["2", "topics,", "2", "records"],
    ]
    listed = json_result(run("ls", "d", "--json", "--prefix", "b"))
    assert listed["path"] == "d"
    assert listed["topics"] == [
        {
            "topic": "b",
            "id": 1,
            "class": "disk",
            "count": 2,
            "bytes": 2,
            "head_seq": 5,
            "earliest_seq": 4,
            "evict_floor": 4,
        }
    ]
    assert run("ls", "d", "--prefix", "c") == (0, "0 topics, 0 records\n", "")


def test_show_prints_records_segments_and_missing_seqs(run: Run) -> None:
    fill(t={"records": [b"x"] * 20, "cap_records": 10})
    assert run("delete", "d", "t", "--before", 13)[0] == 0
    code, out, err = run("show", "d", "t")
    assert (code, err) == (0, "")
    assert out.startswith("t: 8 records, 8 B, next seq 21\nclass disk: an acked record survives kill -9; ")
    assert "\nseqs 1 to 10: lost to a cap or to age" in out
    assert "\nseqs 11 to 12: deleted" in out
    fields = json_result(run("show", "d", "t", "--json"))
    assert [(row["first_seq"], row["last_seq"], row["sealed"]) for row in fields["segments"]] == [
        (9, 16, True),
        (17, 20, False),
    ]
    assert fields["config"]["cap_records"] == 10
    assert fields["last_ts"] > "2020"


def test_show_says_when_the_newest_record_was_written_and_nothing_of_losses_that_were_none(run: Run) -> None:
    clock = ManualClock()
    with tidelog.open("d", wal_file_bytes=1 << 16, clock=clock) as log:
        for _ in range(3):
            clock.tick(1000)
            log.topic("t").append(b"x")
    assert run("show", "d", "t")[1].splitlines()[:4] == [
        "t: 3 records, 3 B, next seq 4",
        "class disk: an acked record survives kill -9; of the last moments before a power cut, a first part",
        "newest record: 2023-11-14T22:13:23.000000Z",
        "first  last  state     data  live  written (UTC)                  ",
    ]


def test_show_says_what_is_only_in_the_wal(run: Run) -> None:
    log = tidelog.open("d", wal_file_bytes=1 << 16)
    log.topic("t").append([b"x", b"y"])
    _, out, _ = run("show", "d", "t")
    log.close()
    assert "2 seqs from 1 on are in the WAL until the next checkpoint" in out
    assert "in the WAL" not in run("show", "d", "t")[1]


@pytest.mark.parametrize("command", ["show", "read", "follow", "seal", "config"])
def test_a_topic_that_is_not_there_is_refused(command: str, run: Run) -> None:
    fill(t={"records": [b"x"]})
    assert "there is no topic 'u'" in refused(run(command, "d", "u"))


# ── read ──────────────────────────────────────────────────────────────────────────────────────────


def test_read_prints_data_as_it_went_in_and_accounts_for_it(run: Run) -> None:
    fill(t={"records": [b"x\xff", {"a": 1}, "text"]})
    code, out, err = run("read", "d", "t")
    assert (code, out) == (0, 'x\udcff\n{"a":1}\n"text"\n')
    assert err == "3 records; the topic's head is 3, caught up\n"
    assert run("read", "d", "t", "--from", 1, "--limit", 1) == (
        0,
        '{"a":1}\n',
        "1 record; the topic's head is 3, go on with --from 2\n",
    )
    assert run("read", "d", "t", "--from", 3)[1] == ""


def test_read_answers_in_json_lines_that_lose_nothing(run: Run) -> None:
    fill(t={"records": [b"x\xff", b"text", {"a": 1}], "tag": "g", "node": "n", "meta": {"k": 2}})
    *records, end = objects(run("read", "d", "t", "--json"))
    assert all(record.pop("ts").endswith("Z") for record in records)
    common = {"tag": "g", "node": "n", "meta": {"k": 2}}
    assert records == [
        {"seq": 1, "json": False, "data_base64": "eP8=", **common},
        {"seq": 2, "json": False, "data": "text", **common},
        {"seq": 3, "json": True, "data": {"a": 1}, **common},
    ]
    assert end == {
        "counts": {"rows": 3, "deleted": 0, "expired": 0, "evicted": 0, "filtered": 0, "holes": 0},
        "next_from_seq": 3,
        "head_seq": 3,
    }


def test_read_shows_a_gap_plainly_and_counts_what_is_missing(run: Run) -> None:
    """G72: what was deleted is counted and is no gap."""
    fill(t={"records": [b"%d" % number for number in range(1, 11)], "cap_records": 6})
    assert run("delete", "d", "t", "--seqs", "6,8")[0] == 0
    code, out, err = run("read", "d", "t")
    assert (code, out) == (0, "5\n7\n9\n10\n")
    assert err.splitlines() == [
        "gap: seqs 1 to 4 were lost to the topic's cap before they were read",
        "4 records, 2 deleted, 4 evicted; the topic's head is 10, caught up",
    ]
    gap, *_, end = objects(run("read", "d", "t", "--json"))
    assert gap == {
        "gap": {
            "gap_from": 1,
            "gap_to": 4,
            "reason": "cap",
            "missed_estimate": 4,
            "earliest_seq": 5,
            "head_seq": 10,
        }
    }
    assert sum(end["counts"].values()) == end["next_from_seq"] == 10
    assert "gap" not in run("read", "d", "t", "--from", 4)[2]


def test_read_leaves_out_the_records_of_a_node(run: Run) -> None:
    fill(t={"records": [b"mine"], "node": "me"})
    for node in ("you", "her"):
        assert run("write", "d", "t", "--node", node, stdin=node.encode())[0] == 0
    assert run("read", "d", "t", "--node", "me") == (
        0,
        "you\nher\n",
        "2 records, 1 filtered; the topic's head is 3, caught up\n",
    )
    assert run("read", "d", "t", "--node", "me", "--node", "her")[1] == "you\n"


def test_read_goes_from_page_to_page(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(t={"records": [b"%d" % number for number in range(1, 30)], "cap_records": 20})
    assert run("delete", "d", "t", "--seqs", "15,16,17,18,19,20")[0] == 0
    whole = run("read", "d", "t")
    for size in (1, 3, 7):
        monkeypatch.setattr(topic_look, "_PAGE_RECORDS", size)
        assert run("read", "d", "t") == whole
        assert run("read", "d", "t", "--limit", 4)[1].splitlines() == ["10", "11", "12", "13"]


def test_every_way_to_lose_records_has_its_words() -> None:
    said = {reason: gap_line(Gap(1, 5, reason, 5, 6, 9), "t") for reason in ("cap", "ttl", "mixed", "recreated")}
    assert "the topic's cap before" in said["cap"]
    assert "their age before" in said["ttl"]
    assert "the topic's cap and their age" in said["mixed"]
    assert "t was dropped and made again" in said["recreated"]
    assert describe_counts(Counts(rows=1, expired=2, holes=1_000)) == "1 record, 2 expired, 1,000 holes"


# ── follow ────────────────────────────────────────────────────────────────────────────────────────


_CHANGED = WalWatch.changed


class Keyboard:
    """A person at the keyboard of a `follow` in this process: does a step at every pause, then presses Ctrl-C."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *steps: Callable[[], object]) -> None:
        self._steps = list(steps)

        def changed(watch: WalWatch) -> bool:
            if not self._steps:
                raise KeyboardInterrupt
            self._steps.pop(0)()
            return _CHANGED(watch)

        monkeypatch.setattr(WalWatch, "changed", changed)
        monkeypatch.setattr(topic_look, "_POLL_S", 0.001)


def test_follow_prints_what_another_process_writes_until_the_keyboard_ends_it_quietly(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tidelog.open("d", wal_file_bytes=1 << 16) as log:
        topic = log.topic("t")
        topic.append([b"1", b"2"])
        Keyboard(
            monkeypatch,
            lambda: topic.append(b"3"),
            log.checkpoint,
            lambda: topic.append({"n": 4}),
            lambda: None,
        )
        assert run("follow", "d", "t", "--from", 1) == (0, '2\n3\n{"n":4}\n', "")
        Keyboard(monkeypatch, lambda: topic.append(b"5"))
        assert [line["seq"] for line in objects(run("follow", "d", "t", "--from", 3, "--json"))] == [4, 5]


def test_follow_looks_again_only_when_something_stirs_and_once_more(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    with tidelog.open("d", wal_file_bytes=1 << 16, threads=False) as log:
        topic = log.topic("t")
        topic.append(b"1")
        really = engine_read._adopt_reloaded

        def take_over(*args: Any) -> None:
            nonlocal looks
            looks += 1
            really(*args)

        monkeypatch.setattr(engine_read, "_adopt_reloaded", take_over)
        log.checkpoint()
        Keyboard(monkeypatch, *[lambda: None] * 5, log.checkpoint, *[lambda: None] * 5)
        assert run("follow", "d", "t")[1] == "1\n"
    assert looks == 3, "once after the start, and twice after the checkpoint"


def test_follow_ends_by_itself_when_nothing_comes(run: Run) -> None:
    fill(t={"records": [b"1", b"2"]})
    assert run("follow", "d", "t", "--timeout", 0) == (0, "1\n2\n", "")
    assert run("follow", "d", "t", "--timeout", "10ms", "--from", 1) == (0, "2\n", "")


def test_the_timeout_of_follow_counts_from_the_last_record(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    monkeypatch.setattr(topic_look, "SystemClock", lambda: clock)
    with tidelog.open("d", wal_file_bytes=1 << 16) as log:
        topic = log.topic("t")
        topic.append(b"1")

        def later(*records: bytes) -> Callable[[], None]:
            def step() -> None:
                clock.tick(600)
                for record in records:
                    topic.append(record)

            return step

        Keyboard(monkeypatch, later(b"2"), later(b"3"), later(b"4"), later(), later(), later(b"too late"))
        assert run("follow", "d", "t", "--timeout", 1) == (0, "1\n2\n3\n4\n", "")


def test_follow_handles_a_gap_by_on_gap(run: Run) -> None:
    fill(t={"records": [b"%d" % number for number in range(1, 6)], "cap_records": 2})
    words = ("follow", "d", "t", "--timeout", 0)
    said = refused(run(*words))
    assert "t: seqs 1 to 3 are lost (cap)" in said
    assert said.endswith("; --from 3 begins after them, --on-gap emit or skip continues by itself\n")
    assert run(*words, "--from", 3) == (0, "4\n5\n", "")
    assert run(*words, "--on-gap", "skip") == (0, "4\n5\n", "")
    code, out, err = run(*words, "--on-gap", "emit")
    assert (code, out) == (0, "4\n5\n")
    assert err == "gap: seqs 1 to 3 were lost to the topic's cap before they were read\n"
    gap, *records = objects(run(*words, "--on-gap", "emit", "--json"))
    assert gap["gap"]["gap_to"] == 3
    assert [record["seq"] for record in records] == [4, 5]


def test_follow_notices_a_topic_that_was_dropped_and_made_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """G86: also where the new one has as many records as were read of the old one."""
    with tidelog.open("d", wal_file_bytes=1 << 16) as log:

        def again() -> None:
            log.drop("t")
            log.topic("t").append([b"new 1", b"new 2", b"new 3"])

        log.topic("t").append([b"1", b"2"])
        Keyboard(monkeypatch, again, lambda: None)
        code, out, err = run("follow", "d", "t", "--on-gap", "emit")
        assert (code, out) == (0, "1\n2\nnew 1\nnew 2\nnew 3\n")
        assert err == "gap: t was dropped and made again; its seqs are other records now, reading from the first\n"
        Keyboard(monkeypatch, again, lambda: None)
        assert run("follow", "d", "t", "--from", 2, "--on-gap", "skip") == (0, "new 3\nnew 1\nnew 2\nnew 3\n", "")
        Keyboard(monkeypatch, again)
        code, out, err = run("follow", "d", "t")
        assert (code, out) == (2, "new 1\nnew 2\nnew 3\n")
        assert "t: the topic was deleted and made again" in err
        Keyboard(monkeypatch, lambda: log.drop("t"))
        assert "there is no topic 't'" in run("follow", "d", "t")[2]


def test_follow_says_that_an_ephemeral_topic_is_not_to_be_seen(run: Run) -> None:
    fill(t={"records": [], "durability": "ephemeral"})
    assert run("follow", "d", "t", "--timeout", 0)[2].startswith("t is ephemeral: its records never leave the process")


# ── delete ────────────────────────────────────────────────────────────────────────────────────────


def test_delete_says_what_it_removed_and_a_dry_run_what_it_would(run: Run) -> None:
    fill(t={"records": [b"a", b"bb", b"ccc", b"dddd"], "tag": ["x", "y:1", "y:2", None]})
    before = files()
    words = ("delete", "d", "t", "--match", "y:*")
    assert run(*words, "--dry-run") == (0, "would delete 2 records (5 B); 2 left, 1 is the first\n", "")
    assert files() == before
    assert run(*words) == (0, "deleted 2 records (5 B); 2 left, 1 is the first\n", "")
    assert held("t") == [b"a", b"dddd"]
    assert json_result(run("delete", "d", "t", "--before", 9, "--json")) == {
        "topic": "t",
        "dry_run": False,
        "deleted": 2,
        "bytes": 5,
        "left": 0,
        "earliest_seq": 5,
        "head_seq": 4,
    }
    assert run("delete", "d", "t", "--seqs", "1,2")[1] == "deleted 0 records (0 B); 0 left, the next seq is 5\n"


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_delete_wants_to_know_what_and_takes_seqs_by_themselves(options: list[str], run: Run) -> None:
    fill(t={"records": [b"a"]})
    assert "give --match, --before or --seqs" in refused(run("delete", "d", "t", *options))
    assert "nothing was deleted" in refused(run("delete", "d", "t", "--seqs", "1", "--before", 2, *options))
    assert held("t") == [b"a"]


def test_a_dry_run_foretells_any_delete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers as the delete that follows it, whatever is asked for and however it is scanned."""
    random = Random(7)
    monkeypatch.setattr("tidelog.cli.topic._SCAN_CHUNK_SEQS", 5)
    with tidelog.open(str(tmp_path / "d"), wal_file_bytes=1 << 16, segment_events_max=8) as log:
        for _ in range(40):
            log.drop("t")
            topic = log.topic("t", cap_records=random.choice([0, 15]))
            for number in range(random.randrange(25)):
                tag = random.choice([None, "a", "ab", "b", "ä"])
                topic.append([b"x" * number], tag=tag, meta=random.choice([None, {"k": number}]))
            for _ in range(3):
                match = random.choice([None, "a", "a*", "*", "c", "ä*"])
                before = random.choice([None, 0, 7, 99]) if match else random.randrange(30)
                seqs = None if match or random.random() < 0.5 else [random.randrange(30) for _ in range(4)]
                asked: dict[str, Any] = {"match": match, "before_seq": None if seqs else before, "seqs": seqs}
                weight = topic.bytes
                foretold = would_delete(topic, **asked)
                done = topic.delete(**asked)
                told = (done.deleted, weight - done.bytes, done.count, done.earliest_seq, done.head_seq)
                assert foretold == told, asked


# ── drop, config ──────────────────────────────────────────────────────────────────────────────────


def test_drop_wants_to_be_sure(run: Run) -> None:
    fill(t={"records": [b"a", b"b"]}, u={"records": []}, v={"records": []})
    assert "t holds 2 records; nothing was dropped, say --yes" in refused(run("drop", "d", "t", stdin=b"yes\n"))
    assert "t holds 2 records" in refused(run("drop", "d", "t", "--if-empty", "--yes"))
    assert held("t") == [b"a", b"b"]
    assert run("drop", "d", "u") == (0, "dropped u with 0 records\n", "")
    assert run("drop", "d", "v", "--if-empty")[0] == 0
    assert json_result(run("drop", "d", "t", "--yes", "--json")) == {"topic": "t", "records": 2}
    assert run("ls", "d")[1] == "0 topics, 0 records\n"
    assert "there is no topic 't'" in refused(run("drop", "d", "t", "--yes"))


@pytest.mark.parametrize(("typed", "code"), [("yes\n", 0), ("Y\n", 0), ("no\n", 2), ("", 2)])
def test_drop_asks_a_person(
    typed: str, code: int, run: Run, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    fill(t={"records": [b"a"]})
    person = SimpleNamespace(isatty=lambda: True, readline=lambda: typed)
    monkeypatch.setattr(sys, "stdin", person)
    assert main(["topic", "drop", "d", "t"]) == code
    out, err = capsysbinary.readouterr()
    assert err.startswith(b"t holds 1 record; drop it for good? yes or no:\n")
    assert (out == b"dropped t with 1 record\n") == (code == 0)
    assert len(json_result(run("ls", "d", "--json"))["topics"]) == (0 if code == 0 else 1)


def test_config_shows_settings_and_which_were_set(run: Run) -> None:
    fill(t={"records": [], "ttl_ms": 1000})
    code, out, err = run("config", "d", "t")
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()[2:]]
    assert len(rows) == 23
    assert ["ttl_ms", "1000", "set"] in rows
    assert ["durability", "disk"] in rows
    assert ["dead_letter", "null"] in rows
    assert json_result(run("config", "d", "t", "--json"))["ttl_ms"] == 1000


def test_config_sets_what_is_given_and_says_what_changed(run: Run) -> None:
    fill(t={"records": [b"x"] * 10, "ttl_ms": 7_000_000})
    assert run("config", "d", "t", "durability=fsync", "cap_bytes=1m") == (
        0,
        "cap_bytes: 0 -> 1048576\ndurable: false -> true\ndurability: disk -> fsync\n",
        "",
    )
    assert run("config", "d", "t", "ttl_ms=7d", "cap_records=4", "priority=null")[1].splitlines() == [
        "ttl_ms: 7000000 -> 604800000",
        "cap_records: 0 -> 4",
        "6 records over the new limits were evicted; readers get a gap",
    ]
    assert run("config", "d", "t", "cap_records=4")[1] == "t has these settings already\n"
    fields = json_result(run("config", "d", "t", "auto_create=false", "--json"))
    assert (fields["changed"], fields["evicted"], fields["config"]["cap_records"]) == (["auto_create"], 0, 4)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("cap_record=4", "the nearest is cap_records"),
        ("durability=paper", "ephemeral, memory, disk, fsync"),
        ("cap_records=true", "cap_records is True"),
        ("cap_records=-1", "cap_records is -1"),
        ("type=queue", "a type never changes"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(setting: str, said: str, run: Run) -> None:
    fill(t={"records": [b"x"]})
    assert said in refused(run("config", "d", "t", setting))


# ── seal, checkpoint ──────────────────────────────────────────────────────────────────────────────


def test_seal_completes_the_segment_that_grows(run: Run) -> None:
    fill(t={"records": [b"x"] * 11})
    assert run("seal", "d", "t") == (0, "sealed seqs 9 to 11\n", "")
    assert run("seal", "d", "t") == (0, "nothing to seal: no segment of this topic grows\n", "")
    assert run("write", "d", "t", stdin=b"y\n")[0] == 0
    assert json_result(run("seal", "d", "t", "--json")) == {"topic": "t", "sealed": 1, "first": 12, "last": 12}
    assert all(row["sealed"] for row in json_result(run("show", "d", "t", "--json"))["segments"])


def test_checkpoint_recovers_and_says_what_there_is(run: Run) -> None:
    fill(t={"records": [b"x"] * 11}, u={"records": [b"x"]})
    fields = json_result(run("checkpoint", "d", "--json"))
    assert (fields["topics"], fields["segments"]) == (2, 3)
    code, out, err = run("checkpoint", "d")
    assert (code, err) == (0, "")
    assert out.startswith(f"snapshot {fields['snapshot'] + 1} names 2 topics in 3 segments; 0 frames came from the WAL")


# ── consistency ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("command", [("read",), ("follow", "--timeout", "0")], ids=["read", "follow"])
def test_strong_readers_sync_what_they_print(
    run: Run, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    synced: list[str] = []
    real = PosixFile.sync

    def noted(file: PosixFile) -> None:
        synced.append(file.path)
        real(file)

    with tidelog.open(str(tmp_path / "d"), threads=False) as log:
        topic = log.topic("t", durability="disk")
        topic.append(b"1")
        topic.append(b"2")
        monkeypatch.setattr(PosixFile, "sync", noted)
        verb, *more = command
        assert run(verb, "d", "t", *more, "--consistency", "eventual")[:2] == (0, "1\n2\n")
        assert synced == [], "an eventual reader syncs nothing"
        assert run(verb, "d", "t", *more, "--consistency", "strong")[:2] == (0, "1\n2\n")
        assert any("wal" in path for path in synced), "what is printed survives a power cut"
        log.topic("m", durability="memory").append(b"1")
        log.checkpoint()
        assert "strong readers cannot be served" in run(verb, "d", "m", *more, "--consistency", "strong")[2]


def test_a_gap_that_a_router_left_is_printed(run: Run, tmp_path: Path) -> None:
    with tidelog.open(str(tmp_path / "d"), threads=False) as log:
        log.topic("s", cap_records=2)
        log.router("r", "s", "t")
        for turn in range(2):
            log.topic("s").append([b"a", b"b", b"c"])
            assert log.topic("t").state().head_seq == 3 * turn + 3
    code, out, err = run("read", "d", "t")
    assert (code, out) == (0, "b\nc\nb\nc\n")
    lost = "lost to the cap or age limit of the source of its router"
    assert [line.split(f" {lost}")[0] for line in err.splitlines() if lost in line] == [
        "gap: seq 1 was",
        "gap: seq 4 was",
    ]
    assert run("follow", "d", "t", "--on-gap", "emit", "--timeout", "0")[:2] == (0, out)


# ── large records ─────────────────────────────────────────────────────────────────────────────────


def test_a_file_is_written_as_one_record_and_read_back(run: Run) -> None:
    data = Random(2).randbytes(700_000)
    Path("in.bin").write_bytes(data)
    fill(videos={"records": ["first"]})
    written = json_result(run("write", "d", "videos", "--stream", "in.bin", "--tag", "clip", "--json"))
    assert (written["first"], written["records"]) == (2, 1)
    assert run("write", "d", "videos", "--stream", "-", stdin=data[:1000])[0] == 0
    records = objects(run("read", "d", "videos", "--json"))[:-1]
    assert records[1]["data"]["$large"]["bytes"] == len(data)
    code, out, _ = run("read", "d", "videos")
    assert (code, '{"$large":{"bytes":700000' in out) == (0, True)
    read = json_result(run("cat-record", "d", "videos", "--seq", 2, "--output", "out.bin", "--json"))
    assert (read["bytes"], read["xxh3"]) == (len(data), records[1]["data"]["$large"]["xxh3"])
    assert Path("out.bin").read_bytes() == data
    assert run("cat-record", "d", "videos", "--seq", 1)[1] == '"first"'
    assert "exists" in refused(run("cat-record", "d", "videos", "--seq", 2, "--output", "out.bin"))
    assert "no record 9" in refused(run("cat-record", "d", "videos", "--seq", 9))
    assert "cannot be written" in refused(run("cat-record", "d", "videos", "--seq", 2, "--output", "no/out.bin"))


def test_a_stream_that_cannot_be_written_is_refused(run: Run) -> None:
    Path("in.bin").write_bytes(bytes(2_000_000))
    fill(videos={"records": ["first"]})
    before = files()
    assert "max_record_bytes" in refused(run("write", "d", "videos", "--stream", "in.bin"))
    assert "cannot be read" in refused(run("write", "d", "videos", "--stream", "missing.bin"))
    assert "--json-lines" in refused(run("write", "d", "videos", "--stream", "in.bin", "--json-lines"))
    assert held("videos") == ["first"]
    assert not [name for name in files() if "blobs/" in name]
    assert before
    assert run("config", "d", "videos", "max_record_bytes=3000000")[1].startswith(
        "max_record_bytes: 1048576 -> 3000000"
    )
    assert run("write", "d", "videos", "--stream", "in.bin")[0] == 0
