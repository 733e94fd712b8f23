"""Which engine a run trains with: torch's own optimizer loop, or DeepSpeed. Knows keys and parameters, no data."""

from __future__ import annotations

import socket

import torch
from rich.console import Console
from torch import nn

from medusa_train.config.schema import TrainConfig
from medusa_train.training.deepspeed_config import DEFAULT, complete, read_deepspeed, stage_of
from medusa_train.training.distributed import World, join
from medusa_train.training.engine import Engine, LocalEngine
from medusa_train.training.loss_scale import LossScale
from medusa_train.training.lr import build_scheduler
from medusa_train.training.optim import EIGHT_BIT, build_optimizer, parameter_groups
from medusa_train.training.ranks import Place
from medusa_train.training.student import Student


def build_engine(
    cfg: TrainConfig,
    draft: nn.Module,
    student: Student,
    total_steps: int,
    warmup: int,
    world: World,
    console: Console,
) -> Engine:
    """Make optimizer, schedule and the engine that moves them; says in a line what is not as it was asked for.

    DeepSpeed trains wherever there are several processes, and alone where the key `deepspeed` asks for it. Under
    ZeRO-3 the weights are split from here on, and can be read as `Engine` says only.
    """
    given = read_deepspeed(cfg)
    config = DEFAULT if given is None else given
    many = world.size > 1 or given is not None
    device, trained = student.precision.device, list(student.parameters.values())
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
    loss_scale = LossScale() if student.precision.dtype == torch.float16 else None
    if not many:
        return LocalEngine([*draft.parameters(), *trained], optimizer, scheduler, cfg.max_grad_norm, loss_scale)

    from medusa_train.training.deepspeed_engine import DeepSpeedEngine

    if world.size == 1:
        join(Place(0, 1, 0, "127.0.0.1", _free_port()))
    reason = ", for the key deepspeed is not set" if given is None else ""
    console.print(f"processes: {world.size}, by DeepSpeed's ZeRO stage {stage}{reason}")
    backbone = student.backbone
    return DeepSpeedEngine(
        draft,
        backbone.model,
        [*draft.parameters(), *backbone.head.parameters()],
        optimizer,
        scheduler,
        complete(config, cfg, world.size, backbone.hidden_size),
        world,
        loss_scale,
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
