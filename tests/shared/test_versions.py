import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.versions import VersionSpan, lag, max_lag, merge_spans, oldest_version, shift_spans, version_of_label


def test_spans_are_shifted_into_the_whole_sequence() -> None:
    assert shift_spans([VersionSpan(0, 3, 7), VersionSpan(3, 5, 8)], 10) == [VersionSpan(10, 13, 7), VersionSpan(13, 15, 8)]


def test_adjacent_spans_of_one_version_merge_and_gaps_stay() -> None:
    spans = [VersionSpan(0, 2, 1), VersionSpan(2, 4, 1), VersionSpan(4, 4, 2), VersionSpan(6, 7, 1), VersionSpan(7, 9, 2)]
    assert merge_spans(spans) == (VersionSpan(0, 4, 1), VersionSpan(6, 7, 1), VersionSpan(7, 9, 2))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 2))))
def test_merging_keeps_the_version_of_every_token(steps: list[tuple[int, int, int]]) -> None:
    spans, position = [], 0
    for gap, length, version in steps:
        spans.append(VersionSpan(position + gap, position + gap + length, version))
        position += gap + length

    def version_by_token(spans: list[VersionSpan] | tuple[VersionSpan, ...]) -> dict[int, int]:
        return {token: span.version for span in spans for token in range(span.start, span.end)}

    merged = merge_spans(spans)
    assert version_by_token(merged) == version_by_token(spans)
    assert all(span.start < span.end for span in merged)


def test_lag_counts_updates_since_the_oldest_token() -> None:
    assert lag(9, oldest_version([VersionSpan(0, 1, 8), VersionSpan(1, 2, 7)])) == 2


def test_tokens_of_a_lineage_that_was_cut_off_are_not_stale() -> None:
    assert lag(5, 7) == 0


@pytest.mark.parametrize(("label", "version"), [("default", 0), ("0", 0), ("17", 17), ("v2", None), ("-1", None), ("", None)])
def test_version_of_a_label(label: str, version: int | None) -> None:
    assert version_of_label(label) == version


@pytest.mark.parametrize(("ratio", "bound"), [(0.0, 0), (0.1, 1), (0.5, 1), (1.0, 1), (1.5, 2), (2.0, 2)])
def test_the_bound_is_the_ratio_rounded_up(ratio: float, bound: int) -> None:
    assert max_lag(ratio) == bound
