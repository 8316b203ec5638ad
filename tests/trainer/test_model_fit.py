"""An engine that serves another model is refused with what differs."""

import pytest
from transformers import Qwen3Config

from shared.errors import ConfigurationError
from trainer.model_fit import differences, model_check, shapes_of


def config(**changes):
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    return Qwen3Config(**{**sizes, **heads, **changes})


def test_every_difference_in_names_and_shapes_is_listed():
    assert differences({"a": (2, 3), "b": (4,), "c": (1,)}, {"a": (2, 3), "b": (5,), "d": (1,)}) == [
        "b is [4] here and [5] in the engine",
        "c [1] is not in the engine",
        "d [1] is only in the engine",
    ]


def test_shapes_are_those_of_the_weights_that_travel():
    shapes = shapes_of(config())
    assert shapes["model.embed_tokens.weight"] == (32, 16)
    assert shapes["model.layers.1.mlp.down_proj.weight"] == (16, 24)
    assert "lm_head.weight" not in shapes, "tied weights travel once"


def test_an_engine_with_another_model_is_named_with_what_differs(tmp_path):
    config(intermediate_size=40).save_pretrained(tmp_path)
    check = model_check(config())
    with pytest.raises(ConfigurationError, match=r"down_proj.weight is \[16, 24\] here and \[16, 40\] in the engine") as error:
        check("http://10.0.0.7:30000", str(tmp_path))
    assert "http://10.0.0.7:30000" in str(error.value)


@pytest.mark.parametrize(
    "described",
    ['{"model_type": "unheard_of"}', "{}", '{"model_type": "clip"}', "no JSON", '{"auto_map": {"AutoConfig": "code.Config"}}'],
)
def test_an_engine_with_a_model_of_an_unknown_kind_is_named(tmp_path, described):
    (tmp_path / "config.json").write_text(described)
    with pytest.raises(ConfigurationError, match=r"engine http://10\.0\.0\.7:30000 must serve the model") as error:
        model_check(config())("http://10.0.0.7:30000", str(tmp_path))
    assert len(str(error.value)) < 1_000


def test_the_same_model_and_one_that_cannot_be_seen_pass(tmp_path):
    config().save_pretrained(tmp_path)
    check = model_check(config())
    check("http://10.0.0.7:30000", str(tmp_path))
    check("http://10.0.0.8:30000", "/not/on/this/machine")
