"""A topic of a server, with the methods of an embedded one that commands and jobs use."""

from __future__ import annotations

from typing import Final

import msgspec
import pyarrow as pa

from tidelog.client.http import Client, topic_path
from tidelog.engine import Appended, RedriveResult, TopicConfig, TopicInfo

ARROW_CONTENT_TYPE: Final = "application/vnd.apache.arrow.stream"
_REDRIVE_PAGE_RECORDS: Final = 1_000
_encode = msgspec.json.Encoder().encode


class RemoteTopic:
    """A topic of a server. A missing topic raises TopicNotFound at the first request."""

    def __init__(self, client: Client, name: str) -> None:
        self._client, self.name = client, name

    def state(self) -> TopicInfo:
        """Return settings, sizes and seqs."""
        fields = self._client.get(topic_path(self.name, "?touch=false"))
        listing = self._client.get(topic_path(self.name, "/segments?sums=false"))
        return TopicInfo(
            topic=self.name,
            id=listing["epoch"],
            epoch=listing["epoch"],
            head_seq=fields["head_seq"],
            earliest_seq=fields["earliest_seq"],
            evict_floor=listing["evict_floor"],
            count=fields["count"],
            bytes=fields["bytes"],
            last_write_ms=fields["last_write_ts"],
            last_read_ms=fields["last_read_ts"],
            effective_priority=fields["effective_priority"],
            config=TopicConfig.from_json(_encode(fields["config"])),
        )

    def append_arrow(self, table: pa.Table | pa.RecordBatch, *, key: str | None = None) -> Appended:
        """Write the rows of a table as one batch. With a key, a request without a response is repeated."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write(table)
        headers = {"Content-Type": ARROW_CONTENT_TYPE, **({} if key is None else {"Idempotency-Key": key})}
        body = sink.getvalue().to_pybytes()
        response = self._client.post_bytes(topic_path(self.name), body, headers, retry_safe=key is not None)
        return Appended(response["first_seq"], response["last_seq"], response["head_seq"], bool(response["deduped"]))

    def redrive(
        self,
        *,
        to: str | None = None,
        match: object = None,
        rate: float | None = None,
        limit: int | None = None,
    ) -> RedriveResult:
        """Move dead letters back to the queue that each came from, or to the queue `to`. A server moves some thousands
        per request, so this may send several."""
        count, queues, skipped = 0, dict[str, int](), 0
        while True:
            page = _REDRIVE_PAGE_RECORDS if limit is None else min(limit - count, _REDRIVE_PAGE_RECORDS)
            body = {"to": to, "match": match, "rate": rate, "limit": page}
            done = self._client.post(topic_path(self.name, "/redrive"), body)
            count, skipped = count + done["redriven"], done["skipped"]
            for queue, number in done["queues"].items():
                queues[queue] = queues.get(queue, 0) + number
            if not done["redriven"] or (limit is not None and count >= limit):
                return RedriveResult(count, queues, skipped)
