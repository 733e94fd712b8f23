"""Parameter groups, optimizer and schedule, and the step with them: gradient clipping and update. Here
in one process, where gradients come with the losses; `deepspeed_strategy` does it through DeepSpeed.
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
from medusa_train.models.loading import bitsandbytes_obstacle
from medusa_train.models.partitioned import full_shape

T = TypeVar("T")

#: Keys of a parameter group that keep this run's values when resuming; the others are restored.
_NOT_RESTORED = ("initial_lr", "weight_decay", "betas", "eps")
#: The entries of bitsandbytes' state that its paged optimizers keep in paged memory.
_MOMENTS = ("state1", "state2")


class Strategy(ABC):
    """How a training step computes, reduces and applies gradients.

    The order is `forward_backward` for every micro-batch, then one `step` or `skip`. With several
    processes all of them call every method, in the same order.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: LambdaLR,
        max_grad_norm: float,
        loss_scale: LossScale | None = None,
    ) -> None:
        """Train the optimizer's parameters; `max_grad_norm` 0 disables clipping, `loss_scale` is
        for float16.
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
        gradients.

        `compute(*args)` returns a differentiable loss, `compute(*args, grad_scale=factor)` one
        whose gradients, times `factor`, it has accumulated itself. The loss that is returned here
        has no graph.
        """

    def with_gathered_params(self, function: Callable[..., T], *args: Any) -> T:
        """Call `function(*args)`, which computes without gradients, with all weights readable."""
        return function(*args)

    def release(self, saved: Iterable[nn.Parameter]) -> None:
        """End training: remove all hooks and the optimizer's state.

        All weights are whole then; with `partitioned` only the parameters `saved`, in rank 0 and in
        CPU memory.
        """
        self.optimizer.state.clear()

    def step(self) -> tuple[float, bool]:
        """Clip the gradients, step optimizer and schedule, and zero the gradients.

        Returns: The norm of the gradients before clipping, and whether they overflowed float16
            because of the loss scale, which is halved then. If the norm is NaN/Inf, neither weights
            nor schedule changed: `skip` follows.
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
        """Drop the gradients and step the schedule alone, after a `step` that did not apply them or
        instead of one.
        """
        self._drop_gradients()
        with warnings.catch_warnings():
            # torch warns about a schedule stepped before the optimizer; here the first optimizer
            # step was skipped
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
        """Restore `state_dict`; learning rates, weight decay and schedule stay those of this run.

        A run resumed with another learning rate uses it, at the step of the schedule that was
        reached.

        Raises:
            ValueError: it belongs to other parameters.
        """
        # 1. The moments of the optimizer.
        self._load_optimizer(state["optimizer"])
        # 2. The step of the schedule, with this run's learning rates.
        scheduler = self.scheduler
        done = int(state["scheduler"]["last_epoch"])
        factors = [factor(done) for factor in scheduler.lr_lambdas]
        rates = [peak * by for peak, by in zip(scheduler.base_lrs, factors, strict=True)]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        current = {"base_lrs": scheduler.base_lrs, "_last_lr": rates}
        current["lr_lambdas"] = scheduler.state_dict()["lr_lambdas"]
        scheduler.load_state_dict({**state["scheduler"], **current})
        # 3. The loss scale, which is absent if it was trained in another precision.
        if self.loss_scale is not None and "loss_scale" in state:
            self.loss_scale = LossScale(**state["loss_scale"])

    @abstractmethod
    def _update(self) -> float:
        """Clip, step the optimizer if the norm is finite, and zero the gradients; return the norm
        before clipping.
        """

    def _clip(self) -> float:
        """Divide this process's gradients by the loss scale and clip them; return their norm
        before.
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
        load_optimizer(self.optimizer, saved)


class LocalStrategy(Strategy):
    """Train in one process, on one device."""

    def forward_backward(
        self, compute: Callable[..., ObjectiveOutput], *args: Any
    ) -> ObjectiveOutput:
        """Compute the loss of one micro-batch; gradients are accumulated term by term, while it is
        computed.
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
    the scale halved. All values are powers of two, so scaling rounds nothing (Mixed Precision
    Training, arXiv 1710.03740, Loss scaling).

    Attributes:
        value: the factor. good: successful steps in a row with it.
    """

    WINDOW: ClassVar[int] = 2000

    value: float = 65536.0
    good: int = 0

    def update(self, overflowed: bool) -> bool:
        """Update the scale after a step; return whether it overflowed because of the scale, which
        was above 1.
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


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load a `state_dict` but for weight decay, betas and epsilon; the caller sets learning rates.
    ValueError if its moments have other names.
    """
    entry = next(iter(saved["state"].values()), None)
    if entry and ("exp_avg" in entry) != isinstance(optimizer, torch.optim.AdamW):
        raise ValueError("the state of another optimizer")
    kept = []
    for group in optimizer.param_groups:
        kept.append({name: group[name] for name in _NOT_RESTORED if name in group})
    if getattr(optimizer, "is_paged", False):
        _load_paged(optimizer, saved)
    else:
        optimizer.load_state_dict(saved)
    for group, values in zip(optimizer.param_groups, kept, strict=True):
        group.update(values)


def _load_paged(optimizer: Any, saved: dict[str, Any]) -> None:
    """Load the state of a paged optimizer of bitsandbytes, whose own loading leaves no moments
    paged.

    The moments are copied to buffers as the first step would create them: of a CPU and a GPU that
    share them, so that they need not fit into the GPU's memory.
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
    base_model_lr: float,
    weight_decay: float,
) -> list[ParameterGroup]:
    """Group the trained parameters by learning rate, and matrices (weight decay) apart from biases
    and norms (none).

    Heads train at `learning_rate * medusa_lr_multiplier`, the base model's trained parameters at
    `learning_rate` (Medusa, Joint Training, differential learning rates).
    """
    groups: list[ParameterGroup] = []
    for parameters, lr in ((heads, heads_lr), (target_model, base_model_lr)):
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
    """Build the optimizer `name`, or adamw_torch and a line for the user where it cannot run.

    Args:
        betas: decay of the mean of gradients, and of the mean of their squares.
        epsilon: added to the root of the latter before dividing by it.
    """
    if name not in EIGHT_BIT:
        notice = None
    elif device.type != "cuda":
        notice = f"optimizer: {name} is slow on {device.type.upper()}; using adamw_torch"
    elif (obstacle := bitsandbytes_obstacle(device)) is not None:
        notice = f"optimizer: {name} needs bitsandbytes ({obstacle}); using adamw_torch"
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
