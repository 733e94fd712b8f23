"""Packed documents separated by a mask, and by their bounds: values, gradients, memory and the choice
of the kernel.
"""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AttentionInterface

from medusa_train.data.batch import IGNORE_INDEX, Batch, Example, collate, shift_labels
from medusa_train.errors import TargetModelError
from medusa_train.models import document_attention
from medusa_train.models.document_attention import (
    DOCUMENTS,
    document_attention_forward,
    document_bounds,
    document_mask,
    flash_unsupported_reason,
    register_document_attention,
)
from medusa_train.models.drafts.draft_layer import DraftLayer
from medusa_train.models.target_model import TargetModel
from medusa_train.trees.transformers_adapters import PromptCache
from tests.allocations import LargestTensor
from tests.families import FAMILIES, random_target_model
from tests.models.test_attention import AttentionModule
from tests.varlen import APART, LEAKING

KERNELS = [APART, DOCUMENTS]
# longer than every family's window; the second row ends in padding
LENGTHS = [[13, 9, 11], [17, 4]]


@pytest.fixture(autouse=True)
def _registered() -> None:
    register_document_attention()


def states(target_model: TargetModel, batch: Batch) -> torch.Tensor:
    return target_model.run(batch.tokens, positions=batch.positions, segments=batch.segments).final


