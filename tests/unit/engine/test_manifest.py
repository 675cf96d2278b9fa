"""The rows of a snapshot: arrays whose fields only ever grow at the end, so that older snapshots read."""

from __future__ import annotations

import msgspec
import pytest

from tidelog.engine.manifest import (
    ConsumerRow,
    FedRow,
    GroupRow,
    LeaseRow,
    Manifest,
    QueueRow,
    RouterRow,
    SegmentRow,
    TopicRow,
    WriterRow,
)

TOPIC = [7, "orders", b"{}", 9, 12, 2, 1, 0, 1_700, [[1, 5, 100, 4, 80, 1_600, 1_700, True]]]


def built(kind: type[msgspec.Struct], *fields: object) -> object:
    return msgspec.convert(msgspec.msgpack.decode(msgspec.msgpack.encode(fields)), kind)


@pytest.mark.parametrize(
    "row",
    [
        SegmentRow(1, 5, 100, 4, 80, 1_600, 1_700, True),
        LeaseRow(1, 2, 3, "node"),
        QueueRow(5, 1, (LeaseRow(1, 2, 3, "node"),), ((1, 2),), ((3, 4),)),
        ConsumerRow("group", 5, 1_700, 0),
        WriterRow("etl", ((1, 2, 3, 4, 5),)),
        FedRow(1, 2),
        RouterRow("r", 1, 2, True, False, False, True, (1, "x"), 0, 0, 3),
        GroupRow("0-of-1", 1, 0),
        Manifest(),
    ],
    ids=lambda row: type(row).__name__,
)
def test_rows_are_arrays(row: msgspec.Struct) -> None:
    stored = msgspec.msgpack.decode(msgspec.msgpack.encode(row))
    assert isinstance(stored, list)
    assert built(type(row), *stored) == row


def test_a_row_of_the_first_version_reads_with_what_it_meant_then() -> None:
    found = built(TopicRow, *TOPIC)
    assert isinstance(found, TopicRow)
    assert found.segments == (SegmentRow(1, 5, 100, 4, 80, 1_600, 1_700, True, unproven=False),)
    later = msgspec.structs.asdict(found)
    for name in TopicRow.__struct_fields__[: len(TOPIC)]:
        del later[name]
    expected: dict[str, object] = {
        "queue": None,
        "fed": None,
        "source_mark": 0,
        "guarded": False,
        "removals": 0,
        "wired": 0,
    }
    expected |= {"blobs": b"", "epoch": 0, "compaction": None}
    assert {name: value for name, value in later.items() if value != ()} == expected


def test_defaults_of_later_fields() -> None:
    assert built(FedRow, 1, 2) == FedRow(1, 2, copying=True), "as it was when there was no such field"
    assert built(QueueRow, 5, 1) == QueueRow(5, 1, (), (), ())
    assert built(Manifest) == Manifest((), (), 1, (), (), ())
