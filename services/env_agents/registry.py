"""The environments of a run: their specs live in Redis, shared by all agent processes; each process loads them for itself."""

import logging
from collections.abc import Mapping
from typing import Any, cast

import msgspec
import redis.asyncio

from services.env_agents import episode_statistics
from services.env_agents.loading import EnvironmentLoader, LoadedEnvironment
from services.env_agents.slots import EpisodeSlots
from shared import strict_yaml
from shared.decoding import UNDECODABLE
from shared.environment_spec import EnvironmentSpec
from shared.errors import ConfigurationError, HeadraceError
from shared.keys import Keys

_logger = logging.getLogger(__name__)

PATCHABLE = ("is_paused", "weight", "min_share", "limits", "sampling")
_ROUNDING = 1e-9


class UnknownEnvironmentError(HeadraceError):
    """No environment has this name."""


class EnvironmentExistsError(HeadraceError):
    """An environment of this name is registered with another spec."""


class RegisteredEnvironment:
    """One environment in this process: what was loaded, and its places."""

    def __init__(self, loaded: LoadedEnvironment) -> None:
        self.loaded = loaded
        self.slots = EpisodeSlots(loaded.spec.limits.max_concurrent_episodes)

    @property
    def spec(self) -> EnvironmentSpec:
        return self.loaded.spec

    def can_start(self, num_episodes: int) -> bool:
        """Whether a new group of so many episodes may start now."""
        return not self.spec.is_paused and self.slots.can_claim(num_episodes)


class EnvironmentRegistry:
    """Specs in the Redis hash `environments`, and what this process has loaded of them.

    Changes go to Redis first; `refresh` brings this process in line with it, whoever made the change.
    """

    def __init__(self, client: redis.asyncio.Redis, keys: Keys, loader: EnvironmentLoader) -> None:
        self._client = client
        self._keys = keys
        self._loader = loader
        self._encoded_by_name: dict[str, bytes] = {}
        self._loaded_by_name: dict[str, RegisteredEnvironment] = {}

    @property
    def environments(self) -> Mapping[str, RegisteredEnvironment]:
        """Those that this process can run, by name."""
        return self._loaded_by_name

    def is_registered(self, name: str) -> bool:
        """Whether the run has it, though this process may have failed to load it."""
        return name in self._encoded_by_name

    def get(self, name: str) -> RegisteredEnvironment:
        """Raises: UnknownEnvironmentError that names a close one, or all."""
        if name in self._loaded_by_name:
            return self._loaded_by_name[name]
        hint = strict_yaml.hint(name, self._loaded_by_name, otherwise="registered")
        raise UnknownEnvironmentError(f"no environment is named {name!r}; {hint}")

    async def register(self, spec: EnvironmentSpec) -> RegisteredEnvironment:
        """Adds an environment; the same spec a second time changes nothing.

        Raises: ConfigurationError if it cannot be used; EnvironmentExistsError if the name has another spec.
        """
        await self.refresh()
        known = self._loaded_by_name.get(spec.name)
        if known is not None and known.spec != spec:
            raise EnvironmentExistsError(
                f"an environment named {spec.name!r} exists with another spec; PATCH it, DELETE it, or choose another name"
            )
        return known or await self._put(spec)

    async def declare(self, spec: EnvironmentSpec) -> RegisteredEnvironment:
        """Adds an environment of the run file, in place of one of the same name."""
        return await self._put(spec)

    async def patch(self, name: str, changes: Mapping[str, Any]) -> RegisteredEnvironment:
        """Changes some of a spec; of `limits` and `sampling` only the keys given.

        Raises: UnknownEnvironmentError; ConfigurationError if a key cannot be changed or a value cannot be used.
        """
        await self.refresh()
        spec = self.get(name).spec
        if unknown := [key for key in changes if key not in PATCHABLE]:
            remedy = "leave it out, or DELETE the environment and register it anew"
            if not set(unknown) & set(EnvironmentSpec.__struct_fields__):
                remedy = strict_yaml.hint(unknown[0], PATCHABLE, otherwise="known keys")
            raise ConfigurationError(
                f"of an environment only {', '.join(PATCHABLE)} can be changed, got {', '.join(unknown)}; {remedy}"
            )
        raw = msgspec.to_builtins(spec)
        for key, value in changes.items():
            raw[key] = {**raw[key], **value} if isinstance(raw[key], dict) and isinstance(value, dict) else value
        return await self._put(strict_yaml.decode(raw, EnvironmentSpec, source=f"environment {name!r}"))

    async def delete(self, name: str) -> None:
        """Removes an environment with its statistics. Raises: UnknownEnvironmentError."""
        await self.refresh()
        if not self.is_registered(name):
            self.get(name)
        async with self._client.pipeline(transaction=True) as pipeline:
            pipeline.hdel(self._keys.environments, name)
            episode_statistics.forget(pipeline, self._keys, name)
            await pipeline.execute()
        self._forget(name)

    async def refresh(self) -> None:
        """Loads what changed in Redis. What cannot be loaded here is logged once, left to processes that can, and tried again."""
        entries = cast(dict[bytes, bytes], await self._client.hgetall(self._keys.environments))
        encoded_by_name = {name.decode(): encoded for name, encoded in entries.items()}
        for name in self._encoded_by_name.keys() - encoded_by_name.keys():
            self._forget(name)
        for name, encoded in encoded_by_name.items():
            if self._encoded_by_name.get(name) != encoded or name not in self._loaded_by_name:
                try:
                    await self._load(msgspec.json.decode(encoded, type=EnvironmentSpec))
                except (ConfigurationError, *UNDECODABLE):
                    if self._encoded_by_name.get(name) != encoded:
                        _logger.exception("environment %s cannot run in this process", name)
                self._encoded_by_name[name] = encoded

    def _require_shares(self, spec: EnvironmentSpec) -> None:
        others = [entry.spec.min_share for name, entry in self._loaded_by_name.items() if name != spec.name]
        if spec.min_share > 0 and sum(others) + spec.min_share > 1 + _ROUNDING:
            raise ConfigurationError(
                f"min_share of all environments together must be at most 1, got {sum(others) + spec.min_share:g} with "
                f"{spec.min_share:g} for {spec.name!r}; lower it, or that of another"
            )

    async def _put(self, spec: EnvironmentSpec) -> RegisteredEnvironment:
        self._require_shares(spec)
        registered = await self._load(spec)
        encoded = msgspec.json.encode(spec)
        await self._client.hset(self._keys.environments, spec.name, encoded)
        self._encoded_by_name[spec.name] = encoded
        return registered

    async def _load(self, spec: EnvironmentSpec) -> RegisteredEnvironment:
        loaded = await self._loader.load(spec)
        registered = self._loaded_by_name.get(spec.name)
        if registered is None:
            registered = self._loaded_by_name[spec.name] = RegisteredEnvironment(loaded)
        else:
            registered.loaded = loaded
            registered.slots.resize(spec.limits.max_concurrent_episodes)
        return registered

    def _forget(self, name: str) -> None:
        self._encoded_by_name.pop(name, None)
        self._loaded_by_name.pop(name, None)
