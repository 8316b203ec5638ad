"""Which tokens carry loss, which turn and version sampled them, and what advantage each has."""

import msgspec
import torch

from shared.trajectory import Turn
from shared.versions import VersionSpan
from tests.trainer.records import trajectory
from trainer.batching import PlannedSequence
from trainer.micro_batch import collate

TURNS = (Turn(1, 3, 0.0, (), ""), Turn(4, 6, 1.0, (), ""))
ROW = msgspec.structs.replace(
    trajectory([0, 1, 1, 0, 1, 1]), version_spans=(VersionSpan(1, 3, 4), VersionSpan(4, 6, 5)), turns=TURNS
)


def collated(row=ROW, *, oldest_version=0, **planned):
    sequence = PlannedSequence("e", row.num_tokens, row.num_sampled_tokens, **{"reward": 0.0, "advantage": 0.0, **planned})
    return collate([row], [sequence], version=6, oldest_version=oldest_version, device=torch.device("cpu"))


def test_tokens_of_versions_over_the_bound_carry_no_loss():
    young, all_ = (collated(oldest_version=oldest) for oldest in (5, 4))
    assert young.loss_mask_BT.tolist() == [[False, False, False, False, True, True]]
    assert all_.loss_mask_BT.tolist() == [[False, True, True, False, True, True]]
    assert young.is_sampled_BT.tolist() == all_.loss_mask_BT.tolist()


def test_tokens_know_turn_and_version():
    rows = collated()
    assert rows.turn_index_BT.tolist() == [[-1, 0, 0, -1, 1, 1]]
    assert rows.versions_BT.tolist() == [[-1, 4, 4, -1, 5, 5]]


def test_a_record_without_turns_is_one_turn():
    assert collated(msgspec.structs.replace(ROW, turns=())).turn_index_BT.tolist() == [[-1, 0, 0, -1, 0, 0]]


def test_an_advantage_of_the_episode_is_each_sampled_tokens():
    rows = collated(reward=3.0, advantage=0.5)
    assert rows.advantages_BT.tolist() == [[0, 0.5, 0.5, 0, 0.5, 0.5]]
    assert rows.rewards_B1.tolist() == [[3.0]]


def test_advantages_of_turns_are_each_their_tokens():
    assert collated(turn_advantages=(-1.0, 2.0)).advantages_BT.tolist() == [[0, -1, -1, 0, 2, 2]]


def test_an_empty_micro_batch_is_a_row_without_sampled_tokens():
    rows = collate([], [], version=0, oldest_version=0, device=torch.device("cpu"))
    assert rows.token_ids_BT.shape == (1, 2)
    assert not rows.loss_mask_BT.any()
