"""Backward pass, gradient clipping, optimizer and schedule of a training step, in one process or through DeepSpeed."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from medusa_train.losses.objective import ObjectiveOutput

T = TypeVar("T")

#: Keys of a parameter group that keep this run's values when resuming; the others are restored.
_NOT_RESTORED = ("initial_lr", "weight_decay")
#: The entries of bitsandbytes' state that its paged optimizers keep in paged memory.
_MOMENTS = ("state1", "state2")


class Strategy(Protocol):
    """How a training step computes, reduces and applies gradients.

    The order is `forward_backward` for every micro-batch, then one `step` or `skip`. With several processes all of them
    call every method, in the same order.
    """

    @property
    def lr(self) -> float:
        """Learning rate of the next step (first parameter group)."""

    @property
    def partitioned(self) -> bool:
        """Whether no process holds all weights (see `models.partitioned`)."""

    @property
    def found_inf(self) -> bool:
        """Whether the last step's gradient overflowed float16 because of the loss scale, which was then halved."""

    def forward_backward(self, compute: Callable[..., ObjectiveOutput], *args: Any) -> ObjectiveOutput:
        """Compute the loss of one micro-batch, with all weights readable, and accumulate its gradients.

        Args:
            compute: called as `compute(*args)` for a differentiable loss, or as `compute(*args, grad_scale=factor)` for
                a loss whose gradients, times `factor`, it has accumulated itself.

        Returns:
            The output of `compute`; its loss has no graph.
        """

    def with_gathered_params(self, function: Callable[..., T], *args: Any) -> T:
        """Call `function(*args)`, which computes without gradients, with all weights readable."""

    def release(self, saved: Iterable[nn.Parameter]) -> None:
        """End training: remove all hooks and the optimizer's state.

        All weights are whole then; with `partitioned` only the parameters `saved`, in rank 0 and in CPU memory.
        """

    def step(self) -> float:
        """Clip the gradients, step optimizer and schedule, zero the gradients.

        Returns:
            The gradient norm before clipping. If it is not finite, neither weights nor schedule were changed.
        """

    def skip(self) -> None:
        """Skip a step: drop the gradients and step the schedule alone.

        Called after a `step` that returned NaN/Inf, or instead of it where the loss is NaN/Inf.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state of optimizer, schedule and loss scale, as nested dicts and lists of tensors and numbers."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`; learning rates, weight decay and schedule stay those of this run."""


