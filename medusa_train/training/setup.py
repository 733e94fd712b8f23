"""Build the trainer of a run: backbone, heads, loss, optimizer, the checkpoint to resume from, and
loggers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from medusa_train.checkpoint.digest import digest_base_model
from medusa_train.checkpoint.heads import load_draft
from medusa_train.checkpoint.resolve import find_initial_adapter, find_initial_heads
from medusa_train.checkpoint.run_directory import (
    METRICS,
    prepare_output_dir,
    write_config,
    writing,
)
from medusa_train.checkpoint.store import CheckpointStore
from medusa_train.config.schema import TrainConfig
from medusa_train.data.dataset import BatchLoader, validation_batches
from medusa_train.data.draft_vocabulary import (
    choose_draft_vocabulary,
    describe_vocabulary,
    warn_of_coverage,
)
from medusa_train.errors import ConfigError
from medusa_train.losses.objective import Objective
from medusa_train.metrics_log import ConsoleLogger, MetricLoggers, MetricsFile, tensorboard, wandb
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts import DRAFTS, draft_name
from medusa_train.models.drafts.base import Draft
from medusa_train.models.loading import choose_attention, load_backbone, resolve_backbone
from medusa_train.models.partitioned import full_shape, gathered, gathering_modules, is_partitioned
from medusa_train.models.precision import Precision, choose_kernels, limit_kernel_cache
from medusa_train.progress import RunProgress
from medusa_train.training.backbone_recipe import BackboneRecipe, build_backbone_recipe
from medusa_train.training.deepspeed_config import engine_config, loading_config, stage_of
from medusa_train.training.deepspeed_strategy import DeepSpeedStrategy, partitioned_loading
from medusa_train.training.device_choices import (
    choose_checkpointing,
    memory_without_checkpointing,
    precision_of_run,
)
from medusa_train.training.distributed import SINGLE_PROCESS, World, init_distributed
from medusa_train.training.hidden_states import open_hidden_states
from medusa_train.training.load_data import TrainingData
from medusa_train.training.optimizer import (
    LocalStrategy,
    LossScale,
    Strategy,
    build_optimizer,
    build_scheduler,
    parameter_groups,
    warmup_warning,
)
from medusa_train.training.process_info import ProcessInfo, free_port
from medusa_train.training.resume import (
    NEW_STAGE,
    StageStart,
    check_backbone,
    describe_differences,
    describe_other_choices,
    forget_incomparable_best,
    load_checkpoint,
)
from medusa_train.training.snapshot import TrainState, restore_state, restore_weights
from medusa_train.training.trainer import ROUNDING, Plan, Trainer

#: Fewer steps in all are reported, with what to change.
FEW_STEPS = 20


def build_trainer(
    cfg: TrainConfig,
    data: TrainingData,
    progress: RunProgress,
    world: World = SINGLE_PROCESS,
    start: StageStart = NEW_STAGE,
) -> Trainer:
    """Build everything that trains, and restore what the stage starts from.

    The order matters: a checkpoint's weights are restored before the strategy partitions or copies
    them, its optimizer after there is one, and nothing is written to the run directory before all of
    it succeeded.
    """
    console = progress.console
    limit_kernel_cache()
    choose_kernels(world.device)

    # 1. Backbone and heads, with what is decided for this device.
    # the same dtype in every process, however much memory each finds
    dtype = world.run_on_main(lambda: precision_of_run(cfg, world.device, progress.print).dtype)
    precision = Precision(world.device, dtype)
    needed = partial(_memory_without_checkpointing, cfg, data, precision)
    before = start.choices.get("gradient_checkpointing")
    cfg, note = choose_checkpointing(cfg, world.device, needed, before)
    notes = [] if note is None else [note]
    for line in (*notes, *describe_other_choices(cfg, start)):
        console.print(line, highlight=False, soft_wrap=True)
    with progress.phase("loading the model", ticking=True):
        with world.failing_together():
            draft, recipe = _load_model(cfg, data, precision, console, world)
        if cfg.cache_hidden_states and cfg.prepared_dir is not None:  # which the cache requires
            documents = [*data.train, *data.validation]
            recipe.cache = open_hidden_states(
                cfg.prepared_dir, documents, draft.needs, recipe.backbone, world, console, cfg.tf32
            )

    # 2. The batches, and the plan of the steps.
    loader = BatchLoader(
        data.train, cfg.micro_batch_size, seed=cfg.seed, rank=world.rank, size=world.size
    )
    plan = make_plan(cfg, loader.batches_per_epoch, world.size)
    advice = few_steps_advice(cfg, plan, loader.batches_per_epoch, world.size)
    for line, style in _describe_run(cfg, data, recipe, draft, plan, world.size, advice):
        console.print(line, style=style)

    # 3. The weights of the checkpoint.
    store = CheckpointStore(cfg.run_dir, cfg.save_total_limit)
    backbone_hash = world.run_on_main(lambda: digest_base_model(cfg.base_model))
    checkpoint = None
    if start.checkpoint is not None:
        with progress.phase("reading the checkpoint", ticking=True):
            checkpoint = load_checkpoint(start.checkpoint, start.changed, store, world)
            check_backbone(checkpoint, cfg.base_model, backbone_hash, console)
            with world.failing_together():
                restore_weights(checkpoint, draft, recipe, world)

    # 4. The optimizer, and its state with the counters and random generators.
    with progress.phase(_strategy_phase(cfg, world), ticking=True):
        strategy = build_strategy(cfg, draft, recipe, plan, world, console)
    if not world.is_main:
        # other dropout masks per process, now that weights are equal
        torch.manual_seed(hash((cfg.seed, world.rank)))
    state = TrainState()
    if checkpoint is not None:
        with world.failing_together():
            state = restore_state(checkpoint, strategy, world)
            loader.load_state_dict(state.data)
            describe_differences(checkpoint, state, plan, world.size, store.steps(), console)
    objective = _build_objective(cfg, draft, recipe.joint)
    forget_incomparable_best(
        state,
        data.validation.fingerprint(),
        {**objective.terms, "quantization": cfg.quantization},
        store,
        cfg.early_stopping_patience,
        world,
        console,
    )
    if backbone_hash is not None:  # else the checkpoint's stands for a later resume
        state.base_model_digest = backbone_hash

    # 5. The run directory, with the configuration as it was used, and the logs.
    loggers = _open_loggers(_as_used(cfg, data, recipe), state, plan, progress, world)
    return Trainer(
        trust_remote_code=cfg.trust_remote_code,
        recipe=recipe,
        draft=draft,
        objective=objective,
        strategy=strategy,
        loader=loader,
        validation_batches=validation_batches(data.validation, cfg.micro_batch_size),
        accumulation=cfg.gradient_accumulation_steps,
        plan=plan,
        store=store,
        loggers=loggers,
        patience=cfg.early_stopping_patience,
        state=state,
        top_k_in_log=cfg.medusa_logging,
        max_nonfinite_steps=cfg.max_nonfinite_steps,
        world=world,
        progress=progress,
    )


# Backbone and heads


def _load_model(
    cfg: TrainConfig, data: TrainingData, precision: Precision, console: Console, world: World
) -> tuple[Draft, BackboneRecipe]:
    """Load the backbone, build the heads and make trainable what the recipe trains; the same in
    every process.

    Several processes that train with ZeRO-3 load their part of the backbone only.
    """
    seed_all(cfg.seed)
    torch.set_float32_matmul_precision("high" if cfg.tf32 else "highest")
    if cfg.fp16 and precision.dtype != torch.float16:
        console.print(f"fp16: not supported on {world.device.type}; using {precision}")
    with partitioned_loading(loading_config(cfg, world.size, str(precision))):
        backbone = load_backbone(
            cfg.base_model,
            dtype=precision.dtype,
            device=precision.device,
            quantization=cfg.quantization,
            trust_remote_code=cfg.trust_remote_code,
            special_tokens=cfg.special_tokens,
        )
    backbone.end_answers_by(data.chat_template, cfg.chat_template_kwargs)
    if (ends := backbone.stop_tokens.describe(backbone.tokenizer)) is not None:
        console.print(ends, highlight=False, markup=False)
    with gathering_modules(backbone.model):
        console.print(
            choose_attention(backbone, cfg.flash_attention, packed=cfg.sample_packing),
            highlight=False,
        )
        with gathered(backbone.output_embeddings.parameters()):
            draft = build_heads(cfg, data, backbone, console)
    return draft, build_backbone_recipe(cfg, backbone, precision)


def _memory_without_checkpointing(
    cfg: TrainConfig, data: TrainingData, precision: Precision
) -> int:
    """Estimate the bytes of a step that keeps all activations, from the backbone's shape."""
    _, model_config = resolve_backbone(cfg.base_model, trust_remote_code=cfg.trust_remote_code)
    return memory_without_checkpointing(cfg, model_config, data.train, precision)


