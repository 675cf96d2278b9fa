"""Where a topic was at a time."""

from __future__ import annotations

from tidelog.engine import Topic
from tidelog.server.api.call import Call, ok
from tidelog.server.api.topics import found
from tidelog.server.http.seam import Response
from tidelog.wire import requests

_decoder = requests.decoder(requests.Seek)


async def seek(call: Call) -> Response:
    """The first record of a time or later, and the cursor before it. Nobody is a reader by asking this."""
    body = call.body(_decoder)
    topic = found(call.service.engine, call.topic)
    seq, head_seq, earliest_seq = await call.service.work(lambda: _sought(topic, body.ts))
    return ok(
        {
            "topic": call.topic,
            "ts": body.ts,
            "seq": seq,
            "from_seq": seq - 1,
            "head_seq": head_seq,
            "earliest_seq": earliest_seq,
            "performance": call.performance(),
        }
    )


def _sought(topic: Topic, ts_ms: int) -> tuple[int, int, int]:
    now = topic.state()
    seq = topic.seek(ts_ms)
    # Records may have come between the two: the head is never told to be behind what was found.
    return seq, max(now.head_seq, seq - 1), now.earliest_seq
