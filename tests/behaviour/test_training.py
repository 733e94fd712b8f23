"""Training against plain torch: losses, gradients, clipping, AdamW, the schedule and validation, for
every draft and recipe, from the files that a run writes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.behaviour import plain, plain_trees
from tests.behaviour.conftest import KINDS, LOSSES, RunOf
from tests.behaviour.world import metrics, write_model

Documents = tuple[list[plain.Document], list[plain.Document]]
STEPS = 3
RATE = 1e-2


def initial(run_of: RunOf, kind: str, **keys: Any) -> Path:
    """Return a run whose weights stayed at their first values."""
    return run_of(kind, **{**keys, "learning_rate": 1e-30, "max_steps": 1})


def assert_close(ours: float, theirs: float, tolerance: float = 1e-5) -> None:
    assert ours == pytest.approx(theirs, rel=tolerance, abs=1e-9)


def total(heads: list[plain.Sums], loss: plain.HeadsLoss) -> Tensor:
    terms = [loss.weight * loss.decay**k * head.mean() for k, head in enumerate(heads, start=1)]
    return torch.stack(terms).sum()


class PlainRun:
    """Trains the draft of a run's first weights in float64 on all documents in each step.

    Attributes:
        losses, norms, hits: of each step, before its update.
    """

    def __init__(self, heads: Path, model: Any, documents: list[plain.Document]) -> None:
        self.draft = plain.PlainDraft.read(heads, model)
        self.documents = documents
        self.states = {tuple(d.tokens): plain.run_model(model, d.tokens) for d in documents}
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.hits: list[list[float]] = []

    def train(
        self,
        loss: plain.HeadsLoss,
        rate: Callable[[int], float],
        decay: float = 0.0,
        limit: float = 1.0,
    ) -> None:
        moments: dict[str, tuple[Tensor, Tensor]] = {}
        weights = self.draft.weights
        for step in range(STEPS):
            for weight in weights.values():
                weight.requires_grad_(True)
            heads = plain.head_terms(
                self.draft, self.documents, loss, lambda tokens: self.states[tuple(tokens)]
            )
            value = total(heads, loss)
            gradients = dict(
                zip(weights, torch.autograd.grad(value, list(weights.values())), strict=True)
            )
            self.losses.append(float(value.detach()))
            self.hits.append([head.correct / max(1, head.count) for head in heads])
            self.norms.append(plain.clip(gradients, limit))
            for weight in weights.values():
                weight.requires_grad_(False)
            rates = dict.fromkeys(weights, rate(step))
            plain.adamw(weights, gradients, moments, step + 1, rates, decay=decay)


def assert_same_weights(run: Path, draft: plain.PlainDraft, tolerance: float = 2e-5) -> None:
    (path,) = (run / "heads").glob("*.safetensors")
    trained = plain.read_weights(path)
    trained.pop("token_map", None)
    assert set(trained) == set(draft.weights)
    for name, weight in draft.weights.items():
        torch.testing.assert_close(trained[name], weight, rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_every_draft_are_those_of_plain_torch(
    kind: str, run_of: RunOf, exact_model: Any, documents: Documents
) -> None:
    reference = PlainRun(initial(run_of, kind) / "heads", exact_model, documents[0])
    reference.train(LOSSES[kind], lambda step: RATE * plain.cosine(step, STEPS))
    run = run_of(kind)
    records = metrics(run)
    assert len(records) == STEPS
    for step, record in enumerate(records):
        assert_close(record["loss"], reference.losses[step], 1e-4)
        assert_close(record["grad_norm"], reference.norms[step], 1e-3)
        assert_close(record["lr"], RATE * plain.cosine(step, STEPS))
        assert record["head_top1"] == pytest.approx(reference.hits[step])
        assert record["tokens"] == (step + 1) * sum(len(d.tokens) for d in documents[0])
        assert record["epoch"] == step + 1
    assert reference.norms[0] > 0.1
    assert_same_weights(run, reference.draft)


@pytest.mark.parametrize("kind", ["medusa", "amphista", "eagle3-reduced"])
def test_each_head_has_the_mean_over_its_own_targets(
    kind: str, run_of: RunOf, exact_model: Any, documents: Documents
) -> None:
    """Where all tokens are trained, the farther head has fewer of them before a text ends."""
    whole = [plain.Document(d.tokens, [True] * len(d.tokens)) for d in documents[0]]
    reference = PlainRun(initial(run_of, kind) / "heads", exact_model, whole)
    if kind == "eagle3-reduced":  # whose vocabulary are the most frequent targets
        first = initial(run_of, kind, train_on_inputs=True)
        reference = PlainRun(first / "heads", exact_model, whole)
    reference.train(LOSSES[kind], lambda step: RATE * plain.cosine(step, STEPS))
    run = run_of(kind, train_on_inputs=True)
    for step, record in enumerate(metrics(run)):
        assert_close(record["loss"], reference.losses[step], 1e-4)
        assert_close(record["grad_norm"], reference.norms[step], 1e-3)
        assert record["head_top1"] == pytest.approx(reference.hits[step])
    assert_same_weights(run, reference.draft)


SCHEDULES: dict[str, tuple[dict[str, Any], Callable[[int], float], dict[str, Any]]] = {
    "warm-up, minimum, clipping, weight decay, betas": (
        {
            "warmup_steps": 1,
            "cosine_min_lr_ratio": 0.2,
            "max_grad_norm": 0.4,
            "weight_decay": 0.3,
            "medusa_lr_multiplier": 2.0,
        },
        lambda step: 2 * RATE * plain.cosine(step, STEPS, warmup=1, lowest=0.2),
        {"decay": 0.3, "limit": 0.4},
    ),
    "linear with a warm-up by ratio, no clipping": (
        {"lr_scheduler": "linear", "warmup_ratio": 0.3, "max_grad_norm": 0, "warmup_steps": None},
        lambda step: RATE * [0.0, 1.0, 0.5][step],
        {"limit": 0.0},
    ),
    "constant with a warm-up": (
        {"lr_scheduler": "constant_with_warmup", "warmup_steps": 2},
        lambda step: RATE * [0.0, 0.5, 1.0][step],
        {},
    ),
    "constant": ({"lr_scheduler": "constant"}, lambda step: RATE, {}),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_clipping_and_weight_decay_are_those_of_plain_torch(
    name: str, run_of: RunOf, exact_model: Any, documents: Documents
) -> None:
    keys, rate, options = SCHEDULES[name]
    reference = PlainRun(initial(run_of, "medusa") / "heads", exact_model, documents[0])
    reference.train(LOSSES["medusa"], rate, **options)
    run = run_of("medusa", **keys)
    assert [record["lr"] for record in metrics(run)] == pytest.approx(
        [rate(step) for step in range(STEPS)]
    )
    for record, norm in zip(metrics(run), reference.norms, strict=True):
        assert_close(record["grad_norm"], norm, 1e-3)
    assert_same_weights(run, reference.draft)


def test_betas_and_epsilon_of_adamw(run_of: RunOf, exact_model: Any, documents: Documents) -> None:
    run = run_of("medusa", adam_beta1=0.5, adam_beta2=0.8, adam_epsilon=1e-2)
    draft = PlainRun(initial(run_of, "medusa") / "heads", exact_model, documents[0])
    weights, moments = draft.draft.weights, {}
    for step in range(STEPS):
        for weight in weights.values():
            weight.requires_grad_(True)
        heads = plain.head_terms(
            draft.draft, documents[0], LOSSES["medusa"], lambda t: draft.states[tuple(t)]
        )
        value = total(heads, LOSSES["medusa"])
        gradients = dict(
            zip(weights, torch.autograd.grad(value, list(weights.values())), strict=True)
        )
        plain.clip(gradients, 1.0)
        for weight in weights.values():
            weight.requires_grad_(False)
        rates = dict.fromkeys(weights, RATE * plain.cosine(step, STEPS))
        plain.adamw(weights, gradients, moments, step + 1, rates, betas=(0.5, 0.8), eps=1e-2)
    assert_same_weights(run, draft.draft)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "medusa-reduced"])
def test_packed_rows_train_as_separate_documents(
    kind: str, run_of: RunOf, documents: Documents
) -> None:
    """Several documents in a row: no target and no attention crosses their borders."""
    lengths = [len(document.tokens) for document in documents[0]]
    row = max(lengths) + min(lengths) + 2
    packed = run_of(kind, sample_packing=True, sequence_len=row, gradient_accumulation_steps=2)
    apart = run_of(kind)
    for ours, theirs in zip(metrics(packed), metrics(apart), strict=True):
        assert_close(ours["loss"], theirs["loss"], 2e-5)
        assert_close(ours["grad_norm"], theirs["grad_norm"], 2e-4)
        assert ours["tokens"] == theirs["tokens"]
    for ours, theirs in zip(metrics(packed, "eval"), metrics(apart, "eval"), strict=True):
        assert ours["head_loss"] == pytest.approx(theirs["head_loss"], rel=1e-4)
        assert ours["targets"] == theirs["targets"]


def test_packed_rows_of_a_model_with_windows_and_capped_scores(
    run_of: RunOf, documents: Documents, tmp_path: Path
) -> None:
    """Its attention takes a mask, which holds its windows."""
    directory = write_model(tmp_path / "gemma2", "gemma2")
    lengths = [len(document.tokens) for document in documents[0]]
    row = max(lengths) + min(lengths) + 2
    changes = {"sample_packing": True, "sequence_len": row, "gradient_accumulation_steps": 2}
    packed = run_of("medusa-soft", base_model=directory, **changes)
    apart = run_of("medusa-soft", base_model=directory)
    for ours, theirs in zip(metrics(packed), metrics(apart), strict=True):
        assert_close(ours["loss"], theirs["loss"], 2e-5)
        assert_close(ours["grad_norm"], theirs["grad_norm"], 2e-4)


def test_no_target_crosses_a_border_where_every_token_is_one(
    run_of: RunOf, documents: Documents
) -> None:
    """With `train_on_inputs` a document begins with targets, too."""
    lengths = [len(document.tokens) for document in documents[0]]
    row = max(lengths) + min(lengths) + 2
    packed = run_of(
        "medusa",
        train_on_inputs=True,
        sample_packing=True,
        sequence_len=row,
        gradient_accumulation_steps=2,
    )
    apart = run_of("medusa", train_on_inputs=True)
    for ours, theirs in zip(metrics(packed), metrics(apart), strict=True):
        assert_close(ours["loss"], theirs["loss"], 2e-5)
        assert_close(ours["grad_norm"], theirs["grad_norm"], 2e-4)


@pytest.mark.parametrize(
    "family",
    [
        "llama-bias-tied",
        "mistral-window",
        "qwen2",
        "qwen3",
        "phi3",
        "olmo2",
        "granite",
        "gemma2",
        "gemma3",
    ],
)
def test_heads_on_other_families(
    family: str, run_of: RunOf, documents: Documents, tmp_path: Path
) -> None:
    """Windows, norms, tied weights, scaled and soft-capped logits."""
    directory = write_model(tmp_path / family, family)
    reference = PlainRun(
        initial(run_of, "medusa-soft", base_model=directory) / "heads",
        plain.load_model(directory),
        documents[0],
    )
    reference.train(LOSSES["medusa-soft"], lambda step: RATE * plain.cosine(step, STEPS))
    run = run_of("medusa-soft", base_model=directory)
    for step, record in enumerate(metrics(run)):
        assert_close(record["loss"], reference.losses[step], 1e-4)
        assert_close(record["grad_norm"], reference.norms[step], 1e-3)
    assert_same_weights(run, reference.draft)


@pytest.mark.parametrize("kind", ["hydra++", "amphista", "kangaroo"])
@pytest.mark.parametrize("packed", [False, True])
def test_layers_of_drafts_train_with_the_models_window(
    kind: str, packed: bool, run_of: RunOf, documents: Documents, tmp_path: Path
) -> None:
    directory = write_model(tmp_path / "window", "mistral-window")
    reference = PlainRun(
        initial(run_of, kind, base_model=directory) / "heads",
        plain.load_model(directory),
        documents[0],
    )
    reference.train(LOSSES[kind], lambda step: RATE * plain.cosine(step, STEPS))
    keys: dict[str, Any] = {"base_model": directory}
    if packed:
        lengths = [len(document.tokens) for document in documents[0]]
        row = max(lengths) + min(lengths) + 2
        keys |= {"sample_packing": True, "sequence_len": row, "gradient_accumulation_steps": 2}
    for step, record in enumerate(metrics(run_of(kind, **keys))):
        assert_close(record["loss"], reference.losses[step], 1e-4)
        assert_close(record["grad_norm"], reference.norms[step], 1e-3)


# Validation


@pytest.mark.parametrize("kind", KINDS)
def test_validation_counts_ranks_of_held_out_text(
    kind: str, run_of: RunOf, exact_model: Any, documents: Documents
) -> None:
    run = run_of(kind)
    record = metrics(run, "eval")[-1]
    assert record["step"] == STEPS
    draft = plain.PlainDraft.read(run / "heads", exact_model)
    loss = LOSSES[kind]
    kept = None if draft.token_map is None else draft.token_map.tolist()
    nats = [0.0] * draft.num_heads
    hits = [[0] * 10 for _ in nats]
    targets, known = [0] * draft.num_heads, [0] * draft.num_heads
    chats: list[list[plain_trees.Ranks]] = []
    for document in sorted(documents[1], key=lambda d: len(d.tokens), reverse=True):
        logits = draft.head_logits(document.tokens, plain.run_model(exact_model, document.tokens))
        ranks = [[-1] * draft.num_heads for _ in document.tokens]
        for k in range(1, draft.num_heads + 1):
            for t, token in plain.targets_of(document, k):
                index = token if kept is None else (kept.index(token) if token in kept else -1)
                ranks[t][k - 1] = plain_trees.rank(logits[k - 1][t], index)
                targets[k - 1] += 1
                known[k - 1] += index >= 0
                if index >= 0:
                    nats[k - 1] -= float(logits[k - 1][t].log_softmax(-1)[index].detach())
                for best in range(10):
                    hits[k - 1][best] += 0 <= ranks[t][k - 1] <= best
        chats.append(answers_in(document, ranks))
    assert record["targets"] == targets
    if kept is not None:
        assert record["targets_in_vocabulary"] == known
        assert known != targets
    means = [nat / max(1, count) for nat, count in zip(nats, known, strict=True)]
    assert record["head_loss"] == pytest.approx(means, rel=1e-4)
    assert record["head_top"] == [
        pytest.approx([hit / count for hit in row])
        for row, count in zip(hits, targets, strict=True)
    ]
    assert record["head_top1"] == [row[0] for row in record["head_top"]]
    weighted = sum(loss.decay**k * mean for k, mean in enumerate(means[: draft.trained_heads], 1))
    assert_close(record["loss"], weighted, 1e-4)
    assert_close(record["objective"], weighted, 1e-4)
    halves = plain_trees.two_halves(chats, 16)
    assert_close(record["acceptance_length"], halves)


def answers_in(document: plain.Document, ranks: plain_trees.Ranks) -> list[plain_trees.Ranks]:
    """Cut a document's ranks into answers: position p of an answer is that before its token p."""
    found = []
    before = [*document.supervised[1:], False]
    start = None
    for t, is_answer in enumerate([*before, False]):
        if is_answer and start is None:
            start = t
        elif not is_answer and start is not None:
            length = t - start
            found.append(
                [
                    [r if i + k < length else -1 for k, r in enumerate(ranks[start + i], start=1)]
                    for i in range(length)
                ]
            )
            start = None
    return found
