"""The model card of an export: what it is, made from what, trained how, how fast it was measured. Reads no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from medusa_train.checkpoint.reference import HeadTensors
from medusa_train.checkpoint.resolve import ModelPaths
from medusa_train.config.types import ExportTarget

#: Keys of a run that say how it was trained, where config.yaml holds them.
SETTINGS = (
    "recipe",
    "medusa_decay_coefficient",
    "medusa_heads_coefficient",
    "medusa_scheduler",
    "medusa_self_distillation",
    "medusa_soft_targets",
    "adapter",
    "lora_r",
    "lora_alpha",
    "lora_dropout",
    "load_in_4bit",
    "load_in_8bit",
    "sequence_len",
    "num_epochs",
    "max_steps",
    "micro_batch_size",
    "gradient_accumulation_steps",
    "optimizer",
    "learning_rate",
    "medusa_lr_multiplier",
    "lr_scheduler",
    "warmup_steps",
    "weight_decay",
    "chat_template",
    "seed",
)

_USE: dict[ExportTarget, str] = {
    "reference": "The public Medusa code reads `medusa_lm_head.pt`.",
    "reference-v2": 'The heads share the backbone\'s lm_head ("version 2").',
    "tgi": "text-generation-inference reads this directory as `--model-id`.",
    "vllm": (
        "```bash\nvllm serve BACKBONE --speculative-config "
        '\'{{"method": "medusa", "model": "THIS_DIRECTORY", "num_speculative_tokens": {heads}}}\'\n```'
    ),
    "trtllm": "TensorRT-LLM's Medusa example takes this directory as `--medusa_model_dir`.",
    "merged": "A plain transformers model, to be used with the draft heads that were trained with it.",
}


def model_card(paths: ModelPaths, heads: HeadTensors, to: ExportTarget, licence: str | None) -> str:
    """The card as Markdown, with the hub's YAML header. Local directories are named without what lies above them."""
    run = _yaml(paths.home / "config.yaml")
    base = str(run.get("base_model") or paths.base_model)
    what = "Backbone trained with Medusa heads" if to == "merged" else "Medusa heads"
    parts = [
        _header(base, run, licence or _licence_of(base)),
        f"# {what} for {_public(base)}",
        _what(heads, to),
        _USE[to].format(heads=heads.num_heads),
        _training(run),
        _measured(paths.home),
        f"## Licence\n\n{licence}"
        if licence
        else "## Licence\n\nThat of the base model applies to what was trained on it.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _header(base: str, run: dict[str, Any], licence: str | None) -> str:
    keys: dict[str, Any] = {"license": licence or "other", "tags": ["medusa", "speculative-decoding"]}
    if _is_hub_name(base):
        keys["base_model"] = base
    if data := [name for name in _data(run) if _is_hub_name(name)]:
        keys["datasets"] = data
    return f"---\n{yaml.safe_dump(keys, sort_keys=False)}---"


def _what(heads: HeadTensors, to: ExportTarget) -> str:
    if to == "merged":
        return "The backbone of a Medusa-2 run, with everything folded in that it learnt beside its draft heads."
    matrix = "the backbone's lm_head, shared" if heads.shared else f"{heads.vocab_size:,} tokens"
    if heads.token_map is not None:
        known = f"the {len(heads.token_map):,} most frequent tokens"
        matrix = f"{matrix}, {known}" if heads.shared else known
    layers = f"{heads.num_layers} residual block{'' if heads.num_layers == 1 else 's'}"
    return (
        f"{heads.num_heads} draft heads with {layers} each (hidden size {heads.hidden_size:,}, {matrix}): head k "
        "guesses the token k places beyond the next one, the model verifies the guesses, and its output stays its own. "
        "Medusa: arXiv 2401.10774."
    )


def _training(run: dict[str, Any]) -> str:
    if not run:
        return ""
    rows = [f"| `{key}` | {run[key]} |" for key in SETTINGS if run.get(key) not in (None, False)]
    table = "\n".join(["| setting | value |", "|---|---|", *rows])
    return f"## Training\n\nData: {', '.join(_public(name) for name in _data(run))}.\n\n{table}"


def _measured(home: Path) -> str:
    """A table of the evaluations that lie beside the heads; a sentence where there are none."""
    rows = []
    for path in sorted(home.glob("eval/*/report.json")):
        report = _json(path)
        overall, meta = report.get("overall") or {}, report.get("meta") or {}
        if overall.get("speedup") is not None:
            cells = [meta.get("bench"), meta.get("device"), meta.get("dtype"), meta.get("tree_nodes")]
            figures = [
                overall.get(key) for key in ("acceleration_rate", "overhead", "speedup", "speedup_over_generate")
            ]
            rows.append([*(str(cell) for cell in cells), *("-" if x is None else f"{x:.2f}" for x in figures)])
    if not rows:
        return "## Measured\n\nNothing has been measured yet (`medusa-eval`)."
    titles = ["bench", "device", "dtype", "tree nodes", "tokens per step", "overhead", "speedup", "over generate"]
    lines = [titles, ["---"] * len(titles), *rows]
    return (
        "## Measured\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n\n"
        "One answer at a time, the tree in `tree.json` of the run. *speedup* is over the same loop without guesses, "
        "*over generate* over `transformers` `generate`; a server's gain is its own."
    )


def _data(run: dict[str, Any]) -> list[str]:
    entries = run.get("datasets") or []
    return [str(entry["path"]) for entry in entries if isinstance(entry, dict) and "path" in entry]


def _is_hub_name(name: str) -> bool:
    """Whether a name is one of the hub's: `owner/name`, and no path of this machine."""
    local = name.startswith((".", "/", "~")) or name.endswith((".jsonl", ".json", ".parquet")) or Path(name).exists()
    return name.count("/") == 1 and not local


def _public(name: str) -> str:
    """A hub name as it is; of a path only the last part: directories are nobody else's business."""
    return (
        name if _is_hub_name(name) else f"`{Path(name).name}` (a local {'file' if Path(name).suffix else 'directory'})"
    )


def _licence_of(base: str) -> str | None:
    """What the card of a local base model gives as its licence."""
    try:
        text = (Path(base) / "README.md").read_text(encoding="utf-8")
        header = yaml.safe_load(text.split("---")[1]) if text.startswith("---") else None
    except (OSError, ValueError, IndexError, yaml.YAMLError):
        return None
    licence = header.get("license") if isinstance(header, dict) else None
    return licence if isinstance(licence, str) else None


def _yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
