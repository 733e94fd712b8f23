"""Rules between keys: combinations that are not allowed, and keys that have no effect given others.

A violation has the keys that the rule reads, and a message on what is wrong and what to do. It is
reported at the first of the keys that the user set, and only if all of them have valid values.
`cfg` is a resolved configuration of the command; its class is in `schema`, which imports this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from medusa_train.config.draft_sections import DRAFT_CONFIGS, LOOKUPS, SECTIONS, MedusaConfig
from medusa_train.config.keys import ADAPTER, JOINT, LOCAL, SERVE, SERVER, Violation, keys_marked
from medusa_train.config.paths import resolve_path

#: Why a benchmark of programming problems needs `allow_code_execution`.
CODE_BENCH = (
    "scoring this benchmark runs code that the model writes; set allow_code_execution=true, or"
    " score=false to only decode"
    " (docs/how-to/score-answers.md), or choose another benchmark"
)
#: Pairs of keys of which at most one may be set. One on the command line replaces the other in a
#: file.
EXCLUSIVE = (
    ("load_in_4bit", "load_in_8bit"),
    ("bf16", "fp16"),
    ("warmup_steps", "warmup_ratio"),
    ("save_steps", "saves_per_epoch"),
    ("eval_steps", "evals_per_epoch"),
    ("resume_from_checkpoint", "overwrite_output_dir"),
)
#: Keys from which the recipe follows.
_RECIPE = (
    "recipe",
    "medusa_only_heads",
    "adapter",
    "medusa_num_unfreeze_layers",
    "medusa_self_distillation",
)


def implies_joint_training(cfg: Any) -> bool:
    """Return whether the other keys select Medusa-2 if `recipe` is not set."""
    if cfg.medusa_only_heads is not None:
        return not cfg.medusa_only_heads
    return bool(cfg.adapter or cfg.medusa_num_unfreeze_layers or cfg.medusa_self_distillation)


def _trains_lm_head(cfg: Any) -> bool:
    """Return whether joint training trains the target model's lm_head, in full or by an adapter."""
    targets = cfg.lora_target_modules
    if not cfg.adapter or cfg.lora_target_linear or not targets:
        return True
    return "lm_head" in (*targets, *(cfg.lora_modules_to_save or ()))


def _is_chosen(value: object) -> bool:
    """Return whether a value is set, and not to false or auto."""
    return value is not None and value is not False and value != "auto"


def _has_validation(cfg: Any) -> bool:
    return cfg.val_set_size > 0 or cfg.test_datasets is not None


def train_violations(cfg: Any) -> Iterator[Violation]:
    """Yield the rules of `medusa-train` that are broken."""
    for name, other in EXCLUSIVE:
        if _is_chosen(getattr(cfg, name)) and _is_chosen(getattr(cfg, other)):
            yield (name, other), f"cannot be set together with {other}; choose one"
    yield from _target_model_violations(cfg)
    yield from _draft_violations(cfg)
    yield from _export_violations(cfg)
    yield from _data_violations(cfg)


def _target_model_violations(cfg: Any) -> Iterator[Violation]:
    """Yield broken rules on the target model and its trained parts."""
    is_joint = cfg.recipe == "medusa2"
    if cfg.adapter == "qlora" and not cfg.load_in_4bit:
        yield (
            ("adapter", "load_in_4bit"),
            "qlora is an adapter on a 4-bit target model; set load_in_4bit: true, or adapter: lora",
        )
    for name in ("medusa_self_distillation", "medusa_distillation_regularization"):
        if getattr(cfg, name) and not cfg.adapter:
            yield (
                (name, "adapter"),
                "the teacher is the target model with its adapter disabled; set adapter: lora or"
                " qlora, or remove it",
            )
    if cfg.medusa_num_unfreeze_layers and cfg.quantization:
        yield (
            ("medusa_num_unfreeze_layers", "load_in_4bit", "load_in_8bit"),
            "quantized layers cannot be trained; use an adapter, or load the target model"
            " unquantized",
        )
    if cfg.medusa_only_heads is is_joint:
        yield (
            ("recipe", "medusa_only_heads"),
            "medusa1 means medusa_only_heads: true, medusa2 means false; remove one of the two"
            " keys",
        )
    if (not is_joint or cfg.medusa_only_heads) and cfg.medusa_num_unfreeze_layers:
        yield (
            ("recipe", "medusa_only_heads", "medusa_num_unfreeze_layers"),
            "only the heads are trained, so medusa_num_unfreeze_layers must be 0",
        )
    trains_part = cfg.adapter or cfg.medusa_num_unfreeze_layers
    if is_joint and cfg.quantization and not trains_part:
        yield (
            ("load_in_4bit", "load_in_8bit", *_RECIPE),
            "a quantized target model can be trained jointly only with an adapter; set adapter, or"
            " recipe: medusa1",
        )
    if is_joint and cfg.medusa_share_lm_head and _trains_lm_head(cfg):
        yield (
            ("medusa_share_lm_head", "lora_target_linear", "lora_target_modules", *_RECIPE),
            "heads cannot share an lm_head that is being trained; keep it frozen (recipe: medusa1,"
            " or an adapter with other lora_target_modules)",
        )


