"""[shell] Numbered batches over HTTP: chunks are staged by many, one request makes a batch of them.

    PUT    …/staging/{chunk}      an Arrow stream, kept beside the data until it is published or swept
    DELETE …/staging/{owner}      everything that an owner has staged
    POST   …/batches              {"writer","number","sum","query_id","chunks"} → one range of seqs, once; in parts
                                  where it is more than one commit takes
    GET    …/batches?writer=      what a writer has written last

The chunks of a topic are told from those of another by its name in front of theirs, as a hash.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from hashlib import sha256
from typing import Final

from tidelog.engine import publication
from tidelog.engine.publication import Batch, Published
from tidelog.engine.staging import Chunk, Staging, Upload, check_name
from tidelog.errors import BadInput
from tidelog.server.api.bulk import ARROW
from tidelog.server.api.call import Call, ok
from tidelog.server.api.problem import Problem, of_status
from tidelog.server.api.topics import found
from tidelog.server.http.seam import Broken, Gone, Response
from tidelog.wire import requests

_put = requests.decoder(requests.PutBatch)
_GATHER_BYTES: Final = 1 << 20
CONTENT_TYPES: Final = frozenset({ARROW})


def _staging(call: Call) -> Staging:
    return call.service.engine.staging


def _mine(call: Call, name: str) -> str:
    return f"{sha256(call.topic.encode()).hexdigest()[:16]}{name}"


async def stage(call: Call) -> Response:
    """A chunk, as it comes. It is there when this answers, and nowhere if the body breaks off."""
    name, pieces = _mine(call, check_name(call.names[1])), call.request.pieces
    if pieces is None:
        raise Problem("unsupported_media_type", f"a chunk is {ARROW.decode()}; nothing was written, set Content-Type")
    staging, work = _staging(call), call.service.work

    def begin() -> Upload:
        staging.make()
        return staging.begin(name)

    upload = await work(begin)
    try:
        await _take(call, upload, pieces)
        made = await work(upload.finish)
    except (Gone, Broken) as error:
        await work(upload.abandon)
        broken = error if isinstance(error, Broken) else Broken(400, "the body broke off")
        raise of_status(broken.status, f"{broken.reason}; nothing of the chunk was kept, send it again") from error
    except BaseException:
        await work(upload.abandon)
        raise
    return ok({"topic": call.topic, "chunk": call.names[1], "bytes": made.size, "performance": call.performance()})


async def _take(call: Call, upload: Upload, pieces: AsyncIterator[bytes]) -> None:
    held: list[bytes] = []
    size = 0
    async for piece in pieces:
        call.check_key()
        held.append(piece)
        size += len(piece)
        assert call.exchange is not None, "a call that reached its handler has one"
        call.exchange.keep_body(size)
        if size >= _GATHER_BYTES:
            await call.service.work(partial(upload.write, held))
            held, size = [], 0
    if held:
        await call.service.work(partial(upload.write, held))


async def clear(call: Call) -> Response:
    owner = _mine(call, call.names[1])
    removed = await call.service.work(lambda: _staging(call).remove(owner))
    return ok({"topic": call.topic, "removed": removed, "performance": call.performance()})


async def publish(call: Call) -> Response:
    """One batch of chunks. The topic is made where there is none."""
    body = call.body(_put)
    if not body.chunks:
        raise BadInput("a numbered batch has at least one chunk; nothing was written")
    if len({one.chunk for one in body.chunks}) < len(body.chunks):
        raise BadInput("a chunk is named twice; nothing was written, name each chunk of the batch once")
    service, staging = call.service, _staging(call)
    chunks = [Chunk(_mine(call, check_name(one.chunk)), one.rows, one.bytes, int(one.sum, 16)) for one in body.chunks]

    def work() -> Published:
        staging.sweep(service.now_ms())
        batch = Batch(body.writer, body.number, body.words, body.query_id)
        return publication.publish(service.engine, staging, call.topic, batch, chunks)

    await service.caught_up()  # a batch is up to 1 GiB, which stays in memory until a checkpoint
    call.check_key()
    published = await service.work(work)
    done, created = published.appended, published.created
    service.metrics.wrote(call.topic, published.written)
    topic = service.engine.find(call.topic)
    is_kept = topic is None or topic.config.durability != "ephemeral"  # then it is synced, whatever the class is
    said = {
        "topic": call.topic,
        "first_seq": done.first_seq,
        "last_seq": done.last_seq,
        "head_seq": done.head_seq,
        "count": published.rows,
        "deduped": done.deduped,
        "durability": "fsync" if is_kept else "ephemeral",
        "created": created,
        "performance": call.performance(),
    }
    return ok(said, status=201 if created else 200)


async def known(call: Call) -> Response:
    """The last batches of one writer."""
    writer = call.query.text("writer")
    if not writer:
        raise Problem("invalid_request", "writer is missing: whose batches? Nothing was read")
    topic = found(call.service.engine, call.topic)
    rows = [
        {
            "number": number,
            "first_seq": each.first,
            "last_seq": each.last,
            "sum": requests.PutBatch.hex(each.sum),
            "query_id": each.query_id,
        }
        for number, each in topic.numbered(writer).items()
    ]
    return ok({"topic": call.topic, "writer": writer, "batches": rows, "performance": call.performance()})
