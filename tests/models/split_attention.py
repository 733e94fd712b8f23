"""`split_attention` in Triton's interpreter, against float64; run by `test_split_attention.py`.

The interpreter of Triton 3.9 gives garbage for products of bfloat16: what is tested is float16 and
float32.
"""

import pytest
import torch
from torch import Tensor

from medusa_train.inference.generate import Decoder
from medusa_train.inference.runners import FixedShapeRunner
from medusa_train.models import split_attention as kernels
from medusa_train.models.attention import FOLDED_HEADS, SPLIT_KEYS, use_split_keys
from medusa_train.models.split_attention import can_split, split_attention
from tests.families import random_backbone
from tests.inference.test_drafts import PROMPTS, TREE, random_draft
from tests.inference.test_static_steps import paths
from tests.models.split_in_torch import split_in_torch

HIDDEN = float("-inf")


def random_pass(
    rows: int, groups: int, queries: int, keys: int, dtype: torch.dtype, dim: int = 32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return folded queries, keys, values and a tree's mask; NaN lies behind the keys in memory.

    The rows of the batch have different lengths, and a query sees itself, the prefix, and some of
    the nodes before it.
    """
    generator = torch.Generator().manual_seed(groups * 100 + queries)
    heads = 2
    storage = torch.randn(2, rows + 1, heads, keys + 5, dim, generator=generator).to(dtype)
    storage[..., keys:, :] = torch.nan
    storage[:, rows] = torch.nan
    folded = torch.randn(rows, heads, groups * queries, dim, generator=generator).to(dtype)
    mask = torch.full((rows, 1, queries, keys + 8), HIDDEN)
    for row in range(rows):
        length = keys - queries - 20 * row
        mask[row, 0, :, :length] = 0
        above = torch.rand(queries, queries, generator=generator) < 0.4
        seen = above.tril() | torch.eye(queries, dtype=torch.bool)
        mask[row, 0, :, length : length + queries].masked_fill_(seen, 0)
    key, value = storage[:, :rows, :, :keys]
    return folded, key, value, mask.to(dtype)[..., :keys]


def error_of(folded: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> float:
    """Return the distance from attention in float64, relative to it."""
    scale = folded.shape[3] ** -0.5
    out = split_attention(folded, key, value, mask, scale)
    assert out.dtype == folded.dtype
    groups = folded.shape[2] // mask.shape[2]
    scores = folded.double() @ key.double().transpose(2, 3) * scale
    scores += mask.double().repeat(1, 1, groups, 1)
    expected = scores.softmax(-1) @ value.double()
    return float((out.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("queries", [1, 2, 17, 65])
@pytest.mark.parametrize("groups", [1, 3, 4, 7])
def test_groups_and_queries(groups: int, queries: int) -> None:
    assert error_of(*random_pass(1, groups, queries, 401, torch.float32)) < 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("groups", [1, 3, 4, 7])
def test_the_stand_in_has_the_arithmetic_of_the_kernel(groups: int, dtype: torch.dtype) -> None:
    """It takes the kernel's place in tests of whole models, so it has to be what the kernel is."""
    folded, key, value, mask = random_pass(2, groups, 5, 700, dtype)
    mask[0, ..., :600] = HIDDEN  # splits that see nothing
    found = split_attention(folded, key, value, mask, 0.2)
    block_rows, tile = kernels.block_sizes(folded.shape[2], folded.shape[3])
    blocks = -(-folded.shape[2] // block_rows)
    per_split, splits = kernels.split_sizes(700, 2 * 132 // (2 * 2 * blocks), tile)
    assert splits > 2
    expected = split_in_torch(folded, key, value, mask, 0.2, per_split)
    # in float16 weights are rounded relative to the largest score of a tile, or of a split
    largest = 2e-6 if dtype == torch.float32 else 2e-3
    assert (found - expected).norm() < largest * expected.norm()


@pytest.mark.parametrize("dim", [16, 64, 128, 256])
def test_sizes_of_heads_in_float16(dim: int) -> None:
    assert error_of(*random_pass(1, 3, 5, 300, torch.float16, dim)) < 2e-3


@pytest.mark.parametrize("groups", [1, 3])
def test_rows_of_different_lengths(groups: int) -> None:
    assert error_of(*random_pass(4, groups, 9, 300, torch.float32)) < 2e-6


def test_one_mask_for_all_rows() -> None:
    folded, key, value, mask = random_pass(3, 2, 5, 300, torch.float32)
    assert error_of(folded, key, value, mask[:1]) < 2e-6


@pytest.mark.parametrize("window", [1, 40, 200])
def test_windows_and_splits_that_see_nothing(window: int) -> None:
    """With 1,000 keys in eight splits the first ones are hidden from all queries, or the last ones."""
    folded, key, value, mask = random_pass(2, 3, 4, 1000, torch.float32)
    mask[..., : 996 - window] = HIDDEN  # of the first row, whose nodes begin at 996
    mask[1] = HIDDEN
    mask[1, 0, :, :window] = 0
    assert error_of(folded, key, value, mask) < 2e-6


def test_a_query_that_sees_nothing_gives_zero() -> None:
    folded, key, value, mask = random_pass(1, 2, 3, 300, torch.float32)
    mask[0, 0, 1] = HIDDEN
    out = split_attention(folded, key, value, mask, 0.3)
    assert not out.isnan().any()
    assert torch.equal(out.unflatten(2, (2, 3))[:, :, :, 1], torch.zeros(1, 2, 2, 32))


def test_queries_that_are_no_copy() -> None:
    """As a layer gives them: heads lie behind positions in memory."""
    folded, key, value, mask = random_pass(1, 1, 7, 300, torch.float32)
    states = folded.transpose(1, 2).contiguous().transpose(1, 2)
    assert states.stride() != folded.stride()
    assert error_of(states, key, value, mask) < 2e-6


def test_what_is_left_to_other_attention() -> None:
    folded, key, value, mask = random_pass(1, 2, 3, 300, torch.float16)
    assert can_split(folded, key, value, mask)
    assert not can_split(folded, key, value, None)
    assert not can_split(folded, key, value, mask == 0)
    assert not can_split(folded.float(), key, value, mask)
    assert not can_split(folded[..., :24], key[..., :24], value[..., :24], mask)
    assert not can_split(folded, key, value, mask.expand(-1, 2, -1, -1))
    many = mask.expand(-1, -1, 3, -1).repeat(1, 1, kernels.MOST_QUERIES, 1)
    assert not can_split(folded, key, value, many)


def test_torch_compile_may_take_it_for_one_operation() -> None:
    folded, key, value, mask = random_pass(2, 2, 3, 150, torch.float32)
    torch.library.opcheck(split_attention, (folded, key, value, mask, 0.3))


@pytest.mark.parametrize("runner", [None, FixedShapeRunner()], ids=["eager", "fixed"])
@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma3"])
def test_decoding_gives_the_same_text(
    family: str, runner: FixedShapeRunner | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, which a GPU does not use; the draft has a layer of its own."""
    monkeypatch.setattr(kernels, "ITEM_SIZES", (2, 4))
    calls = []
    monkeypatch.setattr(
        kernels, "split_attention", lambda *given: calls.append(given) or split_attention(*given)
    )
    backbone = random_backbone(family, dtype=torch.float32, head_dim=16)
    backbone.step_runner = runner
    weights = random_draft("hydra++", backbone)
    expected = Decoder(backbone, weights, TREE).generate(PROMPTS[0], 9)
    assert not calls
    assert backbone.attention == FOLDED_HEADS
    backbone.attention = use_split_keys(backbone.model)
    assert backbone.attention == SPLIT_KEYS
    draft = random_draft("hydra++", backbone)
    draft.load_state_dict(weights.state_dict())
    found = Decoder(backbone, draft, TREE).generate(PROMPTS[0], 9)
    assert paths([found]) == paths([expected])
    assert len(calls) >= (backbone.num_layers + draft.num_caches) * found.steps
