import pytest

from services.standalone.devices import share, visible_devices
from shared.errors import ConfigurationError


def test_processes_get_devices_of_their_own_until_they_run_out():
    devices = ("4", "5", "6")
    assert share(devices, first=0, count=2) == ("4", "5")
    assert share(devices, first=2, count=1) == ("6",)
    assert share(devices, first=3, count=1) == ("4",)


def test_process_that_needs_more_devices_than_there_are_is_refused():
    with pytest.raises(ConfigurationError, match=r"needs 2 GPUs and this machine shows 1.*tensor_parallel_size"):
        share(("0",), first=0, count=2)


def test_devices_that_the_user_made_visible_are_the_ones_used(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-5f")
    assert visible_devices() == ("3", "GPU-5f")
