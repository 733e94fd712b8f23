"""Weights that are not partitioned are used as they are; partitioned ones:
tests/training/test_distributed.py.
"""

import torch
from torch import nn

from medusa_train.models.partitioned import (
    full_shape,
    gathered,
    gathering_modules,
    is_partitioned,
    make_whole,
    to_float32,
    whole_copies,
)


def test_whole_weights_are_left_alone() -> None:
    model = nn.Linear(3, 2).bfloat16()
    before = model.weight.data_ptr()
    assert not is_partitioned(model.weight)
    assert full_shape(model.weight) == (2, 3)
    with gathered(model.parameters(), modify=True), gathering_modules(model):
        model(torch.ones(1, 3, dtype=torch.bfloat16))
    make_whole(model.parameters(), keep=False)
    assert model.weight.data_ptr() == before
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    to_float32(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_whole_tensors_are_not_copied_and_kept_in_one_process() -> None:
    tensors = {"weight": nn.Parameter(torch.ones(2)), "buffer": torch.arange(3)}
    live = whole_copies(tensors, keep=True)
    assert whole_copies(tensors, keep=False) == {}
    for name, tensor in tensors.items():
        assert live[name].data_ptr() == tensor.data_ptr()
        assert not live[name].requires_grad
