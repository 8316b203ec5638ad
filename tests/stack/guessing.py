"""A small environment for a policy of random weights: two turns, and a reward that differs between siblings."""

import asyncio

from services.env_agents.environment import Action, Environment, Message, Step, Task

NUM_TURNS = 2


class Guessing(Environment):
    """Asks twice, slowly enough for weight updates to come in between; rewards an answer of even length."""

    async def reset(self, task: Task) -> list[Message]:
        self.num_turns = 0
        return [{"role": "user", "content": f"Say {task.seed}."}]

    async def step(self, action: Action) -> Step:
        self.num_turns += 1
        await asyncio.sleep(0.05)
        if self.num_turns < NUM_TURNS:
            return Step(messages=[{"role": "user", "content": "Again."}])
        return Step(reward=float(len(action.text) % 2 == 0), done=True)
