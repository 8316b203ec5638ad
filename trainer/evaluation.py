"""Held-out tasks: asked of the agents between two updates, so that they run on exactly the weights just pushed. Rank 0 only."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path

import httpx
import msgspec

from shared.agents_token import agents_access
from shared.configuration import EvaluationSection
from shared.decoding import UNDECODABLE
from shared.evaluation import EvaluationRequest, EvaluationResult, Transcript
from trainer.stopping import StopInterrupt, StopSignal
from trainer.trackers.trackers import Trackers
from trainer.tracking import Evaluation, JsonLines

NUM_TRANSCRIPTS = 3
CONNECT_ATTEMPTS = 30
RETRY_S = 1.0
MEANWHILE_S = 1.0
JSON = {"Content-Type": "application/json"}


class Evaluations:
    """Runs those that are due, and leaves evaluations.jsonl and transcripts/ in the run directory.

    An evaluation that fails is reported and left out: agents that are away are no reason to lose a training run.
    """

    def __init__(
        self, settings: EvaluationSection, *, agents: str, directory: Path, num_updates: int, timeout_s: float, tracker: Trackers
    ) -> None:
        """Args: agents: address of the agents. timeout_s: longest wait for one evaluation."""
        self._settings = settings
        self._agents = agents
        self._directory = directory
        self._num_updates = num_updates
        self._tracker = tracker
        self._lines = JsonLines(directory / "evaluations.jsonl")
        self._client = httpx.Client(
            base_url=agents, timeout=httpx.Timeout(timeout_s, connect=10.0), headers=agents_access(), trust_env=False
        )
        self._done: set[int] = set()

    def resume(self, version: int) -> None:
        """Those up to `version` need not be repeated; later ones belong to a lineage that was cut off."""
        self._done = {line["version"] for line in self._lines.read() if line["version"] <= version}

    def close(self) -> None:
        self._client.close()

    def run_if_due(self, version: int, stop: StopSignal, *, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Evaluates the weights in force, `version`, unless it is not its turn or training is asked to stop.

        Args: meanwhile: called every second while the episodes run, and not interrupted by a wish to stop.
        """
        if not self._is_due(version):
            return
        try:
            sampled = self._evaluate(version, stop, meanwhile, greedy=False, transcripts=NUM_TRANSCRIPTS)
            self._write_transcripts(version, sampled.transcripts)
            if self._settings.greedy:
                self._evaluate(version, stop, meanwhile, greedy=True, transcripts=0)
        except StopInterrupt:
            self._tracker.note(f"evaluation of version {version} cut short")
        except (httpx.HTTPError, *UNDECODABLE) as error:
            self._tracker.note(f"evaluation of version {version} left out: the agents at {self._agents} answered {error!r}")
        self._done.add(version)

    def _is_due(self, version: int) -> bool:
        is_turn = version % self._settings.every_updates == 0 or version == self._num_updates
        return self._settings.num_episodes > 0 and is_turn and version not in self._done

    def _evaluate(
        self, version: int, stop: StopSignal, meanwhile: Callable[[], object], *, greedy: bool, transcripts: int
    ) -> EvaluationResult:
        request = EvaluationRequest(num_episodes=self._settings.num_episodes, greedy=greedy, transcripts=transcripts)
        answer = self._asked(msgspec.json.encode(request))
        is_answered = False
        while not is_answered:
            with stop.interrupting():
                is_answered = bool(wait((answer,), timeout=MEANWHILE_S).done)
            if not is_answered:
                meanwhile()
        reply = msgspec.json.decode(answer.result(), type=EvaluationResult)
        evaluation = Evaluation(version=version, greedy=greedy, results=reply.results, time=time.time())
        self._lines.append(evaluation)
        self._tracker.evaluation(evaluation)
        for environment, result in reply.results.items():
            self._tracker.note(
                f"evaluation of version {version}, {environment}, {'greedy' if greedy else 'sampled'}: "
                f"success {result.success_rate:.3f}, reward {result.mean_reward:.3f}, {result.episodes} episodes"
            )
        return reply

    def _asked(self, body: bytes) -> Future[bytes]:
        """The agents' answer to come. Its thread may wait for it in vain until the process ends, if training stops before."""
        answer: Future[bytes] = Future()

        def ask() -> None:
            try:
                answer.set_result(self._post(body))
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=ask, name="evaluation", daemon=True).start()
        return answer

    def _post(self, body: bytes) -> bytes:
        for _ in range(CONNECT_ATTEMPTS - 1):
            try:
                return self._client.post("/evaluations", content=body, headers=JSON).raise_for_status().content
            except httpx.ConnectError:
                time.sleep(RETRY_S)
        return self._client.post("/evaluations", content=body, headers=JSON).raise_for_status().content

    def _write_transcripts(self, version: int, transcripts: Sequence[Transcript]) -> None:
        folder = self._directory / "transcripts"
        folder.mkdir(exist_ok=True)
        parts = [
            f"{item.environment} · task {item.task_id} · reward {item.reward:g} · {item.outcome}\n\n{item.text}\n"
            for item in transcripts
        ]
        (folder / f"v{version:05d}.txt").write_text("\n\n".join(parts))
