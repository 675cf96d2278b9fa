"""What a client of a server does beside the contract of `tidelog.protocols`: connecting, retries, and errors."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

import pyarrow as pa
import pytest
from tests.contract.conftest import KEY
from tests.contract_http.server import Server

import tidelog
from tidelog import aio, errors, protocols
from tidelog.client import Client, RemoteDatabase
from tidelog.client.core import Request, ServerUnreachable

PAGE = Path(__file__).parents[2] / "docs" / "client.md"
Name = Callable[..., str]


def copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while content := source.recv(1 << 20):
            target.sendall(content)
        target.shutdown(socket.SHUT_WR)


def read_request(connection: socket.socket) -> bytes:
    """Read a request with its body."""
    content = b""
    while b"\r\n\r\n" not in content:
        content += connection.recv(1 << 16)
    head, _, body = content.partition(b"\r\n\r\n")
    found = re.search(rb"(?i)content-length: (\d+)", head)
    while found is not None and len(body) < int(found[1]):
        body += connection.recv(1 << 16)
    return head + body


@contextmanager
def proxy(port: int, replies_lost: int | list[int]) -> Iterator[str]:
    """A server in front of a server that loses the first responses: the requests are executed. A list has their number,
    and may be changed."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        left = [replies_lost] if isinstance(replies_lost, int) else replies_lost

        def relay(client: socket.socket) -> None:
            with client, socket.create_connection(("127.0.0.1", port)) as server:
                forward = Thread(target=copy, args=(client, server), daemon=True)
                forward.start()
                while reply := server.recv(1 << 20):
                    if left[0]:
                        left[0] -= 1
                        break
                    client.sendall(reply)
                client.shutdown(socket.SHUT_RDWR)
                forward.join()

        def accept() -> None:
            while True:
                try:
                    Thread(target=relay, args=(listener.accept()[0],), daemon=True).start()
                except OSError:
                    return

        thread = Thread(target=accept)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def test_the_page_of_the_client_runs(contract_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # it opens a directory `data`
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.S)
    namespace: dict[str, object] = {}
    for block in blocks:
        text = (
            block.replace("http://127.0.0.1:4000", contract_server)
            .replace("s3cret", KEY)
            .replace("timeout=5", "timeout=0")
        )
        exec(compile(text, str(PAGE), "exec", dont_inherit=True), namespace)
    assert len(blocks) >= 2


def test_an_address_that_does_not_answer_raises_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = taken.getsockname()[1]
    with pytest.raises(ServerUnreachable, match="cannot be reached") as found:
        tidelog.connect(f"http://127.0.0.1:{free}")
    assert found.value.written is False
    for url in ("ftp://host", "http://", "http://host:99999"):
        with pytest.raises(errors.BadInput, match="write http://host:port"):
            tidelog.connect(url)
    for bad in ({"timeout_s": 0}, {"timeout_s": "5"}, {"retry_s": -1}, {"key": "a\nb"}):
        with pytest.raises(errors.BadInput):
            tidelog.connect("http://127.0.0.1:1", **bad)


def test_a_missing_and_a_wrong_key_raise_different_texts(contract_server: str) -> None:
    with pytest.raises(errors.Unauthorized, match="needs a key and none was given"):
        tidelog.connect(contract_server)
    with pytest.raises(errors.Unauthorized, match="does not know this key"):
        tidelog.connect(contract_server, key="wrong")


def test_a_server_without_an_operation_is_of_another_version(contract_server: str) -> None:
    with Client(contract_server, key=KEY) as client:
        with pytest.raises(errors.Unsupported, match="another version"):
            client.get("/v0/none")
        with pytest.raises(errors.Unsupported, match="another version"):
            client.post("/v0/topics", {})


