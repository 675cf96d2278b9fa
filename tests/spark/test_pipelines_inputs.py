"""Delta tables as input, read as their own readers see them; jobs that are run again, with the same input or other."""

from __future__ import annotations

import json
import struct
import uuid
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession
from tests.unit.pipelines.helpers import PipelineHarness

import tidelog
from tidelog import pipelines
from tidelog.errors import BadInput, Damaged

_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


def with_vector(path: str, places: list[int]) -> None:
    """Delete rows of a table of one file as engines with deletion vectors do: a bitmap beside the file, by the Delta
    protocol (`add.deletionVector`, storage type u)."""
    table = DeltaTable(path)
    log = Path(path) / "_delta_log"
    lines = [json.loads(line) for each in sorted(log.glob("*.json")) for line in each.read_text().splitlines()]
    (name,) = pa.table(table.get_add_actions())["path"].to_pylist()
    (add,) = [line["add"] for line in lines if "add" in line and line["add"]["path"] == name]
    array = struct.pack("<IIHHI", 12346, 1, 0, len(places) - 1, 16) + struct.pack(f"<{len(places)}H", *places)
    bitmap = struct.pack("<IQI", 1681511377, 1, 0) + array
    made = uuid.uuid4()
    content = b"\1" + struct.pack(">I", len(bitmap)) + bitmap + struct.pack(">I", zlib.crc32(bitmap))
    (Path(path) / f"deletion_vector_{made}.bin").write_bytes(content)
    words = struct.unpack(">4I", made.bytes)
    text = "".join(_Z85[word // 85**place % 85] for word in words for place in (4, 3, 2, 1, 0))
    vector = {
        "storageType": "u", "pathOrInlineDv": text, "offset": 1, "sizeInBytes": len(bitmap), "cardinality": len(places)
    }  # fmt: skip
    features = ["deletionVectors"]
    actions: list[dict[str, Any]] = [
        {"commitInfo": {"timestamp": 1, "operation": "DELETE"}},
        {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": features,
                      "writerFeatures": features}},
        {"remove": {"path": name, "deletionTimestamp": 1, "dataChange": True}},
        {"add": {**add, "deletionVector": vector}},
    ]  # fmt: skip
    (log / f"{table.version() + 1:020d}.json").write_text("\n".join(map(json.dumps, actions)) + "\n")


def with_other_names(path: str) -> None:
    """Rename the column name to title as engines with column mapping do: in the metadata, and in no file."""
    log = Path(path) / "_delta_log"
    (first,) = sorted(log.glob("*.json"))
    (meta,) = [line["metaData"] for line in map(json.loads, first.read_text().splitlines()) if "metaData" in line]
    schema = json.loads(meta["schemaString"])
    for number, field in enumerate(schema["fields"], 1):
        names = {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": field["name"]}
        field["metadata"] |= names
        field["name"] = "title" if field["name"] == "name" else field["name"]
    meta["schemaString"] = json.dumps(schema)
    meta["configuration"] = {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": "2"}
    actions = [{"protocol": {"minReaderVersion": 2, "minWriterVersion": 5}}, {"metaData": meta}]
    (log / f"{1:020d}.json").write_text("\n".join(map(json.dumps, actions)) + "\n")


def copied(spark: SparkSession, root: Path, source: str, **more: Any) -> list[Any]:
    into = str(root / "into")
    pipelines.backfill(source, into, "copy", work_dir=str(root / "work"), spark=spark, **more)
    with tidelog.open(into, read_only=True) as engine:
        found = [record.data for record in engine.topic("copy", create=False).read(0, 1000).records]
    return sorted(found, key=str)


ROWS = pa.table({"n": pa.array(range(6), pa.int64()), "name": ["a", "b", "c", "d", "e", "f"]})


def test_partition_columns_of_a_delta_table_are_columns(spark: SparkSession, tmp_path: Path) -> None:
    path = str(tmp_path / "in")
    write_deltalake(path, ROWS.append_column("day", pa.array(["mon", "tue", None] * 2)), partition_by=["day"])
    found = copied(spark, tmp_path, path)
    assert {(row["n"], row["name"], row["day"]) for row in found} == {
        (n, name, day) for n, name, day in zip(range(6), "abcdef", ["mon", "tue", None] * 2, strict=True)
    }


def test_rows_that_a_deletion_vector_hides_are_not_read(spark: SparkSession, tmp_path: Path) -> None:
    path = str(tmp_path / "in")
    write_deltalake(path, ROWS)
    with_vector(path, [1, 4])
    assert [row["n"] for row in copied(spark, tmp_path, path)] == [0, 2, 3, 5]


def test_mapped_columns_have_the_names_of_the_table(spark: SparkSession, tmp_path: Path) -> None:
    path = str(tmp_path / "in")
    write_deltalake(path, ROWS)
    with_other_names(path)
    found = copied(spark, tmp_path, path)
    assert [(row["n"], row["title"]) for row in found] == list(zip(range(6), "abcdef", strict=True))


def test_a_feature_that_the_library_does_not_know_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    path = str(tmp_path / "in")
    write_deltalake(path, ROWS)
    features = {"readerFeatures": ["notYetInvented"], "writerFeatures": ["notYetInvented"]}
    protocol = {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, **features}}
    (Path(path) / "_delta_log" / f"{1:020d}.json").write_text(json.dumps(protocol) + "\n")
    with pytest.raises((BadInput, Damaged), match=r"notYetInvented"):
        copied(spark, tmp_path, path)


def test_a_table_with_deletion_vectors_is_compared_as_readers_see_it(spark: SparkSession, tmp_path: Path) -> None:
    bench = PipelineHarness(tmp_path, "delta")
    bench.fill(50)
    pipelines.export(bench.data, "orders", bench.table, format="delta", spark=spark)
    assert len(bench.files()) == 1
    with_vector(bench.table, [9])
    found = pipelines.reconcile(bench.data, "orders", bench.table, spark=spark)
    assert (found.equal, found.table_rows) == (False, 49)
    assert found.difference is not None
    assert (found.difference.seq, found.difference.table) == (10, "nothing")
    with pytest.raises(BadInput, match=r"can be compared and not repaired; nothing was changed"):
        pipelines.reconcile(bench.data, "orders", bench.table, repair=True, spark=spark)
    with bench.engine() as engine:
        engine.topic("orders").delete(seqs=[10])
    assert pipelines.reconcile(bench.data, "orders", bench.table, spark=spark).equal
    bench.fill(10, start=50)
    pipelines.export(bench.data, "orders", bench.table, spark=spark)
    assert pipelines.reconcile(bench.data, "orders", bench.table, spark=spark).table_rows == 59


def test_another_input_under_the_default_name_is_refused(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, values in (("a", (1, 2)), ("b", (3, 4))):
        (tmp_path / f"{name}.json").write_text("".join(f'{{"n": {value}}}\n' for value in values))
    args: dict[str, Any] = {"spark": spark}
    first = pipelines.backfill("a.json", "data", "all", **args)
    assert (first.rows, first.written) == (2, 2)
    again = pipelines.backfill("./a.json", "data", "all", **args)
    assert (again.rows, again.written) == (2, 0), "the same input, and it says that nothing was written"
    with pytest.raises(BadInput, match=r"known with other input \(source '.*/b.json', and before '.*/a.json'\)"):
        pipelines.backfill("b.json", "data", "all", **args)
    with pytest.raises(BadInput, match=r"known with other input \(target"):
        pipelines.backfill("a.json", "elsewhere", "all", **args)
    assert pipelines.backfill("b.json", "data", "all", job="b", **args).written == 2
    (tmp_path / "a.json").write_text('{"n": 1}\n{"n": 2}\n{"n": 5}\n')
    with pytest.raises(BadInput, match=r"that has changed since; nothing was written"):
        pipelines.backfill("a.json", "data", "all", **args)
    with tidelog.open("data", read_only=True) as engine:
        found = [record.data["n"] for record in engine.topic("all", create=False).read(0, 100).records]
    assert found == [1, 2, 3, 4]
