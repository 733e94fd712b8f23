"""The training loop: batch -> hidden states -> loss -> backward -> clip -> step -> log, with
evaluations and checkpoints.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from medusa_train.checkpoint.store import WEIGHTS, CheckpointStore
from medusa_train.config.schema import TrainConfig
from medusa_train.data.batch import Batch
from medusa_train.data.dataset import BatchLoader
from medusa_train.errors import MedusaError
from medusa_train.losses.graph_cut import GraphCut
from medusa_train.losses.objective import Objective, ObjectiveOutput
from medusa_train.metrics_log import MetricLoggers
from medusa_train.models.drafts.base import Draft
from medusa_train.models.precision import return_free_memory
from medusa_train.progress import Phase, RunProgress
from medusa_train.training.distributed import DistributedContext
from medusa_train.training.optimizer import Strategy
from medusa_train.training.schedule import TrainingSchedule
from medusa_train.training.snapshot import (
    LoadedCheckpoint,
    TrainState,
    load_snapshot,
    restore_weights,
    take_snapshot,
    take_weights,
)
from medusa_train.training.step_metrics import Window, metrics_row
from medusa_train.training.stop_signals import StopRequest
from medusa_train.training.target_model_recipe import TargetModelRecipe
from medusa_train.training.validation import ValidationResult, validate

#: Number of steps over which the time of a step is measured.
TIMED_STEPS = 20


@dataclass
class Trainer:
    """The training loop of one process.

    Attributes:
        recipe: the target model, and which part of it is trained.
        draft: the heads that are trained.
        objective: the loss.
        strategy: computes and applies gradients.
        loader: endless iterable of this process's training micro-batches; its position is saved in
            checkpoints.
        validation_batches: returns one pass over the validation set; None if there is no such set.
        schedule: when to log, evaluate, save and end.
        store: the run's checkpoints.
        loggers: where metrics are written.
        state: counters of the run; restored from the checkpoint when resuming.
        distributed: the processes that train together.
        progress: progress display.
        last_validation: result of the last evaluation.
        parent_run_dir: if this is stage one, the directory of its two-stage run.
    """

    cfg: TrainConfig
    recipe: TargetModelRecipe
    draft: Draft
    objective: Objective
    strategy: Strategy
    loader: BatchLoader
    validation_batches: Callable[[], Iterable[Batch]] | None
    schedule: TrainingSchedule
    store: CheckpointStore
    loggers: MetricLoggers
    state: TrainState
    distributed: DistributedContext
    progress: RunProgress
    last_validation: ValidationResult | None = None
    parent_run_dir: Path | None = None

    def __post_init__(self) -> None:
        self._resumable_best = self.state.best_step

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        return self.store.root.parent

    @property
    def out_of_patience(self) -> bool:
        """Whether early stopping ends the run."""
        patience = self.cfg.early_stopping_patience
        return patience is not None and self.state.evals_since_best >= patience

    def run(
        self, stop: StopRequest, on_timed: Callable[[float], None] = lambda seconds: None
    ) -> bool:
        """Train until the schedule's last step, a request to stop, or early stopping.

        On return, the last finished step has a checkpoint, and the weights of the best evaluation
        are saved. This does not hold if an exception is raised.

        Args:
            stop: true after a request to stop.
            on_timed: called after `TIMED_STEPS` steps with the mean seconds per step.

        Returns:
            Whether any process was asked to stop.

        Raises:
            CheckpointError: a checkpoint could not be written.
            NonFiniteLossError: the loss or gradient is NaN/Inf and `max_nonfinite_steps` steps were
                already skipped.
        """
        state = self.state
        schedule = self.schedule
        # 1. If the run was stopped during the evaluation of its last step, resume with it.
        if state.step and schedule.evaluates(state.step) and state.evaluated != state.step:
            if self._evaluate_and_log(stop):
                self._save_checkpoint()
            if self.distributed.any(bool(stop)):
                return True
        # 2. Train, evaluate and save.
        batches = iter(self.loader)
        self.recipe.train()
        self.draft.train()
        first_step = state.step + 1
        seconds_after_first = 0.0  # the first step is slower, because it allocates memory
        while state.step < schedule.total_steps and not self.out_of_patience:
            self.train_step(batches)
            if state.step == first_step:
                seconds_after_first = state.seconds
            if state.step == first_step + TIMED_STEPS - 1:
                on_timed((state.seconds - seconds_after_first) / (TIMED_STEPS - 1))
            is_best = schedule.evaluates(state.step) and self._evaluate_and_log(stop)
            # the signal may have reached only one of the processes
            stopping = self.distributed.any(bool(stop))
            if stopping or self.out_of_patience or schedule.saves(state.step):
                self._save_checkpoint()
            elif is_best:
                self._save_best()
            if stopping:
                break
        # a signal may have arrived while the last checkpoint was written
        return self.distributed.any(bool(stop))

    def train_step(self, batches: Iterator[Batch]) -> None:
        """Run one optimizer step over `gradient_accumulation_steps` micro-batches of every process.

        Each loss is divided by the number of valid targets in the global batch. So the step's loss
        is the mean over its targets, however they are split into micro-batches and processes.

        No `.backward()` is called here: `loss_and_gradients` adds the gradients of each term of the
        loss to `.grad` right after the value of that term. (With DeepSpeed, `forward_backward` runs
        one backward pass over the sum instead.)
        """
        state = self.state
        strategy = self.strategy
        started = time.perf_counter()

        # 1. Load the micro-batches, and count the targets of the global batch.
        device = self.recipe.target_model.device
        accumulation = self.cfg.gradient_accumulation_steps
        micro_batches = [next(batches).to(device) for _ in range(accumulation)]
        counts = torch.stack([self.objective.target_counts(batch) for batch in micro_batches])
        counts = self.distributed.sum(counts.sum(dim=0))

        # 2. Compute hidden states, loss and backward pass.
        rows = []
        for batch in micro_batches:
            output = strategy.forward_backward(self.loss_and_gradients, batch, counts)
            rows.append(metrics_row(batch, output))
        sums = self.distributed.sum(torch.stack(rows).sum(dim=0)).tolist()
        loss, tokens = sums[:2]

        # 3. Clip the gradients and step the optimizer, unless something is NaN/Inf.
        state.window.lr = strategy.lr
        norm, was_overscaled = math.nan, False
        if math.isfinite(loss):
            norm, was_overscaled = strategy.step()
        if was_overscaled:  # the loss scale is now halved
            strategy.skip()
            state.window.overscaled += 1
            norm = 0.0
        elif not math.isfinite(norm):  # aborts after `max_nonfinite_steps` skips
            self._skip_step(loss, micro_batches, rows)

        # 4. Count the step and log it.
        seconds = time.perf_counter() - started
        state.step += 1
        state.epoch = self.schedule.epoch(state.step)
        state.tokens += int(tokens)
        state.seconds += seconds
        if math.isfinite(norm):
            state.window.add(sums, norm, seconds)
        self.loggers.advance(state.step)
        if self.schedule.logs(state.step):
            self._log(micro_batches[-1])

    def loss_and_gradients(
        self, batch: Batch, counts: Tensor, grad_scale: float | None = None
    ) -> ObjectiveOutput:
        """Compute the loss of one micro-batch, and its gradients if `grad_scale` is given: run
        target model, teacher and heads. For `counts` and `grad_scale` see
        `Objective.loss_and_gradients`.
        """
        # 1. Run the target model, and the teacher if the loss needs it.
        hidden_states = self.recipe.hidden_states(batch, self.draft.aux_layers)
        teacher = None
        if self.objective.needs_teacher:
            teacher = self.recipe.teacher(batch, hidden_states)
        # 2. Compute the losses. With `grad_scale` each term runs its own backward pass, which stops
        # at the target model's states.
        cut = GraphCut()
        if grad_scale is not None:
            hidden_states = replace(hidden_states, final=cut.detach(hidden_states.final))
        with self.recipe.precision.autocast():
            output = self.objective.loss_and_gradients(
                hidden_states,
                batch,
                counts,
                progress=self.state.step / self.schedule.total_steps,
                lm_head=self.recipe.target_model.lm_head(),
                teacher=teacher,
                grad_scale=grad_scale,
            )
        # 3. Propagate the sum of these gradients through the target model, once.
        cut.backward()
        return output

    def evaluate(
        self, batches: Iterable[Batch], stop: Callable[[], bool] = lambda: False
    ) -> ValidationResult | None:
        """Evaluate the heads on `batches`; None if `stop` returned True in any process."""
        with self.progress.phase("validation", unit="batches", inline=True) as phase:
            counted = _counted(batches, phase)
            return self.strategy.with_gathered_params(
                validate, self.recipe, self.draft, counted, self.objective, stop, self.distributed
            )

    def restore_best(self) -> int:
        """Load only the weights of the best evaluation's checkpoint; return the step of the
        weights.

        If that checkpoint no longer exists (deleted, or in another directory), keep the current
        weights and return the current step.
        """
        path = self.distributed.run_on_main(self.store.best, self.state.best_step)
        if path is None:
            return self.state.step
        snapshot = load_snapshot(self.store, path, self.distributed, WEIGHTS)
        checkpoint = LoadedCheckpoint(path, snapshot)
        restore_weights(checkpoint, self.draft, self.recipe, self.distributed)
        self.last_validation = None
        return self.state.best_step

    def _evaluate_and_log(self, stop: StopRequest) -> bool:
        """Evaluate on the validation set if there is one, and log the result; return whether the
        objective is the lowest so far.
        """
        if self.validation_batches is None:
            return False
        result = self.evaluate(self.validation_batches(), lambda: bool(stop))
        if result is None:
            return False
        self.last_validation = result
        is_best = self.state.record_eval(result.objective)
        if self.distributed.is_main:
            record = result.record()
            record["best"] = is_best
            self.loggers.log("eval", self.state.step, record)
        if not math.isfinite(result.objective):
            patience = ""
            if (allowed := self.cfg.early_stopping_patience) is not None:
                count = self.state.evals_since_best
                patience = f" ({count} of early_stopping_patience {allowed})"
            self.progress.print(
                f"warning: the held-out loss at step {self.state.step} is {result.objective}: this"
                f" evaluation counts as one without improvement{patience}. Check the held-out"
                " records, or lower learning_rate",
                style="yellow",
            )
        return is_best

    def _log(self, last_batch: Batch) -> None:
        """Log the means since the last log line and start the next window."""
        return_free_memory()
        window = self.state.window
        self.state.window = Window()
        if not window.steps:  # all steps were skipped
            return
        record = {
            "epoch": round(self.state.epoch, 4),
            **window.means(),
            "tokens": self.state.tokens,
        }
        if not self.objective.teacher_weight:
            record.pop("lm_kl", None)
        if self.state.skipped:
            record["skipped_steps"] = self.state.skipped
        if self.cfg.medusa_logging:
            result = self.evaluate([last_batch])
            if result is not None:
                record["head_top"] = result.top
        self.loggers.log("train", self.state.step, record)

    def _save_checkpoint(self) -> None:
        """Save the run's state."""
        state = self.state
        state.data = self.loader.state_dict()
        with self.progress.phase("checkpoints", inline=True, ticking=True):
            snapshot = take_snapshot(
                self.draft, self.recipe, self.strategy, state, self.distributed
            )
            self.distributed.run_on_main(self.store.save, state.step, snapshot, state.best_step)
        self._resumable_best = state.best_step

    def _save_best(self) -> None:
        """Save the weights of the best evaluation. Keep the weights that were best at the last
        checkpoint, because resuming from it needs them.
        """
        with self.progress.phase("checkpoints", inline=True, ticking=True):
            weights = take_weights(self.draft, self.recipe, self.distributed)
            self.distributed.run_on_main(
                self.store.save_best, self.state.step, weights, {self._resumable_best}
            )

    def _skip_step(self, loss: float, batches: Sequence[Batch], rows: Sequence[Tensor]) -> None:
        """Skip the update of a step with a NaN/Inf loss or gradient; it still counts as a step of
        the schedule.

        The log lists the records of the micro-batches with a NaN/Inf loss, or the records of all
        micro-batches if only the gradient is NaN/Inf.
        """
        # 1. Collect the reason, and the records from all processes.
        reason = f"the loss is {loss}"
        if math.isfinite(loss):
            reason += ", its gradient is not finite"
        own_records: list[str] = []
        for batch, row in zip(batches, rows, strict=True):
            if math.isfinite(loss) or not math.isfinite(row[0]):
                own_records += batch.records
        records = list(itertools.chain.from_iterable(self.distributed.gather(own_records)))
        # 2. Abort, or skip the step.
        state = self.state
        step = state.step + 1
        if state.skipped >= self.cfg.max_nonfinite_steps:
            where = "There is no checkpoint yet."
            if checkpoint := self.store.latest():
                where = f"The last good checkpoint is {checkpoint}."
            before = ""
            if state.skipped:
                before = f" (max_nonfinite_steps: {state.skipped} were skipped before)"
            error = NonFiniteLossError(
                f"step {step}: {reason}{before}.\n"
                f"Records in this step: {', '.join(records)}.\n{where}\n"
                "Check these records; if they are fine, lower learning_rate or set bf16: false. "
                "max_nonfinite_steps sets how many NaN/Inf steps a run may skip."
            )
            raise self.distributed.error_on_main(error)
        self.strategy.skip()
        state.skipped += 1
        record = {
            "reason": reason,
            "records": records,
            "skipped_steps": state.skipped,
            "max_nonfinite_steps": self.cfg.max_nonfinite_steps,
        }
        self.loggers.log("skipped", step, record)


def _counted(batches: Iterable[Batch], phase: Phase) -> Iterator[Batch]:
    """Yield `batches` and count them in `phase`."""
    for batch in batches:
        yield batch
        phase.advance()


class NonFiniteLossError(MedusaError):
    """The loss or the gradient is NaN or infinite."""
