"""The reference's names for Medusa heads: maps there and back, and files that don't belong
together.
"""

import pytest
import torch
from torch import Tensor

from medusa_train.checkpoint.medusa_layouts import (
    from_files,
    names_in_files,
    shared_block_warning,
)
from medusa_train.errors import CheckpointError

D, V = 4, 9


def reference(
    heads: int = 3, blocks: int = 2, *, bias: bool = False, same: bool = False
) -> dict[str, Tensor]:
    """Tensors under the names that the public code writes."""
    torch.manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for i in range(heads):
        for j in range(blocks):
            first = same and j > 0
            tensors[f"{i}.{j}.linear.weight"] = (
                tensors[f"{i}.0.linear.weight"] if first else torch.randn(D, D)
            )
            tensors[f"{i}.{j}.linear.bias"] = (
                tensors[f"{i}.0.linear.bias"] if first else torch.randn(D)
            )
        tensors[f"{i}.{blocks}.weight"] = torch.randn(V, D)
        if bias:
            tensors[f"{i}.{blocks}.bias"] = torch.randn(V)
    return tensors


@pytest.mark.parametrize(
    ("heads", "blocks", "bias"), [(1, 0, False), (5, 1, False), (3, 2, True), (12, 3, False)]
)
def test_conversion_round_trip(heads: int, blocks: int, bias: bool) -> None:
    tensors = reference(heads, blocks, bias=bias)
    parsed = from_files(tensors)
    assert (parsed.num_heads, parsed.num_layers, parsed.hidden_size, parsed.vocab_size) == (
        heads,
        blocks,
        D,
        V,
    )
    again = names_in_files(parsed.state, parsed.num_layers)
    assert set(again) == set(tensors)
    assert all(again[name] is tensors[name] for name in tensors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("1.0.linear.bias"), r"1\.0\.linear\.bias missing"),
        (lambda t: t.pop("1.2.weight"), r"different|missing"),
        (lambda t: t.pop("2.1.linear.weight"), r"2\.1\.linear\.weight missing"),
        (lambda t: t.update({"extra.weight": torch.zeros(1)}), r"extra\.weight"),
        (
            lambda t: t.update({"0.2.weight": torch.zeros(V, D + 1)}),
            r"1\.2\.weight|0\.\d.*expected",
        ),
        (
            lambda t: t.update({"1.0.linear.weight": torch.zeros(D, D + 1)}),
            r"1\.0\.linear\.weight is \[4, 5\]",
        ),
        (lambda t: t.update({"0.2.weight": torch.zeros(V)}), "not a matrix"),
        (lambda t: t.update({"0.2.bias": torch.zeros(V)}), r"1\.2\.bias"),
        (lambda t: t.update({"0.5.linear.weight": torch.zeros(D, D)}), r"0\.5\.linear\.weight"),
        (lambda t: t.clear(), "holds no heads"),
    ],
)
def test_incomplete_or_misshapen_heads_are_named(change, message: str) -> None:  # type: ignore[no-untyped-def]
    tensors = reference()
    change(tensors)
    with pytest.raises(CheckpointError, match=message):
        from_files(tensors)


def test_heads_without_lm_head_share_the_target_models() -> None:
    tensors = reference()
    for i in range(3):
        del tensors[f"{i}.2.weight"]
    parsed = from_files(tensors)
    assert parsed.shared
    assert (parsed.num_heads, parsed.num_layers, parsed.hidden_size, parsed.vocab_size) == (
        3,
        2,
        D,
        None,
    )
    assert names_in_files(parsed.state, 2) == tensors
    tensors["0.2.weight"] = torch.zeros(V, D)  # one of three: neither the one layout nor the other
    with pytest.raises(CheckpointError):
        from_files(tensors)


def test_heads_of_different_depth_are_refused() -> None:
    tensors = reference(1, 1)
    tensors.update(
        {name.replace("0.", "1.", 1): tensor for name, tensor in reference(1, 2).items()}
    )
    with pytest.raises(CheckpointError, match="different numbers of blocks"):
        from_files(tensors)


@pytest.mark.parametrize(
    ("blocks", "same", "warns"),
    [(0, False, False), (1, False, False), (2, False, True), (2, True, False)],
)
def test_distinct_blocks_give_a_warning(blocks: int, same: bool, warns: bool) -> None:
    assert (shared_block_warning(from_files(reference(2, blocks, same=same))) is not None) == warns
