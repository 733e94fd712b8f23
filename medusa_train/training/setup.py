"""Build the trainer of a run: target model, heads, loss, optimizer, checkpoint to resume from,
loggers.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from medusa_train.checkpoint.digest import digest_target_model
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
from medusa_train.data.draft_vocabulary import DraftVocabulary
from medusa_train.errors import ConfigError
from medusa_train.losses.objective import Objective
from medusa_train.metrics_log import ConsoleLogger, MetricLoggers, MetricsFile, tensorboard, wandb
from medusa_train.models.drafts import DRAFTS, draft_name
from medusa_train.models.drafts.base import Draft
from medusa_train.models.loading import choose_attention, load_target_model
from medusa_train.models.partitioned import full_shape, gathered, gathering_modules, is_partitioned
from medusa_train.models.precision import Precision, choose_kernels, limit_kernel_cache
from medusa_train.models.target_model import TargetModel
from medusa_train.progress import RunProgress
from medusa_train.training.deepspeed_config import engine_config, loading_config, stage_of
from medusa_train.training.deepspeed_strategy import DeepSpeedStrategy, partitioned_loading
from medusa_train.training.device_choices import decide_auto
from medusa_train.training.distributed import SINGLE_PROCESS, DistributedContext, init_distributed
from medusa_train.training.hidden_states import open_hidden_states
from medusa_train.training.load_data import TrainingData
from medusa_train.training.optimizer import (
    LocalStrategy,
    LossScale,
    Strategy,
    build_optimizer,
    build_scheduler,
    parameter_groups,
)
from medusa_train.training.preflight import adapter_settings, check_same_settings
from medusa_train.training.process_info import ProcessInfo, free_port
from medusa_train.training.resume import (
    NEW_STAGE,
    ResumePlan,
    check_target_model,
    describe_differences,
    forget_incomparable_best,
)
from medusa_train.training.schedule import (
    TrainingSchedule,
    few_steps_advice,
    plan_steps,
    warmup_warning,
)
from medusa_train.training.snapshot import (
    LoadedCheckpoint,
    TrainState,
    load_snapshot,
    restore_state,
    restore_weights,
)
from medusa_train.training.target_model_recipe import TargetModelRecipe, build_target_model_recipe
from medusa_train.training.trainer import Trainer


@dataclass(frozen=True)
class Stage:
    """The inputs from which a stage is built.

    Attributes:
        cfg: configuration in which `gradient_checkpointing: auto` is replaced for this device.
        start: where the stage resumes.
        store: its checkpoints.
    """

    cfg: TrainConfig
    precision: Precision
    data: TrainingData
    progress: RunProgress
    distributed: DistributedContext
    start: ResumePlan
    store: CheckpointStore

    @property
    def uses_deepspeed(self) -> bool:
        """Whether DeepSpeed trains: always in several processes; in one only if the key `deepspeed`
        is set.
        """
        return self.distributed.size > 1 or self.cfg.deepspeed is not None

    def print(self, line: str | None, style: str | None = None) -> None:
        """Print a line; None prints nothing."""
        if line is not None:
            self.progress.console.print(line, style=style)


@dataclass(frozen=True)
class Models:
    """The models of a stage, with the weights from which training continues.

    Attributes:
        checkpoint: the checkpoint to resume. Its weights are restored already, its counters and
            optimizer are not.
        fingerprint: digest of the target model's weights; None if there are no weight files.
    """

    draft: Draft
    recipe: TargetModelRecipe
    checkpoint: LoadedCheckpoint | None
    fingerprint: str | None


def build_trainer(
    cfg: TrainConfig,
    data: TrainingData,
    progress: RunProgress,
    distributed: DistributedContext = SINGLE_PROCESS,
    start: ResumePlan = NEW_STAGE,
    parent_run_dir: Path | None = None,
) -> Trainer:
    """Build all parts of a trainer, and restore the checkpoint that the stage resumes.

    The order matters: the strategy partitions or copies weights, so they are restored before. The
    run directory is written last, after all else succeeded.
    """
    cfg, precision = decide_auto(cfg, data.train, progress.print, distributed)
    store = CheckpointStore(cfg.run_dir, cfg.save_total_limit)
    stage = Stage(cfg, precision, data, progress, distributed, start, store)
    models = load_models(stage)
    loader, schedule = plan_stage(stage)
    phase = "starting DeepSpeed" if stage.uses_deepspeed else "preparing the optimizer"
    with progress.phase(phase, ticking=True):
        strategy = build_strategy(stage, models, schedule)
    objective = build_objective(cfg, models.draft)
    state = restore_run(stage, models, loader, schedule, strategy, objective)
    if models.recipe.target_model.tree_unsupported_reason is not None:
        cfg = cfg.model_copy(update={"calibration_tokens": 0})
    return Trainer(
        cfg=cfg,
        recipe=models.recipe,
        draft=models.draft,
        objective=objective,
        strategy=strategy,
        loader=loader,
        validation_batches=validation_batches(data.validation, cfg.micro_batch_size),
        schedule=schedule,
        store=store,
        loggers=open_run(stage, state, schedule),
        state=state,
        distributed=distributed,
        progress=progress,
        parent_run_dir=parent_run_dir,
    )


# 1. Target model and draft


def load_models(stage: Stage) -> Models:
    """Load the target model, build or load the draft, and restore the checkpoint's weights. All
    processes get the same weights.
    """
    cfg, distributed, start = stage.cfg, stage.distributed, stage.start
    limit_kernel_cache()
    choose_kernels(distributed.device)
    # 1. Load the models.
    with stage.progress.phase("loading the model", ticking=True):
        with distributed.failing_together():
            recipe, draft = _load_model(stage)
        if cfg.cache_hidden_states and cfg.prepared_dir is not None:  # the cache requires it
            recipe.cache = open_hidden_states(
                cfg.prepared_dir,
                [*stage.data.train, *stage.data.validation],
                draft.aux_layers,
                recipe.target_model,
                distributed,
                stage.progress.console,
                cfg.tf32,
            )
    _describe_models(stage, draft, recipe)
    # 2. Restore the weights of the checkpoint.
    fingerprint = distributed.run_on_main(digest_target_model, cfg.base_model)
    checkpoint = None
    if start.checkpoint is not None:
        with stage.progress.phase("reading the checkpoint", ticking=True):
            snapshot = load_snapshot(stage.store, start.checkpoint, distributed)
            checkpoint = LoadedCheckpoint(start.checkpoint, snapshot, start.changed)
            check_target_model(checkpoint, cfg.base_model, fingerprint, stage.progress.console)
            with distributed.failing_together():
                restore_weights(checkpoint, draft, recipe, distributed)
    return Models(draft, recipe, checkpoint, fingerprint)


def _load_model(stage: Stage) -> tuple[TargetModelRecipe, Draft]:
    """Load the target model, build the draft, and make the weights trainable that the recipe
    trains.

    If several processes train with ZeRO-3, each loads only its part of the target model.
    """
    cfg, precision = stage.cfg, stage.precision
    seed_all(cfg.seed)
    torch.set_float32_matmul_precision("high" if cfg.tf32 else "highest")
    if cfg.fp16 and precision.dtype != torch.float16:
        stage.print(f"fp16: not supported on {precision.device.type}; using {precision}")
    with partitioned_loading(loading_config(cfg, stage.distributed.size, str(precision))):
        target_model = load_target_model(
            cfg.base_model,
            dtype=precision.dtype,
            device=precision.device,
            quantization=cfg.quantization,
            trust_remote_code=cfg.trust_remote_code,
            special_tokens=cfg.special_tokens,
            only_trains=True,
        )
    target_model.end_answers_by(stage.data.chat_template, cfg.chat_template_kwargs)
    stage.print(target_model.stop_tokens.describe(target_model.tokenizer))
    with gathering_modules(target_model.model):
        stage.print(choose_attention(target_model, cfg.flash_attention, packed=cfg.sample_packing))
        with gathered(target_model.output_embeddings.parameters()):
            draft = build_heads(cfg, stage.data, target_model, stage.progress.console)
    return build_target_model_recipe(cfg, target_model, precision), draft


def seed_all(seed: int) -> None:
    """Seed the random generators of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # numpy takes 32 bits
    torch.manual_seed(seed)


