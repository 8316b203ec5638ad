"""Where the run that a run file describes is: the one place in which every command decides it."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from shared import configuration
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
    if not written.is_file():
        return given
    as_started = configuration.read(written, environment_variables={})
    wanted = configuration.read(written, overrides=overrides, environment_variables=environment_variables)
    return _with_ports_of(as_started, wanted)


def _with_ports_of(as_started: Configuration, wanted: Configuration) -> Configuration:
    replace = msgspec.structs.replace
    hub, agents, redis = wanted.inference_hub, wanted.env_agents, wanted.redis
    return replace(
        wanted,
        redis=as_started.redis if _PORT_0.search(redis.url) else redis,
        inference_hub=replace(hub, port=hub.port or as_started.inference_hub.port),
        env_agents=replace(agents, port=agents.port or as_started.env_agents.port),
    )
