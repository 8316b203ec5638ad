"""The trainer's checksums, against SHA-256 of what the engine holds: fused projections, padded vocabularies."""

import hashlib

import torch

from trainer.weight_checksums import ChecksumBuilder, engine_tensor, padding_bytes


def checksum(tensor):
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16]


def checksums_of(named):
    builder = ChecksumBuilder()
    for name, weight in named:
        builder.add(name, tuple(weight.shape), weight.flatten().view(torch.uint8))
    return builder.checksums()


def test_projections_are_hashed_as_the_one_tensor_that_the_engine_makes_of_them():
    q, k, v = torch.rand(4, 3), torch.rand(2, 3), torch.rand(2, 3)
    gate, up = torch.rand(5, 3), torch.rand(5, 3)
    named = [("l.q_proj.weight", q), ("l.k_proj.weight", k), ("l.v_proj.weight", v)]
    named += [("l.gate_proj.weight", gate), ("l.up_proj.weight", up), ("norm.weight", q[0])]
    expected = {
        "l.qkv_proj.weight": checksum(torch.cat([q, k, v])),
        "l.gate_up_proj.weight": checksum(torch.cat([gate, up])),
        "norm.weight": checksum(q[0]),
    }
    assert checksums_of(named) == expected
    assert checksums_of(reversed(named)) == expected


def test_a_vocabulary_is_padded_with_rows_of_zeros():
    weight = torch.rand(65, 2)
    assert checksums_of([("model.embed_tokens.weight", weight)]) == {
        "model.embed_tokens.weight": checksum(torch.cat([weight, torch.zeros(63, 2)]))
    }
    assert padding_bytes("model.embed_tokens.weight", (128, 2), 8) == 0
    assert padding_bytes("model.norm.weight", (65,), 4) == 0


def test_biases_are_fused_like_weights():
    assert engine_tensor("model.layers.0.self_attn.k_proj.bias") == ("model.layers.0.self_attn.qkv_proj.bias", 1)
    assert engine_tensor("model.layers.0.mlp.down_proj.weight") == ("model.layers.0.mlp.down_proj.weight", 0)
