"""The configured data sets as batches, in an order whose place can be saved; knows no model and no loss."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_train.config.schema import TrainConfig
from medusa_train.data.batch import Batch, collate, pack
from medusa_train.data.cache import DataReport, encode_datasets, load_or_encode, open_datasets
from medusa_train.data.tokenize import ChatEncoder, Example, select_validation
from medusa_train.errors import DataError

_WINDOW = 32  # batches among which rows of like length are brought together


@dataclass(frozen=True)
class EncodedDataset(Sequence[Example]):
    """Conversations as tokens, and what became of those that are not among them.

    Attributes:
        row_len: tokens of a row into which conversations are packed; None: each has a row of its own.
        mixture: which conversations an epoch takes; None: all of them, once.
    """

    examples: list[Example]
    pad_id: int
    report: DataReport
    row_len: int | None = None
    mixture: Mixture | None = None

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

    def epoch(self, epoch: int, seed: int) -> list[int]:
        """Return the numbers of the examples that an epoch takes, unshuffled."""
        return list(range(len(self))) if self.mixture is None else self.mixture.draw(epoch, seed)

    def rows(self, order: Sequence[int]) -> list[list[int]]:
        """Lay the examples of these numbers into rows: packed, or one in each."""
        if self.row_len is None:
            return [[index] for index in order]
        packs = pack([len(self.examples[index]) for index in order], self.row_len)
        return [[order[place] for place in row] for row in packs]

    def batch(self, rows: Sequence[Sequence[int]]) -> Batch:
        """Put rows of examples side by side."""
        return collate([[self.examples[index] for index in row] for row in rows], self.pad_id)

    def fingerprint(self) -> str:
        """A digest of all tokens and labels in their order."""
        digest = hashlib.sha256()
        for example in self.examples:
            digest.update(len(example).to_bytes(8, "big"))
            digest.update(example.tokens.numpy().tobytes())
            digest.update(example.supervised.numpy().tobytes())
        return digest.hexdigest()


def load_datasets(cfg: TrainConfig, encoder: ChatEncoder) -> tuple[EncodedDataset, EncodedDataset]:
    """Read, encode and part the configured data sets.

    With `dataset_prepared_path` their tokens are taken from there if nothing that shapes them has changed. With
    `sample_packing` rows hold several conversations. Sources with a `weight` are mixed by it in training; the
    held-out part is always taken as it is. See `encode_example` for long conversations and `select_validation`
    for the split.

    Returns:
        (training, held out); both carry the same report. The second is empty if `val_set_size` is 0 or there is
        only one conversation.

    Raises:
        DataError: a data set cannot be read, or nothing of it can be used.
        ConfigError: no chat template of that name.
    """
    readings = open_datasets(cfg, encoder)
    if cfg.dataset_prepared_path is None:
        corpus = encode_datasets(cfg, readings)
    else:
        corpus = load_or_encode(cfg, readings, Path(cfg.dataset_prepared_path).expanduser())
    report = corpus.report
    if not corpus.examples:
        raise DataError("no conversation is left to train on: " + "; ".join(report.describe()))
    held_out = select_validation([example.key for example in corpus.examples], cfg.val_set_size, cfg.seed)
    parts: list[list[Example]] = [[], []]
    origins: list[int] = []
    for example, origin, held in zip(corpus.examples, corpus.origins, held_out, strict=True):
        parts[held].append(example)
        if not held:
            origins.append(origin)
    mixture = _mixture(cfg, origins)
    if mixture is not None:
        report.notes += mixture.describe([entry.path for entry in cfg.datasets])
    row_len = cfg.sequence_len if cfg.sample_packing else None
    return (
        EncodedDataset(parts[0], encoder.pad_id, report, row_len, mixture),
        EncodedDataset(parts[1], encoder.pad_id, report, row_len),
    )


def _mixture(cfg: TrainConfig, origins: Sequence[int]) -> Mixture | None:
    """Weigh the sources if any has a weight; those without one then count 1."""
    weights = [entry.weight for entry in cfg.datasets]
    if all(weight is None for weight in weights):
        return None
    return Mixture.by_weight(origins, [1.0 if weight is None else weight for weight in weights])


class BatchLoader:
    """Micro-batches without end, epoch after epoch; `next` on it gives the next one.

    Each epoch takes every example once (or what the data set's mixture says), in an order drawn from (seed, epoch);
    packed rows are put together anew. To keep padding small, rows are sorted by length within windows of some
    batches; the order of the batches is drawn again. Unshuffled, every epoch takes every example once in the same
    batches, the longest first.

    Args:
        dataset: what to take from; not empty.
        micro_batch_size: rows of a batch; the last one of an epoch, drawn anywhere in it, may have fewer.
        seed: of the order.
        shuffle: whether the order is drawn.
        rank, size: of `size` loaders that run side by side this one gives out every `size`-th batch, from the
            `rank`-th (0: the first) on. All of them are at the same place whenever each has given out as many.

    Raises:
        DataError: the data set is empty.
    """

    def __init__(
        self,
        dataset: EncodedDataset,
        micro_batch_size: int,
        seed: int,
        shuffle: bool = True,
        *,
        rank: int = 0,
        size: int = 1,
    ) -> None:
        if not len(dataset):
            raise DataError("there is no conversation to make batches of")
        self.dataset = dataset
        self.micro_batch_size = micro_batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.rank, self.size = rank, size
        self.epoch = 0  # of the batch that comes next
        self._taken = 0  # batches of this epoch that were given out
        self._plan = self._draw(0)
        self._first = self._plan
        self._fingerprint: str | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Batches in the first pass over the data. Later ones have as many, but for a few where a mixture is packed."""
        return len(self._first)

    @property
    def rows_per_epoch(self) -> int:
        """Rows in the first pass over the data."""
        return sum(len(batch) for batch in self._first)

    @property
    def tokens_per_epoch(self) -> int:
        """Tokens in the first pass over the data, padding not counted."""
        return sum(self._width(row) for batch in self._first for row in batch)

    @property
    def positions_per_epoch(self) -> int:
        """Positions computed in the first pass over the data: tokens and padding."""
        return sum(len(batch) * max(map(self._width, batch)) for batch in self._first)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        mine = [self._take() for _ in range(self.size)][self.rank]
        return self.dataset.batch(mine)

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
        self._plan = self._draw(self.epoch)

    def _take(self) -> list[list[int]]:
        """Rows of the next batch."""
        rows = self._plan[self._taken]
        self._taken += 1
        if self._taken == len(self._plan):
            self.epoch, self._taken = self.epoch + 1, 0
            self._plan = self._draw(self.epoch)
        return rows

    def _width(self, row: Sequence[int]) -> int:
        return sum(len(self.dataset.examples[index]) for index in row)

    def _identity(self) -> dict[str, Any]:
        """All that the order of batches follows from."""
        if self._fingerprint is None:
            self._fingerprint = self.dataset.fingerprint()
        mixture = self.dataset.mixture
        return {
            "seed": self.seed,
            "shuffle": self.shuffle,
            "micro_batch_size": self.micro_batch_size,
            "packed rows": self.dataset.row_len,
            "datasets[].weight": list(mixture.quotas) if mixture and self.shuffle else None,
            "data": self._fingerprint,
        }

    def _draw(self, epoch: int) -> list[list[list[int]]]:
        """Return an epoch's batches: rows of numbers of examples."""
        size, dataset = self.micro_batch_size, self.dataset
        draw = random.Random(f"{self.seed}/{epoch}")
        order = dataset.epoch(epoch, self.seed) if self.shuffle else list(range(len(dataset)))
        if self.shuffle:
            draw.shuffle(order)
        rows = dataset.rows(order)
        if self.shuffle and dataset.row_len is not None:
            draw.shuffle(rows)  # packing brought rows of long documents to the front
        window = _WINDOW * size if self.shuffle else len(rows)
        batches = []
        for start in range(0, len(rows), window):
            near = sorted(rows[start : start + window], key=lambda row: -self._width(row))
            batches += [near[at : at + size] for at in range(0, len(near), size)]
        if self.shuffle:
            draw.shuffle(batches)
        return batches


@dataclass(frozen=True)
class Mixture:
    """Sources mixed by weight (`datasets[].weight`).

    An epoch is as long as all sources together. A source has its weight's share of it: one with more conversations
    than its share gives some of them, and others in the next epoch; one with fewer gives some several times. Over
    the epochs each source is gone through evenly: no conversation is taken twice more often than another of it.

    Attributes:
        members: the numbers of each source's conversations.
        quotas: how many of them an epoch takes; adds up to the number of conversations in all.
    """

    members: tuple[tuple[int, ...], ...]
    quotas: tuple[int, ...]

    @classmethod
    def by_weight(cls, origins: Sequence[int], weights: Sequence[float]) -> Mixture:
        """Share out an epoch.

        Args:
            origins: for each conversation the number of its source.
            weights: of each source, above 0; only their ratios count. Sources without conversations are passed over.
        """
        members = tuple(
            tuple(index for index, origin in enumerate(origins) if origin == source) for source in range(len(weights))
        )
        shares = [weight if own else 0.0 for weight, own in zip(weights, members, strict=True)]
        exact = [len(origins) * share / sum(shares) for share in shares]
        quotas = [int(count) for count in exact]
        # what rounding down left over goes to those who lost most by it
        by_loss = sorted(range(len(exact)), key=lambda source: (quotas[source] - exact[source], source))
        for source in by_loss[: len(origins) - sum(quotas)]:
            quotas[source] += 1
        return cls(members, tuple(quotas))

    def describe(self, names: Sequence[str]) -> list[str]:
        """Return one sentence on each source, for people."""
        rows = zip(names, self.members, self.quotas, strict=True)
        return [f"an epoch takes {quota} of {name}, which has {len(own)} to train on" for name, own, quota in rows]

    def draw(self, epoch: int, seed: int) -> list[int]:
        """Return the conversations of one epoch, source by source; the same for the same arguments."""
        taken: list[int] = []
        for source, (own, quota) in enumerate(zip(self.members, self.quotas, strict=True)):
            # an endless line of shuffled passes over the source, of which each epoch takes the next `quota`
            for place in range(epoch * quota, (epoch + 1) * quota):
                turn, at = divmod(place, len(own))
                if at == 0 or place == epoch * quota:
                    line = random.Random(f"{seed}/{source}/{turn}").sample(own, len(own))
                taken.append(line[at])
        return taken
