"""One optimization step: backward, clip, update, schedule, zero. Knows nothing of data, losses or logs."""

from __future__ import annotations

import math
import socket
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from medusa_train.config.schema import TrainConfig
from medusa_train.training.backbone_recipe import BackboneRecipe
from medusa_train.training.deepspeed_config import DEFAULT, complete_config, read_deepspeed, stage_of
from medusa_train.training.distributed import World, init_distributed
from medusa_train.training.optim import EIGHT_BIT, build_optimizer, build_scheduler, parameter_groups
from medusa_train.training.process_info import ProcessInfo

T = TypeVar("T")

_THIS_RUNS = ("initial_lr", "weight_decay")  # of a parameter group; the others are the optimizer's own


class Strategy(Protocol):
    """What the training loop asks of whatever holds the gradients."""

    @property
    def lr(self) -> float:
        """Learning rate that the next step uses (first parameter group)."""

    @property
    def found_inf(self) -> bool:
        """Whether the last step's gradient was too large for float16 only because it was scaled: no failure."""

    def forward(self, loss: Callable[[], Tensor]) -> Tensor:
        """Compute a micro-batch's share of the loss, where all weights can be read; `backward` takes it."""

    def with_gathered_params(self, action: Callable[[], T]) -> T:
        """Do something that reads the weights and learns nothing."""

    def gathered_params(self, *, modify: bool = False) -> AbstractContextManager[None]:
        """Within: what is trained can be read as whole tensors.

        Args:
            modify: it is replaced, in all processes alike; only once the last step is done, for the optimizer may
                keep weights of its own.
        """

    def release(self) -> None:
        """End the training: the modules have whole weights again and nothing hangs on them."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of one micro-batch's share of the loss; called once per micro-batch."""

    def step(self) -> float:
        """Clip, update, move the schedule on, zero the gradients.

        Returns:
            The gradient norm before clipping. When it is not finite nothing was updated, the schedule neither.
        """

    def skip(self) -> None:
        """Let a step pass without an update: drop the gradients, if any are left, and move the schedule on.

        Called after a `step` that updated nothing, or in its place where the loss is not finite.
        """

    def state_dict(self) -> dict[str, Any]:
        """Optimizer and schedule, as nested dicts and lists of tensors and plain values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""


class LocalStrategy:
    """One process, one device."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        scheduler: LambdaLR,
        max_grad_norm: float,
        loss_scale: LossScale | None = None,
    ) -> None:
        """Take over the trained parameters; `max_grad_norm` 0 measures the norm and clips nothing.

        Args:
            loss_scale: for computing in float16.
        """
        self.parameters = list(parameters)
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.max_grad_norm = max_grad_norm if max_grad_norm > 0 else math.inf
        self.loss_scale = loss_scale
        self.found_inf = False

    @property
    def lr(self) -> float:
        """Learning rate that the next step uses (first parameter group)."""
        return float(self.optimizer.param_groups[0]["lr"])

    def forward(self, loss: Callable[[], Tensor]) -> Tensor:
        """Compute a micro-batch's share of the loss."""
        return loss()

    def with_gathered_params(self, action: Callable[[], T]) -> T:
        """Do something that reads the weights."""
        return action()

    def gathered_params(self, *, modify: bool = False) -> AbstractContextManager[None]:
        """All tensors are whole at any time, and the only ones."""
        return nullcontext()

    def release(self) -> None:
        """Nothing hangs on the modules."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of one micro-batch's share of the loss."""
        scaled = loss if self.loss_scale is None else loss * self.loss_scale.value
        scaled.backward()

    def step(self) -> float:
        """Clip, update, move the schedule on, zero the gradients; return the norm before clipping."""
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
        """Let a step pass without an update: drop the gradients and move the schedule on."""
        self.optimizer.zero_grad(set_to_none=True)
        skip_scheduler_step(self.scheduler)

    def state_dict(self) -> dict[str, Any]:
        """Optimizer, schedule and loss scale, as nested dicts and lists of tensors and plain values."""
        return {"optimizer": self.optimizer.state_dict(), **side_state(self.scheduler, self.loss_scale)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave; learning rates, weight decay and schedule stay those of this run.

        So a run that goes on with another learning rate has it, at the place in the schedule that was reached.
        """
        load_optimizer(self.optimizer, state["optimizer"])
        load_side_state(state, self.optimizer, self.scheduler, self.loss_scale)


def skip_scheduler_step(scheduler: LambdaLR) -> None:
    """Let the schedule pass a step in which the optimizer did nothing."""
    with warnings.catch_warnings():
        # torch takes a schedule that moves before the optimizer for a mistake; here the first step was skipped
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        scheduler.step()


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Take back an optimizer's `state_dict`, but for learning rates and weight decay, which stay those of this run."""
    own = [{name: group[name] for name in _THIS_RUNS} for group in optimizer.param_groups]
    optimizer.load_state_dict(saved)
    for group, values in zip(optimizer.param_groups, own, strict=True):
        group.update(values)


def side_state(scheduler: LambdaLR, loss_scale: LossScale | None) -> dict[str, Any]:
    """What a strategy keeps beside the optimizer's state."""
    state: dict[str, Any] = {"scheduler": {k: v for k, v in scheduler.state_dict().items() if k != "lr_lambdas"}}
    if loss_scale is not None:
        state["loss_scale"] = loss_scale.state_dict()
    return state


def load_side_state(
    state: dict[str, Any], optimizer: torch.optim.Optimizer, scheduler: LambdaLR, loss_scale: LossScale | None
) -> None:
    """Take back what `side_state` gave: the place that was reached in this run's own schedule, and the loss scale."""
    done = int(state["scheduler"]["last_epoch"])
    peaks = list(scheduler.base_lrs)
    rates = [peak * share(done) for peak, share in zip(peaks, scheduler.lr_lambdas, strict=True)]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    mine = {"lr_lambdas": scheduler.state_dict()["lr_lambdas"], "base_lrs": peaks, "_last_lr": rates}
    scheduler.load_state_dict({**state["scheduler"], **mine})
    if loss_scale is not None and "loss_scale" in state:  # a run that computed in another format has none
        loss_scale.load_state_dict(state["loss_scale"])


@dataclass
class LossScale:
    """Dynamic loss scaling (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2), with torch's own constants.

    The loss is multiplied by `value` before the backward pass and the gradients divided by it afterwards: small
    gradients would be zero in float16. Where that is too much they are infinite; the step is then left out and the
    scale halved. All values are powers of two, so scaling rounds nothing.

    Attributes:
        value: the factor. good: steps in a row that went well with it.
    """

    WINDOW: ClassVar[int] = 2000

    value: float = 65536.0
    good: int = 0

    def update(self, overflowed: bool) -> bool:
        """Take note of a step's end; return whether the scale was to blame and another try is worth it.

        An overflow that stays when nothing is scaled any more has another cause.
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
        """Plain numbers."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.value, self.good = float(state["value"]), int(state["good"])


def build_strategy(
    cfg: TrainConfig,
    draft: nn.Module,
    recipe: BackboneRecipe,
    total_steps: int,
    warmup: int,
    world: World,
    console: Console,
) -> Strategy:
    """Make optimizer, schedule and the strategy that moves them; says in a line what is not as it was asked for.

    DeepSpeed trains wherever there are several processes, and alone where the key `deepspeed` asks for it. Under
    ZeRO-3 the weights are split from here on, and can be read as `Strategy` says only.
    """
    given = read_deepspeed(cfg)
    config = DEFAULT if given is None else given
    many = world.size > 1 or given is not None
    device, trained = recipe.precision.device, list(recipe.parameters.values())
    name = cfg.optimizer
    stage = stage_of(config)
    if name in EIGHT_BIT and many and stage > 0:
        console.print(f"optimizer: {name}'s blocks don't fit ZeRO's parts of matrices, taking adamw_torch, split")
        name = "adamw_torch"
    groups = parameter_groups(draft.parameters(), cfg.heads_learning_rate, trained, cfg.learning_rate, cfg.weight_decay)
    optimizer, notice = build_optimizer(name, groups, device)
    if notice:
        console.print(notice)
    scheduler = build_scheduler(cfg.lr_scheduler, optimizer, warmup, total_steps, cfg.cosine_min_lr_ratio)
    loss_scale = LossScale() if recipe.precision.dtype == torch.float16 else None
    if not many:
        return LocalStrategy([*draft.parameters(), *trained], optimizer, scheduler, cfg.max_grad_norm, loss_scale)

    from medusa_train.training.deepspeed import DeepSpeedStrategy

    if world.size == 1:
        init_distributed(ProcessInfo(0, 1, 0, "127.0.0.1", _free_port()))
    reason = ", for the key deepspeed is not set" if given is None else ""
    console.print(f"processes: {world.size}, by DeepSpeed's ZeRO stage {stage}{reason}")
    backbone = recipe.backbone
    return DeepSpeedStrategy(
        draft,
        backbone.model,
        [*draft.parameters(), *backbone.head.parameters()],
        optimizer,
        scheduler,
        complete_config(config, cfg, world.size, backbone.hidden_size),
        world,
        loss_scale,
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
