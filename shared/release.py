"""Which Headrace this is. Images hold the source without the package, so it is told here; pyproject.toml says the same."""

from typing import Final

VERSION: Final = "0.1.0"
