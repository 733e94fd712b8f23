"""What `medusa-train` keys mean to each other: which cannot hold together, which lose their effect.

Knows values, not files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from medusa_train.config.drafts import SECTIONS
from medusa_train.config.types import Constraint


def implies_joint_training(cfg: Any) -> bool:
    """Whether the keys mean Medusa-2 where `recipe` is silent."""
    if cfg.medusa_only_heads is not None:
        return not cfg.medusa_only_heads
    return bool(cfg.adapter or cfg.medusa_num_unfreeze_layers or cfg.medusa_self_distillation)


_LORA_KEYS = (
    "lora_r",
    "lora_alpha",
    "lora_dropout",
    "lora_target_modules",
    "lora_target_linear",
    "lora_modules_to_save",
)
_HEAD_KEYS = (
    "medusa_num_heads",
    "medusa_num_layers",
    "medusa_decay_coefficient",
    "medusa_soft_targets",
    "medusa_share_lm_head",
    "medusa_vocab_size",
)
_JOINT_KEYS = (
    "adapter",
    "medusa_self_distillation",
    "medusa_distillation_regularization",
    "medusa_heads_coefficient",
    "medusa_scheduler",
    "gradient_checkpointing",
)


def find_ineffective_keys(cfg: Any) -> Iterator[str]:
    """Name the keys that change nothing beside the others' values, whatever they hold; `cfg` is resolved."""
    if cfg.draft != "medusa":
        yield from _HEAD_KEYS
    if cfg.recipe == "medusa1":
        yield from _JOINT_KEYS
    elif cfg.adapter is not None:
        yield "medusa_num_unfreeze_layers"
        if cfg.medusa_self_distillation:
            yield "medusa_distillation_regularization"  # the teacher's share of a target that is all the teacher's
    if cfg.recipe == "medusa1" or cfg.adapter is None:
        yield from _LORA_KEYS
    elif cfg.lora_target_linear:
        yield "lora_target_modules"
    if cfg.lr_scheduler != "cosine":
        yield "cosine_min_lr_ratio"
    if cfg.wandb_project is None:
        yield from ("wandb_entity", "wandb_run_id")


def _quantised(cfg: Any) -> bool:
    return bool(cfg.load_in_4bit or cfg.load_in_8bit)


def _joint(cfg: Any) -> bool:
    """Whether the backbone learns with the heads; `cfg` need not be resolved."""
    return cfg.recipe == "medusa2" or (cfg.recipe is None and implies_joint_training(cfg))


def _trains_lm_head(cfg: Any) -> bool:
    """Whether the backbone's own lm_head learns: through an adapter on it, or with the whole backbone."""
    if not _joint(cfg):
        return False
    targets, whole = cfg.lora_target_modules, cfg.lora_modules_to_save or ()
    return not cfg.adapter or cfg.lora_target_linear or not targets or "lm_head" in (*targets, *whole)


_RECIPE_KEYS = (
    "recipe",
    "medusa_only_heads",
    "adapter",
    "medusa_num_unfreeze_layers",
    "medusa_self_distillation",
)

