"""Arguments of wrong types: our error or a result, never one of Python's from the depths."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import islice
from types import GeneratorType
from typing import Any

from tidelog import errors, protocols

Name = Callable[..., str]
WRONG: tuple[object, ...] = (object(), 5, "x", b"x", None, [], {}, -1, 1.5, True, "\ud800", 1 << 80)
# Arguments that work. Each is replaced by every wrong value in turn, the others stay.
TOPIC: dict[str, dict[str, object]] = {
    "append": {"records": [1, 2], "tag": "t", "node": "n", "meta": {"a": 1}, "key": "k"},
    "append_stream": {"chunks": [b"x"], "tag": "t", "node": "n", "meta": {"a": 1}, "key": "s"},
    "append_arrow": {"table": None, "key": "a"},
    "delete": {"match": "t", "before_seq": 1, "seqs": None},
    "redrive": {"to": None, "match": "none", "rate": 1.0, "limit": 1},
    "simulate_retention": {"cap_records": 1, "cap_bytes": 1, "ttl_ms": 1},
    "read": {"from_seq": 0, "limit": 1, "node": "n", "bytes_max": 10, "timeout": 0, "strong": False},
    "follow": {"from_seq": 0, "timeout": 0, "node": "n", "on_gap": "skip", "strong": False},
    "scan": {"from_seq": 0, "to_seq": 1, "limit": 5, "columns": ["seq"]},
    "to_arrow": {
        "from_seq": 0,
        "to_seq": 1,
        "since": None,
        "until": None,
        "columns": ["seq"],
        "filter": None,
        "node": "n",
        "strong": False,
    },
    "open_record": {"seq": 1, "strong": False},
    "seek": {"ts_ms": 5},
    "gaps": {"from_ms": 5, "limit": 1},
    "group": {"name": "g"},
    "typed": {"kind": int},
    "segment": {"base": 1, "generation": None},
    "erase": {"match": "none", "seqs": None},
    "producer_batches": {"writer": "w"},
}
QUEUE: dict[str, dict[str, object]] = {
    "put": {"records": [1], "tag": "t", "node": "n", "meta": {"a": 1}, "key": "k", "delay_ms": 0, "priority": 1},
    "claim": {"node": "w", "most": 1, "lease_ms": 1000},
    "ack": {"node": "w", "seqs": [1], "lease_ids": [1]},
    "nack": {"node": "w", "seqs": [1], "lease_ids": [1], "delay_ms": 0, "error": "why"},
    "extend": {"node": "w", "seqs": [1], "lease_ids": [1], "lease_ms": 5000},
}
GROUP: dict[str, dict[str, object]] = {
    "fetch": {"limit": 1, "timeout": 0, "node": "n"},
    "commit": {"seq": 0, "expect": None},
    "would_commit": {"seq": 0, "expect": None},
    "reset": {"to": "earliest"},
    "preview": {"to": "earliest"},
    "hold": {"hold_bytes": 0},
    "begin": {"at": "earliest", "hold_bytes": 0},
    "claim": {"consumer": "c", "limit": 1, "lease_ms": 100, "timeout": 0},
    "ack": {"consumer": "c", "lease_id": 1},
    "release": {"consumer": "c", "lease_id": 1},
    "extend": {"consumer": "c", "lease_id": 1, "lease_ms": 100},
    "leave": {"consumer": "c"},
}
DATABASE: dict[str, dict[str, object]] = {
    "topic": {"name": "wrong-types-a", "create": False},
    "find": {"name": "wrong-types-a"},
    "configure": {"name": "wrong-types-b", "fields": {}},
    "drop": {"name": "wrong-types-none", "if_empty": False},
    "topics": {"prefix": "wrong-types-none", "after": "", "limit": 1},
    "gaps": {"topic": "a", "from_ms": 5, "limit": 1, "after_seq": 0},
    "find_router": {"name": "r"},
    "routers": {"prefix": "", "source": None, "dest": None},
    "drop_router": {"name": "wrong-types-none"},
    "channel": {"name": "!wrong@localhost", "user": "ann@localhost"},
}
CHANNEL: dict[str, dict[str, object]] = {
    "configure": {"max_clients": 5},
    "members": {"page": 1, "page_size": 10},
    "acl": {"kind": "read"},
    "invite": {"user": "bob@localhost"},
    "kick": {"user": "bob@localhost"},
    "publish": {"payload": b"x", "qos": 1},
    "publish_many": {"payloads": [b"x"], "qos": 1},
    "history": {"first": None, "last": None, "newest": 1, "since_ms": None, "until_ms": None, "limit": 1},
}


def calls(table: dict[str, dict[str, object]]) -> Iterator[tuple[str, dict[str, object]]]:
    for method, good in table.items():
        for name in good:
            for wrong in WRONG:
                if name == "timeout" and wrong in (None, 5, 1.5, True, 1 << 80):
                    continue  # would wait
                yield method, {**good, name: wrong}


def consume(found: Any) -> None:
    if isinstance(found, GeneratorType) or hasattr(found, "__next__"):
        list(islice(found, 2))
    elif hasattr(found, "iter_arrow_batches"):
        list(islice(found.iter_arrow_batches(), 2))


def complaints(target: Any, table: dict[str, dict[str, object]]) -> Iterator[str]:
    for method, given in calls(table):
        named = {"topic": "name", "queue": "name"}.get(method, "") if target.__class__.__name__ != "Awaited" else ""
        try:
            first = (given[named],) if named else ()
            rest = {key: value for key, value in given.items() if key != named}
            consume(getattr(target, method)(*first, **rest))
        except errors.Error:
            pass
        except Exception as error:
            if not isinstance(error, Future | asyncio.TimeoutError):
                yield f"{method}({given}): {type(error).__name__}: {error!s:.100}"


def test_wrong_types_raise_our_errors(database: protocols.Database, name: Name) -> None:
    topic, queue = database.topic(name()), database.queue(name("q"))
    topic.append([1, 2], tag="t")
    channel = database.channel(f"!{name()}@localhost", user="ann@localhost").join(persist=True)
    found = [
        *complaints(topic, TOPIC),
        *complaints(queue, QUEUE),
        *complaints(topic.group("g"), GROUP),
        *complaints(database, DATABASE),
        *complaints(channel, CHANNEL),
    ]
    assert not found, "\n" + "\n".join(found)
    assert topic.head_seq < 200
