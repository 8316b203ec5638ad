"""An engine in virtual time: continuous batching, chunked prefill before decode, first come first served, a prefix cache with LRU.

Constants are a roofline of Llama-3.1-8B in bf16 on one H100 SXM (3.35 TB/s, 989 TFLOP/s dense, half of which is reached), and
SGLang 0.5.23's defaults:

    decode step   2 ms of scheduling + max(16 GB of weights / 3.35 TB/s + 128 KiB of KV cache per token of context / 3.35 TB/s,
                                           2 · 8e9 FLOP · batch / 495 TFLOP/s)
    prefill step  2 ms + 2 · 8e9 FLOP · tokens / 495 TFLOP/s, at most 8,192 tokens; nothing is decoded meanwhile
    KV cache      88 % of 80 GB, less the weights and 2 GB, at 128 KiB a token: 400,000 tokens

A request is admitted when its uncached prompt fits beside what runs, with a tenth of the tokens that all of them may still sample
(SGLang's new_token_ratio at its floor). When the cache is full of running requests the last one admitted is retracted: it loses
its place, keeps its tokens, and is prefilled again.
"""

import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass

BYTES_PER_S = 3.35e12
PREFILL_TOKEN_S = 2 * 8e9 / (989e12 / 2)
WEIGHTS_S = 16e9 / BYTES_PER_S
CONTEXT_TOKEN_S = 131_072 / BYTES_PER_S
STEP_S = 0.002
CHUNK_TOKENS = 8_192
CACHE_TOKENS = 400_000
MAX_RUNNING = 2_048
NEW_TOKEN_RATIO = 0.1


@dataclass(eq=False)
class ModelRequest:
    """A turn of an episode: its prompt extends the episode's context so far."""

    episode: int
    prompt_tokens: int
    output_tokens: int
    max_new_tokens: int
    cached_tokens: int = 0
    num_done: int = 0
    """Tokens sampled when it was admitted last."""
    num_retractions: int = 0
    admitted_at_step: int = 0

    @property
    def context_tokens(self) -> int:
        return self.prompt_tokens + self.num_done


class EngineModel:
    """WAITING → prefill → RUNNING → finished, or retracted and WAITING again. Time is in seconds from zero."""

    def __init__(self, cache_tokens: int = CACHE_TOKENS) -> None:
        self.cache_tokens = cache_tokens
        self.now = 0.0
        self.waiting: deque[ModelRequest] = deque()
        self.running: dict[ModelRequest, None] = {}
        self.prefilled_tokens = 0
        self._prefilling: deque[tuple[ModelRequest, int]] = deque()
        self._finish: list[tuple[int, int, ModelRequest]] = []
        self._order = 0
        self._step = 0
        self._running_tokens = 0
        self._cached: OrderedDict[int, int] = OrderedDict()
        """Tokens by episode of contexts that no running request uses, least recently used first."""
        self._cached_tokens = 0

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def used_tokens(self) -> int:
        """Of the KV cache, by running requests."""
        return self._running_tokens

    def submit(self, request: ModelRequest) -> None:
        self.waiting.append(request)

    def abort(self, request: ModelRequest) -> None:
        """The caller left before it was admitted; one that runs ends by itself."""
        if request in self.waiting:
            self.waiting.remove(request)

    def advance(self, until: float) -> list[ModelRequest]:
        """Steps until that time. Returns what finished, with its cached tokens and retractions."""
        finished: list[ModelRequest] = []
        while self.now < until:
            self._admit()
            if self._prefilling:
                self._prefill_step()
            elif self.running:
                finished += self._decode_step()
            else:
                self.now = until
        return finished

    def _admit(self) -> None:
        while self.waiting and len(self.running) < MAX_RUNNING:
            request = self.waiting[0]
            kept = min(self._cached.get(request.episode, 0), request.context_tokens - 1)
            needed = request.context_tokens + NEW_TOKEN_RATIO * request.max_new_tokens * (len(self.running) + 1)
            if self.running and self._running_tokens + needed > self.cache_tokens:
                return
            self.waiting.popleft()
            self._cached_tokens -= self._cached.pop(request.episode, 0)
            if not request.num_retractions:
                request.cached_tokens = kept
            self.running[request] = None
            self._running_tokens += request.context_tokens
            self._prefilling.append((request, request.context_tokens - kept))
            self._evict()

    def _prefill_step(self) -> None:
        left = CHUNK_TOKENS
        while self._prefilling and left:
            request, tokens = self._prefilling.popleft()
            done = min(tokens, left)
            left -= done
            if done < tokens:
                self._prefilling.appendleft((request, tokens - done))
            else:
                self._begin_decode(request)
        tokens = CHUNK_TOKENS - left
        self.prefilled_tokens += tokens
        self.now += STEP_S + max(WEIGHTS_S, tokens * PREFILL_TOKEN_S)

    def _begin_decode(self, request: ModelRequest) -> None:
        request.admitted_at_step = self._step
        self._order += 1
        heapq.heappush(self._finish, (self._step + request.output_tokens - request.num_done, self._order, request))

    def _decode_step(self) -> list[ModelRequest]:
        batch = len(self.running)
        if self._running_tokens + batch > self.cache_tokens and batch > 1:
            self._retract()
            return []
        memory_s = WEIGHTS_S + self._running_tokens * CONTEXT_TOKEN_S
        self.now += STEP_S + max(memory_s, batch * PREFILL_TOKEN_S)
        self._step += 1
        self._running_tokens += batch
        self._evict()
        finished = []
        while self._finish and self._finish[0][0] <= self._step:
            request = heapq.heappop(self._finish)[2]
            if request in self.running:
                del self.running[request]
                self._release(request, request.prompt_tokens + request.output_tokens)
                finished.append(request)
        return finished

    def _retract(self) -> None:
        request = next(reversed(self.running))
        del self.running[request]
        self._finish = [entry for entry in self._finish if entry[2] is not request]
        heapq.heapify(self._finish)
        request.num_done += self._step - request.admitted_at_step
        request.num_retractions += 1
        self._release(request, request.context_tokens)
        self.waiting.appendleft(request)

    def _release(self, request: ModelRequest, tokens: int) -> None:
        self._running_tokens -= tokens
        self._cached[request.episode] = tokens
        self._cached_tokens += tokens
        self._evict()

    def _evict(self) -> None:
        excess = self._running_tokens + self._cached_tokens - self.cache_tokens
        while excess > 0 and self._cached:
            episode, tokens = next(iter(self._cached.items()))
            gone = min(tokens, excess)
            excess -= gone
            self._cached_tokens -= gone
            if gone == tokens:
                del self._cached[episode]
            else:
                self._cached[episode] = tokens - gone