#: Looked at by `load_config` beside the checks of single keys, so that all mistakes show together.
TRAIN_CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        ("load_in_4bit", "load_in_8bit"),
        lambda cfg: cfg.load_in_4bit and cfg.load_in_8bit,
        "cannot be true together with load_in_8bit; choose one",
    ),
    Constraint(
        ("adapter", "load_in_4bit"),
        lambda cfg: cfg.adapter == "qlora" and not cfg.load_in_4bit,
        "qlora is an adapter over a 4-bit backbone; set load_in_4bit: true, or adapter: lora",
    ),
    Constraint(
        ("bf16", "fp16"),
        lambda cfg: cfg.bf16 is True and cfg.fp16,
        "cannot be true together with fp16; choose one",
    ),
    Constraint(
        ("medusa_num_layers", "medusa_share_lm_head"),
        lambda cfg: cfg.medusa_num_layers == 0 and cfg.medusa_share_lm_head,
        "without blocks and without matrices of their own the heads hold nothing to train; set 1 or more",
    ),
    Constraint(
        ("medusa_self_distillation", "adapter"),
        lambda cfg: cfg.medusa_self_distillation and not cfg.adapter,
        "its teacher is the backbone with the adapter switched off; set adapter: lora or qlora",
    ),
    Constraint(
        ("medusa_distillation_regularization", "adapter"),
        lambda cfg: cfg.medusa_distillation_regularization > 0 and not cfg.adapter,
        "its teacher is the backbone with the adapter switched off; set adapter: lora or qlora, or 0",
    ),
    Constraint(
        ("medusa_only_heads", "medusa_num_unfreeze_layers"),
        lambda cfg: cfg.medusa_only_heads and cfg.medusa_num_unfreeze_layers > 0,
        "only the heads are trained, so medusa_num_unfreeze_layers has to be 0",
    ),
    Constraint(
        ("medusa_num_unfreeze_layers", "load_in_4bit", "load_in_8bit"),
        lambda cfg: cfg.medusa_num_unfreeze_layers > 0 and _quantised(cfg),
        "quantised layers cannot be trained; use an adapter, or load the backbone unquantised",
    ),
    Constraint(
        ("recipe", "medusa_only_heads"),
        lambda cfg: (
            cfg.medusa_only_heads is not None
            and cfg.recipe is not None
            and (cfg.recipe == "medusa1") != cfg.medusa_only_heads
        ),
        "medusa1 is medusa_only_heads: true, medusa2 is false; leave one of the two keys out",
    ),
    Constraint(
        ("recipe", "medusa_num_unfreeze_layers"),
        lambda cfg: cfg.recipe == "medusa1" and cfg.medusa_num_unfreeze_layers > 0,
        "medusa1 trains only the heads, so medusa_num_unfreeze_layers has to be 0",
    ),
    Constraint(
        ("load_in_4bit", "load_in_8bit", *_RECIPE_KEYS),
        lambda cfg: (
            _quantised(cfg)
            and not cfg.adapter
            and not cfg.medusa_num_unfreeze_layers
            and (cfg.recipe == "medusa2" or (cfg.recipe is None and implies_joint_training(cfg)))
        ),
        "a quantised backbone can be trained jointly only through an adapter; set adapter, or recipe: medusa1",
    ),
    Constraint(
        ("medusa_share_lm_head", "lora_target_linear", "lora_target_modules", *_RECIPE_KEYS),
        lambda cfg: cfg.medusa_share_lm_head and _trains_lm_head(cfg),
        "the heads would share an lm_head that is trained under them; leave it frozen (recipe: medusa1, or an adapter "
        "whose lora_target_modules name other layers)",
    ),
    *(
        Constraint(
            (name, "draft"),
            lambda cfg, name=name: getattr(cfg, name) is not None and cfg.draft != name,  # type: ignore[misc]
            f"is the section of another draft; set draft: {name}, or leave it out",
        )
        for name in SECTIONS
    ),
    Constraint(
        ("amphista",),
        lambda cfg: cfg.amphista is not None and not (cfg.amphista.alignment_weight or cfg.amphista.label_weight),
        "alignment_weight and label_weight are both 0, which leaves nothing to learn; give one of them a weight",
    ),
    Constraint(
        ("draft", *_RECIPE_KEYS),
        lambda cfg: cfg.draft != "medusa" and _joint(cfg),
        "learns over a frozen backbone; leave joint training and adapters out (recipe: medusa1)",
    ),
    Constraint(
        ("export", "draft"),
        lambda cfg: bool(cfg.export) and cfg.draft != "medusa",
        "the layouts of others hold Medusa heads alone; leave export out",
    ),
    Constraint(
        ("export", *_RECIPE_KEYS),
        lambda cfg: "merged" in (cfg.export or ()) and not _joint(cfg),
        "merged is the backbone that joint training changed; this recipe leaves it as it is, so take merged out",
    ),
    Constraint(
        ("export", "medusa_share_lm_head"),
        lambda cfg: "reference-v2" in (cfg.export or ()) and not cfg.medusa_share_lm_head,
        "reference-v2 is the layout of heads that share the backbone's lm_head; set medusa_share_lm_head: true",
    ),
    Constraint(
        ("export", "medusa_vocab_size"),
        lambda cfg: cfg.medusa_vocab_size is not None and bool(set(cfg.export or ()) - {"vllm", "merged"}),
        "of the layouts of others only vLLM's holds heads over a reduced vocabulary (medusa_vocab_size); export vllm",
    ),
    Constraint(
        ("warmup_steps", "warmup_ratio"),
        lambda cfg: cfg.warmup_steps is not None and cfg.warmup_ratio is not None,
        "says the same as warmup_ratio; leave one of the two out",
    ),
    Constraint(
        ("save_steps", "saves_per_epoch"),
        lambda cfg: cfg.save_steps is not None and cfg.saves_per_epoch is not None,
        "says the same as saves_per_epoch; leave one of the two out",
    ),
    Constraint(
        ("eval_steps", "evals_per_epoch"),
        lambda cfg: cfg.eval_steps is not None and cfg.evals_per_epoch is not None,
        "says the same as evals_per_epoch; leave one of the two out",
    ),
    Constraint(
        ("early_stopping_patience", "val_set_size"),
        lambda cfg: cfg.early_stopping_patience is not None and cfg.val_set_size == 0,
        "needs evaluations; hold some conversations out with val_set_size, for example 0.05",
    ),
    Constraint(
        ("resume_from_checkpoint", "overwrite_output_dir"),
        lambda cfg: cfg.resume_from_checkpoint is not None and cfg.overwrite_output_dir,
        "goes on with the run that overwrite_output_dir would replace; choose one",
    ),
    Constraint(
        ("sequence_len", "medusa_num_heads"),
        lambda cfg: cfg.draft == "medusa" and cfg.sequence_len < cfg.medusa_num_heads + 2,
        "too short: head k learns the token k + 1 places on, so it has to exceed medusa_num_heads + 1",
    ),
)


