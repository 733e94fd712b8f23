"""Train in several processes with DeepSpeed's ZeRO stages 0 to 3, as a `Strategy`.

Weights are float32 and autocast sets the compute dtype, as in one process, so gradients are reduced
in float32. DeepSpeed averages gradients over processes, but the loss of every micro-batch is
already divided by the number of targets in the global batch. Each loss is therefore multiplied by
the number of processes first.

The saved state has the format of `LocalStrategy`, gathered from all processes. So a run can be
resumed on another number of processes, with another ZeRO stage, or without DeepSpeed.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from medusa_train.console_streams import debugging
from medusa_train.errors import ConfigError
from medusa_train.losses.objective import ObjectiveOutput
from medusa_train.models.partitioned import full_shape, make_whole
from medusa_train.training.deepspeed_config import stage_of, unknown_entry
from medusa_train.training.distributed import DistributedContext
from medusa_train.training.optimizer import LossScale, Strategy

T = TypeVar("T")


class _Root(nn.Module):
    """Draft and target model as one module whose forward pass calls a given function.

    ZeRO-3 gathers a module's weights while its `forward` runs, but losses read some weights
    (lm_head) directly. `forward` may only return a tensor, because DeepSpeed's hooks look for one;
    the full result is kept in `result`.
    """

    def __init__(self, draft: nn.Module, target_model: nn.Module) -> None:
        super().__init__()
        self.draft = draft
        self.target_model = target_model
        self.result: Any = None

    def forward(self, function: Callable[[], Any]) -> Tensor | None:
        self.result = function()
        return self.result.loss if isinstance(self.result, ObjectiveOutput) else None

    def pop_result(self) -> Any:
        result, self.result = self.result, None
        return result


class DeepSpeedStrategy(Strategy):
    """This process's part in training with DeepSpeed; all processes call every method, in the same
    order.
    """

    def __init__(
        self,
        draft: nn.Module,
        target_model: Any,
        optimizer: torch.optim.Optimizer,
        scheduler: LambdaLR,
        config: Mapping[str, Any],
        distributed: DistributedContext,
        loss_scale: LossScale | None = None,
    ) -> None:
        """Hand the trained parameters to DeepSpeed.

        Args:
            draft, target_model: the draft and the transformers model, with all weights that a step
                reads. DeepSpeed broadcasts rank 0's weights.
            config: from `deepspeed_config.engine_config`.
        """
        super().__init__(optimizer, scheduler, float(config["gradient_clipping"]), loss_scale)
        self._distributed = distributed
        self._stage = stage_of(config)
        self._pending = False  # whether all gradients of a step are accumulated but not applied yet
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._numbers = [group["params"] for group in optimizer.state_dict()["param_groups"]]
        # DeepSpeed does not report the norm at this stage, so gradients are clipped here
        if self._stage == 0:
            config = {**config, "gradient_clipping": 0.0}
        self._root: Any = _Root(draft, target_model)
        with _quiet():
            import deepspeed

            self._deepspeed = deepspeed
            self._engine = deepspeed.initialize(
                model=self._root, optimizer=optimizer, config=dict(config)
            )[0]
        if self._stage == 3:
            # losses read these without calling the module that they belong to
            lm_head = target_model.get_output_embeddings()
            for parameter in (*draft.parameters(), *lm_head.parameters()):
                deepspeed.zero.register_external_parameter(self._root, parameter)

    def forward_backward(
        self, compute: Callable[..., ObjectiveOutput], *args: Any
    ) -> ObjectiveOutput:
        """Compute the loss while ZeRO-3 gathers weights, and run one backward pass, whose hooks
        reduce the gradients.
        """
        loss: Tensor = self._engine(partial(compute, *args))
        output: ObjectiveOutput = self._root.pop_result()
        self._backward(loss)
        return replace(output, loss=loss.detach())

    def with_gathered_params(self, function: Callable[..., T], *args: Any) -> T:
        """Call `function(*args)` while ZeRO-3 gathers weights."""
        if self._stage < 3:
            return function(*args)
        self._engine.module(partial(function, *args))
        result: T = self._root.pop_result()
        return result

    @property
    def partitioned(self) -> bool:
        """Whether no process holds all weights: at stage 3, with several processes."""
        return self._stage == 3 and self._distributed.size > 1

    def release(self, saved: Iterable[nn.Parameter]) -> None:
        """End training: gather the parameters in `saved` in rank 0, one at a time, and remove
        DeepSpeed's hooks.
        """
        if self.partitioned:
            make_whole(saved, keep=self._distributed.is_main)
        elif self._stage == 3:
            self._deepspeed.zero.GatheredParameters(list(self._root.parameters())).__enter__()
        self._engine.destroy()
        self.optimizer.state.clear()
        for group in self.optimizer.param_groups:  # they hold flat copies of the weights
            group["params"] = []
        if self._stage == 3:
            _forget_module(self._root)
        # the engine's hooks refer to both
        self._engine = None
        self._root = None

    def _drop_gradients(self) -> None:
        if self._pending:
            self.step()  # loss and gradients are NaN/Inf, so this step only drops the gradients

    def _optimizer_state(self) -> dict[str, Any]:
        """Return the state in the format of `LocalStrategy`. Only rank 0 gets the tensors, in CPU
        memory.
        """
        if self._stage == 0:
            return super()._optimizer_state()
        groups = []
        for group, numbers in zip(self.optimizer.param_groups, self._numbers, strict=True):
            groups.append({**group, "params": numbers})
        return {"state": self._gather_optimizer(), "param_groups": groups}

    def _load_optimizer(self, saved: dict[str, Any]) -> None:
        if self._stage == 0:
            super()._load_optimizer(saved)
        else:
            self._scatter_optimizer(saved["state"])

    def _backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of one micro-batch's loss; after the last one, reduce them over
        all processes.

        A NaN/Inf loss makes all gradients NaN in all processes, so that no process applies the
        step.
        """
        poison = torch.where(torch.isfinite(loss.detach()), 1.0, math.nan)
        scale = 1.0
        if self.loss_scale is not None and self._stage == 0:
            scale = self.loss_scale.value
        elif self.loss_scale is not None:
            self._engine.optimizer.override_loss_scale(self.loss_scale.value)
        self._engine.backward(loss * (poison * scale * self._distributed.size), scale_wrt_gas=False)
        self._pending = self._engine.is_gradient_accumulation_boundary()
        if not self._pending:
            self._engine.step()  # only counts the micro-batch

    def _update(self) -> float:
        self._pending = False
        if self._stage > 0:
            self._engine.step()
            if not self._engine.was_step_applied():
                return math.inf
            return float(self._engine.get_global_grad_norm())
        # stage 0: every process has all gradients and optimizer states, as without DeepSpeed
        norm = self._clip()
        if math.isfinite(norm):
            self._engine.step()
        else:
            self._engine.zero_grad()
            self._engine.micro_steps += 1  # the engine's `step` would have done this
        return norm

    def _flat_groups(self) -> list[Tensor]:
        """Return the flat float32 partitions that this process's optimizer updates, one per
        parameter group.
        """
        name = "single_partition_of_fp32_groups"
        if self._stage == 3:
            name = "fp32_partitioned_groups_flat"
        return list(getattr(self._engine.optimizer, name))

    def _gather_optimizer(self) -> dict[int, dict[str, Any]]:
        """Return the optimizer's full state per parameter: elementwise tensors are gathered from
        all processes, and only rank 0 keeps them.
        """
        states = list(self.optimizer.state.values())
        if not states:
            return {}  # before the first step
        elementwise, counters = _split(states[0])
        self._link_optimizer_state()
        gathered: dict[int, dict[str, Any]] = {}
        for number, parameter in enumerate(self.parameters):
            gathered[number] = copy.deepcopy(counters)
            for key in elementwise:
                full = self._deepspeed.utils.safe_get_full_optimizer_state(parameter, key)
                if self._distributed.is_main:
                    gathered[number][key] = full.cpu()
        return gathered

    def _scatter_optimizer(self, saved: Mapping[int, Mapping[str, Any]]) -> None:
        """Load this process's partition of the state that `_gather_optimizer` returned.

        ZeRO flattens each parameter group and cuts it into equal parts, one per process. An example
        with two processes and two groups with the parameters a, b, c and d:

            group 1          a a a a b b|b b b . . .      . is padding
            group 2          c c c d|d d d .
            process 0 has    a a a a b b  c c c d
            process 1 has    b b b . . .  d d d .         one flat tensor per group

        The optimizer updates these flat tensors, so its state has one entry per flat tensor. At
        stage 3 every parameter is cut separately, and a flat tensor joins the parts of its group:

            process 0 has    a a b b b  c c d d           each part is padded to equal size
            process 1 has    a a b b .  c . d d
        """
        if not saved:
            return
        if set(saved) != set(range(len(self.parameters))):
            raise ValueError(
                f"optimizer state has {len(saved)} parameters, expected {len(self.parameters)}"
            )
        # 1. Create a zero state for each flat tensor. Fused optimizers need counters on its device.
        elementwise, counters = _split(saved[0])
        is_fused = any(self.optimizer.defaults.get(name) for name in ("fused", "capturable"))
        for flat in self._flat_groups():
            state = copy.deepcopy(counters)
            if is_fused:
                state = {key: value.to(flat.device) for key, value in state.items()}
            state.update({key: torch.zeros_like(flat) for key in elementwise})
            self.optimizer.state[flat] = state
        # 2. Copy the values of each parameter into its slice of a flat tensor.
        self._link_optimizer_state()
        for number, parameter in enumerate(self.parameters):
            for key in elementwise:
                self._set_optimizer_state(parameter, key, saved[number][key])

    def _link_optimizer_state(self) -> None:
        """Link every parameter to its slice of the current flat optimizer state (ZeRO 1 and 2).

        DeepSpeed creates these links only once, at a time when only the first parameter group has a
        state. So they are created again here.
        """
        if self._stage < 3:
            for parameters, flat in zip(self._groups, self._flat_groups(), strict=True):
                self._deepspeed.utils.lazy_init_hp_params_optimizer_state(
                    parameters, flat, self.optimizer.state
                )

    def _set_optimizer_state(self, parameter: Any, key: str, value: Tensor) -> None:
        shape = full_shape(parameter)
        if value.shape != shape:
            raise ValueError(
                f"optimizer state has shape {list(value.shape)}, its parameter {list(shape)}"
            )
        if self._stage < 3:
            self._deepspeed.utils.safe_set_full_optimizer_state(parameter, value, key)
            return
        # all processes have parts of equal size, so the last part is padded
        part = torch.zeros(parameter.ds_tensor.numel(), dtype=value.dtype)
        own_part = value.flatten()[len(part) * self._distributed.rank :][: len(part)]
        part[: len(own_part)] = own_part
        self._deepspeed.utils.safe_set_local_optimizer_state(parameter, part, key)


