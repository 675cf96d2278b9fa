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

from tidelog.engine import Topic, publication
from tidelog.engine.staging import Plan, Staging
from tidelog.spark import sink
from tidelog.spark.sink import Sink
from tidelog.spark.sink_options import read

ROWS = 40
SCHEMA = pa.schema([("data", pa.binary())])


def rows(number: int) -> list[bytes]:
    return [b"%d/%03d" % (number, each) + bytes(90) for each in range(ROWS)]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(data: str, number: int, last: int, when: str) -> None:
    publication.ONE_MAX_BYTES, publication.PART_MAX_BYTES = 1_000, 600  # type: ignore[misc]
    sink.STAGED_BYTES = 200
    append, keep, calls = Topic.append_numbered, Staging.keep_plan, 0

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

    def planned(self: Staging, owner: str, key: str, plan: Plan) -> None:
        keep(self, owner, key, plan)
        if last and when == "plan":
            die()

    Topic.append_numbered, Staging.keep_plan = dying, planned  # type: ignore[method-assign]
    options = read({"path": data, "topic": "copy", "query": "etl", "batch": str(number)})
    made = Sink(options, from_arrow_schema(SCHEMA), options.writer)
    mine = rows(number)
    tasks = [mine[:11], mine[11:30], mine[30:]]
    staged = [made.stage(iter([pa.RecordBatch.from_pydict({"data": [row]}, SCHEMA) for row in task])) for task in tasks]
    made.publish(staged, number)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
