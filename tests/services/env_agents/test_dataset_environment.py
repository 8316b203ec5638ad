"""A dataset and a reward function, without a line of code: what plain RLVR needs."""

import pyarrow
import pyarrow.parquet
import pytest

from services.env_agents.rewards import DeclaredReward, RewardError, RewardProblem
from services.env_agents.tasks import Task
from shared.environment_spec import FunctionReward
from shared.trajectory import Outcome

TASK = Task(task_id="0", seed=0, data={})
ROWS = [
    {"prompt": [{"role": "user", "content": f"{n} + {n}?"}], "reward_model": {"style": "rule", "ground_truth": str(2 * n)}}
    for n in range(8)
]


@pytest.fixture
async def gsm(http, tmp_path):
    """Registers the dataset by HTTP, and says how."""
    path = tmp_path / "gsm.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([*ROWS, {"prompt": None, "reward_model": None}]), path)
    body = {
        "name": "gsm",
        "import_path": "services.env_agents.dataset_environment:DatasetEnvironment",
        "tasks": {"kind": "parquet", "path": str(path)},
        "evaluation_tasks": {"kind": "parquet", "path": str(path)},
        "reward": {"kind": "function", "import_path": "services.env_agents.reward_functions:same_number", "part": "right"},
    }
    answer = await http.post("/environments", json=body)
    assert answer.status_code == 201, answer.text
    return answer.json()


async def test_rows_become_prompts_and_answers_become_rewards(gsm, registry, agent, identity, hub):
    hub.policy = lambda text: "It is 6.<|im_end|>"
    loaded = registry.get("gsm").loaded
    task = next(task for task in map(loaded.tasks.task, range(8)) if task.answer == "6")
    record = await agent.run(loaded.create, loaded.spec, task, identity, reward=loaded.reward)
    assert (record.outcome, record.reward, record.reward_parts) == (Outcome.COMPLETED, 1.0, {"right": 1.0})
    assert record.timings.reward_s > 0
    assert "user\n3 + 3?<" in hub.tokenizer.decode(hub.requests[0]["input_ids"])


async def test_evaluations_use_the_reward_too(gsm, http, hub):
    hub.policy = lambda text: "6<|im_end|>"
    answer = (await http.post("/evaluations", json={"num_episodes": 8})).json()
    assert answer["results"]["gsm"]["mean_reward"] == 1 / 8


async def test_what_was_left_out_is_shown(gsm, http):
    assert gsm["dataset"] == {"rows": 9, "unreadable": 1, "overlong": 0}
    assert (await http.get("/environments/gsm")).json()["dataset"] == gsm["dataset"]


@pytest.fixture
def play(agent, make_spec, identity):
    """One episode of an environment that scores 1 for 42, with a declared reward that does `score`."""

    async def play(create, score, **limits):
        class Source:
            async def score(self, episode):
                return score(episode)

        reward = DeclaredReward(FunctionReward(import_path="a:b"), Source())
        return await agent.run(create, make_spec(**limits), TASK, identity, reward=reward)

    return play


async def test_declared_reward_is_added_to_what_the_environment_scored(play, question_environment):
    seen = []

    def score(episode):
        seen.append((episode, question_environment.num_open))
        return {"reward": 0.25, "parts": {"brevity": 0.25}}

    record = await play(question_environment, score)
    assert (record.reward, record.turns[-1].reward) == (1.25, 1.25)
    assert record.reward_parts == {"reward": 0.25, "reward.brevity": 0.25}
    [(episode, num_open)] = seen
    assert episode.messages == [
        {"role": "user", "content": "what is 6 * 7?"},
        {"role": "assistant", "content": "42"},
    ]
    assert (episode.task, episode.answer) == (TASK, "42")
    assert num_open == 0, "the environment's place is free while a reward is waited for"


async def test_failed_reward_is_an_environment_error_and_no_silent_zero(play, question_environment):
    def score(episode):
        raise RewardError(RewardProblem.ERROR, "no such model")

    record = await play(question_environment, score)
    assert record.outcome is Outcome.ENVIRONMENT_ERROR
    assert record.detail == "the reward 'reward' failed, with retries.error = 0 used up: no such model"
    assert record.num_sampled_tokens > 0


async def test_truncated_episode_has_no_answer_to_score(play, question_environment, hub):
    hub.policy = lambda _: "4" * 500
    record = await play(question_environment, lambda episode: 1.0, max_tokens=200)
    assert (record.outcome, record.reward, record.reward_parts) == (Outcome.TRUNCATED, 0.0, {})
