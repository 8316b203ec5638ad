import pytest

from shared.agents_token import VARIABLE, agents_access, agents_token
from shared.errors import ConfigurationError


def test_the_token_comes_from_a_variable_or_a_file(tmp_path):
    (tmp_path / "token").write_text("t2\n")
    assert agents_access({VARIABLE: "t1"}) == {"Authorization": "Bearer t1"}
    assert agents_token({f"{VARIABLE}_FILE": str(tmp_path / "token")}) == "t2"
    assert agents_access({}) == agents_access({VARIABLE: ""}) == {}


def test_a_token_that_no_header_can_hold_is_refused_without_showing_it():
    with pytest.raises(ConfigurationError, match=f"{VARIABLE} must be printable ASCII") as caught:
        agents_token({VARIABLE: "two words"})
    assert "two words" not in str(caught.value)
