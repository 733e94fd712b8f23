"""Amphista heads: untrained they equal the target model; trained they follow the paper's equations,
whole or stepwise.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, softmax

from medusa_train.models.drafts.amphista import AmphistaDraft
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.models.target_model import TargetModel
from medusa_train.models.target_states import HiddenStates, Rows
from medusa_train.trees.tree import Tree
from tests.families import random_target_model
from tests.models.drafts.steps import DraftRows

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8]])
#: The draft, its alpha variant and its ablations.
VARIANTS: dict[str, dict[str, Any]] = {
    "amphista": {},
    "alpha": {"auto_blocks": 2},
    "no-auto-embedding": {"auto_blocks": 0},
    "no-position-encoding": {"position_encoding": False},
    "one-adaptation-layer": {"adaptation_layers": 1},
    "no-staged-adaptation": {"adaptation_layers": 0},
    "no-sampled-token": {"sampled_token": False},
    "embeddings-as-published": {"normalize_embeddings": False},
}


def trained_like(
    target_model: TargetModel, seed: int = 1, std: float = 0.1, **settings: Any
) -> AmphistaDraft:
    """Heads with every parameter changed from its initialisation."""
    draft = AmphistaDraft.from_target_model(target_model, **{"num_heads": 5, **settings})
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=std)
    return draft


def _states(
    draft: AmphistaDraft, target_model: TargetModel, tokens: Tensor = TOKENS
) -> list[Tensor]:
    return list(draft.head_states(target_model.run(tokens), Rows.from_tokens(tokens)))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", ["llama", "granite4"])
def test_untrained_heads_give_the_target_models_logits_to_the_bit(
    variant: str, family: str
) -> None:
    target_model = random_target_model(family, dtype=torch.float32)
    draft = AmphistaDraft.from_target_model(target_model, num_heads=3, **VARIANTS[variant])
    theirs = target_model.model(TOKENS, use_cache=False).logits
    for k, hidden in enumerate(_states(draft, target_model), start=1):
        assert torch.equal(draft.lm_head(k).logits(hidden), theirs)


def _norm(x: Tensor, weight: Tensor | float, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def _rotate(x: Tensor, theta: float) -> Tensor:
    """Rotary positions 0.. of [heads, T, D], in Llama's layout of halves."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] * theta ** (-torch.arange(half) / half)
    cos, sin = angles.cos().double(), angles.sin().double()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def _layer(x: Tensor, w: dict[str, Tensor], heads: int, groups: int, theta: float) -> Tensor:
    """Llama's decoder layer over one row [T, d], written out."""
    n = _norm(x, w["input_layernorm.weight"], 1e-6)
    q, k, v = (
        linear(n, w[f"self_attn.{name}_proj.weight"]).unflatten(-1, (count, -1)).transpose(0, 1)
        for name, count in (("q", heads), ("k", groups), ("v", groups))
    )
    q, k = _rotate(q, theta), _rotate(k, theta)
    k, v = k.repeat_interleave(heads // groups, 0), v.repeat_interleave(heads // groups, 0)
    scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
    seen = (
        softmax(
            scores.masked_fill(
                torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf")
            ),
            -1,
        )
        @ v
    )
    x = x + linear(seen.transpose(0, 1).flatten(1), w["self_attn.o_proj.weight"])
    n = _norm(x, w["post_attention_layernorm.weight"], 1e-6)
    gate, up = linear(n, w["mlp.gate_proj.weight"]), linear(n, w["mlp.up_proj.weight"])
    return x + linear(gate * gate.sigmoid() * up, w["mlp.down_proj.weight"])


def _plain(
    h: Tensor, e: Tensor, state: dict[str, Tensor], num_heads: int, blocks: int
) -> list[Tensor]:
    """Eq. 1 to 6 over one row: every head's logits [T, V] from h [T, d] and the embeddings e [T, d]
    of what follows.
    """
    stages, x = [], h
    for i in range(2):
        prefix = f"layers.{i}.body.layers.0."
        weights = {
            name.removeprefix(prefix): tensor
            for name, tensor in state.items()
            if name.startswith(prefix)
        }
        x = _layer(linear(torch.cat([x, e], -1), state[f"fc.{i}.weight"]), weights, 4, 2, 10000.0)
        stages.append(x)
    vectors = []
    for k in range(num_heads):
        x = stages[0] if k + 1 <= num_heads // 2 else stages[1]
        grown = linear(x, state[f"mlps.{k}.weight"], state[f"mlps.{k}.bias"])
        vectors.append(x + grown * grown.sigmoid())
    u = torch.stack(vectors, dim=1) + state.get("auto.positions", 0.0)  # [T, K, d]
    for j in range(blocks):
        n = _norm(u, state[f"auto.blocks.{j}.norm.weight"], 1e-6)
        q, k, v = (
            part.unflatten(-1, (4, -1))
            for part in linear(n, state[f"auto.blocks.{j}.qkv.weight"]).chunk(3, -1)
        )
        weights_ = softmax(torch.einsum("tqhd,tkhd->thqk", q, k) / q.shape[-1] ** 0.5, -1)
        u = u + linear(
            torch.einsum("thqk,tkhd->tqhd", weights_, v).flatten(2),
            state[f"auto.blocks.{j}.out.weight"],
        )
    return [linear(u[:, k], state[f"lm_heads.{k}.weight"]) for k in range(num_heads)]


@pytest.mark.parametrize(
    ("blocks", "normalize_embeddings", "positions"),
    [(1, True, True), (2, True, True), (1, False, False)],
)
def test_value_and_gradient_of_the_formula(
    blocks: int, normalize_embeddings: bool, positions: bool
) -> None:
    target_model = random_target_model("llama")
    settings = {
        "auto_blocks": blocks,
        "normalize_embeddings": normalize_embeddings,
        "position_encoding": positions,
    }
    draft = trained_like(target_model, **settings)
    state = {name: p.detach().clone().requires_grad_() for name, p in draft.named_parameters()}
    hidden_states = target_model.run(TOKENS)
    ours = [
        draft.lm_head(k).logits(s)[:, :-1]
        for k, s in enumerate(draft.head_states(hidden_states, Rows.from_tokens(TOKENS)), start=1)
    ]
    embeddings = target_model.model.get_input_embeddings()(TOKENS)
    if normalize_embeddings:
        embeddings = _norm(embeddings, 1.0, 1e-12)
    plain = [
        _plain(hidden_states.final[b, :-1], embeddings[b, 1:], state, 5, blocks) for b in range(2)
    ]
    theirs = [torch.stack([row[k] for row in plain]) for k in range(5)]
    for mine, other in zip(ours, theirs, strict=True):
        # norms and angles of stock layers are float32 in any dtype
        assert torch.allclose(mine, other, atol=3e-6)
    weights = [torch.randn_like(logits) for logits in ours]
    sum((a * b).sum() for a, b in zip(ours, weights, strict=True)).backward()  # type: ignore[union-attr]
    sum((a * b).sum() for a, b in zip(theirs, weights, strict=True)).backward()  # type: ignore[union-attr]
    for name, parameter in draft.named_parameters():
        own_grad, plain_grad = parameter.grad, state[name].grad
        assert own_grad is not None
        assert plain_grad is not None
        assert (own_grad - plain_grad).norm() < 1e-6 * own_grad.norm(), name


def test_with_nothing_added_it_is_medusa() -> None:
    target_model = random_target_model("qwen2")
    draft = trained_like(target_model, auto_blocks=0, adaptation_layers=0, sampled_token=False)
    medusa = MedusaDraft.from_target_model(target_model, num_heads=5)
    names = {f"mlps.{k}.": f"blocks.{k}.0.linear." for k in range(5)}
    renamed = {}
    for name, tensor in draft.state_dict().items():
        match = next((ours for ours in names if name.startswith(ours)), None)
        renamed[name if match is None else name.replace(match, names[match])] = tensor
    medusa.load_state_dict(renamed)
    theirs = medusa.head_states(target_model.run(TOKENS), Rows.from_tokens(TOKENS))
    assert all(
        torch.allclose(a, b, atol=1e-12)
        for a, b in zip(_states(draft, target_model), theirs, strict=True)
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_head_reads_the_sampled_token_and_none_after_it(variant: str) -> None:
    target_model = random_target_model("mistral-window")
    draft = trained_like(target_model, **VARIANTS[variant])
    hidden_states = target_model.run(TOKENS)
    other = TOKENS.clone()
    other[:, 6] = 11
    before, after = (
        torch.stack(list(draft.head_states(hidden_states, Rows.from_tokens(t))))
        for t in (TOKENS, other)
    )
    assert torch.equal(before[:, :, :5], after[:, :, :5])
    changed = (before[:, :, 5] != after[:, :, 5]).any(-1)
    assert bool(changed.all()) == bool(changed.any()) == draft.sampled_token


#: Nodes 2, 5 and 7 hold the truth.
TREE = Tree.from_paths([(0,), (1,), (2,), (0, 0), (1, 3), (1, 4), (1, 3, 0), (1, 3, 1)])
TRUTH = [0, 2, 5, 7]


def _pass(draft: AmphistaDraft, hidden: Tensor, text: Tensor, root: int) -> tuple[Tensor, Tensor]:
    """States and tokens of a verification pass with the root at position `root`: true ones at
    `TRUTH`, else others.
    """
    states, tokens = (
        torch.randn(TREE.size + 1, hidden.shape[-1]).double(),
        torch.full((TREE.size + 1,), 60),
    )
    for depth, node in enumerate(TRUTH):
        states[node], tokens[node] = hidden[root + depth], text[root + depth]
    return states, tokens


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen3"])
def test_states_step_by_step_are_those_of_the_whole(family: str, rows: int, variant: str) -> None:
    """Rows of different lengths accept different numbers of nodes; one row finishes."""
    target_model = random_target_model(family)
    draft = trained_like(target_model, **VARIANTS[variant])
    torch.manual_seed(2)
    text = torch.randint(2, 60, (rows, 40))
    whole = target_model.run(text)
    following = text.roll(-1, 1)
    batch = Rows.from_tokens(text)
    expected = draft.stages(
        whole.final, following, lambda i, x: draft.layers[i](x, batch.positions, batch.segments)
    )
    lengths = [9, 3, 1, 6][:rows]
    prompt = torch.where(torch.arange(9) < torch.tensor(lengths)[:, None], text[:, :9], 0)
    drafted = DraftRows(draft, target_model.run(prompt), prompt, lengths)
    position, active = list(lengths), list(range(rows))
    for step in range(8):
        last_tokens = torch.stack([text[row, position[row]] for row in active])
        read = drafted.extend(last_tokens, TREE)
        for stage, states in zip(expected, read, strict=True):
            expected_stages = torch.stack([stage[row, position[row] - 1] for row in active])
            assert torch.allclose(states, expected_stages, rtol=0, atol=1e-10)
        passes = [_pass(draft, whole.final[row], text[row], position[row]) for row in active]
        states, tokens = (torch.stack(parts) for parts in zip(*passes, strict=True))
        accepted = [(step + 2 * row) % 4 for row in active]
        paths = [TRUTH[: count + 1] for count in accepted]
        drafted.accept(HiddenStates(states), tokens, paths)
        for row, count in zip(active, accepted, strict=True):
            position[row] += count + 1
        if step == 4 and rows > 1:
            active = [0, 3, 2]
            drafted.select(active)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_proposals_are_the_best_tokens_of_each_head(variant: str, bias: bool, apart: bool) -> None:
    """Three prompts in a batch against each head's ranking of all tokens; `apart`: weights are not
    stacked.
    """
    target_model = random_target_model("qwen2")
    if bias:
        bias_values = torch.randn(target_model.vocab_size, dtype=torch.float64)
        target_model.output_embeddings.bias = nn.Parameter(bias_values, requires_grad=False)
    draft = trained_like(target_model, **VARIANTS[variant])
    if apart:
        weight = draft.lm_heads.get_parameter("2.weight")
        weight.data = weight.data.clone()
    assert (draft.stacked() is None) == apart
    prompts, last_tokens = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3]], [42, 43, 44]
    padded = torch.tensor([prompt + [0] * (5 - len(prompt)) for prompt in prompts])
    rows = DraftRows(draft, target_model.run(padded), padded, [5, 2, 3])
    tree = Tree.from_paths([(0,), (2,), (0, 4), (2, 0), (0, 4, 1)])
    proposal = rows.propose(torch.tensor(last_tokens), tree)
    for row, (prompt, root) in enumerate(zip(prompts, last_tokens, strict=True)):
        states = _states(draft, target_model, torch.tensor([[*prompt, root]]))
        logits = (draft.lm_head(k).logits(states[k - 1][0, -2]) for k in (1, 2, 3))
        orders = [row_logits.argsort(descending=True).tolist() for row_logits in logits]
        expected = [root, orders[0][0], orders[0][2], orders[1][4], orders[1][0], orders[2][1]]
        assert proposal.tokens[row].tolist() == expected
