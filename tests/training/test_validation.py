"""The acceptance length on held-out text, against plain loops."""

import itertools

import pytest
import torch
from torch.nn.functional import cross_entropy

from medusa_train.data.batch import IGNORE_INDEX, shift_labels
from medusa_train.data.dataset import Batch
from medusa_train.inference.generate import Decoder
from medusa_train.losses.objective import Objective
from medusa_train.models.drafts import DRAFTS
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.models.loading import load_target_model
from medusa_train.models.precision import Precision
from medusa_train.training import validation
from medusa_train.training.target_model_recipe import TargetModelRecipe
from medusa_train.training.validation import ranked_conversations, simulate
from medusa_train.tree_search.fit import Trace, fit_trees
from tests.losses.formula import objective as plain_objective
from tests.losses.plain import accumulated


def test_answers_begin_behind_their_prompt_and_end_with_their_last_token() -> None:
    # a conversation of two answers (tokens 2..4 and 7..8), a second one in the same row (tokens
    # 11..12), padding
    none = IGNORE_INDEX
    labels = torch.tensor([[none, none, 5, 6, 7, none, none, 8, 9, none, none, 3, 4, none]])
    segments = torch.tensor([[0] * 10 + [1] * 3 + [-1]])
    # every rank names its position
    ranks = torch.arange(14, dtype=torch.int8)[None, :, None].repeat(1, 1, 3)
    first, second = ranked_conversations(labels, segments, ranks)
    # the state at 1 has token 2 as its root: heads 1 and 2 guess tokens 3 and 4, head 3 would guess
    # past the end
    assert [answer.tolist() for answer in first] == [
        [[1, 1, -1], [2, -1, -1], [-1, -1, -1]],
        [[6, -1, -1], [-1, -1, -1]],
    ]
    # a root needs a state before it: token 10 is unsupervised, its state predicts the first root,
    # token 11
    assert [answer.tolist() for answer in second] == [[[10, -1, -1], [-1, -1, -1]]]


@pytest.mark.parametrize("seed", range(5))
def test_cutting_against_plain_loops(seed: int) -> None:
    torch.manual_seed(seed)
    length, heads = 30, 3
    segments = torch.sort(torch.randint(0, 3, (2, length)), dim=1).values
    segments[0, -4:] = -1
    labels = torch.where(
        (torch.rand(2, length) < 0.7) & (segments >= 0),
        torch.randint(0, 50, (2, length)),
        IGNORE_INDEX,
    )
    ranks = torch.randint(-1, 10, (2, length, heads), dtype=torch.int8)
    found = {}
    for row, t in itertools.product(range(2), range(length - 1)):

        def is_root(row: int, t: int) -> bool:
            return bool(
                t + 1 < length
                and segments[row, t] == segments[row, t + 1]
                and labels[row, t + 1] != IGNORE_INDEX
            )

        if not is_root(row, t):
            continue
        path = []
        for k in range(1, heads + 1):
            path.append(
                int(ranks[row, t, k - 1])
                if all(is_root(row, t + j) for j in range(1, k + 1))
                else -1
            )
        answers = found.setdefault((row, int(segments[row, t])), [])
        if t and is_root(row, t - 1):
            answers[-1].append(path)
        else:
            answers.append([path])
    cut = ranked_conversations(labels, segments, ranks)
    assert sorted([answer.tolist() for answer in answers] for answers in cut) == sorted(
        found.values()
    )


def test_what_holds_in_one_half_alone_brings_nothing() -> None:
    """Fitted and judged on the same text, the tree would seem to accept every guess."""
    good, bad = torch.full((20, 1), 4, dtype=torch.int8), torch.full((20, 1), 7, dtype=torch.int8)
    assert simulate([[good], [bad], [good], [bad]], nodes=1) == 1.0


def test_too_few_conversations_give_nothing() -> None:
    assert simulate([]) is None
    assert simulate([[torch.zeros(9, 2, dtype=torch.int8)]]) is None


