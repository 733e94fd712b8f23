"""Constraints between keys: combinations that are not allowed, and keys that have no effect beside
others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from medusa_train.config.draft_sections import DRAFT_CONFIGS, SECTIONS
from medusa_train.config.paths import resolve_path
from medusa_train.config.types import Constraint


def implies_joint_training(cfg: Any) -> bool:
    """Return whether the other keys select Medusa-2 if `recipe` is not set."""
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
    "medusa_soft_targets",
    "medusa_share_lm_head",
    "medusa_vocab_size",
    "medusa_markov_rank",
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
    """Yield the keys that have no effect given the values of the others; `cfg` must be resolved."""
    if cfg.draft in SECTIONS:
        yield from (*_HEAD_KEYS, "medusa_decay_coefficient")
    if cfg.recipe == "medusa1":
        yield from _JOINT_KEYS
    elif cfg.adapter is not None:
        yield "medusa_num_unfreeze_layers"
        if cfg.medusa_self_distillation:  # the target is the teacher's distribution alone
            yield "medusa_distillation_regularization"
    if cfg.recipe == "medusa1" or cfg.adapter is None:
        yield from _LORA_KEYS
    elif cfg.lora_target_linear:
        yield "lora_target_modules"
    if cfg.lr_scheduler != "cosine":
        yield "cosine_min_lr_ratio"
    if cfg.lr_scheduler == "constant":
        if cfg.warmup_steps:
            yield "warmup_steps"
        if cfg.warmup_ratio:
            yield "warmup_ratio"
    if cfg.lora_model_dir is not None:
        yield "stage_one"
    if cfg.train_on_inputs:
        yield "roles_to_train"
    if not _has_validation(cfg):
        yield from ("eval_steps", "evals_per_epoch")
    if cfg.wandb_project is None:
        yield from ("wandb_entity", "wandb_run_id", "wandb_name")


def _has_validation(cfg: Any) -> bool:
    return cfg.val_set_size > 0 or cfg.test_datasets is not None


def _is_quantized(cfg: Any) -> bool:
    return bool(cfg.load_in_4bit or cfg.load_in_8bit)


def _is_joint(cfg: Any) -> bool:
    """Return whether the backbone is trained with the heads; `cfg` need not be resolved."""
    if cfg.recipe is None:
        return implies_joint_training(cfg)
    return bool(cfg.recipe == "medusa2")


def _trains_lm_head(cfg: Any) -> bool:
    """Return whether the backbone's lm_head is trained: through an adapter on it, or with the
    backbone itself.
    """
    if not _is_joint(cfg):
        return False
    targets = cfg.lora_target_modules
    if not cfg.adapter or cfg.lora_target_linear or not targets:
        return True
    saved = cfg.lora_modules_to_save or ()
    return "lm_head" in targets or "lm_head" in saved


_RECIPE_KEYS = (
    "recipe",
    "medusa_only_heads",
    "adapter",
    "medusa_num_unfreeze_layers",
    "medusa_self_distillation",
)


def _exclusive(key: str, other: str) -> Constraint:
    return Constraint(
        (key, other),
        lambda cfg: getattr(cfg, key) is not None and getattr(cfg, other) is not None,
        f"cannot be set together with {other}; remove one of the two",
    )


def _needs_adapter(key: str) -> Constraint:
    return Constraint(
        (key, "adapter"),
        lambda cfg: getattr(cfg, key) and not cfg.adapter,
        "the teacher is the backbone with its adapter disabled; set adapter: lora or qlora, or"
        " remove it",
    )


def _needs_draft(section: str) -> Constraint:
    """A section with the keys of a draft; the section has the draft's name."""
    return Constraint(
        (section, "draft"),
        lambda cfg: getattr(cfg, section) is not None and cfg.draft != section,
        f"belongs to another draft; set draft: {section}, or remove it",
    )


def _describe_exports() -> str:
    """Say for each draft which programs read it."""
    clauses = []
    for name, section in DRAFT_CONFIGS.items():
        if section.exports:
            clauses.append(f"draft: {name} is exported to {', '.join(section.exports)}")
        else:
            clauses.append(f"no program reads {name}")
    return "; ".join(clauses)


# The conditions of `medusa-train` that take more than a line.


def _every_dataset_has_another_template(cfg: Any) -> bool:
    if not cfg.chat_template:
        return False
    own_templates = [dataset.conversation for dataset in cfg.datasets]
    return None not in own_templates and cfg.chat_template not in own_templates


def _recipe_contradicts_only_heads(cfg: Any) -> bool:
    if cfg.recipe is None or cfg.medusa_only_heads is None:
        return False
    trains_only_heads = cfg.recipe == "medusa1"
    return bool(trains_only_heads != cfg.medusa_only_heads)


