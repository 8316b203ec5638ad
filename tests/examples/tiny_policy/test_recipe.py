import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.tiny_policy import warm_start
from examples.tiny_policy.recipe import make


@pytest.fixture
def short_recipe(monkeypatch):
    threads = torch.get_num_threads()
    monkeypatch.setattr(warm_start, "CLEAN_MAX_STEPS", 2)
    monkeypatch.setattr(warm_start, "CARELESS_STEPS", 2)
    yield
    torch.set_num_threads(threads)


def test_directory_holds_model_tokenizer_tasks_and_summary(short_recipe, tmp_path):
    directory = tmp_path / "runs" / "policy"
    make(directory, seed=0, num_train=40, num_held_out=10)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    policy = AutoModelForCausalLM.from_pretrained(directory)
    assert policy.config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert len(tokenizer) <= policy.config.vocab_size
    assert (directory / "train.parquet").is_file()
    assert (directory / "heldout.parquet").is_file()
    summary = json.loads((directory / "recipe.json").read_text())
    assert summary["num_parameters"] == policy.num_parameters() < 500_000
    assert summary["tokens_per_episode"] < 70
    assert set(summary["unseen"]) == {"loss", "greedy", "sampled"}


def test_help_has_examples(repository):
    command = [sys.executable, "-m", "examples.tiny_policy", "--help"]
    finished = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=60, check=True)
    assert "python -m examples.tiny_policy --output runs/demo/policy" in finished.stdout
