"""What objects of the four clients show: short reprs, public names alone, truth and membership."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypedDict

import msgspec
import pydantic
import pytest
from tests.unit.test_public_api import documented_names, public_names

from tidelog import errors, protocols
from tidelog.engine.typed import TypedPage, TypedRecord

Name = Callable[..., str]
# Names that only a database in this process has: they need its files or its threads.
IN_PROCESS = {
    "Database": {"report", "limits", "tick", "refresh"},
    "Topic": {"append_nowait", "add_listener", "remove_listener", "version"},
    "Queue": {"add_listener", "remove_listener", "next_due_ms", "expired_leases", "dead_letter_error"},
    "Channel": {"submit"},
    "Group": set[str](),
}
# Single values are requests: an object for asyncio has them in `await …state()`.
VALUES = {
    "Topic": {"id", "epoch", "config", "head_seq", "earliest_seq", "evict_floor", "count", "bytes", "priority"},
    "Group": {"position", "hold_bytes", "hold_broken"},
}
ASYNC_LACKS = {"Topic": {"to_dataset"}, "Channel": {"user"}}
ASYNC_ONLY = {"Channel": {"length"}}
REMOTE_ONLY = {"Database": {"backups"}}


def target(value: Any) -> Any:
    """The object itself, where the suite has it behind plain methods."""
    return value._target if type(value).__name__ == "Awaited" else value


def objects(database: protocols.Database, name: Name) -> dict[str, Any]:
    topic = database.topic(name())
    found = {
        "Database": database,
        "Topic": topic,
        "Queue": database.queue(name("q")),
        "Channel": database.channel(f"!{name()}@localhost", user="ann@localhost"),
        "Group": topic.group("readers"),
    }
    return {section: target(value) for section, value in found.items()}


def test_dir_shows_the_documented_names_alone(database: protocols.Database, name: Name) -> None:
    for section, value in objects(database, name).items():
        is_async = type(value).__name__.startswith("Async")
        is_remote = "Remote" in type(value).__name__
        expected = documented_names(section)
        if is_remote or is_async:
            expected -= IN_PROCESS[section]
        if is_async and not is_remote:
            expected |= {"refresh"} if section == "Database" else set()
        if is_async:
            expected -= VALUES.get(section, set()) | ASYNC_LACKS.get(section, set())
            expected |= ASYNC_ONLY.get(section, set())
        elif is_remote:
            expected |= REMOTE_ONLY.get(section, set())
        assert public_names(value) == expected, type(value)


def test_every_public_name_has_a_docstring(database: protocols.Database, name: Name) -> None:
    for value in objects(database, name).values():
        for each in public_names(value):
            text = inspect.getdoc(inspect.getattr_static(type(value), each, None))
            is_method = callable(getattr(type(value), each, None))
            assert text or not is_method, f"{type(value).__name__}.{each}"


def test_reprs_are_short(database: protocols.Database, name: Name) -> None:
    topic = database.topic(name(), compaction="latest_by_tag")
    topic.append([1, 2], tag=["a", "b"])
    topic.group("readers").commit(1)
    others = [topic.scan(), topic.latest(), database.queue(name("q")).history(), topic.typed(int), database.channels]
    for value in (*objects(database, name).values(), *map(target, others), topic.groups()[0]):
        assert " object at 0x" not in repr(target(value)), type(value)
        assert "\n" not in repr(value)
        assert len(repr(target(value))) <= 120
    assert name() in repr(target(topic))


def test_membership_and_truth(database: protocols.Database, name: Name) -> None:
    topic = database.topic(name())
    assert bool(topic)  # a handle is true, also of a topic without records
    if "Async" in type(target(topic)).__name__:
        with pytest.raises(TypeError):
            1 in target(topic)  # noqa: B015  # there is nothing to await
        return
    topic.append(["a", "b", "c"])
    topic.delete(seqs=[2])
    assert [seq in topic for seq in (1, 2, 3, 4)] == [True, False, True, False]
    assert name() in database
    assert name("none") not in database
    for wrong in ("a", 0, 1.0, None):
        with pytest.raises(errors.BadInput, match="seq is a whole number"):
            wrong in topic  # noqa: B015


# ── objects as data ───────────────────────────────────────────────────────────────────────────────


@dataclass
class Order:
    sku: str
    qty: int
    price: float | None = None


class Item(msgspec.Struct):
    sku: str
    qty: int = 1


class Model(pydantic.BaseModel):
    sku: str
    qty: int = pydantic.Field(ge=0)


class Row(TypedDict):
    sku: str
    qty: int


def test_objects_are_stored_as_json_and_buffers_as_bytes(database: protocols.Database, name: Name) -> None:
    topic = database.topic(name())
    topic.append([Order("A", 1), Item("B"), Model(sku="C", qty=3), [Order("D", 4)]])
    topic.append([bytearray(b"x"), memoryview(b"yz")[1:]])
    assert [record.data for record in topic.read().records] == [
        {"sku": "A", "qty": 1, "price": None},
        {"sku": "B", "qty": 1},
        {"sku": "C", "qty": 3},
        [{"sku": "D", "qty": 4, "price": None}],
        b"x",
        b"z",
    ]
    for bad in (Order("A", 1, float("nan")), [Order("A", 1, float("inf"))], object()):
        with pytest.raises(errors.BadInput, match="nothing was written"):
            topic.append(bad)
    assert topic.count == 6


@pytest.mark.parametrize(
    ("kind", "good"),
    [
        (Order, Order("A", 1, 2.5)),
        (Item, Item("A", 2)),
        (Model, Model(sku="A", qty=1)),
        (Row, {"sku": "A", "qty": 1}),
        (dict[str, int], {"a": 1}),
    ],
)
def test_typed_topics_validate_and_return_objects(
    database: protocols.Database, name: Name, kind: type[Any], good: object
) -> None:
    topic = database.topic(name())
    typed = topic.typed(kind)
    assert typed.append([good, good], tag="t").seqs == range(1, 3)
    page = typed.read()
    assert isinstance(page, TypedPage)
    assert [(record.seq, record.data, record.tag) for record in page.records] == [(1, good, "t"), (2, good, "t")]
    assert (page.next_from_seq, page.caught_up, page.gap) == (2, True, None)
    assert [record.data for record in typed.follow(1, timeout=0) if isinstance(record, TypedRecord)] == [good]
    assert [record.data for record in typed] == [good, good]
    with pytest.raises(errors.BadInput, match=r"a record is not a .*nothing was written"):
        typed.append([good, {"sku": []}])
    topic.append("other")
    with pytest.raises(errors.BadInput, match=r"record 3 of .* is not a .*read it without the type"):
        typed.read()
    assert topic.count == 3


def test_a_type_that_cannot_be_validated_is_refused(database: protocols.Database, name: Name) -> None:
    class Plain:
        pass

    with pytest.raises(errors.BadInput, match="Plain is no type of records"):
        database.topic(name()).typed(Plain)
    with pytest.raises(errors.BadInput, match="a record is not a Model"):
        database.topic(name()).typed(Model).append(Model.model_construct(sku="A", qty=-1))