class LocalStrategy:
    """Train in one process, on one device."""

    partitioned = False

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        scheduler: LambdaLR,
        max_grad_norm: float,
        loss_scale: LossScale | None = None,
    ) -> None:
        """Train `parameters`.

        Args:
            parameters: all trained parameters.
            optimizer, scheduler: over these parameters.
            max_grad_norm: 0 disables clipping.
            loss_scale: for float16.
        """
        self.parameters = list(parameters)
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.max_grad_norm = max_grad_norm if max_grad_norm > 0 else math.inf
        self.loss_scale = loss_scale
        self.found_inf = False

    @property
    def lr(self) -> float:
        """Learning rate of the next step (first parameter group)."""
        return float(self.optimizer.param_groups[0]["lr"])

    def forward_backward(self, compute: Callable[..., ObjectiveOutput], *args: Any) -> ObjectiveOutput:
        """Compute the loss of one micro-batch; gradients are accumulated term by term, while it is computed."""
        return compute(*args, grad_scale=1.0 if self.loss_scale is None else self.loss_scale.value)

    def with_gathered_params(self, function: Callable[..., T], *args: Any) -> T:
        """Call `function(*args)`."""
        return function(*args)

    def release(self, saved: Iterable[nn.Parameter]) -> None:
        """Drop the optimizer's state."""
        self.optimizer.state.clear()

    def step(self) -> float:
        """Clip, step optimizer and schedule, zero the gradients; return the norm before clipping."""
        if self.loss_scale is not None:
            for grad in [p.grad for p in self.parameters if p.grad is not None]:
                grad.div_(self.loss_scale.value)
        norm = float(nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm))
        if self.loss_scale is not None:
            self.found_inf = self.loss_scale.update(overflowed=not math.isfinite(norm))
        if math.isfinite(norm):
            self.optimizer.step()
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def skip(self) -> None:
        """Drop the gradients and step the schedule alone."""
        self.optimizer.zero_grad(set_to_none=True)
        skip_scheduler_step(self.scheduler)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of optimizer, schedule and loss scale; its tensors are the optimizer's."""
        return {"optimizer": self.optimizer.state_dict(), **schedule_state(self.scheduler, self.loss_scale)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`; learning rates, weight decay and schedule stay those of this run.

        A run resumed with another learning rate uses it, at the step of the schedule that was reached.
        """
        load_optimizer(self.optimizer, state["optimizer"])
        load_schedule_state(state, self.optimizer, self.scheduler, self.loss_scale)


@dataclass
class LossScale:
    """Dynamic loss scaling for float16, with the constants of torch's GradScaler.

    The loss is multiplied by `value` before the backward pass and the gradients are divided by it afterwards, so that
    small gradients do not underflow. If they overflow, the step is skipped and the scale halved. All values are powers
    of two, so scaling rounds nothing (Mixed Precision Training, arXiv 1710.03740, Loss scaling).

    Attributes:
        value: the factor. good: successful steps in a row with it.
    """

    WINDOW: ClassVar[int] = 2000

    value: float = 65536.0
    good: int = 0

    def update(self, overflowed: bool) -> bool:
        """Update the scale after a step.

        Returns:
            Whether an overflow was due to the scale, which is now lower. An overflow at scale 1 has another cause.
        """
        if overflowed:
            lowered = self.value > 1.0
            self.value, self.good = max(1.0, self.value / 2.0), 0
            return lowered
        self.good += 1
        if self.good == self.WINDOW:
            self.value, self.good = self.value * 2.0, 0
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return `value` and `good`."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self.value, self.good = float(state["value"]), int(state["good"])


def skip_scheduler_step(scheduler: LambdaLR) -> None:
    """Step the schedule without an optimizer step."""
    with warnings.catch_warnings():
        # torch warns about a schedule stepped before the optimizer; here the first optimizer step was skipped
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        scheduler.step()


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load an optimizer's `state_dict`, keeping this run's learning rates and weight decay."""
    kept = [{name: group[name] for name in _NOT_RESTORED} for group in optimizer.param_groups]
    if getattr(optimizer, "is_paged", False):
        _load_paged(optimizer, saved)
    else:
        optimizer.load_state_dict(saved)
    for group, values in zip(optimizer.param_groups, kept, strict=True):
        group.update(values)


def _load_paged(optimizer: Any, saved: dict[str, Any]) -> None:
    """Load the state of a paged optimizer of bitsandbytes, whose own loading leaves no moments paged.

    The moments are copied to buffers as the first step would create them: of a CPU and a GPU that share them, so that
    they need not fit into the GPU's memory.
    """
    rest: dict[Any, dict[str, Any]] = {}
    moments: dict[Any, dict[str, Tensor]] = {}
    for number, entry in saved["state"].items():
        flat = {name: value for name, value in entry.items() if not isinstance(value, dict)}
        for nested in (value for value in entry.values() if isinstance(value, dict)):  # bitsandbytes hides them in one
            flat.update(nested)
        moments[number] = {name: flat.pop(name) for name in _MOMENTS if name in flat}
        rest[number] = flat
    optimizer.load_state_dict({**saved, "state": rest})
    numbers = (number for group in saved["param_groups"] for number in group["params"])
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    for number, parameter in zip(numbers, parameters, strict=True):
        for name, value in moments.get(number, {}).items():
            buffer = optimizer.get_state_buffer(parameter, dtype=value.dtype)
            optimizer.state[parameter][name] = buffer.copy_(value)


def schedule_state(scheduler: LambdaLR, loss_scale: LossScale | None) -> dict[str, Any]:
    """Return the state of schedule and loss scale, saved beside the optimizer's."""
    state: dict[str, Any] = {"scheduler": {k: v for k, v in scheduler.state_dict().items() if k != "lr_lambdas"}}
    if loss_scale is not None:
        state["loss_scale"] = loss_scale.state_dict()
    return state


def load_schedule_state(
    state: dict[str, Any], optimizer: torch.optim.Optimizer, scheduler: LambdaLR, loss_scale: LossScale | None
) -> None:
    """Restore `schedule_state`: the step that was reached in this run's schedule, and the loss scale."""
    done = int(state["scheduler"]["last_epoch"])
    peaks = list(scheduler.base_lrs)
    rates = [peak * factor(done) for peak, factor in zip(peaks, scheduler.lr_lambdas, strict=True)]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    current = {"lr_lambdas": scheduler.state_dict()["lr_lambdas"], "base_lrs": peaks, "_last_lr": rates}
    scheduler.load_state_dict({**state["scheduler"], **current})
    if loss_scale is not None and "loss_scale" in state:  # absent if the checkpoint was trained in another precision
        loss_scale.load_state_dict(state["loss_scale"])