def _asks_server(cfg: Any) -> bool:
    return cfg.engine == "openai" or (cfg.engine is None and cfg.server_url is not None)


#: The same of `medusa-selfdistill`.
SELFDISTILL_CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        ("engine", "server_url"),
        lambda cfg: cfg.engine == "openai" and cfg.server_url is None,
        "needs the server's address; set server_url, for example http://localhost:8000/v1",
    ),
    Constraint(
        ("server_url", "engine"),
        lambda cfg: cfg.engine == "local" and cfg.server_url is not None,
        "is not asked by engine: local; leave one of the two out",
    ),
    Constraint(
        ("engine", "server_url", "base_model"),
        lambda cfg: _asks_server(cfg) and cfg.base_model is None,
        "a server has to be told which model; set base_model to the name that it knows it by",
    ),
    Constraint(
        ("mode", "engine", "server_url"),
        lambda cfg: _asks_server(cfg) and cfg.mode == "selftalk",
        "a chat server writes the assistant's turns only; selftalk needs engine: local",
    ),
    Constraint(
        ("heads", "engine", "server_url"),
        lambda cfg: _asks_server(cfg) and cfg.heads is not None,
        "a server speculates with its own heads; leave heads out, or use engine: local",
    ),
    Constraint(
        ("batch_size", "engine", "server_url"),
        lambda cfg: _asks_server(cfg) and cfg.batch_size is not None,
        "a server forms its own batches; set concurrency",
    ),
    Constraint(
        ("chat_template", "engine", "server_url"),
        lambda cfg: _asks_server(cfg) and cfg.chat_template is not None,
        "the server renders chats by its own template; leave chat_template out",
    ),
    Constraint(
        ("min_chars", "max_chars"),
        lambda cfg: cfg.min_chars is not None and cfg.max_chars is not None and cfg.min_chars > cfg.max_chars,
        "more than max_chars, which leaves nothing",
    ),
)
