"""Where the run that a run file describes is: the one place in which every command decides it."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from shared import configuration, redis_address
from shared.configuration import Configuration

RUN_FILE: Final = "run.yaml"
"""The file in run.directory in which `headrace up` leaves the ports that it decided."""

_PORT_0: Final = re.compile(r":0(?=/|$)")


def locate(run_file: Path, overrides: Sequence[str], environment_variables: Mapping[str, str] = os.environ) -> Configuration:
    """The run as it was started: what `headrace up` wrote down, else `run_file`.

    What the user says now, in environment variables and then in `overrides`, wins over both. A port of 0 says nothing: it asks
    for one to be chosen, and what was chosen is written down. Raises: ConfigurationError.
    """
    given = configuration.read(run_file, overrides=overrides, environment_variables=environment_variables)
    written = Path(given.run.directory) / RUN_FILE
    if not os.path.isfile(written):  # False also below a folder that this user cannot read.
        return given
    as_started = configuration.read(written, environment_variables={})
    wanted = configuration.read(written, overrides=overrides, environment_variables=environment_variables)
    return _with_password_of(given, _with_ports_of(as_started, wanted))


def _with_ports_of(as_started: Configuration, wanted: Configuration) -> Configuration:
    replace = msgspec.structs.replace
    hub, agents, redis = wanted.inference_hub, wanted.env_agents, wanted.redis
    return replace(
        wanted,
        redis=as_started.redis if _PORT_0.search(redis.url) else redis,
        inference_hub=replace(hub, port=hub.port or as_started.inference_hub.port),
        env_agents=replace(agents, port=agents.port or as_started.env_agents.port),
    )


def _with_password_of(given: Configuration, found: Configuration) -> Configuration:
    """What was written down has no password; one that the user gives in `redis.url` still counts."""
    password = redis_address.password(given.redis.url, {})
    if password is None:
        return found
    url = redis_address.connection_url(found.redis.url, {redis_address.PASSWORD_VARIABLE: password})
    return msgspec.structs.replace(found, redis=msgspec.structs.replace(found.redis, url=url))
