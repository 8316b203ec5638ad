from services.inference_hub.idle_memory import IDLE_S, MIN_CALLS, IdleMemory


def test_memory_is_given_back_once_when_a_burst_is_over():
    memory = IdleMemory()
    looks = [(0, MIN_CALLS), (1, 5), (2, 0), (1 + IDLE_S - 0.1, 0), (1 + IDLE_S, 0), (2 + IDLE_S, 0), (3 + 9 * IDLE_S, 0)]
    assert [memory.is_due(now, num_calls) for now, num_calls in looks] == [False] * 4 + [True] + [False] * 2


def test_a_few_calls_are_not_worth_it():
    memory = IdleMemory()
    assert not memory.is_due(0, MIN_CALLS - 1)
    assert not memory.is_due(10 * IDLE_S, 0)


def test_a_burst_between_two_looks_counts_from_the_first_that_finds_it():
    memory = IdleMemory()
    assert not memory.is_due(100, MIN_CALLS)
    assert not memory.is_due(100 + IDLE_S, 1)
    assert memory.is_due(100 + 2 * IDLE_S, 0)
