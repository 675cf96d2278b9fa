"""A server under mixed load that is killed, runs out of disk space and has its clock moved, for as long as one likes.

    writers of every class · queue workers · a channel · SSE, WebSocket and long-poll readers · a Spark export
    every few seconds: kill -9, a restart, a full disk, a jump of the clock

Every client knows what was acked to it. At the end each of them checks all of it, and the run prints a report. The
report says what this machine cannot do: full disks without root, clock jumps without libfaketime.

    python -m tests.soak.soak --minutes 30 --report soak.md
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, Final

from tests.contract_http.api import path
from tests.contract_http.readers import BROKEN, CONFIGS, Interrupted, World, answered
from tests.contract_http.server import Server

from tidelog.client import Client, RemoteChannel, RemoteQueue
from tidelog.errors import Error

DISK_MIB: Final = 1_536
EVERY_S: Final = 6.0  # between two disturbances
FULL_S: Final = 3.0
RESUME_S: Final = 60.0
FAKETIME: Final = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1"
JUMPS: Final = ("+3600", "-3600", "+86400", "-60", "+0")
KEPT: Final = {name: config for name, config in CONFIGS.items() if config["durability"] != "memory"}  # over a kill
EXPORTED, QUEUE, CHANNEL, USER = "exported", "jobs", "!soak@example.org", "ann@example.org"


class Soak:
    """One run."""

    def __init__(self, folder: Path, minutes: float, seed: int, *, spark: bool) -> None:
        self.folder, self.seconds, self.seed, self.spark = folder, minutes * 60, seed, spark
        self.random = Random(seed)
        self.counts: Counter[str] = Counter()
        self.notes: list[str] = []  # what this machine cannot do
        self.over = threading.Event()
        self.disk = folder / "disk"
        self.clock = folder / "clock.txt"
        self.has_disk = self.has_clock = False

    def run(self) -> dict[str, Any]:
        """Run, check everything, and return the report. Raises where something was lost or did not resume."""
        began = time.monotonic()
        with self._small_disk():
            port_file = str(self.folder / "port.txt")
            server = Server(
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
            with server.start():
                self._loaded(server)
                server.stop()
            self._check_directory()
        return {
            "seed": self.seed,
            "minutes": round((time.monotonic() - began) / 60, 1),
            "counts": dict(sorted(self.counts.items())),
            "left out": self.notes,
        }

    def _loaded(self, server: Server) -> None:
        world = World(server, self.seed, KEPT)
        clients: list[SoakClient] = [
            QueueClient(self, world),
            ChannelClient(self, world),
            VolatileClient(self, world, "memory"),
            VolatileClient(self, world, "ephemeral"),
            ExportClient(self, world),
        ]
        for client in clients:
            client.set_up()
        threads = [threading.Thread(target=world._guarded, args=(client.run,)) for client in clients]
        for thread in threads:
            thread.start()
        try:
            world.run(self.seconds, self._disturbances(server, world))
        finally:
            self.over.set()
            for thread in threads:
                thread.join(300)
        if world.errors:
            raise AssertionError(f"seed {self.seed}: {world.errors[0]!r}") from world.errors[0]
        for client in clients:
            client.check()
        self.counts.update(world.counts)
        self.counts["records acked"] = sum(len(life.written) for lives in world.lives.values() for life in lives)

    # ── disturbances ──────────────────────────────────────────────────────────────────────────

    def _disturbances(self, server: Server, world: World) -> list[Callable[[], object]]:
        def kill() -> None:
            server.kill()
            server.start()

        kinds: list[tuple[str, Callable[[], object]]] = [
            ("kills", kill),
            ("kills", kill),
            ("restarts", server.restart),
        ]
        if self.has_disk:
            kinds.append(("full disks", lambda: self._fill(world)))
        if self.has_clock:
            kinds.append(("clock jumps", lambda: self.clock.write_text(self.random.choice(JUMPS))))

        def counted(kind: str, act: Callable[[], object]) -> Callable[[], object]:
            def run() -> None:
                act()
                self.counts[kind] += 1

            return run

        many = max(int(self.seconds / EVERY_S), len(kinds))
        drawn = [*kinds, *(self.random.choice(kinds) for _ in range(many - len(kinds)))]
        self.random.shuffle(drawn)
        return [counted(*kind) for kind in drawn]

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

    def _fill(self, world: World) -> None:
        """Take all the space for a while. Afterwards every writer is served again without a restart."""
        ballast = self.disk / "ballast"
        with ballast.open("wb") as file:
            piece = bytes(1 << 20)
            try:
                while True:
                    file.write(piece)
                    file.flush()
            except OSError:
                self.over.wait(FULL_S)
        ballast.unlink()
        self._await_writes(world)

    def _await_writes(self, world: World) -> None:
        """Every topic takes a write again."""
        deadline = time.monotonic() + RESUME_S
        before = {name: lives[-1].head for name, lives in world.lives.items()}
        waiting = set(before)
        while waiting and not world.failed.is_set():
            for name in list(waiting):
                lives = world.lives[name]
                if lives[-1].head > before[name] or (lives[-1].head and lives[-1].head < before[name]):
                    waiting.discard(name)
            assert time.monotonic() < deadline, f"no writes to {sorted(waiting)} since there is room on the disk again"
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
        }

    def _check_directory(self) -> None:
        command = [sys.executable, "-m", "tidelog.cli.main", "check", str(self.disk / "data"), "--json"]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.returncode == 0, f"seed {self.seed}: check: {done.stdout[-2000:]}{done.stderr[-2000:]}"


class SoakClient:
    """A client with acks of its own. `run` goes on until the soak is over, `check` compares."""

    def __init__(self, soak: Soak, world: World) -> None:
        self.soak, self.world = soak, world
        self.random = Random(f"{soak.seed}/{type(self).__name__}")

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
            except (*BROKEN, Interrupted, Error):
                self.soak.counts["requests that were cut off or refused"] += 1
                self.soak.over.wait(0.05)

    def step(self) -> None:
        """One thing."""

    def check(self) -> None:
        """After the load, on the running server."""


class QueueClient(SoakClient):
    """Puts jobs, claims and acks them. Every job is done at least once and is gone for good when its ack returned."""

    def set_up(self) -> None:
        self.number = 0
        self.put: set[int] = set()
        self.acking: set[int] = set()
        self.acked: set[int] = set()
        with self.world.server.client() as api:
            api.make(QUEUE, type="queue", durability="fsync", lease_ms=1_000, max_deliveries=0)

    def step(self) -> None:
        with Client(self.url) as client:
            queue = RemoteQueue(client, QUEUE)
            for _ in range(20):
                self.number += 1
                queue.put([{"data": self.number}])
                self.put.add(self.number)
                self._work(queue)
                if self.soak.over.wait(0.01):
                    return

    def _work(self, queue: RemoteQueue) -> None:
        jobs = queue.claim("soak", 4)
        back = [job.data for job in jobs if job.data in self.acked]
        assert not back, f"jobs {back} were acked and came back"
        numbers = {job.data for job in jobs}
        if jobs:
            self.acking |= numbers
            done = queue.ack("soak", jobs)
            if done["acked"] == len(jobs):  # fewer: a lease ran out, or the request was repeated
                self.acked |= numbers
            self.soak.counts["jobs acked"] += done["acked"]

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
            RemoteChannel(client, CHANNEL, USER).join(config={"persist": True})

    def step(self) -> None:
        with Client(self.url) as client:
            channel = RemoteChannel(client, CHANNEL, USER)
            for _ in range(20):
                self.number += 1
                done = channel.publish([b"%d" % self.number])
                self.sent[done["first_seq"]] = self.number
                self.soak.counts["messages published"] += 1
                if self.soak.over.wait(0.02):
                    return

    def check(self) -> None:
        found: dict[int, int] = {}
        with Client(self.url) as client:
            channel, at = RemoteChannel(client, CHANNEL, USER), 1
            while True:
                messages, at, last = channel.history(from_seq=at)
                found.update((message.seq, int(message.payload)) for message in messages)
                if not messages or at > last:
                    break
        kept = {seq: number for seq, number in self.sent.items() if seq >= min(found, default=0)}
        assert kept.items() <= found.items(), "messages are lost or changed"
        assert list(found.values()) == sorted(set(found.values())), "messages out of order, or twice"


class VolatileClient(SoakClient):
    """Writes to a topic that a kill may take, and reads back each write at once."""

    def __init__(self, soak: Soak, world: World, durability: str) -> None:
        super().__init__(soak, world)
        self._topic = durability

    def set_up(self) -> None:
        with self.world.server.client() as api:
            api.make(self._topic, durability=self._topic, cap_records=1_000)

    def step(self) -> None:
        with self.world.server.client() as api:
            number = self.random.randrange(1 << 30)
            done = answered(api.try_write(self._topic, {"data": number}), 200)
            found = answered(api.post(path(self._topic, "/diff"), {"from_seq": done["first_seq"] - 1}), 200)
            assert found["records"], f"{self._topic}: a record that was just written is not there"
            assert found["records"][0]["data"] == number
            self.soak.counts[f"records of class {self._topic} read back"] += 1
        self.soak.over.wait(0.02)


class ExportClient(SoakClient):
    """Appends to a topic that Spark exports into a table, over and over. At the end the table equals the topic."""

    def set_up(self) -> None:
        self.number = 0
        self.table = self.soak.folder / "table"
        self.written = 0
        with self.world.server.client() as api:
            api.make(EXPORTED, durability="fsync")
        if not self.soak.spark:
            self.soak.notes.append("no Spark export: --no-spark")
        self.exporting = threading.Thread(target=self.world._guarded, args=(self._export_loop,))
        if self.soak.spark:
            self.exporting.start()

    def step(self) -> None:
        with self.world.server.client() as api:
            for _ in range(20):
                self.number += 1
                answered(api.try_write(EXPORTED, *({"data": {"n": self.number, "at": at}} for at in range(10))), 200)
                self.written += 10
                if self.soak.over.wait(0.05):
                    return

    def _tidelog(self, *args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tidelog.cli.main", "pipeline", *args, "--master", "local[1]", "--json"]
        return subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)

    def _export_loop(self) -> None:
        while not self.soak.over.is_set() and not self.world.failed.is_set():
            done = self._tidelog("export", self.url, EXPORTED, str(self.table), "--once", "--format", "delta")
            self.soak.counts["exports that were cut off" if done.returncode else "exports"] += 1
            self.soak.over.wait(5)

    def check(self) -> None:
        if not self.soak.spark:
            return
        self.exporting.join(600)
        done = self._tidelog("export", self.url, EXPORTED, str(self.table), "--once", "--format", "delta")
        assert done.returncode == 0, f"export: {done.stdout}{done.stderr}"
        done = self._tidelog("reconcile", self.url, EXPORTED, str(self.table))
        assert done.returncode == 0, f"reconcile: {done.stdout}{done.stderr}"
        from deltalake import DeltaTable

        rows = DeltaTable(str(self.table)).to_pyarrow_table(columns=["seq"]).num_rows
        assert rows >= self.written, f"{self.written} records were acked, the table has {rows} rows"
        self.soak.counts["rows exported"] = rows


def shown(report: dict[str, Any]) -> str:
    """The report as a page."""
    rows = "\n".join(f"| {what} | {count:,} |" for what, count in report["counts"].items())
    left = "".join(f"\n- {note}" for note in report["left out"])
    return (
        f"# Soak: {report['minutes']} minutes, seed {report['seed']}\n\nNothing acked was lost, changed or doubled.\n\n"
        f"| what | count |\n|---|---:|\n{rows}\n" + (f"\nLeft out:\n{left}\n" if left else "")
    )


def main() -> None:
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
    page = json.dumps(report, indent=2) if args.json else shown(report)
    print(page)
    if args.report:
        args.report.write_text(page)


if __name__ == "__main__":
    main()
