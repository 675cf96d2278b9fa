"""[shell] Frames about a topic rather than its records: made, configured, dropped."""

from __future__ import annotations

from collections.abc import Callable

from tidelog.engine.config import OWN
from tidelog.engine.core import Core
from tidelog.errors import Error
from tidelog.formats import bodies, frame
from tidelog.formats.bodies import Body
from tidelog.wal import Commit, Token


class Control(Commit):
    """A frame about a topic: on disk before the caller hears of it, in force from then on.

    Made and submitted under the topic's lock. The seq of a ConfigUpdate is the last one assigned before it: replay
    applies the caps to records up to there, because the snapshot may already hold later ones.
    """

    __slots__ = ("_apply", "token")

    def __init__(self, core: Core, body: Body, apply: Callable[[], None]) -> None:
        seq, ts_ms = core.tail if isinstance(body, bodies.ConfigUpdate) else 0, core.shared.now_ms()
        made = frame.encode(body.KIND, topic_id=core.id, seq=seq, ts_ms=ts_ms, data=bodies.encode(body))
        super().__init__([made], frames=1, durable=True)
        # The ledger of gaps is made where the first removal is told of, which a checkpoint waits for.
        self.vital = core.name.startswith(OWN) or not isinstance(body, bodies.TopicCreate)
        self._apply = apply
        self.token: Token[None] = Token(core.shard)

    def done(self, error: Error | None) -> None:
        if error is None:
            self._apply()
            self.token.set(None)
        else:
            self.token.fail(error)
