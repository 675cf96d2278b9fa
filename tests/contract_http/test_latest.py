"""Beside the contract: the table of a topic, compaction and previews of retention, over a socket, with the client."""

from __future__ import annotations

import pytest

from tests.contract_http.server import Server
from tidelog.client import Client, RemoteDatabase
from tidelog.errors import Error, TopicNotFound


def test_the_client_has_what_an_embedded_topic_has(server: Server, topic: str) -> None:
    client = Client(f"http://127.0.0.1:{server.address.port}")
    with RemoteDatabase(client) as database:
        check_topic(client, database, topic)


def check_topic(client: Client, database: RemoteDatabase, topic: str) -> None:
    remote = database.topic(topic, compaction="/id")
    for number in range(7):
        client.post(f"/v0/topics/{topic}", {"records": [{"data": {"id": f"k{number % 3}", "n": number}}]})
    assert {row.key: row.record.seq for row in remote.latest()} == {"k0": 7, "k1": 5, "k2": 6}
    page = remote.latest().page(2)
    assert len(page.records) == 2
    assert page.next_after is not None
    assert len(remote.latest().page(2, page.next_after).records) == 1
    record = remote.latest("k1")
    assert record is not None
    assert (record.seq, record.data) == (5, {"id": "k1", "n": 4})
    assert remote.latest("none") is None
    found = remote.simulate_retention(cap_records=2)
    assert (found.records, found.cap.last_seq, found.remaining.records) == (5, 5, 2)
    assert found.config.compaction == "/id"
    assert remote.compact()[0] == 4
    assert remote.compact()[0] == 0
    with pytest.raises(Error):
        remote.latest().page(after="x")
    with pytest.raises(TopicNotFound):
        database.topic(f"{topic}-none", create=False).compact()
