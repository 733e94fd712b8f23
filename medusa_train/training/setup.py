"""From a configuration to a trainer that is ready to run: data, backbone, heads, optimizer, place. Runs nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from medusa_train.checkpoint.heads import load_draft
from medusa_train.checkpoint.run_layout import prepare_output_dir, write_config, writing
from medusa_train.checkpoint.store import CheckpointStore
from medusa_train.config.schema import TrainConfig
from medusa_train.data.dataset import BatchLoader
from medusa_train.data.draft_vocabulary import describe_vocabulary, draft_vocabulary
from medusa_train.errors import ConfigError
from medusa_train.losses.objective import Objective
from medusa_train.metrics_log import Dashboard, MetricLoggers, TensorBoard, Wandb, open_metric_loggers
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts import DRAFTS, draft_name
from medusa_train.models.drafts.base import Draft
from medusa_train.models.precision import choose_precision
from medusa_train.training.backbone_recipe import (
    BackboneRecipe,
    build_backbone_recipe,
    choose_attention,
    find_initial_heads,
)
from medusa_train.training.distributed import SINGLE_PROCESS, World
from medusa_train.training.load_data import TrainingData, validation_batches, with_template
from medusa_train.training.optim import (
    count_warmup_steps,
    warmup_warning,
)
from medusa_train.training.state import (
    Plan,
    TrainState,
    count_steps,
    find_checkpoint,
    interval,
    random_states,
    restore_place,
    restore_weights,
    seed_all,
)
from medusa_train.training.strategy import build_strategy
from medusa_train.training.trainer import Trainer


@dataclass
class Ready:
    """A trainer, the heads as they are saved and decoded with, and where the run goes."""

    trainer: Trainer
    draft: Draft
    out: Path


def build(cfg: TrainConfig, data: TrainingData, console: Console, world: World = SINGLE_PROCESS) -> Ready:
    """Load the backbone, make the heads and all that trains them, and take up an earlier run's place.

    Raises:
        BackboneError: the backbone can't be loaded.
        CheckpointError: the checkpoint to go on from is damaged, or of other heads.
    """
    draft, recipe = world.run_on_all(lambda: _model(cfg, data, console, world.device))
    loader = BatchLoader(data.train, cfg.micro_batch_size, seed=cfg.seed, rank=world.rank, size=world.size)
    plan = make_plan(cfg, loader.steps_per_epoch, world.size)
    warmup = count_warmup_steps(cfg.warmup_steps, cfg.warmup_ratio, plan.total_steps)
    _describe(cfg, data, recipe, draft, plan, warmup, console, world.size)

    store = CheckpointStore(Path(cfg.output_dir).expanduser(), cfg.save_total_limit)
    earlier = find_checkpoint(cfg, store, world, console)
    if earlier is not None:  # before the strategy splits the weights or copies them
        restore_weights(earlier.snapshot, draft, recipe, str(earlier.path))
    strategy = build_strategy(cfg, draft, recipe, plan.total_steps, warmup, world, console)
    if not world.is_main:
        torch.manual_seed(hash((cfg.seed, world.rank)))  # a dropout of its own; all weights are made by now
    state = TrainState()
    if earlier is not None:
        state = restore_place(earlier.snapshot, strategy, str(earlier.path), world)
        loader.load_state_dict(state.data)
        console.print(f"going on after step {state.step}, from {earlier.path}")
        if (before := len(random_states(earlier.snapshot))) != world.size:
            console.print(f"note: {before} processes began this run, {world.size} go on: dropout is another from here")
    out = world.run_on_main(lambda: prepare_output_dir(cfg, state.step))
    loggers = MetricLoggers([])
    if world.is_main:
        write_config(with_template(cfg, recipe.backbone.tokenizer), out)
        dashboards = _dashboards(cfg, out, state.step, console)
        with writing(out):
            loggers = open_metric_loggers(out, console, plan.total_steps, state.step, dashboards, state.evaluated)
    trainer = Trainer(
        recipe=recipe,
        draft=draft,
        objective=_objective(cfg, draft, recipe),
        strategy=strategy,
        loader=loader,
        validation_batches=validation_batches(data.validation, cfg.micro_batch_size),
        accumulation=cfg.gradient_accumulation_steps,
        precision=recipe.precision,
        plan=plan,
        store=store,
        loggers=loggers,
        patience=cfg.early_stopping_patience,
        state=state,
        top_k_in_log=cfg.medusa_logging,
        max_nonfinite_steps=cfg.max_nonfinite_steps,
        world=world,
    )
    return Ready(trainer, draft, out)


def make_plan(cfg: TrainConfig, micro_batches_per_epoch: int, processes: int = 1) -> Plan:
    """Lay out the run's steps; evaluations and checkpoints come once per epoch where the config is silent."""
    total, per_epoch = count_steps(
        micro_batches_per_epoch, cfg.gradient_accumulation_steps * processes, cfg.num_epochs, cfg.max_steps
    )
    return Plan(
        total_steps=total,
        steps_per_epoch=per_epoch,
        logging_steps=cfg.logging_steps,
        eval_every=interval(cfg.eval_steps, total),
        evals_per_epoch=None if cfg.eval_steps else cfg.evals_per_epoch or 1,
        save_every=interval(cfg.save_steps, total),
        saves_per_epoch=None if cfg.save_steps else cfg.saves_per_epoch or 1,
    )


