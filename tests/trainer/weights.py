"""A few weights, and the buckets they make."""

import dataclasses

import torch

from trainer.weight_buckets import Bucket, WeightSource, stream


def weights() -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [(f"layers.{index}.weight", torch.randn(3 + index, 5, generator=generator)) for index in range(6)]


def buckets_of(dtype: torch.dtype, bucket_bytes: int = 120) -> list[Bucket]:
    """Each with memory of its own, so that all of them can be kept."""
    buckets = stream(WeightSource.of(weights()), dtype=dtype, bucket_bytes=bucket_bytes, device=torch.device("cpu"))
    return [dataclasses.replace(bucket, data=bucket.data.clone()) for bucket in buckets]
