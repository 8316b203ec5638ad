"""Advice by hand-computed cases, and by properties: it keeps to the GPUs there are, and never contradicts itself."""

import dataclasses
import math
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shared.trajectory import Timings
from trainer.advice import MIN_UPDATES, Kind, Setup, Throughput, advise
from trainer.pipeline import EngineSeconds, Stretch

BOTTLENECKS = {
    Kind.TO_ROLLOUTS,
    Kind.MORE_ENGINES,
    Kind.TO_TRAINING,
    Kind.MORE_TRAINING,
    Kind.HIGHER_RATIO,
    Kind.MORE_CONCURRENCY,
    Kind.FASTER_ENVIRONMENT,
    Kind.FALLEN_BACK,
}
SETUP = Setup(
    num_engines=8,
    gpus_per_engine=1,
    trainer_gpus=8,
    has_gpus=True,
    async_generation_ratio=1.0,
    on_stale="regenerate",
    max_concurrent_episodes=64,
)


def stretch(
    *, update_s=10.0, wait_s=0.0, train_s=9.0, idle=0.0, utilisation=None, timings=(0, 1, 0, 0), num_engines=8, n=10, **rest
):
    """n equal updates. Args: idle, utilisation: shares of the engines' time. timings: of an episode's life, in parts of it."""
    ready_s = n * update_s * num_engines
    engines = EngineSeconds(ready_s, idle * ready_s, (utilisation or 0) * ready_s, ready_s if utilisation is not None else 0.0)
    return Stretch(
        num_updates=n,
        update_s=n * update_s,
        wait_s=n * wait_s,
        train_s=n * train_s,
        engines=engines,
        num_episodes=n,
        timings=Timings(*(n * float(part) for part in timings)),
        **rest,
    )


def only(advice):
    [one] = advice
    return one


def test_too_few_updates_say_nothing():
    assert advise(stretch(wait_s=5, train_s=5, n=MIN_UPDATES - 1), SETUP) == ()
    assert advise(Stretch(), SETUP) == ()
    assert advise(stretch(wait_s=5, train_s=5, n=MIN_UPDATES), SETUP) != ()


def test_a_balanced_run_has_nothing_to_change():
    one = only(advise(stretch(wait_s=0.5, train_s=9.0, idle=0.1), SETUP))
    assert one.kind is Kind.NOTHING
    assert one.text == "nothing to change: training waits 5% of the time for data, engines are idle 10% of it"


def test_busy_engines_and_a_waiting_trainer_move_gpus_to_rollouts():
    """S = 80 GPU-s, C = 6 s on 8: with 10 and 6, G = 8 s and T = 8 s, the balance; it was G = 10 s."""
    one = only(advise(stretch(update_s=10, wait_s=4, train_s=6), SETUP))
    assert one.kind is Kind.TO_ROLLOUTS
    assert one.text == (
        "training waits 40% of the time for data, and the engines are busy 100% of it: give rollouts 2 more of the 16 GPUs (10 for "
        "engines and 6 for training, instead of 8 and 8); an update's work then takes 8.0 s instead of 10.0 s"
    )


def test_idle_engines_and_a_busy_trainer_move_gpus_to_training():
    """S = 40 GPU-s, C = 10 s on 8: with 6 and 10, G = 6.67 s and T = 8 s; 5 and 11 take 8 s too, and a longer way."""
    one = only(advise(stretch(update_s=10, wait_s=0, train_s=10, idle=0.5), SETUP))
    assert one.kind is Kind.TO_TRAINING
    assert "give training 2 more of the 16 GPUs (6 for engines and 10 for training, instead of 8 and 8)" in one.text
    assert "an update's work then takes 8.0 s instead of 10.0 s" in one.text


def test_whole_engines_move():
    """S = 80 GPU-s on 2 engines of 4: 12 and 4 would make T = 12 s, longer than the 10 s there are."""
    setup = dataclasses.replace(SETUP, num_engines=2, gpus_per_engine=4)
    one = only(advise(stretch(update_s=10, wait_s=4, train_s=6, num_engines=2), setup))
    assert one.kind is Kind.MORE_ENGINES
    assert "2 more engines would keep training busy; no GPU can be moved for it" in one.text, "G / T = 10 / 6: 3.33 engines"


def test_on_a_cpu_no_gpus_are_counted():
    setup = dataclasses.replace(SETUP, has_gpus=False, num_engines=1, trainer_gpus=1)
    one = only(advise(stretch(update_s=10, wait_s=4, train_s=6, num_engines=1), setup))
    assert one.text.endswith("generation would have to be 1.7 times as fast to keep training busy")
    one = only(advise(stretch(update_s=10, train_s=10, idle=0.5, num_engines=1), setup))
    assert one.text.endswith("training would have to be 2.0 times as fast to keep them busy")


def test_training_that_takes_no_time_is_no_division_by_zero():
    setup = dataclasses.replace(SETUP, has_gpus=False, num_engines=1, trainer_gpus=1)
    one = only(advise(stretch(update_s=1, wait_s=1, train_s=0, num_engines=1), setup))
    assert one.text.endswith("generation would have to be 99.0 times as fast to keep training busy")