def _unfreezes_without_joint_training(cfg: Any) -> bool:
    trains_only_heads = cfg.recipe == "medusa1" or cfg.medusa_only_heads
    return bool(trains_only_heads and cfg.medusa_num_unfreeze_layers > 0)


def _trains_quantized_weights(cfg: Any) -> bool:
    if not _is_quantized(cfg) or not _is_joint(cfg):
        return False
    return not cfg.adapter and not cfg.medusa_num_unfreeze_layers


def _amphista_has_no_loss(cfg: Any) -> bool:
    if cfg.amphista is None:
        return False
    return not cfg.amphista.alignment_weight and not cfg.amphista.label_weight


def _amphista_has_no_blocks_for_positions(cfg: Any) -> bool:
    if cfg.amphista is None:
        return False
    return not cfg.amphista.auto_blocks and not cfg.amphista.position_encoding


def _kangaroo_adapter_is_empty(cfg: Any) -> bool:
    if cfg.kangaroo is None:
        return False
    return not cfg.kangaroo.attention and not cfg.kangaroo.mlp_size


def _exports(cfg: Any, layout: str) -> bool:
    return layout in (cfg.export or ())


def _exports_other_than(cfg: Any, *layouts: str) -> bool:
    exported = set(cfg.export or ())
    return not exported.issubset(layouts)


def _exports_small_vocabulary_elsewhere(cfg: Any) -> bool:
    if cfg.medusa_vocab_size is None:
        return False
    return _exports_other_than(cfg, "vllm", "transformers", "merged")


def _holds_out_and_has_test_data(cfg: Any) -> bool:
    if cfg.test_datasets is None:
        return False
    return cfg.val_set_size > 0 and "val_set_size" in cfg.model_fields_set


def _is_shorter_than_its_heads(cfg: Any) -> bool:
    has_medusa_heads = cfg.draft not in SECTIONS
    return has_medusa_heads and cfg.sequence_len < cfg.medusa_num_heads + 2