def test_a_closed_client_and_a_wrong_path_are_refused(contract_server: str, name: Name) -> None:
    with tidelog.connect(contract_server, key=KEY) as database:
        topic = database.topic(name())
    for call in (lambda: topic.append(1), database.names, topic.read, lambda: next(topic.follow())):
        with pytest.raises(errors.Closed, match="connect again"):
            call()
    database.close()
    with pytest.raises(errors.Unavailable, match="an address has no path"):
        tidelog.connect(f"{contract_server}/v0", key=KEY)
    with pytest.raises(ServerUnreachable, match="port 80, as the address names none"):
        tidelog.connect("http://127.0.0.1")


def test_something_else_that_answers_is_no_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            with other.accept()[0] as connection:
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

        thread = Thread(target=answer)
        thread.start()
        with pytest.raises(errors.Unavailable, match="no Tidelog server"):
            tidelog.connect(f"http://127.0.0.1:{other.getsockname()[1]}")
        thread.join()


def test_a_write_whose_response_was_lost_is_written_once(contract_server: str, name: Name) -> None:
    with proxy(port_of(contract_server), 1) as url:
        database = RemoteDatabase(Client(url, key=KEY, retry_ms=30_000))
        with tidelog.connect(contract_server, key=KEY) as direct:
            direct.topic(name())
            topic = database.topic(name(), create=False)
            done = topic.append(["once", "twice"])
            assert (done.seqs, done.deduped) == (range(1, 3), False)
            assert [record.data for record in topic.read().records] == ["once", "twice"]
        database.close()


def test_a_producer_needs_a_topic_that_remembers_keys_for_as_long_as_it_repeats(
    contract_server: str, name: Name
) -> None:
    with tidelog.connect(contract_server, key=KEY) as database:
        topic = database.topic(name(), idempotency_window_ms=90_000)
        with pytest.raises(errors.BadInput, match="idempotency_window_ms") as refused:
            topic.producer()
        assert refused.value.written is False
    with (
        tidelog.connect(contract_server, key=KEY, timeout_s=20) as database,
        database.topic(name(), create=False).producer() as producer,
    ):
        assert producer.send(1).result() == 1


def test_a_batch_whose_response_was_lost_is_written_once(contract_server: str, name: Name) -> None:
    lost = [0]
    with tidelog.connect(contract_server, key=KEY) as direct, proxy(port_of(contract_server), lost) as url:
        direct.topic(name())
        database = RemoteDatabase(Client(url, key=KEY, timeout_s=20, retry_ms=30_000))
        with database.topic(name(), create=False).producer() as producer:
            lost[0] = 1
            sent = [producer.send(number) for number in range(3)]
            assert [delivery.result() for delivery in sent] == [1, 2, 3]
            assert producer.stats().repeated_batches == 1
        database.close()
        assert direct.topic(name()).count == 3


def test_a_commit_whose_response_was_lost_is_no_conflict(contract_server: str, name: Name) -> None:
    """Its repetition finds the group where the first attempt brought it. One that was answered is a conflict."""
    with tidelog.connect(contract_server, key=KEY) as direct, proxy(port_of(contract_server), 1) as url:
        direct.topic(name()).append([1, 2, 3])
        database = RemoteDatabase(Client(url, key=KEY, retry_ms=30_000))
        group = database.topic(name(), create=False).group("g")
        assert group.commit(2, expect=0) == 2
        for seq in (2, 3):
            with pytest.raises(errors.CursorConflict):
                group.commit(seq, expect=0)
        database.close()


def test_a_request_that_may_not_be_repeated_is_in_doubt(contract_server: str, name: Name) -> None:
    with tidelog.connect(contract_server, key=KEY) as direct:
        direct.topic(name())
        with proxy(port_of(contract_server), 1) as url, Client(url, key=KEY, retry_ms=30_000) as client:
            with pytest.raises(errors.InDoubt) as found:
                RemoteDatabase(client).topic(name(), create=False).append_stream([b"x"])
            assert found.value.written is None


