"""HTTP/2 connections with prior knowledge, and the streams on them.

    frames ──► within the turn's budget ──► h2 ──► events ──► Http2Stream, one per request, all at the same time
    Http2Stream.write ──► send queue ──► a quantum each, round robin, as windows and the socket allow ──► DATA frames

The h2 library checks the protocol and raises where a client breaks it: the client gets a GOAWAY and the connection
ends. Windows are returned as bodies are consumed: collected, read by a handler, or discarded. A body that is not wanted
is discarded as it arrives; past the limit the stream is reset with NO_ERROR after the whole response, which is how a
server stops a body without losing its response. A client that does not answer a PING in time is disconnected.

Limits on what a client costs: frames that carry nothing, resets and errors are counted (ENHANCE_YOUR_CALM past their
limits), and so are the heads of open requests and streamed responses. A stream of which the client reads nothing is
reset in time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from struct import Struct
from typing import Any, Final

from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError, StreamClosedError
from h2.settings import SettingCodes, Settings

from tidelog.http import h1_encoder
from tidelog.http.connection import FLOOD_BYTES_MAX, Connection, ServerState
from tidelog.http.exchange import HttpExchange, RequestError
from tidelog.http.interface import ClientDisconnected, Headers, Request, Response, Stream, Upgrade
from tidelog.http.limits import REQUEST_UNITS, RateAllowance, UnsentAccount, WaiterList

# Headers of HTTP/1.1 connections: a client treats an HTTP/2 message that has one as malformed.
_HOP_BY_HOP_HEADERS = frozenset((b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"proxy-connection"))


class Http2Stream:
    """One request of an HTTP/2 connection: the transport of its exchange, and the sink of its streamed response."""

    is_queued = False  # it waits for its turn to send
    body_abandoned = False  # its body timed out; the client may still be sending it
    head_bytes = 0  # of its request
    stalled_since_s: float | None = None  # since when it waits for its window without progress
    _counts_as_streaming = False  # it counts in `streaming_count` of its connection
    _closes_connection = False  # its response is the connection's last
    _discarded_bytes = 0

    def __init__(self, connection: Http2Connection, stream_id: int, request: Request) -> None:
        state = connection.server_state
        self.connection, self.stream_id, self.server_state = connection, stream_id, state
        self.exchange = HttpExchange(state, state.compressed_app, request, self)
        self.send_queue: deque[memoryview] = deque()
        self.send_queue_bytes = 0
        self.send_queue_closed = False  # nothing will be added to it
        self.last_received_s = state.now_s
        self._written_bytes = 0
        self._drain_waiters = WaiterList()
        self._unsent_account = UnsentAccount(state.unsent_budget, lambda: self.send_queue_bytes, self._evict_for_memory)

    # Transport of the request's body.

    def send_continue(self) -> None:
        if (self.exchange.request.header(b"expect") or b"").lower() == b"100-continue":
            self.connection.send_headers(self, [(b":status", b"100")])

    def on_body_consumed(self, size: int) -> None:
        self.connection.acknowledge_body(self.stream_id, size)

    def on_body_discarded(self, size: int) -> None:
        self._discarded_bytes += size
        if self.exchange.response_sent and self._discarded_bytes > self.server_state.limits.discard_bytes_max:
            self.connection.reset_stream(self, ErrorCodes.NO_ERROR)

    # Transport of the response.

    def _send_head(self, status: int, content_type: bytes, headers: Headers, length: int | None) -> None:
        h1_encoder.encode_headers(headers)  # raises for invalid headers
        fields = [(b":status", b"%d" % status), (b"date", self.server_state.date_header.refresh().value)]
        if not h1_encoder.is_bodyless(status):
            fields.append((b"content-type", content_type))
            if length is not None:
                fields.append((b"content-length", b"%d" % length))
        fields += [(name.lower(), value) for name, value in headers if name.lower() not in _HOP_BY_HOP_HEADERS]
        is_empty = length == 0 or self.exchange.request.method == "HEAD" or h1_encoder.is_bodyless(status)
        self.connection.send_headers(self, fields, end_stream=is_empty)
        if is_empty and not self.exchange.disconnected:
            self.on_response_sent()

    def send(self, response: Response) -> None:
        self._closes_connection = response.close
        self._send_head(response.status, response.content_type, response.headers, len(response.body))
        if not self.exchange.response_sent and not self.exchange.disconnected:
            self.enqueue(response.body)
            self.send_queue_closed = True
            self.connection.send_pending(self)

    def start_stream(self, stream: Stream) -> None:
        limit = self.server_state.limits.connection_streams_max
        if limit and self.connection.streaming_count >= limit:
            reason = f"{limit} streams are open on this connection; another was refused"
            self.server_state.limit_counters.count("streams", self.connection.peer, reason)
            self.send(self.exchange.app.malformed(self.exchange.request, 429, reason))
            return
        self._send_head(stream.status, stream.content_type, stream.headers, stream.length)
        if not self.exchange.response_sent and not self.exchange.disconnected:
            self._counts_as_streaming = True
            self.connection.streaming_count += 1
            self.exchange.spawn_stream(stream, self)

    def on_closed(self) -> None:
        """The stream is over and counts no longer."""
        self._unsent_account.release()
        self.stalled_since_s = None
        if self._counts_as_streaming:
            self._counts_as_streaming = False
            self.connection.streaming_count -= 1

    def _evict_for_memory(self) -> None:
        self.connection.count_unsent_eviction(f"a stream of {self.connection.peer} was reset")
        self.connection.evict_stream(self)

    def on_stream_end(self, is_complete: bool) -> None:
        if is_complete:
            self.send_queue_closed = True
            self.connection.send_pending(self)
        else:
            self.connection.reset_stream(self, ErrorCodes.INTERNAL_ERROR)

    def on_response_sent(self) -> None:
        """The last byte of the response was framed."""
        self.exchange.response_sent = True
        if self._closes_connection:
            self.connection.send_goaway()
        if self.exchange.body_complete:
            self.on_complete()

    def on_complete(self) -> None:
        if self.body_abandoned:
            self.connection.reset_stream(self, ErrorCodes.NO_ERROR)
        else:
            self.connection.close_stream(self)

    def upgrade(self, answer: Upgrade) -> None:
        raise AssertionError(f"no request of HTTP/2 can become a WebSocket for {answer.run}")

    # The sink of a streamed response.

    @property
    def is_last_frame(self) -> bool:
        """Everything was framed, and nothing will be added."""
        return self.send_queue_closed and not self.send_queue

    @property
    def pending_bytes(self) -> int:
        return self.send_queue_bytes + self.connection.unsent_bytes

    def write(self, data: bytes) -> None:
        if data and not self.exchange.disconnected and not self.send_queue_closed:
            self._written_bytes += len(data)
            self.enqueue(data)
            self.connection.send_pending(self)

    def enqueue(self, data: bytes) -> None:
        self.send_queue.append(memoryview(data))
        self.send_queue_bytes += len(data)
        self._unsent_account.update()

    def reserve(self, size: int) -> None:
        self._unsent_account.reserve(size)

    def on_frames_sent(self) -> None:
        """Some of the send queue was framed, or nothing of it."""
        account = self._unsent_account
        if self.send_queue_bytes + account.reserved_bytes < account.bytes:
            self.stalled_since_s = None
            account.update()
        if self._drain_waiters and self.send_queue_bytes <= self.server_state.limits.write_low_bytes:
            self._drain_waiters.wake()

    def mark_stalled(self) -> None:
        """The stream waits for its window, and may have waited before."""
        if self.stalled_since_s is None:
            self.stalled_since_s = self.server_state.now_s

    def on_window_opened(self) -> None:
        self.stalled_since_s = None
        self._drain_waiters.wake()

    @property
    def is_under_pressure(self) -> bool:
        return self.server_state.unsent_budget.is_above_half

    async def wait_ready(self) -> None:
        while not self.exchange.disconnected and not self.send_queue and self.connection.window_bytes(self) <= 0:
            self.connection.await_window(self)
            await self._drain_waiters.wait()
        await self.drain()
        await self.server_state.unsent_budget.wait_below_half()

    async def drain(self) -> None:
        limits = self.server_state.limits
        mark = limits.write_low_bytes if self.server_state.unsent_budget.is_above_half else limits.write_high_bytes
        if self.send_queue_bytes > mark and not self.exchange.disconnected:
            await self._drain_waiters.wait()
        if self.exchange.disconnected:
            raise ClientDisconnected
        written_bytes, self._written_bytes = self._written_bytes, 0
        await self.connection.drain(written_bytes)

    def on_disconnect(self) -> None:
        self.send_queue.clear()
        self.send_queue_bytes = 0
        self.exchange.on_disconnect()
        self._unsent_account.release()
        self._drain_waiters.wake()


_SEND_QUANTUM_BYTES: Final = 64 << 10
_PREFACE_BYTES: Final = 24
_FRAME_HEADER_BYTES: Final = 9
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _CONTINUATION = 0, 1, 3, 4, 9  # types of frames (RFC 9113, 6)
_END_STREAM, _END_HEADERS = 0x1, 0x4
_LARGE_DATA_FRAME_BYTES: Final = 4 << 10  # such a frame costs little more than its bytes
_SMALL_DATA_FRAME_BYTES: Final = 64  # a smaller one, except the last of a body, counts as a frame without payload
_HEADER_BLOCK_FREE_BYTES: Final = 512  # usual for a request; a field takes at least 4 bytes, and 20 µs
_HEADER_BLOCK_BYTES_PER_UNIT: Final = 4
_GOAWAY: Final = Struct(">HBBBIII")  # length (in two), type, flags, stream, last stream, code
_CONNECTION_WINDOW_START: Final = 65_535
_PING_PAYLOAD: Final = b"tidelog?"


class Http2Connection(Connection):
    def __init__(self, server_state: ServerState) -> None:
        super().__init__(server_state)
        limits = server_state.limits
        self._h2 = H2Connection(H2Configuration(client_side=False, header_encoding=None))
        self._h2.local_settings = Settings(
            client=False,
            initial_values={
                SettingCodes.MAX_CONCURRENT_STREAMS: limits.streams_max,
                SettingCodes.INITIAL_WINDOW_SIZE: limits.stream_window_bytes,
                SettingCodes.MAX_HEADER_LIST_SIZE: limits.header_bytes_max,
            },
        )
        self._h2.decoder.max_header_list_size = limits.header_bytes_max
        self._streams: dict[int, Http2Stream] = {}
        self._sendable: deque[Http2Stream] = deque()  # streams that can send now
        self._connection_blocked: deque[Http2Stream] = deque()  # streams that wait for the connection's window
        self._connection_blocked_since_s: float | None = None  # since when they wait and nothing was sent
        self._window_blocked: set[Http2Stream] = set()  # streams that wait for their own window
        self._awaiting_window: set[Http2Stream] = set()  # streams whose handlers produce nothing before it opens
        self.streaming_count = 0  # streamed responses
        self._open_head_bytes = 0  # of the requests of all open streams
        self._header_block_bytes = 0  # of an incomplete header block
        self._partial_frame = b""
        self._units_spent = self._units_max = 0  # of the input that is being processed
        self._is_processing = False  # frames are collected and written at the end
        self._goaway_stream_id: int | None = None  # the last stream that is served, after a GOAWAY
        self._control_allowance = RateAllowance(limits.control_frames_max)
        self._reset_allowance = RateAllowance(limits.resets_max)
        self._ticked_s = self._idle_since_s = self._pinged_s = server_state.now_s
        self._pong_pending = False
        self._event_handlers: dict[type[events.Event], Callable[[Any], None]] = {
            events.RequestReceived: self._on_request,
            events.DataReceived: self._on_data,
            events.StreamEnded: self._on_end,
            events.StreamReset: self._on_reset,
            events.WindowUpdated: self._on_window,
            events.RemoteSettingsChanged: self._on_settings,
            events.PingAckReceived: self._on_pong,
            events.ConnectionTerminated: self._on_goaway,
        }

    def open(self, data: bytes) -> None:
        """Start the connection. `data` begins with the preface."""
        self._h2.initiate_connection()
        increment = self.server_state.limits.connection_window_bytes - _CONNECTION_WINDOW_START
        if increment:
            self._h2.increment_flow_control_window(increment)
        self._h2.receive_data(data[:_PREFACE_BYTES])
        self._process(data[_PREFACE_BYTES:])

    # Receiving.

    def on_data(self, data: memoryview) -> None:
        self._process(self._partial_frame + data if self._partial_frame else bytes(data))

    def process_deferred(self, remaining: bytes) -> None:
        if self.write_paused:
            self.park(remaining)
        else:
            self._process(remaining)

    def _process(self, data: bytes) -> None:
        """Handle frames within the budget of this turn."""
        end, self._partial_frame = self._end_of_budget(data), b""
        if end < 0:
            return
        self._feed_parser(memoryview(data)[:end])
        self.server_state.turn_scheduler.spend(self._units_spent)
        if self.is_closing:
            return
        if self._units_spent < self._units_max:
            self._partial_frame = data[end:]
            self._update_reading()
        else:
            self.defer(data[end:])

    def _end_of_budget(self, data: bytes) -> int:
        """Return where the last frame of this turn ends, or -1 if a limit closed the connection. Counts frames."""
        pos, size = 0, len(data)
        self._units_spent, self._units_max = 0, self.server_state.turn_scheduler.units_left
        length_max, controls = self._h2.max_inbound_frame_size, self._control_allowance
        while size - pos >= _FRAME_HEADER_BYTES and self._units_spent < self._units_max:
            length, kind = int.from_bytes(data[pos : pos + 3]), data[pos + 3]
            if length > length_max:  # the library would first wait for all of it
                return self._goaway_for_limit(ErrorCodes.FRAME_SIZE_ERROR, "frame_size", f"a frame of {length} bytes")
            if size - pos < _FRAME_HEADER_BYTES + length:
                break
            flags, units = data[pos + 4], 1
            if kind in (_HEADERS, _CONTINUATION):
                units = REQUEST_UNITS + max(length - _HEADER_BLOCK_FREE_BYTES, 0) // _HEADER_BLOCK_BYTES_PER_UNIT
                if self._units_spent + units > self._units_max and (
                    pos or self.server_state.turn_scheduler.is_exhausted
                ):
                    self._units_max = self._units_spent  # it needs a turn of its own
                    break
            pos += _FRAME_HEADER_BYTES + length
            if kind == _DATA and length >= _LARGE_DATA_FRAME_BYTES:
                continue  # bounded by the windows
            self._units_spent += 1
            if kind == _DATA:
                if (length < _SMALL_DATA_FRAME_BYTES and not flags & _END_STREAM) and not controls.take():
                    return self._reject_control_flood()
                continue
            if kind in (_HEADERS, _CONTINUATION):
                self._units_spent += units - 1
                self._header_block_bytes += length
                if self._header_block_bytes > 2 * self.server_state.limits.header_bytes_max:
                    return self._goaway_for_limit(
                        ErrorCodes.ENHANCE_YOUR_CALM, "header_bytes", "a header block without an end"
                    )
                if flags & _END_HEADERS:
                    self._header_block_bytes = 0
                if kind == _HEADERS:
                    continue
            elif kind == _RST_STREAM:
                if not self._reset_allowance.take():
                    return self._reject_reset_flood()
                continue
            elif kind == _SETTINGS:  # applied to each open stream
                self._units_spent += len(self._streams) // 8
            if not controls.take():
                return self._reject_control_flood()
        return pos

    def _reject_control_flood(self) -> int:
        limit = self.server_state.limits.control_frames_max
        return self._goaway_for_limit(
            ErrorCodes.ENHANCE_YOUR_CALM, "control_frames", f"more than {limit} frames that carry nothing"
        )

    def _reject_reset_flood(self) -> int:
        limit = self.server_state.limits.resets_max
        return self._goaway_for_limit(ErrorCodes.ENHANCE_YOUR_CALM, "resets", f"more than {limit} resets of streams")

    def _goaway_for_limit(self, code: ErrorCodes, limit: str, detail: str) -> int:
        """Close the connection because the client exceeded a limit."""
        self.server_state.limit_counters.count(
            limit, self.peer, f"{self.peer} sent {detail}; its connection was closed"
        )
        with suppress(ProtocolError):
            self._h2.close_connection(code)
        self._flush()
        self._close_connection(FLOOD_BYTES_MAX if code is ErrorCodes.ENHANCE_YOUR_CALM else None)
        return -1

    def _feed_parser(self, data: memoryview) -> None:
        self._is_processing = True
        try:
            for event in self._h2.receive_data(data):
                handler = self._event_handlers.get(type(event))
                if handler is not None and not self.is_closing:
                    handler(event)
            self._send_round()
        except ProtocolError:
            self._flush()
            self._close_connection()
            return
        except Exception as error:  # input that breaks the library costs its sender alone
            self.server_state.report_error("an HTTP/2 connection failed", error)
            self.abort()
            return
        finally:
            self._is_processing = False
        self._flush()

    def _on_request(self, event: events.RequestReceived) -> None:
        stream_id = event.stream_id
        if self._goaway_stream_id is not None and stream_id > self._goaway_stream_id:
            self._h2.reset_stream(stream_id, ErrorCodes.REFUSED_STREAM)
            return
        limits = self.server_state.limits
        head_bytes = sum(len(name) + len(value) for name, value in event.headers)
        if self._open_head_bytes + head_bytes > limits.connection_header_bytes_max:
            self.server_state.limit_counters.count(
                "header_bytes",
                self.peer,
                f"requests of {self.peer} with heads of {self._open_head_bytes} bytes are open; another was refused",
            )
            self._h2.reset_stream(stream_id, ErrorCodes.REFUSED_STREAM)
            return
        pseudo_headers: dict[bytes, bytes] = {}
        headers: list[tuple[bytes, bytes]] = []
        length: int | None = None if event.stream_ended is None else 0
        for name, value in event.headers:
            if name[:1] == b":":
                pseudo_headers[name] = value
            else:
                headers.append((name, value))
                if name == b"content-length":
                    length = int(value)
        if b":authority" in pseudo_headers and all(name != b"host" for name, _ in headers):
            headers.insert(0, (b"host", pseudo_headers[b":authority"]))
        target = pseudo_headers.get(b":path", b"").decode("latin-1")
        path, _, query = target.partition("?")
        method = pseudo_headers.get(b":method", b"").decode("latin-1")
        stream = Http2Stream(self, stream_id, Request(method, path, query, headers, self.peer, content_length=length))
        if method == "CONNECT":
            stream.exchange.head_error = RequestError(501, "this is not a proxy")
        elif not target.isascii() or target[:1] not in ("/", "*"):
            stream.exchange.head_error = RequestError(400, "the target is not a path")
        elif len(target) > limits.target_bytes_max:
            stream.exchange.head_error = RequestError(414, f"the target is longer than {limits.target_bytes_max} bytes")
        stream.exchange.body_complete = event.stream_ended is not None
        self._streams[stream_id] = stream
        stream.head_bytes = head_bytes
        self._open_head_bytes += head_bytes
        stream.exchange.start()

    def _on_data(self, event: events.DataReceived) -> None:
        stream = self._streams.get(event.stream_id)
        padding = event.flow_controlled_length - len(event.data)
        if stream is None:
            self.acknowledge_body(event.stream_id, event.flow_controlled_length)
            return
        if padding:
            self.acknowledge_body(event.stream_id, padding)
        stream.last_received_s = self.server_state.now_s
        if event.data:
            stream.exchange.feed_body(bytes(event.data))

    def _on_end(self, event: events.StreamEnded) -> None:
        stream = self._streams.get(event.stream_id)
        if stream is not None and not stream.exchange.body_complete:
            stream.exchange.end_body()

    def _on_reset(self, event: events.StreamReset) -> None:
        stream = self._streams.get(event.stream_id)
        if stream is not None:
            self._abort_stream(stream)
        # A reset by the client was counted as a frame. One that it made the library send costs as much.
        if not event.remote_reset and not self._reset_allowance.take():
            self._reject_reset_flood()

    def _on_window(self, event: events.WindowUpdated) -> None:
        if event.stream_id:
            stream = self._streams.get(event.stream_id)
            if stream is not None:
                if stream in self._window_blocked:
                    self._window_blocked.discard(stream)
                    self._enqueue(stream)
                if stream in self._awaiting_window and self.window_bytes(stream) > 0:
                    self._awaiting_window.discard(stream)
                    stream.on_window_opened()
            return
        self._sendable = self._connection_blocked + self._sendable
        self._connection_blocked = deque()
        self._wake_awaiting_window()

    def _on_settings(self, _: object) -> None:
        """A window may have opened for every stream."""
        blocked, self._window_blocked = self._window_blocked, set()
        for stream in sorted(blocked, key=lambda stream: stream.stream_id):
            self._enqueue(stream)
        self._wake_awaiting_window()

    def _wake_awaiting_window(self) -> None:
        self._units_spent += len(self._awaiting_window) // 8
        for stream in sorted(self._awaiting_window, key=lambda stream: stream.stream_id):
            if self.window_bytes(stream) > 0:
                self._awaiting_window.discard(stream)
                stream.on_window_opened()

    def _on_pong(self, event: events.PingAckReceived) -> None:
        if event.ping_data == _PING_PAYLOAD:
            self._pong_pending = False

    def _on_goaway(self, event: events.ConnectionTerminated) -> None:  # noqa: ARG002 - the reason does not matter
        self._close_connection()

    # Called by streams.

    def window_bytes(self, stream: Http2Stream) -> int:
        """Return how many bytes the stream may send now; 0 if it is over."""
        try:
            return self._h2.local_flow_control_window(stream.stream_id)
        except ProtocolError:
            return 0

    def await_window(self, stream: Http2Stream) -> None:
        """Call `stream.on_window_opened()` when its window opens."""
        self._awaiting_window.add(stream)
        stream.mark_stalled()

    def send_headers(
        self, stream: Http2Stream, fields: Sequence[tuple[bytes, bytes]], end_stream: bool = False
    ) -> None:
        try:
            self._h2.send_headers(stream.stream_id, fields, end_stream=end_stream)
        except ProtocolError:  # the client reset the request; that event comes next
            self._abort_stream(stream)
        self._flush_unless_processing()

    def send_pending(self, stream: Http2Stream) -> None:
        """Send what the stream has queued, or its end."""
        self._enqueue(stream)
        if not self._is_processing:
            self._send_round()
            self._flush()

    def acknowledge_body(self, stream_id: int, size: int) -> None:
        """Return window for bytes of a body that were consumed."""
        if size and not self.is_closing:
            self._h2.acknowledge_received_data(size, stream_id)
            self._flush_unless_processing()

    def reset_stream(self, stream: Http2Stream, code: ErrorCodes) -> None:
        """Reset a stream."""
        with suppress(StreamClosedError):  # both sides may have ended it
            self._h2.reset_stream(stream.stream_id, code)
        stream.exchange.body_complete = True
        self.close_stream(stream)
        self._flush_unless_processing()

    def close_stream(self, stream: Http2Stream) -> None:
        """Remove a stream whose request and response are complete."""
        if self._streams.pop(stream.stream_id, None) is not None:
            self._open_head_bytes -= stream.head_bytes
        stream.on_closed()
        self._window_blocked.discard(stream)
        self._awaiting_window.discard(stream)
        if not self._streams:
            self._idle_since_s = self.server_state.now_s
            if self._goaway_stream_id is not None:
                self._flush()
                self.lingering_close()

    def _abort_stream(self, stream: Http2Stream) -> None:
        stream.on_disconnect()
        if stream.is_queued:  # it would stay there for as long as the client does not read
            for queue in (self._sendable, self._connection_blocked):
                with suppress(ValueError):
                    queue.remove(stream)
        self.close_stream(stream)

    # Sending.

    def _enqueue(self, stream: Http2Stream) -> None:
        if not stream.is_queued and stream not in self._window_blocked:
            stream.is_queued = True
            self._sendable.append(stream)

    def _send_round(self) -> None:
        while self._sendable and not self.write_paused and not self.is_closing:
            stream = self._sendable.popleft()
            if stream.send_queue and self._h2.outbound_flow_control_window <= 0 and not stream.exchange.disconnected:
                self._block_on_connection_window(stream)
                continue
            stream.is_queued = False
            if stream.exchange.disconnected or stream.exchange.response_sent:
                continue
            if not self._send_quantum(stream):
                if self._h2.outbound_flow_control_window <= 0:
                    stream.is_queued = True
                    self._block_on_connection_window(stream)
                else:
                    self._window_blocked.add(stream)
                    stream.mark_stalled()
            elif stream.send_queue:
                self._enqueue(stream)
            self._flush()  # here, so that `write_paused` is known before the next stream

    def _block_on_connection_window(self, stream: Http2Stream) -> None:
        """Queue a stream that has data while the connection's window is closed."""
        self._connection_blocked.append(stream)
        if self._connection_blocked_since_s is None:
            self._connection_blocked_since_s = self.server_state.now_s

    def _send_quantum(self, stream: Http2Stream) -> bool:
        """Send up to a quantum; return whether the windows allowed all of it."""
        bytes_left = _SEND_QUANTUM_BYTES
        try:
            while stream.send_queue and bytes_left > 0:
                first = stream.send_queue[0]
                window = self._h2.local_flow_control_window(stream.stream_id)
                size = min(len(first), window, self._h2.max_outbound_frame_size)
                if size <= 0:
                    return False
                stream.send_queue_bytes -= size
                bytes_left -= size
                if size < len(first):
                    stream.send_queue[0] = first[size:]
                else:
                    stream.send_queue.popleft()
                self._h2.send_data(stream.stream_id, first[:size], end_stream=stream.is_last_frame)
                # Window updates respond to bytes: a client that reads whole frames may send four for each.
                self._control_allowance.refund(4.0 if size < window else size / 4096)
                self._connection_blocked_since_s = None
            if stream.is_last_frame:
                if bytes_left == _SEND_QUANTUM_BYTES:  # no DATA frame carried the end
                    self._h2.end_stream(stream.stream_id)
                stream.on_response_sent()
        except ProtocolError:  # as in `send_headers`
            self._abort_stream(stream)
        finally:
            stream.on_frames_sent()
        return True

    def _flush_unless_processing(self) -> None:
        if not self._is_processing:
            self._flush()

    def _flush(self) -> None:
        data = self._h2.data_to_send()
        if data:
            self.write(data)

    def _update_reading(self) -> None:
        # A client that does not read gets no more responses, not even to pings and settings.
        self.set_reading(self.is_closing or not self.write_paused)

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.disconnected and not self.is_closing:
            self.unpark()
            self._send_round()
            self._flush()
            self._update_reading()

    # Time-outs and closing.

    def check_timeouts(self, now: float) -> None:
        limits = self.server_state.limits
        for allowance in (self._control_allowance, self._reset_allowance):
            allowance.refill(now - self._ticked_s)
        self._ticked_s = now
        if self._pong_pending and now - self._pinged_s > limits.ping_timeout_s:
            self.abort()
            return
        if not self._pong_pending and now - self._pinged_s > limits.ping_every_s:
            self._pinged_s, self._pong_pending = now, True
            self._h2.ping(_PING_PAYLOAD)
            self._flush()
        for stream in tuple(self._streams.values()):
            if (
                not stream.exchange.body_complete
                and not stream.exchange.unread_body_bytes
                and now - stream.last_received_s > limits.body_timeout_s
            ):
                self._timeout_body(stream)
            elif stream.stalled_since_s is not None and now - stream.stalled_since_s > limits.write_timeout_s:
                self._reset_stalled(stream)
        if (
            self._connection_blocked_since_s is not None
            and now - self._connection_blocked_since_s > limits.write_timeout_s
        ):
            for stream in tuple(self._connection_blocked):
                self._reset_stalled(stream)
        if not self._streams and now - self._idle_since_s > limits.idle_timeout_s:
            self.send_goaway()

    def _reset_stalled(self, stream: Http2Stream) -> None:
        limit = self.server_state.limits.write_timeout_s
        self.count_stalled(f"{self.peer} read nothing of a stream for {limit:g} s; it was reset")
        self.evict_stream(stream)

    def evict_stream(self, stream: Http2Stream) -> None:
        """Reset a stream that the client does not read, and cancel its handler."""
        with suppress(ProtocolError):
            self._h2.reset_stream(stream.stream_id, ErrorCodes.CANCEL)
        self._abort_stream(stream)
        self._flush_unless_processing()

    def _timeout_body(self, stream: Http2Stream) -> None:
        stream.body_abandoned = True
        stream.exchange.fail_body(
            408, f"no more of the body arrived within {self.server_state.limits.body_timeout_s:g} s"
        )

    def send_goaway(self) -> None:
        """Accept no more requests; close when the open ones are answered."""
        if self._goaway_stream_id is None:
            self._goaway_stream_id = self._h2.highest_inbound_stream_id
            self._flush()
            # Not by the library: after its GOAWAY it refuses responses to open requests.
            self.write(_GOAWAY.pack(0, 8, 7, 0, 0, self._goaway_stream_id, ErrorCodes.NO_ERROR))
        if not self._streams:
            self.lingering_close()

    def begin_shutdown(self) -> None:
        self.send_goaway()

    def _close_connection(self, bytes_max: int | None = None) -> None:
        """Disconnect all streams and close."""
        self._disconnect_streams()
        self.lingering_close(bytes_max)

    def on_disconnect(self) -> None:
        self._disconnect_streams()

    def _disconnect_streams(self) -> None:
        streams = tuple(self._streams.values())
        for collection in (
            self._streams,
            self._window_blocked,
            self._awaiting_window,
            self._sendable,
            self._connection_blocked,
        ):
            collection.clear()
        for stream in streams:
            stream.on_disconnect()
            stream.on_closed()
