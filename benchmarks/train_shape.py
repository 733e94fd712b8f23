"""Whole training steps at the shape of a 7B model for `train.py`, with random weights; a small shape without a GPU.

Knows what a step has to compute, and nothing of how cases are run and shown.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import peft  # noqa: F401 (imported before memory is measured: it weighs)
import torch
from decode_floor import Sizes, matrix_rate
from random_llama import llama_config, quantize_nf4, random_model, shape_config
from torch import Tensor
from train_case import Case, Memory, Result, timed
from train_step import Step

from medusa_train.config.schema import TrainConfig
from medusa_train.data.batch import Batch
from medusa_train.evaluation.choose_dtype import release_memory
from medusa_train.models.backbone import Backbone
from medusa_train.models.precision import Precision
from medusa_train.training.inspect import estimate_memory

LARGE = "7B"
SMALL = (128, 256, 2, 4, 4, 512)  # what runs the same code where there is no GPU
#: Of configs/vicuna7b_m1.yaml and configs/vicuna7b_m2.yaml.
COMMON = {"base_model": "none", "datasets": [{"path": "none"}], "optimizer": "adamw_bnb_8bit", "learning_rate": 5e-4}
RECIPES: dict[str, dict[str, Any]] = {
    "shape1": {"recipe": "medusa1"},
    "shape2": {
        "recipe": "medusa2",
        "adapter": "qlora",
        "load_in_4bit": True,
        "lora_r": 32,
        "lora_alpha": 16,
        "lora_dropout": 0.05,
        "lora_target_linear": True,
        "gradient_checkpointing": True,
    },
}


def measure_shape(case: Case) -> Result:
    """Forward, loss, backward, clipping and the optimizer on one micro-batch of `rows` x `tokens`, all of it learnt.

    Cross-entropy in place of KL, for both methods, since a naive KL would hold twice the logits.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision = Precision(device, getattr(torch, case.dtype))
    rate = matrix_rate(device, precision.dtype, 1.0, None if device.type == "cuda" else 512)
    config = shape_config(LARGE) if device.type == "cuda" else llama_config(*SMALL)
    shape = LARGE if device.type == "cuda" else "small"
    torch.manual_seed(0)
    tokens = torch.randint(config.vocab_size, (case.rows, case.tokens), device=device)
    positions = torch.arange(case.tokens, device=device).expand_as(tokens)
    batch = Batch(tokens, tokens, positions, torch.zeros_like(tokens), [])
    cfg = TrainConfig.model_validate({**COMMON, **RECIPES[case.what], "medusa_num_heads": case.heads}).resolved()
    model = random_model(config, precision.dtype, device)
    if cfg.load_in_4bit:
        quantize_nf4(model)
    release_memory()
    weights = _bytes(model.parameters())
    memory = Memory()
    step = Step(cfg, Backbone(model, None, shape), precision, case.method == "naive")
    step(batch)  # wakes kernels up, and makes the optimizer's states
    seconds, losses = timed(lambda: step(batch), case)
    states = [state for states in step.optimizer.state.values() for state in states.values()]
    held = _bytes([*step.parameters, *step.parameters, *(one for one in states if isinstance(one, Tensor))])
    sizes = Sizes.of(config)
    learnt = sum(parameter.numel() for parameter in step.student.parameters.values())
    per_token = needed_operations(sizes, case.heads, case.tokens, learnt)
    estimate = estimate_memory(
        cfg, config, rows=case.rows, width=case.tokens, dtype=precision.dtype, device=device.type
    )
    return Result(
        True,
        seconds,
        losses[-1],
        tokens.numel(),
        max(0, memory.peak() - held),  # a small shape's lies below what torch took before
        total=weights + memory.peak(),
        estimate=estimate.total,
        operations=per_token * tokens.numel(),
        nominal=nominal_operations(sizes, case.heads) * tokens.numel(),
        rate=rate,
        shape=shape,
    )


def needed_operations(sizes: Sizes, heads: int, tokens: int, learnt: int) -> int:
    """Operations per token that the recipe can't do without; recomputed activations don't count.

    Every matrix takes 2 per weight forward, 2 more for the gradient of its input and 2 for its own. A frozen backbone
    below the heads runs forward alone, without lm_head, and the heads' first blocks need no gradient of their input;
    a frozen matrix under an adapter needs no gradient of its own.

    Args:
        tokens: length of a row; attention sees half of it on average. learnt: parameters of the adapter, 0 without.
    """
    attention = 4 * sizes.layers * sizes.queries * tokens // 2
    head = 6 * sizes.head_numbers(heads, shared=False)
    if not learnt:
        return 2 * sizes.body + attention + head - 2 * heads * sizes.hidden**2
    return 4 * (sizes.body + sizes.vocab * sizes.hidden) + 3 * attention + head + 6 * learnt


def nominal_operations(sizes: Sizes, heads: int) -> int:
    """6 per parameter of backbone and heads and token: the usual formula, as if everything were trained."""
    return 6 * (sizes.body + sizes.vocab * sizes.hidden + sizes.head_numbers(heads, shared=False))


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