def _split(entry: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Split the state of a parameter. Return the names of its elementwise tensors (one number per
    weight), which ZeRO partitions like the weights, and its counters.
    """
    elementwise = [
        key for key, value in entry.items() if isinstance(value, Tensor) and value.dim() > 0
    ]
    counters = {key: value for key, value in entry.items() if key not in elementwise}
    return elementwise, counters


def check_zero(config: Mapping[str, Any]) -> None:
    """Check the entries of `zero_optimization` with DeepSpeed's own pydantic model; ConfigError
    lists all problems.

    Args:
        config: from `deepspeed_config.check_deepspeed`.
    """
    with _quiet():
        from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    try:
        DeepSpeedZeroConfig(**config.get("zero_optimization", {}))
    except ValidationError as error:
        problems = []
        for detail in error.errors():
            name = ".".join(map(str, ("zero_optimization", *detail["loc"])))
            problem = f"{name}: {detail['msg']}, got {detail['input']!r}"
            if detail["type"] == "extra_forbidden":
                entries = DeepSpeedZeroConfig.model_fields
                problem = unknown_entry(name, [f"zero_optimization.{entry}" for entry in entries])
            problems.append(f"deepspeed: {problem}")
        raise ConfigError(problems) from error


@contextlib.contextmanager
def partitioned_loading(config: Mapping[str, Any] | None) -> Iterator[None]:
    """Partition the models that transformers loads in this block; does nothing if `config` is None.

    Rank 0 reads the weights module by module, and every process keeps only its part of them.

    Args:
        config: from `deepspeed_config.loading_config`.
    """
    if config is None:
        yield
        return
    with _quiet():
        import deepspeed
        from transformers.integrations import HfDeepSpeedConfig

        deepspeed.init_distributed()  # uses torch's process group
        partitioning = HfDeepSpeedConfig(dict(config))
    try:
        yield
    finally:
        # transformers keeps a weak reference to this object, and partitions while it is alive
        del partitioning


def _forget_module(root: nn.Module) -> None:
    """Drop the references to a model that DeepSpeed's globals keep after its engine was destroyed
    (ZeRO-3). They would keep all of its memory.
    """
    from deepspeed.runtime.zero import parameter_offload, partitioned_param_coordinator

    stack = getattr(parameter_offload, "FWD_MODULE_STACK", [])
    if root in stack:
        stack.remove(root)
    for method in vars(partitioned_param_coordinator.PartitionedParameterCoordinator).values():
        # the closure of a decorator holds the method with its `functools.lru_cache`
        for cell in getattr(method, "__closure__", None) or ():
            if hasattr(cell.cell_contents, "cache_clear"):
                cell.cell_contents.cache_clear()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress DeepSpeed's informational output, and keep it from compiling extensions; warnings
    and errors still go to stderr.
    """
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed's logger binds stdout at import
        import deepspeed.ops

    # On a CPU, DeepSpeed would build an extension for the all-reduce of tensor-parallel inference.
    # That needs a C++ compiler, half a minute and 67 MB of shared memory. torch computes it
    # instead.
    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    if debugging():
        yield
        return
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    with open(os.devnull, "w") as devnull, contextlib.redirect_stdout(devnull):
        yield
