"""Load a trained model for use from Python: `medusa_train.load`.

torch is imported only after the paths are resolved, so a wrong path is rejected at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_train.checkpoint.resolve import ModelPaths, resolve_model
from medusa_train.config.draft_sections import LOOKUPS, LookupChoice
from medusa_train.config.load import load_config
from medusa_train.config.schema import EvalConfig
from medusa_train.errors import ConfigError
from medusa_train.io import warn_once

if TYPE_CHECKING:
    import torch

    from medusa_train.inference.model import Model


def load(
    model: str | Path | None = None,
    *,
    base_model: str | Path | None = None,
    tree: str | Path | None = None,
    dtype: str | torch.dtype | None = "auto",
    chat_template: str | Path | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    special_tokens: Mapping[str, str] | None = None,
    trust_remote_code: bool = False,
    compile: bool = False,
    draft: str | None = None,
    draft_settings: Mapping[str, Any] | None = None,
) -> Model:
    """Load a trained model, or a target model alone.

    Args:
        model: run directory or directory of heads; defaults to the newest run under runs/.
        base_model: directory or Hugging Face hub name of the target model; defaults to the one that
            the heads were trained with. Given without `model`, the target model decodes plainly,
            without heads.
        tree: tree file; defaults to tree.json next to the heads ("fixed"). "dynamic", or
            "dynamic:32x5" with nodes and depth, builds a tree in every step (EAGLE-3). The
            generated text is the same.
        dtype: "float32", "bfloat16" or "float16". "auto" or None: bfloat16 if the device has fast
            bfloat16 matrix products, else float16 on a GPU and float32 on a CPU. Weights that fit
            into memory only in bfloat16 are loaded in bfloat16, with a warning.
        chat_template: name of a chat template, or a Jinja file; defaults to the run's, else the
            tokenizer's.
        chat_template_kwargs: variables of the chat template, such as `{"enable_thinking": False}`;
            defaults to the run's.
        special_tokens: tokens of the vocabulary by role, such as `{"eos_token": "<|im_end|>"}`;
            defaults to the run's. Answers end at the tokenizer's EOS token, the EOS tokens of
            generation_config.json, and the token that the chat template writes after an answer.
        trust_remote_code: allow Python code that the target model's repository ships.
        compile: compile the decoding passes with torch.compile. The start takes one to several
            minutes longer, and steps are faster.
        draft: a draft without training: "prompt_lookup", "lookahead" or "rest" in place of the
            heads, or next to them ("medusa+prompt_lookup").
        draft_settings: settings of `draft`, such as `{"max_ngram": 3, "nodes": 10}`
            (docs/reference/configuration.md); "rest" needs a `datastore`.

    Raises:
        ConfigError: no such draft or settings.
        DataError: the datastore cannot be read.
        CheckpointError: no such run or heads, or files that cannot be read.
        TargetModelError: the target model cannot be found or loaded.
    """
    mappings = {
        "chat_template_kwargs": chat_template_kwargs,
        "special_tokens": special_tokens,
        "draft_settings": draft_settings,
    }
    for name, value in mappings.items():
        if not isinstance(value, Mapping | None):
            raise ConfigError(f"{name}: expected a mapping, got {value!r}")
    if draft_settings and draft is None:
        raise ConfigError("draft_settings are those of a draft without training: name it as draft")
    lookup = None
    if draft is not None:
        lookup = _choose_lookup(str(draft), draft_settings or {})
    paths = resolve_model(
        _text_or_none(model),
        _text_or_none(base_model),
        _text_or_none(tree),
        chat_template=_text_or_none(chat_template),
        chat_template_kwargs=chat_template_kwargs,
        special_tokens=special_tokens,
        trust_remote_code=trust_remote_code,
        lookup=lookup,
    )
    if (note := paths.remote_code_note) is not None:
        warnings.warn(note, stacklevel=2)
    return load_resolved(paths, "auto" if dtype is None else dtype, compiled=compile)


def _text_or_none(name: str | Path | None) -> str | None:
    if name is None:
        return None
    return str(name)


def _choose_lookup(draft: str, settings: Mapping[str, Any]) -> LookupChoice | None:
    """Validate a draft and its settings, which are keys of `medusa-eval`."""
    keys: dict[str, object] = {"draft": draft}
    kind = draft.rpartition("+")[2]
    if settings and kind in LOOKUPS:
        keys[LOOKUPS[kind][1]] = dict(settings)
    return load_config(EvalConfig, None, flags=keys).lookup_choice


def load_resolved(paths: ModelPaths, dtype: str | torch.dtype, *, compiled: bool = False) -> Model:
    """Load the model at `paths` (from `resolve_model`). Raises as `load` does."""
    from medusa_train.checkpoint.load_model import auto_dtype_of, load_for_decoding
    from medusa_train.inference.model import Model

    if dtype == "auto":
        dtype = auto_dtype_of(paths, warn_once)
    loaded = load_for_decoding(paths, dtype, compiled=compiled)
    loaded.compile_tree(warn_once)
    return Model(
        loaded.target_model,
        loaded.proposer,
        loaded.tree,
        paths.chat_template,
        paths.chat_template_kwargs,
    )
