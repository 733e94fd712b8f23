"""How far training moved a backbone: perplexity before and after, and KL between the two. Knows no bench, no clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from medusa_train.checkpoint.resolve import ModelPaths
from medusa_train.data.batch import Batch
from medusa_train.data.dataset import EncodedDataset
from medusa_train.data.targets import IGNORE_INDEX, shift_labels
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.evaluation.validation_data import run_config, validation_conversations
from medusa_train.hub import hub_is_unreachable
from medusa_train.losses.fused_linear import linear_cross_entropy, linear_kl
from medusa_train.models.backbone import Backbone
from medusa_train.models.loading import load_backbone
from medusa_train.models.lora import Adapter

if TYPE_CHECKING:
    from medusa_train.models.lm_head import LMHead


#: Final hidden states [B, T, d] of a batch, and the matrix that makes logits of them.
Version = Callable[[Batch], "tuple[Tensor, LMHead]"]


@dataclass(frozen=True)
class Quality:
    """What a backbone lost on a text, over its supervised tokens.

    Attributes:
        tokens: how many. loss_before, loss_after: mean cross-entropy, nats per token.
        kl: mean KL(before || after), nats per token.
    """

    tokens: int
    loss_before: float
    loss_after: float
    kl: float

    @property
    def perplexity_before(self) -> float:
        """Per token, before training."""
        return math.exp(self.loss_before)

    @property
    def perplexity_after(self) -> float:
        """Per token, after training."""
        return math.exp(self.loss_after)

    @property
    def perplexity_change(self) -> float:
        """0.01: perplexity became 1 % worse."""
        return math.expm1(self.loss_after - self.loss_before)


@torch.no_grad()
def compare_backbones(before: Version, after: Version, batches: Iterable[Batch]) -> Quality:
    """Measure both versions of a backbone on `batches`, by chunks: no tensor of [T, V] is alive (SPEC 1).

    Only supervised tokens count, each predicted from the position before it in its document.
    """
    tokens, losses, kl = 0, [0.0, 0.0], 0.0
    for batch in batches:
        wanted = shift_labels(batch.labels, 0, batch.segments).flatten()
        tokens += int((wanted != IGNORE_INDEX).sum())
        (old, old_matrix), (new, new_matrix) = before(batch), after(batch)
        old, new, wanted = old.flatten(0, 1), new.flatten(0, 1), wanted.to(old.device)
        sums = linear_kl(new, new_matrix, old, old_matrix, wanted)
        losses[0] += float(linear_cross_entropy(old, old_matrix, wanted).ce_sum)
        losses[1] += float(sums.ce_sum)
        kl += float(sums.kl_sum)
    count = max(tokens, 1)
    return Quality(tokens, losses[0] / count, losses[1] / count, kl / count)


def load_versions(paths: ModelPaths, original: str, dtype: str = "float32") -> tuple[Version, Version]:
    """The backbone before and after a run: adapter off and on, or the original beside the model that was trained.

    Args:
        paths: of the run (`checkpoint.resolve.resolve_model`).
        original: the run's own `base_model`.
        dtype: of weights and products. A backbone that was quantised in training is so in both versions.

    Raises:
        BackboneError: a backbone can't be loaded. CheckpointError: the adapter does not fit.
    """
    trained = _load(paths, paths.base_model, dtype)
    after = _version(trained)
    if paths.adapter is not None:
        adapter = Adapter.load(trained, paths.adapter)

        def before(batch: Batch) -> tuple[Tensor, LMHead]:
            with adapter.teacher():
                return after(batch)

        return before, after
    same = Path(paths.base_model).resolve() == Path(original).resolve() or paths.base_model == original
    return (after if same else _version(_load(paths, original, dtype))), after


def _load(paths: ModelPaths, name: str, dtype: str) -> Backbone:
    return load_backbone(name, dtype=dtype, quantization=paths.quantization, trust_remote_code=paths.trust_remote_code)


def _version(backbone: Backbone) -> Version:
    def version(batch: Batch) -> tuple[Tensor, LMHead]:
        there = batch.to(backbone.device)
        feats = backbone.run(there.tokens, positions=there.positions, segments=there.segments)
        return feats.hidden, backbone.lm_head()

    return version


TOKENS = 20_000  # answer tokens that suffice


def has_trained_backbone(paths: ModelPaths) -> bool:
    """Whether the run changed its backbone (Medusa-2), by an adapter or as a whole."""
    return paths.adapter is not None or (paths.home / "model" / "config.json").is_file()


def measure_backbone_quality(paths: ModelPaths, dtype: str = "float32") -> dict[str, Any] | None:
    """Perplexity of a joint run's backbone before and after, and KL from the untouched one, nats per token.

    None for a run that left its backbone alone, or whose data are not to be had any more.

    Raises:
        BackboneError, CheckpointError: backbone or adapter can't be loaded.
    """
    cfg = run_config(paths)
    if cfg is None or not has_trained_backbone(paths):
        return None
    tokenizer = AutoTokenizer.from_pretrained(paths.base_model, local_files_only=hub_is_unreachable())
    found = validation_conversations(cfg, ChatEncoder(tokenizer, paths.chat_template))
    if found is None:
        return None
    conversations, unseen = found
    before, after = load_versions(paths, cfg.base_model, dtype)
    moved = compare_backbones(before, after, _batches(conversations))
    return {
        "tokens": moved.tokens,
        "text": "held-out conversations" if unseen else "training conversations (nothing was held out)",
        "perplexity_before": moved.perplexity_before,
        "perplexity_after": moved.perplexity_after,
        "kl": moved.kl,
        "dtype": dtype,
    }


def _batches(conversations: EncodedDataset) -> Iterator[Batch]:
    """One conversation at a time, until there are `TOKENS` answer tokens."""
    tokens = 0
    for number, example in enumerate(conversations):
        if tokens >= TOKENS:
            return
        tokens += int(example.supervised.sum())
        yield conversations.batch([[number]])