#: Constraints of `medusa-train`, reported by `load_config` together with errors in single keys.
TRAIN_CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        ("load_in_4bit", "load_in_8bit"),
        lambda cfg: cfg.load_in_4bit and cfg.load_in_8bit,
        "cannot be true together with load_in_8bit; choose one",
    ),
    Constraint(
        ("adapter", "load_in_4bit"),
        lambda cfg: cfg.adapter == "qlora" and not cfg.load_in_4bit,
        "qlora is an adapter on a 4-bit backbone; set load_in_4bit: true, or adapter: lora",
    ),
    Constraint(
        ("chat_template", "datasets"),
        _every_dataset_has_another_template,
        "no data set has this template, since each sets another `conversation`; remove one of"
        " the two",
    ),
    Constraint(
        ("bf16", "fp16"), lambda cfg: cfg.bf16 is True and cfg.fp16, "excludes fp16: choose one"
    ),
    Constraint(
        ("medusa_num_layers", "medusa_share_lm_head"),
        lambda cfg: cfg.medusa_num_layers == 0 and cfg.medusa_share_lm_head,
        "heads without residual blocks that share the lm_head have no parameters to train; set 1 or"
        " more",
    ),
    _needs_adapter("medusa_self_distillation"),
    _needs_adapter("medusa_distillation_regularization"),
    Constraint(
        ("medusa_num_unfreeze_layers", "load_in_4bit", "load_in_8bit"),
        lambda cfg: cfg.medusa_num_unfreeze_layers > 0 and _is_quantized(cfg),
        "quantized layers cannot be trained; use an adapter, or load the backbone unquantized",
    ),
    Constraint(
        ("recipe", "medusa_only_heads"),
        _recipe_contradicts_only_heads,
        "medusa1 means medusa_only_heads: true, medusa2 means false; remove one of the two keys",
    ),
    Constraint(
        ("recipe", "medusa_only_heads", "medusa_num_unfreeze_layers"),
        _unfreezes_without_joint_training,
        "only the heads are trained, so medusa_num_unfreeze_layers must be 0",
    ),
    Constraint(
        ("load_in_4bit", "load_in_8bit", *_RECIPE_KEYS),
        _trains_quantized_weights,
        "a quantized backbone can be trained jointly only with an adapter; set adapter, or recipe:"
        " medusa1",
    ),
    Constraint(
        ("medusa_share_lm_head", "lora_target_linear", "lora_target_modules", *_RECIPE_KEYS),
        lambda cfg: cfg.medusa_share_lm_head and _trains_lm_head(cfg),
        "heads cannot share an lm_head that is being trained; keep it frozen (recipe: medusa1, or"
        " an adapter with other lora_target_modules)",
    ),
    *(_needs_draft(section) for section in SECTIONS),
    Constraint(
        ("amphista",),
        _amphista_has_no_loss,
        "alignment_weight and label_weight are both 0, so there is no loss; set at least one of"
        " them",
    ),
    Constraint(
        ("amphista",),
        _amphista_has_no_blocks_for_positions,
        "auto_blocks: 0 also omits the positions; remove position_encoding: false",
    ),
    Constraint(
        ("kangaroo",),
        _kangaroo_adapter_is_empty,
        "an adapter without attention needs an MLP; set mlp_size, or remove attention: false",
    ),
    Constraint(
        ("draft", *_RECIPE_KEYS),
        lambda cfg: not DRAFT_CONFIGS[cfg.draft].trains_jointly and _is_joint(cfg),
        "can be trained on a frozen backbone only; remove the keys of joint training (recipe:"
        " medusa1)",
    ),
    Constraint(
        ("cache_hidden_states", *_RECIPE_KEYS),
        lambda cfg: cfg.cache_hidden_states and _is_joint(cfg),
        "the hidden states of a backbone that is trained change with every step; set"
        " cache_hidden_states: false, or recipe: medusa1",
    ),
    Constraint(
        ("torch_compile", *_RECIPE_KEYS),
        lambda cfg: cfg.torch_compile and _is_joint(cfg),
        "only passes of a frozen backbone are compiled, and this recipe trains it; set"
        " torch_compile: false, or recipe: medusa1",
    ),
    Constraint(
        ("cache_hidden_states", "dataset_prepared_path"),
        lambda cfg: cfg.cache_hidden_states and cfg.dataset_prepared_path is None,
        "requires a directory for the hidden states; set dataset_prepared_path",
    ),
    Constraint(
        ("export", "draft"),
        lambda cfg: _exports_other_than(cfg, *DRAFT_CONFIGS[cfg.draft].exports),
        f"{_describe_exports()}; remove the others",
    ),
    Constraint(
        ("export", *_RECIPE_KEYS),
        lambda cfg: _exports(cfg, "merged") and not _is_joint(cfg),
        "merged is the jointly trained backbone, but this recipe keeps it frozen; remove merged",
    ),
    Constraint(
        ("export", "medusa_share_lm_head"),
        lambda cfg: _exports(cfg, "reference-v2") and not cfg.medusa_share_lm_head,
        "reference-v2 requires heads that share the backbone's lm_head; set medusa_share_lm_head:"
        " true",
    ),
    Constraint(
        ("export", "medusa_vocab_size"),
        _exports_small_vocabulary_elsewhere,
        "only the vllm and transformers layouts support a reduced vocabulary (medusa_vocab_size);"
        " export to these",
    ),
    Constraint(
        ("export", "medusa_markov_rank"),
        lambda cfg: cfg.medusa_markov_rank > 0 and _exports_other_than(cfg, "merged"),
        "no other program reads heads with a Markov bias (medusa_markov_rank): their guesses depend"
        " on the token before; remove export, or train without it",
    ),
    _exclusive("warmup_steps", "warmup_ratio"),
    _exclusive("save_steps", "saves_per_epoch"),
    Constraint(
        ("val_set_size", "test_datasets"),
        _holds_out_and_has_test_data,
        "test_datasets are the data for evaluation; remove one of the two",
    ),
    _exclusive("eval_steps", "evals_per_epoch"),
    Constraint(
        ("early_stopping_patience", "val_set_size"),
        lambda cfg: cfg.early_stopping_patience is not None and not _has_validation(cfg),
        "requires evaluations; set val_set_size, for example 0.05",
    ),
    Constraint(
        ("resume_from_checkpoint", "overwrite_output_dir"),
        lambda cfg: cfg.resume_from_checkpoint is not None and cfg.overwrite_output_dir,
        "cannot resume a run that overwrite_output_dir would replace; choose one",
    ),
    Constraint(
        ("sequence_len", "medusa_num_heads"),
        _is_shorter_than_its_heads,
        "too short: head k predicts the token at offset k + 1, so it must exceed"
        " medusa_num_heads + 1",
    ),
)


#: Why a bench of programming problems needs `allow_code_execution`.
CODE_BENCH = (
    "scoring this bench runs code that the model writes; set allow_code_execution=true, or"
    " score=false to only decode"
    " (docs/evaluation.md, Quality), or choose another bench"
)


