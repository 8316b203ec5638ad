"""Whether the chat format of a run can be loaded, tried in a process of its own: `python -m … <model> <renderer> <options>`.

Exit status 0, or a sentence on standard error with 2 if it cannot be used, 3 if a package is missing.
"""

import sys
from pathlib import Path
from typing import Final

import msgspec

UNUSABLE: Final = 2
PACKAGE_MISSING: Final = 3


def main() -> int:
    model_path, renderer, options = sys.argv[1:]
    from shared.errors import ConfigurationError

    try:
        from services.env_agents.rendering import load_renderer

        load_renderer(Path(model_path), renderer, msgspec.json.decode(options))
    except ImportError as error:
        return _fail(error, PACKAGE_MISSING)
    except ConfigurationError as error:
        return _fail(error, UNUSABLE)
    return 0


def _fail(error: Exception, status: int) -> int:
    sys.stderr.write(" ".join(str(error).split()) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
