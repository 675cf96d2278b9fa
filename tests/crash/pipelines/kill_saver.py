"""The process that gets killed: a save of more than one commit takes, which ends itself with SIGKILL at a commit.

python saver.py DATA NUMBER LAST WHEN      LAST 0: it is let live; WHEN before or after the commit, or in the plan
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema

from tidelog.engine import Topic, producer_batches
from tidelog.engine.producer_batches import PublicationPlan, StagingArea
from tidelog.spark import sink
from tidelog.spark.sink import SinkWriter, parse_sink_options

ROWS = 40
SCHEMA = pa.schema([("data", pa.binary())])


def rows(number: int) -> list[bytes]:
    return [b"%d/%03d" % (number, each) + bytes(90) for each in range(ROWS)]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(data: str, number: int, last: int, when: str) -> None:
    producer_batches.SINGLE_COMMIT_BYTES_MAX, producer_batches.PART_BYTES_MAX = 1_000, 600  # type: ignore[misc]
    sink.STAGED_CHUNK_BYTES = 200
    append, keep, calls = Topic.append_numbered, StagingArea.save_plan, 0

    def dying(self: Topic, *args: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == last and when == "before":
            die()
        done = append(self, *args, **more)
        os.write(1, b"a commit\n")
        if calls == last and when == "after":
            die()
        return done

    def planned(self: StagingArea, owner: str, key: str, plan: PublicationPlan) -> None:
        keep(self, owner, key, plan)
        if last and when == "plan":
            die()

    Topic.append_numbered, StagingArea.save_plan = dying, planned  # type: ignore[method-assign]
    options = parse_sink_options({"path": data, "topic": "copy", "query": "etl", "batch": str(number)})
    made = SinkWriter(options, from_arrow_schema(SCHEMA), options.writer)
    mine = rows(number)
    tasks = [mine[:11], mine[11:30], mine[30:]]
    staged = [made.stage(iter([pa.RecordBatch.from_pydict({"data": [row]}, SCHEMA) for row in task])) for task in tasks]
    made.publish(staged, number)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