def test_of_a_large_text_conversations_are_left_out_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(validation, "Trace", lambda rows: taken.append(len(rows)) or Trace(rows))
    monkeypatch.setattr(validation, "MAX_SIMULATED_TOKENS", 50)
    simulate([[torch.zeros(length, 1, dtype=torch.int8)] for length in range(20, 10, -1)])
    assert sorted(taken) == [12, 16, 20]  # 155 tokens: every fourth, long and short ones alike


PRECISION = Precision(torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def target_model(target_model_dir):
    return load_target_model(str(target_model_dir))


def random_batches():
    torch.manual_seed(3)
    batches = []
    for rows, length in ((2, 12), (3, 7)):
        tokens = torch.randint(0, 300, (rows, length))
        labels = torch.where(torch.rand(rows, length) < 0.6, tokens, IGNORE_INDEX)
        segments = torch.zeros_like(tokens)
        segments[0, -2:] = -1
        labels[0, -2:] = IGNORE_INDEX
        batches.append(
            Batch(tokens, labels, torch.arange(length).repeat(rows, 1), segments, ["a"] * rows)
        )
    return batches


@pytest.mark.parametrize("rows", [2, 512])
def test_figures_match_the_plain_formula(target_model, monkeypatch, rows):
    monkeypatch.setattr(validation, "ROWS", rows)
    draft = MedusaDraft.from_target_model(target_model, 2)
    with torch.no_grad():
        draft.blocks[1][0].linear.bias.normal_()
    found = validation.validate(
        TargetModelRecipe(target_model, PRECISION), draft, random_batches(), Objective(draft, 0.8)
    )
    losses, top3 = [], []
    for k in (1, 2):
        logits, wanted = [], []
        for batch in random_batches():
            target = shift_labels(batch.labels, k, batch.segments)
            states = draft.head_state(target_model.run(batch.tokens).final, k)
            logits.append(draft.lm_head(k).logits(states)[target != IGNORE_INDEX].detach())
            wanted.append(target[target != IGNORE_INDEX])
        logits, wanted = torch.cat(logits), torch.cat(wanted)
        assert found.targets[k - 1] == len(wanted)
        losses.append(float(cross_entropy(logits, wanted)))
        top3.append(float((logits.topk(3).indices == wanted[:, None]).any(1).float().mean()))
    assert found.head_loss == pytest.approx(losses, rel=1e-5)
    assert [shares[2] for shares in found.top] == pytest.approx(top3)
    assert found.loss == pytest.approx(0.8 * losses[0] + 0.64 * losses[1], rel=1e-5)
    assert found.objective == found.loss  # the target model is frozen
    recipe = TargetModelRecipe(
        target_model, PRECISION, parameters=dict(target_model.model.named_parameters())
    )
    joint = validation.validate(recipe, draft, random_batches(), Objective(draft, 0.8, lm="ce"))
    target_model.model.eval()
    targets = [shift_labels(batch.labels, 0, batch.segments) for batch in random_batches()]
    logits = [
        target_model.logits(target_model.run(batch.tokens).final).detach()
        for batch in random_batches()
    ]
    flat = (torch.cat([part.flatten(0, 1) for part in parts]) for parts in (logits, targets))
    # IGNORE_INDEX is torch's
    assert joint.lm_loss == pytest.approx(float(cross_entropy(*flat)), rel=1e-5)
    assert joint.lm_kl is None


def test_acceptance_length_is_that_of_decoding_the_same_text(target_model):
    """On the target model's own greedy answers the tree would take as many steps as the loop takes with
    it.
    """
    draft = MedusaDraft.from_target_model(target_model, 2)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in draft.blocks.parameters():
            parameter.normal_(0, 0.05)
    prompts = [[0, 2, 10 + i, 3] for i in range(6)]
    batches = []
    for prompt in prompts:
        tokens = torch.tensor(
            [prompt + Decoder(target_model).generate(prompt, 30, eos_ids=()).tokens]
        )
        labels = tokens.clone()
        labels[0, : len(prompt)] = IGNORE_INDEX
        batches.append(
            Batch(
                tokens, labels, torch.arange(tokens.shape[1])[None], torch.zeros_like(tokens), ["a"]
            )
        )
    found = validation.validate(
        TargetModelRecipe(target_model, PRECISION), draft, batches, Objective(draft, 0.8)
    )
    halves = [[answers[0] for answers in found.conversations[half::2]] for half in (0, 1)]
    traces = [[Trace(ranks.tolist()) for ranks in half] for half in halves]
    rates = []
    for half in (0, 1):
        tree = fit_trees(traces[half], [validation.NODES])[validation.NODES]
        made = [
            Decoder(target_model, draft, tree).generate(prompt, 30, eos_ids=())
            for prompt in prompts[1 - half :: 2]
        ]
        rates.append(sum(len(m.tokens) - 1 for m in made) / sum(m.steps for m in made))
    assert found.record()["acceptance_length"] == pytest.approx(sum(rates) / 2)


def test_nothing_to_predict_gives_zeros(target_model):
    draft = MedusaDraft.from_target_model(target_model, 2)
    batch = random_batches()[0]
    empty = Batch(
        batch.tokens,
        torch.full_like(batch.labels, IGNORE_INDEX),
        batch.positions,
        batch.segments,
        ["a", "b"],
    )
    found = validation.validate(
        TargetModelRecipe(target_model, PRECISION), draft, [empty], Objective(draft, 0.8)
    )
    assert found.loss == 0.0
    assert found.targets == [0, 0]
    assert "acceptance_length" not in found.record()


def test_a_stop_gives_up(target_model):
    draft = MedusaDraft.from_target_model(target_model, 1)
    recipe, objective = TargetModelRecipe(target_model, PRECISION), Objective(draft, 0.8)
    assert validation.validate(recipe, draft, random_batches(), objective, lambda: True) is None


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({}, 2.0),
        ({"lm": "ce", "heads_coefficient": 0.2}, 3.0 + 0.4),
        ({"lm": "ce", "rho": 0.25, "heads_coefficient": 0.2}, 0.75 * 3.0 + 0.25 * 0.5 + 0.4),
        ({"lm": "kl", "heads_coefficient": 0.2}, 0.5 + 0.4),
        ({"lm": "kl", "heads_coefficient": 0.2, "schedule": "sine_0.5"}, 0.5 + 0.4),
    ],
)
def test_the_validation_objective(target_model, keys, wanted):
    objective = Objective(MedusaDraft.from_target_model(target_model, 1), 0.8, **keys)
    assert validation.validation_objective(objective, 2.0, ce=3.0, kl=0.5) == pytest.approx(wanted)


