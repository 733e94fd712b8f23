"""Write a DFlash draft for vLLM or SGLang."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from medusa_train.checkpoint.dflash_layout import to_dflash
from medusa_train.checkpoint.heads import VLLM_WEIGHTS, read_draft, write_weights
from medusa_train.checkpoint.resolve import ModelPaths
from medusa_train.config.types import ExportTarget
from medusa_train.export.card import card
from medusa_train.io import replace_text
from medusa_train.models.drafts.eagle3_layer import layer_config
from medusa_train.models.loading import resolve_target_model

_COMMANDS: dict[ExportTarget, str] = {
    "vllm": (
        "vllm serve {target_model} --speculative-config "
        '\'{{"method": "METHOD", "model": "{directory}", "num_speculative_tokens": TOKENS}}\''
    ),
    "sglang": (
        "python -m sglang.launch_server --model-path {target_model} --speculative-algorithm DFLASH "
        "--speculative-draft-model-path {directory} --speculative-num-draft-tokens BLOCK"
    ),
}


def write_dflash(
    paths: ModelPaths,
    heads: Path,
    to: ExportTarget,
    target: Path,
    base_model: str,
    licence: str | None,
) -> list[str]:
    """Write the DFlash draft in `heads`, with a model card; return what was written, in lines.

    `base_model` is named in config.json, `licence` on the card.
    """
    # 1. Tensors and config.json as the server reads them.
    state, settings = read_draft(heads, "dflash")
    _, target_model = resolve_target_model(
        paths.base_model, trust_remote_code=paths.trust_remote_code
    )
    text_config = target_model.get_text_config()
    layer = layer_config(text_config, settings.get("layer")).to_dict()
    tensors, config = to_dflash(
        state,
        settings,
        layer,
        text_config.num_hidden_layers,
        text_config.vocab_size,
        base_model,
        to,
    )
    # 2. The card.
    tokens = settings["max_draft_tokens"]
    method = "dspark" if settings.get("markov_rank") else "dflash"
    command = (
        _COMMANDS[to]
        .replace("METHOD", method)
        .replace("TOKENS", str(tokens))
        .replace("BLOCK", str(tokens + 1))
    )
    text = card(
        paths,
        to,
        base_model,
        licence,
        title="DFlash draft",
        tag="dflash",
        command=command,
        num_layers=settings["num_layers"],
        tokens=tokens,
        layers=", ".join(map(str, settings["layers"])),
        served_by_vllm=to == "vllm",
    )
    write_weights(target, VLLM_WEIGHTS, tensors, config)
    replace_text(target / "README.md", text)
    # 3. How to serve it.
    directory = str(target)
    if to != "vllm":  # whose command has it within quotes
        directory = quote(directory)
    facts = [
        f"DFlash, {tokens} guesses in a pass; base model {base_model}",
        f"serve it: {command.format(directory=directory, target_model=quote(base_model))}",
        "servers verify a chain; tree.json is not read",
    ]
    if method == "dspark":
        facts.append(
            "a Markov bias is written in DSpark's layout, which needs vLLM's newer runner; it was never"
            " served by this project"
        )
    return facts