def build_heads(
    cfg: TrainConfig, data: TrainingData, target_model: TargetModel, console: Console
) -> Draft:
    """Build new heads, or load the heads of `initial_run` (two-stage training), in float32."""
    section = cfg.draft_config
    initial = find_initial_heads(cfg.initial_run)
    if initial is None:
        # 1. Build new heads.
        settings = dict(section.settings)
        vocabulary = DraftVocabulary.choose(
            section, data.train, target_model.tokenizer, target_model.vocab_size
        )
        if vocabulary is not None:
            settings["token_map"] = vocabulary.tokens
        draft = DRAFTS[cfg.draft].from_target_model(target_model, dtype=torch.float32, **settings)
    else:
        # 2. Or load the heads of a run. Keys that are not set accept the heads' settings.
        # Exception: an unset `vocab_size` means the full vocabulary.
        draft = load_draft(initial, target_model, torch.float32)
        if (name := draft_name(draft)) != cfg.draft:
            raise ConfigError(f"lora_model_dir: {initial} holds a {name} draft; set draft: {name}")
        check_same_settings(
            f"the heads in {initial} have",
            [
                (section.prefix + key, value, section.settings[key])
                for key, value in draft.settings.items()
                if key in section.settings
                and (key == "vocab_size" or section.settings[key] is not None)
            ],
        )
        console.print(f"initializing the heads from {initial}")
        tokens = draft.lm_head(1).token_map
        vocabulary = None
        if tokens is not None:
            vocabulary = DraftVocabulary(tokens.cpu(), target_model.vocab_size)
    # 3. Print how much of the data a reduced vocabulary covers.
    if vocabulary is not None:
        line, *warnings = vocabulary.describe(data.train, data.validation)
        console.print(f"draft vocabulary: {line}")
        for warning in warnings:
            console.print(warning, style="yellow")
    return draft


