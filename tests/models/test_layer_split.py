"""Layers run in two parts give the states of the whole model on a tree, up to float64 rounding."""

import itertools

import pytest
import torch

from medusa_train.errors import TargetModelError
from medusa_train.models.target_model import TargetModel
from medusa_train.trees.kv_cache import KVCache, compact
from medusa_train.trees.levels import TreeLevels
from medusa_train.trees.transformers_adapters import NodeInputs, PromptCache
from medusa_train.trees.tree import Tree
from tests.families import FAMILIES, random_target_model

TREE = Tree.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
PROMPT = torch.tensor([[3, 14, 15, 9, 2, 6, 5, 35]])


def _after_prompt(target_model: TargetModel) -> KVCache:
    kv_cache = KVCache(target_model.num_layers, 32, 32)
    target_model.run(PROMPT, cache=PromptCache(kv_cache, 0, 1))
    return kv_cache


def _placed(target_model: TargetModel, tree: Tree, kv_cache: KVCache, prefix: int) -> NodeInputs:
    masks = target_model.node_masks(tree)
    end = prefix + tree.size + 1
    return target_model.place_nodes(tree, masks, torch.tensor([prefix]), kv_cache.storage(end), end)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "phi3-longrope"])
def test_the_first_layers_by_level_and_then_the_rest_give_the_whole_model(
    family: str, layers: int
) -> None:
    """Hidden states, and the keys and values in the cache."""
    target_model = random_target_model(family)
    split = target_model.split_at(layers)
    tokens = torch.tensor([[40, 7, 8, 9, 10, 11, 12]])
    prefix = PROMPT.shape[1]
    whole, split_cache = _after_prompt(target_model), _after_prompt(target_model)
    expected, _ = target_model.run_nodes(
        tokens, _placed(target_model, TREE, whole, prefix), (layers,)
    )
    assert expected.aux is not None
    nodes = _placed(target_model, TREE, split_cache, prefix)
    inputs = split.inputs(nodes.positions, nodes.masks)
    parts = [
        split.run_first(
            tokens[:, level.first : level.last],
            inputs.slice(level.first, level.last),
            nodes.cache(level.first, level.last),
        )
        for level in TreeLevels(TREE).levels
    ]
    aux = torch.cat(parts, dim=1)
    assert torch.allclose(aux, expected.aux, atol=1e-11)
    rest = split.run_rest(aux, inputs, nodes.cache()).final
    assert torch.allclose(rest, expected.final, atol=1e-11)
    following = torch.tensor([[33, 34]])
    outs = []
    for kv_cache in (whole, split_cache):
        compact(kv_cache.storage(20), torch.tensor([prefix]), torch.tensor([[0, 2, 5]]))
        outs.append(
            target_model.run(following, cache=PromptCache(kv_cache, 0, 1, prefix + 3)).final
        )
    assert torch.allclose(*outs, atol=1e-11)


def test_layers_that_run_separately_need_masks() -> None:
    target_model = random_target_model("qwen3")
    with pytest.raises(ValueError, match="need masks"):
        target_model.split_at(1).inputs(torch.tensor([[8]]), None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_probe_passes_in_lower_precision(dtype: torch.dtype) -> None:
    for family in ("llama", "gemma2", "granite"):
        random_target_model(family, dtype=dtype).split_at(1)


def test_unsupported_models_and_exit_layers_are_rejected() -> None:
    target_model = random_target_model("llama")
    for layers in (0, 3):
        with pytest.raises(TargetModelError, match="has 3 layers; use 1 to 2"):
            target_model.split_at(layers)

    # every second one gives another result, as if the model did more than run its layers
    passes = itertools.count()
    target_model.body.norm.register_forward_hook(lambda _, __, out: out * (1 + next(passes) % 2))
    with pytest.raises(TargetModelError, match="differ from the whole model's"):
        target_model.split_at(1)
    bare = random_target_model("llama")
    del bare.body.rotary_emb
    bare.body.rotary = None
    with pytest.raises(TargetModelError, match="has no rotary_emb"):
        bare.split_at(1)
