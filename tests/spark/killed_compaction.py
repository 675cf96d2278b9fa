"""The process that gets killed: a compaction on Spark that ends itself with SIGKILL at a step.

python killed_compaction.py DATA TOPIC STEP
"""

from __future__ import annotations

import os
import signal
import sys

import tidelog.spark
from tidelog import pipelines


def main(data: str, topic: str, last: str) -> None:
    spark = tidelog.spark.session("local[1]", spark_ui_enabled="false", spark_sql_shuffle_partitions="1")

    def die(step: str) -> None:
        if step == last:
            os.kill(os.getpid(), signal.SIGKILL)

    pipelines.compact(data, topic, spark=spark, step=die)


if __name__ == "__main__":
    main(*sys.argv[1:])
