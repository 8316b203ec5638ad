"""The load that agents make: sessions of several turns, whose calls never stop."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

FIRST_PROMPT_TOKENS = 24
OUTPUT_TOKENS = 8
"""Few, so that tokens are counted soon after they were sampled."""
OBSERVATION_TOKENS = 8
TURNS = 4
SETTLED = 2
RETRY_S = 0.1


@dataclass(frozen=True)
class Call:
    """One that was answered."""

    finished_at: float
    num_tokens: int
    num_retractions: int
    is_whole: bool
    """It was not aborted."""
    turns_since_update: int
    """0 for the first call of its session that began under other weights than the call before it; `SETTLED` from the third on, and
    in a session that saw no update."""
    hit_rate: float | None
    """Share of the tokens that the call before it left in the cache which this one found there; None for a session's first call."""


@dataclass
class Load:
    """Callers, each with one session at a time."""

    hub_url: str
    num_callers: int
    calls: list[Call] = field(default_factory=list)
    num_failed: int = 0
    _goes_on: threading.Event = field(default_factory=threading.Event)
    _is_over: threading.Event = field(default_factory=threading.Event)
    _num_asking: int = 0
    _quiet: threading.Condition = field(default_factory=threading.Condition)

    @contextmanager
    def running(self) -> Iterator["Load"]:
        self._goes_on.set()
        callers = [threading.Thread(target=self._run, args=(index,)) for index in range(self.num_callers)]
        for caller in callers:
            caller.start()
        try:
            yield self
        finally:
            self._is_over.set()
            self._goes_on.set()
            for caller in callers:
                caller.join()

    @contextmanager
    def held(self) -> Iterator[None]:
        """No call is under way within it."""
        self._goes_on.clear()
        with self._quiet:
            self._quiet.wait_for(lambda: self._num_asking == 0)
        yield
        self._goes_on.set()

    def tokens_between(self, start: float, end: float) -> int:
        """Of calls that ended between; those of a call count when it ends."""
        return sum(call.num_tokens for call in self.calls if start <= call.finished_at < end)

    def _run(self, index: int) -> None:
        with httpx.Client(trust_env=False, timeout=300) as client:
            session = 0
            while not self._is_over.is_set():
                self._play(client, index, session)
                session += 1

    def _play(self, client: httpx.Client, index: int, session: int) -> None:
        tokens = [5 + index, 5 + session % 1000, *range(10, 8 + FIRST_PROMPT_TOKENS)]
        version, turns_since_update, cached_before = None, SETTLED, 0
        for _ in range(TURNS):
            self._goes_on.wait()
            if self._is_over.is_set():
                return
            answer = self._ask(client, f"{index}-{session}", tokens)
            if answer is None:
                self.num_failed += 1
                return
            meta_info, output_ids = answer["meta_info"], answer["output_ids"]
            began_at_version = meta_info["weight_versions"][0]["version"]
            is_first = version is None
            is_changed = not is_first and began_at_version != version
            turns_since_update = 0 if is_changed else min(SETTLED, turns_since_update + 1)
            version = began_at_version
            self.calls.append(
                Call(
                    time.perf_counter(),
                    int(meta_info["completion_tokens"]),
                    int(meta_info.get("num_retractions") or 0),
                    meta_info["finish_reason"]["type"] != "abort" and len(output_ids) == OUTPUT_TOKENS,
                    turns_since_update,
                    None if is_first else min(1.0, int(meta_info["cached_tokens"]) / cached_before),
                )
            )
            cached_before = len(tokens) + len(output_ids) - 1
            tokens = [*tokens, *output_ids, *range(40, 40 + OBSERVATION_TOKENS)]

    def _ask(self, client: httpx.Client, session_id: str, tokens: list[int]) -> dict[str, Any] | None:
        """The answer; None if it was an error. A hub that was killed is asked again when it is back, as agents do."""
        sampling = {"max_new_tokens": OUTPUT_TOKENS, "temperature": 1.0, "ignore_eos": True}
        body = {"input_ids": tokens, "sampling_params": sampling, "return_logprob": True}
        with self._asking():
            while True:
                try:
                    response = client.post(f"{self.hub_url}/generate", json=body, headers={"X-Session-Id": session_id})
                except (httpx.RemoteProtocolError, httpx.ReadError, httpx.ConnectError):
                    time.sleep(RETRY_S)
                    continue
                return dict(response.json()) if response.is_success else None

    @contextmanager
    def _asking(self) -> Iterator[None]:
        with self._quiet:
            self._num_asking += 1
        try:
            yield
        finally:
            with self._quiet:
                self._num_asking -= 1
                self._quiet.notify_all()
