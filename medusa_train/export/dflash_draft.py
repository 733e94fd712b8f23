"""Write a DFlash draft for vLLM or SGLang."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from shlex import quote

from medusa_train.checkpoint.dflash_layout import to_dflash
from medusa_train.checkpoint.heads import VLLM_WEIGHTS, read_dflash, write_weights
from medusa_train.checkpoint.resolve import ModelPaths
from medusa_train.config.types import ExportTarget
from medusa_train.export.card import card
from medusa_train.io import replace_text
from medusa_train.models.drafts.eagle3_layer import layer_config
from medusa_train.models.loading import resolve_backbone

_COMMANDS: dict[ExportTarget, str] = {
    "vllm": (
        "vllm serve {backbone} --speculative-config "
        '\'{{"method": "{method}", "model": "{directory}", "num_speculative_tokens": {tokens}}}\''
    ),
    "sglang": (
        "python -m sglang.launch_server --model-path {backbone} --speculative-algorithm DFLASH "
        "--speculative-draft-model-path {directory} --speculative-num-draft-tokens {block}"
    ),
}
_DESCRIPTION = (
    "{layers} decoder layers that guess {tokens} tokens in one pass (DFlash, arXiv 2602.06036), from"
    " the target model's states after {states} layers. The server verifies every drafted token."
)
_USE = (
    "```bash\n{command}\n```\n\nServers verify a chain of its first guesses. {{chain}}\n\nMeasure your"
    " server under your load, with and without the draft: with many requests at a time it can be"
    " slower."
)


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
    state, settings = read_dflash(heads)
    _, backbone = resolve_backbone(paths.base_model, trust_remote_code=paths.trust_remote_code)
    text_config = backbone.get_text_config()
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
    command = partial(
        _COMMANDS[to].format,
        backbone=quote(base_model),
        method=method,
        tokens=tokens,
        block=tokens + 1,
    )
    use = _USE.format(
        command=command(directory="THIS_DIRECTORY").replace("{", "{{").replace("}", "}}")
    )
    text = card(
        paths,
        "DFlash draft",
        _DESCRIPTION.format(
            layers=settings["num_layers"],
            tokens=tokens,
            states=", ".join(map(str, settings["layers"])),
        ),
        use.format,
        base_model,
        licence,
        served_by_vllm=to == "vllm",
        tag="dflash",
    )
    write_weights(target, VLLM_WEIGHTS, tensors, config)
    replace_text(target / "README.md", text)
    # 3. How to serve it.
    directory = str(target)
    if to != "vllm":  # there it stands within quotes
        directory = quote(directory)
    facts = [
        f"DFlash, {tokens} guesses in a pass; base model {base_model}",
        f"serve it: {command(directory=directory)}",
        "servers verify a chain; tree.json is not read",
    ]
    if method == "dspark":
        facts.append(
            "a Markov bias is written in DSpark's layout, which needs vLLM's newer runner; it was never"
            " served by this project"
        )
    return facts
