"""One process of a test with several, started with RANK and the rest in its environment.

The plan names cases that run one after the other, for starting processes costs more than training
in them. What rank 0 finds is written beside the plan, for the test to compare with what one process
finds with the same functions.
"""

import gc
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from safetensors.torch import save_file
from transformers import PreTrainedModel

from medusa_train.checkpoint import store
from medusa_train.config.schema import TrainConfig
from medusa_train.models.partitioned import full_shape, is_partitioned
from medusa_train.progress import RunProgress
from medusa_train.training import setup, stages
from medusa_train.training.distributed import SINGLE_PROCESS, DistributedContext, init_distributed
from medusa_train.training.load_data import load_data
from medusa_train.training.optimizer import LossScale
from medusa_train.training.process_info import process_info_from_env
from medusa_train.training.snapshot import take_weights
from medusa_train.training.stop_signals import StopRequest
from medusa_train.training.trainer import Trainer

#: Parts of a few numbers each and nothing kept whole, so that tiny models are split as large ones
# are.
SMALL = {
    "reduce_bucket_size": 1000,
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 0,
}


def make_trainer(case: dict[str, Any], out: Path, distributed: DistributedContext) -> Trainer:
    """The trainer of a run, with the optimizer that the case names and heads that are not all one."""
    cfg = TrainConfig(**case["keys"], output_dir=str(out / "run"))
    build_heads, load_target_model, quiet = (
        setup.build_heads,
        setup.load_target_model,
        Console(quiet=True),
    )

    def optimizer(
        name: str, groups: Any, device: Any, **settings: Any
    ) -> tuple[torch.optim.Optimizer, None]:
        if case["optimizer"] == "sgd":
            return torch.optim.SGD(groups, momentum=0.9), None
        for group in groups:
            group["lr"] *= 0.1
        return torch.optim.AdamW(groups), None

    def target_model(*args: Any, **keys: Any) -> Any:
        loaded = load_target_model(*args, **keys)
        case["loaded"] = target_model_elements(loaded.model)
        return loaded

    def heads(*args: Any) -> Any:
        torch.manual_seed(7)
        draft = build_heads(*args)
        for parameter in draft.parameters():
            parameter.data += 0.01 * torch.randn_like(parameter)
        return draft

    with patch.multiple(
        setup, build_optimizer=optimizer, load_target_model=target_model, build_heads=heads
    ):
        data = distributed.run_on_main(load_data, cfg, quiet)
        trainer = setup.build_trainer(cfg, data, RunProgress(quiet), distributed)
    if "loss_scale" in case:
        trainer.strategy.loss_scale = LossScale(case["loss_scale"])
    return trainer


def equal(
    case: dict[str, Any], out: Path, distributed: DistributedContext = SINGLE_PROCESS
) -> None:
    """Train a few steps; write the weights in the order of their names, and how much this process
    held at once.
    """
    with at_once() as counts:
        trainer = make_trainer(case, out, distributed)
    with trainer.loggers:
        trainer.run(StopRequest(lambda line: None))
    parts = [case["loaded"], target_model_elements(trainer.recipe.target_model.model)]
    parts_of_weights = deepcopy(take_weights(trainer.draft, trainer.recipe, distributed))
    weights = {
        f"{part}.{name}": weight
        for part, named in parts_of_weights.items()
        for name, weight in named.items()
    }
    with at_once() as counts_at_end:
        trainer.strategy.release([*trainer.draft.parameters(), *trainer.recipe.saved])
    held = {
        "parts": parts,
        "gathered": max(counts, default=0),
        "at_end": max(counts_at_end, default=0),
    }
    (out / f"held-{distributed.rank}.json").write_text(json.dumps(held))
    if distributed.is_main:
        released = {f"draft.{name}": tensor for name, tensor in trainer.draft.state_dict().items()}
        released |= {
            f"student.{name}": tensor.detach() for name, tensor in trainer.recipe.parameters.items()
        }
        assert all(torch.equal(tensor.cpu(), weights[name]) for name, tensor in released.items())
        save_file(
            {name: weight.contiguous() for name, weight in weights.items()},
            out / "weights.safetensors",
        )


