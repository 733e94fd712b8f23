"""Parameter groups, optimizer and schedule, and the training step: gradient clipping and update.

`LocalStrategy` trains in one process, where computing a loss also accumulates its gradients.
`deepspeed_strategy` does the same with DeepSpeed.
"""

from __future__ import annotations

import importlib
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from medusa_train.losses.objective import ObjectiveOutput
from medusa_train.models.loading import bitsandbytes_unsupported_reason
from medusa_train.models.partitioned import full_shape

T = TypeVar("T")

#: Entries of bitsandbytes' state that its paged optimizers keep in paged memory.
_MOMENTS = ("state1", "state2")


class Strategy(ABC):
    """How a training step computes, reduces and applies gradients.

    Call `forward_backward` for every micro-batch, then `step` or `skip` once. If there are several
    processes, all of them must call every method, in the same order.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: LambdaLR,
        max_grad_norm: float,
        loss_scale: LossScale | None = None,
    ) -> None:
        """Train the optimizer's parameters.

        Args:
            max_grad_norm: 0 disables clipping.
            loss_scale: needed for float16.
        """
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.loss_scale = loss_scale
        self.parameters: list[nn.Parameter] = []
        for group in optimizer.param_groups:
            self.parameters += group["params"]
        self.max_grad_norm = max_grad_norm if max_grad_norm > 0 else math.inf

    @property
    def lr(self) -> float:
        """Learning rate of the next step (first parameter group)."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def partitioned(self) -> bool:
        """Whether no process holds all weights (see `models.partitioned`)."""
        return False

    @abstractmethod
    def forward_backward(
        self, compute: Callable[..., ObjectiveOutput], *args: Any
    ) -> ObjectiveOutput:
        """Compute the loss of one micro-batch, with all weights readable, and accumulate its
        gradients. The returned loss has no graph.

        Args:
            compute: `compute(*args)` returns a differentiable loss. `compute(*args, grad_scale=f)`
                also accumulates the gradients of that loss, times f.
        """

    def with_gathered_params(self, function: Callable[..., T], *args: Any) -> T:
        """Call `function(*args)` with all weights readable; it must not compute gradients."""
        return function(*args)

    def release(self, saved: Iterable[nn.Parameter]) -> None:
        """End training: remove all hooks and the optimizer's state.

        Afterwards every process holds all weights. Only if training was `partitioned`, rank 0 alone
        holds weights, those of the parameters in `saved`, in CPU memory.
        """
        self.optimizer.state.clear()

    def step(self) -> tuple[float, bool]:
        """Clip the gradients, step optimizer and schedule, and zero the gradients.

        Returns:
            The norm of the gradients before clipping, and whether they overflowed float16
            because of the loss scale, which is then halved. If the norm is NaN/Inf, neither weights
            nor schedule changed, and the caller must call `skip`.
        """
        norm = self._update()
        is_finite = math.isfinite(norm)
        was_overscaled = False
        if self.loss_scale is not None:
            was_overscaled = self.loss_scale.update(overflowed=not is_finite)
        if is_finite:
            self.scheduler.step()
        return norm, was_overscaled

    def skip(self) -> None:
        """Drop the gradients and step only the schedule. Call it instead of `step`, or after a
        `step` that did not apply the gradients.
        """
        self._drop_gradients()
        with warnings.catch_warnings():
            # if the first optimizer step is skipped, torch warns that the schedule is stepped
            # before the optimizer
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of optimizer, schedule and loss scale, as nested dicts and lists of
        tensors and numbers.
        """
        schedule = self.scheduler.state_dict()
        del schedule["lr_lambdas"]
        state = {"optimizer": self._optimizer_state(), "scheduler": schedule}
        if self.loss_scale is not None:
            state["loss_scale"] = asdict(self.loss_scale)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`, but keep the learning rates, weight decay and schedule of this
        run.

        A run that is resumed with another learning rate uses the new rate, from the reached step of
        the schedule on.

        Raises:
            ValueError: the state belongs to other parameters, or to another optimizer.
        """
        # 1. Restore the moments of the optimizer.
        self._load_optimizer(state["optimizer"])
        # 2. Restore the step of the schedule, with this run's learning rates.
        scheduler = self.scheduler
        steps_done = int(state["scheduler"]["last_epoch"])
        factors = [factor(steps_done) for factor in scheduler.lr_lambdas]
        rates = [peak * by for peak, by in zip(scheduler.base_lrs, factors, strict=True)]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        current = {"base_lrs": scheduler.base_lrs, "_last_lr": rates}
        current["lr_lambdas"] = scheduler.state_dict()["lr_lambdas"]
        scheduler.load_state_dict({**state["scheduler"], **current})
        # 3. Restore the loss scale, which is absent if the run was trained in another precision.
        if self.loss_scale is not None and "loss_scale" in state:
            self.loss_scale = LossScale(**state["loss_scale"])

    @abstractmethod
    def _update(self) -> float:
        """Clip, step the optimizer if the norm is finite, and zero the gradients; return the norm
        before clipping.
        """

    def _clip(self) -> float:
        """Divide this process's gradients by the loss scale and clip them; return their norm before
        clipping.
        """
        if self.loss_scale is not None:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(self.loss_scale.value)
        return float(nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm))

    @abstractmethod
    def _drop_gradients(self) -> None:
        """Zero the gradients."""

    def _optimizer_state(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def _load_optimizer(self, saved: dict[str, Any]) -> None:
        """Load the moments of an optimizer's `state_dict`. Weight decay, betas and the like keep the
        values of this run, and the caller sets the learning rates.
        """
        optimizer = self.optimizer
        entry = next(iter(saved["state"].values()), None)
        if entry and ("exp_avg" in entry) != isinstance(optimizer, torch.optim.AdamW):
            raise ValueError("the state of another optimizer")
        groups = optimizer.param_groups
        if getattr(optimizer, "is_paged", False):
            _load_paged(optimizer, saved)
        else:
            optimizer.load_state_dict(saved)
        optimizer.param_groups = groups


class LocalStrategy(Strategy):
    """Train in one process, on one device."""

    def forward_backward(
        self, compute: Callable[..., ObjectiveOutput], *args: Any
    ) -> ObjectiveOutput:
        """Compute the loss of one micro-batch; `compute` accumulates the gradients of each loss
        term right after its value.
        """
        grad_scale = 1.0
        if self.loss_scale is not None:
            grad_scale = self.loss_scale.value
        return compute(*args, grad_scale=grad_scale)

    def _update(self) -> float:
        norm = self._clip()
        if math.isfinite(norm):
            self.optimizer.step()
        self._drop_gradients()
        return norm

    def _drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)