def _describe_models(stage: Stage, draft: Draft, recipe: TargetModelRecipe) -> None:
    """Print the size of the data, which weights are trained or frozen, and notes."""
    cfg, train, validation = stage.cfg, stage.data.train, stage.data.validation
    stage.print(
        f"data: {train.describe_count()} for training ({train.tokens:,} tokens,"
        f" {train.supervised_tokens:,} of them supervised), {validation.describe_count()}"
        " for validation"
    )
    heads = sum(parameter.numel() for parameter in draft.parameters())
    trained = sum(full_shape(parameter).numel() for parameter in recipe.parameters.values())
    model = recipe.target_model.model
    if any(map(is_partitioned, model.parameters())):
        total = sum(full_shape(parameter).numel() for parameter in model.parameters())
    else:  # quantized weights pack two parameters into a byte
        total = int(model.num_parameters())
    target_model = f"target model {(total - trained) / 1e6:.1f}M frozen"
    if trained:
        target_model += f" and {trained / 1e6:.2f}M trained"
    stage.print(
        f"model: heads {heads / 1e6:.1f}M parameters (trained, float32), {target_model}, "
        f"computing in {recipe.precision} on {recipe.precision.device}"
    )
    if cfg.quantization is not None:
        learners = "the adapter and the heads" if cfg.medusa_self_distillation else "the heads"
        stage.print(
            f"note: the target model is quantized: {learners} learn from the quantized model",
            "yellow",
        )
    if cfg.torch_compile and recipe.cache is None:
        stage.print(
            "torch_compile: the target model's layers are compiled in the first steps, which take"
            " longer"
        )
    elif cfg.torch_compile:
        stage.print(
            "torch_compile: the target model's layers are compiled once states are computed; states"
            " that are stored are read as they are, compiled or not"
        )


# 2. The steps


def plan_stage(stage: Stage) -> tuple[BatchLoader, TrainingSchedule]:
    """Return this process's batches and the schedule of the run, and print the schedule."""
    cfg, data, size = stage.cfg, stage.data, stage.distributed.size
    loader, schedule = plan_steps(cfg, data.train, stage.distributed.rank, size)
    unit = "rows"
    if cfg.sample_packing:
        unit = "packed rows"
    elif data.train.conversations == len(data.train):
        unit = "conversations"
    rates = f"peak learning rate {cfg.heads_learning_rate:g}"
    if cfg.recipe == "medusa2":
        rates += f" (target model {cfg.learning_rate:g})"
    batch = cfg.micro_batch_size * cfg.gradient_accumulation_steps * size
    stage.print(
        f"plan: {schedule.total_steps:,} steps of {batch} {unit}"
        f" ({schedule.epoch(schedule.total_steps):.2f} epochs), {rates} after"
        f" {schedule.warmup_steps} warmup steps, {cfg.lr_scheduler} schedule"
    )
    stage.print(few_steps_advice(cfg, schedule), "yellow")
    stage.print(warmup_warning(schedule.warmup_steps, schedule.total_steps), "yellow")
    return loader, schedule


# 3. Optimizer and loss


def build_strategy(stage: Stage, models: Models, schedule: TrainingSchedule) -> Strategy:
    """Build optimizer, schedule and strategy; print a line if they differ from the configuration.

    At ZeRO stage 3 the weights are partitioned from here on, and must be read with the
    functions of `models.partitioned`.
    """
    cfg, distributed = stage.cfg, stage.distributed
    draft, recipe = models.draft, models.recipe
    groups = parameter_groups(
        draft.parameters(),
        cfg.heads_learning_rate,
        recipe.parameters.values(),
        cfg.learning_rate,
        cfg.weight_decay,
    )
    optimizer, notice = build_optimizer(
        cfg.optimizer,
        groups,
        recipe.precision.device,
        betas=(cfg.adam_beta1, cfg.adam_beta2),
        epsilon=cfg.adam_epsilon,
    )
    stage.print(notice)
    lr_scheduler = build_scheduler(
        cfg.lr_scheduler,
        optimizer,
        schedule.warmup_steps,
        schedule.total_steps,
        cfg.cosine_min_lr_ratio,
    )
    loss_scale = LossScale() if recipe.precision.dtype == torch.float16 else None
    if not stage.uses_deepspeed:
        return LocalStrategy(optimizer, lr_scheduler, cfg.max_grad_norm, loss_scale)

    if distributed.size == 1 and not torch.distributed.is_initialized():  # by stage one
        init_distributed(ProcessInfo(0, 1, 0, "127.0.0.1", free_port()))
    config = engine_config(cfg, distributed.size, recipe.target_model.hidden_size)
    default = " (default, deepspeed is not set)" if cfg.deepspeed is None else ""
    stage.print(f"processes: {distributed.size}, DeepSpeed ZeRO stage {stage_of(config)}{default}")
    return DeepSpeedStrategy(
        draft,
        recipe.target_model.model,
        optimizer,
        lr_scheduler,
        config,
        distributed,
        loss_scale,
    )


