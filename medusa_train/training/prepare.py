"""From a configuration to a trainer that is ready to run: data, backbone, heads, optimizer, place. Runs nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoTokenizer

from medusa_train.checkpoint.layouts import load_heads
from medusa_train.checkpoint.store import CheckpointStore
from medusa_train.config.hub import hub_is_out_of_reach
from medusa_train.config.schema import TrainConfig, unsupported_keys
from medusa_train.dashboards import Dashboard, TensorBoard, Wandb
from medusa_train.data.chat import ChatEncoder
from medusa_train.data.dataset import Batch, BatchLoader, EncodedDataset, load_datasets
from medusa_train.errors import BackboneError, ConfigError
from medusa_train.losses.objective import Objective
from medusa_train.models.backbone import Backbone, context_length, resolve_backbone
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.tracking import open_tracker
from medusa_train.training.attention import choose_attention
from medusa_train.training.engine import LocalEngine
from medusa_train.training.lr import build_scheduler, count_warmup_steps
from medusa_train.training.optim import build_optimizer, parameter_groups
from medusa_train.training.plan import Plan, count_steps, interval
from medusa_train.training.precision import choose_precision
from medusa_train.training.run_dir import (
    HEADS,
    check_nothing_is_lost,
    named_checkpoint,
    prepare_output_dir,
    write_config,
)
from medusa_train.training.snapshot import restore_snapshot
from medusa_train.training.state import TrainState
from medusa_train.training.student import HEADS_FILE, Student, check_start, make_student, start_directory
from medusa_train.training.trainer import Trainer


@dataclass
class Data:
    """What is trained on and what is measured on."""

    train: EncodedDataset
    held_out: EncodedDataset
    prompts: EncodedDataset  # the held-out set, else the training set, with the assistant's words alone marked


@dataclass
class Ready:
    """A trainer, the heads as their own type (saving and decoding need it), and where the run goes."""

    trainer: Trainer
    draft: MedusaDraft
    out: Path


def check_supported(cfg: TrainConfig) -> None:
    """Raise ConfigError naming every key that asks for what this version can't do."""
    if asked := unsupported_keys(cfg):
        raise ConfigError(["not supported by this version: " + key for key in asked])


def load_data(cfg: TrainConfig, console: Console) -> Data:
    """Find the backbone, refuse what can't be done with it, and encode the data; loads no weights.

    Raises:
        BackboneError: there is no such backbone, the hub can't be reached, or it can't be trained for here.
        ConfigError: a key is not supported by this version, or means nothing where it stands.
        CheckpointError: there is nothing to start from where `lora_model_dir` says.
        DataError: the data can't be read, or nothing in it can be learnt.
    """
    where, config = resolve_backbone(cfg.base_model, trust_remote_code=cfg.trust_remote_code)
    check_supported(cfg)
    check_start(cfg)
    context = context_length(config.get_text_config())
    if cfg.sequence_len > context:
        console.print(f"sequence_len: {cfg.sequence_len} is more than {cfg.base_model} reads, taking {context}")
        cfg = cfg.model_copy(update={"sequence_len": context})
    encoder = chat_encoder(cfg, load_tokenizer(cfg, where))
    train, held_out = load_datasets(cfg, encoder)
    for line in train.report.lines():
        console.print(f"data: {line}", highlight=False)
    if cfg.train_on_inputs or cfg.roles_to_train != ["assistant"]:
        answers = {"train_on_inputs": False, "roles_to_train": ["assistant"]}
        only = load_datasets(cfg.model_copy(update=answers), encoder)
        return Data(train, held_out, only[1] if len(held_out) else only[0])
    return Data(train, held_out, held_out if len(held_out) else train)


def load_tokenizer(cfg: TrainConfig, where: str) -> Any:
    """Load the backbone's tokenizer; `where` is what `resolve_backbone` gave.

    Raises:
        BackboneError: it can't be loaded.
    """
    try:
        return AutoTokenizer.from_pretrained(
            where, trust_remote_code=cfg.trust_remote_code, local_files_only=hub_is_out_of_reach()
        )
    except (OSError, ValueError, ImportError) as error:
        raise BackboneError(f"base_model {cfg.base_model}: its tokenizer can't be loaded: {error}") from error