def documents(seed: int = 0) -> list[list[Example]]:
    draw = torch.Generator().manual_seed(seed)

    def example(length: int) -> Example:
        tokens = torch.randint(2, 61, (length,), generator=draw, dtype=torch.int32)
        return Example(tokens, torch.arange(length) >= length // 3, "", f"{length}")

    return [[example(length) for length in row] for row in LENGTHS]


def masked_states(target_model: TargetModel, batch: Batch) -> Tensor:
    with torch.no_grad():
        return states(target_model, batch)


def loss(target_model: TargetModel, hidden: Tensor, batch: Batch, k: int) -> Tensor:
    targets = shift_labels(batch.labels, k, batch.segments)
    logits = target_model.logits(hidden).flatten(0, 1)
    return cross_entropy(logits, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def test_the_document_mask_written_out() -> None:
    mask = document_mask(torch.tensor([[0, 0, 1, 1, -1, -1], [0, 0, 0, 0, 0, 0]]), torch.bfloat16)
    assert mask is not None
    assert mask.dtype == torch.bfloat16
    assert mask.shape == (2, 1, 6, 6)
    assert set(mask.flatten().tolist()) == {0.0, float("-inf")}
    seen = [
        ["".join(".x"[value == 0] for value in row) for row in rows[0]] for rows in mask.tolist()
    ]
    assert seen[0] == ["x.....", "xx....", "..x...", "..xx..", "....x.", "....xx"]
    assert seen[1] == ["x.....", "xx....", "xxx...", "xxxx..", "xxxxx.", "xxxxxx"]


def test_rows_of_one_document_need_no_mask() -> None:
    assert document_mask(torch.tensor([[0, 0, -1], [0, 0, 0]]), torch.float32) is None
    assert document_mask(torch.full((1, 3), -1), torch.float32) is None


@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen2-window", "qwen3", "gemma2"])
def test_packed_documents_give_the_states_of_single_documents(family: str) -> None:
    target_model = random_target_model(family, dtype=torch.float32)
    rows = documents()
    packed = collate(rows)
    hidden = masked_states(target_model, packed)
    assert hidden.isfinite().all()
    alone = [collate([[example]]) for row in rows for example in row]
    single = [masked_states(target_model, batch) for batch in alone]
    for row, lengths in enumerate(LENGTHS):
        for segment in range(len(lengths)):
            state = single[sum(map(len, LENGTHS[:row])) + segment]
            torch.testing.assert_close(
                hidden[row, packed.segments[row] == segment], state[0], rtol=1e-5, atol=1e-5
            )
    for k in range(3):
        expected = sum(
            loss(target_model, state, batch, k) for state, batch in zip(single, alone, strict=True)
        )
        torch.testing.assert_close(
            loss(target_model, hidden, packed, k), expected, rtol=1e-5, atol=0
        )


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_row_of_padding_has_finite_states(family: str) -> None:
    target_model = random_target_model(family, dtype=torch.float32)
    batch = collate(documents())
    batch.segments[1] = -1
    assert masked_states(target_model, batch).isfinite().all()
    assert torch.equal(
        shift_labels(batch.labels, 0, batch.segments)[1, -2:], torch.full((2,), IGNORE_INDEX)
    )


def test_bounds_written_out() -> None:
    bounds = document_bounds(torch.tensor([[0, 0, 0, 1, -1], [0, 0, 1, 1, 1]]))
    assert bounds["cu_seq_lens_q"].tolist() == [0, 3, 4, 5, 7, 10]
    assert bounds["cu_seq_lens_q"].dtype == torch.int32
    assert bounds["cu_seq_lens_k"] is bounds["cu_seq_lens_q"]
    assert bounds["max_length_q"] == bounds["max_length_k"] == 3
    assert document_bounds(torch.zeros(2, 3, dtype=torch.long))["cu_seq_lens_q"].tolist() == [
        0,
        3,
        6,
    ]


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("recompute", [False, True])
def test_bounds_give_the_gradients_of_a_mask_with_and_without_checkpointing(
    recompute: bool, implementation: str
) -> None:
    batch = collate(documents())
    grads = []
    for varlen in (False, True):
        target_model = random_target_model("llama")
        target_model.model.requires_grad_(True).train()
        if varlen:
            target_model.use_varlen(implementation)
        if recompute:
            target_model.model.gradient_checkpointing_enable({"use_reentrant": False})
        states(target_model, batch)[batch.segments >= 0].square().sum().backward()
        grads.append(target_model.body.layers[0].self_attn.q_proj.weight.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_passes_without_documents_use_the_original_attention(
    family: str, implementation: str
) -> None:
    target_model = random_target_model(family)
    tokens = torch.arange(2, 10)[None]

    def passes() -> list[torch.Tensor]:
        cache = PromptCache(target_model.new_kv_cache(), 0, 1)
        return [
            target_model.run(tokens, cache=cache).final,
            target_model.run(tokens).final,
        ]

    with torch.no_grad():
        before = passes()
        target_model.use_varlen(implementation)
        assert all(torch.equal(*pair) for pair in zip(before, passes(), strict=True))
    assert target_model.config._attn_implementation == implementation


def test_an_attention_that_lets_documents_leak_is_rejected() -> None:
    target_model = random_target_model("llama")
    batch = collate(documents())
    with torch.no_grad():
        masked = states(target_model, batch)
        with pytest.raises(
            TargetModelError, match=r"LlamaForCausalLM with .* mixes packed documents"
        ):
            target_model.use_varlen(LEAKING)
        assert not target_model.varlen
        assert torch.equal(states(target_model, batch), masked)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"device": "cpu"}, "needs a GPU"),
        ({"installed": False}, "not installed"),
        ({"dtype": torch.float32}, "does not support float32"),
        ({"capped": True}, "soft-caps its attention scores"),
        ({"supported": False}, "architecture does not support"),
    ],
)
def test_reasons_against_flash_attention(changed: dict, reason: str | None) -> None:
    usable = {
        "device": "cuda",
        "dtype": torch.bfloat16,
        "capped": False,
        "supported": True,
        "installed": True,
    }
    unsupported_reason = flash_unsupported_reason(**(usable | changed))
    assert unsupported_reason is None if reason is None else reason in str(unsupported_reason)


SEGMENTS = torch.tensor([[0] * 9 + [1] + [2] * 5 + [-1] * 2, [0] * 17])


