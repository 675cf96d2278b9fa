"""A server under mixed load that is killed, runs out of disk space and has its clock moved.

    writers of every class · a topic with a TTL · queue workers · a channel · SSE, WebSocket and long-poll readers ·
    a Spark export
    every few seconds: kill -9, a restart, a full disk, kill -9 on a full disk, a jump of the clock

Every client records what was acked to it. At the end each of them checks all of it, and the run prints a report with
every kind of disturbance and what it caused. Where a check failed, the exit code is 1 and the data directory and the
server's log are copied to a directory that the report names. The report also says what this machine cannot do: full
disks without root, clock jumps without libfaketime.

    python -m tests.soak.soak --minutes 30 --report soak.md
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any, Final

from tests.contract_http.api import topic_path
from tests.contract_http.random_readers import CONFIGS, CONNECTION_ERRORS, Interrupted, ReaderScenario, expect_status
from tests.contract_http.server import Server

from tidelog.client import Client, RemoteChannel, RemoteQueue
from tidelog.errors import DiskFull, InDoubt, Unavailable

DISK_MIB: Final = 1_536
EVERY_S: Final = 6.0  # between two disturbances
FULL_S: Final = 3.0  # a disk stays full at least so long
REFUSED_S: Final = 60.0  # until a write is refused
RESUME_S: Final = 60.0
FAKETIME: Final = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1"
JUMPS: Final = ("+3600", "-3600", "+86400", "-60", "+0")
JUMP_SEEN_S: Final = 30.0  # the library reads its file once a second
JUMP_ERROR_MS: Final = 20_000  # smaller than the smallest jump
KEPT_RECORDS: Final = {
    name: config for name, config in CONFIGS.items() if config["durability"] != "memory"
}  # over a kill
EXPORTED, QUEUE, CHANNEL, USER = "exported", "jobs", "!soak@example.org", "ann@example.org"
AGING, AGING_TTL_MS, CLOCK, FILLER = "aging", 7_200_000, "clock", "filler"
FILLER_BYTES: Final = 500_000
CHANNEL_KEEPS: Final = 1_000  # messages: the default of a channel
RETRIED: Final = (*CONNECTION_ERRORS, Interrupted, Unavailable, InDoubt)  # any other error of the server is a failure
FULL: Final = "requests refused because the disk was full"
_FULL_CHECKPOINT: Final = re.compile(
    r"^\S+ \S+ ERROR \S+ checkpoint failed .*\nTraceback .*\n(?: .*\n)*OSError: \[Errno 28\] .*\n", re.MULTILINE
)


class SoakServer(Server):
    """A server whose disk may be full: a checkpoint that fails for that is logged with its traceback, and expected."""

    @property
    def log(self) -> str:
        return _FULL_CHECKPOINT.sub("", super().log)


class Soak:
    """One run."""

    def __init__(self, folder: Path, minutes: float, seed: int, *, spark: bool) -> None:
        self.folder, self.seconds, self.seed, self.spark = folder, minutes * 60, seed, spark
        self.random = Random(seed)
        self.notes: list[str] = []  # what this machine cannot do
        self.events: list[str] = []  # every disturbance with its second
        self.over = threading.Event()
        self.disk = folder / "disk"
        self.clock = folder / "clock.txt"
        self.has_disk = self.has_clock = False
        self.jumps = 0  # of the clock, seen by the server
        self.stops = 0  # of the server, by whatever means
        self.clients: list[SoakClient] = []
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._began = time.monotonic()

    def count(self, what: str, number: int = 1) -> None:
        with self._lock:
            self._counts[what] += number

    def highest(self, what: str, number: int) -> None:
        with self._lock:
            self._counts[what] = max(self._counts[what], number)

    def run(self) -> dict[str, Any]:
        """Run, check everything, and return the report. A check that failed is in it under `failure`."""
        failure: str | None = None
        evidence: Path | None = None
        with self._small_disk():
            port_file = str(self.folder / "port.txt")
            server = SoakServer(
                self.folder,
                "--data",
                str(self.disk / "data"),
                "--port",
                "0",
                "--port-file",
                port_file,
                hook="soak_hook:accept",
            )
            # Memberships of a channel persist where a hook says who users are.
            (self.folder / "soak_hook.py").write_text("def accept(asked):\n    return True\n")
            server.environment["PYTHONPATH"] += f":{self.folder}"
            self._fake_clock(server)
            try:
                with server.start():
                    self._load(server)
                    server.stop()
                self._check_directory()
            except Exception as error:
                failure = "".join(traceback.format_exception(error))
                evidence = self._keep_evidence()
        return {
            "seed": self.seed,
            "minutes": round((time.monotonic() - self._began) / 60, 1),
            "counts": dict(sorted(self._counts.items())),
            "left out": self.notes,
            "disturbances": self.events,
            "failure": failure,
            "evidence": str(evidence) if evidence else None,
        }

    def _load(self, server: Server) -> None:
        world = ReaderScenario(server, self.seed, KEPT_RECORDS)
        self.clients = [
            QueueClient(self, world),
            ChannelClient(self, world),
            VolatileClient(self, world, "memory"),
            VolatileClient(self, world, "ephemeral"),
            AgingClient(self, world),
            ExportClient(self, world),
        ]
        with server.client() as api:
            api.create_topic(FILLER, durability="disk", cap_records=10)
        for client in self.clients:
            client.set_up()
        threads = [threading.Thread(target=world._guarded, args=(client.run,)) for client in self.clients]
        for thread in threads:
            thread.start()
        try:
            world.run(self.seconds, self._disturbances(server, world))
        finally:
            self.over.set()
            for thread in threads:
                thread.join(300)
            for what, count in world.counts.items():
                self.count(what, count)
            self.count(FULL, world.refused[507])
            acked = sum(len(life.written) for lives in world.lives.values() for life in lives)
            self.count("records acked to writers of the classes disk and fsync", acked)
        assert not any(thread.is_alive() for thread in threads), "a client hangs"
        if world.errors:
            raise AssertionError(f"seed {self.seed}: {world.errors[0]!r}") from world.errors[0]
        for client in self.clients:
            client.check()

    def _keep_evidence(self) -> Path:
        """A copy of what failed, beside the reach of the clean-up."""
        kept = Path(tempfile.mkdtemp(prefix="tidelog-soak-failed-"))
        with suppress(OSError, shutil.Error):
            shutil.copytree(self.disk / "data", kept / "data")
        with suppress(OSError):
            shutil.copy(self.folder / "log.txt", kept / "log.txt")
        return kept

    # ── disturbances ──────────────────────────────────────────────────────────────────────────

    def _disturbances(self, server: Server, world: ReaderScenario) -> list[Callable[[], object]]:
        kinds: list[tuple[str, Callable[[], object]]] = [
            ("kills", lambda: self._kill(server)),
            ("kills", lambda: self._kill(server)),
            ("restarts", lambda: self._restart(server)),
        ]
        if self.has_disk:
            kinds.append(("full disks", lambda: self._fill_disk(world)))
            kinds.append(("kills on a full disk", lambda: self._kill_on_a_full_disk(server, world)))
        if self.has_clock:
            kinds.append(("clock jumps", lambda: self._jump_clock(server)))

        def counted(kind: str, act: Callable[[], object]) -> Callable[[], object]:
            def run() -> None:
                self.events.append(f"{time.monotonic() - self._began:.1f} s: {kind}")
                act()
                self.count(kind)
                self.highest("most memory of the server, MiB", server.resident_bytes >> 20)

            return run

        many = max(int(self.seconds / EVERY_S), len(kinds))
        drawn = [*kinds, *(self.random.choice(kinds) for _ in range(many - len(kinds)))]
        self.random.shuffle(drawn)
        return [counted(*kind) for kind in drawn]

    def _restart(self, server: Server) -> None:
        self.stops += 1
        server.restart()
        self.stops += 1

    def _kill(self, server: Server) -> None:
        self.stops += 1
        server.kill()
        began = time.monotonic()
        server.start()
        self.stops += 1
        self.highest("longest start after a kill, ms", int((time.monotonic() - began) * 1_000))

    @contextmanager
    def _small_disk(self) -> Iterator[None]:
        """A file system of its own for the data, which can run full without harm to the machine."""
        self.disk.mkdir(parents=True)
        options = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(self.disk)]
        self.has_disk = os.geteuid() == 0 and subprocess.run(options, check=False, capture_output=True).returncode == 0
        if not self.has_disk:
            self.notes.append("no full disks: mounting a small file system needs root")
        try:
            yield
        finally:
            if self.has_disk:
                subprocess.run(["umount", "--lazy", str(self.disk)], check=False)

    @contextmanager
    def _filled_disk(self, world: ReaderScenario) -> Iterator[None]:
        """All the space of the disk is taken, until a write is refused."""
        ballast = self.disk / "ballast"
        try:
            with ballast.open("wb", buffering=0) as file:
                piece = bytes(1 << 20)
                while len(piece):  # to the last byte
                    try:
                        piece = piece[: file.write(piece)]
                    except OSError:
                        piece = piece[: len(piece) // 2]
            self._fill_wal(world)
            world.failed.wait(FULL_S)
            yield
        finally:
            ballast.unlink()

    def _fill_wal(self, world: ReaderScenario) -> None:
        """Write until a write is refused: WAL files were reserved while there was space."""
        deadline = time.monotonic() + REFUSED_S
        with world.server.client() as api:
            while not world.failed.is_set():
                assert time.monotonic() < deadline, "the disk is full and every write is taken"
                reply = api.try_write(FILLER, {"data": "x" * FILLER_BYTES})
                if reply.status != 200:
                    assert reply.status == 507, (reply.status, reply.body[:300])
                    self.count(FULL)
                    return

    def _fill_disk(self, world: ReaderScenario) -> None:
        """Fill the disk for a while. Afterwards every client is served again without a restart."""
        with self._filled_disk(world):
            pass
        self._await_progress(world)

    def _kill_on_a_full_disk(self, server: Server, world: ReaderScenario) -> None:
        with self._filled_disk(world):
            self.stops += 1
            server.kill()
        server.start()
        self.stops += 1
        self._await_progress(world)

    def _await_progress(self, world: ReaderScenario) -> None:
        """Every topic takes a write again, and every other client does what it does."""
        deadline = time.monotonic() + RESUME_S
        heads = {name: lives[-1].head for name, lives in world.lives.items()}
        done = {client: client.done for client in self.clients}
        while not world.failed.is_set():
            waiting = [name for name, head in heads.items() if world.lives[name][-1].head in (0, head)]
            waiting += [client.name for client, steps in done.items() if client.done == steps]
            if not waiting:
                return
            assert time.monotonic() < deadline, f"{waiting} are not served although the disk has space again"
            self.over.wait(0.05)

    def _fake_clock(self, server: Server) -> None:
        self.has_clock = os.path.exists(FAKETIME)
        if not self.has_clock:
            self.notes.append("no clock jumps: the library libfaketime is not installed")
            return
        self.clock.write_text("+0")
        server.environment |= {
            "LD_PRELOAD": FAKETIME,
            "FAKETIME_TIMESTAMP_FILE": str(self.clock),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            # The library replaces timed waits where it assumes that glibc needs it, and time-outs come late. The
            # interpreter passes its lock between threads with such waits: a start of 0.1 s took 7.1 s, and 65 s on a
            # busy machine.
            "FAKETIME_FORCE_MONOTONIC_FIX": "0",
        }

    def _jump_clock(self, server: Server) -> None:
        """Move the server's clock, and wait until its records show it."""
        jump = self.random.choice([jump for jump in JUMPS if jump != self.clock.read_text()])
        self.clock.write_text(jump)
        self.events[-1] += f" {jump} s"
        deadline = time.monotonic() + JUMP_SEEN_S
        while abs(self._server_ms(server) - time.time_ns() // 1_000_000 - int(jump) * 1_000) > JUMP_ERROR_MS:
            assert time.monotonic() < deadline, "the server does not see that its clock was moved"
            self.over.wait(0.1)
        self.jumps += 1

    def _server_ms(self, server: Server) -> int:
        """The time of the server. Stamps of a topic never go back, so each look needs a new one."""
        with server.client() as api:
            expect_status(api.delete(topic_path(CLOCK)), 200, 404)
            expect_status(api.put(topic_path(CLOCK), {"durability": "memory"}), 201)
            expect_status(api.try_write(CLOCK, {"data": 0}), 200)
            stamp: int = expect_status(api.post(topic_path(CLOCK, "/diff"), {}), 200)["records"][0]["$ts"]
            return stamp

    def _check_directory(self) -> None:
        command = [sys.executable, "-m", "tidelog.cli.main", "check", str(self.disk / "data"), "--json"]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.returncode == 0, f"seed {self.seed}: check: {done.stdout[-2000:]}{done.stderr[-2000:]}"


class SoakClient:
    """A client with acks of its own. `run` goes on until the soak is over, `check` compares."""

    def __init__(self, soak: Soak, world: ReaderScenario) -> None:
        self.soak, self.world = soak, world
        self.name = type(self).__name__
        self.random = Random(f"{soak.seed}/{self.name}")
        self.done = 0  # requests that succeeded

    @property
    def url(self) -> str:
        host, port = self.world.server.address
        return f"http://{host}:{port}"

    def set_up(self) -> None:
        """Before any disturbance."""

    def run(self) -> None:
        while not self.soak.over.is_set() and not self.world.failed.is_set():
            try:
                self.step()
            except RETRIED as error:
                is_full = isinstance(error, DiskFull) or (isinstance(error, Interrupted) and error.status == 507)
                self.soak.count(FULL if is_full else "requests that were cut off or refused")
                self.soak.over.wait(0.05)

    def step(self) -> None:
        """One thing."""

    def check(self) -> None:
        """After the load, on the running server."""


class QueueClient(SoakClient):
    """Puts jobs, claims, nacks and acks them. Every job is done at least once and does not return after its ack."""

    def set_up(self) -> None:
        self.number = 0
        self.put: set[int] = set()
        self.acking: set[int] = set()
        self.acked: set[int] = set()
        with self.world.server.client() as api:
            api.create_topic(QUEUE, type="queue", durability="fsync", lease_ms=1_000, max_deliveries=0)

    def step(self) -> None:
        with Client(self.url) as client:
            queue = RemoteQueue(client, QUEUE)
            for _ in range(20):
                self.number += 1
                queue.put([self.number])
                self.put.add(self.number)
                self._work(queue)
                self.done += 1
                if self.soak.over.wait(0.01):
                    return

    def _work(self, queue: RemoteQueue) -> None:
        jobs = queue.claim("soak", 4)
        back = [job.data for job in jobs if job.data in self.acked]
        assert not back, f"jobs {back} were acked and came back"
        unknown = [job.data for job in jobs if job.data > self.number]
        assert not unknown, f"jobs {unknown} were never put"
        if jobs and self.random.random() < 0.1:
            queue.nack("soak", jobs)
            self.soak.count("jobs nacked", len(jobs))
        elif jobs:
            numbers = {job.data for job in jobs}
            self.acking |= numbers
            done = queue.ack("soak", jobs)
            if done.count == len(jobs):  # fewer: a lease ran out, or the request was repeated
                self.acked |= numbers
            self.soak.count("jobs acked", done.count)

    def check(self) -> None:
        with Client(self.url) as client:
            queue = RemoteQueue(client, QUEUE)
            deadline = time.monotonic() + RESUME_S
            while self.put - self.acking:
                self._work(queue)
                assert time.monotonic() < deadline, f"jobs {sorted(self.put - self.acking)[:10]} are lost"


class ChannelClient(SoakClient):
    """Publishes messages to a channel that keeps them."""

    def set_up(self) -> None:
        self.number = 0
        self.sent: dict[int, int] = {}  # seq → number
        with Client(self.url) as client:
            RemoteChannel(client, CHANNEL, USER).join(persist=True)

    def step(self) -> None:
        with Client(self.url) as client:
            channel = RemoteChannel(client, CHANNEL, USER)
            for _ in range(20):
                self.number += 1
                seq = channel.publish(b"%d" % self.number).seq
                assert seq not in self.sent, f"message {self.number} got seq {seq}, which {self.sent[seq]} has"
                self.sent[seq] = self.number
                self.soak.count("messages published")
                self.done += 1
                if self.soak.over.wait(0.02):
                    return

    def check(self) -> None:
        found: dict[int, int] = {}
        with Client(self.url) as client:
            channel, at = RemoteChannel(client, CHANNEL, USER), 1
            while True:
                messages, after, _, last = channel.history(at)
                found.update((message.seq, int(message.payload)) for message in messages)
                if not messages or after > last:
                    break
                assert after > at, f"a page of the history from {at} on is followed by {after}"
                at = after
        oldest = min(found, default=last + 1)
        assert oldest <= max(1, last - CHANNEL_KEEPS + 1), f"messages before {oldest} of {last} are lost"
        kept = {seq: number for seq, number in self.sent.items() if seq >= oldest}
        assert kept.items() <= found.items(), "messages are lost or changed"
        assert list(found.values()) == sorted(set(found.values())), "messages out of order, or twice"


class VolatileClient(SoakClient):
    """Writes to a topic that a kill may take, and reads back each write at once."""

    def __init__(self, soak: Soak, world: ReaderScenario, durability: str) -> None:
        super().__init__(soak, world)
        self.name = durability

    def set_up(self) -> None:
        with self.world.server.client() as api:
            api.create_topic(self.name, durability=self.name, cap_records=1_000)

    def step(self) -> None:
        with self.world.server.client() as api:
            number = self.random.randrange(1 << 30)
            done = expect_status(api.try_write(self.name, {"data": number}), 200)
            found = expect_status(api.post(topic_path(self.name, "/diff"), {"from_seq": done["first_seq"] - 1}), 200)
            assert found["records"], f"{self.name}: a record that was just written is not there"
            assert found["records"][0]["data"] == number
            self.soak.count(f"records of class {self.name} read back")
            self.done += 1
        self.soak.over.wait(0.02)


class AgingClient(SoakClient):
    """Writes to a topic with a TTL. A jump of the clock may expire records; without one, all of them stay."""

    def set_up(self) -> None:
        self.number = 0
        self.acked: dict[int, tuple[int, int]] = {}  # seq → number, and how many jumps there were before
        with self.world.server.client() as api:
            api.create_topic(AGING, durability="fsync", ttl_ms=AGING_TTL_MS)

    def step(self) -> None:
        with self.world.server.client() as api:
            self.number += 1
            jumps = self.soak.jumps
            seq = expect_status(api.try_write(AGING, {"data": self.number}), 200)["first_seq"]
            assert seq > max(self.acked, default=0), f"seq {seq} was given before"
            self.acked[seq] = (self.number, jumps)
            self.soak.count("records with a TTL acked")
            self.done += 1
        self.soak.over.wait(0.05)

    def check(self) -> None:
        found: dict[int, int] = {}
        at = 0
        with self.world.server.client() as api:
            head = api.state(AGING)["head_seq"]
            while at < head:
                page = api.diff(AGING, from_seq=at, limit=1_000)
                found.update((record["$seq"], record["data"]) for record in page["records"])
                at = page["next_from_seq"]
        assert list(found.values()) == sorted(set(found.values())), "records out of order, or twice"
        acked = {seq: number for seq, (number, _) in self.acked.items()}
        changed = {seq for seq in found.keys() & acked.keys() if found[seq] != acked[seq]}
        assert not changed, f"records {sorted(changed)[:10]} are changed"
        young = {seq for seq, (_, jumps) in self.acked.items() if jumps == self.soak.jumps}
        assert young <= found.keys(), f"records {sorted(young - found.keys())[:10]} are lost before their time"


class ExportClient(SoakClient):
    """Appends to a topic that Spark exports into a table, over and over. At the end the table equals the topic."""

    def set_up(self) -> None:
        self.number = 0
        self.table = self.soak.folder / "table"
        self.acked: dict[int, int] = {}  # seq → number
        with self.world.server.client() as api:
            api.create_topic(EXPORTED, durability="fsync")
        if not self.soak.spark:
            self.soak.notes.append("no Spark export: --no-spark")
        self.exporting = threading.Thread(target=self.world._guarded, args=(self._export_loop,))
        if self.soak.spark:
            self.exporting.start()

    def step(self) -> None:
        with self.world.server.client() as api:
            for _ in range(20):
                first = self.number + 1
                self.number += 10
                records = [{"data": number} for number in range(first, first + 10)]
                seq = expect_status(api.try_write(EXPORTED, *records), 200)["first_seq"]
                self.acked.update((seq + at, first + at) for at in range(10))
                self.done += 1
                if self.soak.over.wait(0.05):
                    return

    def _tidelog(self, *args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tidelog.cli.main", "pipeline", *args, "--master", "local[1]", "--json"]
        return subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)

    def _export_loop(self) -> None:
        while not self.soak.over.is_set() and not self.world.failed.is_set():
            stops = self.soak.stops  # odd while the server is down
            done = self._tidelog("export", self.url, EXPORTED, str(self.table), "--once", "--format", "delta")
            if done.returncode == 0:
                self.soak.count("exports")
            else:
                assert stops % 2 or self.soak.stops > stops, (
                    f"an export failed on a running server: {done.stdout}{done.stderr}"
                )
                self.soak.count("exports that a stop of the server cut off")
            self.soak.over.wait(1)

    def check(self) -> None:
        if not self.soak.spark:
            return
        self.exporting.join(600)
        done = self._tidelog("export", self.url, EXPORTED, str(self.table), "--once", "--format", "delta")
        assert done.returncode == 0, f"export: {done.stdout}{done.stderr}"
        done = self._tidelog("reconcile", self.url, EXPORTED, str(self.table))
        assert done.returncode == 0, f"reconcile: {done.stdout}{done.stderr}"
        from deltalake import DeltaTable

        rows = DeltaTable(str(self.table)).to_pyarrow_table(columns=["seq", "data"]).to_pydict()
        found = {seq: int(data) for seq, data in zip(rows["seq"], rows["data"], strict=True)}
        assert len(found) == len(rows["seq"]), "the table has rows twice"
        assert len(set(found.values())) == len(found), "the table has records twice"
        missing = self.acked.items() - found.items()
        assert not missing, f"records {sorted(missing)[:10]} were acked and are not in the table"
        self.soak.count("rows exported", len(found))


def format_report(report: dict[str, Any]) -> str:
    """The report as a page."""
    result = "Nothing acked was lost, changed or doubled."
    if report["failure"]:
        last = "\n".join(report["disturbances"][-10:])
        result = f"FAILED\n\n```\n{report['failure']}\n```\n\nThe last disturbances:\n\n```\n{last}\n```"
    if report["evidence"]:
        result += f"\n\nThe data directory and the server's log: {report['evidence']}"
    rows = "\n".join(f"| {what} | {count:,} |" for what, count in report["counts"].items())
    left = "".join(f"\n- {note}" for note in report["left out"])
    return (
        f"# Soak: {report['minutes']} minutes, seed {report['seed']}\n\n{result}\n\n"
        f"| what | count |\n|---|---:|\n{rows}\n" + (f"\nLeft out:\n{left}\n" if left else "")
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=time.time_ns() % (1 << 32))
    parser.add_argument("--no-spark", dest="spark", action="store_false", help="without the Spark export")
    parser.add_argument("--report", type=Path, help="also write the report here")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    args = parser.parse_args()
    print(f"soak: {args.minutes} minutes, seed {args.seed}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="tidelog-soak-", ignore_cleanup_errors=True) as folder:
        report = Soak(Path(folder), args.minutes, args.seed, spark=args.spark).run()
    page = json.dumps(report, indent=2) if args.json else format_report(report)
    print(page)
    if args.report:
        args.report.write_text(page)
    return 1 if report["failure"] else 0


if __name__ == "__main__":
    sys.exit(main())