def chat_encoder(cfg: TrainConfig, tokenizer: Any) -> ChatEncoder:
    """Make the encoder that every data set's own is a variant of.

    Where each of them names its `conversation`, any of those will do: the tokenizer needs no template of its own.
    """
    named = [entry.conversation for entry in cfg.datasets]
    return ChatEncoder(tokenizer, cfg.chat_template or (named[0] if all(named) else None))


def build(cfg: TrainConfig, data: Data, console: Console) -> Ready:
    """Load the backbone, make the heads and all that trains them, and take up an earlier run's place.

    Raises:
        BackboneError: the backbone can't be loaded.
        CheckpointError: the checkpoint to go on from is damaged, or of other heads.
    """
    random.seed(cfg.seed)
    torch.manual_seed(cfg.seed)
    if cfg.tf32:
        torch.set_float32_matmul_precision("high")
    precision = choose_precision(cfg.bf16, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    backbone = Backbone.load(
        cfg.base_model,
        dtype=precision.dtype,
        device=precision.device,
        quantization="nf4" if cfg.load_in_4bit else "int8" if cfg.load_in_8bit else None,
        trust_remote_code=cfg.trust_remote_code,
    )
    console.print(choose_attention(backbone, cfg.flash_attention, packed=cfg.sample_packing), highlight=False)
    draft = _heads(cfg, backbone, console)
    student = make_student(cfg, backbone, precision)
    loader = BatchLoader(data.train, cfg.micro_batch_size, seed=cfg.seed, shuffle=True)
    plan = make_plan(cfg, loader.steps_per_epoch)
    warmup = count_warmup_steps(cfg.warmup_steps, cfg.warmup_ratio, plan.total_steps)
    engine = _engine(cfg, draft, student, plan.total_steps, warmup, console)
    _describe(cfg, data, student, draft, plan, warmup, console)

    store = CheckpointStore(Path(cfg.output_dir).expanduser(), cfg.save_total_limit)
    state = _resume(cfg, store, draft, student, engine, loader, console)
    out = prepare_output_dir(cfg, state.step)
    write_config(cfg, out)
    trainer = Trainer(
        student=student,
        draft=draft,
        objective=_objective(cfg, draft, student),
        engine=engine,
        loader=loader,
        held_out=held_out_batches(data.held_out, cfg.micro_batch_size),
        accumulation=cfg.gradient_accumulation_steps,
        precision=precision,
        plan=plan,
        store=store,
        tracker=open_tracker(
            out, console, plan.total_steps, state.step, _dashboards(cfg, out, state.step, console), state.evaluated
        ),
        patience=cfg.early_stopping_patience,
        state=state,
        top_k_in_log=cfg.medusa_logging,
    )
    return Ready(trainer, draft, out)


def make_plan(cfg: TrainConfig, micro_batches_per_epoch: int) -> Plan:
    """Lay out the run's steps; evaluations and checkpoints come once per epoch where the config is silent."""
    total, per_epoch = count_steps(
        micro_batches_per_epoch, cfg.gradient_accumulation_steps, cfg.num_epochs, cfg.max_steps
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


def held_out_batches(held_out: EncodedDataset, micro_batch_size: int) -> Callable[[], Iterable[Batch]] | None:
    """Make a maker of one pass over the held-out set, always in the same order; None where nothing is held out."""
    if not len(held_out):
        return None

    def batches() -> Iterable[Batch]:
        loader = BatchLoader(held_out, micro_batch_size, seed=0, shuffle=False)
        return islice(loader, loader.steps_per_epoch)

    return batches


def _heads(cfg: TrainConfig, backbone: Backbone, console: Console) -> MedusaDraft:
    """Untrained heads, or those of the run that `lora_model_dir` names (two-stage training); float32 masters."""
    earlier = start_directory(cfg, HEADS, HEADS_FILE)
    if earlier is None:
        return MedusaDraft.from_backbone(
            backbone,
            cfg.medusa_num_heads,
            cfg.medusa_num_layers,
            share_lm_head=cfg.medusa_share_lm_head,
            dtype=torch.float32,
        )
    draft = load_heads(earlier, backbone, torch.float32)
    if (draft.num_heads, draft.num_layers) != (cfg.medusa_num_heads, cfg.medusa_num_layers):
        raise ConfigError(
            f"lora_model_dir: {earlier} holds {draft.num_heads} heads x {draft.num_layers} layers, the configuration "
            f"asks for medusa_num_heads: {cfg.medusa_num_heads}, medusa_num_layers: {cfg.medusa_num_layers}"
        )
    if (draft.shared is not None) != cfg.medusa_share_lm_head:
        raise ConfigError(f"lora_model_dir: set medusa_share_lm_head as it was for the heads in {earlier}")
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


def _objective(cfg: TrainConfig, draft: MedusaDraft, student: Student) -> Objective:
    if not student.joint:
        return Objective(draft, cfg.medusa_decay_coefficient, soft_heads=cfg.medusa_soft_targets)
    return Objective(
        draft,
        cfg.medusa_decay_coefficient,
        lm="kl" if cfg.medusa_self_distillation else "ce",
        rho=cfg.medusa_distillation_regularization,
        heads_coefficient=cfg.medusa_heads_coefficient,
        schedule=cfg.medusa_scheduler,
        soft_heads=cfg.medusa_soft_targets,
    )


def _engine(
    cfg: TrainConfig, draft: MedusaDraft, student: Student, total_steps: int, warmup: int, console: Console
) -> LocalEngine:
    trained = list(student.parameters.values())
    groups = parameter_groups(draft.parameters(), cfg.heads_learning_rate, trained, cfg.learning_rate, cfg.weight_decay)
    optimizer, notice = build_optimizer(cfg.optimizer, groups, student.precision.device)
    if notice:
        console.print(notice)
    scheduler = build_scheduler(cfg.lr_scheduler, optimizer, warmup, total_steps)
    return LocalEngine([*draft.parameters(), *trained], optimizer, scheduler, cfg.max_grad_norm)


def _resume(
    cfg: TrainConfig,
    store: CheckpointStore,
    draft: MedusaDraft,
    student: Student,
    engine: LocalEngine,
    loader: BatchLoader,
    console: Console,
) -> TrainState:
    """Take up the place of the checkpoint that the config names; a new run where there is none yet."""
    if cfg.resume_from_checkpoint is None:
        return TrainState()
    path = named_checkpoint(cfg) or store.latest()
    if path is None:
        check_nothing_is_lost(cfg)
        console.print(f"resume_from_checkpoint: {store.root} holds no checkpoint yet, starting anew")
        return TrainState()
    state = restore_snapshot(store.load(path), draft, student, engine, str(path))
    loader.load_state_dict(state.data)
    console.print(f"going on after step {state.step}, from {path}")
    return state


def _describe(
    cfg: TrainConfig, data: Data, student: Student, draft: MedusaDraft, plan: Plan, warmup: int, console: Console
) -> None:
    """Say in a few lines what is about to happen."""
    heads = sum(p.numel() for p in draft.parameters())
    learning = sum(p.numel() for p in student.parameters.values())
    # a quantised matrix packs two parameters into a byte, so they are counted by what was asked for
    total = student.backbone.model.num_parameters()
    backbone = f"{(total - learning) / 1e6:.1f}M in the backbone (frozen)"
    if learning:
        backbone = f"{learning / 1e6:.2f}M of the backbone (trained), {backbone}"
    console.print(
        f"data: {len(data.train):,} conversations to train on ({data.train.tokens:,} tokens, "
        f"{data.train.supervised_tokens:,} of them learnt), {len(data.held_out):,} held out"
    )
    console.print(
        f"model: {heads / 1e6:.1f}M parameters in the heads (trained, float32), {backbone}, "
        f"computing in {student.precision} on {student.precision.device}"
    )
    if cfg.load_in_4bit or cfg.load_in_8bit:
        what = "its teacher and the heads" if cfg.medusa_self_distillation else "the heads"
        console.print(f"note: the backbone is quantised, so {what} learn from the quantised model", style="yellow")
    rates = f"peak learning rate {cfg.heads_learning_rate:g}"
    if learning:
        rates += f" (backbone {cfg.learning_rate:g})"
    batch = cfg.micro_batch_size * cfg.gradient_accumulation_steps
    console.print(
        f"plan: {plan.total_steps:,} steps of {batch} {'rows' if cfg.sample_packing else 'conversations'} "
        f"({plan.epoch(plan.total_steps):.2f} epochs), {rates} after {warmup} steps, {cfg.lr_scheduler}"
    )
