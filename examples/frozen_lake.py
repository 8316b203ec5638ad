"""Gymnasium's FrozenLake as text: walk from S to G over frozen ground (F) without falling into a hole (H).

Register it while a run goes on:

    curl -X POST http://127.0.0.1:8801/environments -H 'Content-Type: application/json' -d '{
      "name": "frozen_lake",
      "import_path": "examples.frozen_lake:FrozenLake",
      "arguments": {"size": 4, "is_slippery": false},
      "limits": {"max_turns": 20, "max_tokens": 2048}
    }'

An environment that needs no words of its own needs no file either: with `gymnasium` in env_agents.import_allowlist,
`"import_path": "gymnasium:make", "arguments": {"id": "FrozenLake-v1"}` shows observations and takes actions as numbers.
"""

from typing import Any

import gymnasium
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

from services.env_agents.environment import Message, Task
from services.env_agents.gymnasium_adapter import GymnasiumEnvironment

MOVES = {"left": 0, "down": 1, "right": 2, "up": 3}


class FrozenLake(GymnasiumEnvironment):
    """Each task's seed makes its own lake."""

    instructions = "Walk from S to G. H is a hole. Answer with left, down, right or up."

    def __init__(self, size: int = 4, is_slippery: bool = False) -> None:
        super().__init__(gymnasium.make, id="FrozenLake-v1", is_slippery=is_slippery)
        self.size = size

    async def reset(self, task: Task) -> list[Message]:
        self.lake = generate_random_map(self.size, seed=task.seed)
        self.arguments["desc"] = self.lake
        return await super().reset(task)

    def describe(self, observation: Any) -> str:
        """The map, with an X where the player stands."""
        row, column = divmod(int(observation), self.size)
        rows = [list(line) for line in self.lake]
        rows[row][column] = "X"
        return "\n".join("".join(line) for line in rows)

    def choose(self, text: str) -> int:
        """The move that the text names."""
        move = text.strip().lower()
        if move not in MOVES:
            raise ValueError(f"answer with {', '.join(MOVES)}")
        return MOVES[move]