def test_taking_turns_is_answered_with_a_ratio_of_1():
    setup = dataclasses.replace(SETUP, async_generation_ratio=0.0)
    one = only(advise(stretch(update_s=10, wait_s=6, train_s=4, idle=0.4), setup))
    assert one.kind is Kind.HIGHER_RATIO
    assert "1 lets them overlap, for updates up to 40% shorter" in one.text


def test_waiting_for_environments_beside_idle_engines_is_answered_by_littles_law():
    """Half of the time lost: twice as many in flight, (1 + 3) B instead of (1 + 1) B."""
    one = only(advise(stretch(update_s=10, wait_s=5, train_s=5, idle=0.6, utilisation=0.1, timings=(0, 1, 4, 0)), SETUP))
    assert one.kind is Kind.HIGHER_RATIO
    assert one.text == (
        "training waits 50% of the time for data while engines are idle 60% of it and use 10% of what they can hold, and "
        "episodes spend 80% of their life waiting for the environment: raise rollout.async_generation_ratio from 1 to 3, which "
        "lets 2.0 times as many run at once"
    )


def test_episodes_that_queue_are_answered_with_more_places():
    one = only(advise(stretch(update_s=10, wait_s=5, train_s=5, idle=0.6, timings=(2, 1, 1, 0)), SETUP))
    assert one.kind is Kind.MORE_CONCURRENCY
    assert "queued: raise limits.max_concurrent_episodes from 64 to 128" in one.text


def test_what_no_ratio_can_hide_has_to_become_faster():
    one = only(advise(stretch(update_s=100, wait_s=90, train_s=10, idle=0.95, timings=(0, 0, 1, 0)), SETUP))
    assert one.kind is Kind.FASTER_ENVIRONMENT
    assert "only 10.0 times as many at once would do, so make the environment faster" in one.text


def test_engines_that_run_few_calls_are_not_short_of_gpus():
    one = only(advise(stretch(update_s=10, wait_s=4, train_s=6, idle=0.0, utilisation=0.2), SETUP))
    assert one.kind is Kind.HIGHER_RATIO


def test_the_larger_of_work_and_latency_is_what_advice_is_about():
    """On a CPU at α = 1: U = 4.4 s, T = 2.2 s, G = 3.7 s as the demo had it; engines could take away 1.5 s, more episodes 0.7 s."""
    setup = dataclasses.replace(SETUP, has_gpus=False, num_engines=1, trainer_gpus=1)
    measured = {"update_s": 4.4, "wait_s": 2.2, "train_s": 2.0, "utilisation": 0.11, "num_engines": 1}
    one = only(advise(stretch(**measured, idle=0.7 / 4.4), setup))
    assert one.text.endswith("generation would have to be 1.7 times as fast to keep training busy")
    one = only(advise(stretch(**measured, idle=1.4 / 4.4), setup))
    assert one.kind is Kind.HIGHER_RATIO
    assert "from 1 to 2, which lets 1.5 times as many run at once" in one.text, "U / G = 4.4 / 3.0, not U / T = 2"


def test_a_run_that_falls_back_is_told_so_and_nothing_about_its_waiting():
    one = only(advise(stretch(update_s=10, wait_s=5, train_s=5, num_fallen_back=5), SETUP))
    assert one.kind is Kind.FALLEN_BACK
    assert one.text.startswith("50% of the updates were synchronous because the KL")


@pytest.mark.parametrize(
    ("on_stale", "words"),
    [
        ("regenerate", "set rollout.on_stale: mask, which trains on what is young enough"),
        ("drop", "set rollout.on_stale: mask"),
        ("wait", "raise rollout.stale_wait_s"),
        ("mask", "set rollout.on_stale: wait"),
    ],
)
def test_stale_tokens(on_stale, words):
    setup = dataclasses.replace(SETUP, on_stale=on_stale)
    one = only(advise(stretch(trained_tokens=88, discarded_tokens={"stale": 8, "masked": 4}), setup))
    assert one.kind is Kind.STALE
    assert one.text.startswith(f"12% of the sampled tokens are discarded or masked as stale: {words}")


def test_other_losses():
    advice = advise(
        stretch(
            update_s=10,
            train_s=5,
            trained_tokens=40,
            discarded_tokens={"failed": 5, "no_reward": 5, "filtered:zero_variance": 40, "surplus": 10},
        ),
        SETUP,
    )
    assert [one.kind for one in advice] == [Kind.OVERHEAD, Kind.NO_REWARD, Kind.FILTERED]
    assert advice[0].text.startswith("the trainer spends 50% of the time on weight pushes")
    assert advice[1].text.startswith("10% of the sampled tokens are of episodes that environment errors")
    assert advice[2].text.startswith("40% of the sampled tokens are of groups that rollout.group_filters discard")