#: Arguments of `vllm serve` that medusa-eval sets itself, and secrets, which the report would
# contain.
_REFUSED_SERVE_ARGS = frozenset(
    [
        "--host",
        "--port",
        "--model",
        "--served-model-name",
        "--speculative-config",
        "--api-key",
        "--hf-token",
    ]
)


def _runs_code_without_leave(cfg: Any) -> bool:
    if cfg.bench != "humaneval" or not cfg.score or cfg.uses_server:
        return False
    return not cfg.allow_code_execution


def _sets_refused_serve_args(cfg: Any) -> bool:
    for arg in cfg.serve_args or ():
        name, _, _ = arg.partition("=")
        if name.replace("_", "-") in _REFUSED_SERVE_ARGS:
            return True
    return False


def _drafts_with(cfg: Any, draft: str) -> bool:
    """Return whether a draft from text is used, alone or beside heads (medusa+rest)."""
    return cfg.draft is not None and cfg.draft.endswith(draft)


def _sets_half_a_judge(cfg: Any) -> bool:
    has_server = cfg.judge_base_url is not None
    has_model = cfg.judge_model is not None
    return has_server != has_model


def _needs_lookup(section: str, draft: str) -> Constraint:
    """A section with the keys of a draft from text."""
    return Constraint(
        (section, "draft"),
        lambda cfg: getattr(cfg, section) is not None and not _drafts_with(cfg, draft),
        f"belongs to another draft; set draft: {draft}, or medusa+{draft}, or remove it",
    )


#: Constraints of `medusa-eval`. Question files in HumanEval's format are checked when they have
# been read.
EVAL_CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        ("bench", "score", "allow_code_execution", "serve", "server_url"),
        _runs_code_without_leave,
        CODE_BENCH,
    ),
    Constraint(
        ("temperature", "acceptance"),
        lambda cfg: cfg.acceptance == "greedy" and bool(cfg.temperature),
        "greedy decoding has no temperature; set acceptance: sampling or typical, or remove"
        " temperature",
    ),
    Constraint(
        ("acceptance", "temperature"),
        lambda cfg: cfg.acceptance != "greedy" and cfg.temperature == 0,
        "at temperature 0 this is greedy decoding; set acceptance: greedy, or a temperature"
        " above 0",
    ),
    _needs_lookup("lookup", "prompt_lookup"),
    _needs_lookup("lookahead", "lookahead"),
    _needs_lookup("rest", "rest"),
    Constraint(
        ("draft", "rest"),
        lambda cfg: cfg.rest is None and _drafts_with(cfg, "rest"),
        "copies from a datastore; set rest.datastore to a file of the model's answers or of any"
        " text",
    ),
    Constraint(
        ("judge_base_url", "judge_model"),
        _sets_half_a_judge,
        "judge_base_url and judge_model belong together; set both, or neither",
    ),
    Constraint(
        ("server_url", "serve"),
        lambda cfg: cfg.serve and cfg.server_url is not None,
        "is the address of a running server, and serve starts servers itself; remove one of"
        " the two",
    ),
    Constraint(
        ("draft", "serve"),
        lambda cfg: cfg.serve and cfg.draft not in (None, "prompt_lookup"),
        "vLLM drafts with the heads of a run, or alone with prompt_lookup; remove draft, or set"
        " draft: prompt_lookup",
    ),
    Constraint(
        ("against", "server_url"),
        lambda cfg: cfg.against is not None and cfg.server_url is None,
        "requires the server with heads to compare it with; set server_url",
    ),
    Constraint(
        ("against", "server_url"),
        lambda cfg: cfg.against is not None and cfg.against == cfg.server_url,
        "is the same server as server_url; start another one without heads",
    ),
    Constraint(
        ("acceptance", "serve", "server_url"),
        lambda cfg: cfg.acceptance == "typical" and cfg.uses_server,
        "servers decode greedily or sample; set acceptance: greedy or sampling",
    ),
    Constraint(
        ("chat_template", "server_url"),
        lambda cfg: cfg.chat_template is not None and cfg.server_url is not None,
        "the server applies its own chat template; remove chat_template",
    ),
    Constraint(
        ("special_tokens", "server_url"),
        lambda cfg: cfg.special_tokens is not None and cfg.server_url is not None,
        "a running server has its own tokenizer; remove special_tokens",
    ),
    Constraint(
        ("serve_args",),
        _sets_refused_serve_args,
        "--host, --port, --model, --served-model-name and --speculative-config are set by"
        " medusa-eval, and --api-key or --hf-token would appear in the report (set HF_TOKEN"
        " instead); remove them",
    ),
)