def target_model_elements(model: torch.nn.Module) -> tuple[int, int]:
    """Count the elements of the target model's weights in this process, and in all."""
    parameters = list(model.parameters())
    held = sum(p.numel() + (p.ds_tensor.numel() if is_partitioned(p) else 0) for p in parameters)
    return held, sum(full_shape(p).numel() for p in parameters)


@contextmanager
def at_once() -> Iterator[list[int]]:
    """Count the elements of the parameters that are gathered in each block of `gathered`, and by
    transformers.
    """
    import deepspeed

    counts: list[int] = []
    enter = deepspeed.zero.GatheredParameters.__enter__

    def counted(block: Any) -> None:
        if block.enabled:
            counts.append(sum(parameter.ds_numel for parameter in block.params))
        enter(block)

    deepspeed.zero.GatheredParameters.__enter__ = counted
    try:
        yield counts
    finally:
        deepspeed.zero.GatheredParameters.__enter__ = enter


def whole_run(
    case: dict[str, Any], out: Path, distributed: DistributedContext = SINGLE_PROCESS
) -> None:
    """`train_stages` with the case's keys; rank 0's console and every rank's exit code are written.

    Between two stages, the number of target models that are left in memory is written. The last rank
    alone gets a signal after the step `stop`, or a loss that is infinite in the step `spoil`.
    """
    cfg = TrainConfig(**case["keys"])
    out.mkdir(parents=True, exist_ok=True)
    step, compare, free = Trainer.train_step, Trainer.loss_and_gradients, stages.release_memory
    checksum, verified = store.checksum, []

    def recorded(path: Path) -> int:
        verified.append(path.name)
        return checksum(path)

    before = {id(thing) for thing in gc.get_objects() if issubclass(type(thing), PreTrainedModel)}

    def freed() -> None:
        free()
        left = [
            x
            for x in gc.get_objects()
            if issubclass(type(x), PreTrainedModel) and id(x) not in before
        ]
        (out / f"left-{distributed.rank}").write_text(str(len(left)))

    def stopped(trainer: Trainer, batches: Any) -> None:
        step(trainer, batches)
        if trainer.state.step == case.get("stop"):
            os.kill(os.getpid(), signal.SIGTERM)

    def spoilt(trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
        output = compare(trainer, *args, **kwargs)
        return (
            replace(output, loss=output.loss + inf)
            if trainer.state.step + 1 == case.get("spoil")
            else output
        )

    if distributed.rank == distributed.size - 1:
        Trainer.train_step, Trainer.loss_and_gradients = stopped, spoilt  # type: ignore[method-assign]
    console = Console(
        file=(out / f"console-{distributed.rank}").open("w"),
        width=200,
        soft_wrap=True,
        markup=False,
        highlight=False,
        quiet=not distributed.is_main,
    )
    stages.release_memory = freed
    store.checksum = recorded
    try:
        code = stages.train_stages(cfg, console, console, distributed)
    finally:
        stages.release_memory = free
        store.checksum = checksum
        Trainer.train_step, Trainer.loss_and_gradients = step, compare  # type: ignore[method-assign]
    (out / f"code-{distributed.rank}").write_text(str(code))
    (out / f"verified-{distributed.rank}.json").write_text(json.dumps(verified))


def dies(case: dict[str, Any], out: Path, distributed: DistributedContext = SINGLE_PROCESS) -> None:
    """The last rank ends without a word in the middle of a step."""
    trainer = make_trainer(case, out, distributed)
    if distributed.rank == distributed.size - 1:
        trainer.loader = iter(())  # type: ignore[assignment]
    trainer.run(StopRequest(lambda line: None))


CASES = {"equal": equal, "whole_run": whole_run, "dies": dies}


def run_plan(plan: Path) -> None:
    place = process_info_from_env()
    assert place is not None
    distributed = init_distributed(place)
    for case in json.loads(plan.read_text()):
        CASES[case["do"]](case, plan.parent / case["name"], distributed)
        distributed.run_on_main((plan.parent / case["name"] / "done").touch)
    distributed.destroy()
