"""Write an EAGLE-3 or a DFlash draft for vLLM, SGLang or speculators."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

from medusa_train.checkpoint.dflash_layout import to_dflash
from medusa_train.checkpoint.eagle3_layouts import to_eagle3
from medusa_train.checkpoint.heads import VLLM_WEIGHTS, read_draft, write_weights
from medusa_train.checkpoint.resolve import ModelPaths
from medusa_train.config.draft_sections import DRAFT_CONFIGS, default_layers
from medusa_train.config.types import ExportTarget
from medusa_train.export.card import card
from medusa_train.io import replace_text
from medusa_train.models.drafts.eagle3_layer import layer_config
from medusa_train.models.loading import resolve_target_model
from medusa_train.models.vllm_eagle3_models import vllm_eagle3_warnings

BIAS_IGNORED = (
    "the heads' lm_head matrices have a bias, which the layout cannot store: without it the heads"
    " guess worse; every guess is still verified by the target model"
)
_COMMANDS: dict[ExportTarget, str] = {
    "vllm": (
        "vllm serve {target_model} --speculative-config "
        '\'{{"method": "{method}", "model": "{directory}", "num_speculative_tokens": {tokens}}}\''
    ),
    "sglang": (
        "python -m sglang.launch_server --model-path {target_model} --speculative-algorithm"
        " {algorithm} "
        "--speculative-draft-model-path {directory}{options}"
    ),
    "speculators": "vllm serve {directory}",
}


def write_server_draft(
    paths: ModelPaths,
    kind: str,
    to: ExportTarget,
    directory: Path,
    target: Path,
    target_model_name: str,
    licence: str | None,
) -> tuple[list[str], list[str]]:
    """Write the draft of `kind` at `paths`, with a model card; return lines that describe it, and
    warnings.

    Args:
        directory: directory to which the draft is written.
        target: directory from which it will be served.
        target_model_name: target model to name in config.json.
        licence: licence to name on the card.
    """
    # 1. Read the draft, and the config of its layer for this target model.
    assert paths.heads is not None
    state, settings = read_draft(paths.heads, kind)
    _, target_model = resolve_target_model(
        paths.target_model, trust_remote_code=paths.trust_remote_code
    )
    text_config = target_model.get_text_config()
    layer = layer_config(text_config, settings.get("layer")).to_dict()
    vocab_size = text_config.vocab_size
    # 2. Convert tensors and config.json for the server, and collect facts for card and command.
    warnings = []
    described: dict[str, Any]
    if kind == "eagle3":
        num_layers = text_config.num_hidden_layers
        settings["layers"] = settings.get("layers") or default_layers(num_layers)
        tensors, config = to_eagle3(state, settings, layer, vocab_size, target_model_name, to)
        drafted = f"{config['draft_vocab_size']:,} of {vocab_size:,} tokens"
        described = {"drafted": drafted}
        served = {"method": kind, "tokens": 2, "algorithm": "EAGLE3", "options": ""}
        summary = f"EAGLE-3, {drafted}; target model {target_model_name}"
        notes = ["vLLM drafts a chain, SGLang a chain or a tree of its own; tree.json is not read"]
        if "lm_heads.0.bias" in state:
            warnings.append(BIAS_IGNORED)
        if to != "sglang":
            warnings += vllm_eagle3_warnings(target_model)
    else:
        num_layers = text_config.num_hidden_layers
        tensors, config = to_dflash(
            state, settings, layer, num_layers, vocab_size, target_model_name, to
        )
        tokens = settings["max_draft_tokens"]
        described = {"num_layers": settings["num_layers"], "tokens": tokens}
        block = f" --speculative-num-draft-tokens {tokens + 1}"
        served = {"method": kind, "tokens": tokens, "algorithm": "DFLASH", "options": block}
        summary = f"DFlash, {tokens} guesses in a pass; target model {target_model_name}"
        notes = ["servers verify a chain; tree.json is not read"]
        if settings.get("markov_rank"):
            served["method"] = "dspark"
            notes.append(
                "a Markov bias is written in DSpark's layout, which needs vLLM's newer runner; it"
                " was never served by this project"
            )
    command = partial(_COMMANDS[to].format, **served)
    # 3. Write the files.
    text = card(
        paths,
        to,
        target_model_name,
        licence,
        title=f"{DRAFT_CONFIGS[kind].title} draft",
        tag=kind,
        command=command,
        layers=", ".join(map(str, settings["layers"])),
        served_by_vllm=to != "sglang",
        **described,
    )
    write_weights(directory, VLLM_WEIGHTS, tensors, config)
    replace_text(directory / "README.md", text)
    # 4. Build the command that serves it.
    place = str(target) if to == "vllm" else quote(str(target))  # vLLM's is already within quotes
    serve = command(directory=place, target_model=quote(target_model_name))
    return [summary, f"serve it: {serve}", *notes], warnings
