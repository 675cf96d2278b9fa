"""A numbered batch that is asked for again while its first request still runs: every row once.

A driver that dies leaves its request with the server. The one that is started in its place stages the rows anew, in
other chunks, and asks for the same batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread

import pyarrow as pa
import pytest

import tidelog
from tidelog.database import engine_of
from tidelog.disk.posix import PosixDisk
from tidelog.engine import producer_batches
from tidelog.engine.producer_batches import BatchId, StagedChunk, StagingArea, chunk_name

OWNER = "a" * 32
ROWS = [b"%05d" % number * 200 for number in range(120)]


class Held(StagingArea):
    """Reading of the first chunk stands still until the other request has ended, or waits for this one."""

    def __init__(self, root: str, other: Event) -> None:
        super().__init__(PosixDisk(), root)
        self._other, self.reached = other, Event()

    def read(self, chunk: StagedChunk) -> Iterator[pa.RecordBatch]:
        if not self.reached.is_set():
            self.reached.set()
            self._other.wait(1)
        return super().read(chunk)


def staged(staging: StagingArea, size: int) -> list[StagedChunk]:
    found = []
    for at in range(0, len(ROWS), size):
        rows = ROWS[at : at + size]
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, pa.schema([("data", pa.binary())])) as writer:
            writer.write_table(pa.table({"data": pa.array(rows, pa.binary())}))
        upload = staging.begin(chunk_name(OWNER, 1, bytes([size, at]) * 4))
        upload.write([sink.getvalue().to_pybytes()])
        found.append(upload.finish(len(rows)))
    return found


def test_two_requests_for_one_batch_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_batches, "SINGLE_COMMIT_BYTES_MAX", 40_000)
    monkeypatch.setattr(producer_batches, "PART_BYTES_MAX", 30_000)
    data, ended = str(tmp_path / "data"), Event()
    with tidelog.open(data) as log:
        first, second = Held(data, ended), StagingArea(PosixDisk(), data)
        first.create()
        chunks = staged(first, 5), staged(second, 30)
        batch = BatchId("etl", 3, (1, 2), "q")
        failed: list[BaseException] = []

        def run(staging: StagingArea, mine: list[StagedChunk]) -> None:
            try:
                producer_batches.publish_batch(engine_of(log), staging, "copy", batch, mine)
            except BaseException as error:
                failed.append(error)
            if staging is second:
                ended.set()

        threads = [Thread(target=run, args=(first, chunks[0])), Thread(target=run, args=(second, chunks[1]))]
        threads[0].start()
        assert first.reached.wait(60)
        threads[1].start()
        for thread in threads:
            thread.join()
        assert not failed
        assert log.topic("copy").to_arrow()["data"].to_pylist() == ROWS
