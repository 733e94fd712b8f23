"""Measure how joint training changed the target model: perplexity before and after training, and
the KL divergence between the two versions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from medusa_train.checkpoint.resolve import ModelPaths
from medusa_train.checkpoint.run_directory import CONFIG
from medusa_train.config.load import load_config
from medusa_train.config.schema import TrainConfig
from medusa_train.data.batch import IGNORE_INDEX, Batch, shift_labels
from medusa_train.data.dataset import load_datasets
from medusa_train.data.examples import EncodedDataset
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.errors import MedusaError
from medusa_train.losses.linear_loss import Teacher, linear_loss
from medusa_train.models.lm_head import LMHead
from medusa_train.models.loading import load_target_model, load_tokenizer
from medusa_train.models.lora import Adapter
from medusa_train.models.target_model import TargetModel
from medusa_train.progress import Phase

QUALITY_TOKENS = 20_000  # number of supervised tokens to measure on
#: Limits for one pass: number of conversations, and number of positions including padding. Several
#: conversations share a pass because a 4-bit model on a CPU spends more time on its weights than on
#: the tokens of one conversation. A conversation longer than the limit gets its own pass.
_ROWS = 8
_POSITIONS = 4096
DTYPE = "float32"

#: Maps a batch to the target model's final hidden states [B, T, d], and the LM head that turns them
#: into logits.
Version = Callable[[Batch], tuple[Tensor, LMHead]]


class Quality(NamedTuple):
    """Losses of the target model before and after training, averaged over supervised tokens; in
    nats per token.
    """

    tokens: int
    loss_before: float  # mean cross-entropy
    loss_after: float
    kl: float  # mean KL(before || after)


def measure_target_model_quality(paths: ModelPaths, phase: Phase) -> dict[str, Any] | None:
    """Return perplexity before and after joint training, and KL(before || after) in nats per token,
    for the report.

    None if the run did not train its target model, or if its data are no longer available.

    Args:
        phase: counts the supervised tokens measured so far.
    """
    cfg = run_config(paths)
    if cfg is None or not paths.trained_target_model:
        return None
    tokenizer = load_tokenizer(
        paths.target_model,
        trust_remote_code=paths.trust_remote_code,
        special_tokens=paths.special_tokens,
    )
    chat = ChatEncoder(tokenizer, paths.chat_template, paths.chat_template_kwargs)
    validation = validation_conversations(cfg, chat)
    if validation is None:
        return None
    conversations, is_held_out, _ = validation
    phase.expect(min(QUALITY_TOKENS, conversations.supervised_tokens))
    versions = load_versions(paths, cfg.base_model)
    quality = compare_target_models(*versions, _batches(conversations), phase.advance)
    held_out = "held-out conversations"
    return {
        "tokens": quality.tokens,
        "text": held_out if is_held_out else "training conversations (nothing was held out)",
        "perplexity_before": math.exp(quality.loss_before),
        "perplexity_after": math.exp(quality.loss_after),
        "kl": quality.kl,
        "dtype": DTYPE,
    }


def run_config(paths: ModelPaths) -> TrainConfig | None:
    """Return the configuration of the run that `paths` belong to; None if they belong to no run, or
    if its configuration is invalid.
    """
    path = paths.home / CONFIG
    if not path.is_file():
        return None
    try:
        return load_config(TrainConfig, path, [])
    except MedusaError:
        return None


def validation_conversations(
    cfg: TrainConfig, chat: ChatEncoder, least: int = 1
) -> tuple[EncodedDataset, bool, int] | None:
    """Return a run's validation split, or its training split if fewer than `least` conversations
    are held out. Only the assistant's turns are supervised.

    Returns:
        The split, whether it was held out of training, and the number of held-out
        conversations; None if the data are no longer available.
    """
    answers_only = cfg.model_copy(
        update={"train_on_inputs": False, "roles_to_train": ["assistant"]}
    )
    # supervising other turns may change which conversations are kept, and with them the split. So
    # take the held-out prompts from a split with the run's own settings, as `load_data` does
    differs = cfg.train_on_inputs or cfg.roles_to_train != ["assistant"]
    held_out = None
    try:
        if differs and not cfg.test_datasets:
            held_out = {example.prompt for example in load_datasets(cfg, chat)[1]}
        train, validation = load_datasets(answers_only, chat, held_out=held_out)
    except MedusaError:
        return None
    held_out_count = len({example.prompt for example in validation})
    if held_out_count < least:
        return train, False, held_out_count
    return validation, True, held_out_count


def _batches(conversations: EncodedDataset) -> Iterator[Batch]:
    """Yield batches of conversations until they contain `QUALITY_TOKENS` supervised tokens. `_ROWS`
    and `_POSITIONS` limit a batch.
    """
    supervised = 0
    rows: list[list[int]] = []  # rows of the next batch
    longest = 0
    for index, example in enumerate(conversations):
        if supervised >= QUALITY_TOKENS:
            break
        supervised += int(example.supervised.sum())
        longest = max(longest, len(example))
        if rows and (len(rows) == _ROWS or (len(rows) + 1) * longest > _POSITIONS):
            yield conversations.batch(rows)
            rows = []
            longest = len(example)
        rows.append([index])
    if rows:
        yield conversations.batch(rows)


def load_versions(paths: ModelPaths, original: str) -> tuple[Version, Version]:
    """Load the target model before and after a run: one model with the adapter off and on, or the
    original and the trained model.

    A target model that was quantized in training is quantized in both versions.

    Args:
        original: `base_model` of the run's configuration.
    """

    def load(name: str) -> TargetModel:
        return load_target_model(
            name,
            dtype=DTYPE,
            quantization=paths.quantization,
            trust_remote_code=paths.trust_remote_code,
        )

    trained = load(paths.target_model)
    after = partial(_states, trained)
    if paths.adapter is not None:
        adapter = Adapter.load(trained, paths.adapter)

        def before(batch: Batch) -> tuple[Tensor, LMHead]:
            with adapter.teacher():
                return after(batch)

        return before, after
    if Path(paths.target_model).resolve() == Path(original).resolve():
        return after, after
    return partial(_states, load(original)), after


def _states(target_model: TargetModel, batch: Batch) -> tuple[Tensor, LMHead]:
    moved = batch.to(target_model.device)
    run = target_model.run(moved.tokens, positions=moved.positions, segments=moved.segments)
    return run.final, target_model.lm_head()


@torch.no_grad()
def compare_target_models(
    before: Version,
    after: Version,
    batches: Iterable[Batch],
    on_batch: Callable[[int], object],
) -> Quality:
    """Measure both versions of a target model on `batches`.

    Only supervised tokens count, each predicted from the position before it in its document. Logits
    are computed in chunks, never for a whole batch.

    Args:
        on_batch: called after each batch with its number of supervised tokens.
    """
    tokens = 0
    sums = torch.zeros(3, dtype=torch.float64)  # loss before, loss after, KL
    for batch in batches:
        targets = shift_labels(batch.labels, 0, batch.segments).flatten()  # [B * T]
        supervised = int((targets != IGNORE_INDEX).sum())
        old, old_head = before(batch)  # [B, T, d]
        new, new_head = after(batch)
        old = old.flatten(0, 1)
        targets = targets.to(old.device)
        teacher = Teacher(old, old_head, divergence=True)
        losses = linear_loss(new.flatten(0, 1), new_head, targets, teacher)
        loss_before = linear_loss(old, old_head, targets).ce_sum
        sums += torch.stack([loss_before, losses.ce_sum, losses.kl_sum]).cpu()
        tokens += supervised
        on_batch(supervised)
    return Quality(tokens, *(sums / max(tokens, 1)).tolist())
