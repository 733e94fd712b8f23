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


def cheaper_settings(cfg: TrainConfig, vocab_size: int) -> list[dict[str, Any]]:
    """Return changes of the configuration that make the heads' output matrices smaller, one by one.

    Hydra's and Amphista's heads have a full matrix each, so only fewer heads are smaller; Kangaroo's has none.

    Args:
        cfg: a validated configuration. vocab_size: tokens of the backbone.

    Returns:
        Top-level keys with their values, the largest matrices first.
    """
    heads = cfg.draft_config.num_heads // 2
    if cfg.draft in ("hydra", "amphista"):
        section = cfg.draft_config.model_copy(update={"num_heads": heads})
        return [{cfg.draft: section}] if heads else []
    if cfg.draft != "medusa":
        return []
    current = cfg.medusa_vocab_size or vocab_size
    changes: list[dict[str, Any]] = [{"medusa_vocab_size": size} for size in VOCABULARIES if size < current]
    if not cfg.medusa_share_lm_head:
        changes.append({"medusa_share_lm_head": True})
    return [change for change in changes if _is_allowed(cfg.model_copy(update=change))]


def describe_change(change: dict[str, Any]) -> str:
    """Write a change as in a YAML file."""
    ((name, value),) = change.items()
    if name.startswith("medusa_"):
        return f"{name}: {str(value).lower()}"
    return f"{name}.num_heads: {value.num_heads}"


def _is_allowed(cfg: TrainConfig) -> bool:
    return not any(constraint.violated(cfg) for constraint in TrainConfig.constraints)