@pytest.mark.parametrize("kind", list(DRAFTS))
def test_every_draft_gets_the_gradients_of_the_formula(target_model, kind):
    torch.manual_seed(3)
    settings = {
        "kangaroo": {"num_heads": 3, "exit_layer": 1},
        "hydra": {"num_heads": 2, "num_layers": 1},
        "dflash": {"max_draft_tokens": 2, "num_layers": 1},
    }
    draft = DRAFTS[kind].from_target_model(target_model, **settings.get(kind, {"num_heads": 2}))
    for parameter in draft.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    draft.eval()
    batch, recipe = random_batches()[0], TargetModelRecipe(target_model, PRECISION)
    share = 0.6 if kind == "amphista" else 1.0
    objective = Objective(draft, 0.8, soft_targets=share, weight=0.5)
    hidden_states = recipe.hidden_states(batch, draft.aux_layers)
    teacher = recipe.teacher(batch, hidden_states)
    parameters = list(draft.parameters())
    wanted = 0.5 * plain_objective(
        draft, hidden_states, batch, teacher=teacher[1], share=share, decay=0.8
    )
    gradients = torch.autograd.grad(wanted, parameters, materialize_grads=True)
    counts = objective.target_counts(batch)
    found = accumulated(
        lambda: objective.loss_and_gradients(
            hidden_states, batch, counts, teacher=teacher, grad_scale=1.0
        ),
        parameters,
    )
    for mine, other in zip(found, gradients, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
