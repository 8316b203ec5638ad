"""Loss and gradient that are no finite numbers reach no weight, on any rank, and are accounted for."""

import json
import math

import msgspec
import pytest
import torch

from shared import trajectory as trajectories
from shared.ledger import TrainingLedger
from tests.trainer.learning import batch, learn, plan, section
from tests.trainer.run_support import BATCH_GROUPS, GROUP_SIZE, finished, lines, working_agents
from trainer.guards import SkippedUpdates, infectious


def poisoned(rows, entry_id, value=math.nan):
    """`rows` with one whose behaviour log-probabilities are `value`."""
    row = rows[entry_id]
    logprobs = row.logprobs.copy()
    logprobs[row.loss_mask == 1] = value
    return {**rows, entry_id: msgspec.structs.replace(row, logprob_bytes=logprobs.tobytes())}


def state(learner):
    """Weights and optimizer, by value."""
    moments = [value.clone() for each in learner.engine.optimizer.optimizer.state.values() for value in each.values() if value.ndim]
    return [weight.clone() for _, weight in learner.policy.named_weights()] + moments


def is_same(left, right):
    return len(left) == len(right) and all(torch.equal(*pair) for pair in zip(left, right, strict=True))


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("max_tokens", [10_000, 1])
def test_a_step_with_a_poisoned_row_is_skipped_and_the_next_is_as_if_it_had_not_been(
    one_rank, model_path, stage, dtype, max_tokens
):
    settings = section(dtype=dtype, learning_rate=1e-3, deepspeed={"zero_optimization": {"stage": stage}})
    rows = batch()
    _, _, learner = learn(model_path, settings, max_tokens=max_tokens)
    _, _, other = learn(model_path, settings, max_tokens=max_tokens)
    before = state(learner)
    learned = learner.learn(plan(rows, num_ranks=1, max_tokens=max_tokens, version=1), poisoned(rows, "e3"))
    assert not learned.has_learnt
    assert (learned.skipped.cause, learned.skipped.entry_ids, learned.skipped.after_steps) == ("loss", ("e3",), 0)
    assert is_same(state(learner), before)
    for each in (learner, other):
        assert each.learn(plan(rows, num_ranks=1, max_tokens=max_tokens, version=1), rows).skipped is None
    assert is_same(state(learner), state(other))
    assert not is_same(state(learner), before)


def test_a_gradient_without_a_bad_loss_is_the_whole_batchs(one_rank, model_path):
    rows = batch()
    _, _, learner = learn(model_path, section(), max_tokens=70)
    embedding = learner.policy.causal_lm.get_output_embeddings().weight
    handle = embedding.register_hook(lambda gradient: gradient * math.inf)
    before = state(learner)
    learned = learner.learn(plan(rows, num_ranks=1, max_tokens=70, version=1), rows)
    handle.remove()
    assert learned.skipped.cause == "gradient"
    assert sorted(learned.skipped.entry_ids) == sorted(rows)
    assert is_same(state(learner), before)


def test_a_later_epochs_bad_step_leaves_the_earlier_ones(one_rank, model_path):
    rows = batch()
    _, _, learner = learn(model_path, section(ppo_epochs=3, learning_rate=1e-3), max_tokens=70)
    before = state(learner)
    accumulate, calls = learner._accumulate, iter(range(9))

    def accumulate_poison(plan, step, *, is_learning):
        if next(calls) > 0:
            for each in step.batches:
                each.rows.behaviour_logprobs_BT[each.rows.loss_mask_BT] = math.nan
        accumulate(plan, step, is_learning=is_learning)

    learner._accumulate = accumulate_poison
    learned = learner.learn(plan(rows, num_ranks=1, max_tokens=70, version=1), rows)
    assert learned.has_learnt
    assert learned.skipped.after_steps == 1
    assert math.isfinite(learned.measures.loss)
    assert math.isfinite(learned.grad_norm)
    assert not is_same(state(learner), before)


def test_a_loss_that_is_not_finite_infects_its_gradient_past_clamps():
    logprobs = torch.ones(1, 2, requires_grad=True)
    loss = (logprobs + torch.nan).clamp(-1, 1).sum()
    assert torch.autograd.grad(loss, logprobs, retain_graph=True)[0].tolist() == [[0.0, 0.0]]
    assert torch.autograd.grad(infectious(loss, logprobs), logprobs)[0].isnan().all()


def test_only_updates_in_a_row_are_too_many():
    skipped = SkippedUpdates(max_in_a_row=2)
    for is_skipped, are_too_many in [(True, False), (False, False), (True, False), (True, True)]:
        skipped.count(is_skipped=is_skipped)
        assert skipped.are_too_many == are_too_many
    assert skipped.total == 3
    other = SkippedUpdates(max_in_a_row=2)
    other.restore(skipped.state())
    assert other.are_too_many


@pytest.mark.stack
@pytest.mark.timeout(240)
def test_a_poisoned_row_of_one_rank_makes_both_skip(model_path, tmp_path, run_on_two_ranks):
    run_on_two_ranks("poisoned_ranks.py", model_path, tmp_path, timeout_s=220)
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first == {"entry_ids": ["e3"], "is_unchanged": True, "learns_again": True}


def with_enormous_reward(number, index, record):
    return trajectories.encode(msgspec.structs.replace(record, reward=index * 1e39))


@pytest.mark.stack
@pytest.mark.timeout(240)
def test_numbers_that_stay_too_large_stop_two_ranks_with_the_trajectories_in_a_file(
    start, run_file, redis_url, redis_client, keys, free_port
):
    """Rewards that are finite, and whose advantages are not in float32."""
    with working_agents(redis_url, keys, alter=with_enormous_reward):
        status, _, errors = finished(
            start(
                run_file,
                "trainer.advantage.scale_by_std=false",
                "trainer.num_processes=2",
                "trainer.max_skipped_updates=2",
                program=("-m", "trainer.launch", "--master-port", str(free_port)),
            )
        )
    assert status == 1
    assert "2 updates in a row had others (trainer.max_skipped_updates=2); the trajectories are in" in errors
    skipped = lines(run_file.parent / "skipped_updates.jsonl")
    assert [(line["version"], line["in_a_row"], line["steps_taken"]) for line in skipped] == [(0, 1, 0), (0, 2, 0)]
    groups = [f"g{number}" for number in range(2 * BATCH_GROUPS)]
    assert [group for line in skipped for group in line["group_ids"]] == groups
    offending = {id_ for line in skipped for id_ in line["trajectory_ids"]}
    assert offending == {f"{group}-{index}" for group in groups for index in range(GROUP_SIZE)}
    books = TrainingLedger(redis_client, keys).books()
    assert books.is_balanced
    assert (books.version, books.trained, books.discarded) == (0, 0, {"non_finite": 2 * BATCH_GROUPS})
    assert not (run_file.parent / "lineage.jsonl").exists()
    assert list((run_file.parent / "checkpoints").glob("v*")) == []
