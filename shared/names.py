"""How a run and an environment may be called: names stand in Redis keys, paths, URLs and labels of metrics."""

from typing import Annotated, Final

from msgspec import Meta

NAME_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
NAME_RULE: Final = "must be 1 to 64 letters, digits, '.', '_' and '-', and begin with a letter or digit"
"""`NAME_PATTERN` in words."""

Name = Annotated[str, Meta(pattern=NAME_PATTERN)]
