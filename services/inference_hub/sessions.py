"""Running episodes as the hub sees them: which engine holds each one's prefix, and how many tokens of it. Pure."""

from collections import Counter, OrderedDict
from typing import Final, NamedTuple

MAX_SESSIONS: Final = 65_536
SILENT_S: Final = 60.0
"""After so long without a call, an episode's context no longer counts as one that a cache has to keep."""


TYPICAL_GAIN: Final = 0.02
"""Weight of the episode that ended last in the mean of their lengths."""


class Context(NamedTuple):
    engine_id: str
    num_tokens: int
    """Prompt and answer of the last call: what that engine's cache should hold."""
    charged_tokens: int
    """What it is expected to grow to, at least `num_tokens`."""
    used_at: float


class Sessions:
    """Where each session was last routed; the least recently used are forgotten first, at the price of a cold prefix."""

    def __init__(self, capacity: int = MAX_SESSIONS) -> None:
        self._capacity = capacity
        self._engine_id_by_session: OrderedDict[str, str] = OrderedDict()
        self._context_by_session: OrderedDict[str, Context] = OrderedDict()
        self._tokens_by_engine: Counter[str] = Counter()
        self._typical_tokens: float | None = None

    def __len__(self) -> int:
        return len(self._engine_id_by_session)

    def engine_id(self, session_id: str) -> str | None:
        return self._engine_id_by_session.get(session_id)

    def held_tokens(self, engine_id: str) -> int:
        """Tokens that this engine's cache should keep for running episodes, at the length each is expected to end with."""
        return self._tokens_by_engine[engine_id]

    def expected_tokens(self, num_tokens: int, most_tokens: int) -> int:
        """How long an episode's context will be that now has `num_tokens`: as those that ended were on average. Before any has
        ended, as long as this call may make it."""
        return most_tokens if self._typical_tokens is None else max(num_tokens, round(self._typical_tokens))

    def remember(self, session_id: str, engine_id: str) -> None:
        self._engine_id_by_session[session_id] = engine_id
        self._engine_id_by_session.move_to_end(session_id)
        if len(self._engine_id_by_session) > self._capacity:
            self.end(next(iter(self._engine_id_by_session)))

    def hold(self, session_id: str, engine_id: str, num_tokens: int, *, most_tokens: int, now: float) -> None:
        """The session's context is now in this engine, with so many tokens, which its call makes `most_tokens` at most."""
        self.remember(session_id, engine_id)
        self._drop_context(session_id)
        charged_tokens = self.expected_tokens(num_tokens, most_tokens)
        self._context_by_session[session_id] = Context(engine_id, num_tokens, charged_tokens, now)
        self._tokens_by_engine[engine_id] += charged_tokens

    def end(self, session_id: str) -> None:
        """The episode is over: nobody will need its prefix."""
        context = self._context_by_session.get(session_id)
        if context is not None:
            typical = context.num_tokens if self._typical_tokens is None else self._typical_tokens
            self._typical_tokens = typical + TYPICAL_GAIN * (context.num_tokens - typical)
        self._engine_id_by_session.pop(session_id, None)
        self._drop_context(session_id)

    def release_silent(self, now: float) -> bool:
        """Stops holding contexts of silent episodes, which may be over. Returns whether there were any."""
        found = False
        while self._context_by_session:
            session_id, context = next(iter(self._context_by_session.items()))
            if now - context.used_at < SILENT_S:
                break
            self._drop_context(session_id)
            found = True
        return found

    def _drop_context(self, session_id: str) -> None:
        context = self._context_by_session.pop(session_id, None)
        if context is not None:
            self._tokens_by_engine[context.engine_id] -= context.charged_tokens
