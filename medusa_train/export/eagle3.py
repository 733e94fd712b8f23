"""Write an EAGLE-3 draft for vLLM, SGLang or speculators, with a model card."""

from __future__ import annotations

from pathlib import Path

from medusa_train.checkpoint.eagle3_layout import for_target, to_eagle3
from medusa_train.checkpoint.heads import VLLM_WEIGHTS, read_eagle3
from medusa_train.checkpoint.resolve import CONFIG, ModelPaths
from medusa_train.checkpoint.serialize import write_json, write_tensors
from medusa_train.config.types import ExportTarget
from medusa_train.errors import CheckpointError
from medusa_train.io import WRITE_ERRORS, replace_file, write_failure
from medusa_train.models.drafts.eagle3 import layer_config
from medusa_train.models.loading import resolve_backbone

TARGETS: dict[ExportTarget, str] = {
    "vllm": '--speculative-config \'{{"method": "eagle3", "model": "{directory}", "num_speculative_tokens": 3}}\'',
    "sglang": "--speculative-algorithm EAGLE3 --speculative-draft-model-path {directory}",
    "speculators": "vllm serve {directory}",
}
_CARD = """---
license: {licence}
tags: [eagle3, speculative-decoding]
---

# EAGLE-3 draft for {base_model}

One decoder layer that drafts the tokens after the next one (EAGLE-3, arXiv 2503.01840), from the backbone's states
after {layers} layers. Draft vocabulary: {tokens:,} of {vocab_size:,} tokens. The server verifies every drafted token.

```
{command}
```

Measure your server under your load, with and without the draft: with many requests at a time it can be slower.
"""


def write_eagle3(
    paths: ModelPaths, heads: Path, to: ExportTarget, target: Path, base_model: str, licence: str | None
) -> list[str]:
    """Write the draft in `heads`; return what was written, in lines.

    Args:
        paths: of the run. base_model: to name in config.json. licence: to name on the card.

    Raises:
        CheckpointError: no program of that name reads EAGLE-3 drafts, or files cannot be read or written.
        BackboneError: the backbone's config.json cannot be read.
    """
    if to not in TARGETS:
        raise CheckpointError(f"{heads}: an EAGLE-3 draft is exported --to {', '.join(TARGETS)}, not to {to}")
    state, settings = read_eagle3(heads)
    _, backbone = resolve_backbone(paths.base_model, trust_remote_code=paths.trust_remote_code)
    text_config = backbone.get_text_config()
    layer = layer_config(text_config, settings.get("layer")).to_dict()
    tensors, config = to_eagle3(state, settings, layer, text_config.vocab_size, base_model)
    tensors, config = for_target(tensors, config, to, min(3, settings.get("num_heads", 3)))
    command = TARGETS[to].format(directory=target)
    card = _CARD.format(
        licence=licence or "other",
        base_model=base_model,
        layers=", ".join(map(str, settings["layers"])),
        tokens=len(tensors["d2t"]),
        vocab_size=len(tensors["t2d"]),
        command=TARGETS[to].format(directory="THIS_DIRECTORY"),
    )
    try:
        replace_file(target / VLLM_WEIGHTS, lambda path: write_tensors(path, tensors))
        replace_file(target / CONFIG, lambda path: write_json(path, config))
        replace_file(target / "README.md", lambda path: path.write_text(card, encoding="utf-8"))
    except WRITE_ERRORS as error:
        raise CheckpointError(write_failure("the draft", target, error)) from error
    facts = [f"EAGLE-3, {len(tensors['d2t']):,} of {len(tensors['t2d']):,} tokens; backbone {base_model}"]
    return [*facts, f"serve it: {command}", "servers draft a chain, or a tree of their own; tree.json is not read"]
