"""Whole training steps for `train.py`: on the tiny backbone and its data, and a joint one on a random Llama.

Knows how a step is put together from the package's parts, and nothing of how cases are run and shown.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Any

import peft  # noqa: F401 (imported before memory is measured: it weighs)
import torch
from rich.console import Console
from torch import Tensor
from train_case import Case, Memory, Result, timed
from train_loss import all_logits, naive_loss
from transformers import LlamaConfig, LlamaForCausalLM

from medusa_train.config.load import load_config
from medusa_train.config.paths import PROJECT_ROOT
from medusa_train.config.schema import TrainConfig
from medusa_train.data.batch import Batch
from medusa_train.data.dataset import BatchLoader
from medusa_train.losses.objective import Objective
from medusa_train.losses.schedules import head_weight
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.models.features import Features
from medusa_train.models.precision import Precision
from medusa_train.training.backbone_recipe import BackboneRecipe, build_backbone_recipe
from medusa_train.training.inspect import estimate_memory
from medusa_train.training.load_data import load_data
from medusa_train.training.optim import build_optimizer, parameter_groups

BATCHES = 8  # micro-batches that a repeat goes through, each an optimizer step
LLAMA = {
    "vocab_size": 8192,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "max_position_embeddings": 2048,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}


class Step:
    """One optimizer step: forward, loss (naive or ours), backward, clipping, AdamW."""

    def __init__(self, cfg: TrainConfig, backbone: Backbone, precision: Precision, naive: bool) -> None:
        self.cfg = cfg
        self.naive = naive
        self.draft = MedusaDraft.from_backbone(
            backbone, cfg.medusa_num_heads, cfg.medusa_num_layers, dtype=torch.float32
        )
        self.student: BackboneRecipe = build_backbone_recipe(cfg, backbone, precision)
        self.student.train()
        lm = "ce" if self.student.joint else None
        self.objective = Objective(
            self.draft, cfg.medusa_decay_coefficient, lm=lm, heads_coefficient=cfg.medusa_heads_coefficient
        )
        self.parameters = [*self.draft.parameters(), *self.student.parameters.values()]
        groups = parameter_groups(
            self.draft.parameters(),
            cfg.heads_learning_rate,
            self.student.parameters.values(),
            cfg.learning_rate,
            cfg.weight_decay,
        )
        self.optimizer = build_optimizer(cfg.optimizer, groups, precision.device)[0]

    def __call__(self, batch: Batch) -> float:
        """Train on `batch`; its loss."""
        feats = self.student.features(batch)
        with self.student.precision.autocast():
            loss = self._naive(feats, batch) if self.naive else self._ours(feats, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, self.cfg.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    def _ours(self, feats: Features, batch: Batch) -> Tensor:
        own = self.student.unembedding() if self.student.joint else None
        return self.objective.loss(feats, batch, self.objective.counts(batch), student_unembedding=own).loss

    def _naive(self, feats: Features, batch: Batch) -> Tensor:
        scale = self.objective.heads_weight(1.0)
        weights = [scale * head_weight(k, self.objective.decay) for k in range(1, self.draft.num_heads + 1)]
        if not self.student.joint:
            return naive_loss(all_logits(feats, batch, self.draft, None), batch.labels, weights, first=1)
        return naive_loss(
            all_logits(feats, batch, self.draft, self.student.unembedding()), batch.labels, [1.0, *weights]
        )


def measure_step(case: Case) -> Result:
    """Tokens per second of the whole step on `data/tiny` and the data of `configs/tiny_m1.yaml`.

    `medusa1` as that configuration says; `medusa2` with LoRA as `configs/tiny_m2.yaml`, but plain cross-entropy in
    place of KL and fresh heads, for a naive KL would hold twice the logits. The first 32 micro-batches of its order.
    """
    overrides = ["output_dir=runs/none"]
    if case.what == "medusa2":
        overrides += ["lora_model_dir=null", "medusa_self_distillation=false", "lora_dropout=0"]
    name = "tiny_m1.yaml" if case.what == "medusa1" else "tiny_m2.yaml"
    cfg = load_config(TrainConfig, PROJECT_ROOT / "configs" / name, overrides).resolved()
    data = load_data(cfg, Console(file=io.StringIO()))
    loader = iter(BatchLoader(data.train, cfg.micro_batch_size, seed=cfg.seed, shuffle=True))
    precision = _precision(case)
    batches = [next(loader).to(precision.device) for _ in range(BATCHES)]
    memory = Memory()
    backbone = Backbone.load(cfg.base_model, dtype=precision.dtype, device=precision.device)
    return _run(case, cfg, Step(cfg, backbone, precision, case.method == "naive"), batches, memory)


def measure_joint(case: Case) -> Result:
    """A joint step (every parameter trained, no adapter) on a random Llama, its activations kept or recomputed."""
    keys = {
        "base_model": "none",
        "datasets": [{"path": "none"}],
        "recipe": "medusa2",
        "gradient_checkpointing": case.method == "recomputed",
        "medusa_num_heads": case.heads,
    }
    cfg = TrainConfig.model_validate(keys).resolved()
    precision = _precision(case)
    torch.manual_seed(0)
    tokens = torch.randint(LLAMA["vocab_size"], (4, case.tokens // 4), device=precision.device)
    positions = torch.arange(tokens.shape[1], device=precision.device).expand_as(tokens)
    batch = Batch(tokens, tokens, positions, torch.zeros_like(tokens), [])
    memory = Memory()
    model = LlamaForCausalLM._from_config(LlamaConfig(**LLAMA), dtype=precision.dtype, attn_implementation="sdpa")
    backbone = Backbone(model.to(precision.device), None, "a random Llama")
    return _run(case, cfg, Step(cfg, backbone, precision, naive=False), [batch], memory)


def _precision(case: Case) -> Precision:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Precision(device, getattr(torch, case.dtype))


def _run(case: Case, cfg: TrainConfig, step: Step, batches: Sequence[Batch], memory: Memory) -> Result:
    """Warm up with one step, then time passes over the batches; seconds are of one pass, tokens in one."""
    step(batches[0])
    seconds, losses = timed(lambda: [step(batch) for batch in batches][-1], case)
    widest = max(batches, key=lambda batch: batch.tokens.numel()).tokens
    estimate = estimate_memory(
        cfg,
        step.student.backbone.model.config,
        rows=len(widest),
        width=widest.shape[1],
        dtype=step.student.precision.dtype,
        device=step.student.precision.device.type,
    )
    model = step.student.backbone.model
    states = [state for states in step.optimizer.state.values() for state in states.values()]
    held = _bytes([*model.parameters(), *step.draft.parameters(), *step.parameters, *states])  # gradients like these
    total = memory.peak()
    tokens = sum(int((batch.segments >= 0).sum()) for batch in batches)
    return Result(True, seconds, losses[-1], tokens, total - held, None, total, estimate.total)


def _bytes(tensors: Iterable[Any]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
