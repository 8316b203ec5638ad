"""Which records a model can be trained on, and what is said of the others."""

import dataclasses

import msgspec
import pytest
from tokenizers import Tokenizer, models

from shared.errors import ConfigurationError
from tests.trainer.records import trajectory
from trainer.record_checks import NO_LIMITS, RecordLimits, require_matching_tokenizer, why_untrainable

LIMITS = RecordLimits(num_embeddings=100, max_positions=4)
SOUND = trajectory([0, 1, 1], token_ids=[0, 99, 5], logprobs=[0, -1, -2])


def test_a_sound_record_has_nothing_wrong():
    assert why_untrainable(SOUND, LIMITS) is None
    assert why_untrainable(trajectory([]), LIMITS) is None


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        (trajectory([0, 1, 1, 1, 1]), "at most the 4 tokens of the model's max_position_embeddings, got 5"),
        (trajectory([0, 1], token_ids=[3, 100]), "a token id must be in [0, 100), the rows of the model's embedding, got 100"),
        (trajectory([0, 1], token_ids=[-1, 100]), "got -1; the agents' tokenizer is another model's"),
        (trajectory([0, 1], logprobs=[0, float("nan")]), "log-probabilities must be finite"),
        (trajectory([0, 1], reward=float("inf")), "a reward must be a finite number, got inf"),
        (trajectory([0, 1], temperature=0.0), "at a temperature > 0 to be trained on, got 0.0"),
    ],
)
def test_what_is_wrong_is_a_sentence_with_rule_and_value(record, sentence):
    assert sentence in why_untrainable(record, LIMITS)


def test_without_limits_only_the_numbers_count():
    assert why_untrainable(trajectory([0, 1, 1, 1, 1], token_ids=[0, 10**6, 1, 1, 1]), NO_LIMITS) is None
    assert why_untrainable(msgspec.structs.replace(SOUND, reward=float("nan")), NO_LIMITS) is not None


def test_a_tokenizer_with_ids_beyond_the_embedding_is_refused_at_start(tmp_path):
    require_matching_tokenizer(tmp_path, LIMITS)
    Tokenizer(models.WordLevel({"a": 0, "b": 100}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigurationError, match="an embedding of 100 rows and a tokenizer with ids up to 100"):
        require_matching_tokenizer(tmp_path, LIMITS)
    require_matching_tokenizer(tmp_path, dataclasses.replace(LIMITS, num_embeddings=101))
