"""The stream of buckets: layout, order, and the memory it takes."""

import hypothesis
import hypothesis.strategies as st
import torch

from tests.trainer.weights import buckets_of, weights
from trainer.weight_buckets import WeightSource, stream

CPU = torch.device("cpu")


def test_buckets_keep_order_and_stay_under_their_size():
    buckets = buckets_of(torch.float32)
    assert [name for bucket in buckets for name in bucket.names] == [name for name, _ in weights()]
    assert all(len(bucket.data) <= 120 or len(bucket.names) == 1 for bucket in buckets)
    assert len(buckets) > 1
    assert [bucket.is_last for bucket in buckets] == [False] * (len(buckets) - 1) + [True]


def test_the_bytes_are_the_tensors_one_after_the_other():
    source = WeightSource.of([("a", torch.tensor([[1.0, 2.0]])), ("b", torch.tensor([3.0]))])
    (bucket,) = stream(source, dtype=torch.bfloat16, bucket_bytes=100, device=CPU)
    assert bucket.names == ("a", "b")
    assert bucket.dtypes == ("bfloat16", "bfloat16")
    assert bucket.shapes == ((1, 2), (1,))
    assert torch.equal(bucket.data.view(torch.bfloat16), torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16))


def test_later_changes_of_a_weight_do_not_reach_its_bucket():
    weight = torch.ones(4)
    (bucket,) = stream(WeightSource.of([("a", weight)]), dtype=torch.float32, bucket_bytes=100, device=CPU)
    weight.zero_()
    assert torch.equal(bucket.data.view(torch.float32), torch.ones(4))


def test_a_tensor_above_the_size_is_a_bucket_of_its_own():
    source = WeightSource.of([("a", torch.ones(2)), ("big", torch.ones(9)), ("b", torch.ones(2))])
    buckets = [bucket.names for bucket in stream(source, dtype=torch.float32, bucket_bytes=16, device=CPU)]
    assert buckets == [("a",), ("big",), ("b",)]


@hypothesis.given(st.lists(st.integers(1, 12), min_size=1, max_size=20), st.integers(4, 60))
def test_whatever_the_sizes_two_buffers_hold_every_byte_of_two_buckets_in_a_row(sizes, bucket_bytes):
    named = [(f"w{index}", torch.full((size,), float(index))) for index, size in enumerate(sizes)]
    received: list[float] = []
    memory = set()
    before = None
    for bucket in stream(WeightSource.of(named), dtype=torch.float32, bucket_bytes=bucket_bytes, device=CPU):
        if before is not None:
            received += before.data.view(torch.float32).tolist()
        before = bucket
        if len(bucket.data) <= bucket_bytes:
            memory.add(bucket.data.untyped_storage().data_ptr())
    received += before.data.view(torch.float32).tolist()
    assert received == [float(index) for index, size in enumerate(sizes) for _ in range(size)]
    assert len(memory) <= 2
