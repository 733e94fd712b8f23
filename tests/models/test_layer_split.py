"""Layers run in two parts give the states of the whole model on a tree, up to float64 rounding."""

import itertools

import pytest
import torch
from torch import Tensor

from medusa_train.errors import BackboneError
from medusa_train.models.backbone import Backbone
from medusa_train.models.features import FeatureSpec
from medusa_train.trees.kv_cache import TreeCache
from medusa_train.trees.masks import additive_mask
from medusa_train.trees.tree import Tree, TreeLevels
from tests.families import FAMILIES, random_backbone

TREE = Tree.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
PROMPT = torch.tensor([[3, 14, 15, 9, 2, 6, 5, 35]])


def _mask(tree: Tree, prefix: int) -> Tensor:
    visible = torch.cat(
        [torch.ones(tree.size + 1, prefix, dtype=torch.bool), tree.ancestors], dim=1
    )
    return additive_mask(visible, torch.float64)[None, None]


def _after_prompt(backbone: Backbone) -> TreeCache:
    cache = backbone.new_cache(32)
    backbone.run(PROMPT, cache=cache)
    cache.commit(PROMPT.shape[1])
    return cache


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "phi3-longrope"])
def test_the_first_layers_by_level_and_then_the_rest_give_the_whole_model(
    family: str, layers: int
) -> None:
    """Hidden states, and the keys and values in the cache."""
    backbone = random_backbone(family)
    split = backbone.split_at(layers)
    tokens = torch.tensor([[40, 7, 8, 9, 10, 11, 12]])
    prefix = PROMPT.shape[1]
    positions, mask = TREE.depths[None] + prefix, _mask(TREE, prefix)
    whole, split_cache = _after_prompt(backbone), _after_prompt(backbone)
    expected = backbone.run(
        tokens, positions=positions, mask=mask, cache=whole, need=FeatureSpec(early=(layers,))
    )
    assert expected.early is not None
    inputs = split.inputs(positions, mask, split_cache.length)
    parts = [
        split.run_first(
            tokens[:, level.first : level.last], inputs.slice(level.first, level.last), split_cache
        )
        for level in TreeLevels(TREE).levels
    ]
    early = torch.cat(parts, dim=1)
    assert torch.allclose(early, expected.early, atol=1e-11)
    assert torch.allclose(
        split.run_rest(early, inputs, split_cache).hidden, expected.hidden, atol=1e-11
    )
    for cache in (whole, split_cache):
        cache.keep_rows([[0, 2, 5]])
    one, other = (
        backbone.run(torch.tensor([[33, 34]]), cache=cache).hidden for cache in (whole, split_cache)
    )
    assert torch.allclose(one, other, atol=1e-11)


def test_a_chain_in_a_single_row_needs_no_mask() -> None:
    backbone = random_backbone("qwen3")
    split = backbone.split_at(1)
    tokens, chain = torch.tensor([[40, 7, 8]]), Tree.chain(2)
    prefix = PROMPT.shape[1]
    positions = chain.depths[None] + prefix
    states = []
    for mask in (_mask(chain, prefix), None):
        cache = _after_prompt(backbone)
        inputs = split.inputs(positions, mask, prefix)
        states.append(
            torch.cat(
                [
                    split.run_first(tokens[:, i : i + 1], inputs.slice(i, i + 1), cache)
                    for i in range(3)
                ],
                1,
            )
        )
    assert torch.allclose(states[0], states[1], atol=1e-11)
    with pytest.raises(ValueError, match="sliding window need a mask"):
        random_backbone("mistral-window").split_at(1).inputs(positions, None, prefix)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_probe_passes_in_lower_precision(dtype: torch.dtype) -> None:
    for family in ("llama", "gemma2", "granite"):
        random_backbone(family, dtype=dtype).split_at(1)


def test_unsupported_models_and_exit_layers_are_rejected() -> None:
    backbone = random_backbone("llama")
    for layers in (0, 3):
        with pytest.raises(BackboneError, match="has 3 layers; use 1 to 2"):
            backbone.split_at(layers)

    # every second one gives another result, as if the model did more than run its layers
    passes = itertools.count()
    backbone.body.norm.register_forward_hook(lambda _, __, out: out * (1 + next(passes) % 2))
    with pytest.raises(BackboneError, match="differ from the whole model's"):
        backbone.split_at(1)
    bare = random_backbone("llama")
    del bare.body.rotary_emb
    bare.body.rotary = None
    with pytest.raises(BackboneError, match="has no rotary_emb"):
        bare.split_at(1)
