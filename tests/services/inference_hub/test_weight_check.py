"""Comparing checksums: with the trainer's where engines hold whole tensors, with each other elsewhere."""

from services.inference_hub.weight_check import differing_names, listed, mismatches


def test_whole_tensors_are_compared_with_the_trainers():
    found = {"good": [{"a": "1", "b": "2"}], "bad": [{"a": "1", "b": "3"}], "other": [{"a": "1", "c": "2"}]}
    problems = mismatches(found, {"a": "1", "b": "2"})
    assert problems == {
        "bad": "1 tensors differ from the trainer's: b",
        "other": "2 tensors differ from the trainer's: b is not in the engine; c is only in the engine",
    }


def test_shares_of_tensors_are_compared_with_what_most_engines_have():
    same, other = [{"a": "1"}, {"a": "2"}], [{"a": "1"}, {"a": "9"}]
    assert mismatches({"x": same, "y": other, "z": same}, {"a": "7"}) == {
        "y": "its weights differ from those of most other engines"
    }
    assert mismatches({"x": same, "one rank": [{"a": "7"}]}, {"a": "7"}) == {}


def test_without_the_trainers_checksums_engines_are_compared_with_each_other():
    assert list(mismatches({"x": [{"a": "1"}], "y": [{"a": "1"}], "z": [{"a": "2"}]}, None)) == ["z"]


def test_names_that_differ_are_listed_in_order_and_long_lists_end():
    assert differing_names({"b": "", "a": ""}, {"c": ""}) == [
        "a is not in the engine",
        "b is not in the engine",
        "c is only in the engine",
    ]
    assert listed([str(index) for index in range(10)]) == "0; 1; 2; 3; 4; 5; 6; 7; and 2 more"
