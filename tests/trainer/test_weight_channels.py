"""What transports need besides the exchange: a folder that can be used, and handles that another process can take."""

import inspect

import pytest
import torch
from torch.multiprocessing import reductions

from shared.errors import ConfigurationError, WeightUpdateError
from tests.trainer.weights import buckets_of, weights
from trainer.weight_channels import KEPT_SETS, STORAGE_DEVICE, require_directory, tensors_of, write_set


@pytest.mark.parametrize("directory", [None, "", "relative/folder", "/no/such/folder"])
def test_a_folder_that_cannot_be_shared_is_refused_with_what_would_do(directory):
    with pytest.raises(ConfigurationError, match="absolute path of a folder that trainer and engines share"):
        require_directory(directory)


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="create it, mount it on every machine under the same path"):
        require_directory(str(tmp_path / "file"))
    assert require_directory(str(tmp_path)) == tmp_path


def test_a_set_appears_whole_and_only_the_last_ones_are_kept(tmp_path):
    paths = [write_set(iter(buckets_of(torch.float32)), tmp_path, version) for version in range(4)]
    assert sorted(tmp_path.iterdir()) == paths[-KEPT_SETS:]
    assert not list(tmp_path.glob(".*"))


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "taken").touch()
    with pytest.raises(WeightUpdateError, match="must be a folder that the trainer can write to"):
        write_set(iter(buckets_of(torch.float32)), tmp_path / "taken", 1)


def test_a_bucket_taken_apart_is_the_weights():
    found = {name: tensor for bucket in buckets_of(torch.float32) for name, tensor in tensors_of(bucket).items()}
    assert all(torch.equal(found[name], weight) for name, weight in weights())


def test_torch_has_the_gpu_where_handles_name_it():
    assert list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)[STORAGE_DEVICE] == "storage_device"