def test_a_pause_is_as_long_as_the_server_asks() -> None:
    refusal = b'{"error":{"code":"throttled","message":"later"}}'
    replies = [
        b"HTTP/1.1 429 -\r\nRetry-After: 7\r\nContent-Length: %d\r\n\r\n%b" % (len(refusal), refusal),
        b'HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n{"a": 1}',
    ]
    pauses: list[float] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with listener.accept()[0] as connection:
                for reply in replies:
                    read_request(connection)
                    connection.sendall(reply)

        thread = Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with Client(url, retry_ms=60_000, pause=pauses.append) as client:
            assert client.post("/v0/topics/x", {}) == {"a": 1}
        thread.join()
    assert pauses == [7.0]


def test_followers_and_jobs_go_on_after_a_restart(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    args = ("--data", str(tmp_path / "data"), "--port", str(port), "--port-file", str(tmp_path / "port.txt"))
    with Server(tmp_path, *args).start() as server, tidelog.connect(f"http://127.0.0.1:{port}") as database:
        topic = database.topic("orders", durability="fsync")
        topic.append([1, 2])
        follower = topic.follow(timeout=60)
        assert [next(follower), next(follower)] == list(topic.read().records)
        queue, awaited_queue = (database.queue(name, durability="fsync") for name in ("mails", "awaited"))
        queue.put("first")
        jobs, is_connected = queue.jobs("w"), Event()
        awaited_jobs = Thread(target=lambda: asyncio.run(ack_three_jobs(port, is_connected)))
        assert next(jobs).data == "first"
        awaited_jobs.start()
        assert is_connected.wait(60)
        server.stop()
        starting = Thread(target=server.start)
        starting.start()
        topic.append(3)
        found = next(follower)
        starting.join()
        assert isinstance(found, tidelog.Record)
        assert (found.seq, found.data) == (3, 3)
        job = next(jobs)
        assert (job.data, job.deliveries) == ("first", 1), "its lease has ended, and its count was in memory"
        jobs.close()  # type: ignore[attr-defined]
        awaited_queue.put([1, 2])
        awaited_jobs.join(60)
        assert not awaited_jobs.is_alive()
        assert awaited_queue.topic.count == 0


async def ack_three_jobs(port: int, is_connected: Event) -> None:
    async with aio.connect(f"http://127.0.0.1:{port}") as database:
        queue, left = await database.queue("awaited"), 3
        await queue.put(0)
        async for job in queue.jobs("w2"):
            is_connected.set()
            left -= (await queue.ack("w2", job)).count
            if not left:
                return


def test_calls_are_generators_without_io() -> None:
    from tidelog.client.topic_calls import TopicCalls

    call = TopicCalls("orders").append({"a": 1}, key="k")
    request = next(call)
    assert isinstance(request, Request)
    assert (request.method, request.path, request.retry_safe) == ("POST", "/v0/topics/orders", True)
    assert request.body == b'{"records":[{"data":{"a":1}}],"idempotency_key":"k","create":false}'


def test_open_names_connect_for_the_address_of_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(errors.BadInput, match=r"tidelog\.connect"):
        tidelog.open("http://127.0.0.1:4000")
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_a_streamed_write_says_whether_anything_was_written(contract_server: str, name: Name) -> None:
    with tidelog.connect(contract_server, key=KEY) as database:
        topic = database.topic(name(), cap_records=10_000, discard="reject")
        for rows, written, acked in ((10_001, True, range(1, 10_001)), (1, False, range(0))):
            with pytest.raises(errors.Refused) as refused:
                topic.append_arrow(pa.table({"data": [b"x"] * rows}))
            assert (refused.value.written, refused.value.acked) == (written, acked)


def test_the_connection_of_a_closed_event_stream_is_not_used_again(
    remote: protocols.Database, name: Callable[..., str]
) -> None:
    """A request that may not be repeated would be in doubt on it."""
    channel = remote.channel(f"!{name()}@localhost", user="ann@localhost")
    channel.join()
    for number in range(3):
        assert list(remote.queue(name("q")).jobs("w", timeout=0)) == []
        assert channel.publish(b"x").seq == number + 1
