"""[shell] An HTTP/2 connection, for peers that know beforehand that it is one.

    frames ──► h2 ──► events ──► lanes, one per request, all at the same time
    lanes ──► a quantum each, in turn, while their windows and the socket let them ──► frames

The library keeps the protocol's rules and raises where a peer breaks them: then it gets a GOAWAY and the connection
ends. Windows are given back as bodies are consumed: by being collected, taken by a handler, or thrown away.
A peer that is asked whether it is there and does not say so in time is not.
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

from tidelog.server.http.connection import Connection
from tidelog.server.http.exchange import Fault
from tidelog.server.http.house import House
from tidelog.server.http.lane import Lane
from tidelog.server.http.seam import Request

_QUANTUM_BYTES: Final = 64 << 10
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
        self._stuck: set[Lane] = set()  # lanes that wait for a window
        self._busy = False  # frames are gathered and written at the end
        self._last_lane: int | None = None  # no lanes after this one: we said farewell
        self._resets = 0.0
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
        self._take(data)

    # What comes in.

    def received(self, data: memoryview) -> None:
        self._take(bytes(data))

    def _take(self, data: bytes) -> None:
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
        self._govern()

    def _on_request(self, event: events.RequestReceived) -> None:
        number = event.stream_id
        if self._last_lane is not None and number > self._last_lane:
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
        limits = self.house.limits
        if method == "CONNECT":
            lane.fault = Fault(501, "this is not a proxy")
        elif not target.isascii() or target[:1] not in ("/", "*"):
            lane.fault = Fault(400, "the target is not a path")
        elif len(target) > limits.target_bytes_max:
            lane.fault = Fault(414, f"the target is longer than {limits.target_bytes_max} bytes")
        lane.complete = event.stream_ended is not None
        self._lanes[number] = lane
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
        if lane is None:
            return
        self._drop(lane)
        self._resets += 1
        if self._resets > self.house.limits.resets_max:
            self._h2.close_connection(ErrorCodes.ENHANCE_YOUR_CALM)
            self._flush()
            self._hang_up()

    def _on_window(self, event: events.WindowUpdated) -> None:
        if event.stream_id:
            lane = self._lanes.get(event.stream_id)
            if lane is not None and lane in self._stuck:
                self._stuck.discard(lane)
                self._queue(lane)
        else:
            self._on_settings(None)

    def _on_settings(self, _: object) -> None:
        """A window may have opened for every lane."""
        stuck, self._stuck = self._stuck, set()
        for lane in sorted(stuck, key=lambda lane: lane.number):
            self._queue(lane)

    def _on_pong(self, event: events.PingAckReceived) -> None:
        if event.ping_data == _PING:
            self._pong_due = False

    def _on_goaway(self, event: events.ConnectionTerminated) -> None:  # noqa: ARG002 - whatever its reason
        self._hang_up()

    # What lanes ask for.

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
        self._lanes.pop(lane.number, None)
        self._stuck.discard(lane)
        if not self._lanes:
            self._idle_since = self.house.now
            if self._last_lane is not None:
                self._flush()
                self.linger()

    def _drop(self, lane: Lane) -> None:
        lane.leave()
        self.done(lane)

    # What goes out.

    def _queue(self, lane: Lane) -> None:
        if not lane.queued and lane not in self._stuck:
            lane.queued = True
            self._ready.append(lane)

    def _pump(self) -> None:
        while self._ready and not self.blocked and not self.ending:
            lane = self._ready.popleft()
            lane.queued = False
            if lane.away or lane.finished:
                continue
            if not self._send_some(lane):
                self._stuck.add(lane)
            elif lane.out:
                self._queue(lane)
            self._flush()  # here, so that `blocked` is known before the next one

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
            self._pump()
            self._flush()
            self._govern()

    # Time, and the end.

    def watch(self, now: float) -> None:
        limits = self.house.limits
        self._resets = max(0.0, self._resets - (now - self._ticked) * limits.resets_max / 16)
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
        if not self._lanes and now - self._idle_since > limits.idle_timeout_s:
            self.farewell()

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

    def _hang_up(self) -> None:
        """The connection is over for both sides."""
        for lane in tuple(self._lanes.values()):
            lane.leave()
        self._lanes.clear()
        self._stuck.clear()
        self._ready.clear()
        self.linger()

    def left(self) -> None:
        lanes = tuple(self._lanes.values())
        self._lanes.clear()
        self._stuck.clear()
        self._ready.clear()
        for lane in lanes:
            lane.leave()
