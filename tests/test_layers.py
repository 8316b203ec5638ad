"""The layer table of ARCHITECTURE.md, checked from the imports themselves."""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
OURS = {"shared", "services", "trainer", "examples", "benchmarks"}
MAY_IMPORT = {
    "shared": (),
    "services.inference_hub": ("shared",),
    "services.env_agents": ("shared",),
    "services.engine": ("shared",),
    "services.console": ("shared",),
    "services.standalone": ("shared", "services", "trainer", "examples"),
    "trainer": ("shared",),
    "examples": ("services.env_agents.environment", "services.env_agents.gymnasium_adapter", "shared"),
    "benchmarks": ("shared", "services", "trainer", "examples"),
}
"""Of ours, besides itself, by layer."""
NEVER_IN = {
    "shared": {"torch", "fastapi", "deepspeed", "transformers", "aiohttp", "httpx", "uvicorn", "renderers"},
    "services": {"torch", "deepspeed"},
}
HEAVY = {"torch", "deepspeed", "transformers", "fastapi", "uvicorn", "renderers", "matplotlib", "arro3", "aiohttp"}
ENTRY_POINTS = (
    "services/inference_hub/__main__.py",
    "services/env_agents/__main__.py",
    "services/engine/__main__.py",
    "services/standalone/command_line.py",
    "trainer/train.py",
)


@dataclass(frozen=True)
class Import:
    importer: str
    imported: str
    line: int
    is_at_import_time: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def sources() -> list[Path]:
    folders = [REPOSITORY / name for name in sorted(OURS)]
    return [path for folder in folders for path in sorted(folder.rglob("*.py")) if "cpu_stand_ins" not in path.parts]


def imports_of(path: Path) -> list[Import]:
    name = str(path.relative_to(REPOSITORY))
    return list(_imports(ast.parse(path.read_text()), name, is_at_import_time=True))


def _imports(node: ast.AST, importer: str, *, is_at_import_time: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(importer, alias.name, child.lineno, is_at_import_time)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{importer}:{child.lineno} has a relative import"
            for alias in child.names:
                yield Import(importer, f"{child.module}.{alias.name}", child.lineno, is_at_import_time)
        is_later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or _is_type_checking(child)
        yield from _imports(child, importer, is_at_import_time=is_at_import_time and not is_later)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def layer_of(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).parts
    return ".".join(parts[:2]) if parts[0] == "services" and len(parts) > 2 else parts[0]


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


@pytest.mark.parametrize("layer", MAY_IMPORT)
def test_layer_imports_only_what_its_row_allows(layer):
    allowed = (layer, *MAY_IMPORT[layer])
    forbidden = [
        str(found)
        for path in sources()
        if layer_of(path) == layer
        for found in imports_of(path)
        if found.imported.partition(".")[0] in OURS and not any(is_within(found.imported, package) for package in allowed)
    ]
    assert not forbidden


@pytest.mark.parametrize("layer", NEVER_IN)
def test_layer_stays_free_of_heavy_packages(layer):
    forbidden = [
        str(found)
        for path in sources()
        if is_within(layer_of(path), layer)
        for found in imports_of(path)
        if found.imported.partition(".")[0] in NEVER_IN[layer]
    ]
    assert not forbidden


def test_nothing_imports_sglang():
    assert not [str(found) for path in sources() for found in imports_of(path) if is_within(found.imported, "sglang")]


def test_standalone_imports_the_other_services_lazily():
    """It starts them as processes, so that a broken one cannot keep the command from saying so."""
    eager = [
        str(found)
        for path in sources()
        if layer_of(path) == "services.standalone"
        for found in imports_of(path)
        if found.is_at_import_time
        and found.imported.partition(".")[0] in OURS - {"shared"}
        and found.imported != "services"
        and not is_within(found.imported, "services.standalone")
    ]
    assert not eager


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_entry_point_parses_arguments_before_it_imports_anything_heavy(entry_point):
    eager = [
        str(found)
        for found in imports_of(REPOSITORY / entry_point)
        if found.is_at_import_time and found.imported.partition(".")[0] in HEAVY
    ]
    assert not eager


def test_module_names_do_not_hide_the_standard_library():
    """`deepspeed trainer/train.py` puts its own folder first on the path."""
    hidden = [str(path) for path in sources() if path.parent.name == "trainer" and path.stem in sys.stdlib_module_names]
    assert not hidden


def test_package_docstring_says_what_the_folder_owns_and_nothing_else():
    for path in sources():
        if path.name == "__init__.py":
            body = ast.parse(path.read_text()).body
            assert len(body) == 1, f"{path} must hold a docstring only"
            assert isinstance(body[0], ast.Expr), f"{path} must hold a docstring only"