#: Keys of an evaluation in this process, which have no effect on a server.
_EVAL_LOCAL_KEYS = (
    "tree",
    "threshold",
    "lookahead",
    "rest",
    "compile",
    "batch_size",
    "exactness",
    "generate",
    "prompt_lookup",
    "assistant_model",
    "judge_base_url",
    "judge_model",
    "judge_concurrency",
    "score",
    "allow_code_execution",
    "rouge",
    "calibration_tokens",
)
_EVAL_SERVE_KEYS = (
    "serve_speculative_tokens",
    "serve_together",
    "serve_args",
    "serve_start_seconds",
)
_EVAL_SERVER_KEYS = ("concurrency", "request_timeout", "retry_seconds")


def find_ineffective_eval_keys(cfg: Any) -> Iterator[str]:
    """Yield the keys of `medusa-eval` that have no effect given the values of the others."""
    if cfg.uses_server:
        yield from _EVAL_LOCAL_KEYS
    else:
        yield from _EVAL_SERVER_KEYS
    if not cfg.serve:
        yield from _EVAL_SERVE_KEYS
    if cfg.server_url is None and (cfg.serve or cfg.judge_base_url is None):
        yield "api_key_env"  # VLLM_API_KEY locks the servers of `serve`
    if cfg.server_url is not None:
        yield from ("dtype", "trust_remote_code", "draft", "lookup")
    if cfg.draft is not None and "+" not in cfg.draft:  # it chooses its trees itself
        yield "tree"
    if cfg.acceptance != "sampling":
        yield from ("top_p", "top_k")
    if cfg.acceptance != "typical":
        yield from ("epsilon", "delta")
    if cfg.acceptance != "greedy":
        yield "exactness"
    if cfg.batch_size > 1:  # transformers' assisted decoding takes a single row
        yield from ("prompt_lookup", "assistant_model")


def _uses_server(cfg: Any) -> bool:
    """Return whether a server answers; an address without `engine` means one."""
    if cfg.engine is None:
        return cfg.server_url is not None
    return bool(cfg.engine == "openai")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _no_model_answers(cfg: Any) -> bool:
    if cfg.base_model is not None or cfg.heads is not None or _uses_server(cfg):
        return False
    # the test model's own prompts are for trying the command
    return bool(cfg.seed_dataset != "tiny")


def _leaves_no_length(cfg: Any) -> bool:
    if cfg.min_chars is None or cfg.max_chars is None:
        return False
    return bool(cfg.min_chars > cfg.max_chars)


def _not_on_a_server(key: str, message: str) -> Constraint:
    return Constraint(
        (key, "engine", "server_url"),
        lambda cfg: _uses_server(cfg) and getattr(cfg, key) is not None,
        message,
    )


#: Constraints of `medusa-selfdistill`.
SELFDISTILL_CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        ("seed_dataset",),
        lambda cfg: _is_number(cfg.seed_dataset) and resolve_path(cfg.seed_dataset) is None,
        "names the prompts; for the random seed write seed=N",
    ),
    Constraint(
        ("engine", "server_url"),
        lambda cfg: cfg.engine == "openai" and cfg.server_url is None,
        "requires the server's address; set server_url, for example http://localhost:8000/v1",
    ),
    Constraint(
        ("server_url", "engine"),
        lambda cfg: cfg.engine == "local" and cfg.server_url is not None,
        "is not used by engine: local; remove one of the two",
    ),
    Constraint(
        ("engine", "server_url", "base_model"),
        lambda cfg: _uses_server(cfg) and cfg.base_model is None,
        "requests need a model name; set base_model to the name that the server uses",
    ),
    Constraint(
        ("seed_dataset", "base_model", "heads", "engine", "server_url"),
        _no_model_answers,
        "needs the model that is to answer: add --model NAME, its directory or hub name"
        " (base_model: NAME in a YAML). Without it the test model data/tiny answers its own prompts,"
        " `tiny`",
    ),
    Constraint(
        ("mode", "engine", "server_url"),
        lambda cfg: _uses_server(cfg) and cfg.mode != "replay",
        "a chat server generates assistant turns only; selftalk requires engine: local",
    ),
    _not_on_a_server(
        "heads",
        "has no effect on a server, which does its own speculative decoding; use engine: local",
    ),
    _not_on_a_server("batch_size", "a server does its own batching; set concurrency instead"),
    _not_on_a_server(
        "chat_template", "the server applies its own chat template; remove chat_template"
    ),
    _not_on_a_server("special_tokens", "the server has its own tokenizer; remove special_tokens"),
    Constraint(
        ("min_chars", "max_chars"),
        _leaves_no_length,
        "is greater than max_chars, so no conversation is left",
    ),
)
