"""Spark's parent of Python workers, with the modules that every worker of these tests imports. Each worker is a fork,
so it starts with them: the import took each worker 0.3 s of CPU. The cluster's workers use Spark's own daemon."""

from __future__ import annotations

import pyarrow.compute  # noqa: F401
from pyspark import daemon

import tidelog.spark.sink
import tidelog.spark.source
import tidelog.spark.task_reader  # noqa: F401

if __name__ == "__main__":
    daemon.manager()