def _draft_violations(cfg: Any) -> Iterator[Violation]:
    """Yield broken rules on the draft, and on what needs a frozen target model."""
    is_joint = cfg.recipe == "medusa2"
    if cfg.medusa_num_layers == 0 and cfg.medusa_share_lm_head:
        yield (
            ("medusa_num_layers", "medusa_share_lm_head"),
            "heads without residual blocks that share the lm_head have no parameters to train; set"
            " 1 or more",
        )
    for name in SECTIONS:
        if getattr(cfg, name) is not None and cfg.draft != name:
            yield (name, "draft"), f"belongs to another draft; set draft: {name}, or remove it"
    if is_joint and not DRAFT_CONFIGS[cfg.draft].trains_jointly:
        yield (
            ("draft", *_RECIPE),
            "can be trained on a frozen target model only; remove the keys of joint training"
            " (recipe: medusa1)",
        )
    if is_joint and cfg.cache_hidden_states:
        yield (
            ("cache_hidden_states", *_RECIPE),
            "the hidden states of a target model that is trained change with every step; set"
            " cache_hidden_states: false, or recipe: medusa1",
        )
    if is_joint and cfg.torch_compile:
        yield (
            ("torch_compile", *_RECIPE),
            "only passes of a frozen target model are compiled, and this recipe trains it; set"
            " torch_compile: false, or recipe: medusa1",
        )
    if cfg.cache_hidden_states and cfg.dataset_prepared_path is None:
        yield (
            ("cache_hidden_states", "dataset_prepared_path"),
            "requires a directory for the hidden states; set dataset_prepared_path",
        )


def _export_violations(cfg: Any) -> Iterator[Violation]:
    """Yield broken rules on `export`."""
    exported = set(cfg.export or ())
    if not exported.issubset(DRAFT_CONFIGS[cfg.draft].exports):
        yield ("export", "draft"), f"{_describe_exports()}; remove the others"
    if "merged" in exported and cfg.recipe == "medusa1":
        yield (
            ("export", *_RECIPE),
            "merged is the jointly trained target model, but this recipe keeps it frozen; remove"
            " merged",
        )
    if "reference-v2" in exported and not cfg.medusa_share_lm_head:
        yield (
            ("export", "medusa_share_lm_head"),
            "reference-v2 requires heads that share the target model's lm_head; set"
            " medusa_share_lm_head: true",
        )
    if cfg.medusa_vocab_size and not exported.issubset(("vllm", "transformers", "merged")):
        yield (
            ("export", "medusa_vocab_size"),
            "only the vllm and transformers layouts support a reduced vocabulary"
            " (medusa_vocab_size); export to these",
        )
    if cfg.medusa_markov_rank and not exported.issubset(("merged",)):
        yield (
            ("export", "medusa_markov_rank"),
            "no other program reads heads with a Markov bias (medusa_markov_rank): their guesses"
            " depend on the token before; remove export, or train without it",
        )


