"""Write an EAGLE-3 or a DFlash draft for vLLM, SGLang or speculators."""

from __future__ import annotations

import json
import shlex
from functools import partial

from medusa_train.checkpoint.dflash_layout import to_dflash
from medusa_train.checkpoint.eagle3_layouts import to_eagle3
from medusa_train.checkpoint.heads import VLLM_WEIGHTS, read_draft, write_weights
from medusa_train.config.draft_sections import DRAFT_CONFIGS, default_layers
from medusa_train.config.types import ExportTarget
from medusa_train.export.card import card
from medusa_train.export.publish import CARD, Export
from medusa_train.io import replace_text
from medusa_train.models.drafts.eagle3_layer import layer_config
from medusa_train.models.loading import resolve_target_model
from medusa_train.models.vllm_eagle3_models import vllm_eagle3_warnings

BIAS_IGNORED = (
    "the heads' lm_head matrices have a bias, which the layout cannot store: without it the heads"
    " guess worse; every guess is still verified by the target model"
)


def write_server_draft(export: Export, kind: str) -> None:
    """Write an EAGLE-3 or a DFlash draft, with a model card."""
    # 1. Read the draft, and the config of its layer for this target model.
    paths, to, name = export.paths, export.to, export.target_model_name
    state, settings = read_draft(export.draft, kind)
    _, target_model = resolve_target_model(
        paths.target_model, trust_remote_code=paths.trust_remote_code
    )
    text_config = target_model.get_text_config()
    num_layers, vocab_size = text_config.num_hidden_layers, text_config.vocab_size
    layer = layer_config(text_config, settings.get("layer")).to_dict()
    # 2. Convert tensors and config.json for the server.
    if kind == "eagle3":
        settings["layers"] = settings.get("layers") or default_layers(num_layers)
        tensors, config = to_eagle3(state, settings, layer, vocab_size, name, to)
    else:
        tensors, config = to_dflash(state, settings, layer, num_layers, vocab_size, name, to)
    # 3. Describe the draft, and the command that serves it.
    title = DRAFT_CONFIGS[kind].title
    if kind == "eagle3":
        method, tokens = kind, 2
        drafted = f"{config['draft_vocab_size']:,} of {vocab_size:,} tokens"
        notes = ["vLLM drafts a chain, SGLang a chain or a tree of its own; tree.json is not read"]
        if "lm_heads.0.bias" in state:
            export.warnings.append(BIAS_IGNORED)
        if to != "sglang":
            export.warnings += vllm_eagle3_warnings(target_model)
    else:
        method, tokens = kind, settings["max_draft_tokens"]
        drafted = f"{tokens} guesses in a pass"
        notes = ["servers verify a chain; tree.json is not read"]
        if settings.get("markov_rank"):
            method = "dspark"
            notes.append(
                "a Markov bias is written in DSpark's layout, which needs vLLM's newer runner; it"
                " was never served by this project"
            )
    command = partial(_serve_command, to, method, tokens)
    export.facts += [
        f"{title}, {drafted}; target model {name}",
        f"serve it: {command(name, str(export.target))}",
        *notes,
    ]
    text = card(
        export,
        tag=kind,
        target_model=name,
        title=f"{title} draft",
        draft=settings,
        drafted=drafted,
        command=command,
        served_by_vllm=to != "sglang",
    )
    # 4. Write them.
    write_weights(export.files, VLLM_WEIGHTS, tensors, config)
    replace_text(export.files / CARD, text)


def _serve_command(
    to: ExportTarget, method: str, tokens: int, target_model: str, directory: str
) -> str:
    """Return the command that serves a target model with the draft in a directory."""
    words = ["vllm", "serve", target_model]
    if to == "vllm":
        draft = {"method": method, "model": directory, "num_speculative_tokens": tokens}
        words += ["--speculative-config", json.dumps(draft, ensure_ascii=False)]
    elif to == "speculators":  # its config.json names the target model
        words = ["vllm", "serve", directory]
    else:
        words = ["python", "-m", "sglang.launch_server", "--model-path", target_model]
        words += ["--speculative-algorithm", method.upper()]
        words += ["--speculative-draft-model-path", directory]
        if method == "dflash":  # SGLang counts the last token of the text, too
            words += ["--speculative-num-draft-tokens", str(tokens + 1)]
    return shlex.join(words)
