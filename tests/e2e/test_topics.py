"""The commands of topics, as processes of their own, on real files."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.kit.commands import COMMAND, run_process, start_process

import tidelog

RECORDS = [b"record %d" % number for number in range(1, 301)]
LINES = b"\n".join([*RECORDS, b""])


def answer(cwd: Path, *words: object, stdin: bytes = b"") -> dict[str, Any]:
    done = run_process(cwd, *words, "--json", stdin=stdin)
    assert (done.returncode, done.stderr) == (0, b""), (words, done)
    fields = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(fields, dict)
    return fields


def start(cwd: Path, *words: object) -> subprocess.Popen[bytes]:
    return start_process(cwd, "topic", *words)


def held(path: Path, topic: str) -> list[Any]:
    with tidelog.open(str(path), read_only=True) as log:
        found = log.topic(topic, create=False).follow(timeout=0.0, on_gap="skip")
        return [record.data for record in found if isinstance(record, tidelog.Record)]


@pytest.mark.slow
def test_a_topic_lives_its_whole_life_on_the_command_line(tmp_path: Path) -> None:
    written = answer(tmp_path, "topic", "write", "d", "t", "--class", "fsync", "--batch", 25, "--tag", "a", stdin=LINES)
    assert (written["first"], written["last"], written["class"]) == (1, 300, "fsync")
    assert answer(tmp_path, "topic", "write", "d", "t", "--json-lines", "--tag", "b", stdin=b'{"n":1}\n')["last"] == 301
    assert [row["count"] for row in answer(tmp_path, "topic", "ls", "d")["topics"]] == [301]
    assert run_process(tmp_path, "topic", "read", "d", "t", "--limit", 300).stdout == LINES
    assert answer(tmp_path, "topic", "delete", "d", "t", "--match", "a", "--before", 51, "--dry-run")["deleted"] == 50
    assert answer(tmp_path, "topic", "delete", "d", "t", "--match", "a", "--before", 51)["left"] == 251
    assert answer(tmp_path, "topic", "config", "d", "t", "cap_records=100")["evicted"] == 151
    assert answer(tmp_path, "topic", "seal", "d", "t")["sealed"] == 1
    assert answer(tmp_path, "topic", "checkpoint", "d")["topics"] == 1
    shown = answer(tmp_path, "topic", "show", "d", "t")
    assert (shown["count"], shown["earliest_seq"], shown["evict_floor"]) == (100, 202, 202)
    end = answer(tmp_path, "topic", "read", "d", "t")
    assert (end["counts"]["rows"], end["counts"]["evicted"]) == (100, 201)
    checked = answer(tmp_path, "check", "d")
    assert (checked["ok"], checked["records"], checked["findings"]) == (True, 100, [])
    assert run_process(tmp_path, "topic", "drop", "d", "t").returncode == 2
    assert answer(tmp_path, "topic", "drop", "d", "t", "--yes")["records"] == 100
    assert answer(tmp_path, "topic", "ls", "d")["topics"] == []


def test_a_second_writer_is_refused_and_readers_are_welcome(tmp_path: Path) -> None:
    with start(tmp_path, "write", "d", "t", "--acks") as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        writer.stdin.write(b"first\n")
        writer.stdin.flush()
        assert writer.stdout.readline() == b"seq 1\n"
        done = run_process(tmp_path, "topic", "write", "d", "t", stdin=b"second\n")
        assert (done.returncode, done.stdout) == (2, b"")
        assert done.stderr.startswith(b"tidelog: d is being written by another process (pid %d); " % writer.pid)
        assert done.stderr.count(b"\n") == 1
        assert run_process(tmp_path, "topic", "read", "d", "t").stdout == b"first\n"
        assert run_process(tmp_path, "check", "d").returncode == 0
        writer.communicate(b"last")
    assert writer.returncode == 0
    assert held(tmp_path / "d", "t") == [b"first", b"last"]


@pytest.mark.parametrize("durability", ["fsync", "disk"])
def test_every_acked_line_survives_kill_9(durability: str, tmp_path: Path) -> None:
    """G1, G2, G9: and no acked seq is given to another record."""
    with start(tmp_path, "write", "d", "t", "--acks", "--json", "--class", durability, "--batch", 7) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        writer.stdin.write(LINES)  # and no end: it waits for more when it is killed
        writer.stdin.flush()
        acked = [json.loads(writer.stdout.readline())["last"] for _ in range(10)]
        writer.kill()
        acked += [json.loads(line)["last"] for line in writer.stdout if line.endswith(b"\n")]
    assert writer.returncode == -9
    assert acked[9] == 70
    checked = run_process(tmp_path, "check", "d")
    assert checked.returncode == 0, checked
    served = held(tmp_path / "d", "t")
    assert len(served) >= acked[-1]
    assert served == RECORDS[: len(served)]
    assert answer(tmp_path, "topic", "write", "d", "t", stdin=b"after\n")["first"] > acked[-1]
    assert held(tmp_path / "d", "t") == [*served, b"after"]


def test_follow_prints_what_a_writer_writes_and_ctrl_c_ends_it_quietly(tmp_path: Path) -> None:
    assert run_process(tmp_path, "topic", "write", "d", "t", stdin=b"before\n").returncode == 0
    with start(tmp_path, "follow", "d", "t", "--json") as follower:
        assert follower.stdout is not None
        assert follower.stderr is not None
        assert json.loads(follower.stdout.readline())["data"] == "before"
        with start(tmp_path, "write", "d", "t", "--acks") as writer:
            assert writer.stdin is not None
            assert writer.stdout is not None
            for number in range(2, 5):
                writer.stdin.write(b"line %d\n" % number)
                writer.stdin.flush()
                assert writer.stdout.readline() == b"seq %d\n" % number
                record = json.loads(follower.stdout.readline())
                assert (record["seq"], record["data"]) == (number, f"line {number}")
        follower.send_signal(signal.SIGINT)
        assert (follower.stdout.read(), follower.stderr.read()) == (b"", b"")
    assert follower.returncode == 0


def test_an_interrupt_of_a_write_exits_with_130_and_says_what_was_written(tmp_path: Path) -> None:
    with start(tmp_path, "write", "d", "t", "--acks") as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        assert writer.stderr is not None
        writer.stdin.write(b"first\nsecond\nhalf a li")
        writer.stdin.flush()
        assert writer.stdout.readline() == b"seqs 1 to 2\n"
        writer.send_signal(signal.SIGINT)
        said = writer.stderr.read()
    assert writer.returncode == 130
    assert said == b"tidelog: interrupted; wrote 2 records, seqs 1 to 2\n"
    assert held(tmp_path / "d", "t") == [b"first", b"second"]


@pytest.mark.parametrize("verb", ["read", "follow"])
def test_a_reader_ends_quietly_when_its_own_reader_has_enough(verb: str, tmp_path: Path) -> None:
    with tidelog.open(str(tmp_path / "d")) as log:
        for _ in range(10):
            log.topic("t").append([b"x" * 100] * 5000)
    command = shlex.join([*COMMAND, "topic", verb, str(tmp_path / "d"), "t"])
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command} | head -1"], capture_output=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"x" * 100 + b"\n", b"")


def test_check_exits_with_1_and_names_the_place_of_a_flipped_bit(tmp_path: Path) -> None:
    assert run_process(tmp_path, "topic", "write", "d", "t", "--batch", 25, stdin=LINES).returncode == 0
    (file,) = (tmp_path / "d" / "topics").rglob("*.data")
    data = bytearray(file.read_bytes())
    at = data.index(b"record 60")
    data[at] ^= 1
    file.write_bytes(data)
    done = run_process(tmp_path, "check", "d")
    assert done.returncode == 1
    first, _, _ = done.stdout.decode().partition("\n")
    name = file.relative_to(tmp_path / "d").as_posix()
    assert first.startswith(f"d: damage in {name} at byte ")
    assert first.endswith(", seqs 51 to 75 of t: checksum mismatch")
    assert run_process(tmp_path, "topic", "read", "d", "t").returncode == 1
    assert run_process(tmp_path, "topic", "read", "d", "t", "--from", 75).returncode == 0, "the rest is served"
