"""Parameters are moved into one storage unchanged, and viewed as one tensor only if they are
adjacent.
"""

import pytest
import torch
from torch import Tensor, nn

from medusa_train.models.drafts.stacked import stack_in_place, stacked_view

BUFFER = torch.arange(40.0)  # as ZeRO's flat buffer of all parameters


def piece(start: int, shape: tuple[int, ...] = (3, 3), buffer: Tensor = BUFFER) -> nn.Parameter:
    """A view of `buffer` from `start` on."""
    return nn.Parameter(buffer[start : start + torch.Size(shape).numel()].view(shape))


def test_parameters_move_into_one_storage_unchanged() -> None:
    parameters = [nn.Parameter(torch.randn(2, 3)) for _ in range(4)]
    expected = [parameter.detach().clone() for parameter in parameters]
    assert stacked_view(parameters) is None
    stack_in_place(parameters)
    stacked = stacked_view(parameters)
    assert stacked is not None
    assert torch.equal(stacked, torch.stack(expected))
    with torch.no_grad():
        parameters[2].add_(1.0)
    assert torch.equal(stacked[2], expected[2] + 1)
    stack_in_place(parameters)
    again = stacked_view(parameters)
    assert again is not None
    assert again.data_ptr() == stacked.data_ptr()  # stacked parameters are not moved again
    stack_in_place([])


def test_adjacent_parameters_in_a_flat_buffer_are_viewed_at_any_offset() -> None:
    parameters = [piece(5 + 9 * i) for i in range(3)]
    stacked = stacked_view(parameters)
    assert stacked is not None
    assert torch.equal(stacked, torch.stack(list(parameters)))


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
def test_parameters_that_are_not_adjacent_have_no_view(second: nn.Parameter) -> None:
    assert stacked_view([piece(5), second]) is None
