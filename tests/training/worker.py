"""One process of a test with several, started with RANK and the rest in its environment.

The plan names cases that run one after the other, for starting processes costs more than training in them. What rank 0
finds is written beside the plan, for the test to compare with what one process finds with the same functions.
"""

from __future__ import annotations

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
from typing import Any, Literal

import torch
from rich.console import Console
from safetensors.torch import save_file
from transformers import PreTrainedModel

from medusa_train.checkpoint.store import CheckpointStore
from medusa_train.config.schema import TrainConfig
from medusa_train.data.dataset import BatchLoader
from medusa_train.losses.objective import Objective
from medusa_train.metrics_log import MetricLoggers
from medusa_train.models.loading import load_backbone
from medusa_train.models.partitioned import full_shape, gathered, gathering_modules, is_partitioned
from medusa_train.models.precision import choose_precision
from medusa_train.training import stages
from medusa_train.training.backbone_recipe import build_backbone_recipe
from medusa_train.training.deepspeed import partitioned_loading
from medusa_train.training.deepspeed_config import complete_config, loading_config
from medusa_train.training.distributed import SINGLE_PROCESS, World, init_distributed
from medusa_train.training.load_data import load_data, validation_batches
from medusa_train.training.process_info import process_info_from_env
from medusa_train.training.setup import build_heads
from medusa_train.training.signals import StopRequest
from medusa_train.training.state import Plan, TrainState, take_weights
from medusa_train.training.strategy import LocalStrategy, LossScale, Strategy, build_scheduler, parameter_groups
from medusa_train.training.trainer import Trainer

STEPS = 4
#: Parts of a few numbers each and nothing kept whole, so that tiny models are split as large ones are.
SMALL = {"reduce_bucket_size": 1000, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}


class Kept:
    """A sink that remembers the figures that must not depend on the number of processes."""

    def __init__(self) -> None:
        self.records: list[list[Any]] = []

    def log(self, record: Any) -> None:
        names = (
            "loss",
            "grad_norm",
            "objective",
            "head_top1",
            "tokens",
            "targets",
            "lm_loss",
            "lm_kl",
            "overscaled_steps",
        )
        self.records.append([record["kind"], record["step"], {n: record[n] for n in names if n in record}])

    def advance(self, step: int) -> None:
        pass

    def close(self) -> None:
        pass


def make_trainer(case: dict[str, Any], out: Path, world: World, sink: Kept) -> Trainer:
    """A trainer with the optimizer that the case names; where it has a ZeRO stage, DeepSpeed's."""
    cfg = TrainConfig(**case["keys"]).resolved()
    quiet = Console(quiet=True)
    data = load_data(cfg, quiet, world)
    torch.manual_seed(7)
    precision = choose_precision(cfg.bf16, world.device)
    zero = {"zero_optimization": {**SMALL, **case.get("zero", {})}}
    quantization: Literal["nf4"] | None = "nf4" if cfg.load_in_4bit else None
    with partitioned_loading(loading_config(zero, cfg, world.size, str(precision))):
        backbone = load_backbone(cfg.base_model, dtype=precision.dtype, quantization=quantization)
    case["loaded"] = backbone_elements(backbone.model)
    with gathering_modules(backbone.model), gathered(backbone.output_embeddings.parameters()):
        draft = build_heads(cfg, data, backbone, quiet)
    for parameter in draft.parameters():  # or the heads would all be one
        parameter.data += 0.01 * torch.randn_like(parameter)
    recipe = build_backbone_recipe(cfg, backbone, precision)
    groups = parameter_groups(draft.parameters(), 0.1, recipe.parameters.values(), 0.05, 0.0)
    if case["optimizer"] == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, momentum=0.9)
    else:
        for group in groups:
            group["lr"] *= 0.1
        optimizer = torch.optim.AdamW(groups)
    scheduler = build_scheduler("linear", optimizer, 0, STEPS)
    strategy: Strategy = LocalStrategy(optimizer, scheduler, cfg.max_grad_norm)
    if world.size > 1:
        strategy = _deepspeed(case, cfg, draft, recipe, optimizer, scheduler, world)
    loss = cfg.draft_config.heads_loss
    lm: Literal["kl", "ce"] | None = "kl" if recipe.adapter else "ce" if recipe.joint else None
    return Trainer(
        recipe=recipe,
        draft=draft,
        objective=Objective(
            draft,
            loss.decay,
            lm=lm,
            heads_coefficient=0.5,
            soft_heads=loss.soft_targets,
            weight=loss.weight,
        ),
        strategy=strategy,
        loader=BatchLoader(data.train, cfg.micro_batch_size, seed=1, rank=world.rank, size=world.size),
        validation_batches=validation_batches(data.validation, cfg.micro_batch_size),
        accumulation=cfg.gradient_accumulation_steps,
        precision=recipe.precision,
        plan=Plan(STEPS, 2.0, eval_every=2),
        store=CheckpointStore(out),
        loggers=MetricLoggers([sink]),
        patience=None,
        state=TrainState(),
        world=world,
    )


