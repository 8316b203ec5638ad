import pytest

from examples.lookup_chain import LookupChain
from services.env_agents.environment import Action, Task


@pytest.mark.parametrize("seed", range(20))
async def test_following_the_links_leads_to_the_answer(call, seed):
    chain = LookupChain()
    messages = await chain.reset(Task(str(seed), seed, {}))
    _, start, _, links = messages[1]["content"].replace(",", "").split()
    assert 1 <= int(links) <= 4
    key = int(start)
    for _ in range(int(links)):
        key = int((await chain.step(call("lookup", key=key))).messages[0]["content"])
    step = await chain.step(Action(str(key)))
    assert (step.done, step.reward) == (True, 1.0)


async def test_a_seed_makes_one_table():
    one, other = LookupChain(), LookupChain()
    assert await one.reset(Task("3", 3, {})) == await other.reset(Task("3", 3, {}))
    assert one.table == other.table


async def test_unknown_key_and_wrong_answer(call):
    chain = LookupChain()
    await chain.reset(Task("0", 0, {}))
    assert (await chain.step(call("lookup", key=5))).messages[0]["content"] == "error: no key 5"
    assert (await chain.step(call("lookup", key="5"))).tool_calls[0].is_error
    assert (await chain.step(Action("nothing"))).reward == 0.0