def _data_violations(cfg: Any) -> Iterator[Violation]:
    """Yield broken rules on the data, validation, and the length of rows."""
    templates = [dataset.conversation for dataset in cfg.datasets]
    if cfg.chat_template and None not in templates and cfg.chat_template not in templates:
        yield (
            ("chat_template", "datasets"),
            "no data set has this template: each sets another one in `conversation`, which takes"
            " precedence; remove chat_template, or those `conversation` keys",
        )
    if cfg.test_datasets and cfg.val_set_size:
        yield (
            ("val_set_size", "test_datasets"),
            "test_datasets are the data for evaluation; remove one of the two",
        )
    if cfg.early_stopping_patience is not None and not _has_validation(cfg):
        yield (
            ("early_stopping_patience", "val_set_size"),
            "requires evaluations; set val_set_size, for example 0.05",
        )
    if cfg.draft == "medusa" and cfg.sequence_len < cfg.medusa_num_heads + 2:
        yield (
            ("sequence_len", "medusa_num_heads"),
            "too short: head k predicts the token at offset k + 1, so it must exceed"
            " medusa_num_heads + 1",
        )


def _describe_exports() -> str:
    """Return text that lists for each draft the programs that read it."""
    clauses = []
    for name, section in DRAFT_CONFIGS.items():
        clause = f"draft: {name} is exported to {', '.join(section.exports)}"
        clauses.append(clause if section.exports else f"no program reads {name}")
    return "; ".join(clauses)


def ineffective_train_keys(cfg: Any) -> Iterator[str]:
    """Yield the keys that have no effect given the values of the others."""
    if cfg.draft in SECTIONS:
        yield from (f"{MedusaConfig.prefix}{name}" for name in MedusaConfig.model_fields)
    if cfg.recipe == "medusa1":
        yield from (*keys_marked(type(cfg), JOINT), "gradient_checkpointing")
    elif cfg.adapter is not None:
        yield "medusa_num_unfreeze_layers"
        if cfg.medusa_self_distillation:  # the target is the teacher's distribution alone
            yield "medusa_distillation_regularization"
    if cfg.recipe == "medusa1" or cfg.adapter is None:
        yield from keys_marked(type(cfg), ADAPTER)
    elif cfg.lora_target_linear:
        yield "lora_target_modules"
    if cfg.lr_scheduler != "cosine":
        yield "cosine_min_lr_ratio"
    if cfg.lr_scheduler == "constant":
        yield from (name for name in ("warmup_steps", "warmup_ratio") if getattr(cfg, name))
    if cfg.lora_model_dir is not None:
        yield "stage_one"
    if cfg.train_on_inputs:
        yield "roles_to_train"
    if not _has_validation(cfg):
        yield from ("eval_steps", "evals_per_epoch")
    if cfg.wandb_project is None:
        yield from ("wandb_entity", "wandb_run_id", "wandb_name")


#: Keys that cannot be set for a server, with what to do instead.
_NOT_ON_A_SERVER = {
    "heads": "has no effect on a server, which does its own speculative decoding; use engine:"
    " local",
    "batch_size": "a server does its own batching; set concurrency instead",
    "chat_template": "the server applies its own chat template; remove chat_template",
    "special_tokens": "the server has its own tokenizer; remove special_tokens",
}
#: Arguments of `vllm serve` that medusa-eval sets itself, and secrets, which the report would
#: contain.
_REFUSED_SERVE_ARGS = (
    "--host",
    "--port",
    "--model",
    "--served-model-name",
    "--speculative-config",
    "--api-key",
    "--hf-token",
)


