"""The early exit in training: values and gradients of a plain reference, packed documents,
parameters.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, silu

from medusa_train.data.batch import Batch
from medusa_train.errors import TargetModelError
from medusa_train.losses.objective import Objective
from medusa_train.models.drafts.kangaroo import KangarooDraft
from medusa_train.models.target_model import TargetModel
from medusa_train.models.target_states import Rows
from tests.families import random_target_model, without_weights

LENGTHS = [9, 4, 6]


def random_draft(target_model: TargetModel, **settings: object) -> KangarooDraft:
    draft = KangarooDraft.from_target_model(target_model, **{"exit_layer": 1, **settings})  # type: ignore[arg-type]
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.normal_(0, 0.3)
    return draft


def packed(vocab: int) -> Batch:
    """Three documents and padding in one row; prompts are not supervised."""
    torch.manual_seed(2)
    documents = [torch.randint(vocab, (length,)) for length in LENGTHS]
    tokens = torch.cat([*documents, torch.zeros(2, dtype=torch.long)])[None]
    positions = torch.cat([*(torch.arange(length) for length in LENGTHS), torch.arange(2)])[None]
    segments = torch.cat(
        [torch.full((n,), i) for i, n in enumerate(LENGTHS)] + [torch.full((2,), -1)]
    )[None]
    labels = torch.where((segments >= 0) & (positions > 1), tokens, -100)
    return Batch(tokens=tokens, labels=labels, positions=positions, segments=segments, records=[])


def reference(
    draft: KangarooDraft, aux: Tensor, heads: int, kv_heads: int, theta: float = 10000.0
) -> Tensor:
    """Norm, attention with rotary positions, residual; with an MLP the same; norm, over one
    document [T, d].
    """
    w = {
        name.removeprefix("adapter.body."): parameter
        for name, parameter in draft.named_parameters()
    }
    attention = "layers.0.self_attn."

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    def rotated(x: Tensor) -> Tensor:  # [T, heads, dim]
        half = x.shape[-1] // 2
        angles = torch.arange(len(x))[:, None] * theta ** (-torch.arange(half) / half)
        cos, sin = angles.cos()[:, None].to(x), angles.sin()[:, None].to(x)
        return torch.cat(
            [x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin],
            -1,
        )

    def after_mlp(x: Tensor) -> Tensor:
        if not draft.mlp_size:
            return norm(x, w["norm.weight"])
        read, mlp = norm(x, w["layers.0.post_attention_layernorm.weight"]), "layers.0.mlp."
        gate, up = (linear(read, w[f"{mlp}{n}_proj.weight"]) for n in ("gate", "up"))
        return norm(x + linear(silu(gate) * up, w[f"{mlp}down_proj.weight"]), w["norm.weight"])

    if not draft.attention:
        return after_mlp(aux)
    x = norm(aux, w["layers.0.input_layernorm.weight"])
    q, k, v = (linear(x, w[f"{attention}{n}_proj.weight"]) for n in "qkv")
    q = rotated(q.unflatten(-1, (heads, -1)))
    k, v = (
        z.repeat_interleave(heads // kv_heads, dim=1)
        for z in (rotated(k.unflatten(-1, (kv_heads, -1))), v.unflatten(-1, (kv_heads, -1)))
    )
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    seen = torch.einsum(
        "hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v
    ).flatten(1)
    return after_mlp(aux + linear(seen, w[f"{attention}o_proj.weight"]))


#: The architectures of the paper's table: Kangaroo, + Head, 1-Layer Transformer, MLP Only.
ARCHITECTURES: dict[str, dict[str, object]] = {
    "kangaroo": {},
    "head": {"share_lm_head": False},
    "layer": {"mlp_size": 24},
    "mlp": {"mlp_size": 5, "attention": False, "share_lm_head": False},
}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_states_are_the_formulas(kind: str) -> None:
    target_model = random_target_model("llama")
    draft = random_draft(target_model, **ARCHITECTURES[kind])
    tokens = torch.randint(target_model.vocab_size, (2, 12))
    hidden_states = target_model.run(tokens, aux_layers=draft.aux_layers)
    assert hidden_states.aux is not None
    states = draft.states(hidden_states, Rows.from_tokens(tokens))
    for row in range(2):
        assert torch.allclose(
            states[row], reference(draft, hidden_states.aux[row], 4, 2), atol=1e-9
        )


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("soft", [1.0, 0.0])
def test_loss_and_gradient_are_the_plain_ones(soft: float, kind: str) -> None:
    """Soft cross-entropy of the exit at t against the target model at t: the same position, in every
    document.
    """
    target_model = random_target_model("llama")
    draft = random_draft(target_model, **ARCHITECTURES[kind])
    batch = packed(target_model.vocab_size)
    hidden_states = target_model.run(
        batch.tokens,
        positions=batch.positions,
        segments=batch.segments,
        aux_layers=draft.aux_layers,
    )
    objective = Objective(draft, 1.0, soft_targets=soft)
    judge = {"teacher": (hidden_states.final, target_model.lm_head())} if soft else {}
    ours = objective.loss_and_gradients(
        hidden_states, batch, objective.target_counts(batch), **judge
    )  # type: ignore[arg-type]
    ours.loss.backward()
    gradients = [parameter.grad for parameter in draft.parameters()]
    draft.zero_grad(set_to_none=True)
    terms, count = [], 0
    assert hidden_states.aux is not None
    for document in range(len(LENGTHS)):
        here = batch.segments[0] == document
        states = reference(draft, hidden_states.aux[0, here], 4, 2)
        own = draft.own_lm_head
        logits = target_model.logits(states) if own is None else linear(states, own.weight)
        teacher = target_model.logits(hidden_states.final[0, here]).softmax(-1)
        # t: where token t + 1 is predicted, once a token was guessed before
        for t in range(1, LENGTHS[document] - 1):
            if batch.labels[0, here][t + 1] >= 0:
                terms.append(
                    cross_entropy(logits[t], teacher[t] if soft else batch.tokens[0, here][t + 1])
                )
                count += 1
    assert int(objective.target_counts(batch)[0]) == count > 10
    loss = torch.stack(terms).mean()
    loss.backward()
    assert ours.loss.item() == pytest.approx(loss.item(), rel=1e-5)  # sums of losses are float32
    for gradient, parameter in zip(gradients, draft.parameters(), strict=True):
        assert parameter.grad is not None
        assert gradient is not None
        assert torch.allclose(
            gradient, parameter.grad, atol=1e-6 * float(parameter.grad.abs().max()) + 1e-9
        )


def test_head_k_says_what_the_exit_says_k_positions_later() -> None:
    target_model = random_target_model("qwen3")
    draft = random_draft(target_model, num_heads=4)
    tokens = torch.randint(target_model.vocab_size, (2, 10))
    hidden_states = target_model.run(tokens, aux_layers=draft.aux_layers)
    states = draft.states(hidden_states, Rows.from_tokens(tokens))
    traced = list(draft.teacher_forced_states(hidden_states, Rows.from_tokens(tokens)))
    assert (len(traced), draft.trained_heads) == (4, 1)
    for k, head in enumerate(traced, start=1):
        assert torch.equal(head[:, :-k], states[:, k:])
    (trained,) = draft.head_states(hidden_states, Rows.from_tokens(tokens))
    assert torch.equal(trained, traced[0])


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "granite"])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_only_the_adapter_is_trained_and_saved(family: str, kind: str, tmp_path: Path) -> None:
    """The adapter and an lm_head of its own; loaded over the same target model they compute the same."""
    target_model = random_target_model(family)
    draft = random_draft(target_model, num_heads=3, threshold=0.25, **ARCHITECTURES[kind])
    sizes = {name: parameter.numel() for name, parameter in draft.named_parameters()}
    assert sum(sizes.values()) == KangarooDraft.count_parameters(
        without_weights(target_model), **draft.settings
    )
    assert all(name.startswith(("adapter.", "own_lm_head.")) for name in sizes)
    theirs = {parameter.data_ptr() for parameter in target_model.model.parameters()}
    assert not theirs & {parameter.data_ptr() for parameter in draft.parameters()}
    assert set(draft.state_dict()) == set(sizes)
    save_file(draft.state_dict(), tmp_path / "heads.safetensors")
    again = KangarooDraft.from_target_model(target_model, **draft.settings)
    fixed = {"num_heads": 3, "exit_layer": 1, "threshold": 0.25, "mlp_size": 0}
    assert again.settings == {
        **fixed,
        "attention": True,
        "share_lm_head": True,
        **ARCHITECTURES[kind],
    }
    again.load_state_dict(load_file(tmp_path / "heads.safetensors"), strict=True)
    tokens = torch.randint(target_model.vocab_size, (1, 8))
    hidden_states = target_model.run(tokens, aux_layers=draft.aux_layers)
    assert torch.equal(
        draft.states(hidden_states, Rows.from_tokens(tokens)),
        again.states(hidden_states, Rows.from_tokens(tokens)),
    )
    # Granite scales them
    assert torch.allclose(
        draft.logits(hidden_states.final), draft.lm_head(1).logits(hidden_states.final)
    )


def test_an_exit_that_is_none_is_refused() -> None:
    for layers in (0, 3):
        with pytest.raises(TargetModelError, match="use 1 to 2"):
            KangarooDraft.from_target_model(random_target_model("llama"), exit_layer=layers)
