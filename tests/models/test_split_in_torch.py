"""Attention with split keys in plain torch: against float64, and the text of all drafts in all runners.

That its arithmetic is the kernel's is tested in Triton's interpreter (split_attention.py).
"""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux alone")

from medusa_train.inference.runners import FixedShapeRunner
from medusa_train.models import split_attention as kernels
from medusa_train.models.attention import FOLDED_HEADS, SPLIT_KEYS, use_split_keys
from tests.families import random_backbone
from tests.inference.tape import TapeRunner
from tests.inference.test_drafts import KINDS, random_draft
from tests.models.split_in_torch import HIDDEN, CountedSplits, split_in_torch
from tests.models.test_layer_programs import texts


@pytest.mark.parametrize("queries", [1, 2, 17, 65])
@pytest.mark.parametrize("groups", [1, 3, 4, 7])
def test_groups_queries_windows_and_nan_behind_the_keys(groups: int, queries: int) -> None:
    generator = torch.Generator().manual_seed(groups * 100 + queries)
    storage = torch.randn(2, 3, 2, 155, 16, generator=generator, dtype=torch.float64)
    storage[..., 150:, :] = torch.nan
    key, value = storage[:, :2, :, :150]
    folded = torch.randn(2, 2, groups * queries, 16, generator=generator, dtype=torch.float64)
    mask = torch.full((2, 1, queries, 150), HIDDEN, dtype=torch.float64)
    mask[0, ..., : 150 - queries] = 0
    mask[1, ..., 40:70] = 0  # a window: splits before and behind it see nothing
    found = split_in_torch(folded, key, value, mask, 0.3)
    scores = folded @ key.transpose(2, 3) * 0.3 + mask.repeat(1, 1, groups, 1)
    torch.testing.assert_close(found, scores.softmax(-1) @ value)


def test_a_query_that_sees_nothing_gives_zero() -> None:
    states = torch.randn(1, 1, 2, 16)
    mask = torch.full((1, 1, 2, 2), HIDDEN)
    assert torch.equal(split_in_torch(states, states, states, mask, 1.0), torch.zeros(1, 1, 2, 16))


@pytest.mark.slow  # seconds for each
@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma3"])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_of_all_kinds_in_all_runners(
    kind: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits = CountedSplits()
    monkeypatch.setattr(kernels, "ITEM_SIZES", (8,))
    monkeypatch.setattr(kernels, "split_attention", splits)
    plain = random_backbone(family, head_dim=16)
    draft = random_draft(kind, plain)
    with draft.no_early_exit():
        expected = texts(plain, draft)
    assert (plain.attention, splits.calls) == (FOLDED_HEADS, 0)

    backbone = random_backbone(family, head_dim=16)
    backbone.attention = use_split_keys(backbone.model)
    assert backbone.attention == SPLIT_KEYS
    draft = random_draft(kind, backbone)
    for runner in (None, FixedShapeRunner(), TapeRunner()):
        backbone.step_runner = runner
        splits.calls = 0
        with draft.no_early_exit():
            assert texts(backbone, draft) == expected
        assert splits.calls
    assert splits.most_splits > 2
