"""The script that spark-submit runs: a job of `tidelog pipeline`, on the master and with the settings of spark-submit.

    spark-submit --master spark://host:7077 "$(tidelog pipeline script)" export http://host:4000 orders s3://lake/orders

Its arguments are those of `tidelog pipeline`, and so are its exit codes.
"""

from __future__ import annotations

import sys

from tidelog.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["pipeline", *sys.argv[1:]]))
