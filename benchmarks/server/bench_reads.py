"""Reads over loopback: a whole topic as Arrow and as lines, and pages of 1000 beside Redis's XRANGE.

Sketch. As Arrow a stretch of records is a handful of copies: some 200 bytes a record at 1 GB/s, so 5 M records/s and
memory decides. A line is text that is put together record by record, 1 µs each in plain Python: 700 000 a second, and
a tenth of that time to send it. A page of 1000 is less, where its records are data alone: 250 µs in plain Python, 30 in
compiled code, with 30 for the request around it and 50 to send it. So 3 million and 9, were there nothing but the
server; Redis walks its listpacks and makes one to three.

One topic lies in sealed segments, the page cache warm: its server was started anew after it was written. Another one
lies in memory, as the tail of every topic does. Pages are asked for in order, over and over, by four connections that
start in different places. What comes is measured and thrown away; one row reads it as a client does, into Arrow, and
counts it. Where the kernel was built there are two servers, and the second one does without it: what each figure owes
to compiled code can be seen in one run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from http.client import HTTPConnection
from importlib.util import find_spec
from itertools import cycle, product
from shutil import which

import pyarrow as pa
from benchmarks.common import GB, PROGRESS, Measurements, Result, alternate, result, scratch_dir, time_call
from benchmarks.server import load_generator
from benchmarks.server.load_generator import HttpReply, MarkedReply, drive, post
from benchmarks.server.peers import (
    NAME,
    missing,
    redis,
    redis_call,
    request,
    resp,
    texts,
    tidelog,
    versions,
    write_asks,
)
from benchmarks.server.processes import Server, run_alone

_PAGE = 1000
_CONNECTIONS = 4
_BULK = f"/v0/topics/{NAME}/records"
_MEMORY = f"{NAME}-memory"
_PLACES = {"memory": _MEMORY, "sealed segments": NAME}
_XRANGE = "Redis XRANGE"
_COMPILED, _PLAIN = "compiled", "plain Python"
_ENTRY_LINES = 8  # of an entry as XRANGE tells it: *2 $15 id *2 $1 d $100 data


def run(quick: bool) -> list[Result]:
    pages, lasting_s, rounds = (20, 0.1, 1) if quick else (500, 0.7, 5)
    total = pages * _PAGE
    for line in missing():
        if line.startswith("redis"):
            PROGRESS.console.print(line)
    PROGRESS.console.print(f"beside {versions() or 'no peer'}, driven by the same generator", style="dim")
    records = texts(100)
    with scratch_dir(GB) as place, ExitStack() as open_:
        servers: list[Server] = []
        work: dict[str, Callable[[], float]] = {}
        for kind in _kinds():
            environ = {"TIDELOG_KERNEL": "1" if kind == _COMPILED else "0"}
            with tidelog(place / kind, **environ) as writer:
                _fill(writer, NAME, "disk", records, pages)
            ours = open_.enter_context(tidelog(place / kind, **environ))
            servers.append(ours)
            _fill(ours, _MEMORY, "ephemeral", records, pages)
            if kind == _kinds()[0]:  # no JSON is made there
                work["arrow"] = partial(_bulk, ours, servers, "arrow", total)
                work["pyarrow"] = partial(_parsed, ours, servers, total)
            work[f"ndjson, {kind}"] = partial(_bulk, ours, servers, "ndjson", total)
            for where, name in _PLACES.items():
                asked = partial(_diffs, ours, name, pages)
                work[f"{where}, {kind}"] = partial(_paged, ours, servers, asked, lasting_s)
        if which("redis-server"):
            peer = open_.enter_context(redis(place / "redis", "no"))
            servers.append(peer)
            _fill_redis(peer, records, pages)
            work[_XRANGE] = partial(_paged, peer, servers, partial(_xranges, peer, pages), lasting_s)
        figures = alternate("read", rounds, work)
    return _rows(figures)


def _kinds() -> list[str]:
    """What puts pages together, the one that serves by itself first."""
    return [_COMPILED, _PLAIN] if find_spec("tidelog._native") is not None else [_PLAIN]


def _rows(figures: Measurements) -> list[Result]:
    rows = [
        result("read 100 B, Arrow", figures["arrow"], "/s", min_value=3_000_000, kind="gate"),
        result("read 100 B, Arrow, into pyarrow", figures["pyarrow"], "/s"),
    ]
    rows += [
        result(f"read 100 B, NDJSON, {kind}", figures[f"ndjson, {kind}"], "/s", min_value=500_000, kind="gate")
        for kind in _kinds()
    ]
    for where, kind in product(_PLACES, _kinds()):
        name = f"read 100 B, diff pages of {_PAGE}, {where}, {_CONNECTIONS} connections, {kind}"
        measured = figures[f"{where}, {kind}"]
        if _XRANGE not in figures:
            rows.append(result(name, measured, "/s"))
            continue
        rows.append(
            result(
                f"{name} ÷ {_XRANGE}",
                measured,
                "/s",
                limit=figures[_XRANGE],
                limit_name=_XRANGE,
                min_ratio=2.0 if kind == _COMPILED else 0.7,
                kind="gate",
            )
        )
    return rows


# ── what is read ──────────────────────────────────────────────────────────────────────────────────


def _fill(server: Server, name: str, durability: str, records: Sequence[bytes], pages: int) -> None:
    request(server.port, "PUT", f"/v0/topics/{name}", {"durability": durability})
    ask = write_asks(records, _PAGE, name)[0]
    drive(load_generator.callers(server.port, [iter([ask] * pages)], HttpReply), 1e6)
    head = request(server.port, "GET", f"/v0/topics/{name}")["head_seq"]
    if head != pages * _PAGE:
        raise RuntimeError(f"{pages * _PAGE} records were written and {head} are there")


def _fill_redis(server: Server, records: Sequence[bytes], pages: int) -> None:
    def asks() -> Iterator[bytes]:
        for page in range(pages):
            yield b"".join(
                resp(b"XADD", NAME.encode(), _id(page * _PAGE + at), b"d", record)
                for at, record in enumerate(records, start=1)
            )

    drive(load_generator.callers(server.port, [asks()], partial(MarkedReply, b"\n", 2 * _PAGE)), 1e6)
    if int(redis_call(server.port, b"XLEN", NAME.encode())) != pages * _PAGE:
        raise RuntimeError("Redis has not what it was given")


def _id(number: int) -> bytes:
    """Ids as Redis gives them, of one busy millisecond: what is asked for can be made in advance."""
    return b"1700000000000-%d" % number


# ── one round: records a second ───────────────────────────────────────────────────────────────────


def _bulk(server: Server, servers: Sequence[Server], form: str, total: int) -> float:
    with run_alone(server, servers):
        return total / time_call(lambda: load_generator.read_to_end(server.port, f"{_BULK}?format={form}"))


def _parsed(server: Server, servers: Sequence[Server], total: int) -> float:
    def work() -> None:
        connection = HTTPConnection("127.0.0.1", server.port)
        connection.request("GET", f"{_BULK}?format=arrow")
        with connection.getresponse() as answer, pa.ipc.open_stream(answer) as reader:
            rows = sum(batch.num_rows for batch in reader)
        connection.close()
        if rows != total:
            raise RuntimeError(f"{rows} records came of {total}")

    with run_alone(server, servers):
        return total / time_call(work)


def _paged(
    server: Server, servers: Sequence[Server], make: partial[list[load_generator.Caller]], lasting_s: float
) -> float:
    with run_alone(server, servers):
        return drive(make(), lasting_s).per_s * _PAGE


def _diffs(server: Server, name: str, pages: int) -> list[load_generator.Caller]:
    asks = [
        post(f"/v0/topics/{name}/diff", b'{"from_seq":%d,"limit":%d}' % (page * _PAGE, _PAGE)) for page in range(pages)
    ]
    return load_generator.callers(server.port, _spread(asks), HttpReply)


def _xranges(server: Server, pages: int) -> list[load_generator.Caller]:
    asks = [
        resp(b"XRANGE", NAME.encode(), b"(" + _id(page * _PAGE), b"+", b"COUNT", b"%d" % _PAGE) for page in range(pages)
    ]
    return load_generator.callers(server.port, _spread(asks), partial(MarkedReply, b"\n", 1 + _ENTRY_LINES * _PAGE))


def _spread(asks: list[bytes]) -> list[Iterator[bytes]]:
    starts = [len(asks) * number // _CONNECTIONS for number in range(_CONNECTIONS)]
    return [cycle(asks[at:] + asks[:at]) for at in starts]
