"""Which tokens carry loss."""

import msgspec
import torch

from shared.versions import VersionSpan
from tests.trainer.records import trajectory
from trainer.micro_batch import collate


def test_tokens_of_versions_over_the_bound_carry_no_loss():
    row = msgspec.structs.replace(trajectory([0, 1, 1, 0, 1, 1]), version_spans=(VersionSpan(1, 3, 4), VersionSpan(4, 6, 5)))
    young, all_ = (collate([row], [1.0], version=6, oldest_version=oldest, device=torch.device("cpu")) for oldest in (5, 4))
    assert young.loss_mask_BT.tolist() == [[False, False, False, False, True, True]]
    assert all_.loss_mask_BT.tolist() == [[False, True, True, False, True, True]]