def seed_all(seed: int) -> None:
    """Seed the random generators of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # numpy takes 32 bits
    torch.manual_seed(seed)


def build_heads(
    cfg: TrainConfig, data: TrainingData, backbone: Backbone, console: Console
) -> Draft:
    """Build new heads, or load those of `initial_run` (two-stage training), in float32."""
    section = cfg.draft_config
    initial = find_initial_heads(cfg.initial_run)
    if initial is None:
        settings = dict(section.settings)
        key = section.vocab_size_key
        token_map = choose_draft_vocabulary(
            settings.get("vocab_size"), data.train, backbone.tokenizer, backbone.vocab_size, key
        )
        if token_map is not None:
            _print_vocabulary(token_map, data, backbone.vocab_size, console, key)
            settings["token_map"] = token_map
        return DRAFTS[cfg.draft].from_backbone(backbone, dtype=torch.float32, **settings)

    draft = load_draft(initial, backbone, torch.float32)
    name = draft_name(draft)
    if name != cfg.draft:
        raise ConfigError(f"lora_model_dir: {initial} holds a {name} draft; set draft: {name}")
    # a key that is not set takes what the heads have, except for the vocabulary, where it means all
    # tokens
    trained = []
    wanted = []
    for key, value in draft.settings.items():
        configured = section.settings.get(key)
        takes_any = configured is None and key != "vocab_size"
        if key not in section.settings or takes_any or value == configured:
            continue
        trained.append(f"{section.prefix}{key}: {value}")
        wanted.append(f"{section.prefix}{key}: {configured}")
    if trained:
        raise ConfigError(
            f"lora_model_dir: the heads in {initial} have {', '.join(trained)}, the configuration"
            f" {', '.join(wanted)}"
        )
    console.print(f"initializing the heads from {initial}", highlight=False, soft_wrap=True)
    token_map = draft.lm_head(1).token_map
    if token_map is not None:
        _print_vocabulary(token_map.cpu(), data, backbone.vocab_size, console)
    return draft


def _print_vocabulary(
    token_map: Tensor, data: TrainingData, vocab_size: int, console: Console, key: str | None = None
) -> None:
    """Print how much of the data a reduced vocabulary covers, and a warning if that is little;
    `key` as for `describe_vocabulary`.
    """
    about = (token_map, data.train, data.validation, vocab_size)
    line = describe_vocabulary(*about, key=key)
    console.print(f"draft vocabulary: {line}", highlight=False, soft_wrap=True)
    if (warning := warn_of_coverage(*about, key=key)) is not None:
        console.print(warning, style="yellow", highlight=False, soft_wrap=True)


# Plan, optimizer and loss


def make_plan(cfg: TrainConfig, micro_batches_per_epoch: int, processes: int = 1) -> Plan:
    """Plan the run's steps; it evaluates and saves once per epoch unless the configuration says
    otherwise.

    Raises:
        ConfigError: the learning rate is 0 in all of them.
    """
    per_epoch = micro_batches_per_epoch / (cfg.gradient_accumulation_steps * processes)
    total = cfg.max_steps or max(1, math.ceil(cfg.num_epochs * per_epoch - ROUNDING))
    warmup = cfg.warmup_steps
    if warmup is None:
        warmup = math.ceil((cfg.warmup_ratio or 0.0) * total - ROUNDING)

    if cfg.lr_scheduler == "constant":
        warmup = 0
    if total == 1 and warmup > 0:  # warm-up starts at 0
        key = "warmup_ratio" if cfg.warmup_steps is None else "warmup_steps"
        more = f"max_steps: {FEW_STEPS}"
        if cfg.max_steps is None:
            more = _keys_for_more_steps(cfg, micro_batches_per_epoch, processes)
        raise ConfigError(
            f"{key}: {getattr(cfg, key)}: the learning rate is 0 in the only step of the run, so"
            f" nothing would be trained. Set {more}, or {key}: 0"
        )

    def every(steps: float | None, times_per_epoch: int | None) -> float:
        """Return the steps between two evaluations or checkpoints."""
        if not steps:
            return per_epoch / (times_per_epoch or 1)
        if steps < 1:  # a fraction of the run
            return max(1, round(steps * total))
        return steps

    return Plan(
        total_steps=total,
        steps_per_epoch=per_epoch,
        warmup_steps=warmup,
        logging_steps=cfg.logging_steps,
        eval_every=every(cfg.eval_steps, cfg.evals_per_epoch),
        save_every=every(cfg.save_steps, cfg.saves_per_epoch),
    )


def few_steps_advice(
    cfg: TrainConfig, plan: Plan, micro_batches_per_epoch: int, processes: int
) -> str | None:
    """Return what to change if a run has few steps that nobody asked for by `max_steps`."""
    if cfg.max_steps is not None or plan.total_steps >= FEW_STEPS:
        return None
    more = _keys_for_more_steps(cfg, micro_batches_per_epoch, processes)
    return f"note: {plan.total_steps} steps in all are few to train a draft; for more set {more}"


def _keys_for_more_steps(cfg: TrainConfig, micro_batches_per_epoch: int, processes: int) -> str:
    """Return values of keys with which the run has `FEW_STEPS` steps: a smaller batch and, if that
    is not enough, more epochs.
    """
    per_epoch = micro_batches_per_epoch / processes
    accumulation = max(1, int(cfg.num_epochs * per_epoch / FEW_STEPS))
    epochs = math.ceil(FEW_STEPS * accumulation / per_epoch - ROUNDING)
    changed = []
    if accumulation < cfg.gradient_accumulation_steps:
        changed.append(f"gradient_accumulation_steps: {accumulation}")
    if epochs > cfg.num_epochs:
        changed.append(f"num_epochs: {epochs}")
    return " and ".join(changed)


def _strategy_phase(cfg: TrainConfig, world: World) -> str:
    """Return what the time for building the strategy is called."""
    if world.size == 1 and cfg.deepspeed is None:
        return "preparing the optimizer"
    return "starting DeepSpeed (which compiles an extension once)"


def build_strategy(
    cfg: TrainConfig,
    draft: nn.Module,
    recipe: BackboneRecipe,
    plan: Plan,
    world: World,
    console: Console,
) -> Strategy:
    """Build optimizer, schedule and strategy; print a line where they differ from the
    configuration.

    Several processes train with DeepSpeed, one process does where the key `deepspeed` is set. Under
    ZeRO stage 3 the weights are partitioned from here on and must be read as in
    `models.partitioned`.
    """
    trained = list(recipe.parameters.values())
    groups = parameter_groups(
        draft.parameters(), cfg.heads_learning_rate, trained, cfg.learning_rate, cfg.weight_decay
    )
    optimizer, notice = build_optimizer(
        cfg.optimizer,
        groups,
        recipe.precision.device,
        betas=(cfg.adam_beta1, cfg.adam_beta2),
        epsilon=cfg.adam_epsilon,
    )
    if notice:
        console.print(notice)
    scheduler = build_scheduler(
        cfg.lr_scheduler, optimizer, plan.warmup_steps, plan.total_steps, cfg.cosine_min_lr_ratio
    )
    loss_scale = None
    if recipe.precision.dtype == torch.float16:
        loss_scale = LossScale()
    if world.size == 1 and cfg.deepspeed is None:
        return LocalStrategy(optimizer, scheduler, cfg.max_grad_norm, loss_scale)

    if world.size == 1 and not torch.distributed.is_initialized():  # by stage one
        init_distributed(ProcessInfo(0, 1, 0, "127.0.0.1", free_port()))
    backbone = recipe.backbone
    config = engine_config(cfg, world.size, backbone.hidden_size)
    default = ""
    if cfg.deepspeed is None:
        default = " (default, deepspeed is not set)"
    console.print(f"processes: {world.size}, DeepSpeed ZeRO stage {stage_of(config)}{default}")
    read_directly = [*draft.parameters(), *backbone.output_embeddings.parameters()]
    return DeepSpeedStrategy(
        draft, backbone.model, read_directly, optimizer, scheduler, config, world, loss_scale
    )


def _build_objective(cfg: TrainConfig, draft: Draft, joint: bool) -> Objective:
    loss = cfg.draft_config.heads_loss
    keys: dict[str, Any] = {"weight": loss.weight}
    if joint:
        keys = {
            "lm": "kl" if cfg.medusa_self_distillation else "ce",
            "rho": cfg.medusa_distillation_regularization,
            "heads_coefficient": cfg.medusa_heads_coefficient,
            "schedule": cfg.medusa_scheduler,
        }
    return Objective(draft, loss.decay, soft_targets=loss.soft_targets, **keys)


# Run directory


def _as_used(cfg: TrainConfig, data: TrainingData, recipe: BackboneRecipe) -> TrainConfig:
    """Return the configuration with what was found in data and adapter."""
    used: dict[str, Any] = {
        "chat_template": data.chat_template,
        "sequence_len": data.sequence_len,
    }
    if recipe.adapter is not None:
        lora = recipe.adapter.peft.peft_config["default"]
        used["lora_r"] = lora.r
        used["lora_alpha"] = lora.lora_alpha
        used["lora_dropout"] = lora.lora_dropout
        if find_initial_adapter(cfg.initial_run) is not None:  # it came with lora_model_dir
            used["lora_modules_to_save"] = sorted(lora.modules_to_save or ()) or None
            if not cfg.lora_target_linear:
                targets = lora.target_modules
                if isinstance(targets, str):  # a pattern
                    targets = [targets]
                used["lora_target_modules"] = sorted(targets)
    return cfg.model_copy(update=used)


def _open_loggers(
    cfg: TrainConfig, state: TrainState, plan: Plan, progress: RunProgress, world: World
) -> MetricLoggers:
    """Prepare the run directory, write the configuration as it was used, and open the logs; only
    rank 0 has any.
    """
    out = cfg.run_dir
    console = progress.console
    world.run_on_main(lambda: prepare_output_dir(out, state.step, cfg.initial_run))
    if not world.is_main:
        return MetricLoggers([])
    write_config(cfg, out)
    boards = []
    if cfg.use_tensorboard:
        boards.append(tensorboard(console, out, state.step))
    if cfg.wandb_project is not None:
        settings = cfg.model_dump(mode="json", exclude_none=True)  # wandb() masks what is secret
        boards.append(
            wandb(
                console,
                out,
                cfg.wandb_project,
                cfg.wandb_entity,
                cfg.wandb_run_id,
                cfg.wandb_name,
                settings,
            )
        )
    with writing(out):
        shown = ConsoleLogger(console, plan.total_steps, state.step, progress.title)
        file = MetricsFile(out / METRICS, state.step, state.evaluated, shown.warn)
        return MetricLoggers([file, shown, *boards])


# What is printed


def _describe_run(
    cfg: TrainConfig,
    data: TrainingData,
    recipe: BackboneRecipe,
    draft: Draft,
    plan: Plan,
    processes: int,
    advice: str | None,
) -> Iterator[tuple[str, str | None]]:
    """Describe data, model and plan in a few lines, each with the style in which it is printed."""
    data_line = (
        f"data: {data.train.describe_count()} for training ({data.train.tokens:,} tokens,"
        f" {data.train.supervised_tokens:,} of them supervised), {data.validation.describe_count()}"
        " for validation"
    )
    yield data_line, None
    yield _describe_model(draft, recipe), None
    if cfg.quantization is not None:
        learners = "the heads"
        if cfg.medusa_self_distillation:
            learners = "the adapter and the heads"
        note = f"note: the backbone is quantized: {learners} learn from the quantized model"
        yield note, "yellow"
    if cfg.torch_compile:
        compiling = (
            "torch_compile: the backbone's layers are compiled in the first steps, which take"
            " longer"
        )
        if recipe.cache is not None:
            compiling = (
                "torch_compile: the backbone's layers are compiled once states are computed; states"
                " that are stored are read as they are, compiled or not"
            )
        yield compiling, None
    plan_line = _describe_plan(cfg, data, plan, processes, trains_backbone=bool(recipe.parameters))
    yield plan_line, None
    for warning in (advice, warmup_warning(plan.warmup_steps, plan.total_steps)):
        if warning:
            yield warning, "yellow"


def _describe_model(draft: Draft, recipe: BackboneRecipe) -> str:
    """Say how many parameters are trained and frozen, and in which dtype they are computed."""
    heads = sum(parameter.numel() for parameter in draft.parameters())
    trained = sum(full_shape(parameter).numel() for parameter in recipe.parameters.values())
    whole = recipe.backbone.model
    if any(map(is_partitioned, whole.parameters())):
        total = sum(full_shape(parameter).numel() for parameter in whole.parameters())
    else:  # quantized weights pack two parameters into a byte
        total = int(whole.num_parameters())
    backbone = f"backbone {(total - trained) / 1e6:.1f}M frozen"
    if trained:
        backbone += f" and {trained / 1e6:.2f}M trained"
    return (
        f"model: heads {heads / 1e6:.1f}M parameters (trained, float32), {backbone}, "
        f"computing in {recipe.precision} on {recipe.precision.device}"
    )


def _describe_plan(
    cfg: TrainConfig, data: TrainingData, plan: Plan, processes: int, *, trains_backbone: bool
) -> str:
    """Say how many steps are taken, of what, and with which learning rates."""
    batch = cfg.micro_batch_size * cfg.gradient_accumulation_steps * processes
    if cfg.sample_packing:
        unit = "packed rows"
    elif data.train.conversations == len(data.train):
        unit = "conversations"
    else:
        unit = "rows"
    rates = f"peak learning rate {cfg.heads_learning_rate:g}"
    if trains_backbone:
        rates += f" (backbone {cfg.learning_rate:g})"
    return (
        f"plan: {plan.total_steps:,} steps of {batch} {unit}"
        f" ({plan.epoch(plan.total_steps):.2f} epochs), {rates} after {plan.warmup_steps} warmup"
        f" steps, {cfg.lr_scheduler} schedule"
    )