def _model(
    cfg: TrainConfig, data: TrainingData, console: Console, device: torch.device
) -> tuple[Draft, BackboneRecipe]:
    """Load the backbone and make of it what the recipe trains; the same in every process."""
    seed_all(cfg.seed)
    if cfg.tf32:
        torch.set_float32_matmul_precision("high")
    precision = choose_precision(cfg.bf16, device, fp16=cfg.fp16)
    if cfg.fp16 and precision.dtype != torch.float16:
        console.print(f"fp16: not on a {device.type}, computing in {precision}")
    backbone = Backbone.load(
        cfg.base_model,
        dtype=precision.dtype,
        device=precision.device,
        quantization="nf4" if cfg.load_in_4bit else "int8" if cfg.load_in_8bit else None,
        trust_remote_code=cfg.trust_remote_code,
    )
    console.print(choose_attention(backbone, cfg.flash_attention, packed=cfg.sample_packing), highlight=False)
    draft = _heads(cfg, data, backbone, console)
    return draft, build_backbone_recipe(cfg, backbone, precision)


def _heads(cfg: TrainConfig, data: TrainingData, backbone: Backbone, console: Console) -> Draft:
    """Untrained heads, or those of the run that `lora_model_dir` names (two-stage training); float32 masters."""
    earlier = find_initial_heads(cfg)
    section = cfg.draft_config
    if earlier is None:
        known = draft_vocabulary(cfg, data.train, backbone.tokenizer, backbone.vocab_size)
        if known is None:
            return DRAFTS[cfg.draft].from_backbone(backbone, dtype=torch.float32, **section.settings)
        line = describe_vocabulary(known, data.train, data.validation, backbone.vocab_size)
        console.print(f"draft vocabulary: {line}", highlight=False)
        return DRAFTS[cfg.draft].from_backbone(backbone, dtype=torch.float32, token_map=known, **section.settings)
    draft = load_draft(earlier, backbone, torch.float32)
    if draft_name(draft) != cfg.draft:
        raise ConfigError(
            f"lora_model_dir: {earlier} holds a {draft_name(draft)} draft; set draft: {draft_name(draft)}"
        )
    wanted = section.settings
    if unlike := [name for name, value in draft.settings.items() if wanted[name] != value]:
        theirs, ours = (
            ", ".join(f"{section.prefix}{name}: {of[name]}" for name in unlike) for of in (draft.settings, wanted)
        )
        raise ConfigError(
            f"lora_model_dir: the heads in {earlier} were made with {theirs}, the configuration asks for {ours}"
        )
    console.print(f"starting from the heads in {earlier}", highlight=False)
    return draft


def _dashboards(cfg: TrainConfig, out: Path, step: int, console: Console) -> list[Dashboard]:
    """Where figures go besides the terminal and metrics.jsonl."""
    found: list[Dashboard] = []
    if cfg.use_tensorboard:
        found.append(TensorBoard(console, out, step))
    if cfg.wandb_project is not None:
        found.append(Wandb(console, out, cfg.wandb_project, cfg.wandb_entity, cfg.wandb_run_id))
    return found


def _objective(cfg: TrainConfig, draft: Draft, recipe: BackboneRecipe) -> Objective:
    loss = cfg.draft_config.heads_loss
    if not recipe.joint:
        return Objective(draft, loss.decay, soft_heads=loss.soft_targets, weight=loss.weight)
    return Objective(
        draft,
        loss.decay,
        lm="kl" if cfg.medusa_self_distillation else "ce",
        rho=cfg.medusa_distillation_regularization,
        heads_coefficient=cfg.medusa_heads_coefficient,
        schedule=cfg.medusa_scheduler,
        soft_heads=loss.soft_targets,
    )


def _describe(
    cfg: TrainConfig,
    data: TrainingData,
    recipe: BackboneRecipe,
    draft: Draft,
    plan: Plan,
    warmup: int,
    console: Console,
    processes: int,
) -> None:
    """Say in a few lines what is about to happen."""
    heads = sum(p.numel() for p in draft.parameters())
    learning = sum(p.numel() for p in recipe.parameters.values())
    # a quantised matrix packs two parameters into a byte, so they are counted by what was asked for
    total = recipe.backbone.model.num_parameters()
    backbone = f"{(total - learning) / 1e6:.1f}M in the backbone (frozen)"
    if learning:
        backbone = f"{learning / 1e6:.2f}M of the backbone (trained), {backbone}"
    console.print(
        f"data: {len(data.train):,} conversations to train on ({data.train.tokens:,} tokens, "
        f"{data.train.supervised_tokens:,} of them learnt), {len(data.validation):,} held out"
    )
    console.print(
        f"model: {heads / 1e6:.1f}M parameters in the heads (trained, float32), {backbone}, "
        f"computing in {recipe.precision} on {recipe.precision.device}"
    )
    if cfg.load_in_4bit or cfg.load_in_8bit:
        what = "its teacher and the heads" if cfg.medusa_self_distillation else "the heads"
        console.print(f"note: the backbone is quantised, so {what} learn from the quantised model", style="yellow")
    rates = f"peak learning rate {cfg.heads_learning_rate:g}"
    if learning:
        rates += f" (backbone {cfg.learning_rate:g})"
    batch = cfg.micro_batch_size * cfg.gradient_accumulation_steps * processes
    console.print(
        f"plan: {plan.total_steps:,} steps of {batch} {'rows' if cfg.sample_packing else 'conversations'} "
        f"({plan.epoch(plan.total_steps):.2f} epochs), {rates} after {warmup} steps, {cfg.lr_scheduler}"
    )
    if warning := warmup_warning(cfg.lr_scheduler, warmup, plan.total_steps):
        console.print(warning, style="yellow", highlight=False)
