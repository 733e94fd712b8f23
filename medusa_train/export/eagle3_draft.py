"""Write an EAGLE-3 draft for vLLM, SGLang or speculators."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from shlex import quote

from medusa_train.checkpoint.eagle3_layouts import for_target, to_eagle3
from medusa_train.checkpoint.heads import VLLM_WEIGHTS, read_eagle3, write_weights
from medusa_train.checkpoint.resolve import ModelPaths
from medusa_train.config.draft_sections import default_layers
from medusa_train.config.types import ExportTarget
from medusa_train.export.card import card
from medusa_train.io import replace_text
from medusa_train.models.drafts.eagle3_layer import layer_config
from medusa_train.models.loading import resolve_backbone

_EAGLE3_COMMANDS: dict[ExportTarget, str] = {
    "vllm": (
        "vllm serve {backbone} --speculative-config "
        '\'{{"method": "eagle3", "model": "{directory}", "num_speculative_tokens": 2}}\''
    ),
    "sglang": (
        "python -m sglang.launch_server --model-path {backbone} --speculative-algorithm EAGLE3 "
        "--speculative-draft-model-path {directory}"
    ),
    "speculators": "vllm serve {directory}",
}
_EAGLE3_DESCRIPTION = (
    "One decoder layer that drafts the tokens after the next one (EAGLE-3, arXiv 2503.01840), from"
    " the backbone's states after {layers} layers. Draft vocabulary: {tokens}. The server verifies"
    " every drafted token."
)
_EAGLE3_USE = (
    "```bash\n%s\n```\n\nvLLM drafts a chain of its first guesses, SGLang a chain or a tree of its own."
    " {chain}\n\nMeasure your server under your load, with and without the draft: with many"
    " requests at a time it can be slower."
)


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
    state, settings = read_eagle3(heads)
    _, backbone = resolve_backbone(paths.base_model, trust_remote_code=paths.trust_remote_code)
    text_config = backbone.get_text_config()
    settings["layers"] = settings.get("layers") or default_layers(text_config.num_hidden_layers)
    layer = layer_config(text_config, settings.get("layer")).to_dict()
    tensors, config = to_eagle3(state, settings, layer, text_config.vocab_size, base_model)
    tensors, config = for_target(tensors, config, to, min(3, settings.get("num_heads", 3)))
    # 2. The card.
    drafted = f"{config['draft_vocab_size']:,} of {text_config.vocab_size:,} tokens"
    layers = ", ".join(map(str, settings["layers"]))
    use = _EAGLE3_USE % _EAGLE3_COMMANDS[to]
    text = card(
        paths,
        "EAGLE-3 draft",
        _EAGLE3_DESCRIPTION.format(layers=layers, tokens=drafted),
        partial(use.format, directory="THIS_DIRECTORY"),
        base_model,
        licence,
        served_by_vllm=to != "sglang",
        tag="eagle3",
    )
    write_weights(target, VLLM_WEIGHTS, tensors, config)
    replace_text(target / "README.md", text)
    # 3. How to serve it.
    directory = str(target)
    if to != "vllm":  # there it stands within quotes
        directory = quote(directory)
    command = _EAGLE3_COMMANDS[to].format(directory=directory, backbone=quote(base_model))
    return [
        f"EAGLE-3, {drafted}; backbone {base_model}",
        f"serve it: {command}",
        "vLLM drafts a chain, SGLang a chain or a tree of its own; tree.json is not read",
    ]
