"""[shell] An HTTP/2 connection, for peers that know beforehand that it is one.

    frames ──► a turn's budget of them ──► h2 ──► events ──► lanes, one per request, all at the same time
    lanes ──► a quantum each, in turn, while their windows and the socket let them ──► frames

The library keeps the protocol's rules and raises where a peer breaks them: then it gets a GOAWAY and the connection
ends. Windows are given back as bodies are consumed: by being collected, taken by a handler, or thrown away.
A peer that is asked whether it is there and does not say so in time is not.

What a peer may cost: frames that carry nothing, resets and errors are counted (ENHANCE_YOUR_CALM past their limits),
so are the heads of open requests and streamed answers; a lane of which the peer takes nothing is reset in time.
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

from tidelog.server.http.connection import FLOOD_BYTES_MAX, Connection
from tidelog.server.http.exchange import Fault
from tidelog.server.http.house import House
from tidelog.server.http.lane import Lane
from tidelog.server.http.seam import Request
from tidelog.server.http.turns import REQUEST_UNITS, Allowance

_QUANTUM_BYTES: Final = 64 << 10
_PREFACE_BYTES: Final = 24
_HEAD_BYTES: Final = 9  # of a frame
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _CONTINUATION = 0, 1, 3, 4, 9  # types of frames (RFC 9113, 6)
_END_STREAM, _END_HEADERS = 0x1, 0x4
_DATA_BYTES_LARGE: Final = 4 << 10  # of a frame that costs little more than its bytes
_DATA_BYTES_MIN: Final = 64  # of a frame of a body that goes on: a smaller one counts as one that carries nothing
_BLOCK_BYTES_FREE: Final = 512  # of a header block: what requests have. A field takes 4 bytes at least, and 20 µs
_BLOCK_BYTES_PER_UNIT: Final = 4
_GOAWAY: Final = Struct(">HBBBIII")  # length (in two), type, flags, stream, last stream, code
_CONNECTION_WINDOW_START: Final = 65_535
_PING: Final = b"tidelog?"


class H2(Connection):
    def __init__(self, house: House) -> None:
        super().__init__(house)
        limits = house.limits
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
        self._lanes: dict[int, Lane] = {}
        self._ready: deque[Lane] = deque()  # lanes with something to send and no reason not to
        self._starved: deque[Lane] = deque()  # lanes that wait for the connection's window
        self._starved_since: float | None = None  # since when they wait and nothing was sent
        self._stuck: set[Lane] = set()  # lanes that wait for their own window
        self._wanting: set[Lane] = set()  # lanes whose handlers wait for a window before they make anything
        self.streams = 0  # answers that are streamed
        self._head_bytes = 0  # of the requests of all lanes
        self._block_bytes = 0  # of a header block whose end has not come
        self._partial = b""  # of a frame whose end has not come
        self._spent = self._most = 0  # units of the piece that is handled, and how many it may spend
        self._busy = False  # frames are gathered and written at the end
        self._last_lane: int | None = None  # no lanes after this one: we said farewell
        self._controls = Allowance(limits.control_frames_max)
        self._resets = Allowance(limits.resets_max)
        self._ticked = self._idle_since = self._pinged = house.now
        self._pong_due = False
        self._on: dict[type[events.Event], Callable[[Any], None]] = {
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
        """Begin to speak; `data` begins with the preface."""
        self._h2.initiate_connection()
        wider = self.house.limits.connection_window_bytes - _CONNECTION_WINDOW_START
        if wider:
            self._h2.increment_flow_control_window(wider)
        self._h2.receive_data(data[:_PREFACE_BYTES])
        self._take(data[_PREFACE_BYTES:])

    # What comes in.

    def received(self, data: memoryview) -> None:
        self._take(self._partial + data if self._partial else bytes(data))

    def resume(self, rest: bytes) -> None:
        if self.blocked:
            self.park(rest)
        else:
            self._take(rest)

    def _take(self, data: bytes) -> None:
        """Handle as many frames as the budget of this turn allows."""
        end, self._partial = self._cut(data), b""
        if end < 0:
            return
        self._feed(memoryview(data)[:end])
        self.house.ring.spend(self._spent)
        if self.ending:
            return
        if self._spent < self._most:
            self._partial = data[end:]
            self._govern()
        else:
            self.defer(data[end:])

    def _cut(self, data: bytes) -> int:
        """Where the last frame of this turn ends. Counts frames; -1: one too many, and the connection is over."""
        at, size = 0, len(data)
        self._spent, self._most = 0, self.house.ring.left
        length_max, controls = self._h2.max_inbound_frame_size, self._controls
        while size - at >= _HEAD_BYTES and self._spent < self._most:
            length, kind = int.from_bytes(data[at : at + 3]), data[at + 3]
            if length > length_max:  # the library would wait for all of it first
                return self._refuse(ErrorCodes.FRAME_SIZE_ERROR, "frame_size", f"a frame of {length} bytes")
            if size - at < _HEAD_BYTES + length:
                break
            flags, units = data[at + 4], 1
            if kind in (_HEADERS, _CONTINUATION):
                units = REQUEST_UNITS + max(length - _BLOCK_BYTES_FREE, 0) // _BLOCK_BYTES_PER_UNIT
                if self._spent + units > self._most and (at or self.house.ring.is_spent):
                    self._most = self._spent  # it has to wait for a turn of its own
                    break
            at += _HEAD_BYTES + length
            if kind == _DATA and length >= _DATA_BYTES_LARGE:
                continue  # windows bound them
            self._spent += 1
            if kind == _DATA:
                if (length < _DATA_BYTES_MIN and not flags & _END_STREAM) and not controls.take():
                    return self._flooded()
                continue
            if kind in (_HEADERS, _CONTINUATION):
                self._spent += units - 1
                self._block_bytes += length
                if self._block_bytes > 2 * self.house.limits.header_bytes_max:
                    return self._refuse(ErrorCodes.ENHANCE_YOUR_CALM, "header_bytes", "a header block without an end")
                if flags & _END_HEADERS:
                    self._block_bytes = 0
                if kind == _HEADERS:
                    continue
            elif kind == _RST_STREAM:
                if not self._resets.take():
                    return self._too_many_resets()
                continue
            elif kind == _SETTINGS:  # each open stream is looked at
                self._spent += len(self._lanes) // 8
            if not controls.take():
                return self._flooded()
        return at

    def _flooded(self) -> int:
        limit = self.house.limits.control_frames_max
        return self._refuse(
            ErrorCodes.ENHANCE_YOUR_CALM, "control_frames", f"more than {limit} frames that carry nothing"
        )

    def _too_many_resets(self) -> int:
        limit = self.house.limits.resets_max
        return self._refuse(ErrorCodes.ENHANCE_YOUR_CALM, "resets", f"more than {limit} resets of streams")

    def _refuse(self, code: ErrorCodes, limit: str, what: str) -> int:
        """End the connection because of what its peer sends."""
        self.house.refusals.count(limit, self.peer, f"{self.peer} sent {what}; its connection was closed")
        with suppress(ProtocolError):
            self._h2.close_connection(code)
        self._flush()
        self._hang_up(FLOOD_BYTES_MAX if code is ErrorCodes.ENHANCE_YOUR_CALM else None)
        return -1

    def _feed(self, data: memoryview) -> None:
        self._busy = True
        try:
            for event in self._h2.receive_data(data):
                act = self._on.get(type(event))
                if act is not None and not self.ending:
                    act(event)
            self._pump()
        except ProtocolError:
            self._flush()
            self._hang_up()
            return
        except Exception as error:  # the rim: whatever a peer's bytes do to the library costs that peer alone
            self.house.report("an HTTP/2 connection failed", error)
            self.abort()
            return
        finally:
            self._busy = False
        self._flush()

    def _on_request(self, event: events.RequestReceived) -> None:
        number = event.stream_id
        if self._last_lane is not None and number > self._last_lane:
            self._h2.reset_stream(number, ErrorCodes.REFUSED_STREAM)
            return
        limits = self.house.limits
        head_bytes = sum(len(name) + len(value) for name, value in event.headers)
        if self._head_bytes + head_bytes > limits.connection_header_bytes_max:
            self.house.refusals.count(
                "header_bytes",
                self.peer,
                f"requests of {self.peer} with heads of {self._head_bytes} bytes are open; another was refused",
            )
            self._h2.reset_stream(number, ErrorCodes.REFUSED_STREAM)
            return
        pseudo: dict[bytes, bytes] = {}
        headers: list[tuple[bytes, bytes]] = []
        length: int | None = None if event.stream_ended is None else 0
        for name, value in event.headers:
            if name[:1] == b":":
                pseudo[name] = value
            else:
                headers.append((name, value))
                if name == b"content-length":
                    length = int(value)
        if b":authority" in pseudo and all(name != b"host" for name, _ in headers):
            headers.insert(0, (b"host", pseudo[b":authority"]))
        target = pseudo.get(b":path", b"").decode("latin-1")
        path, _, query = target.partition("?")
        method = pseudo.get(b":method", b"").decode("latin-1")
        lane = Lane(self, number, Request(method, path, query, headers, self.peer, length=length))
        if method == "CONNECT":
            lane.fault = Fault(501, "this is not a proxy")
        elif not target.isascii() or target[:1] not in ("/", "*"):
            lane.fault = Fault(400, "the target is not a path")
        elif len(target) > limits.target_bytes_max:
            lane.fault = Fault(414, f"the target is longer than {limits.target_bytes_max} bytes")
        lane.complete = event.stream_ended is not None
        self._lanes[number] = lane
        lane.head_bytes = head_bytes
        self._head_bytes += head_bytes
        lane.start()

    def _on_data(self, event: events.DataReceived) -> None:
        lane = self._lanes.get(event.stream_id)
        padding = event.flow_controlled_length - len(event.data)
        if lane is None:
            self.give_back(event.stream_id, event.flow_controlled_length)
            return
        if padding:
            self.give_back(event.stream_id, padding)
        lane.heard = self.house.now
        if event.data:
            lane.feed(bytes(event.data))

    def _on_end(self, event: events.StreamEnded) -> None:
        lane = self._lanes.get(event.stream_id)
        if lane is not None and not lane.complete:
            lane.end()

    def _on_reset(self, event: events.StreamReset) -> None:
        lane = self._lanes.get(event.stream_id)
        if lane is not None:
            self._drop(lane)
        # A reset that the peer sent was counted as a frame. One that it made the library send costs as much.
        if not event.remote_reset and not self._resets.take():
            self._too_many_resets()

    def _on_window(self, event: events.WindowUpdated) -> None:
        if event.stream_id:
            lane = self._lanes.get(event.stream_id)
            if lane is not None:
                if lane in self._stuck:
                    self._stuck.discard(lane)
                    self._queue(lane)
                if lane in self._wanting and self.window(lane) > 0:
                    self._wanting.discard(lane)
                    lane.opened()
            return
        self._ready = self._starved + self._ready
        self._starved = deque()
        self._wake_wanting()

    def _on_settings(self, _: object) -> None:
        """A window may have opened for every lane."""
        stuck, self._stuck = self._stuck, set()
        for lane in sorted(stuck, key=lambda lane: lane.number):
            self._queue(lane)
        self._wake_wanting()

    def _wake_wanting(self) -> None:
        self._spent += len(self._wanting) // 8
        for lane in sorted(self._wanting, key=lambda lane: lane.number):
            if self.window(lane) > 0:
                self._wanting.discard(lane)
                lane.opened()

    def _on_pong(self, event: events.PingAckReceived) -> None:
        if event.ping_data == _PING:
            self._pong_due = False

    def _on_goaway(self, event: events.ConnectionTerminated) -> None:  # noqa: ARG002 - whatever its reason
        self._hang_up()

    # What lanes ask for.

    def window(self, lane: Lane) -> int:
        """How many bytes the peer takes of this lane now; 0 where the stream is over."""
        try:
            return self._h2.local_flow_control_window(lane.number)
        except ProtocolError:
            return 0

    def want_window(self, lane: Lane) -> None:
        """Have `lane.opened()` called when the peer takes bytes of it."""
        self._wanting.add(lane)
        lane.stall()

    def head(self, lane: Lane, fields: Sequence[tuple[bytes, bytes]], ends: bool = False) -> None:
        try:
            self._h2.send_headers(lane.number, fields, end_stream=ends)
        except ProtocolError:  # the peer took the request back, and the event that says so comes next
            self._drop(lane)
        self._flush_soon()

    def push(self, lane: Lane) -> None:
        """`lane` has something to send, or its end."""
        self._queue(lane)
        if not self._busy:
            self._pump()
            self._flush()

    def give_back(self, number: int, size: int) -> None:
        """So many bytes of a body were consumed."""
        if size and not self.ending:
            self._h2.acknowledge_received_data(size, number)
            self._flush_soon()

    def reset(self, lane: Lane, code: ErrorCodes) -> None:
        """Give a lane up; its peer is told."""
        with suppress(StreamClosedError):  # both sides may have ended it already
            self._h2.reset_stream(lane.number, code)
        lane.complete = True
        self.done(lane)
        self._flush_soon()

    def done(self, lane: Lane) -> None:
        """A request and its answer are over."""
        if self._lanes.pop(lane.number, None) is not None:
            self._head_bytes -= lane.head_bytes
        lane.closed()
        self._stuck.discard(lane)
        self._wanting.discard(lane)
        if not self._lanes:
            self._idle_since = self.house.now
            if self._last_lane is not None:
                self._flush()
                self.linger()

    def _drop(self, lane: Lane) -> None:
        lane.leave()
        if lane.queued:  # it would wait there for as long as the peer does not read
            for waiting in (self._ready, self._starved):
                with suppress(ValueError):
                    waiting.remove(lane)
        self.done(lane)

    # What goes out.

    def _queue(self, lane: Lane) -> None:
        if not lane.queued and lane not in self._stuck:
            lane.queued = True
            self._ready.append(lane)

    def _pump(self) -> None:
        while self._ready and not self.blocked and not self.ending:
            lane = self._ready.popleft()
            if lane.out and self._h2.outbound_flow_control_window <= 0 and not lane.away:
                self._starve(lane)
                continue
            lane.queued = False
            if lane.away or lane.finished:
                continue
            if not self._send_some(lane):
                if self._h2.outbound_flow_control_window <= 0:
                    lane.queued = True
                    self._starve(lane)
                else:
                    self._stuck.add(lane)
                    lane.stall()
            elif lane.out:
                self._queue(lane)
            self._flush()  # here, so that `blocked` is known before the next one

    def _starve(self, lane: Lane) -> None:
        """It has something to send, and the connection's window is closed."""
        self._starved.append(lane)
        if self._starved_since is None:
            self._starved_since = self.house.now

    def _send_some(self, lane: Lane) -> bool:
        """Send a quantum; whether the windows were wide enough for all that was there of it."""
        room = _QUANTUM_BYTES
        try:
            while lane.out and room > 0:
                first = lane.out[0]
                window = self._h2.local_flow_control_window(lane.number)
                size = min(len(first), window, self._h2.max_outbound_frame_size)
                if size <= 0:
                    return False
                lane.out_bytes -= size
                room -= size
                if size < len(first):
                    lane.out[0] = first[size:]
                else:
                    lane.out.popleft()
                self._h2.send_data(lane.number, first[:size], end_stream=lane.ends)
                # Window updates are answers to bytes: a peer that takes whole frames has four for each of them.
                self._controls.give(4.0 if size < window else size / 4096)
                self._starved_since = None
            if lane.ends:
                if room == _QUANTUM_BYTES:  # there was nothing left to say it with
                    self._h2.end_stream(lane.number)
                lane.sent()
        except ProtocolError:  # as above
            self._drop(lane)
        finally:
            lane.took()
        return True

    def _flush_soon(self) -> None:
        if not self._busy:
            self._flush()

    def _flush(self) -> None:
        data = self._h2.data_to_send()
        if data:
            self.write(data)

    def _govern(self) -> None:
        # A peer that does not read gets no more answered, not even its pings and settings.
        self.read_on(self.ending or not self.blocked)

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.gone and not self.ending:
            self.unpark()
            self._pump()
            self._flush()
            self._govern()

    # Time, and the end.

    def watch(self, now: float) -> None:
        limits = self.house.limits
        for allowance in (self._controls, self._resets):
            allowance.passed(now - self._ticked)
        self._ticked = now
        if self._pong_due and now - self._pinged > limits.ping_timeout_s:
            self.abort()
            return
        if not self._pong_due and now - self._pinged > limits.ping_every_s:
            self._pinged, self._pong_due = now, True
            self._h2.ping(_PING)
            self._flush()
        for lane in tuple(self._lanes.values()):
            if not lane.complete and not lane.held_bytes and now - lane.heard > limits.body_timeout_s:
                self._late(lane)
            elif lane.stalled_since is not None and now - lane.stalled_since > limits.write_timeout_s:
                self._late_reader(lane)
        if self._starved_since is not None and now - self._starved_since > limits.write_timeout_s:
            for lane in tuple(self._starved):
                self._late_reader(lane)
        if not self._lanes and now - self._idle_since > limits.idle_timeout_s:
            self.farewell()

    def _late_reader(self, lane: Lane) -> None:
        limit = self.house.limits.write_timeout_s
        self.stalled(f"{self.peer} took nothing of a stream for {limit:g} s; it was reset")
        self.evict(lane)

    def evict(self, lane: Lane) -> None:
        """Reset a lane that its peer does not read. Whatever made its answer is cancelled."""
        with suppress(ProtocolError):
            self._h2.reset_stream(lane.number, ErrorCodes.CANCEL)
        self._drop(lane)
        self._flush_soon()

    def _late(self, lane: Lane) -> None:
        lane.open_ended = True
        lane.broken(408, f"no more of the body came within {self.house.limits.body_timeout_s:g} s")

    def farewell(self) -> None:
        """Take no more requests; end when those that are here are answered."""
        if self._last_lane is None:
            self._last_lane = self._h2.highest_inbound_stream_id
            self._flush()
            # Not the library's: after that it would not let us answer those that are here.
            self.write(_GOAWAY.pack(0, 8, 7, 0, 0, self._last_lane, ErrorCodes.NO_ERROR))
        if not self._lanes:
            self.linger()

    def wind_down(self) -> None:
        self.farewell()

    def _hang_up(self, bytes_max: int | None = None) -> None:
        """The connection is over for both sides."""
        self._leave_lanes()
        self.linger(bytes_max)

    def left(self) -> None:
        self._leave_lanes()

    def _leave_lanes(self) -> None:
        lanes = tuple(self._lanes.values())
        for held in (self._lanes, self._stuck, self._wanting, self._ready, self._starved):
            held.clear()
        for lane in lanes:
            lane.leave()
            lane.closed()
