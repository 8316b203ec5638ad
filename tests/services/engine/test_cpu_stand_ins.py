"""The stand-ins change `sys.meta_path` of whoever imports them, so each test asks a Python of its own."""

import subprocess
import sys

import pytest

from services.engine.launch import CPU_STAND_INS

PACKAGES = ("sgl_kernel", "torchaudio", "torchvision")


def run(code):
    """Standard output of `code` in a Python with the stand-ins on its path."""
    command = [sys.executable, "-S", "-c", code]
    finished = subprocess.run(command, env={"PYTHONPATH": str(CPU_STAND_INS)}, capture_output=True, text=True, timeout=30)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.mark.parametrize("package", PACKAGES)
def test_package_and_submodules_import_and_have_any_attribute(package):
    run(f"""
import {package}, {package}.deep.er
from {package}.elsewhere import name, OtherName
from {package} import anything
assert {package}.__version__ == "0.0.0"
name.of.attributes
class Derived(OtherName): pass
""")


@pytest.mark.parametrize("package", PACKAGES)
def test_calling_a_function_says_which_package_is_absent(package):
    output = run(f"""
from {package}.ops import compute
try:
    compute.fast(1, out=None)
except NotImplementedError as error:
    print(error)
""")
    assert output.startswith(f"{package}.ops.compute.fast was called, but its package has no CPU build")


def test_other_missing_packages_stay_missing():
    output = run("""
import sgl_kernel
try:
    import sgl_kernels
except ModuleNotFoundError as error:
    print(error)
""")
    assert output == "No module named 'sgl_kernels'\n"


def test_dunder_attributes_are_absent_so_that_probes_see_a_plain_module():
    run("""
import sgl_kernel
assert not hasattr(sgl_kernel, "__wrapped__")
assert not hasattr(sgl_kernel.function, "__torch_function__")
""")