def build_objective(cfg: TrainConfig, draft: Draft) -> Objective:
    """Build the loss of the draft; if the target model is trained, the loss includes it."""
    loss = cfg.draft_config.heads_loss
    keys: dict[str, Any] = {"weight": loss.weight}
    if cfg.recipe == "medusa2":
        keys = {
            "lm": "kl" if cfg.medusa_self_distillation else "ce",
            "rho": cfg.medusa_distillation_regularization,
            "heads_coefficient": cfg.medusa_heads_coefficient,
            "schedule": cfg.medusa_scheduler,
        }
    return Objective(draft, loss.decay, soft_targets=loss.soft_targets, **keys)


# 4. The rest of the checkpoint


def restore_run(
    stage: Stage,
    models: Models,
    loader: BatchLoader,
    schedule: TrainingSchedule,
    strategy: Strategy,
    objective: Objective,
) -> TrainState:
    """Restore the optimizer, the random generators and the position in the data; return the
    counters. If nothing is resumed, the counters are those of a new run.
    """
    distributed, store, console = stage.distributed, stage.store, stage.progress.console
    if not distributed.is_main:
        # weights were created with equal seeds; from now on dropout masks differ between processes
        torch.manual_seed(hash((stage.cfg.seed, distributed.rank)))
    state = TrainState()
    if models.checkpoint is not None:
        with distributed.failing_together():
            state = restore_state(models.checkpoint, strategy, distributed)
            loader.load_state_dict(state.data)
            describe_differences(
                models.checkpoint, state, schedule, distributed.size, store.steps(), console
            )
    forget_incomparable_best(
        state,
        stage.data.validation.fingerprint(),
        {**objective.terms, "quantization": stage.cfg.quantization},
        store,
        stage.cfg.early_stopping_patience,
        distributed,
        console,
    )
    if models.fingerprint is not None:  # otherwise keep the checkpoint's fingerprint
        state.base_model_digest = models.fingerprint
    return state


# 5. The run directory


def open_run(stage: Stage, state: TrainState, schedule: TrainingSchedule) -> MetricLoggers:
    """Prepare the run directory, write the configuration as it is used, and open the logs. Only
    rank 0 has logs.
    """
    cfg = _as_used(stage)
    run_dir = cfg.run_dir
    console = stage.progress.console
    stage.distributed.run_on_main(prepare_output_dir, run_dir, state.step, cfg.initial_run)
    if not stage.distributed.is_main:
        return MetricLoggers([])
    write_config(cfg, run_dir)
    boards = []
    if cfg.use_tensorboard:
        boards.append(tensorboard(console, run_dir, state.step))
    if cfg.wandb_project is not None:
        settings = cfg.model_dump(mode="json", exclude_none=True)  # wandb() masks secrets
        boards.append(
            wandb(
                console,
                run_dir,
                cfg.wandb_project,
                cfg.wandb_entity,
                cfg.wandb_run_id,
                cfg.wandb_name,
                settings,
            )
        )
    with writing(run_dir):
        shown = ConsoleLogger(console, schedule.total_steps, state.step, stage.progress.title)
        file = MetricsFile(run_dir / METRICS, state.step, state.evaluated, shown.warn)
        return MetricLoggers([file, shown, *boards])


def _as_used(stage: Stage) -> TrainConfig:
    """Return the configuration with the values that were taken from the data, and from the adapter
    of the run that this one starts from.
    """
    cfg = stage.cfg
    used_values: dict[str, Any] = {
        "chat_template": stage.data.chat_template,
        "sequence_len": stage.data.sequence_len,
    }
    if (adapter := find_initial_adapter(cfg.initial_run)) is not None:
        used_values |= adapter_settings(adapter)
        used_values["lora_modules_to_save"] = used_values["lora_modules_to_save"] or None
        if cfg.lora_target_linear:
            del used_values["lora_target_modules"]
    return cfg.model_copy(update=used_values)
