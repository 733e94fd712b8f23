import pytest
import torch
from torch.nn.functional import cross_entropy

from medusa_train.data.dataset import Batch
from medusa_train.data.targets import IGNORE, shift
from medusa_train.inference.calibrate import fit_tree
from medusa_train.inference.generate import Decoder
from medusa_train.losses.objective import Objective
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.training import acceptance, heldout
from medusa_train.training.precision import Precision
from medusa_train.training.student import Student

PRECISION = Precision(torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def backbone(backbone_dir):
    return Backbone.load(str(backbone_dir))


def random_batches():
    torch.manual_seed(3)
    batches = []
    for rows, length in ((2, 12), (3, 7)):
        tokens = torch.randint(0, 300, (rows, length))
        labels = torch.where(torch.rand(rows, length) < 0.6, tokens, IGNORE)
        segments = torch.zeros_like(tokens)
        segments[0, -2:] = -1
        labels[0, -2:] = IGNORE
        positions = torch.arange(length).repeat(rows, 1)
        batches.append(Batch(tokens, labels, positions, segments, ["a"] * rows))
    return batches


@pytest.mark.parametrize("rows", [2, 512])
def test_figures_match_the_plain_formula(backbone, monkeypatch, rows):
    monkeypatch.setattr(heldout, "ROWS", rows)
    draft = MedusaDraft.from_backbone(backbone, 2)
    with torch.no_grad():
        draft.blocks[1][0].linear.bias.normal_()
    found = heldout.evaluate_held_out(Student(backbone, PRECISION), draft, random_batches(), Objective(draft, 0.8))
    losses, top3 = [], []
    for k in (1, 2):
        logits, wanted = [], []
        for batch in random_batches():
            target = shift(batch.labels, k, batch.segments)
            states = backbone.run(batch.tokens).hidden
            logits.append(draft.head_logits(states, k)[target != IGNORE].detach())
            wanted.append(target[target != IGNORE])
        logits, wanted = torch.cat(logits), torch.cat(wanted)
        assert found.targets[k - 1] == len(wanted)
        losses.append(float(cross_entropy(logits, wanted)))
        top3.append(float((logits.topk(3).indices == wanted[:, None]).any(1).float().mean()))
    assert found.head_loss == pytest.approx(losses, rel=1e-5)
    assert [shares[2] for shares in found.top] == pytest.approx(top3)
    assert found.loss == pytest.approx(0.8 * losses[0] + 0.64 * losses[1], rel=1e-5)
    assert found.objective == found.loss  # the backbone is frozen


def test_acceptance_length_is_that_of_decoding_the_same_text(backbone):
    """On the backbone's own greedy answers the tree would take as many steps as the loop takes with it."""
    draft = MedusaDraft.from_backbone(backbone, 2)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in draft.blocks.parameters():
            parameter.normal_(0, 0.05)
    prompts = [[0, 2, 10 + i, 3] for i in range(6)]
    batches = []
    for prompt in prompts:
        answer = Decoder(backbone).generate(prompt, 30, eos_ids=()).tokens
        tokens = torch.tensor([prompt + answer])
        labels = tokens.clone()
        labels[0, : len(prompt)] = IGNORE
        batches.append(Batch(tokens, labels, torch.arange(tokens.shape[1])[None], torch.zeros_like(tokens), ["a"]))
    found = heldout.evaluate_held_out(Student(backbone, PRECISION), draft, batches, Objective(draft, 0.8))
    halves = [[answers[0] for answers in found.conversations[half::2]] for half in (0, 1)]
    traces = [[acceptance._trace(ranks) for ranks in half] for half in halves]
    rates = []
    for half in (0, 1):
        tree = fit_tree(traces[half], traces[half], acceptance.NODES)
        made = [Decoder(backbone, draft, tree).generate(prompt, 30, eos_ids=()) for prompt in prompts[1 - half :: 2]]
        rates.append(sum(len(m.tokens) - 1 for m in made) / sum(m.steps for m in made))
    assert found.acceptance.length == pytest.approx(sum(rates) / 2)
    assert found.figures()["acceptance_length"] == found.acceptance.length


def test_ranks_and_shares_agree(backbone):
    draft = MedusaDraft.from_backbone(backbone, 1)
    batch = random_batches()[0]
    every = Batch(batch.tokens, batch.tokens, batch.positions, torch.zeros_like(batch.segments), ["a", "b"])
    found = heldout.evaluate_held_out(Student(backbone, PRECISION), draft, [every], Objective(draft, 0.8))
    ranks = torch.cat([answer[:-1, 0] for answers in found.conversations for answer in answers])
    assert len(ranks) == found.targets[0] == 20
    assert found.top[0] == pytest.approx([float(((ranks >= 0) & (ranks < n)).float().mean()) for n in range(1, 11)])


def test_nothing_to_predict_gives_zeros(backbone):
    draft = MedusaDraft.from_backbone(backbone, 2)
    batch = random_batches()[0]
    empty = Batch(batch.tokens, torch.full_like(batch.labels, IGNORE), batch.positions, batch.segments, ["a", "b"])
    found = heldout.evaluate_held_out(Student(backbone, PRECISION), draft, [empty], Objective(draft, 0.8))
    assert found.loss == 0.0
    assert found.targets == [0, 0]
    assert "acceptance_length" not in found.figures()


def test_a_stop_gives_up(backbone):
    draft = MedusaDraft.from_backbone(backbone, 1)
    student, objective = Student(backbone, PRECISION), Objective(draft, 0.8)
    assert heldout.evaluate_held_out(student, draft, random_batches(), objective, lambda: True) is None


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
def test_the_whole_objective(backbone, keys, wanted):
    objective = Objective(MedusaDraft.from_backbone(backbone, 1), 0.8, **keys)
    assert heldout.whole_objective(objective, 2.0, ce=3.0, kl=0.5) == pytest.approx(wanted)