@dataclass
class LossScale:
    """Dynamic loss scaling for float16, with the constants of torch's GradScaler.

    The loss is multiplied by `value` before the backward pass and the gradients are divided by it
    afterwards, so that small gradients do not underflow. If they overflow, the step is skipped and
    the scale is halved. All values are powers of two, so scaling causes no rounding (Mixed
    Precision Training, arXiv 1710.03740, Loss scaling).

    Attributes:
        value: the scale. good: number of successful steps in a row with this scale.
    """

    WINDOW: ClassVar[int] = 2000

    value: float = 65536.0
    good: int = 0

    def update(self, overflowed: bool) -> bool:
        """Update the scale after a step; return whether the scale caused an overflow, which
        requires a scale above 1.
        """
        if overflowed:
            was_above_one = self.value > 1.0
            self.value = max(1.0, self.value / 2.0)
            self.good = 0
            return was_above_one
        self.good += 1
        if self.good == self.WINDOW:
            self.value *= 2.0
            self.good = 0
        return False


def _load_paged(optimizer: Any, saved: dict[str, Any]) -> None:
    """Load the state of a paged optimizer of bitsandbytes. Its own loading would keep no moments in
    paged memory.

    The moments are copied to the buffers that the first step would create. CPU and GPU share these
    buffers, so the moments need not fit into the GPU's memory.
    """
    optimizer.load_state_dict(saved, move_to_device=False)
    for parameter, entry in optimizer.state.items():
        for name, value in entry.items():
            if name in _MOMENTS:
                buffer = optimizer.get_state_buffer(parameter, dtype=value.dtype)
                entry[name] = buffer.copy_(value)
            elif isinstance(value, Tensor):
                entry[name] = value.to(parameter.device)


# Optimizer and schedule

ParameterGroup = dict[str, Any]

#: Optimizer name -> class in bitsandbytes.
EIGHT_BIT = {
    "adamw_bnb_8bit": "AdamW8bit",
    "adamw_8bit": "AdamW8bit",
    "paged_adamw_8bit": "PagedAdamW8bit",
}


def parameter_groups(
    heads: Iterable[nn.Parameter],
    heads_lr: float,
    target_model: Iterable[nn.Parameter],
    target_model_lr: float,
    weight_decay: float,
) -> list[ParameterGroup]:
    """Group the trained parameters by learning rate and by weight decay: matrices get weight decay,
    biases and norms get none.

    Heads train at `learning_rate * medusa_lr_multiplier`, and the target model's trained parameters
    at `learning_rate` (Medusa, Joint Training, differential learning rates).
    """
    groups: list[ParameterGroup] = []
    for parameters, lr in ((heads, heads_lr), (target_model, target_model_lr)):
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        for are_matrices, decay in ((True, weight_decay), (False, 0.0)):
            kind = [p for p in trained if (len(full_shape(p)) >= 2) == are_matrices]
            if kind:
                groups.append({"params": kind, "lr": lr, "weight_decay": decay})
    return groups


def build_optimizer(
    name: str,
    groups: list[ParameterGroup],
    device: torch.device,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    epsilon: float = 1e-8,
) -> tuple[torch.optim.Optimizer, str | None]:
    """Build the optimizer `name`. If it cannot run here, build adamw_torch and return a line for
    the user.

    Args:
        betas: decay rates of Adam's first and second moment.
        epsilon: Adam's epsilon, added to the denominator.
    """
    if name not in EIGHT_BIT:
        notice = None
    elif device.type != "cuda":
        notice = f"optimizer: {name} is slow on {device.type.upper()}; using adamw_torch"
    elif (unsupported_reason := bitsandbytes_unsupported_reason(device)) is not None:
        notice = f"optimizer: {name} needs bitsandbytes ({unsupported_reason}); using adamw_torch"
    else:
        eight_bit = getattr(importlib.import_module("bitsandbytes.optim"), EIGHT_BIT[name])
        return eight_bit(groups, betas=betas, eps=epsilon), None
    return torch.optim.AdamW(groups, betas=betas, eps=epsilon, fused=True), notice


def build_scheduler(
    name: str,
    optimizer: torch.optim.Optimizer,
    warmup_steps: int,
    total_steps: int,
    lowest: float = 0.0,
) -> LambdaLR:
    """Build transformers' schedule `name`; `lowest` is the final rate of `cosine` as a fraction of
    the peak.
    """
    options = None
    if name == "cosine" and lowest:
        name = "cosine_with_min_lr"
        options = {"min_lr_rate": lowest}
    scheduler: LambdaLR = get_scheduler(name, optimizer, warmup_steps, total_steps, options)
    return scheduler
