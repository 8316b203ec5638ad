"""Groups that teach nothing, told when they complete: their place comes back at once, so that batches stay full."""

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from services.env_agents.loading import check_allowed, require_defined_inside
from shared.errors import ConfigurationError
from shared.trajectory import SUCCESS_REWARD, Trajectory

GroupFilter = Callable[[Sequence[Trajectory]], bool]
"""Whether a group of these finished episodes is to be discarded."""

_logger = logging.getLogger(__name__)


def zero_variance(trajectories: Sequence[Trajectory]) -> bool:
    """Every reward that counts is the same, so that every group-relative advantage is 0."""
    return len({trajectory.reward for trajectory in trajectories if trajectory.is_trainable}) == 1


def all_failed(trajectories: Sequence[Trajectory]) -> bool:
    """No episode was a success."""
    return not any(trajectory.is_trainable and trajectory.reward >= SUCCESS_REWARD for trajectory in trajectories)


GROUP_FILTERS: Final[Mapping[str, GroupFilter]] = {"zero_variance": zero_variance, "all_failed": all_failed}


def load_filters(names: Sequence[str], *, import_allowlist: Sequence[str]) -> dict[str, GroupFilter]:
    """The filters of `rollout.group_filters`, by name. Raises: ConfigurationError if one is unknown or cannot be imported."""
    return {name: GROUP_FILTERS[name] if name in GROUP_FILTERS else _imported(name, import_allowlist) for name in names}


def _imported(name: str, import_allowlist: Sequence[str]) -> GroupFilter:
    if name.count(":") != 1:
        raise ConfigurationError(
            f"rollout.group_filters must name {', '.join(GROUP_FILTERS)} or package.module:function, got {name!r}; correct the name"
        )
    check_allowed(name, import_allowlist)
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:  # Importing somebody's module may raise anything.
        raise ConfigurationError(
            f"rollout.group_filters must name functions that can be imported, and {name!r} cannot: {type(error).__name__}: "
            f"{error}; correct it, or install what it needs where the agents run"
        ) from error
    require_defined_inside(found, name, import_allowlist)
    if not callable(found):
        raise ConfigurationError(f"rollout.group_filters must name functions, and {name!r} is a {type(found).__name__}; name one")
    filter_: GroupFilter = found
    return filter_


def verdict(filters: Mapping[str, GroupFilter], trajectories: Sequence[Trajectory]) -> str:
    """The name of the first filter that discards this group, or "" if none does. One that raises keeps the group."""
    for name, is_discarded in filters.items():
        try:
            if is_discarded(trajectories):
                return name
        except Exception:
            _logger.exception("group filter %s raised; the group is kept", name)
    return ""
