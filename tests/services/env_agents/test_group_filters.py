import pytest

from services.env_agents.group_filters import all_failed, load_filters, verdict, zero_variance
from shared.errors import ConfigurationError
from shared.trajectory import Outcome
from tests.trainer.records import trajectory


def group(*rewards, broken=()):
    return [
        trajectory([0, 1], sample_index=index, group_size=len(rewards), reward=reward, outcome=outcome)
        for index, reward in enumerate(rewards)
        for outcome in [Outcome.ENVIRONMENT_ERROR if index in broken else Outcome.COMPLETED]
    ]


def test_zero_variance_looks_at_rewards_that_count():
    assert zero_variance(group(1.0, 1.0))
    assert not zero_variance(group(1.0, 0.5))
    assert zero_variance(group(1.0, 1.0, 0.0, broken=[2]))


def test_all_failed_is_a_group_without_a_success():
    assert all_failed(group(0.0, 0.9))
    assert not all_failed(group(0.0, 1.0))


def test_the_first_filter_that_discards_gives_the_reason_and_one_that_raises_keeps_the_group():
    def broken(_):
        raise RuntimeError

    filters = {"broken": broken, "all_failed": all_failed, "zero_variance": zero_variance}
    assert verdict(filters, group(0.0, 0.0)) == "all_failed"
    assert verdict(filters, group(0.0, 1.0)) == ""


def test_filters_are_found_by_name_or_import_path():
    path = "services.env_agents.group_filters:all_failed"
    assert load_filters(["zero_variance", path], import_allowlist=["services"]) == {
        "zero_variance": zero_variance,
        path: all_failed,
    }


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("zero_varianse", "must name zero_variance, all_failed or package.module:function, got 'zero_varianse'"),
        ("os:system", "must be inside env_agents.import_allowlist"),
        ("services.env_agents.group_filters:none", "and 'services.env_agents.group_filters:none' cannot: AttributeError"),
        ("services.env_agents.group_filters:GROUP_FILTERS", "is a dict"),
    ],
)
def test_a_filter_that_cannot_be_used_is_a_sentence(name, sentence):
    with pytest.raises(ConfigurationError) as error:
        load_filters([name], import_allowlist=["services"])
    assert sentence in str(error.value)
