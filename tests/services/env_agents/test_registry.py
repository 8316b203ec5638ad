import msgspec
import pytest

from services.env_agents.loading import EnvironmentLoader, NotAllowedError
from services.env_agents.registry import EnvironmentExistsError, EnvironmentRegistry, UnknownEnvironmentError
from shared.environment_spec import EnvironmentSpec
from shared.errors import ConfigurationError


@pytest.fixture
def another_process(redis_async, keys, http_session, renderer, client):
    return EnvironmentRegistry(
        redis_async, keys, EnvironmentLoader(http_session, renderer, client, import_allowlist=("examples",), seed=0)
    )


async def test_registration_reaches_other_processes(registry, another_process, make_spec):
    await registry.register(make_spec("calculator"))
    assert not another_process.environments
    await another_process.refresh()
    assert another_process.get("calculator").spec == make_spec("calculator")


async def test_patch_and_delete_reach_other_processes(registry, another_process, make_spec):
    await registry.register(make_spec("calculator"))
    await another_process.patch("calculator", {"is_paused": True, "limits": {"max_turns": 3}, "sampling": {"temperature": 0.5}})
    await registry.refresh()
    spec = registry.get("calculator").spec
    assert (spec.is_paused, spec.limits.max_turns, spec.limits.max_tokens, spec.sampling.temperature) == (True, 3, 4096, 0.5)
    await another_process.delete("calculator")
    await registry.refresh()
    assert not registry.is_registered("calculator")
    assert not registry.environments


async def test_patch_changes_the_bound(registry, make_spec):
    await registry.register(make_spec("calculator"))
    after = await registry.patch("calculator", {"limits": {"max_concurrent_episodes": 1}})
    async with after.slots:
        assert not after.can_start(1)


async def test_same_spec_twice_is_one_registration_and_another_is_refused(registry, make_spec):
    first = await registry.register(make_spec("calculator"))
    assert await registry.register(make_spec("calculator")) is first
    with pytest.raises(EnvironmentExistsError, match="'calculator' exists with another spec; PATCH it"):
        await registry.register(make_spec("calculator", max_turns=2))


async def test_minimum_shares_leave_no_more_than_everything(registry, make_spec):
    await registry.register(msgspec.structs.replace(make_spec("a"), min_share=0.7))
    await registry.register(msgspec.structs.replace(make_spec("b"), min_share=0.3))
    with pytest.raises(ConfigurationError, match=r"must be at most 1, got 1\.1 with 0\.4 for 'b'; lower it, or that of another"):
        await registry.patch("b", {"min_share": 0.4})
    assert (await registry.patch("a", {"min_share": 0.5})).spec.min_share == 0.5


async def test_run_file_has_its_way(registry, make_spec):
    await registry.register(make_spec("calculator"))
    await registry.declare(make_spec("calculator", max_turns=2))
    assert registry.get("calculator").spec.limits.max_turns == 2


async def test_unknown_name_is_answered_with_the_closest(registry, make_spec):
    await registry.register(make_spec("calculator"))
    with pytest.raises(UnknownEnvironmentError, match="no environment is named 'calculater'; did you mean 'calculator'"):
        registry.get("calculater")
    with pytest.raises(UnknownEnvironmentError, match="registered: calculator"):
        await registry.delete("zzz")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"import_path": "x:Y"}, "only is_paused, weight, min_share, limits, sampling can be changed, got import_path"),
        ({"limits": {"max_turn": 3}}, "unknown key 'limits.max_turn'; did you mean 'max_turns'"),
        ({"weight": -1}, "weight: .*>= 0.*, got -1"),
        ({"limits": 3}, "limits: .*got 3"),
    ],
)
async def test_patch_that_cannot_be_used_changes_nothing(registry, make_spec, changes, message):
    await registry.register(make_spec("calculator"))
    with pytest.raises(ConfigurationError, match=message):
        await registry.patch("calculator", changes)
    assert registry.get("calculator").spec == make_spec("calculator")


async def test_what_cannot_be_loaded_is_not_registered(registry):
    with pytest.raises(NotAllowedError):
        await registry.register(EnvironmentSpec(name="shell", import_path="os:system"))
    await registry.refresh()
    assert not registry.is_registered("shell")


async def test_spec_that_this_process_cannot_load_is_left_to_others(registry, redis_async, keys, make_spec, caplog):
    foreign = EnvironmentSpec(name="foreign", import_path="elsewhere.only:Environment")
    await redis_async.hset(keys.environments, "foreign", msgspec.json.encode(foreign))
    await redis_async.hset(keys.environments, "broken", b"{")
    await registry.register(make_spec("calculator"))
    assert set(registry.environments) == {"calculator"}
    assert registry.is_registered("foreign")
    assert "environment foreign cannot run in this process" in caplog.text
