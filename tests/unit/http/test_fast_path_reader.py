"""The compiled reader takes a request exactly when it is the known head with its whole body, and passes all other input
on; responses that it writes have the same bytes as any other."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tidelog.http import h1_encoder
from tidelog.http._fast_path import FastPathReader, match_body, send_responses

BEFORE = b"POST /t HTTP/1.1\r\nHost: h\r\nContent-Length: "
AFTER = b"\r\nX: y\r\n\r\n"
BUFFER_BYTES = 4096
DATE = b"date: now\r\n"


class Owner:
    def __init__(self) -> None:
        self.current: object = None
        self.log: list[object] = []

    def next_request(self, request: object) -> None:
        assert request is self.current
        self.log.append("next")
        self.current = None


class Batcher:
    def __init__(self, log: list[object]) -> None:
        self.requests: list[Any] = []
        self.bodies: list[bytes] = []
        self.received_us: list[int] = []
        self._log = log

    def now_us(self) -> int:
        return len(self.bodies)

    def schedule_flush(self) -> None:
        self._log.append("schedule flush")

    def check_limits(self) -> None:
        self._log.append("check limits")

    def flush(self) -> None:
        if not self.requests:
            return
        self._log.append(("flush", self.bodies[:], self.received_us[:]))
        self.requests.clear()
        self.bodies.clear()
        self.received_us.clear()


class Transport:
    def __init__(self, log: list[object]) -> None:
        self._log, self.closing = log, False

    def write(self, data: bytes) -> None:
        self._log.append(data)
        self.on_write()

    def on_write(self) -> None:
        """Replaced by tests that react to a write."""

    def is_closing(self) -> bool:
        return self.closing


class LoggingReader(FastPathReader):
    def send(self, *data: bytes) -> None:
        self.owner.log.append(("send", data))
        self.owner.current = None


class Bench:
    """A reader with everything around it."""

    def __init__(self) -> None:
        self.owner = Owner()
        self.log = self.owner.log
        self.buffer = memoryview(bytearray(BUFFER_BYTES))
        self.reader = LoggingReader(self.owner, self.buffer, lambda size: self.log.append(("fallback", size)))
        self.batcher, self.transport = Batcher(self.log), Transport(self.log)

    def submit(self, body: bytes = b"first") -> None:
        self.reader.submit(BEFORE, AFTER, self.batcher, self.transport, body)

    def respond(self, body: bytes = b"{}") -> None:
        self.batcher.flush()
        send_responses([self.reader], [body], b"<", b"|", b">", b"id-", 31)

    def receive(self, data: bytes) -> None:
        assert self.reader.get_buffer(-1) is self.buffer
        self.buffer[: len(data)] = data
        self.reader.buffer_updated(len(data))


def whole(body: bytes, digits: bytes | None = None) -> bytes:
    return b"%b%b%b%b" % (BEFORE, b"%d" % len(body) if digits is None else digits, AFTER, body)


def reference_body(data: bytes) -> bytes | None:
    """The body of `data` if it is one whole request with the known head: the definition, by trying every split."""
    for start in range(len(data) + 1):
        if len(data) - start <= 99_999 and data == whole(data[start:]):
            return data[start:]
    return None


def inputs() -> st.SearchStrategy[bytes]:
    """Requests with the known head, and input that is close to one."""
    bodies = st.binary(max_size=40)
    digits = st.sampled_from([b"", b"0", b"00", b"03", b"3", b"10", b"000003", b"99999", b"100000", b"-1", b"3 "])
    right = bodies.map(whole)
    wrong = st.builds(whole, bodies, digits)

    def overwrite(data: bytes, pos: int, other: bytes) -> bytes:
        pos %= len(data)
        return data[:pos] + other + data[pos + len(other) :]

    broken = st.builds(overwrite, right, st.integers(0, 200), st.binary(max_size=2))
    short = st.builds(lambda data, pos: data[: pos % (len(data) + 1)], right, st.integers(0, 200))
    return right | wrong | broken | short | st.binary(min_size=1, max_size=80)


@given(inputs())
@example(whole(b"abc", b"03"))
@example(whole(b"abc", b"000003"))
def test_body_is_matched_only_with_whole_head_and_exact_length(data: bytes) -> None:
    assert match_body(data, BEFORE, AFTER) == reference_body(data)


@given(st.lists(st.tuples(inputs(), st.sampled_from(["respond", "pause", "closing", "disconnect", ""])), max_size=8))
@example([(whole(b"abc", b"3"), "respond"), (whole(b"abc", b"03"), ""), (whole(b"abc", b"000003"), "")])
def test_armed_reader_takes_matching_input_and_passes_on_the_rest(steps: list[tuple[bytes, str]]) -> None:
    bench = Bench()
    bench.submit()
    bench.respond()
    for data, event in steps:
        if not data:
            continue
        bench.log.clear()
        was_armed, in_batch, body = bench.reader.is_armed, bench.batcher.bodies[:], reference_body(data)
        bench.receive(data)
        if was_armed and body is not None:
            assert bench.log == ([] if in_batch else ["schedule flush"])
            assert bench.batcher.bodies == [*in_batch, body]
            assert bench.owner.current is bench.reader
        else:
            assert bench.log[-1] == ("fallback", len(data))
            assert [entry[1] for entry in bench.log[:-1] if isinstance(entry, tuple)] == (
                [in_batch] if in_batch else []
            )
            assert not bench.batcher.bodies, "the batcher was flushed before the parser read on"
        assert not bench.reader.is_armed
        if event == "pause":
            bench.reader.is_undisturbed = False
        bench.transport.closing = event == "closing"
        bench.reader.disconnected = event == "disconnect"
        if bench.owner.current is not None and event:
            is_direct = bench.reader.is_undisturbed and event == "respond"
            bench.respond()
            if event == "disconnect":
                assert b"<2|id-1f>{}" not in bench.log
            else:
                assert bench.log[-1] == (b"<2|id-1f>{}" if is_direct else ("send", (b"<2|id-1f>{}",)))
            assert bench.reader.is_armed == is_direct


def test_reader_is_armed_after_the_first_response() -> None:
    bench = Bench()
    bench.receive(whole(b"abc"))
    assert bench.log == [("fallback", len(whole(b"abc")))], "no head is known yet"
    bench.log.clear()
    bench.submit()
    bench.respond(b"[1]")
    bench.receive(whole(b"abc"))
    bench.respond(b"[22]")
    assert bench.log == [
        *("schedule flush", ("flush", [b"first"], [1]), b"<3|id-1f>[1]"),
        *("schedule flush", ("flush", [b"abc"], [1]), b"<4|id-1f>[22]"),
    ]
    assert bench.reader.is_armed


def test_input_after_a_request_in_the_batch_flushes_the_batch_first() -> None:
    bench = Bench()
    bench.submit()
    bench.receive(b"more")
    assert bench.log == ["schedule flush", ("flush", [b"first"], [1]), ("fallback", 4)]
    bench.respond()
    assert bench.log[-1] == ("send", (b"<2|id-1f>{}",)), "written by the connection"
    assert not bench.reader.is_armed


def test_client_that_does_not_read_its_response_is_not_armed() -> None:
    bench = Bench()
    bench.transport.on_write = lambda: setattr(bench.reader, "is_undisturbed", False)  # type: ignore[method-assign]
    bench.submit()
    bench.respond()
    assert bench.log[-2:] == [b"<2|id-1f>{}", "next"]
    reader = bench.reader
    assert (reader.is_armed, reader.is_undisturbed, reader.was_served, bench.owner.current) == (
        *(False, False, False),
        None,
    )


def test_large_body_or_many_requests_check_the_limits_of_the_batch() -> None:
    bench = Bench()
    bench.submit(b"x" * 4097)
    assert bench.log == ["schedule flush", "check limits"]
    bench = Bench()
    for _ in range(256):
        bench.submit(b"x")
    assert bench.log == ["schedule flush", "check limits"]


def test_input_longer_than_the_buffer_is_not_read() -> None:
    bench = Bench()
    bench.submit()
    bench.respond()
    bench.log.clear()
    bench.reader.buffer_updated(BUFFER_BYTES + 1)
    assert bench.log == [("fallback", BUFFER_BYTES + 1)]


@given(st.binary(max_size=300), st.integers(0, (1 << 63) - 1))
def test_response_has_the_bytes_of_any_other_response(body: bytes, number: int) -> None:
    bench = Bench()
    bench.submit()
    bench.batcher.flush()
    send_responses([bench.reader], [body], *h1_encoder.json_head_parts(DATE), b"a-", number)
    assert bench.log[-1] == h1_encoder.encode_json_head(len(body), b"a-%x" % number, DATE, b"") + body


def test_responses_are_numbered_in_order_and_skip_disconnected_clients() -> None:
    benches = [Bench() for _ in range(3)]
    for bench in benches:
        bench.submit()
    benches[1].reader.disconnected = True
    send_responses([bench.reader for bench in benches], [b"a", b"b", b"c"], b"", b" ", b" ", b"", 15)
    assert [bench.log[-1] for bench in benches] == [b"1 f a", "schedule flush", b"1 11 c"]


def test_number_of_responses_must_match_the_requests() -> None:
    bench = Bench()
    bench.submit()
    with pytest.raises(ValueError, match="zip"):
        send_responses([bench.reader], [], b"", b"", b"", b"", 1)
