import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from services.standalone.evaluated_model import find_model, require_tokenizer
from shared.errors import ConfigurationError


def make_model(directory: Path, *, tokens: tuple[str, ...] = ("a", "b"), vocab_size: int = 4) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
    (directory / "model.safetensors").write_bytes(b"")
    Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[])).save(
        str(directory / "tokenizer.json")
    )
    return directory


def make_checkpoint(directory: Path, **options) -> Path:
    make_model(directory / "model", **options)
    (directory / "run_state.json").write_text('{"version": 25, "group_ids": [], "fingerprint": "x", "num_ranks": 1}')
    return directory


@pytest.mark.parametrize("given", ["v00025", "v00025/model"])
def test_checkpoint_is_its_export_and_its_version(tmp_path, given):
    checkpoint = make_checkpoint(tmp_path / "v00025")
    found = find_model(tmp_path / given)
    assert (found.directory, found.name, found.version) == (checkpoint / "model", "v00025", 25)


def test_any_hugging_face_model_is_one_without_a_version(tmp_path):
    found = find_model(make_model(tmp_path / "Qwen3-8B"))
    assert (found.directory, found.name, found.version) == (tmp_path / "Qwen3-8B", "Qwen3-8B", None)


@pytest.mark.parametrize("given", ["run", "run/checkpoints"])
def test_folder_of_checkpoints_names_the_newest(tmp_path, given):
    for name in ("v00025", "v99999", "v100000"):
        make_checkpoint(tmp_path / "run" / "checkpoints" / name)
    with pytest.raises(ConfigurationError, match=r"must be a checkpoint .*, which holds checkpoints; give one .*v100000$"):
        find_model(tmp_path / given)


def test_what_is_no_model_is_a_sentence(tmp_path):
    with pytest.raises(ConfigurationError, match=r"got '.*nowhere', which is no directory; correct the path"):
        find_model(tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match=r"without config\.json and run_state\.json; correct the path"):
        find_model(tmp_path)


def test_checkpoint_that_is_not_whole_is_a_sentence(tmp_path):
    checkpoint = make_checkpoint(tmp_path / "v00025")
    (checkpoint / "run_state.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"run_state\.json cannot be read: .*; give another checkpoint"):
        find_model(checkpoint)


def test_model_without_weights_or_tokenizer_is_a_sentence(tmp_path):
    model = make_model(tmp_path / "model")
    (model / "model.safetensors").unlink()
    with pytest.raises(ConfigurationError, match=r"has no weights \(\*\.safetensors, \*\.bin\); download them"):
        find_model(model)
    (model / "pytorch_model.bin").write_bytes(b"")
    (model / "tokenizer.json").unlink()
    with pytest.raises(ConfigurationError, match=r"must have its tokenizer beside it, .*; save it there"):
        find_model(model)


def test_tokenizer_with_more_tokens_than_embeddings_is_another_models(tmp_path):
    model = find_model(make_model(tmp_path / "model", tokens=("a", "b", "c"), vocab_size=2))
    with pytest.raises(ConfigurationError, match=r"go up to 2 for a vocab_size of 2; it is another model's tokenizer"):
        require_tokenizer(model, tmp_path / "gone")


def test_vocabulary_of_the_text_part_counts(tmp_path):
    model = find_model(make_model(tmp_path / "model", tokens=("a", "b", "c")))
    (model.directory / "config.json").write_text('{"text_config": {"vocab_size": 2}}')
    with pytest.raises(ConfigurationError, match="vocab_size of 2"):
        require_tokenizer(model, tmp_path / "gone")


def test_checkpoint_of_another_run_is_refused(tmp_path):
    checkpoint = find_model(make_checkpoint(tmp_path / "v00025"))
    other = make_model(tmp_path / "other", tokens=("a", "c"))
    with pytest.raises(
        ConfigurationError, match=r"a checkpoint must be of the run file's model, .*\(2 tokens differ\); give the run"
    ):
        require_tokenizer(checkpoint, other)
    require_tokenizer(checkpoint, make_model(tmp_path / "same"))
    require_tokenizer(checkpoint, tmp_path / "gone")


def test_another_model_may_have_another_tokenizer(tmp_path):
    model = find_model(make_model(tmp_path / "baseline"))
    require_tokenizer(model, make_model(tmp_path / "other", tokens=("a", "c")))
