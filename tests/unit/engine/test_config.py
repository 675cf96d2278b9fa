"""Settings of topics and of an engine: contract sections 1.7 and 1.13, field by field."""

from __future__ import annotations

import ast
import inspect
import json
import string
from dataclasses import FrozenInstanceError, fields
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidelog.engine import config
from tidelog.engine.config import Durability, EngineConfig, TopicConfig, check_dead_letter, check_topic_name
from tidelog.errors import BadInput

quick = settings(max_examples=300, deadline=None, database=None)

# Copied from the contract: the echo of a topic that was created with {}.
DEFAULTS = (
    b'{"type":"log","ttl_ms":0,"cap_records":0,"cap_bytes":0,"discard":"old","durable":false,"durability":"disk",'
    b'"priority":null,"auto_priority":true,"auto_create":true,"idempotency_window_ms":120000,"dedupe_node":true,'
    b'"lease_ms":30000,"claim_jitter_ms":0,"max_deliveries":0,"dead_letter":null,"leases_durable":false}'
)
COUNTS = [
    "ttl_ms",
    "cap_records",
    "cap_bytes",
    "idempotency_window_ms",
    "lease_ms",
    "claim_jitter_ms",
    "max_deliveries",
]
BOOLS = ["durable", "auto_priority", "auto_create", "dedupe_node", "leases_durable"]
U64_MAX = (1 << 64) - 1
I32 = 1 << 31


def test_a_config_shows_the_seventeen_keys_of_the_contract_in_their_order() -> None:
    assert TopicConfig().to_json() == TopicConfig.make({}).to_json() == DEFAULTS
    assert list(json.loads(DEFAULTS)) == list(config.KEYS)
    assert len(config.KEYS) == len(set(config.KEYS)) == 17
    assert {field.name for field in fields(TopicConfig)} == {*config.KEYS, *config.ADDED} - {"durable"}


GOOD: list[tuple[str, Any, Any]] = [
    ("type", "queue", "queue"),
    ("discard", "reject", "reject"),
    *(("durability", name, name) for name in ("ephemeral", "memory", "disk", "fsync")),
    *((name, value, value) for name in COUNTS[:4] for value in (0, 1, U64_MAX)),
    ("max_deliveries", U64_MAX, U64_MAX),
    ("lease_ms", 0, 100),
    ("lease_ms", 99, 100),
    ("lease_ms", 100, 100),
    ("lease_ms", 101, 101),
    ("lease_ms", 86_400_000, 86_400_000),
    ("lease_ms", 86_400_001, 86_400_000),
    ("lease_ms", U64_MAX, 86_400_000),
    ("claim_jitter_ms", 0, 0),
    ("claim_jitter_ms", 5_000, 5_000),
    ("claim_jitter_ms", 5_001, 5_000),
    *(("priority", value, value) for value in (None, 0, -1_001, 1_001, -I32, I32 - 1)),
    *((name, value, value) for name in BOOLS for value in (True, False)),
    *(("dead_letter", value, value) for value in (None, "d", "jobs.failed:v1_x-Y", "9" * 255)),
]


@pytest.mark.parametrize(("name", "value", "kept"), GOOD)
def test_a_good_value_is_kept_or_clamped_and_comes_back_from_its_bytes(name: str, value: Any, kept: Any) -> None:
    made = TopicConfig.make({name: value})
    assert getattr(made, name) == kept
    assert json.loads(made.to_json())[name] == kept
    assert TopicConfig.from_json(made.to_json()) == made
    untouched = set(config.KEYS) - {name} - {"durable", "durability"}
    assert all(getattr(made, other) == getattr(TopicConfig(), other) for other in untouched)


BAD: list[tuple[str, Any, str]] = [
    *(
        (name, value, f"{name} is .*whole number from 0")
        for name in COUNTS
        for value in (-1, 1.0, "1", None, True, [1])
    ),
    *((name, U64_MAX + 1, f"{name} is .*to {U64_MAX}") for name in COUNTS),
    ("cap_bytes", [1 << 99_999], "cap_bytes is a list"),
    *(("priority", value, "priority is") for value in (I32, -I32 - 1, 1.0, "1", True)),
    *((name, value, f"{name} is .*true or false") for name in BOOLS for value in (0, 1, "true", None, 1.0)),
    *(("type", value, "one of log, queue") for value in ("Log", "", "topic", 1, None, ["log"])),
    *(("discard", value, "one of old, reject") for value in ("new", "Old", None, True)),
    *(("durability", value, "one of ephemeral, memory, disk, fsync") for value in ("durable", "Fsync", "", 1, True)),
    *(("dead_letter", value, "dead_letter is") for value in ("", "-a", "a b", "a/b", "x" * 256, "a\n", 1, b"a", True)),
]


