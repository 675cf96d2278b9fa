"""Every public name of the objects of `tidelog.open` has an example in its docstring, and the example runs."""

from __future__ import annotations

import doctest
import inspect
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from tests.unit.test_public_api import documented_names

import tidelog
from tidelog.testing import ManualClock, SimDisk

CLASSES = {
    "Database": tidelog.Database,
    "Topic": tidelog.Topic,
    "Queue": tidelog.Queue,
    "Channel": tidelog.Channel,
    "Group": tidelog.Group,
}
# Attributes of instances, which have no docstrings of their own.
PLAIN = {("Queue", "topic"), ("Channel", "name"), ("Channel", "user"), ("Group", "name")}
METHODS = sorted(
    (section, name) for section in CLASSES for name in documented_names(section) if (section, name) not in PLAIN
)


@pytest.fixture
def names() -> Iterator[dict[str, Any]]:
    """What the examples use: a directory with three orders, two mails and two channels."""
    disk, clock = SimDisk(), ManualClock()
    log = tidelog.open("data", disk=disk, clock=clock, threads=False, wal_file_bytes=1 << 14)
    orders = log.topic("orders")
    orders.append([{"sku": "A"}, {"sku": "B"}, {"sku": "C"}], tag="order-7")
    log.topic("mails-dead")
    mails = log.queue("mails", dead_letter="mails-dead")
    mails.put(["hello", "again"])
    support = log.channel("!support@example.org", user="ann@example.org").join(persist=True)
    yield {
        "tidelog": tidelog,
        "disk": disk,
        "clock": clock,
        "log": log,
        "orders": orders,
        "mails": mails,
        "readers": orders.group("readers"),
        "support": support,
        "bob": log.channel("!support@example.org", user="bob@example.org"),
        "tasks": log.channel("!tasks@example.org", user="ann@example.org").join(type="fifo", persist=True),
        "pa": pa,
        "pd": pd,
        "pl": pl,
        "datetime": datetime,
        "timedelta": timedelta,
        "timezone": timezone,
        "threading": threading,
        "dataclass": dataclass,
        "UTC": UTC,
    }
    log.close()


@pytest.mark.parametrize(("section", "name"), METHODS)
def test_the_example_of_a_docstring_runs(section: str, name: str, names: dict[str, Any]) -> None:
    text = inspect.getdoc(inspect.getattr_static(CLASSES[section], name)) or ""
    test = doctest.DocTestParser().get_doctest(text, names, f"{section}.{name}", None, None)
    assert test.examples, f"{section}.{name} has no example"
    report: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(test, out=report.append)
    assert not result.failed, "".join(report)


def test_an_example_that_is_wrong_is_reported() -> None:
    test = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "planted", None, None)
    assert doctest.DocTestRunner(verbose=False).run(test, out=lambda _: None).failed