def eval_violations(cfg: Any) -> Iterator[Violation]:
    """Yield the rules of `medusa-eval` that are broken. Question files in HumanEval's format are
    checked when they have been read.
    """
    drafts_with = (cfg.draft or "").rpartition("+")[2]
    has_server = cfg.server_url is not None
    runs_code = cfg.bench == "humaneval" and cfg.score and not cfg.uses_server
    if runs_code and not cfg.allow_code_execution:
        yield ("bench", "score", "allow_code_execution", "serve", "server_url"), CODE_BENCH
    if cfg.acceptance == "greedy" and cfg.temperature:
        yield (
            ("temperature", "acceptance"),
            "greedy decoding has no temperature; set acceptance: sampling or typical, or remove"
            " temperature",
        )
    if cfg.acceptance != "greedy" and cfg.temperature == 0:
        yield (
            ("acceptance", "temperature"),
            "at temperature 0 this is greedy decoding; set acceptance: greedy, or a temperature"
            " above 0",
        )
    for kind, (_, section) in LOOKUPS.items():
        if getattr(cfg, section) is not None and drafts_with != kind:
            yield (
                (section, "draft"),
                f"belongs to another draft; set draft: {kind}, or medusa+{kind}, or remove it",
            )
    if drafts_with == "rest" and cfg.rest is None:
        yield (
            ("draft", "rest"),
            "copies from a datastore; set rest.datastore to a file of the model's answers or of"
            " any text",
        )
    if (cfg.judge_base_url is None) != (cfg.judge_model is None):
        yield (
            ("judge_base_url", "judge_model"),
            "judge_base_url and judge_model belong together; set both, or neither",
        )
    if cfg.serve and has_server:
        yield (
            ("server_url", "serve"),
            "is the address of a running server, and serve starts servers itself; remove one of"
            " the two",
        )
    if cfg.serve and cfg.draft not in (None, "prompt_lookup"):
        yield (
            ("draft", "serve"),
            "vLLM drafts with the heads of a run, or alone with prompt_lookup; remove draft, or"
            " set draft: prompt_lookup",
        )
    if cfg.against is not None and not has_server:
        yield (
            ("against", "server_url"),
            "requires the server with heads to compare it with; set server_url",
        )
    if cfg.against is not None and cfg.against == cfg.server_url:
        yield (
            ("against", "server_url"),
            "is the same server as server_url; start another one without heads",
        )
    if cfg.acceptance == "typical" and cfg.uses_server:
        yield (
            ("acceptance", "serve", "server_url"),
            "servers decode greedily or sample; set acceptance: greedy or sampling",
        )
    for name in ("chat_template", "special_tokens"):
        if has_server and getattr(cfg, name) is not None:
            yield (name, "server_url"), _NOT_ON_A_SERVER[name]
    names = {arg.partition("=")[0].replace("_", "-") for arg in cfg.serve_args or ()}
    if names.intersection(_REFUSED_SERVE_ARGS):
        yield (
            ("serve_args",),
            "--host, --port, --model, --served-model-name and --speculative-config are set by"
            " medusa-eval, and --api-key or --hf-token would appear in the report (set HF_TOKEN"
            " instead); remove them",
        )


def ineffective_eval_keys(cfg: Any) -> Iterator[str]:
    """Yield the keys of `medusa-eval` that have no effect given the values of the others."""
    yield from keys_marked(type(cfg), LOCAL if cfg.uses_server else SERVER)
    if not cfg.serve:
        yield from keys_marked(type(cfg), SERVE)
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
        yield from ("exactness", "equality")
    elif not cfg.exactness:
        yield "equality"
    if cfg.batch_size > 1:  # transformers' assisted decoding takes a single row
        yield from ("prompt_lookup", "assistant_model")


def _is_number(text: str) -> bool:
    return text.removeprefix("-").replace(".", "", 1).isdecimal()


def selfdistill_violations(cfg: Any) -> Iterator[Violation]:
    """Yield the rules of `medusa-selfdistill` that are broken."""
    has_server = cfg.server_url is not None
    uses_server = cfg.engine == "openai"
    if _is_number(cfg.seed_dataset) and resolve_path(cfg.seed_dataset) is None:
        yield ("seed_dataset",), "names the prompts; for the random seed write seed=N"
    if cfg.engine == "openai" and not has_server:
        yield (
            ("engine", "server_url"),
            "requires the server's address; set server_url, for example http://localhost:8000/v1",
        )
    if cfg.engine == "local" and has_server:
        yield ("server_url", "engine"), "is not used by engine: local; remove one of the two"
    if uses_server and cfg.base_model is None:
        yield (
            ("engine", "server_url", "base_model"),
            "requests need a model name; set base_model to the name that the server uses",
        )
    if not uses_server and cfg.base_model is None and cfg.heads is None:
        yield (
            ("seed_dataset", "base_model", "heads", "engine", "server_url"),
            "needs the answering model: add --model NAME, its directory or hub name"
            " (base_model: NAME in a YAML). Without it the test model data/tiny answers its own"
            " prompts, `tiny`",
        )
    if uses_server and cfg.mode != "replay":
        yield (
            ("mode", "engine", "server_url"),
            "a chat server generates assistant turns only; selftalk requires engine: local",
        )
    for name, message in _NOT_ON_A_SERVER.items():
        if uses_server and getattr(cfg, name) is not None:
            yield (name, "engine", "server_url"), message
    if cfg.min_chars and cfg.max_chars and cfg.min_chars > cfg.max_chars:
        yield (
            ("min_chars", "max_chars"),
            "is greater than max_chars, so no conversation is left",
        )
