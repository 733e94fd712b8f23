"""What joint training did to a run's backbone, on the conversations that the run held out. Times nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import AutoTokenizer

from medusa_train.checkpoint.subject import SubjectPaths
from medusa_train.config.hub import hub_is_out_of_reach
from medusa_train.data.batch import Batch
from medusa_train.data.chat import ChatEncoder
from medusa_train.data.dataset import EncodedDataset
from medusa_train.evaluation.quality import compare, load_versions
from medusa_train.evaluation.run_data import held_out, run_config

TOKENS = 20_000  # answer tokens that suffice


def trained_backbone(paths: SubjectPaths) -> bool:
    """Whether the run changed its backbone (Medusa-2), by an adapter or as a whole."""
    return paths.adapter is not None or (paths.home / "model" / "config.json").is_file()


def joint_quality(paths: SubjectPaths, dtype: str = "float32") -> dict[str, Any] | None:
    """Perplexity of a joint run's backbone before and after, and KL from the untouched one, nats per token.

    None for a run that left its backbone alone, or whose data are not to be had any more.

    Raises:
        BackboneError, CheckpointError: backbone or adapter can't be loaded.
    """
    cfg = run_config(paths)
    if cfg is None or not trained_backbone(paths):
        return None
    tokenizer = AutoTokenizer.from_pretrained(paths.base_model, local_files_only=hub_is_out_of_reach())
    found = held_out(cfg, ChatEncoder(tokenizer, paths.chat_template))
    if found is None:
        return None
    conversations, unseen = found
    before, after = load_versions(paths, cfg.base_model, dtype)
    moved = compare(before, after, _batches(conversations))
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
