"""DFlash against its formula, block by block; its anchors, its window and its settings."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, silu
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from medusa_train.config.draft_sections import DFlashConfig, spread_layers
from medusa_train.data.batch import IGNORE_INDEX, Batch
from medusa_train.errors import TargetModelError
from medusa_train.losses.objective import Objective
from medusa_train.models.drafts import dflash
from medusa_train.models.drafts.dflash import DFlashDraft
from medusa_train.models.target_states import HiddenStates, Rows
from medusa_train.trees.tree import Tree
from tests.families import random_target_model, without_weights
from tests.models.drafts.steps import DraftRows

TOKENS = torch.tensor([[3, 14, 15, 9, 26, 5, 35, 8], [7, 20, 30, 40, 2, 11, 12, 13]])
#: Two documents in the first row, a padded second row.
SEGMENTS = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0, -1, -1]])
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7]])
WINDOWS = pytest.mark.parametrize("window", [0, 5, 2048])


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms and angles in float64, which transformers computes in float32."""

    def angles(rotary: torch.nn.Module, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angle = torch.cat([positions[..., None] * rotary.inv_freq.double()] * 2, dim=-1)
        return angle.cos(), angle.sin()

    monkeypatch.setattr(LlamaRMSNorm, "forward", rms)
    monkeypatch.setattr(Qwen3RMSNorm, "forward", rms)
    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", angles)


def random_dflash(**settings: object) -> DFlashDraft:
    """A draft of three guesses in float64 with noise in every weight, its norms included."""
    target_model = random_target_model("qwen3")
    keys = {"max_draft_tokens": 3, "num_layers": 2, "layers": [1, 2], **settings}
    draft = DFlashDraft(target_model, **keys)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return draft


def batch_of(draw: int | None = None, supervised: Tensor | None = None) -> Batch:
    labels = TOKENS if supervised is None else TOKENS.masked_fill(~supervised, IGNORE_INDEX)
    return Batch(TOKENS, labels, POSITIONS, SEGMENTS, [], draw=draw)


def features(draft: DFlashDraft) -> HiddenStates:
    torch.manual_seed(2)
    aux = torch.randn(2, 8, draft.fc.in_features, dtype=torch.float64)
    return HiddenStates(aux[..., : draft.norm.weight.numel()], aux)


def rms(norm: torch.nn.Module, x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt() * norm.weight


def rotate(x: Tensor, position: int, draft: DFlashDraft) -> Tensor:
    """x [heads, head_dim] at a position, in the halves of transformers."""
    angle = torch.cat([position * draft.rotary_emb.inv_freq.double()] * 2)
    half = x.shape[-1] // 2
    return x * angle.cos() + torch.cat([-x[:, half:], x[:, :half]], dim=-1) * angle.sin()


def block_reference(draft: DFlashDraft, aux: Tensor, last_token: int) -> Tensor:
    """The normed states of slots 1..K behind a document's last of T positions, [K, d], computed slot
    by slot and head by head.

    Args:
        aux: [T, n d].
    """
    context = rms(draft.hidden_norm, aux @ draft.fc.weight.T)  # [T, d]
    slots = draft.max_depth + 1
    tokens = torch.tensor([last_token, *[draft.mask_token_id] * draft.max_depth])
    states = draft.embedding(tokens).double()  # [S, d]
    length = len(context)
    for layer in draft.layers:
        attention = layer.self_attn
        dim = attention.head_dim
        normed = rms(layer.input_layernorm, states)
        keys, values = [], []
        for position, read in enumerate([*context, *normed]):
            key = rms(attention.k_norm, (attention.k_proj.weight @ read).view(-1, dim))
            keys.append(rotate(key, position, draft))
            values.append((attention.v_proj.weight @ read).view(-1, dim))
        outputs = []
        for slot in range(slots):
            own = length + slot
            seen = [p for p in range(length + slots) if not draft.window or p <= own]
            if draft.window:
                seen = [p for p in seen if own - p < draft.window]
            query = rms(attention.q_norm, (attention.q_proj.weight @ normed[slot]).view(-1, dim))
            query = rotate(query, own, draft)
            heads = []
            for head in range(len(query)):
                group = head // (len(query) // len(keys[0]))
                scores = torch.stack([query[head] @ keys[p][group] for p in seen]) / dim**0.5
                heads.append(scores.softmax(0) @ torch.stack([values[p][group] for p in seen]))
            outputs.append(attention.o_proj.weight @ torch.cat(heads))
        states = states + torch.stack(outputs)
        z = rms(layer.post_attention_layernorm, states)
        mlp = layer.mlp
        inner = silu(z @ mlp.gate_proj.weight.T) * (z @ mlp.up_proj.weight.T)
        states = states + inner @ mlp.down_proj.weight.T
    return rms(draft.norm, states)[1:]


def document(row: int, t: int) -> tuple[int, int]:
    """The first position and the end of the document of a position."""
    same = [p for p in range(8) if SEGMENTS[row, p] == SEGMENTS[row, t]]
    return same[0], same[-1] + 1


def blocks(supervised: Tensor) -> list[tuple[int, int]]:
    """The row and position t of each block whose first guess has a supervised target."""
    found = []
    for row in range(2):
        for t in range(8):
            _, end = document(row, t)
            if SEGMENTS[row, t] >= 0 and t + 2 < end and supervised[row, t + 2]:
                found.append((row, t))
    return found


@WINDOWS
@pytest.mark.parametrize("blocks_at_once", [1, 3, 32])
def test_states_in_training_are_those_of_the_formula(
    window: int, blocks_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dflash, "BLOCKS", blocks_at_once)
    draft = random_dflash(window=window)
    hidden_states = features(draft)
    states = list(draft.teacher_forced_states(hidden_states, batch_of()))
    for row in range(2):
        for t in range(8):
            start, end = document(row, t)
            if SEGMENTS[row, t] < 0 or t + 1 >= end:
                continue
            aux = hidden_states.aux[row, start : t + 1]
            expected = block_reference(draft, aux, int(TOKENS[row, t + 1]))
            for k in range(3):
                torch.testing.assert_close(states[k][row, t], expected[k], atol=1e-12, rtol=1e-12)


@WINDOWS
@pytest.mark.parametrize("markov_rank", [0, 4])
@pytest.mark.parametrize(
    "second_row", [[0, 1, 1, 1, 1, 0, 0, 0], [0, 0, 1, 0, 1, 0, 0, 0]], ids=["three", "two"]
)
def test_loss_and_gradients_are_those_of_a_loop_over_blocks(
    window: int, markov_rank: int, second_row: list[int]
) -> None:
    """With every block, since no more than 512 positions can be drawn from: three in the first row,
    and as many or fewer in the second.
    """
    draft = random_dflash(window=window, markov_rank=markov_rank)
    supervised = torch.tensor([[0, 0, 1, 1, 0, 0, 1, 1], second_row]).bool()
    batch, hidden_states = batch_of(draw=5, supervised=supervised), features(draft)
    loss = DFlashConfig(max_draft_tokens=3, decay_coefficient=0.5).heads_loss
    objective = Objective(draft, loss.decay, soft_targets=loss.soft_targets, weight=loss.weight)
    counts = objective.target_counts(batch)
    value = objective.loss_and_gradients(hidden_states, batch, counts).loss
    value.backward()
    gradients = {name: p.grad.clone() for name, p in draft.named_parameters()}
    draft.zero_grad()

    losses: list[list[Tensor]] = [[], [], []]
    for row, t in blocks(supervised):
        start, end = document(row, t)
        states = block_reference(
            draft, hidden_states.aux[row, start : t + 1], int(TOKENS[row, t + 1])
        )
        for k in range(1, 4):
            if t + k + 1 >= end or not supervised[row, t + k + 1]:
                continue
            logits = draft._lm_head.weight @ states[k - 1]
            if draft.markov is not None:
                before = draft.markov.embedding.weight[TOKENS[row, t + k]]
                logits = logits + draft.markov.output.weight @ before
            losses[k - 1].append(cross_entropy(logits[None], TOKENS[row, t + k + 1][None]))
    assert [len(found) for found in losses] == counts.tolist()
    weights = [0.5, 0.25, 0.125]
    means = [torch.stack(found).mean() for found in losses]
    expected = sum(w * mean for w, mean in zip(weights, means, strict=True)) / sum(weights)
    torch.testing.assert_close(value, expected, atol=1e-12, rtol=1e-12)
    expected.backward()
    for name, parameter in draft.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-11, rtol=1e-9)


@WINDOWS
@torch.no_grad()
def test_guesses_in_decoding_are_those_of_training(window: int) -> None:
    draft = random_dflash(window=window).eval()
    hidden_states = features(draft)
    rows = Rows.from_tokens(TOKENS)
    states = list(draft.teacher_forced_states(hidden_states, rows))
    decoding = DraftRows(draft, hidden_states, TOKENS, [5, 7])  # the prompts end at t = 4 and t = 6
    last_tokens = torch.tensor([TOKENS[0, 5], TOKENS[1, 7]])
    for depth in (3, 1):
        step = decoding.step(last_tokens, Tree.chain(depth))
        draft.extend(step)
        found = draft._run_block(step, depth)  # [2, depth, d]
        for k in range(depth):
            expected = torch.stack([states[k][0, 4], states[k][1, 6]])
            torch.testing.assert_close(found[:, k], expected, atol=1e-12, rtol=1e-12)


def test_anchors_are_drawn_from_supervised_targets_alone() -> None:
    draft = random_dflash(anchors=2)
    supervised = torch.tensor([[0, 0, 1, 1, 1, 0, 1, 1], [0, 0, 0, 0, 0, 0, 0, 0]]).bool()
    possible = set(blocks(supervised))
    draws = []
    for draw in range(20):
        positions = draft.loss_positions(batch_of(draw, supervised))
        drawn = {(row, t) for row, t in positions.nonzero().tolist()}
        assert drawn <= possible
        assert len(drawn) == 2  # all of them in the first row: the second has no target
        again = draft.loss_positions(batch_of(draw, supervised))
        assert torch.equal(positions, again)
        draws.append(tuple(sorted(drawn)))
    assert len(set(draws)) > 2
    assert {one for drawn in draws for one in drawn} == possible


def test_only_blocks_of_the_anchors_have_a_loss() -> None:
    draft = random_dflash(anchors=2)
    batch, hidden_states = batch_of(draw=3), features(draft)
    objective = Objective(draft, 1.0)
    counts = objective.target_counts(batch)
    assert counts[0] == 4  # two blocks in each row
    states = list(draft.head_states(hidden_states, batch))
    chosen = draft.loss_positions(batch)
    assert (states[0][chosen] != 0).all()
    assert (states[0][~chosen] == 0).all()
    every = list(draft.teacher_forced_states(hidden_states, batch))
    torch.testing.assert_close(states[2][chosen], every[2][chosen])


def test_a_batch_without_a_target_has_no_loss() -> None:
    draft = random_dflash()
    batch = batch_of(draw=1, supervised=torch.zeros(2, 8, dtype=torch.bool))
    objective = Objective(draft, 1.0)
    counts = objective.target_counts(batch)
    assert counts.tolist() == [0, 0, 0]
    assert objective.loss_and_gradients(features(draft), batch, counts).loss == 0


def test_fewer_guesses_are_those_of_a_shorter_block() -> None:
    """A causal block's first slots do not depend on later ones; those of other blocks do."""
    for window, is_equal in ((2048, True), (0, False)):
        long = random_dflash(window=window)
        short = random_dflash(window=window, max_draft_tokens=2)
        short.load_state_dict(long.state_dict())
        hidden_states = features(long)
        of_long = next(long.teacher_forced_states(hidden_states, batch_of()))
        of_short = next(short.teacher_forced_states(hidden_states, batch_of()))
        assert torch.allclose(of_long, of_short, atol=1e-12) == is_equal


def test_the_last_tokens_embedding_is_the_mask_by_default() -> None:
    assert random_dflash().mask_token_id == 60
    assert random_dflash(mask_token_id=7).mask_token_id == 7
    with pytest.raises(TargetModelError, match="mask_token_id: 61: the target model has 61 tokens"):
        random_dflash(mask_token_id=61)


@pytest.mark.parametrize(
    ("layers", "count", "expected"),
    [(24, 5, (2, 7, 12, 17, 22)), (36, 5, (2, 10, 18, 26, 34)), (24, 1, (13,)), (3, 2, (2, 2))],
)
def test_states_are_read_where_the_authors_read_them(
    layers: int, count: int, expected: tuple[int, ...]
) -> None:
    """After one layer more than their numbers, which count from 0."""
    assert spread_layers(layers, count) == expected


def test_the_embeddings_and_lm_head_of_the_target_model_are_not_saved() -> None:
    draft = random_dflash()
    count = draft.count_parameters(without_weights(random_target_model("qwen3")), **draft.settings)
    assert sum(parameter.numel() for parameter in draft.parameters()) == count
    assert not {name for name in draft.state_dict() if "embed" in name or "head" in name}


def test_settings_recreate_the_draft() -> None:
    tokens = torch.arange(60, 3, -2)
    draft = random_dflash(
        markov_rank=4, vocab_size=len(tokens), token_map=tokens, window=9, mask_token_id=7
    )
    again = DFlashDraft(random_target_model("qwen3"), **draft.settings, token_map=tokens)
    again.load_state_dict(draft.state_dict())
    hidden_states = features(draft)
    for first, second in zip(
        draft.teacher_forced_states(hidden_states, batch_of()),
        again.teacher_forced_states(hidden_states, batch_of()),
        strict=True,
    ):
        assert torch.equal(first, second)
    assert replace(again.lm_head(1), token_bias=None).weight.shape[0] == len(tokens)