@pytest.mark.parametrize(("name", "value", "words"), BAD)
def test_a_bad_value_is_refused_with_a_message_on_every_path(name: str, value: Any, words: str) -> None:
    with pytest.raises(BadInput, match=words) as refused:
        TopicConfig.make({name: value})
    assert len(str(refused.value)) < 400
    with pytest.raises(BadInput, match=words):
        TopicConfig.make({name: value}, base=TopicConfig(type="queue"))
    if name != "durable":
        with pytest.raises(BadInput, match=words):
            TopicConfig(**{name: value})


def test_a_number_too_long_to_print_is_refused_like_any_other() -> None:
    with pytest.raises(BadInput, match="ttl_ms is a number of 100000 bits"):
        TopicConfig.make({"ttl_ms": 1 << 99_999})


def test_every_field_is_tried_with_good_and_bad_values() -> None:
    assert {name for name, *_ in GOOD} == {name for name, *_ in BAD} == set(config.KEYS)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("ttl", "ttl_ms"),
        ("TTL_MS", "ttl_ms"),
        ("cap_record", "cap_records"),
        ("durabilty", "durability"),
        ("leaseMs", "lease_ms"),
        ("deadletter", "dead_letter"),
        ("durable_", "durable"),
        ("DISCARD", "discard"),
    ],
)
def test_an_unknown_field_is_refused_with_its_name_and_the_nearest_known_one(name: str, nearest: str) -> None:
    with pytest.raises(BadInput, match=f"'{name}'; the nearest is {nearest}$"):
        TopicConfig.make({"ttl_ms": 1, name: 1})


@pytest.mark.parametrize("name", ["", "🜁", "x" * 1_000_000, "\ud800", 7, None, b"ttl_ms"], ids=range(7))
def test_whatever_was_sent_as_a_name_the_refusal_stays_short(name: Any) -> None:
    with pytest.raises(BadInput, match="the nearest is") as refused:
        TopicConfig.make({name: 1})
    assert len(str(refused.value)) < 200


ALIAS: list[tuple[dict[str, Any], str]] = [
    ({}, "disk"),
    ({"durable": True}, "fsync"),
    ({"durable": False}, "disk"),
    ({"durability": None}, "disk"),
    ({"durability": None, "durable": True}, "fsync"),
    ({"durable": True, "durability": None}, "fsync"),
    ({"durability": "memory", "durable": True}, "memory"),
    ({"durable": True, "durability": "disk"}, "disk"),
    ({"durability": "fsync", "durable": False}, "fsync"),
    ({"durability": "ephemeral"}, "ephemeral"),
]


@pytest.mark.parametrize(("given_fields", "resolved"), ALIAS)
def test_durable_is_an_alias_that_is_heard_only_where_durability_is_silent(
    given_fields: dict[str, Any], resolved: str
) -> None:
    for made in (TopicConfig.make(given_fields), TopicConfig.from_json(json.dumps(given_fields).encode())):
        assert made.durability == resolved
        shown = json.loads(made.to_json())
        assert (shown["durability"], shown["durable"]) == (resolved, resolved == "fsync")
        assert made.durable is (resolved == "fsync")


@pytest.mark.parametrize("kept", get_args(Durability))
def test_the_class_of_the_base_stays_unless_something_is_said(kept: Durability) -> None:
    base = TopicConfig(durability=kept)
    assert TopicConfig.make({"ttl_ms": 5}, base=base).durability == kept
    assert TopicConfig.make({"durability": None}, base=base).durability == kept
    assert TopicConfig.make({"durable": True}, base=base).durability == "fsync"
    assert TopicConfig.make({"durable": False}, base=base).durability == "disk"
    assert TopicConfig.make({"durability": "memory", "durable": True}, base=base).durability == "memory"


def test_fields_override_the_base_and_the_base_is_unchanged() -> None:
    base = TopicConfig(type="queue", ttl_ms=7, dead_letter="dead", priority=3)
    made = TopicConfig.make({"ttl_ms": 8, "priority": None}, base=base)
    assert made == TopicConfig(type="queue", ttl_ms=8, dead_letter="dead")
    assert base == TopicConfig(type="queue", ttl_ms=7, dead_letter="dead", priority=3)
    given_fields = {"durable": True}
    TopicConfig.make(given_fields)
    assert given_fields == {"durable": True}, "the caller's own are not touched"
    with pytest.raises(FrozenInstanceError):
        base.ttl_ms = 9  # type: ignore[misc]


