"""[shell] A WebSocket whose frames somebody else's server keeps: three loops, and the handler in the middle.

receive ──► inbox ──► handler ──► outbox ──► send
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from tidelog.server.http.house import House
from tidelog.server.http.outbox import Outbox
from tidelog.server.http.seam import Gone, Upgrade


class AsgiSocket:
    def __init__(
        self,
        house: House,
        upgrade: Upgrade,
        receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
        send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
    ) -> None:
        self._house, self._upgrade, self._receive, self._tell = house, upgrade, receive, send
        self._inbox: deque[str | bytes] = deque()
        self._came, self._room = asyncio.Event(), asyncio.Event()
        self._outbox = Outbox(house.limits)
        self._farewell: tuple[int, str] | None = None  # the first close that was asked for
        self._gone = False
        self._shut = False  # no more messages come

    async def serve(self) -> None:
        """Accept, have the handler run, and return when the socket is closed."""
        await self._tell({"type": "websocket.accept"})
        work = self._house.spawn(self._run())
        listening = self._house.loop.create_task(self._listen(work))
        try:
            while (text := await self._outbox.next()) is not None:
                await self._tell({"type": "websocket.send", "text": text.decode()})
            if not self._gone:
                code, reason = self._farewell or (1000, "")
                await self._tell({"type": "websocket.close", "code": code, "reason": reason})
        finally:
            self._no_more()
            self._outbox.shut()
            listening.cancel()
            self._house.stop(work)
            await asyncio.gather(listening, work, return_exceptions=True)

    async def _run(self) -> None:
        code = 1011
        try:
            await self._upgrade.run(self)
            code = 1000
        except Gone:
            code = 1000
        except Exception as error:  # the rim: whatever a handler does wrong is one peer's 1011
            self._house.report("the handler of a WebSocket failed", error)
        finally:
            self.close(code)

    async def _listen(self, work: asyncio.Task[None]) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "websocket.disconnect":
                break
            text = message.get("text")
            data: str | bytes = message.get("bytes") or b"" if text is None else text
            size = len(data if isinstance(data, bytes) else data.encode())
            if size > self._upgrade.message_bytes_max:
                self._no_more()
                self.close(1009, f"more than {self._upgrade.message_bytes_max} bytes")
                continue
            if not self._shut:
                self._inbox.append(data)
                self._came.set()
            while len(self._inbox) >= self._house.limits.messages_max:
                self._room.clear()
                await self._room.wait()
        self._gone = True
        self._no_more()
        self._outbox.shut()
        self._house.stop(work)

    def _no_more(self) -> None:
        self._shut = True
        self._came.set()

    # The handler's side.

    async def receive(self) -> str | bytes | None:
        while not self._inbox:
            if self._shut:
                return None
            self._came.clear()
            await self._came.wait()
        self._room.set()
        return self._inbox.popleft()

    @property
    def waiting(self) -> int:
        return self._outbox.waiting

    def send(self, text: bytes) -> None:
        self._outbox.write(text)

    async def drained(self) -> None:
        await self._outbox.drained()

    def close(self, code: int = 1000, reason: str = "") -> None:
        if self._farewell is None:
            self._farewell = (code, reason)
            self._outbox.end(True)
