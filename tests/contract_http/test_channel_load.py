"""Channels at work: five hundred members in one room, and a server that is killed while they talk.

Method: clients are coroutines of this process, half of them streams of events and half sockets. After a kill every one
comes back with the last seq that it has. What was acknowledged with qos 1 must be in the history, once, in order, and
with its own seq; nobody may have been shown what is not there; members, owner and lists must be as they were.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from tests.contract_http.api import expect_success
from tests.contract_http.channel_api import ChannelApi, channel_api, channel_path
from tests.contract_http.client import Address, ConnectionEnded, dumps
from tests.contract_http.server import Server
from tests.kit.waiting import eventually

ROOM = "!hall@example.org"
OWNER = "owner@example.org"
MEMBERS = 500
PATIENCE_S = 60.0


def user(number: int) -> str:
    return f"u{number:03d}@example.org"


async def listen_events(address: Address, who: str, after: int | None, heard: Callable[[int, str], bool]) -> None:
    """Hear messages until `heard` says that it is enough, or the stream ends."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        resume = "" if after is None else f"Last-Event-ID: {after}\r\n"
        ask = f"GET {channel_path(ROOM, '/events')} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer root\r\n"
        writer.write(f"{ask}X-Tidelog-User: {who}\r\n{resume}\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head.split(b"\r\n", 1)[0]:
            raise ConnectionError(head)
        while line := await reader.readline():
            if line.startswith(b"data: {") and b'"seq":' in line:
                data = json.loads(line[6:])
                if heard(data["seq"], data["payload"]):
                    return
            elif line.startswith(b"event: subscribed"):
                heard(0, "")
    finally:
        writer.close()


async def listen_socket(address: Address, who: str, after: int | None, heard: Callable[[int, str], bool]) -> None:
    headers = {"Authorization": "Bearer root", "X-Tidelog-User": who}
    async with connect(
        f"ws://{address.host}:{address.port}/v0/ws", additional_headers=headers, open_timeout=20
    ) as socket:
        await socket.send(dumps({"op": "channel_subscribe", "channel": ROOM, "from_seq": after}).decode())
        async for text in socket:
            said = json.loads(text)
            if said["op"] == "channel_subscribed":
                heard(0, "")
            elif said["op"] == "message" and heard(said["seq"], said["payload"]):
                return
            elif said["op"] == "error":
                raise ConnectionError(text)


def test_five_hundred_live_members_hear_everything_in_order(
    tmp_path: Path, record_count: Callable[[str, int], None]
) -> None:
    caps = {"max_channel_members": 600, "max_sse_connections_per_key": 2000}
    with Server(tmp_path / "s", api_keys="root", **caps).start() as server, channel_api(server, "root") as root:
        as_owner = [("X-Tidelog-User", OWNER)]
        expect_success(root.send("PUT", channel_path(ROOM), {"max_clients": 600}, as_owner), 201)
        for number in range(MEMBERS):
            expect_success(root.post(channel_path(ROOM, "/join"), {"user": user(number)}, as_owner))
        got: list[list[int]] = [[] for _ in range(MEMBERS)]
        count = 40

        async def scenario() -> None:
            there = 0

            def hears(number: int) -> Callable[[int, str], bool]:
                def heard(seq: int, payload: str) -> bool:
                    nonlocal there
                    if not seq:
                        there += 1
                        return False
                    assert payload == f"m{seq}"
                    got[number].append(seq)
                    return seq == count

                return heard

            async def speak() -> None:
                while there < MEMBERS:
                    await asyncio.sleep(0.01)
                for number in range(1, count + 1):
                    body = {"payload": f"m{number}"}
                    ack = expect_success(
                        await asyncio.to_thread(root.post, channel_path(ROOM, "/publish"), body, as_owner)
                    )
                    assert (ack["first_seq"], ack["receivers"]) == (number, MEMBERS)

            how = (listen_events, listen_socket)
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.gather(
                    speak(), *(how[n % 2](server.address, user(n), None, hears(n)) for n in range(MEMBERS))
                )

        began = time.monotonic()
        asyncio.run(scenario())
        record_count("deliveries to 500 members", count * MEMBERS)
        assert got == [list(range(1, count + 1))] * MEMBERS
        assert time.monotonic() - began < PATIENCE_S
        eventually(lambda: root.metric("sse_connections") == 0 and root.metric("channel_receivers") == 0, 20)
        assert root.scraped_metric('tidelog_outbound_queue_full_total{result="slow"}') == 0


class Members:
    """Members who come back whenever they are cut off, and publishers who send until they have an ack."""

    def __init__(self, server: Server, members: int) -> None:
        self.server, self.over = server, False
        self.heard: list[dict[int, str]] = [{} for _ in range(members)]
        self.acked: dict[str, int] = {}
        self.connects = 0

    async def listen(self, number: int) -> None:
        how = (listen_events, listen_socket)[number % 2]

        def heard(seq: int, payload: str) -> bool:
            if seq:
                assert self.heard[number].setdefault(seq, payload) == payload, "a seq is one message"
                assert max(self.heard[number]) == seq, "nothing comes twice or late"
            else:
                self.connects += 1
            return False

        while not self.over:
            after = max(self.heard[number], default=0)
            with suppress(OSError, EOFError, WebSocketException, asyncio.IncompleteReadError):
                await how(self.server.address, user(number), after, heard)
            await asyncio.sleep(0.02)

    async def speak(self, number: int) -> None:
        turn = 0
        while not self.over:
            payload = f"{number}-{turn}"
            turn += 1
            with suppress(OSError, ConnectionEnded):
                self.acked[payload] = await asyncio.to_thread(self._say, user(number), payload)

    def _say(self, who: str, payload: str) -> int:
        with ChannelApi(self.server.address, key="root", timeout_s=5) as client:
            reply = client.post(channel_path(ROOM, "/publish"), {"payload": payload}, [("X-Tidelog-User", who)])
            if reply.status != 200:
                raise ConnectionError(reply.body)  # it starts, or stops
            ack = expect_success(reply)
            assert (ack["qos"], ack["durable"]) == (1, True)
            seq = ack["first_seq"]
            assert isinstance(seq, int)
            return seq


def whole_history(client: ChannelApi) -> dict[int, str]:
    found: dict[int, str] = {}
    first = 1
    while True:
        page = client.history(ROOM, f"?operator=true&first={first}")
        found |= {message["seq"]: message["payload"] for message in page["messages"]}
        if page["next_seq"] > page["last_seq"]:
            return found
        first = page["next_seq"]


def test_a_server_that_is_killed_under_load_has_every_message_that_was_acknowledged(
    tmp_path: Path, record_count: Callable[[str, int], None]
) -> None:
    """kill -9, four times, with forty members who reconnect and four who publish with qos 1."""
    members, kills = 40, 4
    caps = {"channel_messages_max": 100_000}
    server = Server(tmp_path / "s", api_keys="root", **caps).start()
    with server:
        with channel_api(server, "root") as root:
            as_owner = [("X-Tidelog-User", OWNER)]
            expect_success(
                root.send("PUT", channel_path(ROOM), {"persist": True, "max_persist_messages": 100_000}, as_owner), 201
            )
            for number in range(members):
                expect_success(root.post(channel_path(ROOM, "/join"), {"user": user(number)}, as_owner))
            expect_success(root.post(channel_path(ROOM, "/acl"), {"kind": "publish", "add": ["example.org"]}, as_owner))
            expect_success(root.post(channel_path(ROOM, "/acl"), {"kind": "join", "add": [user(1)]}, as_owner))
            before = root.state(ROOM, "?operator=true")
        crowd = Members(server, members)

        async def scenario() -> None:
            tasks = [asyncio.create_task(crowd.listen(number)) for number in range(members)]
            tasks += [asyncio.create_task(crowd.speak(number)) for number in range(4)]
            for _ in range(kills):
                enough = len(crowd.acked) + 40
                async with asyncio.timeout(PATIENCE_S):
                    while len(crowd.acked) < enough:
                        await asyncio.sleep(0.01)
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)
            enough = len(crowd.acked) + 40
            async with asyncio.timeout(PATIENCE_S):
                while len(crowd.acked) < enough:
                    await asyncio.sleep(0.01)
            crowd.over = True
            await asyncio.gather(*tasks[members:])
            last = max(crowd.acked.values())
            async with asyncio.timeout(PATIENCE_S):
                while any(max(each, default=0) < last for each in crowd.heard):
                    await asyncio.sleep(0.01)
            for task in tasks[:members]:
                task.cancel()
            ended = await asyncio.gather(*tasks[:members], return_exceptions=True)
            assert [each for each in ended if not isinstance(each, asyncio.CancelledError | None)] == []

        asyncio.run(scenario())
        with channel_api(server, "root") as root:
            kept = whole_history(root)
            assert sorted(kept) == list(range(1, max(kept) + 1)), "seqs go on without a gap"
            assert {payload: kept.get(seq) for payload, seq in crowd.acked.items()} == {
                payload: payload for payload in crowd.acked
            }, "every ack of qos 1 is in the history under its seq"
            for each in crowd.heard:
                assert {seq: kept.get(seq) for seq in each} == each, "nobody was shown what is not there"
                assert sorted(each) == list(range(1, max(each) + 1)), "and whoever came back missed nothing"
            after = root.state(ROOM, "?operator=true")
            for key in ("owner", "members", "config"):
                assert after[key] == before[key]
            acl = expect_success(root.get(channel_path(ROOM, "/acl?operator=true")))["acl"]
            assert acl == {"join": [user(1)], "publish": ["example.org"], "read": []}
            eventually(lambda: root.metric("sse_connections") == 0 and root.metric("channel_receivers") == 0, 20)
        assert crowd.connects > members * kills
        record_count("acknowledged under kills", len(crowd.acked))
        record_count("connections of members", crowd.connects)
