from services.inference_hub.limits import FIRST_LIMIT, CallLimit, EngineLoad


def test_an_engine_that_says_how_many_it_runs_gets_as_many():
    limit = CallLimit()
    limit.reported(EngineLoad(max_running_requests=64))
    assert limit.value == 64
    for _ in range(200):
        limit.answered(began_in_round=0, num_retractions=0, was_full=True)
    assert limit.value == 64


def test_a_limit_grows_by_one_in_as_many_answers_as_it_allows_and_only_while_it_is_reached():
    limit = CallLimit()
    for _ in range(FIRST_LIMIT):
        limit.answered(began_in_round=0, num_retractions=0, was_full=False)
    assert limit.value == FIRST_LIMIT
    for _ in range(FIRST_LIMIT + 1):
        limit.answered(began_in_round=0, num_retractions=0, was_full=True)
    assert limit.value == FIRST_LIMIT + 1


def test_a_retraction_lowers_the_limit_once_for_all_calls_it_hit():
    limit = CallLimit()
    limit.reported(EngineLoad(max_running_requests=100))
    for _ in range(10):
        limit.answered(began_in_round=0, num_retractions=1, was_full=True)
    assert (limit.value, limit.round) == (80, 1)
    limit.answered(began_in_round=1, num_retractions=2, was_full=True)
    assert limit.value == 64


def test_requests_that_wait_in_the_engine_are_too_many():
    limit = CallLimit()
    queueing = EngineLoad(num_running_reqs=40, num_waiting_reqs=10, max_running_requests=100)
    limit.reported(queueing)
    assert limit.value == 100  # They may have arrived just now.
    limit.reported(queueing)
    assert limit.value == 80
    for _ in range(10):
        limit.reported(queueing)
    assert limit.value == 40


def test_a_nearly_full_cache_stops_the_growth():
    limit = CallLimit()
    limit.reported(EngineLoad(num_running_reqs=256, token_usage=0.95))
    for _ in range(2 * FIRST_LIMIT):
        limit.answered(began_in_round=0, num_retractions=0, was_full=True)
    assert limit.value == FIRST_LIMIT
    limit.reported(EngineLoad(num_running_reqs=256, token_usage=0.5))
    for _ in range(2 * FIRST_LIMIT):
        limit.answered(began_in_round=0, num_retractions=0, was_full=True)
    assert limit.value > FIRST_LIMIT


def test_an_engine_that_only_queues_still_gets_a_call():
    limit = CallLimit()
    for _ in range(100):
        limit.reported(EngineLoad(num_running_reqs=0, num_waiting_reqs=5))
    assert limit.value == 1
