"""Parameters in one storage: laid there without a change, and found there only where they lie in order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from medusa_train.models.drafts.stacked import stack_in_place, stacked_view

BUFFER = torch.arange(40.0)  # what somebody else, such as ZeRO, keeps all parameters in


def piece(start: int, shape: tuple[int, ...] = (3, 3), buffer: Tensor = BUFFER) -> nn.Parameter:
    """Of `buffer`, from `start` on, without a copy."""
    count = torch.Size(shape).numel()
    return nn.Parameter(buffer[start : start + count].view(shape))


def test_they_move_into_one_storage_and_stay_what_they_were() -> None:
    parameters = [nn.Parameter(torch.randn(2, 3)) for _ in range(4)]
    wanted = [parameter.detach().clone() for parameter in parameters]
    assert stacked_view(parameters) is None
    stack_in_place(parameters)
    together = stacked_view(parameters)
    assert together is not None
    assert torch.equal(together, torch.stack(wanted))
    with torch.no_grad():
        parameters[2].add_(1.0)
    assert torch.equal(together[2], wanted[2] + 1)
    stack_in_place(parameters)
    again = stacked_view(parameters)
    assert again is not None
    assert again.data_ptr() == together.data_ptr()  # where they lie so already, nothing moves
    stack_in_place([])


def test_those_that_others_laid_in_order_are_found_wherever_they_begin() -> None:
    parameters = [piece(5 + 9 * i) for i in range(3)]
    together = stacked_view(parameters)
    assert together is not None
    assert torch.equal(together, torch.stack(list(parameters)))


@pytest.mark.parametrize(
    "second",
    [
        piece(15),
        piece(0),
        piece(14, buffer=BUFFER.clone()),
        nn.Parameter(piece(14).detach().T),
        piece(14, (9, 1)),
        piece(14, buffer=BUFFER.view(torch.float16)),
    ],
    ids=["gap", "order", "storage", "transposed", "shape", "dtype"],
)
def test_others_lie_apart(second: nn.Parameter) -> None:
    assert stacked_view([piece(5), second]) is None
