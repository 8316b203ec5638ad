"""Following links: one to four tool calls, each depending on the last one's result.

Tasks are seeds; a seed makes the table, the start and the number of links. Register it while a run goes on:

    curl -X POST http://127.0.0.1:8801/environments -H 'Content-Type: application/json' -d '{
      "name": "lookup_chain",
      "import_path": "examples.lookup_chain:LookupChain",
      "arguments": {"max_links": 3},
      "tasks": {"kind": "seeds", "start": 0, "count": 1000000},
      "evaluation_tasks": {"kind": "seeds", "start": 1000000, "count": 200}
    }'
"""

import random

from services.env_agents.environment import Environment, Message, Task, ToolError, tool


class LookupChain(Environment):
    """A table that maps each two-digit number to another one, which only the tool can see."""

    def __init__(self, max_links: int = 4) -> None:
        self.max_links = max_links

    async def reset(self, task: Task) -> list[Message]:
        random_numbers = random.Random(task.seed)
        keys = list(range(10, 100))
        values = random_numbers.sample(keys, len(keys))
        self.table = dict(zip(keys, values, strict=True))
        start = random_numbers.choice(keys)
        num_links = random_numbers.randint(1, self.max_links)
        self.answer = start
        for _ in range(num_links):
            self.answer = self.table[self.answer]
        return [
            {"role": "system", "content": "Follow the links, then answer with the last number."},
            {"role": "user", "content": f"start {start}, follow {num_links}"},
        ]

    @tool
    async def lookup(self, key: int) -> int:
        """Returns the number that a key links to."""
        if key not in self.table:
            raise ToolError(f"no key {key}")
        return self.table[key]

    async def score(self, answer: str) -> float:
        """1 for the last number of the chain."""
        return float(answer.strip() == str(self.answer))
