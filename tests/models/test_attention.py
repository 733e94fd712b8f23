"""Grouped-query attention with folded heads."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from medusa_train.config.paths import PROJECT_ROOT
from medusa_train.inference.batch_decoder import BatchDecoder, PendingRequest
from medusa_train.inference.generate import Decoder
from medusa_train.models import attention
from medusa_train.models.attention import FOLDED_HEADS, folded_head_attention, folded_head_forward
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.models.target_model import TargetModel
from medusa_train.trees.tree import Tree
from tests.allocations import LargestTensor
from tests.families import random_target_model


class AttentionModule(nn.Module):
    """The attributes of a layer that transformers' functions read."""

    is_causal = True

    def __init__(self, shared: int) -> None:
        super().__init__()
        self.num_key_value_groups = shared


def random_states(
    rows: int, heads: int, kv_heads: int, q: int, keys: int
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(heads + q)
    query = torch.randn(rows, q, heads, 8, generator=generator, dtype=torch.float64).transpose(1, 2)
    key, value = torch.randn(2, rows, kv_heads, keys, 8, generator=generator, dtype=torch.float64)
    return query, key, value


def tree_mask(rows: int, q: int, keys: int) -> Tensor:
    """A random mask per row, which hides some keys from each query but never all."""
    hidden = torch.rand(rows, 1, q, keys, generator=torch.Generator().manual_seed(q)) < 0.4
    hidden[..., 0] = False
    return torch.zeros(rows, 1, q, keys, dtype=torch.float64).masked_fill(hidden, float("-inf"))


def reference(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
) -> Tensor:
    """Compute attention head by head."""
    shared = query.shape[1] // key.shape[1]
    heads = []
    for head in range(query.shape[1]):
        scores = query[:, head] @ key[:, head // shared].transpose(1, 2) * scaling
        scores = scores if mask is None else scores + mask[:, 0]
        heads.append(scores.softmax(-1) @ value[:, head // shared])
    return torch.stack(heads, dim=1)


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (1, 1), (8, 1)])
@pytest.mark.parametrize("q", [1, 2, 5])
@pytest.mark.parametrize("masks", [0, 1, 2])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 2e-2)])
def test_folded_heads_give_the_reference(
    heads: int, kv_heads: int, q: int, masks: int, dtype: torch.dtype, tolerance: float
) -> None:
    query, key, value = (tensor.to(dtype) for tensor in random_states(2, heads, kv_heads, q, 11))
    mask = tree_mask(masks, q, 11) if masks else None
    result = folded_head_attention(query, key, value, None if mask is None else mask.to(dtype), 0.3)
    expected = reference(query.double(), key.double(), value.double(), mask, 0.3)
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("masks", [1, 2])
@pytest.mark.parametrize("q", [1, 5])
def test_products_of_a_gpu_give_the_reference(
    masks: int, q: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU's product in place of the GPU's."""
    monkeypatch.setattr(torch, "bmm", lambda a, b, out_dtype=torch.float32: (a @ b).to(out_dtype))
    query, key, value = (tensor.float() for tensor in random_states(2, 6, 2, q, 11))
    mask = tree_mask(masks, q, 11).float()
    expected = reference(query, key, value, mask, 0.3)
    for given in (mask, mask == 0):
        result = attention._attention_in_float32(
            query.reshape(2, 2, 3 * q, 8), key, value, given, 0.3
        )
        torch.testing.assert_close(result.reshape_as(query), expected)


@torch.inference_mode()
def test_a_gpu_takes_the_faster_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what was measured on an H100."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132)
    )
    page = json.loads((PROJECT_ROOT / "benchmarks/results/gpu.json").read_text(encoding="utf-8"))
    for one in page["after"]["attention_by_products"]["layers"]:
        folded: Any = SimpleNamespace(
            device=torch.device("cuda"), is_cuda=True, element_size=lambda: 2
        )
        folded.shape = (one["rows"], one["kv_heads"], one["groups"] * one["queries"], 128)
        by_products = attention._use_products(
            folded, torch.empty(1, 1, one["positions"], 1), torch.empty(0)
        )
        assert one["products_us" if by_products else "torch_us"] <= 1.2 * min(
            one["products_us"], one["torch_us"]
        )


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4)])
@pytest.mark.parametrize("q", [1, 5])
@pytest.mark.parametrize("masks", [0, 1, 8])
def test_batches_in_bfloat16_give_the_reference(
    heads: int, kv_heads: int, q: int, masks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches are computed by two products, from keys and values that are a part of a larger cache."""
    query, key, value = (tensor.bfloat16() for tensor in random_states(8, heads, kv_heads, q, 11))
    mask = tree_mask(masks, q, 11) if masks else None
    expected = reference(
        query.double(),
        key[:, :, :9].double(),
        value[:, :, :9].double(),
        None if mask is None else mask[..., :9],
        0.3,
    )
    monkeypatch.setattr(attention, "scaled_dot_product_attention", None)
    clipped = None if mask is None else mask[..., :9].bfloat16()
    result = folded_head_attention(query, key[:, :, :9], value[:, :, :9], clipped, 0.3)
    torch.testing.assert_close(result.double(), expected, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("q", [1, 5])
@pytest.mark.parametrize("rows", [2, 8])
def test_bool_masks_hide_the_same_keys(rows: int, q: int) -> None:
    """transformers' `generate` brings bool masks; 8 rows are computed by two products, 2 are not."""
    query, key, value = (tensor.bfloat16() for tensor in random_states(rows, 6, 2, q, 11))
    mask = tree_mask(rows, q, 11).bfloat16()
    expected = folded_head_attention(query, key, value, mask, 0.3)
    torch.testing.assert_close(
        folded_head_attention(query, key, value, mask == 0, 0.3), expected, rtol=0, atol=0
    )
    # as padding, which sees nothing
    assert folded_head_attention(query, key, value, mask > 0, 0.3).isfinite().all()


def test_rows_of_a_repeated_mask_are_aligned_on_a_gpu() -> None:
    """On the meta device, which has strides."""
    for device, width in (("meta", 16), ("cpu", 11)):
        repeated = attention._repeat_rows(torch.empty(2, 1, 5, 11, device=device), 3)
        assert repeated.shape == (2, 1, 15, 11)
        assert repeated.stride()[2:] == (width, 1)
        assert repeated.stride(0) == 15 * width


@pytest.mark.parametrize(
    "case", ["prompt", "gradient", "dropout", "encoder", "encoder's argument", "later keys"]
)
def test_prompts_use_the_function_of_transformers(case: str) -> None:
    states = random_states(2, 4, 2, 5, 9 if case == "later keys" else 5)
    query, key, value = (tensor.bfloat16() for tensor in states)
    module = AttentionModule(2)
    module.is_causal = case != "encoder"  # type: ignore[misc]
    options: dict[str, Any] = {"dropout": 0.5} if case == "dropout" else {}
    options |= {"is_causal": False} if case == "encoder's argument" else {}
    results = []
    for function in (folded_head_forward, sdpa_attention_forward):
        torch.manual_seed(0)
        with torch.set_grad_enabled(case == "gradient"):
            results.append(function(module, query, key, value, None, **options)[0])
    assert torch.equal(*results)


def test_a_soft_cap_is_left_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(
        attention, "sdpa_attention_forward", lambda *args, **kwargs: seen.append(kwargs["softcap"])
    )
    with torch.no_grad():
        folded_head_forward(AttentionModule(2), *random_states(1, 4, 2, 1, 5), None, softcap=30.0)
    assert seen == [30.0]


@pytest.mark.parametrize("case", ["gradient", "prefill", "prefill with a window", "mask by head"])
def test_other_passes_use_the_function_of_transformers(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: object) -> Tensor:
        raise AssertionError("folded_head_attention was called")

    monkeypatch.setattr(attention, "folded_head_attention", never)
    q, keys = 5, 5 if case == "prefill" or "window" in case else 9
    query, key, value = random_states(1, 4, 2, q, keys)
    mask = (
        None
        if case == "prefill"
        else tree_mask(1, q, keys).repeat(1, 4 if case == "mask by head" else 1, 1, 1)
    )
    with torch.set_grad_enabled(case == "gradient"):
        query.requires_grad_(case == "gradient")
        result, _ = folded_head_forward(AttentionModule(2), query, key, value, mask)
        expected, _ = sdpa_attention_forward(AttentionModule(2), query, key, value, mask)
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
        if case == "gradient":
            ours, stock = (
                torch.autograd.grad(out.square().sum(), query)[0] for out in (result, expected)
            )
            torch.testing.assert_close(ours, stock, rtol=0, atol=0)


def stock(family: str, dtype: torch.dtype = torch.float64) -> TargetModel:
    """A target model with transformers' own attention."""
    target_model = random_target_model(family, dtype=dtype)
    target_model.model.set_attn_implementation("sdpa")
    target_model.attention = "sdpa"
    return target_model


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "mistral-window", "gemma3"])
def test_a_model_decodes_the_same_tokens(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, trees = [[5, 9, 11, 3], [7, 2, 30, 31, 32, 8, 19]], (None, Tree.cartesian([3, 2]))
    lengths: set[int] = set()
    original = attention.folded_head_attention
    monkeypatch.setattr(
        attention, "folded_head_attention", lambda *a: (lengths.add(a[0].shape[2]), original(*a))[1]
    )

    def answers(target_model: TargetModel) -> list[list[int]]:
        draft = MedusaDraft.from_target_model(target_model, 3)
        single = [
            Decoder(target_model, draft, tree).generate(prompts[0], 24).tokens for tree in trees
        ]
        batches = [
            BatchDecoder(target_model, draft, tree).generate_batch(prompts, 24) for tree in trees
        ]
        return [*single, *(answer.tokens for batch in batches for answer in batch)]

    expected = answers(stock(family))
    assert not lengths
    target_model = random_target_model(family)
    assert target_model.attention == target_model.config._attn_implementation == FOLDED_HEADS
    assert answers(target_model) == expected
    assert lengths == {1, 10}  # plain steps, and a tree of nine nodes and its root


@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_generate_of_transformers_gives_the_same_tokens(family: str) -> None:
    """Also for prompts padded on the left, whose masks transformers builds itself."""
    tokens = torch.tensor([[0, 0, 5, 9, 11], [7, 2, 30, 31, 8]])
    answers = [
        target_model.model.generate(
            tokens, attention_mask=(tokens > 0).long(), max_new_tokens=12, do_sample=False
        )
        for target_model in (stock(family), random_target_model(family))
    ]
    assert torch.equal(*answers)


def test_it_is_not_used_without_need() -> None:
    # soft-capped scores
    assert random_target_model("gemma2", dtype=torch.bfloat16).attention == "eager"
    assert (
        random_target_model("llama", num_key_value_heads=4).attention == "sdpa"
    )  # nothing is shared
    assert (
        random_target_model("llama", dtype=torch.bfloat16, num_key_value_heads=4).attention
        == FOLDED_HEADS
    )


def test_a_masked_pass_of_a_batch_does_not_copy_keys_and_values() -> None:
    """Nothing in a step is as large as the keys of one layer, once for each of the query heads that
    share them.
    """
    rows, length = 4, 400
    largest = []
    for target_model in (
        stock("llama", torch.float32),
        random_target_model("llama", dtype=torch.float32),
    ):
        batch = BatchDecoder(
            target_model, MedusaDraft.from_target_model(target_model, 3), Tree.cartesian([2, 2])
        ).begin(8)
        target_model.max_context = 1024
        prompts = torch.randint(
            2, 61, (rows, length), generator=torch.Generator().manual_seed(0)
        ).tolist()
        batch.add_requests([PendingRequest(i, prompt) for i, prompt in enumerate(prompts)])
        with LargestTensor() as watched:
            batch.step()
        largest.append(watched.numel)
    copied = rows * 4 * length * 8  # heads x positions x head_dim
    assert largest[0] >= copied
    assert largest[1] < copied / 2
