"""From a configuration to a trainer that is ready to run: data, backbone, heads, optimizer, place. Runs nothing."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from torch import nn
from transformers import AutoTokenizer
from transformers.utils import is_flash_attn_2_available

from medusa_train.checkpoint.heads import load_draft
from medusa_train.checkpoint.run_layout import prepare_output_dir, write_config, writing
from medusa_train.checkpoint.store import CheckpointStore
from medusa_train.config.schema import TrainConfig
from medusa_train.data.dataset import Batch, BatchLoader, EncodedDataset, load_datasets
from medusa_train.data.draft_vocabulary import check_vocabulary, describe_vocabulary, draft_vocabulary
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.errors import BackboneError, ConfigError
from medusa_train.hub import hub_is_out_of_reach
from medusa_train.losses.objective import Objective
from medusa_train.metrics_log import Dashboard, TensorBoard, Wandb
from medusa_train.models.attention import FLASH, flash_obstacle
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts import DRAFTS, kind_of
from medusa_train.models.drafts.base import Draft
from medusa_train.models.hf_config import context_length
from medusa_train.models.layer_split import check_exit
from medusa_train.models.loading import resolve_backbone
from medusa_train.models.precision import choose_precision
from medusa_train.progress import MetricLoggers, open_metric_loggers
from medusa_train.training.backbone_recipe import BackboneRecipe, build_backbone_recipe, check_start, start_heads
from medusa_train.training.deepspeed_config import (
    DEFAULT,
    check_compiler,
    check_deepspeed,
    complete,
    read_deepspeed,
    stage_of,
)
from medusa_train.training.distributed import ALONE, World, join
from medusa_train.training.optim import (
    EIGHT_BIT,
    build_optimizer,
    build_scheduler,
    count_warmup_steps,
    parameter_groups,
    warmup_warning,
)
from medusa_train.training.process_info import ProcessInfo
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
from medusa_train.training.strategy import LocalStrategy, LossScale, Strategy
from medusa_train.training.trainer import Trainer

SHAREGPT_TEMPLATE = "vicuna_v1.1"


@dataclass
class Data:
    """What is trained on and what is measured on."""

    train: EncodedDataset
    held_out: EncodedDataset
    prompts: EncodedDataset  # the held-out set, else the training set, with the assistant's words alone marked


@dataclass
class Ready:
    """A trainer, the heads as they are saved and decoded with, and where the run goes."""

    trainer: Trainer
    draft: Draft
    out: Path


def load_data(cfg: TrainConfig, console: Console, world: World = ALONE) -> Data:
    """Find the backbone, refuse what can't be done with it, and encode the data; loads no weights.

    Several processes go on only if all of them could.

    Raises:
        BackboneError: there is no such backbone, the hub can't be reached, or it can't be trained for here.
        ConfigError: a key means nothing where it stands, or contradicts another.
        CheckpointError: there is nothing to start from where `lora_model_dir` says.
        DataError: the data can't be read, or nothing in it can be learnt.
    """
    if world.size > 1 and cfg.dataset_prepared_path is not None:
        world.lead(lambda: bool(_load_data(cfg, Console(quiet=True), world.size)))  # fills what the others then read
    return world.together(lambda: _load_data(cfg, console, world.size))


def _load_data(cfg: TrainConfig, console: Console, processes: int) -> Data:
    where, config = resolve_backbone(cfg.base_model, trust_remote_code=cfg.trust_remote_code)
    check_deepspeed(cfg, processes)
    if processes > 1 or cfg.deepspeed is not None:
        check_compiler(torch.cuda.is_available())
    check_start(cfg)
    text = config.get_text_config()
    check_vocabulary(cfg, text.vocab_size)
    if cfg.draft == "kangaroo":
        check_exit(cfg.drafted.settings["exit_layer"], text.num_hidden_layers, cfg.base_model)
    context = context_length(text)
    if cfg.sequence_len > context:
        console.print(f"sequence_len: {cfg.sequence_len} is more than {cfg.base_model} reads, taking {context}")
        cfg = cfg.model_copy(update={"sequence_len": context})
    tokenizer = load_tokenizer(cfg, where)
    if (named := with_template(cfg, tokenizer)) is not cfg:
        cfg = named
        console.print(f"chat template: {cfg.chat_template}; neither the tokenizer nor the configuration names one")
    encoder = chat_encoder(cfg, tokenizer)
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


def with_template(cfg: TrainConfig, tokenizer: Any) -> TrainConfig:
    """Name the chat template that Axolotl takes for `type: sharegpt`, where neither tokenizer nor YAML has one."""
    if cfg.chat_template or tokenizer.chat_template or any(entry.type != "sharegpt" for entry in cfg.datasets):
        return cfg
    return cfg.model_copy(update={"chat_template": SHAREGPT_TEMPLATE})


def chat_encoder(cfg: TrainConfig, tokenizer: Any) -> ChatEncoder:
    """Make the encoder that every data set's own is a variant of.

    Where each of them names its `conversation`, any of those will do: the tokenizer needs no template of its own.
    """
    named = [entry.conversation for entry in cfg.datasets]
    return ChatEncoder(tokenizer, cfg.chat_template or (named[0] if all(named) else None))


def build(cfg: TrainConfig, data: Data, console: Console, world: World = ALONE) -> Ready:
    """Load the backbone, make the heads and all that trains them, and take up an earlier run's place.

    Raises:
        BackboneError: the backbone can't be loaded.
        CheckpointError: the checkpoint to go on from is damaged, or of other heads.
    """
    draft, student = world.together(lambda: _model(cfg, data, console, world.device))
    loader = BatchLoader(data.train, cfg.micro_batch_size, seed=cfg.seed, rank=world.rank, size=world.size)
    plan = make_plan(cfg, loader.steps_per_epoch, world.size)
    warmup = count_warmup_steps(cfg.warmup_steps, cfg.warmup_ratio, plan.total_steps)
    _describe(cfg, data, student, draft, plan, warmup, console, world.size)

    store = CheckpointStore(Path(cfg.output_dir).expanduser(), cfg.save_total_limit)
    earlier = find_checkpoint(cfg, store, world, console)
    if earlier is not None:  # before the engine splits the weights or copies them
        restore_weights(earlier.snapshot, draft, student, str(earlier.path))
    engine = build_strategy(cfg, draft, student, plan.total_steps, warmup, world, console)
    if not world.first:
        torch.manual_seed(hash((cfg.seed, world.rank)))  # a dropout of its own; all weights are made by now
    state = TrainState()
    if earlier is not None:
        state = restore_place(earlier.snapshot, engine, str(earlier.path), world)
        loader.load_state_dict(state.data)
        console.print(f"going on after step {state.step}, from {earlier.path}")
        if (before := len(random_states(earlier.snapshot))) != world.size:
            console.print(f"note: {before} processes began this run, {world.size} go on: dropout is another from here")
    out = world.lead(lambda: prepare_output_dir(cfg, state.step))
    tracker = MetricLoggers([])
    if world.first:
        write_config(with_template(cfg, student.backbone.tokenizer), out)
        dashboards = _dashboards(cfg, out, state.step, console)
        with writing(out):
            tracker = open_metric_loggers(out, console, plan.total_steps, state.step, dashboards, state.evaluated)
    trainer = Trainer(
        student=student,
        draft=draft,
        objective=_objective(cfg, draft, student),
        engine=engine,
        loader=loader,
        held_out=validation_batches(data.held_out, cfg.micro_batch_size),
        accumulation=cfg.gradient_accumulation_steps,
        precision=student.precision,
        plan=plan,
        store=store,
        tracker=tracker,
        patience=cfg.early_stopping_patience,
        state=state,
        top_k_in_log=cfg.medusa_logging,
        max_nonfinite=cfg.max_nonfinite_steps,
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


def validation_batches(held_out: EncodedDataset, micro_batch_size: int) -> Callable[[], Iterable[Batch]] | None:
    """Make a maker of one pass over the held-out set, always in the same order; None where nothing is held out."""
    if not len(held_out):
        return None

    def batches() -> Iterable[Batch]:
        loader = BatchLoader(held_out, micro_batch_size, seed=0, shuffle=False)
        return islice(loader, loader.steps_per_epoch)

    return batches


def _model(cfg: TrainConfig, data: Data, console: Console, device: torch.device) -> tuple[Draft, BackboneRecipe]:
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


def _heads(cfg: TrainConfig, data: Data, backbone: Backbone, console: Console) -> Draft:
    """Untrained heads, or those of the run that `lora_model_dir` names (two-stage training); float32 masters."""
    earlier = start_heads(cfg)
    section = cfg.drafted
    if earlier is None:
        known = draft_vocabulary(cfg, data.train, backbone.tokenizer, backbone.vocab_size)
        if known is None:
            return DRAFTS[cfg.draft].from_backbone(backbone, dtype=torch.float32, **section.settings)
        line = describe_vocabulary(known, data.train, data.held_out, backbone.vocab_size)
        console.print(f"draft vocabulary: {line}", highlight=False)
        return DRAFTS[cfg.draft].from_backbone(backbone, dtype=torch.float32, token_map=known, **section.settings)
    draft = load_draft(earlier, backbone, torch.float32)
    if kind_of(draft) != cfg.draft:
        raise ConfigError(f"lora_model_dir: {earlier} holds a {kind_of(draft)} draft; set draft: {kind_of(draft)}")
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


def _objective(cfg: TrainConfig, draft: Draft, student: BackboneRecipe) -> Objective:
    loss = cfg.drafted.loss
    if not student.joint:
        return Objective(draft, loss.decay, soft_heads=loss.soft, weight=loss.weight)
    return Objective(
        draft,
        loss.decay,
        lm="kl" if cfg.medusa_self_distillation else "ce",
        rho=cfg.medusa_distillation_regularization,
        heads_coefficient=cfg.medusa_heads_coefficient,
        schedule=cfg.medusa_scheduler,
        soft_heads=loss.soft,
    )


def _describe(
    cfg: TrainConfig,
    data: Data,
    student: BackboneRecipe,
    draft: Draft,
    plan: Plan,
    warmup: int,
    console: Console,
    processes: int,
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
    batch = cfg.micro_batch_size * cfg.gradient_accumulation_steps * processes
    console.print(
        f"plan: {plan.total_steps:,} steps of {batch} {'rows' if cfg.sample_packing else 'conversations'} "
        f"({plan.epoch(plan.total_steps):.2f} epochs), {rates} after {warmup} steps, {cfg.lr_scheduler}"
    )
    if warning := warmup_warning(cfg.lr_scheduler, warmup, plan.total_steps):
        console.print(warning, style="yellow", highlight=False)


def choose_attention(backbone: Backbone, wanted: bool | Literal["auto"], *, packed: bool) -> str:
    """Let `backbone` keep packed conversations apart in the fastest way that is certain to; say in one line which.

    Rows of one conversation each need no mask: torch's sdpa has a flash kernel of its own for them. Packed ones do,
    and a mask bars sdpa from that kernel; flash-attn's varlen kernel takes their bounds instead.

    Args:
        backbone: as it was loaded, before any of it is converted for training.
        wanted: the key `flash_attention`; asked for where it can't be had, the line says why.
        packed: whether rows hold several conversations.
    """
    plain = backbone.attention
    if not packed:
        return f"attention: torch's {plain}, causal (rows of one conversation need no mask)"
    obstacle: str | None = "flash_attention: false"
    if wanted:
        obstacle = flash_obstacle(
            backbone.device.type,
            backbone.dtype,
            capped=plain == "eager",
            known=bool(getattr(backbone.model, "_supports_flash_attn", False)),
            installed=is_flash_attn_2_available(),
        )
    if obstacle is None:
        try:
            backbone.use_varlen(FLASH)
            return "attention: flash-attn's varlen kernel, told where each conversation ends"
        except (BackboneError, ImportError, RuntimeError, ValueError) as error:
            obstacle = str(error).partition("\n")[0]
    return f"attention: torch's {plain} with a block-diagonal mask for packed rows ({obstacle})"


def build_strategy(
    cfg: TrainConfig,
    draft: nn.Module,
    student: BackboneRecipe,
    total_steps: int,
    warmup: int,
    world: World,
    console: Console,
) -> Strategy:
    """Make optimizer, schedule and the engine that moves them; says in a line what is not as it was asked for.

    DeepSpeed trains wherever there are several processes, and alone where the key `deepspeed` asks for it. Under
    ZeRO-3 the weights are split from here on, and can be read as `Strategy` says only.
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
        return LocalStrategy([*draft.parameters(), *trained], optimizer, scheduler, cfg.max_grad_norm, loss_scale)

    from medusa_train.training.deepspeed import DeepSpeedStrategy

    if world.size == 1:
        join(ProcessInfo(0, 1, 0, "127.0.0.1", _free_port()))
    reason = ", for the key deepspeed is not set" if given is None else ""
    console.print(f"processes: {world.size}, by DeepSpeed's ZeRO stage {stage}{reason}")
    backbone = student.backbone
    return DeepSpeedStrategy(
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
