"""Count the weights that a draft adds to a decoding step, and name settings with smaller output matrices.

With a large vocabulary the heads' output matrices can exceed a small backbone: then a step that accepts several tokens
may take longer than the plain steps that it replaces, since decoding few rows mostly waits for weights to be read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from medusa_train.config.schema import TrainConfig
from medusa_train.models.drafts import DRAFTS
from medusa_train.training.memory import weight_bytes

#: Vocabulary sizes to suggest, the largest first.
VOCABULARIES = (32768, 16384, 8192)
#: Share of a plain step's bytes from which the draft's are worth a table.
NOTABLE_SHARE = 0.1


class StepBytes(NamedTuple):
    """Bytes of weights that a decoding step reads, of one row or few.

    Attributes:
        backbone: of a plain step; an input embedding of its own is a lookup and does not count.
        draft: of all heads together; a shared lm_head counts once more.
    """

    backbone: int
    draft: int


def count_step_bytes(cfg: TrainConfig, model_config: Any, dtype: torch.dtype) -> StepBytes:
    """Count the bytes that the backbone and the draft read per decoding step.

    Args:
        cfg: draft and quantization. model_config: the backbone's transformers config.
        dtype: of the heads and of the backbone's unquantized weights while decoding.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config, trust_remote_code=cfg.trust_remote_code)
    embedding, lm_head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    lookup = 0 if embedding is lm_head else embedding.numel() * dtype.itemsize
    settings = cfg.draft_config.settings
    if settings.get("markov_rank"):  # of its matrices only the rows of few tokens are read
        settings = {**settings, "markov_rank": 0}
    draft = DRAFTS[cfg.draft].count_parameters(model, **settings)
    if settings.get("share_lm_head"):
        rows, hidden = lm_head.shape
        draft += (settings.get("vocab_size") or rows) * hidden
    return StepBytes(round(weight_bytes(cfg, model, dtype)) - lookup, draft * dtype.itemsize)


def cheaper_settings(cfg: TrainConfig, vocab_size: int) -> dict[str, TrainConfig]:
    """Return configurations in which one key is changed so that the heads' output matrices are smaller.

    Args:
        cfg: a validated configuration. vocab_size: tokens of the backbone.

    Returns:
        The changed configurations by the change, as in a YAML file; none for Kangaroo, which has no such matrices.
    """
    section = cfg.draft_config
    if "vocab_size" not in section.settings:
        return {}
    current = section.settings["vocab_size"] or vocab_size
    changes: list[tuple[str, Any]] = [("vocab_size", size) for size in VOCABULARIES if size < current]
    if cfg.draft == "medusa":
        changes += [("share_lm_head", True)] if not cfg.medusa_share_lm_head else []
    elif section.num_heads > 1:
        changes.append(("num_heads", section.num_heads // 2))
    variants = {f"{section.prefix}{key}: {str(value).lower()}": _with(cfg, key, value) for key, value in changes}
    return {change: variant for change, variant in variants.items() if _is_allowed(variant)}


def _with(cfg: TrainConfig, key: str, value: Any) -> TrainConfig:
    """Return the configuration with another value of a key of its draft."""
    if cfg.draft == "medusa":
        return cfg.model_copy(update={f"{cfg.draft_config.prefix}{key}": value})
    return cfg.model_copy(update={cfg.draft: cfg.draft_config.model_copy(update={key: value})})


def _is_allowed(cfg: TrainConfig) -> bool:
    return not any(constraint.violated(cfg) for constraint in TrainConfig.constraints)
