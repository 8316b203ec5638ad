"""The environment that needs no code: a prompt from a dataset, one turn, and the reward that the spec declares.

{"name": "gsm8k",
 "import_path": "services.env_agents.dataset_environment:DatasetEnvironment",
 "tasks": {"kind": "parquet", "path": "gsm8k/train.parquet", "max_prompt_length": 512},
 "reward": {"kind": "function", "import_path": "services.env_agents.reward_functions:same_number"}}
"""

from services.env_agents.environment import Action, Environment, Message, Step, Task


class DatasetEnvironment(Environment):
    """Asks what the row's prompt column asks. It scores nothing itself."""

    needs_prompts = True

    async def reset(self, task: Task) -> list[Message]:
        return list(task.prompt)

    async def step(self, action: Action) -> Step:
        return Step(done=True)
