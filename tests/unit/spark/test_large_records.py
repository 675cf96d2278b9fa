"""Large records in Spark: a reference in place of the data, from the tail, from segments, by path and by server."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.spark.helpers import MODES, Mode, read, source_env
from xxhash import xxh3_64_hexdigest


@pytest.mark.parametrize("mode", MODES)
def test_spark_reads_a_reference(mode: Mode, tmp_path: Path) -> None:
    data = bytes(300_000)
    reference = b'{"$large":{"bytes":300000,"xxh3":"%b","href":"records/2/data"}}' % xxh3_64_hexdigest(data).encode()
    with source_env(mode, tmp_path) as env:
        topic = env.engine.topic("orders")
        topic.append({"a": 1})
        topic.append_stream([data], tag="big", meta={"k": 1})
        topic.append(b"raw")
        for _ in range(2):
            table = read(env.options(columns="seq,tag,meta,data,is_json")).table
            assert table["data"].to_pylist() == [b'{"a":1}', reference, b"raw"]
            assert table["is_json"].to_pylist() == [True, True, False]
            assert table["tag"].to_pylist() == [None, "big", None]
            assert table["meta"].to_pylist()[1] == [("k", "1")]
            topic.seal()
            env.engine.checkpoint()
