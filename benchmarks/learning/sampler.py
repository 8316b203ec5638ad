"""Sampling in torch at the transport seam, so that every token of an update has exactly the version that the experiment wants.

Shapes: B calls, P tokens of the longest prompt, V vocabulary.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor

from services.env_agents.generation import Generation
from shared.environment_spec import SamplingParameters
from shared.versions import VersionSpan


@dataclass
class _Call:
    token_ids: list[int]
    max_new_tokens: int
    temperature: float
    is_greedy: bool
    answer: asyncio.Future[Generation]


class TorchSampler:
    """A GenerationClient that answers when every open episode waits for it: all calls are one batch."""

    def __init__(self, model_path: Path, stop_token_ids: Sequence[int], *, seed: int) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, local_files_only=True)
        self._stop_ids = torch.tensor(list(stop_token_ids))
        self._random = torch.Generator().manual_seed(seed)
        self._version = 0
        self._calls: list[_Call] = []
        self._num_open = 0

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Samples from these weights, by Hugging Face name, from now on."""
        missing, unexpected = self._model.load_state_dict(weights, strict=False)
        misfits = {*missing, *unexpected} - {"lm_head.weight"}
        assert not misfits, f"weights do not fit: {misfits}"
        self._version = version

    def open_episode(self) -> None:
        self._num_open += 1

    def close_episode(self) -> None:
        self._num_open -= 1
        self._answer_if_all_wait()

    async def generate(
        self,
        token_ids: Sequence[int],
        *,
        sampling: SamplingParameters,
        max_new_tokens: int,
        is_greedy: bool,
        session_id: str,
        deadline: float,
    ) -> Generation:
        """One turn, at the temperature of `sampling` without top-p and top-k."""
        answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._calls.append(_Call(list(token_ids), max_new_tokens, sampling.temperature, is_greedy, answer))
        self._answer_if_all_wait()
        return await answer

    def _answer_if_all_wait(self) -> None:
        if self._calls and len(self._calls) == self._num_open:
            calls, self._calls = self._calls, []
            for call, generation in zip(calls, self._sample(calls), strict=True):
                call.answer.set_result(generation)

    @torch.no_grad()
    def _sample(self, calls: Sequence[_Call]) -> list[Generation]:
        """Prompts are padded on the left, so that all rows sample at the same position."""
        longest = max(len(call.token_ids) for call in calls)
        padding = torch.tensor([longest - len(call.token_ids) for call in calls])
        input_ids_BP = torch.tensor([[0] * (longest - len(call.token_ids)) + call.token_ids for call in calls])
        mask_BT = (torch.arange(longest) >= padding[:, None]).long()
        temperatures_B1 = torch.tensor([call.temperature for call in calls])[:, None]
        is_greedy_B = torch.tensor([call.is_greedy for call in calls])
        is_running_B = torch.ones(len(calls), dtype=torch.bool)
        cache = transformers.DynamicCache()
        tokens, logprobs, running = [], [], []
        for _ in range(max(call.max_new_tokens for call in calls)):
            positions_BP = (mask_BT.cumsum(1) - 1).clamp(min=0)[:, -input_ids_BP.shape[1] :]
            logits_BV = self._model(
                input_ids=input_ids_BP,
                attention_mask=mask_BT,
                position_ids=positions_BP,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
            logprobs_BV = (logits_BV / temperatures_B1).log_softmax(-1)
            drawn_B = torch.multinomial(logprobs_BV.exp(), 1, generator=self._random)[:, 0]
            token_B = torch.where(is_greedy_B, logprobs_BV.argmax(-1), drawn_B)
            tokens.append(token_B)
            logprobs.append(logprobs_BV.gather(-1, token_B[:, None])[:, 0])
            running.append(is_running_B)
            is_running_B = is_running_B & ~torch.isin(token_B, self._stop_ids)
            if not is_running_B.any():
                break
            input_ids_BP = token_B[:, None]
            mask_BT = torch.cat([mask_BT, mask_BT.new_ones(len(calls), 1)], dim=1)
        num_sampled = torch.stack(running, 1).sum(1).tolist()
        rows = zip(calls, torch.stack(tokens, 1).tolist(), torch.stack(logprobs, 1).tolist(), num_sampled, strict=True)
        return [
            self._generation(call, token_ids, values, min(count, call.max_new_tokens)) for call, token_ids, values, count in rows
        ]

    def _generation(self, call: _Call, token_ids: list[int], logprobs: list[float], count: int) -> Generation:
        is_cut = token_ids[count - 1] not in self._stop_ids.tolist()
        return Generation(token_ids[:count], logprobs[:count], [VersionSpan(0, count, self._version)], is_cut)
