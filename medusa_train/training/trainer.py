"""The training loop: micro-batches in, updated heads, figures and checkpoints out. Knows no configuration keys."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch
from torch import Tensor

from medusa_train.checkpoint.run_layout import TREE
from medusa_train.checkpoint.store import CheckpointStore
from medusa_train.data.dataset import Batch, BatchLoader
from medusa_train.errors import MedusaError
from medusa_train.losses.objective import LMSums, Objective, ObjectiveOutput
from medusa_train.metrics_log import MetricLoggers
from medusa_train.models.drafts.base import Draft
from medusa_train.models.precision import Precision
from medusa_train.training.backbone_recipe import BackboneRecipe
from medusa_train.training.distributed import SINGLE_PROCESS, World
from medusa_train.training.signals import StopRequest
from medusa_train.training.state import Plan, TrainState, Window, restore_weights, take_snapshot
from medusa_train.training.strategy import Strategy
from medusa_train.training.validation import ValidationResult, validate


class Outcome(Enum):
    """Why the loop ended."""

    FINISHED = "finished"
    EARLY = "stopped early"
    INTERRUPTED = "interrupted"


@dataclass
class Trainer:
    """One run, as one of its processes sees it.

    Attributes:
        recipe, draft, objective: the backbone as it is run and perhaps trained, the heads, and what they minimise.
        strategy: holds gradients, optimizer and schedule.
        loader: this process's training micro-batches without end, whose place can be saved.
        validation_batches: makes the held-out batches, the whole set once; None where nothing is held out.
        accumulation: micro-batches per optimizer step, in this process.
        patience: evaluations without a better loss before the run ends early; None: never.
        state: where the run stands; a resumed run brings its own.
        last_validation: what the last held-out evaluation of this process found.
        top_k_in_log: whether training records carry top-1..top-10 per head, measured on the last micro-batch.
        max_nonfinite_steps: steps without a finite loss and gradient that may be skipped, over the whole run.
        world: the processes that take part; a step is the same however many they are.
    """

    recipe: BackboneRecipe
    draft: Draft
    objective: Objective
    strategy: Strategy
    loader: BatchLoader
    validation_batches: Callable[[], Iterable[Batch]] | None
    accumulation: int
    precision: Precision
    plan: Plan
    store: CheckpointStore
    loggers: MetricLoggers
    patience: int | None
    state: TrainState
    top_k_in_log: bool = False
    last_validation: ValidationResult | None = None
    max_nonfinite_steps: int = 0
    world: World = SINGLE_PROCESS

    def run(self, stop: StopRequest) -> Outcome:
        """Train up to the plan's last step, or until `stop` or too many evaluations without progress.

        Every way out but an exception leaves a checkpoint of the last finished step, and one of the best evaluated.

        Raises:
            NonFiniteLossError: where no more steps may be skipped; with the step, the records in it and the last good
                checkpoint.
        """
        state, plan = self.state, self.plan
        # an evaluation is missing where the run was stopped after this step and before it
        if state.step and plan.evaluates(state.step) and state.evaluated != state.step and self._evaluate(stop):
            self._save()
        batches = iter(self.loader)
        self.recipe.train()
        self.draft.train()
        while state.step < plan.total_steps and not self._out_of_patience():
            last = self._train_step(batches)
            self.loggers.advance(state.step)
            if plan.logs(state.step):
                self._log(last)
            best = plan.evaluates(state.step) and self._evaluate(stop)
            stopping = self.world.any(bool(stop))  # a signal may have reached only one of the processes
            if stopping or best or self._out_of_patience() or plan.saves(state.step):
                self._save()
            if stopping:
                return Outcome.INTERRUPTED
        return Outcome.EARLY if self._out_of_patience() else Outcome.FINISHED

    def evaluate(self, batches: Iterable[Batch], stop: Callable[[], bool] = lambda: False) -> ValidationResult | None:
        """Measure the heads as they are now on `batches`; None when `stop` said so, in whichever process."""

        def anywhere() -> bool:
            return self.world.any(stop())

        return self.strategy.with_gathered_params(
            lambda: validate(self.recipe, self.draft, batches, self.objective, anywhere, self.world)
        )

    def take_best(self) -> int:
        """Go back to the weights of the best evaluation; optimizer, counters and the place in the data stay.

        Returns:
            Their step; that of the last one, whose weights stay, where the best one's checkpoint is gone (this run
            went on from another's directory, or a user removed it).

        Raises:
            CheckpointError: that checkpoint is damaged.
        """
        path = self.store.at(self.state.best_step)
        if path is None:
            return self.state.step
        with self.strategy.gathered_params(modify=True):
            restore_weights(self.store.load(path), self.draft, self.recipe, str(path))
        self.last_validation = None
        return self.state.best_step

    def _train_step(self, batches: Iterator[Batch]) -> Batch:
        """Run one optimizer step; return its last micro-batch.

        Valid targets are counted over all micro-batches of all processes before any loss is divided, so a step's loss
        is the mean over its targets however they fall into micro-batches and processes.
        """
        started = time.perf_counter()
        micro = [next(batches).to(self.recipe.backbone.device) for _ in range(self.accumulation)]
        counts = self.world.sum(torch.stack([self.objective.counts(batch) for batch in micro]).sum(dim=0))
        done = [self._micro_step(batch, counts) for batch in micro]
        sums = StepSums.of(self.world.sum(torch.stack([part.row() for part in done]).sum(dim=0)))
        self.state.window.lr = self.strategy.lr
        norm = self.strategy.step() if math.isfinite(sums.loss) else math.nan
        if math.isfinite(sums.loss) and self.strategy.found_inf:
            self.strategy.skip()
            self.state.window.overscaled += 1
            norm = 0.0
        seconds = time.perf_counter() - started
        if math.isfinite(norm):
            self._advance(sums.tokens, seconds)
            self._note(sums, norm, seconds)
        else:
            self._skip(done, sums, seconds)
        return micro[-1]

    def _micro_step(self, batch: Batch, counts: Tensor) -> MicroStep:
        outputs: list[ObjectiveOutput] = []

        def share() -> Tensor:
            outputs.append(self._compare(batch, counts))
            return outputs[0].loss

        self.strategy.backward(self.strategy.forward(share))
        out = outputs[0]
        tokens = int((batch.segments >= 0).sum())
        hits = (out.head_correct, out.head_counts, out.head_known)
        return MicroStep(batch.records, out.loss.detach(), *hits, tokens, out.lm)

    def _compare(self, batch: Batch, counts: Tensor) -> ObjectiveOutput:
        """Run backbone, teacher and heads on one micro-batch; `counts` are the targets of the global batch."""
        feats = self.recipe.features(batch, self.draft.needs)
        teacher = self.recipe.teacher(batch, feats) if self.objective.needs_teacher else (None, None)
        with self.precision.autocast():
            return self.objective.loss(
                feats,
                batch,
                counts,
                progress=self.state.step / self.plan.total_steps,
                student_unembedding=self.recipe.unembedding() if self.recipe.joint else None,
                teacher=teacher[0],
                teacher_unembedding=teacher[1],
            )

    def _advance(self, tokens: int, seconds: float) -> None:
        """Count one step."""
        self.state.step += 1
        self.state.epoch = self.plan.epoch(self.state.step)
        self.state.tokens += tokens
        self.state.seconds += seconds

    def _note(self, sums: StepSums, norm: float, seconds: float) -> None:
        """Add a step to the figures of the next log line."""
        window = self.state.window
        window.steps += 1
        window.loss += sums.loss
        window.grad_norm += norm
        window.tokens += sums.tokens
        window.seconds += seconds
        window.add_heads(sums.correct, sums.counts, sums.known)
        window.add_lm(sums.lm_ce, sums.lm_kl, sums.lm_count)

    def _skip(self, done: list[MicroStep], sums: StepSums, seconds: float) -> None:
        """Pass over a step whose loss or gradient is not finite; it counts as a step, so that data, schedules and
        plan stay where they would be.

        Raises:
            NonFiniteLossError: no more of them may be skipped.
        """
        state, whole = self.state, math.isfinite(sums.loss)
        blamed = [part for part in done if whole or not math.isfinite(float(part.loss))]
        records = self.world.gather([record for part in blamed for record in part.records])
        bad = NonFiniteStep(state.step + 1, sums.loss, [record for part in records for record in part])
        if state.skipped >= self.max_nonfinite_steps:
            raise self.world.error_on_main(bad.error(state.skipped, self.store.latest()))
        self.strategy.skip()
        self._advance(sums.tokens, seconds)
        state.skipped += 1
        counts = {"skipped_steps": state.skipped, "max_nonfinite_steps": self.max_nonfinite_steps}
        self.loggers.log("skipped", state.step, {"reason": bad.reason, "records": bad.records, **counts})

    def _log(self, last: Batch) -> None:
        """Hand out the means over the steps since the last log line, and begin the next window."""
        window, self.state.window = self.state.window, Window()
        if not window.steps:  # all of them were skipped
            return
        figures = {
            "epoch": round(self.state.epoch, 4),
            "loss": window.loss / window.steps,
            "head_top1": window.top1(),
            "grad_norm": window.grad_norm / max(window.steps - window.overscaled, 1),
            "lr": window.lr,
            "tokens_per_s": window.tokens / max(window.seconds, 1e-9),
            "tokens": self.state.tokens,
            **window.lm(),
            **window.outside(),
            **({"overscaled_steps": window.overscaled} if window.overscaled else {}),
            **({"skipped_steps": self.state.skipped} if self.state.skipped else {}),
        }
        if self.top_k_in_log and (seen := self.evaluate([last])) is not None:
            figures["head_top"] = seen.top
        self.loggers.log("train", self.state.step, figures)

    def _evaluate(self, stop: StopRequest) -> bool:
        """Measure on the held-out set, if there is one; whether this is the best evaluation so far."""
        found = (
            None if self.validation_batches is None else self.evaluate(self.validation_batches(), lambda: bool(stop))
        )
        if found is None:
            return False
        self.last_validation = found
        best = self.state.note_eval(found.objective)
        if not self.world.is_main:
            return best
        if found.acceptance is not None:
            self.state.tree = found.acceptance.record(self.state.step)
        self.loggers.log("eval", self.state.step, {**found.figures(), "best": best})
        return best

    def _out_of_patience(self) -> bool:
        return self.patience is not None and self.state.evals_since_best >= self.patience

    def _save(self) -> None:
        self.state.data = self.loader.state_dict()
        beside = {} if self.state.tree is None else {TREE: self.state.tree}
        with self.strategy.gathered_params():
            snapshot = take_snapshot(self.draft, self.recipe, self.strategy, self.state, self.world)
            self.world.run_on_main(
                lambda: self.store.save(self.state.step, snapshot, keep={self.state.best_step}, beside=beside)
            )


@dataclass
class MicroStep:
    """What is kept of one micro-batch once its gradients are added."""

    records: list[str]
    loss: Tensor  # scalar, this micro-batch's share
    correct: Tensor  # long [K]
    counts: Tensor  # long [K]
    known: Tensor  # long [K]
    tokens: int
    lm: LMSums | None  # of the backbone's own loss, where it learns

    def row(self) -> Tensor:
        """All numbers in one row, float64 on the CPU, to be added up; `StepSums.of` takes the sum apart."""
        lm = [0.0, 0.0, 0.0] if self.lm is None else [float(self.lm.ce), float(self.lm.kl), float(self.lm.count)]
        heads = [*self.correct.tolist(), *self.counts.tolist(), *self.known.tolist()]
        return torch.tensor([float(self.loss), self.tokens, *lm, *heads], dtype=torch.float64)


@dataclass(frozen=True)
class StepSums:
    """Sums over one global batch: all micro-batches of all processes.

    Attributes:
        loss: the step's. tokens: read.
        lm_ce, lm_kl, lm_count: the backbone's own sums in nats, and its targets; 0 where it is frozen.
        correct, counts, known: top-1 hits, valid targets, and those of them in the head's vocabulary, per head.
    """

    loss: float
    tokens: int
    lm_ce: float
    lm_kl: float
    lm_count: int
    correct: list[int]
    counts: list[int]
    known: list[int]

    @classmethod
    def of(cls, row: Tensor) -> StepSums:
        """Take apart a sum of `MicroStep.row`."""
        loss, tokens, ce, kl, targets, *rest = row.tolist()
        heads = [int(number) for number in rest]
        count = len(heads) // 3
        parts = (heads[start : start + count] for start in (0, count, 2 * count))
        return cls(loss, int(tokens), ce, kl, int(targets), *parts)


class NonFiniteLossError(MedusaError):
    """The loss or the gradient is NaN or infinite; going on would only spread it."""


@dataclass(frozen=True)
class NonFiniteStep:
    """A step that must not change anything.

    Attributes:
        step: its number. loss: of the whole step.
        records: where the loss is not finite those of the micro-batches to blame, else all of the step.
    """

    step: int
    loss: float
    records: list[str]

    @property
    def reason(self) -> str:
        """What was not finite."""
        return f"the loss is {self.loss}" + (", its gradient is not finite" if math.isfinite(self.loss) else "")

    def error(self, skipped: int, good: Path | None) -> NonFiniteLossError:
        """Say why the run ends here.

        Args:
            skipped: steps of this kind that were skipped before it.
            good: the last checkpoint.
        """
        where = f"The last good checkpoint is {good}." if good else "There is no checkpoint yet."
        before = f" ({skipped} like it were skipped before, which is all that max_nonfinite_steps allows)"
        return NonFiniteLossError(
            f"step {self.step}: {self.reason}; the heads were left as they were before it{before if skipped else ''}.\n"
            f"Records in it: {', '.join(self.records)}.\n{where}\n"
            "Look at these records; if they are sound, lower learning_rate, or set bf16: false. "
            "max_nonfinite_steps lets so many such steps of a run be skipped."
        )
