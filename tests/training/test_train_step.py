"""One training step against a plain loop: its loss is a mean over the step, its weights those of
its progress.
"""

from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from medusa_train.data.batch import IGNORE_INDEX, Batch
from medusa_train.losses.objective import Objective
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.models.loading import load_target_model
from medusa_train.models.precision import choose_precision
from medusa_train.models.target_model import TargetModel
from medusa_train.progress import RunProgress
from medusa_train.training.distributed import SINGLE_PROCESS
from medusa_train.training.optimizer import LocalStrategy
from medusa_train.training.schedule import TrainingSchedule
from medusa_train.training.snapshot import TrainState
from medusa_train.training.target_model_recipe import build_target_model_recipe
from medusa_train.training.trainer import Trainer

HEADS, DECAY, LAMBDA0 = 2, 0.5, 0.3
ROWS, LENGTH, VOCAB = 2, 12, 300


def micro_batch(seed: int, supervised: int) -> Batch:
    """Random tokens of which the last `supervised` of each row are targets."""
    tokens = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))
    labels = torch.full_like(tokens, IGNORE_INDEX)
    labels[:, LENGTH - supervised :] = tokens[:, LENGTH - supervised :]
    positions = torch.arange(LENGTH).expand(ROWS, LENGTH)
    return Batch(tokens, labels, positions, torch.zeros_like(tokens), ["a"] * ROWS)


def plain_means(
    draft: MedusaDraft, target_model: TargetModel, batches: list[Batch]
) -> list[Tensor]:
    """The mean loss of the language model and of each head, over all targets of `batches`.

    Predictor k (0: the language model) at position t predicts the label at t + k + 1.
    """
    sums = [torch.zeros(()) for _ in range(HEADS + 1)]
    counts = [0] * (HEADS + 1)
    for batch in batches:
        hidden = target_model.model.model(batch.tokens).last_hidden_state  # [B, T, d]
        states = [hidden, *draft.head_states(features(hidden), batch)]
        for k, state in enumerate(states):
            head = target_model.lm_head() if k == 0 else draft.lm_head(k)
            for row in range(ROWS):
                for t in range(LENGTH - k - 1):
                    label = batch.labels[row, t + k + 1]
                    if label == IGNORE_INDEX:
                        continue
                    logits = state[row, t] @ head.weight.t()  # [V]
                    sums[k] = sums[k] + cross_entropy(logits, label)
                    counts[k] += 1
    return [total / count for total, count in zip(sums, counts, strict=True)]


def features(hidden: Tensor) -> Any:
    """What Medusa's heads read."""
    return type("HiddenStates", (), {"final": hidden})()


@pytest.fixture
def build(make_config, target_model_dir):
    """Build a trainer of two Medusa heads whose step leaves its gradients where they are."""

    def build(**objective: Any) -> tuple[Trainer, MedusaDraft, TargetModel]:
        joint = "lm" in objective
        cfg = make_config(recipe="medusa2" if joint else "medusa1")
        target_model = load_target_model(str(target_model_dir))
        draft = MedusaDraft.from_target_model(target_model, HEADS, dtype=torch.float32)
        recipe = build_target_model_recipe(
            cfg, target_model, choose_precision(False, torch.device("cpu"))
        )
        parameters = [*draft.parameters(), *recipe.parameters.values()]
        optimizer = torch.optim.SGD(parameters, lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        trainer = Trainer(
            cfg=cfg,
            recipe=recipe,
            draft=draft,
            objective=Objective(draft, DECAY, **objective),
            strategy=LocalStrategy(optimizer, scheduler, 0.0, None),
            loader=None,  # type: ignore[arg-type]  # train_step is given its batches
            validation_batches=None,
            schedule=TrainingSchedule(total_steps=8, steps_per_epoch=8, logging_steps=100),
            store=None,  # type: ignore[arg-type]  # nothing is saved
            loggers=Silent(),  # type: ignore[arg-type]
            state=TrainState(),
            distributed=SINGLE_PROCESS,
            progress=RunProgress(Console(quiet=True)),
        )
        return trainer, draft, target_model

    return build


class Silent:
    """Loggers that log nothing."""

    def advance(self, step: int) -> None:
        """Ignore the step."""


def moved(parameter: nn.Parameter, before: Tensor) -> Tensor:
    """The gradient of a step of SGD with a learning rate of 1."""
    return before - parameter.detach()


@pytest.mark.parametrize("joint", [False, True], ids=["medusa1", "medusa2"])
def test_targets_count_over_the_step_not_per_micro_batch(build, joint):
    """Micro-batches of 10 and 3 targets a row: the mean of their means is another one."""
    keys = {"lm": "ce", "heads_coefficient": LAMBDA0} if joint else {}
    trainer, draft, target_model = build(**keys)
    batches = [micro_batch(seed=1, supervised=10), micro_batch(seed=2, supervised=3)]
    lm, *heads = plain_means(draft, target_model, batches)
    wanted = sum(DECAY**k * mean for k, mean in enumerate(heads, start=1))
    if joint:
        wanted = lm + LAMBDA0 * wanted
    parameters = list(draft.parameters())
    gradients = torch.autograd.grad(wanted, parameters)
    before = [parameter.detach().clone() for parameter in parameters]

    trainer.train_step(iter(batches))

    assert trainer.state.window.means()["loss"] == pytest.approx(wanted.item(), rel=1e-5)
    for parameter, start, gradient in zip(parameters, before, gradients, strict=True):
        torch.testing.assert_close(moved(parameter, start), gradient, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("step", [0, 2, 4, 6])
def test_lambda0_follows_the_steps_of_the_run(build, step):
    """A linear schedule of eight steps: the heads' loss has the weight step / 8 of its maximum."""
    trainer, draft, target_model = build(lm="ce", heads_coefficient=LAMBDA0, schedule="linear")
    trainer.state.step = step
    batches = [micro_batch(seed=3, supervised=6), micro_batch(seed=4, supervised=6)]
    lm, *heads = plain_means(draft, target_model, batches)
    weighted = sum(DECAY**k * mean for k, mean in enumerate(heads, start=1))
    wanted = lm + step / 8 * LAMBDA0 * weighted
    parameters = list(draft.parameters())
    gradients = torch.autograd.grad(wanted, parameters)
    before = [parameter.detach().clone() for parameter in parameters]

    trainer.train_step(iter(batches))

    assert trainer.state.window.means()["loss"] == pytest.approx(wanted.item(), rel=1e-5)
    for parameter, start, gradient in zip(parameters, before, gradients, strict=True):
        torch.testing.assert_close(moved(parameter, start), gradient, rtol=1e-3, atol=1e-6)
