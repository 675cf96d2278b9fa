"""[shell] Frames about a topic rather than its records: made, configured, dropped."""

from __future__ import annotations

from collections.abc import Callable

from tidelog.engine.core import Core
from tidelog.errors import Error
from tidelog.formats import bodies, frame
from tidelog.formats.bodies import Body
from tidelog.wal import Commit, Token


class Control(Commit):
    """A frame about a topic: on disk before the caller hears of it, in force from then on."""

    __slots__ = ("_apply", "token")

    def __init__(self, core: Core, body: Body, apply: Callable[[], None]) -> None:
        made = frame.encode(body.KIND, topic_id=core.id, ts_ms=core.shared.now_ms(), data=bodies.encode(body))
        super().__init__([made], frames=1, durable=True)
        self._apply = apply
        self.token: Token[None] = Token(core.shard)

    def done(self, error: Error | None) -> None:
        if error is None:
            self._apply()
            self.token.set(None)
        else:
            self.token.fail(error)