def formula(
    query: Tensor, key: Tensor, value: Tensor, segments: Tensor, window: int | None, scaling: float
) -> Tensor:
    """Compute attention head by head from a mask of all pairs, -> [B, T, H, d]."""
    place = torch.arange(segments.shape[1])
    distance = place[:, None] - place[None, :]
    hidden = ~(
        (distance >= 0)
        & (distance < (window or len(place)))
        & (segments[:, :, None] == segments[:, None, :])
    )
    shared = query.shape[1] // key.shape[1]
    heads = []
    for head in range(query.shape[1]):
        scores = query[:, head] @ key[:, head // shared].transpose(1, 2) * scaling
        heads.append(
            scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value[:, head // shared]
        )
    return torch.stack(heads, dim=2)


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (3, 1)])
@pytest.mark.parametrize("window", [None, 1, 4, 30])
@pytest.mark.parametrize("block", [2, 3, 256])
def test_values_and_gradients_are_those_of_the_formula(
    heads: int, kv_heads: int, window: int | None, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document_attention, "_WINDOW_QUERIES", block)
    generator = torch.Generator().manual_seed(heads)

    def random(
        count: int, width: int
    ) -> Tensor:  # as projections give them, [B, T, heads, d] in memory
        states = torch.randn(2, 17, count, width, generator=generator, dtype=torch.float64)
        return states.transpose(1, 2).requires_grad_()

    inputs = random(heads, 8), random(kv_heads, 8), random(kv_heads, 8)
    module = AttentionModule(heads // kv_heads)
    out, _ = document_attention_forward(
        module, *inputs, None, scaling=0.3, sliding_window=window, **document_bounds(SEGMENTS)
    )
    expected = formula(*inputs, SEGMENTS, window, 0.3)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    weights = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    ours, theirs = (
        torch.autograd.grad((states * weights).sum(), inputs) for states in (out, expected)
    )
    for ours_one, theirs_one in zip(ours, theirs, strict=True):
        torch.testing.assert_close(ours_one, theirs_one, rtol=0, atol=1e-12)


def test_autocast_computes_in_its_dtype() -> None:
    """Rotary embeddings leave queries and keys in float32, the values are in bfloat16."""
    query, key, value = torch.randn(3, 1, 2, 17, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = document_attention_forward(
            AttentionModule(1), query, key, value.bfloat16(), None, **document_bounds(SEGMENTS[:1])
        )
    assert out.dtype == torch.bfloat16
    expected = formula(query, key, value, SEGMENTS[:1], None, 8**-0.5)
    torch.testing.assert_close(out.float(), expected, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_states_and_gradients_of_a_mask(family: str) -> None:
    batch = collate(documents())
    real = batch.segments >= 0
    results = []
    for varlen in (False, True):
        target_model = random_target_model(family)
        if target_model.attention == "eager":
            pytest.skip("soft-capped scores need a mask")
        if varlen:
            target_model.use_varlen(DOCUMENTS)
        target_model.model.requires_grad_(True)
        hidden = states(target_model, batch)[real]
        hidden.square().sum().backward()
        results.append([hidden, *(p.grad for p in target_model.body.layers.parameters())])
    for ours, masked in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, masked, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(
    "part", ["model", "model with windows", "draft layer", "draft layer with windows"]
)
def test_no_tensor_has_the_size_of_a_mask_of_all_pairs(part: str) -> None:
    length = 8192
    target_model = random_target_model(
        "mistral-window" if "windows" in part else "llama",
        dtype=torch.float32,
        max_position_embeddings=length,
        num_hidden_layers=1,
        **({"sliding_window": 100} if "windows" in part else {}),
    )
    lengths = [500, 2000, 692, 5000]
    segments = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    if part.startswith("model"):
        target_model.use_varlen(DOCUMENTS)
        target_model.model.requires_grad_(True)
        tokens = torch.arange(length)[None] % target_model.vocab_size
        with LargestTensor() as watched:
            target_model.run(tokens, positions=positions, segments=segments).final.sum().backward()
    else:
        layer = DraftLayer(target_model)
        inputs = torch.randn(1, length, target_model.hidden_size)
        with LargestTensor() as watched:
            layer(inputs, positions, segments).sum().backward()
    assert watched.numel <= 2 * length * 48  # the MLP's activations
    assert watched.numel < length * length / 64


def test_what_it_does_not_compute_is_refused() -> None:
    query, key, value = torch.randn(3, 1, 2, 17, 8)
    with pytest.raises(ValueError, match="does not support softcap"):
        document_attention_forward(
            AttentionModule(1),
            query,
            key,
            value,
            None,
            softcap=30.0,
            **document_bounds(SEGMENTS[:1]),
        )
    with pytest.raises(ValueError, match="needs the bounds"):
        document_attention_forward(AttentionModule(1), query, key, value, None, sliding_window=4)


def test_an_error_of_the_attention_leaves_the_model_unchanged() -> None:
    def failing(*args: object, **kwargs: object) -> None:
        raise ValueError("unsupported")

    AttentionInterface.register("varlen_that_fails", failing)
    target_model = random_target_model("llama")
    with pytest.raises(ValueError, match="unsupported"):
        target_model.use_varlen("varlen_that_fails")
    assert not target_model.varlen
    assert target_model.config._attn_implementation == target_model.attention
