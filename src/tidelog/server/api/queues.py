"""[hot] Claiming jobs and settling them: claim, ack, nack, extend.

A claim looks at its body, then for the queue, then at the node; the others look at all of their body first. Answers
are put together from text: a job's data is not decoded on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import msgspec

from tidelog.engine import Token
from tidelog.engine.config import LEASE_MS_MAX, LEASE_MS_MIN
from tidelog.engine.queues import Extended, Leased, Queue, Settled, Want, parse_lease_token
from tidelog.errors import Error
from tidelog.server.api.call import Call
from tidelog.server.api.problem import Problem
from tidelog.server.api.topics import found
from tidelog.server.http.seam import Answer, Response
from tidelog.wire import jobs, requests

T = TypeVar("T")
_claim = requests.decoder(jobs.Claim)
_ack = requests.decoder(jobs.Ack)
_nack = requests.decoder(jobs.Nack)
_extend = requests.decoder(jobs.Extend)
_encode = msgspec.json.Encoder().encode


def queue_of(call: Call) -> Queue:
    """The queue of the path. Never creates."""
    return found(call.service.engine, call.topic).queue()


def check_node(node: str) -> None:
    if not node:
        raise Problem("invalid_request", "a node has a name: it holds the leases; nothing was done, say node")
    if len(node.encode("utf-8", "surrogatepass")) > jobs.NODE_BYTES_MAX:
        raise Problem("invalid_request", f"a node has at most {jobs.NODE_BYTES_MAX} bytes; nothing was done")


def lease_ms(given: int | None) -> int | None:
    """A lease within its bounds; None: the queue's own."""
    return None if given is None else min(max(given, LEASE_MS_MIN), LEASE_MS_MAX)


# ── claim ─────────────────────────────────────────────────────────────────────────────────────────


def claim(call: Call) -> Answer | Coroutine[Any, Any, Answer]:
    if not call.request.body:
        raise Problem("invalid_request", 'a claim says who claims: {"node": …}; nothing was done')
    body = call.body(_claim)
    queue = queue_of(call)
    want = _want(body)
    leased = call.service.desks.now(queue, want)
    return _waited(call, queue, want) if leased is None else _claimed(call, leased, leased.ready)


def want_of(text: bytes) -> Want:
    """What the body of a claim asks for. Raises BadBody or Problem."""
    return _want(requests.decode(_claim, text))


def _want(body: jobs.Claim) -> Want:
    check_node(body.node)
    most = min(body.max or 1, jobs.CLAIM_MAX)
    return Want(body.node, most, lease_ms(body.lease_ms), bytes_max=jobs.CLAIM_BYTES_MAX)


async def _waited(call: Call, queue: Queue, want: Want) -> Response:
    leased = await call.service.desks.of(queue).claim(want, call.principal)
    counts = queue.counts() if queue.topic.is_settled else await call.service.work(queue.counts)
    return _claimed(call, leased, counts.ready)


def _claimed(call: Call, leased: Leased, ready: int) -> Response:
    call.service.metrics.queues.claimed(call.topic, leased.count)
    return Response(200, claimed(call.topic, leased, ready, call.elapsed_ms()))


def claimed(topic: str, leased: Leased, ready: int, elapsed_ms: float) -> bytes:
    """The body of the answer to a claim."""
    return b'{"topic":%b,"claimed":[%b],"count":%d,"ready":%d,"performance":{"server_total_ms":%b}}' % (
        _encode(topic),
        b",".join(leased.texts()),
        leased.count,
        ready,
        _encode(elapsed_ms),
    )


# ── ack, nack, extend ─────────────────────────────────────────────────────────────────────────────


def ack_of(text: bytes) -> tuple[jobs.Ack, list[int | None] | None]:
    """The body of an ack that is in order, and its lease ids. Raises BadBody, Problem or BadInput."""
    body = requests.decode(_ack, text)
    return body, _checked(body)


def acked(topic: str, done: Settled, elapsed_ms: float) -> bytes:
    """The body of the answer to an ack."""
    return b'{"topic":%b,"acked":%d,"skipped":%b,"ready":%d,"in_flight":%d,"performance":{"server_total_ms":%b}}' % (
        _encode(topic),
        done.count,
        _encode(done.skipped),
        done.ready,
        done.in_flight,
        _encode(elapsed_ms),
    )


def ack(call: Call) -> Coroutine[Any, Any, Answer] | None:
    body = call.body(_ack)
    lease_ids = _checked(body)
    queue = queue_of(call)
    stage = partial(queue.stage_ack, body.node, body.seqs, lease_ids)
    if queue.is_routed:
        return _ack_routed(call, stage)
    _when_done(call, stage(), _acked)
    return None


async def _ack_routed(call: Call, stage: Callable[[], Token[Settled]]) -> Answer:
    """Jobs are passed on before they go, which may wait for a disk."""
    done = await call.service.commits.outcome(await call.service.work(stage))
    return Response(200, _acked(call, done))


def nack(call: Call) -> None:
    body = call.body(_nack)
    lease_ids = _checked(body)
    delay_ms = min(body.delay_ms, jobs.DELAY_MS_MAX)
    _when_done(call, queue_of(call).stage_nack(body.node, body.seqs, lease_ids, delay_ms), _nacked)


def extend(call: Call) -> None:
    body = call.body(_extend)
    lease_ids = _checked(body)
    length_ms = lease_ms(body.lease_ms)
    assert length_ms is not None, "an extend says how long"
    _when_done(call, queue_of(call).stage_extend(body.node, body.seqs, lease_ids, lease_ms=length_ms), _extended)


def _checked(body: jobs.Ack) -> list[int | None] | None:
    """The lease ids of a body that is in order, checked in the contract's order; None: whoever the node is."""
    lease_ids = [parse_lease_token(token) for token in body.lease_ids]
    check_node(body.node)
    count = len(body.seqs)
    if count > jobs.SEQS_MAX:
        raise Problem(
            "batch_too_large",
            f"{count} seqs in one call, the limit is {jobs.SEQS_MAX}; nothing was done, send them in parts",
            {"seqs": count, "max": jobs.SEQS_MAX},
        )
    if lease_ids and len(lease_ids) != count:
        raise Problem(
            "invalid_request", f"{count} seqs came with {len(lease_ids)} lease_ids; nothing was done, give one for each"
        )
    return lease_ids or None


def _when_done(call: Call, token: Token[T], tell: Callable[[Call, T], bytes]) -> None:
    call.service.commits.when_done(token, partial(_told, call, tell))


def _told(call: Call, tell: Callable[[Call, T], bytes], token: Token[T]) -> None:
    try:
        done = token.wait()  # its outcome is known
    except Error as error:
        call.fail(error)
        return
    call.reply(Response(200, tell(call, done)))


def _text(call: Call, told: dict[str, Any]) -> bytes:
    return _encode({"topic": call.topic, **told, "performance": call.performance()})


def _acked(call: Call, done: Settled) -> bytes:
    call.service.metrics.queues.acked(call.topic, done.count)
    return acked(call.topic, done, call.elapsed_ms())


def _nacked(call: Call, done: Settled) -> bytes:
    call.service.metrics.queues.nacked(call.topic, done.count)
    told = {"nacked": done.count, "skipped": done.skipped, "ready": done.ready, "in_flight": done.in_flight}
    return _text(call, told)


def _extended(call: Call, done: Extended) -> bytes:
    call.service.metrics.queues.extended(call.topic, done.count)
    deadlines = {str(seq): deadline for seq, deadline in done.deadlines.items()}
    return _text(call, {"extended": done.count, "skipped": done.skipped, "deadlines": deadlines})