def test_a_hub_that_does_not_tell_leaves_engines_out_of_it():
    unknown = dataclasses.replace(stretch(wait_s=5, train_s=5), engines=EngineSeconds())
    assert advise(unknown, SETUP) == ()


shares = st.floats(0, 1)
setups = st.builds(
    Setup,
    num_engines=st.integers(0, 16),
    gpus_per_engine=st.sampled_from([1, 2, 8]),
    trainer_gpus=st.integers(1, 32),
    has_gpus=st.booleans(),
    async_generation_ratio=st.sampled_from([0.0, 0.5, 1.0, 2.0, 4.0, 9.0]),
    on_stale=st.sampled_from(["regenerate", "drop", "wait", "mask"]),
    max_concurrent_episodes=st.none() | st.integers(1, 512),
)


@st.composite
def stretches(draw, num_engines):
    update_s, waiting = draw(st.floats(0.01, 1000)), draw(shares)
    wait_s = waiting * update_s
    return stretch(
        update_s=update_s,
        wait_s=wait_s,
        train_s=draw(shares) * (update_s - wait_s),
        idle=draw(shares),
        utilisation=draw(st.none() | shares),
        timings=draw(st.tuples(*[st.floats(0, 100)] * 4)),
        num_engines=num_engines,
        n=draw(st.integers(1, 20)),
        trained_tokens=draw(st.integers(0, 1000)),
        discarded_tokens=draw(st.dictionaries(st.sampled_from(["stale", "failed", "filtered:x", "surplus"]), st.integers(0, 1000))),
        num_fallen_back=draw(st.integers(0, 1)),
    )


@given(st.data())
def test_advice_never_contradicts_itself(data):
    setup = data.draw(setups)
    measured = data.draw(stretches(setup.num_engines))
    advice = advise(measured, setup)
    kinds = [one.kind for one in advice]
    assert len(set(kinds)) == len(kinds)
    assert sum(kind in BOTTLENECKS for kind in kinds) <= 1
    assert Kind.NOTHING not in kinds or kinds == [Kind.NOTHING]
    text = " ".join(one.text for one in advice)
    assert not re.search(r"\b(nan|inf|None)\b", text)
    for one in advice:
        if move := re.search(r"(\d+) more of the (\d+) GPUs \((\d+) for engines and (\d+) for training", one.text):
            moved, every, engines, training = map(int, move.groups())
            assert (every, engines + training) == (setup.num_gpus, setup.num_gpus)
            assert min(engines, training) >= 1
            assert engines % setup.gpus_per_engine == 0
            assert moved == (engines - setup.engine_gpus) * (1 if one.kind is Kind.TO_ROLLOUTS else -1)
            assert moved > 0
        if ratio := re.search(r"async_generation_ratio from (\S+) to (\d+)", one.text):
            assert float(ratio[1]) == setup.async_generation_ratio < int(ratio[2]) <= 8
        if places := re.search(r"max_concurrent_episodes from (\d+) to (\d+)", one.text):
            assert int(places[1]) <= int(places[2])


def as_the_model_says(setup, *, train_gpu_s, fixed_s, generating_gpu_s):
    """What a run would measure whose time is its work, as the model divides it."""
    training_s = fixed_s + train_gpu_s / setup.trainer_gpus
    generating_s = generating_gpu_s / setup.engine_gpus
    update_s = max(training_s, generating_s)
    return stretch(
        update_s=update_s,
        wait_s=update_s - training_s,
        train_s=training_s - fixed_s,
        idle=1 - generating_s / update_s,
        num_engines=setup.num_engines,
    )


@given(
    setup=setups,
    train_gpu_s=st.floats(1, 1000),
    fixed_s=st.floats(0, 5),
    generating_gpu_s=st.floats(1, 1000),
)
def test_a_move_that_was_made_is_never_taken_back(setup, train_gpu_s, fixed_s, generating_gpu_s):
    setup = dataclasses.replace(setup, has_gpus=True, async_generation_ratio=max(1.0, setup.async_generation_ratio))
    assume(setup.num_engines > 0)
    work = {"train_gpu_s": train_gpu_s, "fixed_s": fixed_s, "generating_gpu_s": generating_gpu_s}
    before = as_the_model_says(setup, **work)
    moves = [one for one in advise(before, setup) if one.kind in (Kind.TO_ROLLOUTS, Kind.TO_TRAINING)]
    assume(moves)
    engines, training = map(int, re.search(r"\((\d+) for engines and (\d+) for training", moves[0].text).groups())
    moved = dataclasses.replace(setup, num_engines=engines // setup.gpus_per_engine, trainer_gpus=training)
    after = as_the_model_says(moved, **work)
    assert after.update_s < before.update_s
    assert math.isclose(after.update_s / after.num_updates, Throughput.of(before, setup).update_with(engines), rel_tol=1e-6)
    assert not [one for one in advise(after, moved) if one.kind in (Kind.TO_ROLLOUTS, Kind.TO_TRAINING)], (
        "the best move is one move"
    )
