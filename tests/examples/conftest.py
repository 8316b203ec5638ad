"""What every example is played with."""

import pytest

from services.env_agents.environment import Action, RequestedCall


@pytest.fixture
def call():
    """An action that calls one tool."""

    def call(name, **arguments):
        return Action("", (RequestedCall(name, arguments),))

    return call