topic_configs = st.builds(
    TopicConfig,
    type=st.sampled_from(["log", "queue"]),
    discard=st.sampled_from(["old", "reject"]),
    durability=st.sampled_from(["ephemeral", "memory", "disk", "fsync"]),
    priority=st.none() | st.integers(-I32, I32 - 1),
    dead_letter=st.none() | st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,254}", fullmatch=True),
    **{name: st.integers(0, U64_MAX) for name in COUNTS},
    **{name: st.booleans() for name in BOOLS if name != "durable"},
)


@quick
@given(topic_configs)
def test_every_config_comes_back_from_its_bytes_and_the_same_one_gives_the_same(made: TopicConfig) -> None:
    text = made.to_json()
    assert TopicConfig.from_json(text) == made
    assert TopicConfig.from_json(text).to_json() == text
    assert list(json.loads(text)) == list(config.KEYS)
    assert text == json.dumps(json.loads(text), separators=(",", ":")).encode(), "compact"
    assert TopicConfig.make(json.loads(text), base=TopicConfig(durability="memory", ttl_ms=3)) == made


def test_keys_of_a_newer_version_are_passed_over_and_known_ones_are_not() -> None:
    assert TopicConfig.from_json(b'{"ttl_ms":5,"shiny":{"new":[1,2]},"ttl":-1}') == TopicConfig(ttl_ms=5)
    assert TopicConfig.from_json(b"{}") == TopicConfig()
    for text in (b'{"shiny":1,"ttl_ms":-5}', b'{"ttl_ms":5.0}', b'{"discard":null}', b'{"durable":null}'):
        with pytest.raises(BadInput, match="it must be"):
            TopicConfig.from_json(text)


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"{", b"null", b"[]", b"7", b'"log"', b"{}x", b"\xff", b'{"ttl_ms":NaN}', b"\xef\xbb\xbf{}"),
        *(b"[" * 100_000, b'{"ttl_ms":' + b"9" * 5_000 + b"}"),
    ],
    ids=range(12),
)
def test_bytes_that_are_no_config_are_refused_in_words(text: bytes) -> None:
    """G58: whatever the bytes, the error is a typed one."""
    with pytest.raises(BadInput, match="a topic's config is") as refused:
        TopicConfig.from_json(text)
    assert len(str(refused.value)) < 300


def test_a_queue_is_not_its_own_dead_letter_but_a_log_may_name_itself() -> None:
    queue = TopicConfig(type="queue", dead_letter="jobs")
    with pytest.raises(BadInput, match="dead_letter is 'jobs', the queue itself"):
        check_dead_letter("jobs", queue)
    check_dead_letter("Jobs", queue)
    check_dead_letter("jobs", TopicConfig(dead_letter="jobs"))
    check_dead_letter("jobs", TopicConfig(type="queue"))


# Names -----------------------------------------------------------------------------------------------

_FIRST = string.ascii_letters + string.digits
_REST = _FIRST + "._:-"


@pytest.mark.parametrize("name", ["a", "9", "Z" * 255, "a.b_c:d-e", "A-", "0:"])
def test_a_name_the_contract_allows_is_let_pass(name: str) -> None:
    check_topic_name(name)


@pytest.mark.parametrize(
    "name",
    ["", "x" * 256, ".a", "_a", ":a", "-a", "a b", "a/b", "a>b", "a\n", "\na", "ä", "a٣", "a\0", "..", 5, None, b"a"],
)
def test_a_name_the_contract_forbids_is_refused_in_words(name: Any) -> None:
    with pytest.raises(BadInput, match="cannot name a topic") as refused:
        check_topic_name(name)
    assert len(str(refused.value)) < 350


@quick
@given(st.text(st.sampled_from([*_REST, "/", " ", "ä", "\n", "*"]), max_size=6))
def test_a_name_is_judged_letter_by_letter(name: str) -> None:
    allowed = bool(name) and name[0] in _FIRST and all(letter in _REST for letter in name)
    try:
        check_topic_name(name)
    except BadInput:
        assert not allowed
    else:
        assert allowed


# The engine ------------------------------------------------------------------------------------------

