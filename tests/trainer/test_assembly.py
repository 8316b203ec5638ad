"""Which groups train: properties over any delivery order, and the edges by example."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.ledger import GroupRecord, LiveGroups, ReadyGroup
from tests.trainer.records import episode
from trainer.assembly import GroupAssembler, select, spare_groups

GROUP_SIZE = 3


@st.composite
def deliveries(draw):
    """Episodes of some groups in any order, some twice, some missing; and the ledger's ready groups, oldest first."""
    num_groups = draw(st.integers(1, 8))
    episodes = []
    for group in range(num_groups):
        for index in range(draw(st.integers(1, GROUP_SIZE))):
            version = draw(st.integers(0, 6))
            trainable = draw(st.booleans())
            episodes.append(
                episode(
                    f"g{group}", index, group_size=GROUP_SIZE, oldest_version=version if trainable else None, is_trainable=trainable
                )
            )
    repeated = draw(st.lists(st.sampled_from(episodes), max_size=5))
    complete = [f"g{group}" for group in range(num_groups) if sum(e.group_id == f"g{group}" for e in episodes) == GROUP_SIZE]
    return draw(st.permutations(episodes + repeated)), draw(st.permutations(complete))


def assembled(episodes):
    assembler = GroupAssembler()
    for item in episodes:
        assembler.add(item)
    return assembler.groups()


def record(group_id, start_number, *, sampling_version=None):
    return GroupRecord(
        group_id=group_id,
        group_size=GROUP_SIZE,
        num_needed=GROUP_SIZE,
        environment="test",
        task_index=0,
        attempt=0,
        admitted_version=0,
        start_number=start_number,
        sampling_version=sampling_version,
    )


def choose(episodes, ready, *, running=(), version=5, max_lag=1, on_stale="regenerate", batch_groups=2, redundant_groups=0):
    """Args: ready: ids, oldest start first. running: records."""
    groups = assembled(episodes)
    sizes = {episode.group_id: episode.group_size for episode in episodes}
    listed = tuple(ReadyGroup(record(group_id, start), sizes[group_id]) for start, group_id in enumerate(ready, 1))
    live = LiveGroups(float(max_lag), listed, tuple(running))
    return select(groups, live, version=version, on_stale=on_stale, batch_groups=batch_groups, redundant_groups=redundant_groups)


@given(deliveries(), st.integers(0, 8), st.integers(0, 4), st.integers(1, 4))
def test_no_trained_token_is_older_than_the_bound(case, version, max_lag, batch_groups):
    episodes, ready = case
    for group in choose(episodes, ready, version=version, max_lag=max_lag, batch_groups=batch_groups).batch:
        for item in group.trainable:
            assert version - item.oldest_version <= max_lag


@given(deliveries(), st.integers(0, 8), st.integers(1, 4))
def test_a_batch_is_the_oldest_usable_groups_in_start_order(case, version, batch_groups):
    episodes, ready = case
    selection = choose(episodes, ready, version=version, batch_groups=batch_groups)
    given_up = {*selection.stale, *selection.failed}
    usable = [group_id for group_id in ready if group_id not in given_up]
    if selection.batch:
        assert [group.group_id for group in selection.batch] == usable[:batch_groups]
    else:
        assert len(usable) < batch_groups


@given(deliveries(), st.integers(0, 8))
def test_a_group_is_never_mixed_with_another_nor_trained_in_part(case, version):
    episodes, ready = case
    for group in choose(episodes, ready, version=version, batch_groups=1).batch:
        assert len(group.episodes) == GROUP_SIZE
        assert {item.group_id for item in group.episodes} == {group.group_id}
        assert [item.sample_index for item in group.episodes] == list(range(GROUP_SIZE))


@given(deliveries(), st.integers(0, 8))
def test_redelivery_changes_nothing(case, version):
    episodes, ready = case
    assert choose(episodes, ready, version=version) == choose(list(episodes) * 2, ready, version=version)


def test_a_ready_group_that_has_not_arrived_in_full_holds_back_younger_ones():
    episodes = [episode("old", 0), episode("young", 0), episode("young", 1)]
    assert choose(episodes, ["old", "young"], version=0, batch_groups=1).batch == ()


def test_a_running_group_that_is_already_too_old_is_given_up():
    running = [record("with an old sibling", 1), record("samples long", 2, sampling_version=0), record("waits", 3)]
    selection = choose([episode("with an old sibling", 0, oldest_version=0)], [], running=running, version=2, max_lag=1)
    assert selection.stale == ("with an old sibling", "samples long")


def whole(group_id, version):
    return [episode(group_id, index, oldest_version=version) for index in range(2)]


