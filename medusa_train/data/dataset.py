"""The configured data sets as batches, in an order whose place can be saved; knows no model and no loss."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from medusa_train.config.schema import TrainConfig
from medusa_train.data.chat import ChatEncoder
from medusa_train.data.examples import Example, Outcome, fit, hold_out
from medusa_train.data.formats import bad_records
from medusa_train.data.sources import read_source
from medusa_train.data.targets import IGNORE
from medusa_train.errors import DataError

_WINDOW = 32  # batches among which conversations of like length are brought together


@dataclass(frozen=True, slots=True)
class Batch:
    """Conversations side by side, filled up at the right.

    `tokens`, `labels` (the token itself where it is to be learnt, else `IGNORE`; unshifted), `positions` (within
    the document) and `segments` (the document within the row; -1: padding) are [B, T] int64. `records` says where
    each row was read.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    segments: Tensor
    records: list[str]

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch with its tensors on `device`."""
        return Batch(
            self.tokens.to(device),
            self.labels.to(device),
            self.positions.to(device),
            self.segments.to(device),
            self.records,
        )


@dataclass
class DataReport:
    """What became of the records, for people."""

    sequence_len: int
    skipped: list[str] = field(default_factory=list)
    outcomes: dict[Outcome, int] = field(
        default_factory=lambda: {"whole": 0, "cut": 0, "too_long": 0, "unsupervised": 0}
    )

    def lines(self) -> list[str]:
        """Return one sentence for each thing that was not taken as it stood; none if all was."""
        cut, too_long, unsupervised = (self.outcomes[name] for name in ("cut", "too_long", "unsupervised"))
        said = [
            (len(self.skipped), f"bad records left out, the first: {self.skipped[0] if self.skipped else ''}"),
            (cut, f"cut at the end of a turn to fit sequence_len {self.sequence_len}"),
            (too_long, f"left out: their first answer ends beyond sequence_len {self.sequence_len}"),
            (unsupervised, "left out: no answer in them to learn from"),
        ]
        return [f"{count} {what}" for count, what in said if count]


@dataclass(frozen=True)
class EncodedDataset(Sequence[Example]):
    """Conversations as tokens, and what became of those that are not among them."""

    examples: list[Example]
    pad_id: int
    report: DataReport

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: Any) -> Any:
        return self.examples[index]

    @property
    def tokens(self) -> int:
        """Tokens in all, padding not counted."""
        return sum(len(example) for example in self.examples)

    @property
    def supervised_tokens(self) -> int:
        """Tokens to be learnt."""
        return sum(int(example.supervised.sum()) for example in self.examples)

    def prompts(self) -> list[list[int]]:
        """Return the tokens before every answer (`Example.prompts`), in order."""
        return [prompt for example in self.examples for prompt in example.prompts()]

    def batch(self, indices: Sequence[int]) -> Batch:
        """Put the examples of these numbers side by side."""
        return collate([self.examples[index] for index in indices], self.pad_id)

    def fingerprint(self) -> str:
        """A digest of all tokens and labels in their order."""
        digest = hashlib.sha256()
        for example in self.examples:
            digest.update(len(example).to_bytes(8, "big"))
            digest.update(example.tokens.numpy().tobytes())
            digest.update(example.supervised.numpy().tobytes())
        return digest.hexdigest()


def collate(examples: Sequence[Example], pad_id: int) -> Batch:
    """Fill up `examples` at the right to the longest of them; each row is one document."""
    shape = (len(examples), max(len(example) for example in examples))
    tokens = torch.full(shape, pad_id, dtype=torch.long)
    labels = torch.full(shape, IGNORE, dtype=torch.long)
    segments = torch.full(shape, -1, dtype=torch.long)
    for row, example in enumerate(examples):
        length = len(example)
        tokens[row, :length] = example.tokens
        labels[row, :length] = torch.where(example.supervised, example.tokens.long(), IGNORE)
        segments[row, :length] = 0
    positions = torch.arange(shape[1]).repeat(shape[0], 1)
    return Batch(tokens, labels, positions, segments, [example.source for example in examples])


def load_datasets(cfg: TrainConfig, encoder: ChatEncoder) -> tuple[EncodedDataset, EncodedDataset]:
    """Read, encode and part the configured data sets.

    Whose words are learnt follows the configuration (`roles_to_train`, `train_on_inputs`); the template is the
    data set's `conversation`, else the encoder's. See `fit` for long conversations and `hold_out` for the split.

    Returns:
        (training, held out); both carry the same report. The second is empty if `val_set_size` is 0 or there is
        only one conversation.

    Raises:
        DataError: a data set cannot be read, or nothing of it can be used.
        ConfigError: no chat template of that name.
    """
    report = DataReport(cfg.sequence_len)
    examples: list[Example] = []
    for source in cfg.datasets:
        own = encoder.variant(template=source.conversation, roles=cfg.roles_to_train, everything=cfg.train_on_inputs)
        read = read_source(source, skip_bad=cfg.skip_bad_records)
        report.skipped += read.skipped
        problems: list[str] = []
        for conversation in read.conversations:
            try:
                example, outcome = fit(conversation, own, cfg.sequence_len)
            except DataError as error:
                problems.append(str(error))
                continue
            report.outcomes[outcome] += 1
            if example is not None:
                examples.append(example)
        if problems and not cfg.skip_bad_records:
            raise DataError(bad_records(problems, source.path))
        report.skipped += problems
    if not examples:
        raise DataError("no conversation is left to train on: " + "; ".join(report.lines()))
    held_out = hold_out([example.key for example in examples], cfg.val_set_size, cfg.seed)
    parts = [[e for e, held in zip(examples, held_out, strict=True) if held == side] for side in (False, True)]
    return EncodedDataset(parts[0], encoder.pad_id, report), EncodedDataset(parts[1], encoder.pad_id, report)


class BatchLoader:
    """Micro-batches without end, epoch after epoch; `next` on it gives the next one.

    Each epoch takes every example once, in an order drawn from (seed, epoch). To keep padding small, examples
    are sorted by length within windows of some batches; the order of the batches is drawn again. Unshuffled,
    every epoch gives the same batches, the longest first.

    Args:
        dataset: what to take from; not empty.
        micro_batch_size: rows of a batch; the last one of an epoch, drawn anywhere in it, may have fewer.
        seed: of the order.
        shuffle: whether the order is drawn.

    Raises:
        DataError: the data set is empty.
    """

    def __init__(self, dataset: EncodedDataset, micro_batch_size: int, seed: int, shuffle: bool = True) -> None:
        if not len(dataset):
            raise DataError("there is no conversation to make batches of")
        self.dataset = dataset
        self.micro_batch_size = micro_batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0  # of the batch that comes next
        self._taken = 0  # batches of this epoch that were given out
        self._plan = self._draw()
        self._fingerprint: str | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one pass over the data."""
        return -(-len(self.dataset) // self.micro_batch_size)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = self.dataset.batch(self._plan[self._taken])
        self._taken += 1
        if self._taken == len(self._plan):
            self.epoch, self._taken = self.epoch + 1, 0
            self._plan = self._draw()
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the place of the next batch (plain numbers and texts), to be given to `load_state_dict`."""
        return {"epoch": self.epoch, "batch": self._taken, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved place: the batches that follow are exactly those that followed there.

        Raises:
            DataError: the place belongs to other data or another order, and means nothing here.
        """
        changed = [name for name, value in self._identity().items() if state.get(name) != value]
        if changed:
            raise DataError(
                f"the saved place in the data does not fit: {', '.join(changed)} changed since; go on with the "
                "data and settings of that run, or start a new one"
            )
        self.epoch, self._taken = int(state["epoch"]), int(state["batch"])
        self._plan = self._draw()

    def _identity(self) -> dict[str, Any]:
        """All that the order of batches follows from."""
        if self._fingerprint is None:
            self._fingerprint = self.dataset.fingerprint()
        return {
            "seed": self.seed,
            "shuffle": self.shuffle,
            "micro_batch_size": self.micro_batch_size,
            "data": self._fingerprint,
        }

    def _draw(self) -> list[list[int]]:
        """Return this epoch's batches, as numbers of examples."""
        order, size = list(range(len(self.dataset))), self.micro_batch_size
        window = _WINDOW * size if self.shuffle else len(order)
        draw = random.Random(f"{self.seed}/{self.epoch}")
        if self.shuffle:
            draw.shuffle(order)
        batches = []
        for start in range(0, len(order), window):
            near = sorted(order[start : start + window], key=lambda index: -len(self.dataset.examples[index]))
            batches += [near[at : at + size] for at in range(0, len(near), size)]
        if self.shuffle:
            draw.shuffle(batches)
        return batches
