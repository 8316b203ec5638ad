import pytest

from shared.errors import ConfigurationError
from shared.hub_tokens import CLIENT_VARIABLE, CONTROL_VARIABLE, hub_tokens, required_tokens


def test_tokens_come_from_variables_or_files(tmp_path):
    (tmp_path / "control").write_text("c2\n")
    tokens = hub_tokens({CLIENT_VARIABLE: "c1", f"{CONTROL_VARIABLE}_FILE": str(tmp_path / "control")})
    assert tokens.for_generating == {"Authorization": "Bearer c1"}
    assert tokens.for_control == {"Authorization": "Bearer c2"}


def test_without_tokens_requests_have_no_header():
    tokens = hub_tokens({CLIENT_VARIABLE: ""})
    assert tokens.for_generating == tokens.for_control == {}


def test_who_has_only_the_control_token_generates_with_it():
    assert hub_tokens({CONTROL_VARIABLE: "c"}).for_generating == {"Authorization": "Bearer c"}


def test_tokens_are_not_shown():
    assert "secret" not in repr(hub_tokens({CLIENT_VARIABLE: "secret", CONTROL_VARIABLE: "secret"}))


@pytest.mark.parametrize("token", ["two words", "line\nbreak", "naïve"])
def test_a_token_that_no_header_can_hold_is_refused_without_showing_it(token: str):
    with pytest.raises(ConfigurationError) as caught:
        hub_tokens({CLIENT_VARIABLE: token})
    assert token not in str(caught.value)


@pytest.mark.parametrize(
    ("environment", "words"),
    [({CLIENT_VARIABLE: "a"}, CONTROL_VARIABLE), ({CONTROL_VARIABLE: "a"}, CLIENT_VARIABLE)],
)
def test_a_hub_with_one_token_of_two_does_not_start(environment: dict[str, str], words: str):
    with pytest.raises(ConfigurationError, match=f"{words} is not"):
        required_tokens(environment)


def test_a_hub_with_twice_the_same_token_does_not_start():
    with pytest.raises(ConfigurationError, match="must differ"):
        required_tokens({CLIENT_VARIABLE: "a", CONTROL_VARIABLE: "a"})
