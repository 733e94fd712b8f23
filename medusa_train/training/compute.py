"""Estimate the arithmetic of a training run, and how long a GPU takes for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from medusa_train.config.schema import TrainConfig
from medusa_train.models.drafts import DRAFTS
from medusa_train.models.hf_config import head_dim

#: Dense bfloat16 operations per second of one GPU, by the vendor's data sheets: name with memory -> rate.
GPUS = {"RTX 4090, 24 GB": 165e12, "L40S, 48 GB": 362e12, "H100, 80 GB": 989e12}
#: Assumed share of that rate, which training of this size reaches elsewhere. It was not measured with this project.
UTILIZATION = 0.4


def estimate_operations(
    cfg: TrainConfig, model_config: Any, *, tokens: int, supervised: int, width: int, epochs: float
) -> float:
    """Estimate the floating-point operations of a run.

    A matrix product takes two operations per weight and token. A pass forward through the backbone is one of them, a
    backward pass two, or one where the weights themselves are not trained. Heads count six per supervised token and
    weight, and four for an lm_head that they read without training it; with D-PACE's weights two more.

    Args:
        cfg: recipe, heads, adapter. model_config: the backbone's transformers config.
        tokens, supervised: of an epoch. epochs: their number.
        width: tokens of a row; on average a token attends to half of them.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config, trust_remote_code=cfg.trust_remote_code)
    text = model_config.get_text_config()
    lm_head = model.get_output_embeddings().weight.numel()
    lists = [module for module in model.base_model.children() if isinstance(module, nn.ModuleList)]
    layers = sum(parameter.numel() for parameter in max(lists, key=len).parameters())  # `layers`, Falcon's `h`
    attention = 4 * text.num_hidden_layers * text.num_attention_heads * head_dim(text) * width / 2
    body = tokens * (2 * layers + attention)  # one pass forward
    heads = _count_multiplied(cfg, model)
    once_more = 2 if cfg.heads_loss.dpace else 0
    in_heads = ((6 + once_more) * heads + (4 + once_more) * _count_shared(cfg, model)) * supervised * epochs
    has_teacher = cfg.medusa_self_distillation or bool(cfg.medusa_distillation_regularization)
    if cfg.resolved().recipe == "medusa1":
        soft = 2 * lm_head * supervised if cfg.draft_config.heads_loss.soft_targets else 0
        return body * (min(epochs, 1) if cfg.cache_hidden_states else epochs) + soft * epochs + in_heads
    backward = 1 if cfg.adapter else 2
    in_body = body * (1 + has_teacher + cfg.gradient_checkpointing + backward)
    in_lm_head = 2 * lm_head * supervised * (1 + has_teacher + backward)
    return (in_body + in_lm_head) * epochs + in_heads


def _count_multiplied(cfg: TrainConfig, model: Any) -> int:
    """Count the trained weights of the heads that a token is multiplied with: embeddings of a Markov bias are not."""
    settings = cfg.draft_config.settings
    rank = settings.get("markov_rank", 0)
    if not rank:
        return DRAFTS[cfg.draft].count_parameters(model, **settings)
    rows = settings["vocab_size"] or model.get_output_embeddings().weight.shape[0]
    without = DRAFTS[cfg.draft].count_parameters(model, **{**settings, "markov_rank": 0})
    return without + int(settings["num_heads"] * rank * rows)


def _count_shared(cfg: TrainConfig, model: Any) -> int:
    """Count the weights of the frozen lm_head, or of its rows of a reduced vocabulary, once per head that reads it."""
    settings = cfg.draft_config.settings
    rows, hidden = model.get_output_embeddings().weight.shape
    if settings.get("share_lm_head"):
        return int(cfg.draft_config.num_heads * (settings.get("vocab_size") or rows) * hidden)
    return int(rows * hidden) if cfg.draft == "kangaroo" else 0  # one head, trained at one depth


def estimate_hours(operations: float, rate: float) -> float:
    """Return the hours that a GPU of `rate` operations per second takes, at `UTILIZATION` of it."""
    return operations / (rate * UTILIZATION) / 3600
