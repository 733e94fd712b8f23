"""The strategy for several processes: DeepSpeed's ZeRO 0-3 behind the `Strategy` protocol. Knows no data and no losses.

Weights are float32 and the numbers' format is autocast's, as in one process, so gradients travel and add up in
float32. DeepSpeed averages gradients over processes; every share of the loss is already divided by the targets of the
whole global batch, so it is multiplied by the number of processes first.

What is saved is what `LocalStrategy` saves, put together from all processes: a run may go on with another number of
them, with another ZeRO stage, or alone.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from medusa_train.training.deepspeed_config import search_path, stage_of
from medusa_train.training.distributed import World
from medusa_train.training.strategy import LossScale, load_optimizer, load_side_state, side_state, skip_scheduler_step

T = TypeVar("T")


class _Everything(nn.Module):
    """Heads and backbone as one module, whose forward pass is whatever it is given to do.

    ZeRO-3 collects a module's weights while its `forward` runs; losses read some of them past their own modules.
    """

    def __init__(self, draft: nn.Module, backbone: nn.Module) -> None:
        super().__init__()
        self.draft = draft
        self.backbone = backbone

    def forward(self, action: Callable[[], T]) -> T:
        return action()


class DeepSpeedStrategy:
    """This process's part in training with all the others; every method is called by all of them together."""

    def __init__(
        self,
        draft: nn.Module,
        backbone: nn.Module,
        read_directly: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        scheduler: LambdaLR,
        config: Mapping[str, Any],
        world: World,
        loss_scale: LossScale | None = None,
    ) -> None:
        """Hand the trained parameters over to DeepSpeed.

        Args:
            draft, backbone: all weights that a step reads; rank 0's go to the others.
            read_directly: of these, what losses read without calling the module that owns it.
            optimizer, scheduler: over whole parameters, of which ZeRO gives each process a part.
            config: a whole DeepSpeed configuration, see `deepspeed_config.complete`.
            loss_scale: for computing in float16.
        """
        self.scheduler = scheduler
        self.loss_scale = loss_scale
        self.found_inf = False
        self._world = world
        self._stage = int(stage_of(config))
        self._pending = False  # gradients of a whole step are there
        self._optimizer = optimizer
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._parameters = [parameter for group in self._groups for parameter in group]
        clip = float(config["gradient_clipping"])
        self._max_grad_norm = clip if clip > 0 else math.inf
        if self._stage == 0:  # DeepSpeed does not tell the norm there
            config = {**config, "gradient_clipping": 0.0}
        root = _Everything(draft, backbone)
        with _quiet():
            import deepspeed

            self._deepspeed = deepspeed
            self._engine = deepspeed.initialize(model=root, optimizer=optimizer, config=dict(config))[0]
        if self._stage == 3:
            for parameter in read_directly:
                deepspeed.zero.register_external_parameter(root, parameter)
        self._scale()

    @property
    def lr(self) -> float:
        """Learning rate that the next step uses (first parameter group)."""
        return float(self._optimizer.param_groups[0]["lr"])

    def forward(self, loss: Callable[[], Tensor]) -> Tensor:
        """Compute a micro-batch's share of the loss; ZeRO-3 collects weights meanwhile."""
        share: Tensor = self._engine(loss)
        return share

    def with_gathered_params(self, action: Callable[[], T]) -> T:
        """Do something that reads the weights and learns nothing; ZeRO-3 collects them meanwhile."""
        if self._stage < 3:
            return action()
        results: list[T] = []
        self._engine.module(lambda: results.append(action()))
        return results[0]

    @contextlib.contextmanager
    def gathered_params(self, *, modify: bool = False) -> Iterator[None]:
        """Within: what is trained can be read as whole tensors, or with `modify` replaced after the last step."""
        if self._stage < 3:
            yield
            return
        with self._deepspeed.zero.GatheredParameters(self._parameters, modifier_rank=0 if modify else None):
            yield

    def release(self) -> None:
        """End the training: the modules have whole weights again, and DeepSpeed is gone from them."""
        if self._stage == 3:
            self._deepspeed.zero.GatheredParameters(list(self._engine.module.parameters())).__enter__()
        self._engine.destroy()

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of one micro-batch's share of the loss, and after the last one all processes' gradients.

        A share that is not finite makes all gradients so, in all processes: none of them takes the step.
        """
        poison = torch.where(torch.isfinite(loss.detach()), 1.0, math.nan)
        scale = self.loss_scale.value if self._stage == 0 and self.loss_scale is not None else 1.0
        self._engine.backward(loss * (poison * scale * self._world.size), scale_wrt_gas=False)
        self._pending = self._engine.is_gradient_accumulation_boundary()
        if not self._pending:
            self._engine.step()  # counts the micro-batch

    def step(self) -> float:
        """Clip, update, move the schedule on, drop the gradients; return the global norm before clipping."""
        self._pending = False
        norm = self._step_unsplit() if self._stage == 0 else self._step_split()
        if self.loss_scale is not None:
            self.found_inf = self.loss_scale.update(overflowed=not math.isfinite(norm))
            self._scale()
        if math.isfinite(norm):
            self.scheduler.step()
        return norm

    def skip(self) -> None:
        """Let a step pass without an update: drop the gradients and move the schedule on."""
        if self._pending:
            self.step()  # the loss was not finite, so neither are the gradients: this drops them
        skip_scheduler_step(self.scheduler)

    def state_dict(self) -> dict[str, Any]:
        """Optimizer, schedule and loss scale as `LocalStrategy` has them; the optimizer's tensors in rank 0 only."""
        if self._stage == 0:
            optimizer = self._optimizer.state_dict()
        else:
            optimizer = {"state": self._collect(), "param_groups": self._described_groups()}
        return {"optimizer": optimizer, **side_state(self.scheduler, self.loss_scale)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave in rank 0, or what a `LocalStrategy` gave.

        Raises:
            ValueError: it belongs to other parameters.
        """
        if self._stage == 0:
            load_optimizer(self._optimizer, state["optimizer"])
        else:
            self._distribute(state["optimizer"]["state"])
        load_side_state(state, self._optimizer, self.scheduler, self.loss_scale)
        self._scale()

    def _scale(self) -> None:
        if self.loss_scale is not None and self._stage > 0:
            self._engine.optimizer.override_loss_scale(self.loss_scale.value)

    def _step_unsplit(self) -> float:
        """Stage 0: gradients and optimizer are whole in every process, as in one process alone."""
        for grad in [p.grad for p in self._parameters if p.grad is not None]:
            grad.div_(1.0 if self.loss_scale is None else self.loss_scale.value)
        norm = float(nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm))
        if math.isfinite(norm):
            self._engine.step()
        else:
            self._engine.zero_grad()
            self._engine.micro_steps += 1  # what its own step would have counted
        return norm

    def _step_split(self) -> float:
        self._engine.step()
        return float(self._engine.get_global_grad_norm()) if self._engine.was_step_applied() else math.inf

    def _flat(self) -> list[Tensor]:
        """The float32 tensors that this process's part of the optimizer works on."""
        name = "single_partition_of_fp32_groups" if self._stage < 3 else "fp32_partitioned_groups_flat"
        return list(getattr(self._engine.optimizer, name))

    def _described_groups(self) -> list[dict[str, Any]]:
        """Parameter groups as `Optimizer.state_dict` has them: parameters are numbered through all groups."""
        described, first = [], 0
        for group, parameters in zip(self._optimizer.param_groups, self._groups, strict=True):
            numbers = list(range(first, first := first + len(parameters)))
            described.append({**{k: v for k, v in group.items() if k != "params"}, "params": numbers})
        return described

    def _collect(self) -> dict[int, dict[str, Any]]:
        """Per parameter the optimizer's state, whole: its elementwise tensors from all processes, counters from one."""
        states = list(self._optimizer.state.values())
        if not states:
            return {}  # before the first step
        split = [key for key, value in states[0].items() if _is_split(value)]
        counters = {key: value for key, value in states[0].items() if key not in split}
        self._link()
        collected: dict[int, dict[str, Any]] = {}
        for number, parameter in enumerate(self._parameters):
            entry = {k: v.clone() if isinstance(v, Tensor) else v for k, v in counters.items()}
            for key in split:
                full = self._deepspeed.utils.safe_get_full_optimizer_state(parameter, key)
                entry[key] = full.cpu() if self._world.is_main else None
            collected[number] = entry
        return collected if self._world.is_main else {}

    def _distribute(self, saved: Mapping[int, Mapping[str, Any]]) -> None:
        """Give this process its part of what `_collect` put together."""
        if not saved:
            return
        if set(saved) != set(range(len(self._parameters))):
            raise ValueError(f"the optimizer's state is of {len(saved)} parameters, not {len(self._parameters)}")
        fused = any(self._optimizer.defaults.get(name) for name in ("fused", "capturable"))
        entry = saved[0]
        for flat in self._flat():
            self._optimizer.state[flat] = {
                key: torch.zeros_like(flat) if _is_split(value) else _counter(value, flat if fused else None)
                for key, value in entry.items()
            }
        self._link()
        for number, parameter in enumerate(self._parameters):
            for key in [key for key, value in entry.items() if _is_split(value)]:
                self._set(parameter, key, saved[number][key])

    def _link(self) -> None:
        """Let parameters find their parts of the optimizer's state as it is now.

        ZeRO 1 and 2 do that themselves once, when only the first group of parameters has a state.
        """
        if self._stage < 3:
            for parameters, flat in zip(self._groups, self._flat(), strict=True):
                self._deepspeed.utils.lazy_init_hp_params_optimizer_state(parameters, flat, self._optimizer.state)

    def _set(self, parameter: Any, key: str, value: Tensor) -> None:
        shape = getattr(parameter, "ds_shape", parameter.shape)
        if value.shape != shape:
            raise ValueError(f"a parameter of shape {list(shape)} has an optimizer state of {list(value.shape)}")
        if self._stage < 3:
            self._deepspeed.utils.safe_set_full_optimizer_state(parameter, value, key)
            return
        size = parameter.ds_tensor.numel()  # the same in all processes: the last part is filled up
        padded = torch.zeros(size * self._world.size, dtype=value.dtype)
        padded[: value.numel()] = value.flatten()
        part = padded[size * self._world.rank :][:size]
        self._deepspeed.utils.safe_set_local_optimizer_state(parameter, part, key)


def _is_split(value: Any) -> bool:
    """Whether a piece of an optimizer's state is a number per weight, which ZeRO splits with the weights."""
    return isinstance(value, Tensor) and value.dim() > 0


def _counter(value: Any, like: Tensor | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.clone() if like is None else value.clone().to(like.device)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep DeepSpeed's own reports away; warnings and errors stay, on stderr."""
    os.environ["PATH"] = search_path()
    if os.environ.get("MEDUSA_DEBUG", "") not in ("", "0"):
        yield
        return
    with contextlib.redirect_stdout(sys.stderr):
        import deepspeed  # noqa: F401 (its log is bound to where stdout goes at this moment)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield
