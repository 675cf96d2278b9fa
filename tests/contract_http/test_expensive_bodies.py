"""Bodies of JSON that are dear to look at, over HTTP; see also `tests/regressions/test_costly_json.py`."""

from __future__ import annotations

import sys
from types import FrameType

import pytest

from tests.contract_http.api import Api, expect_success, topic_path
from tests.contract_http.client import JSON
from tests.contract_http.server import Server
from tidelog import api_types
from tidelog.client import Client
from tidelog.client.database import RemoteQueue
from tidelog.server.handlers import write as writing

MIB = 1 << 20


def test_a_large_body_is_looked_at_in_a_thread(api: Api, topic: str) -> None:
    """Its answer is what it would be on the loop."""
    api.write(topic, 0)
    size = writing.BLOCKING_PARSE_BYTES
    for body in (
        b'{"records":[{"data":"' + b"x" * size + b'"},{"data":2}]}',
        b'{"records":[{"data": "' + b"\\u0061" * (size // 6 + 9) + b'","tag":"t","meta":{"a":1}},{"data":2}]}',
    ):
        reply = api.request("POST", topic_path(topic), body, [JSON])
        assert (reply.status, reply.json()["count"]) == (200, 2)
    made = api.request("POST", topic_path(topic + "-new"), body, [JSON])
    assert (made.status, made.json()["created"]) == (201, True)
    wrong = api.request("POST", topic_path(topic), body, [("Content-Type", "text/plain")])
    assert wrong.status == 415
    cut = api.request("POST", topic_path(topic), body[:-1], [JSON])
    assert cut.json()["error"]["code"] == "invalid_request"


def test_what_is_no_write_has_a_small_body(api: Api, topic: str) -> None:
    api.write(topic, 0)
    body = b'{"match":[' + b"[]," * (2 * MIB) + b"1]}"
    reply = api.request("POST", topic_path(topic, "/delete"), body, [JSON])
    assert reply.status == 413


def test_other_threads_run_between_the_records_of_a_large_body() -> None:
    """One compiled call for 60 MiB held the interpreter for 0.15 to 0.35 s. Method: the interpreter can change threads
    where Python code is called, which is counted."""
    body = b'{"records":[%b]}' % b",".join([b'{"data":[1],"tag":"t","meta":{}}'] * 1_000)
    calls = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code is api_types.LargeRecord.__post_init__.__code__

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        found = api_types.decode_body(api_types.json_decoder(api_types.LargeWrite), body)
    finally:
        sys.setprofile(before)
    assert calls == len(found.records) == 1_000


@pytest.mark.parametrize("more", [b"", b',"tag":"t"'])
def test_a_body_over_the_size_of_one_call_is_written_like_a_smaller_one(api: Api, topic: str, more: bytes) -> None:
    records = [b'{"data":{"n":%d, "x":"%b"}%b}' % (number, b"x" * 1_000, more) for number in range(3_000)]
    api.write(topic, 0)
    for count in (3_000, 1_000):
        body = b'{"records":[%b]}' % b",".join(records[:count])
        assert (len(body) > writing._ONE_CALL_BYTES) == (count == 3_000)
        reply = api.request("POST", topic_path(topic), body, [JSON])
        assert (reply.status, reply.json()["count"]) == (200, count)
    large, small = (api.diff(topic, from_seq=seq, limit=100)["records"] for seq in (1, 3_001))
    told = [[(record["data"], record.get("$tag")) for record in page] for page in (large, small)]
    assert told[0] == told[1]
    assert len(told[0]) == 100


def test_a_config_is_small(api: Api, topic: str) -> None:
    fields = b",".join(b'"durabilitz%d":1' % number for number in range(5_000))
    for body in (b"{" + fields + b"}", b'{"x":"' + b"x" * 65_536 + b'"}'):
        reply = api.request("PUT", topic_path(topic), body, [JSON])
        assert (reply.status, reply.json()["error"]["code"]) == (400, "invalid_request")


@pytest.mark.parametrize("key", [b"records", rb"r\u0065cords"])
def test_far_too_many_records_are_refused_before_they_are_decoded(api: Api, topic: str, key: bytes) -> None:
    """Five million records in 60 MiB took 980 MiB and the interpreter for 1.6 s."""
    api.write(topic, 0)
    body = b'{"%b":[%b]}' % (key, b",".join([b'{"data":1}'] * 200_000))
    reply = api.request("POST", topic_path(topic), body, [JSON])
    error = reply.json()["error"]
    assert (reply.status, error["code"]) == (400, "batch_too_large")
    assert "10001" in error["message"], "the scan ends at the first record that is one too many"


def test_many_objects_in_few_records_are_written(api: Api, topic: str) -> None:
    objects = b",".join([b'{"a\\"]":[]}'] * 40_000)
    body = b'{"other":[%b],"records":[%b]}' % (objects, b",".join([b'{"data":{"x":[%b]}}' % objects] * 5))
    reply = api.request("POST", topic_path(topic), body, [JSON])
    assert (reply.status, reply.json()["count"]) == (201, 5)


def test_numbers_beyond_the_decoders_reach_workers_and_a_redrive(server: Server, api: Api, topic: str) -> None:
    """A job like this made every claim of the Python client fail with "no Tidelog server", and a redrive with 500."""
    api.create_topic(topic, type="queue")
    numbers = b"9" * 5_000, b"1e999"
    for number in numbers:
        body = b'{"records":[{"data":%b}]}' % number
        assert api.request("POST", topic_path(topic), body, [JSON]).status == 200
    expect_success(api.post(topic_path(topic, "/redrive"), {}))
    with Client("http://{}:{}".format(*server.address)) as client:
        jobs = RemoteQueue(client, topic).claim("n", 2)
    assert [job.data for job in jobs] == [float("inf")] * 2
