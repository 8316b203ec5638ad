"""`headrace rollouts`: trajectories as they are in the stream now, and as they come."""

import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, cast

import redis
from redis.exceptions import AuthenticationError, AuthorizationError

from services.standalone import printing
from services.standalone.connections import redis_client, redis_failure
from services.standalone.rollout import Rollout, UnreadableRecord, rollout, transcript
from services.standalone.stream_reader import Entry, Predicate, StreamReader
from services.standalone.token_text import Decoder, decoder_for
from shared import strict_yaml
from shared.configuration import Configuration
from shared.errors import ConfigurationError
from shared.keys import Keys
from shared.trajectory import Trajectory

BLOCK_MS: Final = 5_000
RETRY_S: Final = 1.0
NUM_REMEMBERED: Final = 256
"""Groups whose prompt is remembered."""
WORTH_RETRYING: Final = (redis.ConnectionError, redis.TimeoutError)
NOT_WORTH_RETRYING: Final = (AuthenticationError, AuthorizationError)

Complain = Callable[[str], None]
"""Tells the user what is no part of the output."""


def run(configuration: Configuration, *, last: int, environment: str | None, does_follow: bool, as_json: bool) -> int:
    """Returns the exit status. Raises: UnreachableError if Redis does not answer; ConfigurationError if it refuses, or
    the run has no such environment."""
    url, keys = configuration.redis.url, Keys(configuration.run.id)
    decoder = decoder_for(Path(configuration.run.model_path))
    is_wanted = _of(environment)
    if decoder.note:
        _complain(decoder.note)
    with redis_client(url) as client:
        reader = StreamReader(client, keys.trajectories)
        try:
            if environment is not None:
                require_environment(client, keys, environment)
            if does_follow:
                show(follow(reader, last, is_wanted, url=url, complain=_complain), decoder, as_json=as_json)
            elif not show(reader.newest(last, is_wanted), decoder, as_json=as_json):
                _complain(
                    f"no such trajectory is in the stream of run {keys.run_id} now; entries leave it once they are trained, and "
                    "--follow shows them as they come"
                )
        except redis.RedisError as error:
            raise redis_failure(url, error) from error
    return 0


def require_environment(client: redis.Redis, keys: Keys, name: str) -> None:
    """Raises: ConfigurationError if the run has environments, and never had one of this name."""
    fields = cast(list[bytes], client.hkeys(keys.environments)) + cast(list[bytes], client.hkeys(keys.cursors))
    known = {field.decode() for field in fields}
    if known and name not in known:
        remedy = strict_yaml.hint(name, known, otherwise="its environments are")
        raise ConfigurationError(f"--environment must name an environment of run {keys.run_id}, got {name!r}; {remedy}")


def show(entries: Iterable[Entry], decoder: Decoder, *, as_json: bool) -> int:
    """Prints them; the number printed."""
    console, prompts = printing.console(), ShownPrompts()
    num_shown = 0
    for entry in entries:
        num_shown += 1
        shown = rollout(entry, decoder)
        if as_json:
            printing.as_json(shown)
        else:
            console.print(transcript(shown, console, has_shown_prompt=prompts.has_shown(shown)))
    return num_shown


class ShownPrompts:
    """What was printed as the context of the newest groups: siblings have it in common, and it is long."""

    def __init__(self) -> None:
        self._prompt_by_group: OrderedDict[str, str] = OrderedDict()

    def has_shown(self, shown: Rollout | UnreadableRecord) -> bool:
        """Whether a sibling with this prompt was printed; if not, this one will have been."""
        if isinstance(shown, UnreadableRecord):
            return False
        is_known = shown.prompt != "" and self._prompt_by_group.get(shown.group_id) == shown.prompt
        self._prompt_by_group[shown.group_id] = shown.prompt
        if len(self._prompt_by_group) > NUM_REMEMBERED:
            self._prompt_by_group.popitem(last=False)
        return is_known


def follow(
    reader: StreamReader,
    last: int,
    is_wanted: Predicate,
    *,
    url: str,
    complain: Complain,
    wait: Callable[[float], None] = time.sleep,
) -> Iterator[Entry]:
    """The newest `last` entries, then what comes, without end. While Redis is away it says so once, and keeps trying.

    Raises: redis.RedisError of a kind that trying again does not help.
    """
    is_away = has_looked_back = False
    while True:
        try:
            if has_looked_back:
                entries = [entry for entry in reader.read(block_ms=BLOCK_MS) if is_wanted(entry)]
            else:
                entries = reader.newest(last, is_wanted)
                has_looked_back = True
        except NOT_WORTH_RETRYING:
            raise
        except WORTH_RETRYING as error:
            if not is_away:
                complain(f"{redis_failure(url, error)}; trying again until it does")
            is_away = True
            wait(RETRY_S)
            continue
        if is_away:
            complain("Redis answers again")
            is_away = False
        yield from entries


def _of(environment: str | None) -> Predicate:
    def is_wanted(entry: Entry) -> bool:
        trajectory = entry.trajectory
        return environment is None or (isinstance(trajectory, Trajectory) and trajectory.environment == environment)

    return is_wanted


def _complain(sentence: str) -> None:
    print(f"headrace: {printing.printable(sentence)}", file=sys.stderr, flush=True)  # noqa: T201
