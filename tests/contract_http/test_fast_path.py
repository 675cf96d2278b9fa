"""§2.5 again: repeated small requests take the fast path, and clients see no difference.

Every test also runs against a server without compiled modules, where the HTTP parser serves all requests.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tidelog
from tests.contract_http.api import ANY, Api, expect_error, expect_success, topic_path
from tests.contract_http.client import JSON, Reply
from tests.contract_http.server import Server
from tests.kit.waiting import eventually, run_together

WRITER, READER, OTHER = "key-writer", "key-reader", "key-other"
BODY = b'{"records":[{"data":{"n":1}},{"data":"two"}]}'


@pytest.fixture(scope="module", params=["compiled", "without compiler"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("fast-path")
    server = Server(folder)
    if request.param == "without compiler":
        package = Path(tidelog.__file__).parent
        shutil.copytree(package, folder / "src" / "tidelog", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        server.environment["PYTHONPATH"] = str(folder / "src")
    with server.start() as running:
        yield running


def post(api: Api, topic: str, body: bytes = BODY, *headers: tuple[str, str]) -> Reply:
    return api.request("POST", topic_path(topic), body, [JSON, *headers])


def named(reply: Reply) -> list[str]:
    return [name for name, _ in reply.headers]


@pytest.mark.parametrize("durability", ["ephemeral", "memory", "disk", "fsync"])
def test_the_second_answer_is_like_the_first(api: Api, topic: str, durability: str) -> None:
    api.create_topic(topic, durability=durability)
    replies = [post(api, topic) for _ in range(4)]
    for number, reply in enumerate(replies):
        answer: dict[str, Any] = expect_success(reply, 200)
        assert named(reply) == named(replies[0])
        assert list(answer) == list(replies[0].json())
        assert answer.pop("performance").keys() == replies[0].json()["performance"].keys()
        first = 1 + 2 * number
        assert answer == {
            "topic": topic,
            "first_seq": first,
            "last_seq": first + 1,
            "head_seq": first + 1,
            "count": 2,
            "created": False,
            "deduped": False,
            "durability": durability,
            "seqs": [first, first + 1],
        }
    assert len({reply.header("x-request-id") for reply in replies}) == 4
    assert [record["data"] for record in api.diff(topic)["records"]] == [{"n": 1}, "two"] * 4


@pytest.mark.parametrize("count", [0, 3, 900])
def test_the_second_page_is_like_the_first(api: Api, topic: str, count: int) -> None:
    """Reads too. The last one says something about itself, and takes the longer way."""
    api.create_topic(topic)
    if count:
        expect_success(post(api, topic, b'{"records":[%b]}' % b",".join([b'{"data":"%b"}' % (b"x" * 90)] * count)), 200)
    asked: list[tuple[tuple[str, str], ...]] = [(), (), (), (("X-Request-Id", "mine"),)]
    replies = [api.request("POST", topic_path(topic, "/diff"), b'{"limit":1000}', [JSON, *more]) for more in asked]
    for reply in replies:
        answer: dict[str, Any] = expect_success(reply, 200)
        assert named(reply) == named(replies[0])
        assert reply.header("content-length") == str(len(reply.body))
        performance = answer.pop("performance")
        assert performance["records_scanned"] == len(answer["records"]) == count
        assert list(performance) == list(replies[0].json()["performance"])
        assert answer == {key: value for key, value in replies[-1].json().items() if key != "performance"}
    assert len({reply.header("x-request-id") for reply in replies}) == 4


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b'{"records":[]}', 400, "invalid_request"),
        (b'{"records":[{}]}', 400, "invalid_request"),
        (b'{"records":[{"data":NaN}]}', 400, "invalid_request"),
        (b'{"records":[{"data":1}]', 400, "invalid_request"),
        (b'{"records":[{"data":"\xff"}]}', 400, "invalid_request"),
        (b'{"records":[{"data":%b1%b}]}' % (b"[" * 200, b"]" * 200), 400, "invalid_request"),
    ],
)
def test_what_is_refused_is_refused_the_same_way(api: Api, topic: str, body: bytes, status: int, code: str) -> None:
    api.create_topic(topic)
    padded = b'{"records":[{"data":"%b"}]}'
    expect_success(
        post(api, topic, padded % (b"x" * max(len(body) - len(padded) + 2, 1))), 200
    )  # its head is known now
    expect_error(post(api, topic, body), status, code)
    assert api.state(topic)["head_seq"] == 1
    expect_success(post(api, topic), 200)


def test_what_is_special_about_a_write_is_seen(api: Api, topic: str) -> None:
    """The same head and length each time: a node, a tag, blanks, a key in the body, an unknown topic by then."""
    api.create_topic(topic)
    size = 60
    bodies = [
        b'{"records":[{"data":1}]}',
        b'{"records":[{"data":1,"tag":"t"}]}',
        b'{"node":"n","records":[{"data":1}]}',
        b'{ "records": [ { "data": [1, 2] } ] }',
        b'{"records":[{"data":1}],"idempotency_key":"k"}',
    ]
    for body in [*bodies, bodies[-1]]:
        expect_success(post(api, topic, body.ljust(size)), 200)
    answer = api.diff(topic, include_tags=True)
    assert [(r["data"], r.get("$tag"), r.get("$node")) for r in answer["records"]] == [
        (1, None, None),
        (1, "t", None),
        (1, None, "n"),
        ([1, 2], None, None),
        (1, None, None),
    ]
    api.drop(topic)
    assert expect_success(post(api, topic, bodies[0].ljust(size)), 201)["first_seq"] == 1


def test_an_idempotency_key_in_the_head_holds(api: Api, topic: str) -> None:
    api.create_topic(topic)
    answers = [expect_success(post(api, topic, BODY, ("Idempotency-Key", "k")), 200) for _ in range(3)]
    assert [answer["deduped"] for answer in answers] == [False, True, True]
    assert {answer["first_seq"] for answer in answers} == {1}


def test_a_request_id_comes_back(api: Api, topic: str) -> None:
    api.create_topic(topic)
    for _ in range(3):
        assert post(api, topic, BODY, ("X-Request-Id", "mine")).header("x-request-id") == "mine"


def test_caps_ages_and_settings_that_change_hold_at_once(api: Api, topic: str) -> None:
    api.create_topic(topic)
    expect_success(post(api, topic), 200)
    api.configure(topic, cap_records=4, discard="reject")
    expect_success(post(api, topic), 200)
    expect_error(post(api, topic), 422, "topic_full", ANY)
    assert api.state(topic)["head_seq"] == 4
    api.configure(topic, cap_records=2)
    expect_success(post(api, topic), 200)
    assert api.state(topic)["count"] == 2


def test_keys_scopes_and_names_hold_whatever_was_known(tmp_path: Path) -> None:
    keys = f"{WRITER}:w+r+a,{READER}:r,{OTHER}:w:other-"
    with Server(tmp_path, api_keys=keys).start() as server:
        with server.client(key=WRITER) as api:
            api.create_topic("t")
            for _ in range(3):
                expect_success(post(api, "t"), 200)
        for key, status in ((READER, 403), (OTHER, 403), ("key-nobody", 401)):
            with server.client(key=key) as api:
                for _ in range(3):
                    assert post(api, "t").status == status
        with server.client(key=WRITER) as api:
            assert api.state("t")["head_seq"] == 6


def test_a_write_that_was_answered_is_no_longer_in_flight(tmp_path: Path) -> None:
    with (
        Server(tmp_path, api_keys=f"{WRITER}:w+r+a", max_inflight_per_key=2).start() as server,
        server.client(key=WRITER) as api,
    ):
        api.create_topic("t")
        for _ in range(8):
            expect_success(post(api, "t"), 200)


def test_a_topic_that_refuses_weighs_each_write_by_itself(server: Server, name: Callable[[str], str]) -> None:
    """Five of eight writes that come together fit, and those are taken: none is refused for its neighbour's size."""
    topic = name("t")

    def write() -> int:
        with server.client() as api:
            return post(api, topic).status

    with server.client() as api:
        api.create_topic(topic)
        expect_success(post(api, topic), 200)
        api.configure(topic, cap_records=12, discard="reject")
        assert sorted(run_together([write] * 8)) == [200] * 5 + [422] * 3
        assert api.state(topic)["count"] == 12


def test_many_at_once_lose_nothing_and_share_no_seq(server: Server, name: Callable[[str], str]) -> None:
    topic, each = name("t"), 40

    def write() -> list[int]:
        with server.client() as api:
            return [seq for _ in range(each) for seq in expect_success(post(api, topic))["seqs"]]

    with server.client() as api:
        api.create_topic(topic, durability="fsync")
        before = api.metrics()["records_live"]
        found = run_together([write] * 8)
        seqs = sorted(seq for mine in found for seq in mine)
        assert seqs == list(range(1, 8 * each * 2 + 1))
        eventually(lambda: api.metrics()["records_live"] == before + len(seqs))