def equal(case: dict[str, Any], out: Path, world: World = SINGLE_PROCESS) -> None:
    """Train a few steps; write the figures, and the weights in the order of their names."""
    sink = Kept()
    with at_once() as counts:
        trainer = make_trainer(case, out / "run", world, sink)
    trainer.run(StopRequest(lambda line: None))
    parts = [case["loaded"], backbone_elements(trainer.recipe.backbone.model)]
    parts_of_weights = deepcopy(take_weights(trainer.draft, trainer.recipe, world))
    weights = {f"{part}.{name}": weight for part, named in parts_of_weights.items() for name, weight in named.items()}
    with at_once() as counts_at_end:
        trainer.strategy.release([*trainer.draft.parameters(), *trainer.recipe.saved])
    out.mkdir(parents=True, exist_ok=True)
    held = {"parts": parts, "gathered": max(counts, default=0), "at_end": max(counts_at_end, default=0)}
    (out / f"held-{world.rank}.json").write_text(json.dumps(held))
    if world.is_main:
        released = {f"draft.{name}": tensor for name, tensor in trainer.draft.state_dict().items()}
        released |= {f"student.{name}": tensor.detach() for name, tensor in trainer.recipe.parameters.items()}
        assert all(torch.equal(tensor.cpu(), weights[name]) for name, tensor in released.items())
        save_file({name: weight.contiguous() for name, weight in weights.items()}, out / "weights.safetensors")
        (out / "figures.json").write_text(json.dumps(sink.records))


def backbone_elements(model: torch.nn.Module) -> tuple[int, int]:
    """Count the elements of the backbone's weights in this process, and in all."""
    parameters = list(model.parameters())
    held = sum(p.numel() + (p.ds_tensor.numel() if is_partitioned(p) else 0) for p in parameters)
    return held, sum(full_shape(p).numel() for p in parameters)


@contextmanager
def at_once() -> Iterator[list[int]]:
    """Count the elements of the parameters that are gathered in each block of `gathered`, and by transformers."""
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


def whole_run(case: dict[str, Any], out: Path, world: World = SINGLE_PROCESS) -> None:
    """`train_stages` with the case's keys; rank 0's console and every rank's exit code are written.

    Between two stages, the number of backbones that are left in memory is written.
    The last rank alone gets a signal after the step `stop`, or a loss that is infinite in the step `spoil`.
    """
    cfg = TrainConfig(**case["keys"]).resolved()
    out.mkdir(parents=True, exist_ok=True)
    step, compare, free = Trainer.train_step, Trainer.compute_loss, stages._free_memory
    # DeepSpeed keeps the models of earlier ZeRO-3 cases of this process
    before = {id(thing) for thing in gc.get_objects() if issubclass(type(thing), PreTrainedModel)}

    def freed() -> None:
        free()
        left = [
            thing for thing in gc.get_objects() if issubclass(type(thing), PreTrainedModel) and id(thing) not in before
        ]
        (out / f"left-{world.rank}").write_text(str(len(left)))

    def stopped(trainer: Trainer, batches: Any) -> None:
        step(trainer, batches)
        if trainer.state.step == case.get("stop"):
            os.kill(os.getpid(), signal.SIGTERM)

    def spoilt(trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
        output = compare(trainer, *args, **kwargs)
        return replace(output, loss=output.loss + inf) if trainer.state.step + 1 == case.get("spoil") else output

    if world.rank == world.size - 1:
        Trainer.train_step, Trainer.compute_loss = stopped, spoilt  # type: ignore[method-assign]
    console = Console(file=(out / f"console-{world.rank}").open("w"), width=200, quiet=not world.is_main)
    stages._free_memory = freed
    try:
        code = stages.train_stages(cfg, console, console, world)
    finally:
        stages._free_memory = free
        Trainer.train_step, Trainer.compute_loss = step, compare  # type: ignore[method-assign]
    (out / f"code-{world.rank}").write_text(str(code))


def dies(case: dict[str, Any], out: Path, world: World = SINGLE_PROCESS) -> None:
    """The last rank ends without a word in the middle of a step."""
    trainer = make_trainer(case, out / "run", world, Kept())
    if world.rank == world.size - 1:
        trainer.loader = iter(())  # type: ignore[assignment]
    trainer.run(StopRequest(lambda line: None))


CASES = {"equal": equal, "whole_run": whole_run, "dies": dies}


def _deepspeed(case: dict[str, Any], cfg: TrainConfig, draft: Any, recipe: Any, optimizer: Any, scheduler: Any,
               world: World) -> Strategy:  # fmt: skip
    from medusa_train.training.deepspeed import DeepSpeedStrategy

    backbone = recipe.backbone
    direct = [*draft.parameters(), *backbone.output_embeddings.parameters()]
    config = complete_config({"zero_optimization": {**SMALL, **case["zero"]}}, cfg, world.size, backbone.hidden_size)
    scale = LossScale(case["loss_scale"]) if "loss_scale" in case else None
    return DeepSpeedStrategy(draft, backbone.model, direct, optimizer, scheduler, config, world, scale)


def run_plan(plan: Path) -> None:
    place = process_info_from_env()
    assert place is not None
    world = init_distributed(place)
    for case in json.loads(plan.read_text()):
        CASES[case["do"]](case, plan.parent / case["name"], world)
        world.run_on_main((plan.parent / case["name"] / "done").touch)
    world.destroy()
