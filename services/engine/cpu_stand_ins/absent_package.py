"""A package that can be imported and looked at, and whose functions refuse to be called.

SGLang imports packages that have no CPU build, at the top of modules that a dense model on CPU never calls into. With a stand-in
those imports succeed, and an accidental call fails with a sentence instead of computing something wrong.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn


class AbsentAttribute:
    """Anything an absent package would have held: it has every attribute, can be a base class, and cannot be called."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __getattr__(self, name: str) -> "AbsentAttribute":
        if name.startswith("__"):
            raise AttributeError(name)
        return AbsentAttribute(f"{self._path}.{name}")

    def __call__(self, *arguments: object, **keywords: object) -> NoReturn:
        raise NotImplementedError(f"{self._path} was called, but its package has no CPU build and is only a stand-in here")

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type, ...]:
        return ()


class AbsentModule(ModuleType):
    """A module of an absent package; every attribute that is not a submodule is an AbsentAttribute."""

    def __getattr__(self, name: str) -> AbsentAttribute:
        if name.startswith("__"):
            raise AttributeError(name)
        return AbsentAttribute(f"{self.__name__}.{name}")


class AbsentSubmodules(MetaPathFinder, Loader):
    """Finds any submodule of `package`."""

    def __init__(self, package: str) -> None:
        self._prefix = f"{package}."

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.startswith(self._prefix) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def stand_in_for(package: str) -> None:
    """Turn the module `package`, which is being imported, into an AbsentModule with any submodule."""
    sys.modules[package].__class__ = AbsentModule
    sys.meta_path.append(AbsentSubmodules(package))
