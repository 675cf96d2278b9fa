"""The installed command, as a process of its own, on real files."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.kit import processes
from tests.kit.commands import COMMAND, ENVIRONMENT, run_process, start_process

import tidelog
from tidelog.commitlog import SegmentedLog
from tidelog.commitlog.codecs import CODEC_NAMES

ROOT = Path(__file__).resolve().parents[2]
RECORDS = [b"k%d=%d" % (number % 7, number) for number in range(300)]
LINES = b"\n".join([*RECORDS, b""])


def run(cwd: Path, *words: object, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return run_process(cwd, "log", *words, stdin=stdin)


def good(cwd: Path, *words: object, stdin: bytes = b"") -> bytes:
    """What a command that must succeed, without a word on standard error, prints."""
    done = run(cwd, *words, stdin=stdin)
    assert (done.returncode, done.stderr) == (0, b""), (words, done)
    return done.stdout


def answer(cwd: Path, *words: object, stdin: bytes = b"") -> dict[str, Any]:
    fields = json.loads(good(cwd, *words, "--json", stdin=stdin))
    assert isinstance(fields, dict)
    return fields


def has(fields: Mapping[str, Any], **expected: object) -> None:
    assert {name: fields[name] for name in expected} == expected


def files(path: Path) -> dict[str, bytes]:
    """Every file of a log; the lock says who wrote last and is no part of it."""
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != ".tidelog.lock"}


def held(path: Path) -> list[bytes]:
    with SegmentedLog.open(str(path), read_only=True) as log:
        return [record.data for record in log]


def start(cwd: Path, *words: object) -> subprocess.Popen[bytes]:
    return start_process(cwd, "log", *words)


# ── every command on every codec ──────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.parametrize(
    "codec", [pytest.param(name, marks=() if name == "tide" else pytest.mark.sweep) for name in CODEC_NAMES]
)
def test_a_log_lives_its_whole_life_on_the_command_line(codec: str, tmp_path: Path) -> None:
    first = 0 if codec in ("rustlog", "laminar") else 1
    end = first + len(RECORDS)

    words = ("append", "log", "--codec", codec, "--sync", "batch", "--segment-bytes", "2k", "--batch", 25)
    has(answer(tmp_path, *words, stdin=LINES), first=first, last=end - 1, records=300, next_seq=end)
    assert good(tmp_path, "append", "log", "--stream", stdin=b"one\nrecord") == f"wrote 1 record, seq {end}\n".encode()

    assert good(tmp_path, "cat", "log") == LINES + b"one\nrecord\n"
    records = [json.loads(line) for line in good(tmp_path, "cat", "log", "--json").splitlines()]
    assert [record["seq"] for record in records] == list(range(first, end + 1))
    assert [record["data"].encode() for record in records] == [*RECORDS, b"one\nrecord"]
    assert all((record["ts"] is None) == (codec == "laminar") for record in records)

    fields = answer(tmp_path, "inspect", "log")
    has(fields, codec=codec, lowest=first, highest=end + 1, seqs=301)
    assert len(fields["segments"]) > 1
    has(answer(tmp_path, "verify", "log", "--codec", codec), ok=True, records=301, damage=[], notes=[])

    has(answer(tmp_path, "truncate", "log", "--to", end), forgotten=1, next_seq=end)
    has(answer(tmp_path, "restore", "log", "copy", "--to-offset", first + 199), highest=first + 200, left_out=100)
    assert held(tmp_path / "copy") == RECORDS[:200]
    has(answer(tmp_path, "convert", "copy", "other", "--to", "narwhal", "--renumber"), lowest=1, highest=201)
    assert held(tmp_path / "other") == RECORDS[:200]

    has(answer(tmp_path, "seal", "log"), sealed=True, last=end - 1)
    has(answer(tmp_path, "compact", "log", "--key", "prefix:="), dropped=293, kept=7, unsealed=0)
    assert sorted(held(tmp_path / "log")) == sorted(RECORDS[-7:])
    assert good(tmp_path, "append", "log", stdin=b"after\n") == f"wrote 1 record, seq {end}\n".encode()
    retained = answer(tmp_path, "retain", "log", "--keep-bytes", 0, "--high-watermark", end + 1)
    assert retained["lowest"] == end
    has(answer(tmp_path, "repair", "log"), ok=True, clean=True, codec=codec)
    assert held(tmp_path / "log") == [b"after"]


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_verify_exits_with_1_and_names_the_place_of_a_flipped_bit(codec: str, tmp_path: Path) -> None:
    with SegmentedLog.open(str(tmp_path / "log"), codec, segment_bytes_max=2000) as log:
        for at in range(0, 300, 25):
            log.append_many(RECORDS[at : at + 25])
        base, stop = log.segments[0].start, log.segments[0].stop
    (file,) = (
        file
        for file in (tmp_path / "log").iterdir()
        if file.suffix in (".data", ".log", ".store") and int(re.sub(r"\D", "", file.stem)) == base
    )
    data = bytearray(file.read_bytes())
    at = data.index(b"k3=")
    data[at] ^= 1
    file.write_bytes(data)
    done = run(tmp_path, "verify", "log")
    assert (done.returncode, done.stderr) == (1, b"")
    said = re.match(rf"log: damage in {file.name} at byte (\d+), seqs? (\d+)(?: to (\d+))?: ", done.stdout.decode())
    assert said is not None, done.stdout
    assert int(said[1]) <= at < int(said[1]) + 1000
    assert base <= int(said[2]) <= int(said[3] or said[2]) < stop


# ── exit codes and bad input ──────────────────────────────────────────────────────────────────────


def test_the_command_is_installed_under_its_name() -> None:
    done = subprocess.run(
        [Path(sys.executable).parent / "tidelog", "--version"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, f"tidelog {tidelog.__version__}\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["cat", "log", "--codec", "papyrus"], "invalid choice: 'papyrus'"),
        (["cat", "log", "--from", "-1"], "-1 is negative"),
        (["cat", "log", "--from", "4"], "it holds [0, 3)"),
        (["inspect", "nowhere"], "there is no log at nowhere"),
        (["repair", "nowhere"], "there is no log at nowhere"),
        (["truncate", "log", "--to", "3"], "it holds [0, 3)"),
        (["append", "log", "--tag", "t"], "the rustlog layout cannot store a tag"),
        (["append", "log", "--expect", "2"], "the next one is 3"),
    ],
)
def test_bad_input_exits_with_2_says_why_and_changes_nothing(words: list[str], said: str, tmp_path: Path) -> None:
    with SegmentedLog.open(str(tmp_path / "log"), "rustlog") as log:
        log.append_many([b"a", b"b", b"c"])
    before = files(tmp_path / "log")
    done = run(tmp_path, *words, stdin=b"x\n")
    assert (done.returncode, done.stdout) == (2, b"")
    assert said in done.stderr.decode()
    assert files(tmp_path / "log") == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["log"]


def test_a_second_writer_is_refused_with_2_and_changes_nothing(tmp_path: Path) -> None:
    with start(tmp_path, "append", "log", "--acks") as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        writer.stdin.write(b"first\n")
        writer.stdin.flush()
        assert writer.stdout.readline() == b"seq 1\n"
        before = files(tmp_path / "log")
        done = run(tmp_path, "append", "log", "--json", stdin=b"second\n")
        assert (done.returncode, done.stdout) == (2, b"")
        error = json.loads(done.stderr)
        has(error, error="locked", written=False)
        assert "another process" in error["message"]
        assert files(tmp_path / "log") == before
        assert good(tmp_path, "cat", "log") == b"first\n", "readers are welcome"
        writer.communicate(b"last")
    assert writer.returncode == 0
    assert held(tmp_path / "log") == [b"first", b"last"]


# ── ends that come early ──────────────────────────────────────────────────────────────────────────


def large(path: Path) -> str:
    with SegmentedLog.open(str(path), sync="interval") as log:
        log.append_many([b"record %06d" % number for number in range(50_000)])
    return str(path)


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_cat_ends_quietly_when_its_reader_has_enough(options: list[str], tmp_path: Path) -> None:
    command = shlex.join([*COMMAND, "log", "cat", large(tmp_path / "log"), *options])
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command} | head -1"], capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"record 000000" in done.stdout
    assert len(done.stdout.splitlines()) == 1


def test_an_output_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    path = large(tmp_path / "log")
    for limit in (1, 50_000):  # less than a buffer, and more
        with open("/dev/full", "wb") as full:
            command = [*COMMAND, "log", "cat", path, "--limit", str(limit)]
            done = subprocess.run(command, env=ENVIRONMENT, stdout=full, stderr=subprocess.PIPE, timeout=120)
        assert (done.returncode, done.stderr) == (2, b"tidelog: [Errno 28] No space left on device\n")


def test_command_with_a_closed_pipe_keeps_its_exit_code(tmp_path: Path) -> None:
    with start(tmp_path, "cat", "nowhere") as lonely:
        assert lonely.stdout is not None
        assert lonely.stderr is not None
        lonely.stdout.close()
        lonely.stderr.close()
    assert lonely.returncode == 2


def test_append_with_unread_acks_stops_and_reports_what_it_wrote(tmp_path: Path) -> None:
    with start(tmp_path, "append", "log", "--acks", "--sync", "interval", "--batch", 1) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        assert writer.stderr is not None
        writer.stdin.write(b"first\n")
        writer.stdin.flush()
        assert writer.stdout.readline() == b"seq 1\n"
        writer.stdout.close()
        writer.stdin.write(b"second\nthird\n")
        writer.stdin.flush()
        said = writer.stderr.read()
    assert writer.returncode == 141
    assert said == b"tidelog: the output was closed by its reader; wrote 2 records, seqs 1 to 2\n"
    assert held(tmp_path / "log") == [b"first", b"second"]


def test_an_interrupt_exits_with_130_and_says_what_was_written(tmp_path: Path) -> None:
    with start(tmp_path, "append", "log", "--acks") as writer:
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
    assert held(tmp_path / "log") == [b"first", b"second"]


@pytest.mark.parametrize("sync", ["each", "batch", "interval"])
def test_every_acked_line_survives_kill_9(sync: str, tmp_path: Path) -> None:
    with start(tmp_path, "append", "log", "--acks", "--json", "--sync", sync, "--batch", 7) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        writer.stdin.write(LINES)  # and no end: it waits for more when it is killed
        writer.stdin.flush()
        acked = [json.loads(writer.stdout.readline())["last"] for _ in range(10)]
        writer.kill()
        acked += [json.loads(line)["last"] for line in writer.stdout if line.endswith(b"\n")]
    assert writer.returncode == -9
    assert acked[9] == 70
    done = run(tmp_path, "repair", "log", "--json")
    assert done.returncode == 0, done
    served = held(tmp_path / "log")
    assert len(served) >= acked[-1]
    assert served == RECORDS[: len(served)]


# ── the guided tour ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.parametrize(
    ("events", "java"),
    [(5_000, "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"), pytest.param(20_000, "", marks=pytest.mark.sweep)],
    ids=["a few orders", "many orders"],
)
def test_the_tour_keeps_its_word_and_its_commands_work(tmp_path: Path, events: int, java: str) -> None:
    """A few orders do not need Java's second compiler, which took a third of the time."""
    (tmp_path / "demo-data").mkdir()
    (tmp_path / "demo-data" / ".tidelog-demo").touch()
    (tmp_path / "demo-data" / "left by an earlier tour").touch()
    command = [sys.executable, "-m", "examples.demo", "--events", str(events)]
    environment = ENVIRONMENT | {"PYTHONPATH": str(ROOT), "JDK_JAVA_OPTIONS": java}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert "left out" not in done.stdout
    assert f"table = log: {events:,} rows" in done.stdout
    assert not (tmp_path / "demo-data" / "left by an earlier tour").exists()
    assert "All of it held" in done.stdout
    assert done.stdout.count("[ok]") >= 36
    codes = {}
    for line in re.findall(r"^  \$ tidelog (.*)$", done.stdout, re.MULTILINE):
        words = shlex.split(line)
        again = processes.run([*COMMAND, *words], cwd=tmp_path, env=environment, capture_output=True, timeout=120)
        codes[" ".join(words[: 1 if words[0] == "check" else 2])] = again.returncode
    assert codes.pop("log verify") == 1, "it finds the bit that the tour flipped"
    assert codes == dict.fromkeys(
        [
            *(
                "log cat",
                "log convert",
                "log --help",
                "topic ls",
                "topic read",
                "topic delete",
                "topic --help",
                "check",
            ),
            *("queue history", "pipeline reconcile"),
        ],
        0,
    )


def test_the_tour_leaves_a_directory_alone_that_it_did_not_make(tmp_path: Path) -> None:
    (tmp_path / "letter").write_bytes(b"dear")
    done = subprocess.run(
        [sys.executable, "-m", "examples.demo", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "nothing was removed" in done.stderr
    assert (tmp_path / "letter").read_bytes() == b"dear"