MIB = 1 << 20
# Field: default, least, most.
LIMITS: dict[str, tuple[int | None, int, int]] = {
    "wal_shards": (None, 1, 100),
    "wal_file_bytes": (64 * MIB, 1, 1 << 62),
    "checkpoint_bytes": (64 * MIB, 1, 1 << 62),
    "checkpoint_ms": (60_000, 1, 1 << 62),
    "sync_interval_ms": (50, 1, 1 << 62),
    "segment_events_max": (10_000, 1, (1 << 32) - 1),
    "segment_bytes_max": (64 * MIB, 1, (1 << 31) - 1),
    "segment_age_ms_max": (3_600_000, 0, 1 << 62),
    "record_bytes_max": (MIB, 1, 1 << 30),
    "batch_records_max": (10_000, 1, (1 << 32) - 1),
    "meta_bytes_max": (16_384, 0, 1 << 30),
    "meta_keys_max": (64, 0, 1 << 62),
    "tag_bytes_max": (256, 0, 65_535),
    "node_bytes_max": (128, 0, 65_535),
    "topics_max": (100_000, 0, 1 << 62),
    "total_bytes_max": (0, 0, 1 << 62),
    "groups_max": (1_000, 0, 1 << 62),
    "ledger_records": (1_000_000, 0, 1 << 62),
    "head_reserve": (256, 1, 1 << 32),
    "maps_max": (256, 1, 1 << 62),
    "tags_cache_bytes": (32 * MIB, 0, 1 << 62),
    "key_index_bytes": (128 * MIB, 1 << 10, 1 << 62),
    "compaction_interval_ms": (15_000, 1, 1 << 62),
    "compaction_bytes_per_s": (64 * MIB, 0, 1 << 62),
    "queue_max": (4_096, 1, 1 << 62),
    "queue_history_records": (100_000, 0, 1 << 62),
    "routers_max": (10_000, 0, 1 << 62),
    "rewrite_dead_percent": (50, 0, 100),
    "rewrite_dead_bytes_min": (256 << 10, 0, 1 << 62),
    "rewrite_bytes_per_second": (32 * MIB, 0, 1 << 62),
    "hot_retain_segments": (4, 0, 1 << 62),
    "hot_retain_bytes": (0, 0, 1 << 62),
    "cold_rate_bytes": (64 * MIB, 0, 1 << 62),
    "cold_cache_bytes": (64 * MIB, 0, 1 << 62),
    "cold_timeout_ms": (30_000, 1, 1 << 62),
    "cold_threads": (4, 1, 256),
}


def test_the_engine_has_these_settings_and_defaults() -> None:
    made = EngineConfig()
    assert {field.name: getattr(made, field.name) for field in fields(EngineConfig)} == {
        **{name: default for name, (default, _, _) in LIMITS.items()},
        "cold": None,
        "cold_compression": "none",
    }
    for bad in ({"cold": ""}, {"cold": 7}, {"cold_compression": "gzip"}, {"cold_compression": None}):
        with pytest.raises(BadInput, match=r"^cold"):
            EngineConfig(**bad)
    assert "secret" not in repr(EngineConfig(cold="s3://key:secret@bucket/x"))
    with pytest.raises(FrozenInstanceError):
        made.queue_max = 1  # type: ignore[misc]


@pytest.mark.parametrize("name", LIMITS)
def test_a_limit_of_the_engine_is_held_to_what_makes_sense(name: str) -> None:
    _, least, most = LIMITS[name]
    for value in (least, least + 1, most):
        given: dict[str, Any] = {name: value}
        assert getattr(EngineConfig(**given), name) == value
    beyond = [most + 1] if most < 1 << 62 else [1 << 63]
    for bad in (least - 1, -5, *beyond, 1.5, True, "7"):
        settled: dict[str, Any] = {name: bad}
        with pytest.raises(BadInput, match=f"^{name} is .*whole number from {least} to"):
            EngineConfig(**settled)


def test_only_the_number_of_shards_may_be_left_open() -> None:
    for name in set(LIMITS) - {"wal_shards"}:
        with pytest.raises(BadInput, match=name):
            EngineConfig(**{name: None})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "processors", "shards"),
    [(None, 1, 1), (None, 2, 2), (None, 8, 8), (None, 64, 8), (None, 0, 1), (3, 64, 3), (16, 1, 16)],
)
def test_shards_follow_the_processors_up_to_eight_unless_set(asked: int | None, processors: int, shards: int) -> None:
    assert EngineConfig(wal_shards=asked).shards(processors) == shards


def test_every_setting_says_what_it_is_for() -> None:
    """Method: the source, because a string after a field is not kept at run time."""
    tree = ast.parse(inspect.getsource(config))
    for made in (TopicConfig, EngineConfig):
        (node,) = (it for it in tree.body if isinstance(it, ast.ClassDef) and it.name == made.__name__)
        for field, said in zip(node.body, node.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign):
                assert isinstance(said, ast.Expr), ast.unparse(field)
                assert isinstance(said.value, ast.Constant), ast.unparse(field)
