"""Every option is checked, none is ignored, and the message names the value that was wrong."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from tidelog.errors import BadInput
from tidelog.spark import options as reading
from tidelog.spark import sink as writing
from tidelog.spark.filters import RecordFilter, parse_filter
from tidelog.spark.options import EARLIEST, LATEST, OPTION_NAMES, Bound, Options

BASE = {"path": "data", "subscribe": "orders"}


def made(**given: str) -> Options:
    return reading.parse_options({**BASE, **given})


def test_what_is_not_given_has_its_default() -> None:
    options = made()
    assert (options.on_gap, options.payload, options.verify, options.codec) == ("fail", "bytes", True, "tide")
    assert (options.start, options.end, options.columns, options.where) == (None, None, None, RecordFilter())
    assert options.split_bytes == 32 << 20


def test_names_are_taken_in_any_case_and_values_are_read() -> None:
    options = made(
        SPLITBYTES="64m", maxbytespertrigger="1k", minOffsetsPerTrigger="5", maxTriggerDelay="2m", COLUMNS="seq, data"
    )
    assert (options.split_bytes, options.bytes_max, options.rows_min, options.max_trigger_delay_ms) == (
        64 << 20,
        1024,
        5,
        120_000,
    )
    assert options.columns == ("seq", "data")


@pytest.mark.parametrize(
    ("value", "bound"),
    [
        ("earliest", Bound(EARLIEST)),
        ("LATEST", Bound(LATEST)),
        ('{"b": -1, "a": 7}', Bound(seqs=(("a", 7), ("b", LATEST)))),
        ('{"a": {"epoch": 3, "seq": 9}}', Bound(seqs=(("a", 9),))),
        ("group:shop", Bound(group="shop")),
    ],
)
def test_a_start_is_one_of_four_kinds(value: str, bound: Bound) -> None:
    assert made(startingOffsets=value).start == bound


def test_times_are_milliseconds_or_iso() -> None:
    assert made(startingTimestamp="1700000000123").start == Bound(time_ms=1_700_000_000_123)
    assert made(endingTimestamp="2023-11-14T22:13:20.123Z").end == Bound(time_ms=1_700_000_000_123)
    assert made(endingTimestamp="2023-11-14T23:13:20+01:00").end == Bound(time_ms=1_700_000_000_000)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("path", " "),
        ("server", "ftp://x"),
        ("server", "localhost:4000"),
        ("server", "http://x:99999"),
        ("codec", "kafka"),
        ("subscribe", "a,,b"),
        ("subscribe", "a,a"),
        ("subscribePattern", "("),
        ("startingOffsets", "soonest"),
        ("startingOffsets", "[1]"),
        ("startingOffsets", "{}"),
        ("startingOffsets", '{"a": "7"}'),
        ("startingOffsets", '{"a": -3}'),
        ("startingOffsets", '{"a": true}'),
        ("startingOffsets", "group:"),
        ("endingOffsets", '{"a": 1.5}'),
        ("startingTimestamp", "yesterday"),
        ("startingTimestamp", "2026-01-01T00:00:00"),
        ("onTimestampMiss", "next"),
        ("maxOffsetsPerTrigger", "0"),
        ("maxOffsetsPerTrigger", "-5"),
        ("maxBytesPerTrigger", "1.5g"),
        ("maxTriggerDelay", "5"),
        ("minPartitions", "many"),
        ("splitBytes", "0"),
        ("failOnDataLoss", "yes"),
        ("onGap", "ignore"),
        ("includeGaps", "1"),
        ("columns", "seq,,"),
        ("verify", "full"),
        ("payload", "xml"),
    ],
)
def test_a_value_that_cannot_be_meant_is_named(name: str, value: str) -> None:
    with pytest.raises(BadInput) as caught:
        reading.parse_options(
            {**({} if name == "server" else BASE), name: value, "maxOffsetsPerTrigger": "1"} | {name: value}
        )
    said = str(caught.value)
    assert name in said
    assert repr(value) in said
    assert "nothing was read" in said


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"path": "a", "server": "http://x", "subscribe": "t"}, "both are given"),
        ({"subscribe": "t"}, "neither is given"),
        ({"path": "a"}, "no topic is named"),
        ({**BASE, "subscribePattern": "x"}, "both are given"),
        ({**BASE, "key": "k"}, "it is for a server"),
        ({"server": "http://x", "subscribe": "t", "codec": "rustlog"}, "a server has topics"),
        ({**BASE, "startingOffsets": "earliest", "startingTimestamp": "1"}, "both are given"),
        ({**BASE, "endingOffsets": "earliest"}, "there is nothing before it"),
        ({**BASE, "consistency": "sometimes"}, "option consistency"),
        ({"path": "/x", "codec": "rustlog", "consistency": "strong"}, "it is for topics"),
        ({**BASE, "failOnDataLoss": "true", "onGap": "skip"}, "contradict each other"),
        ({**BASE, "failOnDataLoss": "false", "onGap": "fail"}, "contradict each other"),
        ({**BASE, "includeGaps": "true"}, "with onGap=emit and only then"),
        ({**BASE, "includeGaps": "false", "onGap": "emit"}, "with onGap=emit and only then"),
        ({**BASE, "columns": "seq,dta"}, "did you mean data"),
        ({**BASE, "columns": "gap"}, "there is no column 'gap'"),
        ({**BASE, "maxTriggerDelay": "5s"}, "give both"),
    ],
)
def test_options_that_contradict_each_other_are_refused(given: dict[str, str], why: str) -> None:
    with pytest.raises(BadInput, match=why):
        reading.parse_options(given)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("subscirbe", "subscribe"), ("startingOffset", "startingOffsets"), ("verfy", "verify")],
)
def test_an_unknown_option_is_refused_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(BadInput, match=f"no option '{name}'.*did you mean ") as caught:
        made(**{name: "x"})
    assert str(caught.value).endswith(f"did you mean {nearest}?")


@pytest.mark.parametrize("name", ["maxOffsetsPerTrigger", "maxBytesPerTrigger", "minOffsetsPerTrigger", "group"])
def test_what_only_a_stream_can_do_is_refused_for_a_batch(name: str) -> None:
    options = made(**{name: "5"})
    with pytest.raises(BadInput, match=f"{name}: a batch reads its range once"):
        options.for_batch()
    assert options.for_stream() is options


@pytest.mark.parametrize(("name", "value"), [("endingOffsets", "latest"), ("endingTimestamp", "5")])
def test_an_end_is_refused_for_a_stream(name: str, value: str) -> None:
    options = made(**{name: value})
    with pytest.raises(BadInput, match="a stream has no end"):
        options.for_stream()
    assert options.for_batch() is options


def test_options_travel_and_do_not_show_the_key() -> None:
    options = reading.parse_options({"server": "http://h:1/", "key": "s3cret", "subscribe": "a", "where": "seq > 5"})
    assert pickle.loads(pickle.dumps(options)) == options
    assert "s3cret" not in repr(options)
    assert options.location.address == "http://h:1"


def test_every_option_does_something() -> None:
    """No option is read and then forgotten: a value other than the default changes what a reader is told."""
    other: dict[str, Any] = {
        "path": "b",
        "codec": "rustlog",
        "subscribe": "b",
        "startingOffsets": "latest",
        "endingOffsets": '{"orders": 9}',
        "startingTimestamp": "5",
        "endingTimestamp": "5",
        "onTimestampMiss": "latest",
        "group": "g",
        "maxOffsetsPerTrigger": "1",
        "maxBytesPerTrigger": "1",
        "minOffsetsPerTrigger": "1",
        "minPartitions": "1",
        "splitBytes": "1",
        "failOnDataLoss": "false",
        "onGap": "skip",
        "columns": "seq",
        "where": "seq > 1",
        "verify": "false",
        "consistency": "strong",
        "payload": "json",
    }
    for name, value in other.items():
        assert reading.parse_options({**BASE, name: value}) != made(), name
    rest = {"server", "key", "subscribePattern", "maxTriggerDelay", "includeGaps", "retryTimeout"}
    log_tables = {"history", "gaps"}  # tests/unit/spark/test_log_tables.py
    assert {*other, *rest, *log_tables} == set(OPTION_NAMES)
    assert made(minOffsetsPerTrigger="1", maxTriggerDelay="1s") != made(minOffsetsPerTrigger="1")


def test_how_long_a_server_is_waited_for() -> None:
    server = {"server": "http://h:1", "subscribe": "a"}
    for given, retry_ms in (({}, 120_000), ({"retryTimeout": "0s"}, 0), ({"retryTimeout": "5m"}, 300_000)):
        assert reading.parse_options({**server, **given}).retry_ms == retry_ms
        assert writing.parse_sink_options({"server": "http://h:1", "topic": "a", **given}).retry_ms == retry_ms
    with pytest.raises(BadInput, match=r"retryTimeout is 'soon', .* nothing was read"):
        reading.parse_options({**server, "retryTimeout": "soon"})
    with pytest.raises(BadInput, match=r"retryTimeout is 'soon', .* nothing was written"):
        writing.parse_sink_options({"server": "http://h:1", "topic": "a", "retryTimeout": "soon"})
    with pytest.raises(BadInput, match="it is for a server, and path is given; nothing was read"):
        made(retryTimeout="5s")
    with pytest.raises(BadInput, match="it is for a server, and path is given; nothing was written"):
        writing.parse_sink_options({"path": "d", "topic": "a", "retryTimeout": "5s"})


# ── conditions ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("", 1),
        ("seq", 4),
        ("seq >", 6),
        ("seq > 'a'", 7),
        ("seq > 5 or tag = 'a'", 9),
        ("data = 'x'", 1),
        ("tag = 5", 7),
        ("ts > 'soon'", 6),
        ("ts > '2026-01-01'", 6),
        ("tag not = 'a'", 9),
        ("seq in (1, )", 12),
        ("seq like '1%'", 5),
        ("seq > 5;", 8),
    ],
)
def test_a_condition_that_makes_no_sense_says_where(text: str, at: int) -> None:
    with pytest.raises(BadInput, match=rf"at character {at};"):
        parse_filter("where", text)


def test_a_wildcard_inside_is_refused() -> None:
    with pytest.raises(BadInput, match="has a wildcard inside"):
        parse_filter("where", "tag like 'a%b'")


@pytest.mark.parametrize(
    ("text", "path"),
    [("file:///lake/a%20b/", "/lake/a b"), ("file:/lake", "/lake"), ("FILE://localhost/lake", "/lake"), ("a:b", "a:b")],
)
def test_a_path_is_the_same_to_readers_and_writers(text: str, path: str) -> None:
    """`file:/lake`, as Hadoop writes it, was a directory `file:` of the working directory."""
    found = reading.parse_options({"path": text, "subscribe": "orders"})
    assert (found.location.address, found.location.is_object_store) == (path, False)
    assert writing.parse_sink_options({"path": text, "topic": "copy"}).location.address == path


@pytest.mark.parametrize(
    "text", ["~/data", "C:\\data", "c:/data", "file://host/data", "file:data", "http://host:1/data"]
)
def test_what_is_no_path_is_refused_by_readers_and_writers(text: str) -> None:
    with pytest.raises(BadInput, match=r"^option path is .*nothing was read"):
        reading.parse_options({"path": text, "subscribe": "orders"})
    with pytest.raises(BadInput, match=r"^option path is .*nothing was written"):
        writing.parse_sink_options({"path": text, "topic": "copy"})


def test_a_store_is_read_also_without_slashes() -> None:
    found = reading.parse_options({"path": "s3:bucket/data", "subscribe": "orders"})
    assert found.location.is_object_store, "it is refused by the store, and not read as a directory"
