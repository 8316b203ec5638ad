"""A number-guessing game in a process of its own, served by OpenEnv's server package.

    python -m examples.openenv_guess --port 8900

Register it from anywhere that reaches the server, while a run goes on:

    curl -X POST http://127.0.0.1:8801/environments -H 'Content-Type: application/json' -d '{
      "name": "guess", "url": "ws://127.0.0.1:8900", "arguments": {"highest": 20}, "limits": {"max_turns": 6}
    }'

The policy's text is the action's one field; `arguments` are data of every reset.
"""

import argparse
import random
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Guess(Action):
    """What the policy says."""

    guess: int


class Hint(Observation):
    """What it reads."""

    text: str


class GuessingGame(Environment[Guess, Hint, State]):
    """Find the number; each hint says higher or lower."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, highest: int = 20, **_: Any) -> Hint:
        self.number = random.Random(seed).randint(1, highest)
        self.steps = State(episode_id=episode_id, step_count=0)
        return Hint(text=f"guess a number from 1 to {highest}")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        self.steps = State(episode_id=self.steps.episode_id, step_count=self.steps.step_count + 1)
        if action.guess == self.number:
            return Hint(text="right", reward=1.0, done=True)
        return Hint(text="higher" if action.guess < self.number else "lower", reward=0.0)

    @property
    def state(self) -> State:
        return getattr(self, "steps", State())


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve the guessing game over OpenEnv's protocol.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8900)
    parser.add_argument("--places", type=int, default=64, help="episodes at a time")
    arguments = parser.parse_args()
    app = create_app(GuessingGame, Guess, Hint, env_name="guess", max_concurrent_envs=arguments.places)
    uvicorn.run(app, host=arguments.host, port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
