"""Write an EAGLE-3 draft for vLLM, SGLang or speculators."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from medusa_train.checkpoint.eagle3_layouts import for_target, to_eagle3
from medusa_train.checkpoint.heads import VLLM_WEIGHTS, read_draft, write_weights
from medusa_train.checkpoint.resolve import ModelPaths
from medusa_train.config.draft_sections import default_layers
from medusa_train.config.types import ExportTarget
from medusa_train.export.card import card
from medusa_train.io import replace_text
from medusa_train.models.drafts.eagle3_layer import layer_config
from medusa_train.models.loading import resolve_target_model

_EAGLE3_COMMANDS: dict[ExportTarget, str] = {
    "vllm": (
        "vllm serve {target_model} --speculative-config "
        '\'{{"method": "eagle3", "model": "{directory}", "num_speculative_tokens": 2}}\''
    ),
    "sglang": (
        "python -m sglang.launch_server --model-path {target_model} --speculative-algorithm EAGLE3 "
        "--speculative-draft-model-path {directory}"
    ),
    "speculators": "vllm serve {directory}",
}


def write_eagle3(
    paths: ModelPaths,
    heads: Path,
    to: ExportTarget,
    target: Path,
    base_model: str,
    licence: str | None,
) -> list[str]:
    """Write the EAGLE-3 draft in `heads`, with a model card; return what was written, in lines.

    `base_model` is named in config.json, `licence` on the card.
    """
    # 1. Tensors and config.json as the server reads them.
    state, settings = read_draft(heads, "eagle3")
    _, target_model = resolve_target_model(
        paths.base_model, trust_remote_code=paths.trust_remote_code
    )
    text_config = target_model.get_text_config()
    settings["layers"] = settings.get("layers") or default_layers(text_config.num_hidden_layers)
    layer = layer_config(text_config, settings.get("layer")).to_dict()
    tensors, config = to_eagle3(state, settings, layer, text_config.vocab_size, base_model)
    tensors, config = for_target(tensors, config, to, min(3, settings.get("num_heads", 3)))
    # 2. The card.
    drafted = f"{config['draft_vocab_size']:,} of {text_config.vocab_size:,} tokens"
    text = card(
        paths,
        to,
        base_model,
        licence,
        title="EAGLE-3 draft",
        tag="eagle3",
        command=_EAGLE3_COMMANDS[to],
        layers=", ".join(map(str, settings["layers"])),
        drafted=drafted,
        served_by_vllm=to != "sglang",
    )
    write_weights(target, VLLM_WEIGHTS, tensors, config)
    replace_text(target / "README.md", text)
    # 3. How to serve it.
    directory = str(target)
    if to != "vllm":  # whose command has it within quotes
        directory = quote(directory)
    command = _EAGLE3_COMMANDS[to].format(directory=directory, target_model=quote(base_model))
    return [
        f"EAGLE-3, {drafted}; target model {base_model}",
        f"serve it: {command}",
        "vLLM drafts a chain, SGLang a chain or a tree of its own; tree.json is not read",
    ]
