"""Gathering that every rank takes part in, as often as rank 0 begins anew."""

import os
import subprocess
import sys

import pytest
import torch

from trainer.gathering import finish, is_collective, weight_source
from trainer.model import Policy


@pytest.mark.timeout(300)
def test_ranks_that_share_out_weights_gather_every_pass_that_rank_zero_begins(repository, free_port):
    script = repository / "tests" / "trainer" / "gathering_ranks.py"
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(free_port)], env=environment, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        printed = [rank.communicate()[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0]
    whole = [(name, [3.0, 3.0]) for name in ("a", "b", "c")]
    assert printed[0].splitlines()[-1] == f"{whole} 6 ['a', 'b', 'c']"


def test_whole_weights_need_no_other_rank(model_factory):
    policy = Policy(model_factory(0))
    assert not is_collective(policy)
    source = weight_source(policy)
    gathered = dict(source.gather())
    assert gathered.keys() == dict(policy.named_weights()).keys()
    assert source.num_elements == sum(weight.numel() for weight in gathered.values())
    assert torch.equal(gathered["model.norm.weight"], policy.causal_lm.model.norm.weight)
    finish(policy)
