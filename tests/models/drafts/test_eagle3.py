"""EAGLE-3 against its formula, position by position; initialisation, packed documents, and drafting
as in training.
"""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, silu
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from medusa_train.config.draft_sections import default_layers
from medusa_train.models.drafts import eagle3_attention
from medusa_train.models.drafts.eagle3 import CONFIDENCE_AT_START, Eagle3Draft
from medusa_train.models.drafts.eagle3_layer import layer_config
from medusa_train.models.target_states import HiddenStates, Rows
from medusa_train.trees.tree import Tree
from tests.families import FAMILIES, random_target_model, without_weights
from tests.model_types import tiny_config
from tests.models.drafts.steps import DraftRows

TOKENS = torch.tensor([[3, 14, 15, 9, 26, 5, 35, 8], [7, 20, 30, 40, 2, 11, 12, 13]])


def noisy(family: str = "llama", **settings: object) -> tuple[Eagle3Draft, object]:
    target_model = random_target_model(family)
    draft = Eagle3Draft.from_target_model(
        target_model, **{"num_heads": 4, "train_steps": 3, **settings}
    )
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return draft, target_model


def rms(norm: torch.nn.Module, x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt() * norm.weight


def rotate(x: Tensor, position: int, layer: torch.nn.Module) -> Tensor:
    """x [heads, head_dim] at a position, in the halves of transformers."""
    angle = torch.cat([position * layer.rotary_emb.inv_freq.double()] * 2)
    half = x.shape[-1] // 2
    return x * angle.cos() + torch.cat([-x[:, half:], x[:, :half]], dim=-1) * angle.sin()


def reference(draft: Eagle3Draft, aux: Tensor, tokens: Tensor, steps: int) -> list[Tensor]:
    """What `lm_head` reads in each step, [T, d], computed for one document position by position."""
    layer, attention = draft.midlayer, draft.midlayer.self_attn
    dim, length = attention.head_dim, len(aux)
    if draft.input_norm is not None:
        aux = rms(draft.input_norm, aux)
    if draft.fc_norm is not None:
        parts = aux.chunk(3, dim=-1)
        aux = torch.cat([rms(draft.fc_norm[i], parts[i]) for i in range(3)], dim=-1)
    states = aux @ draft.fc.weight.T
    keys: list[list[Tensor]] = []  # by step and position
    values: list[list[Tensor]] = []
    outs = []
    for k in range(1, steps + 1):
        # past the end, where nothing is predicted, any token
        e = draft.embedding(torch.stack([tokens[min(t + k, length - 1)] for t in range(length)]))
        x = torch.cat([rms(layer.input_layernorm, e), rms(layer.hidden_norm, states)], dim=-1)
        q, key, value = (
            (x @ projection.weight.T).unflatten(-1, (-1, dim))
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if hasattr(attention, "q_norm"):
            q = rms(attention.q_norm, q)
            key = rms(attention.k_norm, key)
        keys.append([rotate(key[t], t + k - 1, layer) for t in range(length)])
        values.append(list(value))
        attended = []
        for t in range(length):
            places = [(0, s) for s in range(t + 1)] + [(step, t) for step in range(1, k)]
            groups = q.shape[1] // key.shape[1]
            seen_keys = torch.stack([keys[step][s] for step, s in places]).repeat_interleave(
                groups, dim=1
            )
            seen_values = torch.stack([values[step][s] for step, s in places]).repeat_interleave(
                groups, dim=1
            )
            weights = (seen_keys * rotate(q[t], t + k - 1, layer)).sum(-1).mul(dim**-0.5).softmax(0)
            attended.append((weights[..., None] * seen_values).sum(0).flatten())
        residual = rms(layer.hidden_norm, states) if layer.norm_before_residual else states
        states = residual + torch.stack(attended) @ attention.o_proj.weight.T
        x = rms(layer.post_attention_layernorm, states)
        mlp = layer.mlp
        states = (
            states
            + (silu(x @ mlp.gate_proj.weight.T) * (x @ mlp.up_proj.weight.T))
            @ mlp.down_proj.weight.T
        )
        outs.append(rms(draft.norm, states))
        if draft.norm_output:
            states = outs[-1]
    return outs


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention in several blocks, of which the last is shorter."""
    monkeypatch.setattr(eagle3_attention, "BLOCK", 3)


VARIANTS = {
    "norm_before_residual": True,
    "qk_norm": True,
    "norm_before_fc": True,
    "fc_norm": True,
    "norm_output": True,
}


@pytest.mark.parametrize(
    ("family", "variants"), [("llama", {}), ("qwen3", {}), ("gemma3", {}), ("llama", VARIANTS)]
)
def test_value_and_gradient_of_the_formula(
    family: str, variants: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    if variants:  # these norms round to float32, which adds up with so many
        monkeypatch.setattr(LlamaRMSNorm, "forward", rms)
        monkeypatch.setattr(Qwen3RMSNorm, "forward", rms)
    draft, target_model = noisy(family, **variants)
    assert sum(parameter.numel() for parameter in draft.parameters()) == (
        Eagle3Draft.count_parameters(without_weights(target_model), **variants)
    )
    hidden_states = target_model.run(TOKENS, aux_layers=draft.aux_layers)
    weights = torch.randn(3, *hidden_states.final.shape, dtype=torch.float64)
    ours = torch.stack(list(draft.head_states(hidden_states, Rows.from_tokens(TOKENS))))
    # step k has a token to read at all positions but the last k
    for k in range(1, 4):
        weights[k - 1, :, -k:] = 0.0
    theirs = torch.stack(
        [torch.stack(reference(draft, hidden_states.aux[row], TOKENS[row], 3)) for row in range(2)],
        dim=1,
    )
    counted = weights != 0
    torch.testing.assert_close(
        ours[counted], theirs[counted], atol=2e-6, rtol=0
    )  # Llama norms in float32
    parameters = [
        parameter for name, parameter in draft.named_parameters() if not name.startswith("lm_heads")
    ]
    for mine, expected in zip(
        torch.autograd.grad((ours * weights).sum(), parameters),
        torch.autograd.grad((theirs * weights).sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(mine, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("hidden_size", [32, 16])
def test_biases_of_published_drafts_are_counted(hidden_size: int) -> None:
    target_model = random_target_model("llama")
    layer = {"hidden_size": hidden_size, "attention_bias": True, "mlp_bias": True}
    draft = Eagle3Draft.from_target_model(target_model, layer=layer, own_embeddings=True)
    assert sum(parameter.numel() for parameter in draft.parameters()) == (
        Eagle3Draft.count_parameters(without_weights(target_model), **draft.settings)
    )


@pytest.mark.parametrize(("rows", "variants"), [(1, {}), (2, {}), (2, VARIANTS)])
def test_trees_are_drafted_as_in_training(rows: int, variants: dict[str, bool]) -> None:
    """The guesses below a node are the best ones of the training states on the node's path."""
    draft, target_model = noisy(**variants)
    prompts, last_tokens = TOKENS[:rows, :6], TOKENS[:rows, 6]
    tree = Tree.from_paths(
        [(0,), (1,), (0, 0), (0, 2), (1, 1), (0, 2, 0), (0, 2, 1), (1, 1, 0), (0, 2, 1, 1)]
    )
    hidden_states = target_model.run(prompts, aux_layers=draft.aux_layers)
    proposal = DraftRows(draft, hidden_states, prompts, [6] * rows).propose(last_tokens, tree)
    for row in range(rows):
        guesses = dict(zip([(), *tree.paths], proposal.tokens[row].tolist(), strict=True))
        for path in tree.paths:
            # the root and the guesses above this one
            before = [guesses[path[:depth]] for depth in range(len(path))]
            text = torch.tensor([[*prompts[row].tolist(), *before]])
            states = list(
                draft.teacher_forced_states(
                    target_model.run(text, aux_layers=draft.aux_layers), Rows.from_tokens(text)
                )
            )
            logits = draft.lm_head(1).logits(states[len(path) - 1][0, 5])
            assert guesses[path] == int(logits.topk(path[-1] + 1).indices[-1])


def test_it_starts_from_the_last_layer_of_the_target_model() -> None:
    target_model = random_target_model("llama")
    draft = Eagle3Draft.from_target_model(target_model)
    source = target_model.layer(2)
    assert torch.equal(
        draft.midlayer.self_attn.k_proj.weight[:, 32:], source.self_attn.k_proj.weight
    )
    assert torch.equal(draft.midlayer.mlp.down_proj.weight, source.mlp.down_proj.weight)
    norm = CONFIDENCE_AT_START * target_model.body.norm.weight
    torch.testing.assert_close(draft.norm.weight, norm, atol=1e-5, rtol=0)
    assert torch.equal(draft.lm_head(3).weight, target_model.output_embeddings.weight)
    aux = torch.randn(1, 2, 96, dtype=torch.float64)
    torch.testing.assert_close(aux[..., 64:], draft.fc(aux))


@pytest.mark.parametrize(
    ("family", "before_mlp", "offset"),
    [
        ("llama", "post_attention_layernorm", 0),
        ("gemma3", "pre_feedforward_layernorm", 1),
        ("olmo2", None, 0),
    ],
)
def test_its_norms_start_as_those_before_attention_and_mlp(
    family: str, before_mlp: str | None, offset: int
) -> None:
    """Gemma stores factors less 1; OLMo 2 has no norms there, and its others are of outputs."""
    target_model = random_target_model(family)
    layer = target_model.layer(target_model.num_layers - 1)
    for parameter in (p for name, p in layer.named_parameters() if "norm" in name):
        torch.nn.init.uniform_(parameter, 0.5, 1.5)
    started = Eagle3Draft.from_target_model(target_model).midlayer
    for norm, name in (
        (started.hidden_norm, "input_layernorm"),
        (started.post_attention_layernorm, before_mlp),
    ):
        source = getattr(layer, name or "", None)
        expected = (
            torch.ones_like(norm.weight) if source is None else source.weight.float() + offset
        )
        torch.testing.assert_close(norm.weight.float(), expected.float(), atol=2e-5, rtol=0)


def test_default_layers_are_those_of_vllm() -> None:
    assert default_layers(32) == (2, 16, 29)
    assert default_layers(4) == (1, 2, 3)


def losses(draft: Eagle3Draft, hidden_states: HiddenStates, tokens: Tensor) -> list[float]:
    """Nats per token of each step of training."""
    steps = draft.head_states(hidden_states, Rows.from_tokens(tokens))
    return [
        next_token_loss(draft.lm_head(k).logits(states), tokens, ahead=k + 1)
        for k, states in enumerate(steps, start=1)
    ]


def next_token_loss(logits: Tensor, tokens: Tensor, ahead: int) -> float:
    """Nats of tokens[:, t + ahead] given logits [B, T, V] at t."""
    targets = tokens[:, ahead:]
    return float(cross_entropy(logits[:, : targets.shape[1]].flatten(0, 1), targets.flatten()))


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_new_draft_is_not_sure_of_what_it_has_not_learned(family: str) -> None:
    """On text that the target model is sure and wrong about, a draft begins near equal chances."""
    target_model = random_target_model(family)
    tokens = torch.randint(2, 60, (4, 40), generator=torch.Generator().manual_seed(0))
    lm_head = target_model.output_embeddings
    equal_chances = math.log(target_model.vocab_size)
    own = 0.0
    while own < 2 * equal_chances:  # a wrong token costs much, as in a model that was trained
        lm_head.weight.mul_(1.2)
        own = next_token_loss(lm_head(target_model.run(tokens).final), tokens, ahead=1)
    draft = Eagle3Draft.from_target_model(target_model, num_heads=3, train_steps=3)
    for loss in losses(draft, target_model.run(tokens, aux_layers=draft.aux_layers), tokens):
        assert loss < equal_chances + 0.15 * own


def test_a_layer_has_heads_that_divide_its_width() -> None:
    """GLM-4.5 has 96 heads of 128 at a width of 4096, which LlamaConfig rejects."""
    heads = {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 8}
    layer = layer_config(tiny_config("glm4_moe", 64, **heads))
    assert (layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim) == (4, 2, 8)


def test_a_layer_rotates_all_of_a_head_where_gemma_4_rotates_a_part() -> None:
    layer = layer_config(tiny_config("gemma4_text", 64))
    assert layer.head_dim == 16
    assert layer.rope_parameters["rope_type"] == "default"
