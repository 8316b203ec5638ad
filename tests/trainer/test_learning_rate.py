"""The learning rate of each update, by hand."""

import math

import pytest

from tests.trainer.learning import section
from trainer.learning_rate import learning_rate


def rates(versions, **settings):
    trainer = section(learning_rate=1.0, **settings)
    return [learning_rate(trainer, version) for version in versions]


def test_warm_up_is_linear_and_ends_at_the_learning_rate():
    assert rates(range(6), num_updates=6, warmup_updates=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rates([0], num_updates=6) == [1.0]


def test_linear_falls_to_the_final_rate_at_the_last_update():
    falling = {"num_updates": 6, "warmup_updates": 2, "learning_rate_schedule": "linear", "final_learning_rate": 0.2}
    assert rates(range(6), **falling) == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2])


def test_cosine_falls_slowly_fast_slowly():
    falling = {"num_updates": 5, "warmup_updates": 1, "learning_rate_schedule": "cosine"}
    half = math.sqrt(0.5)
    assert rates(range(5), **falling) == pytest.approx([1.0, (1 + half) / 2, 0.5, (1 - half) / 2, 0.0])


def test_past_the_last_update_the_rate_stays():
    assert rates([9], num_updates=5, learning_rate_schedule="linear", final_learning_rate=0.1) == pytest.approx([0.1])
