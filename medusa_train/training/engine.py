"""One optimization step: backward, clip, update, schedule, zero. Knows nothing of data, losses or logs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

_THIS_RUNS = ("initial_lr", "weight_decay")  # of a parameter group; the others are the optimizer's own


class Engine(Protocol):
    """What the training loop asks of whatever holds the gradients."""

    @property
    def lr(self) -> float:
        """Learning rate that the next step uses (first parameter group)."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of one micro-batch's share of the loss; called once per micro-batch."""

    def step(self) -> float:
        """Clip, update, move the schedule on, zero the gradients.

        Returns:
            The gradient norm before clipping. When it is not finite nothing was updated, the schedule neither.
        """

    def skip(self) -> None:
        """Let a step pass without an update: drop the gradients, if any are left, and move the schedule on."""

    def state_dict(self) -> dict[str, Any]:
        """Optimizer and schedule, as nested dicts and lists of tensors and plain values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""


class LocalEngine:
    """One process, one device."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        scheduler: LambdaLR,
        max_grad_norm: float,
    ) -> None:
        """Take over the trained parameters; `max_grad_norm` 0 measures the norm and clips nothing."""
        self.parameters = list(parameters)
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.max_grad_norm = max_grad_norm if max_grad_norm > 0 else math.inf

    @property
    def lr(self) -> float:
        """Learning rate that the next step uses (first parameter group)."""
        return float(self.optimizer.param_groups[0]["lr"])

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of one micro-batch's share of the loss."""
        loss.backward()

    def step(self) -> float:
        """Clip, update, move the schedule on, zero the gradients; return the norm before clipping."""
        norm = float(nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm))
        if math.isfinite(norm):
            self.optimizer.step()
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def skip(self) -> None:
        """Let a step pass without an update: drop the gradients and move the schedule on."""
        self.optimizer.zero_grad(set_to_none=True)
        with warnings.catch_warnings():
            # torch takes a schedule that moves before the optimizer for a mistake; here the first step was skipped
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Optimizer and schedule, as nested dicts and lists of tensors and plain values."""
        schedule = {k: v for k, v in self.scheduler.state_dict().items() if k != "lr_lambdas"}
        return {"optimizer": self.optimizer.state_dict(), "scheduler": schedule}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave; learning rates, weight decay and schedule stay those of this run.

        So a run that goes on with another learning rate has it, at the place in the schedule that was reached.
        """
        schedule = self.scheduler
        done = int(state["scheduler"]["last_epoch"])
        peaks = list(schedule.base_lrs)
        rates = [peak * share(done) for peak, share in zip(peaks, schedule.lr_lambdas, strict=True)]
        own = [{name: group[name] for name in _THIS_RUNS} for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, values, rate in zip(self.optimizer.param_groups, own, rates, strict=True):
            group.update(values, lr=rate)
        functions = schedule.state_dict()["lr_lambdas"]
        mine = {"lr_lambdas": functions, "base_lrs": peaks, "_last_lr": rates}
        schedule.load_state_dict({**state["scheduler"], **mine})
