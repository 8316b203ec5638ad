"""`package.module:name`, as run files and requests name a user's own code."""

from collections.abc import Iterable


def is_inside(import_path: str, packages: Iterable[str]) -> bool:
    """Whether the module is one of the packages, or inside one."""
    module = import_path.partition(":")[0]
    return any(module == package or module.startswith(f"{package}.") for package in packages)
