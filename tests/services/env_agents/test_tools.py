from typing import Annotated

import msgspec
import pytest

from services.env_agents.environment import Environment, RequestedCall, ToolError, tool
from services.env_agents.tools import tools_of


class Shop(Environment):
    @tool
    async def buy(self, item: str, count: int = 1) -> str:
        """Buys something.

        More words that the policy does not need.

        Args:
            item: what to buy
            count (int): how many
        """
        return f"{count} {item}"

    @tool
    def price(self, items: list[str], limit: Annotated[int, msgspec.Meta(ge=0)] = 3) -> dict[str, int]:
        """Lists prices."""
        return dict.fromkeys(items[:limit], 5)

    @tool
    def fail(self) -> str:
        """Breaks."""
        raise RuntimeError("broken")


def test_schema_comes_from_signature_and_docstring():
    spec = tools_of(Shop)["buy"].spec
    assert spec == {
        "type": "function",
        "function": {
            "name": "buy",
            "description": "Buys something.",
            "parameters": {
                "type": "object",
                "properties": {
                    "item": {"type": "string", "description": "what to buy"},
                    "count": {"type": "integer", "default": 1, "description": "how many"},
                },
                "required": ["item"],
            },
        },
    }


async def test_results_that_are_not_text_become_json():
    assert await Shop().call_tool(RequestedCall("price", {"items": ["tea"]})) == '{"tea":5}'


async def test_inherited_tools_stay_callable():
    class Bakery(Shop):
        pass

    assert await Bakery().call_tool(RequestedCall("buy", {"item": "bread"})) == "1 bread"


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("buy", {"item": 3}, "buy: Expected `str`, got `int`"),
        ("buy", {}, "missing required field `item`"),
        ("buy", {"item": "tea", "colour": "red"}, "unknown field `colour`"),
        ("price", {"items": [], "limit": -1}, ">= 0"),
        ("steal", {}, "no tool 'steal'; tools: buy, price, fail"),
    ],
)
async def test_call_that_does_not_fit_is_told_to_the_policy(name, arguments, message):
    with pytest.raises(ToolError, match=message):
        await Shop().call_tool(RequestedCall(name, arguments))


async def test_wrong_calls_become_messages_and_the_others_still_run():
    step = await Shop().call_tools(
        [
            RequestedCall("buy", {}),
            RequestedCall("", {}, problem="not JSON"),
            RequestedCall("buy", {"item": "tea"}),
        ]
    )
    assert [message["content"] for message in step.messages] == [
        "error: buy: Object missing required field `item`",
        "error: not JSON",
        "1 tea",
    ]
    assert [call.is_error for call in step.tool_calls] == [True, True, False]
    assert step.tool_calls[2].arguments == '{"item":"tea"}'
    assert not step.done


async def test_broken_tool_is_not_the_policys_fault():
    with pytest.raises(RuntimeError, match="broken"):
        await Shop().call_tools([RequestedCall("fail", {})])


def test_tool_without_annotations_is_refused_where_it_is_written():
    with pytest.raises(TypeError, match="every parameter of tool 'cut' must be named and annotated"):

        class Broken(Environment):
            @tool
            def cut(self, length):
                """Cuts."""
