"""Decoding on a GPU: the greedy text in float64 is plain decoding's, and memory does not grow from
step to step.
"""

import pytest
import torch
from shapes import Sizes, llama_config, random_model

from medusa_train.inference.batch_decoder import BatchDecoder
from medusa_train.inference.cuda_graphs import use_cuda_graphs
from medusa_train.inference.generate import Decoder
from medusa_train.models.attention import folded_head_attention
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.models.target_model import TargetModel
from medusa_train.trees.tree import Tree
from tests.families import NoTokenizer, random_target_model
from tests.inference.test_drafts import KINDS, PROMPTS, TREE, random_draft
from tests.models.test_attention import random_states, reference, tree_mask

#: hidden size, MLP size, layers, attention heads, key/value heads, vocabulary
SHAPE = (1024, 2816, 8, 16, 4, 32_000)


def on(device: torch.device, family: str) -> TargetModel:
    return TargetModel(random_target_model(family).model.to(device), NoTokenizer(), family)


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma3"])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_equals_plain_decoding(device: torch.device, kind: str, family: str) -> None:
    if device.type == "cpu" and family != "llama":
        pytest.skip("tests/inference has all families on a CPU")
    target_model = on(device, family)
    with device:
        draft = random_draft(kind, target_model)
    plain = [Decoder(target_model).generate(prompt, 24).tokens for prompt in PROMPTS]
    decoder = Decoder(target_model, draft, TREE)
    assert [decoder.generate(prompt, 24).tokens for prompt in PROMPTS] == plain
    assert [
        out.tokens for out in BatchDecoder(target_model, draft, TREE).generate_batch(PROMPTS, 24)
    ] == plain


@pytest.mark.gpu
def test_the_text_of_a_gpu_is_the_text_of_a_cpu(cuda: torch.device) -> None:
    """Weights large enough that no two logits are as close as float64 rounds."""
    cpu, gpu = (Decoder(on(where, "qwen3")) for where in (torch.device("cpu"), cuda))
    assert [gpu.generate(p, 24).tokens for p in PROMPTS] == [
        cpu.generate(p, 24).tokens for p in PROMPTS
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_compiled_passes_give_the_same_text(cuda: torch.device, family: str) -> None:
    target_model = on(cuda, family)
    with cuda:
        draft = random_draft("medusa", target_model)
    expected = [
        Decoder(target_model, draft, TREE).generate(prompt, 24).tokens for prompt in PROMPTS
    ]
    use_cuda_graphs(target_model)
    target_model.compile_passes()
    assert [
        Decoder(target_model, draft, TREE).generate(prompt, 24).tokens for prompt in PROMPTS
    ] == expected


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "kv_heads", "groups"), [(1, 32, 1), (2, 3, 3), (32, 8, 4)])
@pytest.mark.parametrize("q", [1, 65])
@torch.inference_mode()
def test_attention_of_few_queries_gives_the_reference(
    cuda: torch.device, batch: int, kv_heads: int, groups: int, q: int
) -> None:
    """Products where torch's kernel would start few blocks, its kernel for the large batch; part of
    a longer cache.
    """
    query, key, value = random_states(batch, groups * kv_heads, kv_heads, q, 300)
    mask, key, value = tree_mask(batch, q, 290), key[:, :, :290], value[:, :, :290]
    expected = reference(query, key, value, mask, 0.3)
    found = folded_head_attention(
        *(part.to(cuda, torch.bfloat16) for part in (query, key, value, mask)), 0.3
    )
    torch.testing.assert_close(found.double().cpu(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_memory_is_the_cache_and_does_not_grow(cuda: torch.device) -> None:
    """Beside weights and cache a step takes the logits of its nodes, activations, and workspaces of
    libraries.
    """
    config = llama_config(*SHAPE)
    target_model = TargetModel(random_model(config, torch.bfloat16, cuda), NoTokenizer(), "random")
    with cuda:
        draft = MedusaDraft.from_target_model(target_model, 3, share_lm_head=True)
    decoder = Decoder(target_model, draft, Tree.cartesian([4, 3, 2]))
    prompt = list(range(1, 513))

    def peak(tokens: int) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        decoder.generate(prompt, tokens, ())
        return torch.cuda.max_memory_allocated() - before

    peak(8)  # workspaces stay
    short, long = peak(64), peak(1024)
    assert long - short == pytest.approx(
        2 * Sizes.of(config).cached(1024 - 64, 1), rel=0.1, abs=4 << 20
    )
