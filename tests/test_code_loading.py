"""Messages are data: nothing of ours turns bytes that another process sent into code."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_layers import REPOSITORY, Import, imports_of, is_within, sources

THAT_LOAD_CODE = ("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "multiprocessing.reduction")
WEIGHT_HANDLE = "trainer/weight_channels.py"
"""Writes, and never reads, the pickle in which SGLang's stock server takes a reference to memory on its own node."""
CALLS_THAT_LOAD_CODE = {"eval", "exec", "compile"}
UNSAFE_KEYWORDS = {("allow_pickle", True), ("weights_only", False), ("trust_remote_code", True), ("shell", True)}


def calls_of(path: Path) -> Iterator[ast.Call]:
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))


def loads_code(found: Import) -> bool:
    return any(is_within(found.imported, module) for module in THAT_LOAD_CODE)


def test_no_module_imports_pickle_but_the_one_that_writes_sglangs_handle():
    found = {(found.importer, found.imported) for path in sources() for found in imports_of(path) if loads_code(found)}
    assert found == {(WEIGHT_HANDLE, "multiprocessing.reduction.ForkingPickler")}


def test_the_handle_is_written_and_never_read():
    used = {
        node.func.attr
        for node in calls_of(REPOSITORY / WEIGHT_HANDLE)
        if isinstance(node.func, ast.Attribute) and "Pickler" in ast.unparse(node.func.value)
    }
    assert used == {"dump"}


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_no_call_makes_code_of_data(path):
    for call in calls_of(path):
        assert not (isinstance(call.func, ast.Name) and call.func.id in CALLS_THAT_LOAD_CODE), f"{path}:{call.lineno}"
        for keyword in call.keywords:
            value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
            assert (keyword.arg, value) not in UNSAFE_KEYWORDS, f"{path}:{call.lineno} has {keyword.arg}={value}"