def test_waiting_holds_the_batch_back_for_older_groups_that_it_would_make_stale():
    running = [
        record("straggler", 0, sampling_version=1),
        record("has time", 0, sampling_version=2),
        record("young", 9, sampling_version=1),
    ]
    selection = choose(whole("a", 2), ["a"], running=running, version=2, batch_groups=1, on_stale="wait")
    assert [group.group_id for group in selection.batch] == ["a"]
    assert selection.awaited == ("straggler",)
    assert choose(whole("a", 2), ["a"], running=running, version=2, batch_groups=1).awaited == ()


@pytest.mark.parametrize(
    ("num_stragglers", "num_young", "redundant_groups", "num_awaited"),
    [
        (1, 2, 1, 0),  # 5 live, 4 planned at α = 1 and B = 2: one is spare, and one is slow.
        (2, 1, 1, 2),  # As many live, and two are slow: whichever of them ends first is needed.
        (1, 1, 1, 1),  # 4 live: the redundant place is not taken, so nothing is spare.
        (2, 2, 3, 0),  # 6 live: two spare.
        (1, 2, 0, 1),  # 5 live because α was lowered: the run has no redundant groups, so none is spare.
    ],
)
def test_waiting_spares_stragglers_that_redundant_groups_make_up_for(num_stragglers, num_young, redundant_groups, num_awaited):
    running = [record(f"slow {index}", 0, sampling_version=1) for index in range(num_stragglers)]
    running += [record(f"young {index}", 9, sampling_version=2) for index in range(num_young)]
    episodes = [*whole("a", 2), *whole("b", 2)]
    selection = choose(episodes, ["a", "b"], running=running, version=2, on_stale="wait", redundant_groups=redundant_groups)
    assert len(selection.batch) == 2
    assert len(selection.awaited) == num_awaited


@given(st.integers(0, 40), st.floats(0, 4), st.integers(1, 16), st.integers(0, 16))
def test_what_is_spared_leaves_every_planned_batch_full(num_live, ratio, batch_groups, redundant_groups):
    spare = spare_groups(num_live, ratio, batch_groups=batch_groups, redundant_groups=redundant_groups)
    assert 0 <= spare <= redundant_groups
    if spare:
        assert num_live - spare >= batch_groups


def test_a_group_that_failed_takes_no_place():
    running = [record("slow", 0, sampling_version=1), record("young", 9, sampling_version=2)]
    broken = [episode("broken", 0, oldest_version=2), episode("broken", 1, is_trainable=False, oldest_version=None)]
    episodes = [*broken, *whole("a", 2), *whole("b", 2)]
    selection = choose(episodes, ["broken", "a", "b"], running=running, version=2, on_stale="wait", redundant_groups=1)
    assert selection.failed == ("broken",)
    assert selection.awaited == ("slow",), "four live groups are left, as many as are planned"


def test_masking_keeps_a_group_for_as_long_as_one_of_its_tokens_is_young_enough():
    episodes = [*whole("old", 2), episode("half", 0, oldest_version=2), episode("half", 1, oldest_version=4)]
    running = [record("running", 3, sampling_version=0)]
    selection = choose(episodes, ["old", "half"], running=running, version=5, batch_groups=1, on_stale="mask")
    assert selection.stale == ("old",)
    assert [group.group_id for group in selection.batch] == ["half"]
    assert selection.oldest_version == 4


def test_a_group_with_one_episode_to_learn_from_has_failed():
    episodes = [episode("g", 0), episode("g", 1, is_trainable=False, oldest_version=None)]
    selection = choose(episodes, ["g"], version=0, batch_groups=1)
    assert selection.failed == ("g",)
    assert selection.batch == ()


def test_age_of_an_episode_that_does_not_train_does_not_count():
    episodes = [episode("g", 0, group_size=3, oldest_version=5), episode("g", 1, group_size=3, oldest_version=5)]
    episodes.append(episode("g", 2, group_size=3, oldest_version=0, is_trainable=False))
    assert len(choose(episodes, ["g"], version=5, max_lag=0, batch_groups=1).batch) == 1


def test_tokens_of_a_lineage_that_was_cut_off_are_not_stale():
    episodes = [episode("g", 0, oldest_version=9), episode("g", 1, oldest_version=9)]
    assert len(choose(episodes, ["g"], version=5, max_lag=0, batch_groups=1).batch) == 1


def test_groups_that_ended_elsewhere_are_forgotten():
    assembler = GroupAssembler()
    assembler.add(episode("gone", 0))
    assembler.add(episode("here", 0))
    assembler.retain({"here"})
    assert set(assembler.groups()) == {"here"}
