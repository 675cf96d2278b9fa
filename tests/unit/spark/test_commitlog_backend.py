"""Logs of the other codecs: the same source, without topics."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.spark.helpers import read, read_micro_batch, source, stream

from tidelog.commitlog import PartitionedLog, SegmentedLog
from tidelog.errors import BadInput, Error, GapFound, NotFound

CODECS = ("rustlog", "laminar", "narwhal")


def filled(path: Path, codec: str, count: int = 500) -> SegmentedLog:
    log = SegmentedLog.open(str(path), codec, segment_bytes_max=4096)
    log.append_many([b"%04d" % number * 5 for number in range(count)])
    return log


@pytest.mark.parametrize("codec", CODECS)
def test_a_log_is_read_with_its_writer_open_and_closed(codec: str, tmp_path: Path) -> None:
    log = filled(tmp_path / "events", codec)
    options = {"path": str(tmp_path / "events"), "codec": codec}
    with log:
        live = read({**options, "minPartitions": "3"})
        first = log.lowest
    closed = read(options)
    assert live.table.to_pylist() == closed.table.to_pylist()
    assert len(live.tasks) == 3
    assert closed.seqs == list(range(first, first + 500))
    rows = closed.table.to_pylist()
    assert {row["topic"] for row in rows} == {"events"}
    assert rows[7]["data"] == b"0007" * 5
    assert (rows[0]["ts"] is None) == (codec == "laminar"), "a layout without times has none to show"
    some = read({**options, "startingOffsets": '{"events": 100}', "endingOffsets": '{"events": 103}'})
    assert some.seqs == [100, 101, 102]


@pytest.mark.parametrize("codec", CODECS)
def test_what_retention_dropped_is_a_gap(codec: str, tmp_path: Path) -> None:
    with filled(tmp_path / "events", codec) as log:
        log.retain(keep_bytes=8000)
        lowest = log.lowest
        options = {"path": str(tmp_path / "events"), "codec": codec, "startingOffsets": '{"events": 1}'}
        assert lowest > 1
        with pytest.raises(GapFound, match=rf"seqs 1 to {lowest - 1} are lost \(retention\)"):
            read(options)
        found = read({**options, "onGap": "skip"})
        assert found.seqs == list(range(lowest, log.highest))
        assert found.tasks[0].counts.evicted == lowest - 1


def test_retention_after_planning_is_reported_by_the_task(tmp_path: Path) -> None:
    with filled(tmp_path / "events", "rustlog") as log:
        made = source({"path": str(tmp_path / "events"), "codec": "rustlog"})
        reader = made.reader(made.schema())
        splits = list(reader.partitions())
        log.retain(keep_bytes=8000)
        with pytest.raises(GapFound, match=r"lost \(retention\)"):
            list(reader.read(splits[0]))


def test_a_log_is_followed(tmp_path: Path) -> None:
    with filled(tmp_path / "events", "narwhal", 10) as log:
        reader = stream({"path": str(tmp_path / "events"), "codec": "narwhal", "startingOffsets": "earliest"})
        start = reader.initialOffset()
        first = log.lowest
        assert start == {"events": {"epoch": 0, "seq": first}}
        log.append(b"more")
        end = reader.latestOffset(start, reader.getDefaultReadLimit())
        assert read_micro_batch(reader, start, end).column("seq").to_pylist() == list(range(first, first + 11))
        reader.stop()


def test_partitions_are_topics_of_their_own(tmp_path: Path) -> None:
    with PartitionedLog.open(str(tmp_path / "root")) as root:
        root.create_topic("a", 2)
        root.create_topic("b", 1)
        for number in range(6):
            root.append("a", number % 2, b"%d" % number)
        root.append("b", 0, b"x")
    options = {"path": str(tmp_path / "root"), "codec": "rustlog"}
    rows = read({**options, "subscribe": "a"}).table.to_pylist()
    assert [(row["topic"], row["data"]) for row in rows] == [
        *(("a/0", data) for data in (b"0", b"2", b"4")),
        *(("a/1", data) for data in (b"1", b"3", b"5")),
    ]
    assert read({**options, "subscribe": "a/1"}).table.num_rows == 3
    assert read(options).table.num_rows == 7


def test_another_codec_than_wrote_it_is_refused(tmp_path: Path) -> None:
    filled(tmp_path / "events", "narwhal").close()
    with pytest.raises(BadInput, match="holds a narwhal log, not a rustlog one"):
        read({"path": str(tmp_path / "events"), "codec": "rustlog"})
    with pytest.raises(NotFound, match="there is no log at"):
        read({"path": str(tmp_path / "none"), "codec": "rustlog"})
    with pytest.raises(Error, match="belongs to another program"):
        read({"path": str(tmp_path / "events"), "subscribe": "events"})


@pytest.mark.parametrize("codec", ["tide", *CODECS])
def test_the_layout_of_a_log_is_recognised(codec: str, tmp_path: Path) -> None:
    with filled(tmp_path / "events", codec) as log:
        first = log.lowest
        found = read({"path": str(tmp_path / "events"), "codec": "log", "minPartitions": "3"})
    assert found.seqs == list(range(first, first + 500))
    rows = found.table.to_pylist()
    assert rows[7]["data"] == b"0007" * 5
    assert (rows[0]["ts"] is None) == (codec == "laminar")


def test_a_tide_log_of_the_library_is_followed_and_a_root_of_them_read(tmp_path: Path) -> None:
    with filled(tmp_path / "events", "tide", 10) as log:
        reader = stream({"path": str(tmp_path / "events"), "codec": "log", "startingOffsets": "earliest"})
        start = reader.initialOffset()
        log.append(b"more")
        end = reader.latestOffset(start, reader.getDefaultReadLimit())
        assert read_micro_batch(reader, start, end).column("seq").to_pylist() == list(range(1, 12))
        reader.stop()
    with PartitionedLog.open(str(tmp_path / "root"), "tide") as root:
        root.create_topic("a", 2)
        root.append("a", 1, b"x")
    rows = read({"path": str(tmp_path / "root"), "codec": "log"}).table.to_pylist()
    assert [(row["topic"], row["data"]) for row in rows] == [("a/1", b"x")]


FOREIGN = Path(__file__).parents[2] / "golden" / "foreign"
VARIANTS = {
    "rustlog/server": (300, False),
    "rustlog/short-names": (60, False),
    "laminarmq/u64-unit": (260, False),
    "laminarmq/u64-note": (500, False),
    "laminarmq/u32-siphash": (20, False),
    "laminarmq/recovered": (310, False),
    "laminarmq/truncated-at-base": (95, False),
    "narwhal/stopped/11fb0b5a56e5d18c2f001a8c858fb424f68d0b1658acc820078467db9f39ecf5": (60, True),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_logs_of_the_original_programs_are_read(name: str) -> None:
    count, has_times = VARIANTS[name]
    rows = read({"path": str(FOREIGN / name), "codec": "log"}).table.to_pylist()
    with SegmentedLog.open(str(FOREIGN / name), read_only=True) as log:
        records = list(log)
    assert [(row["seq"], row["data"]) for row in rows] == [(record.seq, record.data) for record in records]
    assert len(rows) == count
    assert all((row["ts"] is not None) == has_times for row in rows)


def test_a_root_that_rustlog_wrote_is_read() -> None:
    found = read({"path": str(FOREIGN / "rustlog"), "codec": "log", "subscribe": "orders"})
    rows = found.table.to_pylist()
    assert [sum(row["topic"] == f"orders/{number}" for row in rows) for number in (0, 1)] == [1000, 200]
    assert rows[0]["ts"] is None
