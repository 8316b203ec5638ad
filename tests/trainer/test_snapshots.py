"""Copies in memory: of their own, each place once, and nothing of what training goes on with."""

from collections import OrderedDict

import torch

from trainer.snapshots import Copier


def test_copies_are_of_their_own_and_as_large_as_what_is_named():
    flat = torch.arange(6.0)
    source = {"part": flat[2:4], "nested": OrderedDict(step=[torch.ones(2), 7]), "rate": (0.5, "text")}
    copier = Copier()
    copied = copier.copy(source)
    flat.zero_()
    source["nested"]["step"][0].zero_()
    assert copied["part"].tolist() == [2.0, 3.0]
    assert copied["part"].untyped_storage().nbytes() == 8, "the slice alone, not what it is a slice of"
    assert type(copied["nested"]) is OrderedDict
    assert copied["nested"]["step"][0].tolist() == [1.0, 1.0]
    assert (copied["nested"]["step"][1], copied["rate"]) == (7, (0.5, "text"))
    assert copier.num_bytes == 16


def test_tied_tensors_stay_tied_and_an_exported_weight_costs_no_second_copy():
    weight = torch.ones(3)
    copier = Copier()
    copied = copier.copy({"embedding": weight, "head": weight.detach()})
    assert copied["embedding"] is copied["head"]
    assert copier.weight(weight.detach()) is copied["head"]
    assert copier.num_bytes == 12


def test_a_temporary_weight_is_copied_by_itself():
    copier = Copier()
    copier.copy({"weight": torch.ones(3)})
    temporary = torch.arange(6.0).reshape(2, 3).T
    exported = copier.weight(temporary)
    assert exported.is_contiguous()
    temporary.zero_()
    assert exported.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
