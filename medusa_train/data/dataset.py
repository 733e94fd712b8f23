"""Tokenized data sets, and batches of them in a random order that can be resumed."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import Any

from medusa_train.config.schema import TrainConfig
from medusa_train.data.batch import Batch, Example
from medusa_train.data.examples import EncodedDataset
from medusa_train.data.sources import OnProgress
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.data.tokenize_datasets import encode_datasets
from medusa_train.errors import DataError

_WINDOW = 32  # batches within which rows are sorted by length


def load_datasets(
    cfg: TrainConfig,
    encoder: ChatEncoder,
    on_progress: OnProgress | None = None,
    held_out: set[str] | None = None,
) -> tuple[EncodedDataset, EncodedDataset]:
    """Read, tokenize and split the configured data sets.

    Tokens come from `dataset_prepared_path` if they are cached there. With `sample_packing` rows
    hold several conversations. See `encode_examples` for long conversations and `select_validation`
    for the split.

    Args:
        on_progress: called while files are fetched, and while the conversations of a data set are
            tokenized.
        held_out: the prompts in the validation set of an earlier split, to use the same split
            again.

    Returns:
        (training, validation). If `test_datasets` are configured, they are the validation set, with
        their own report, and conversations with one of their prompts are not trained on. Otherwise
        both have the same report, and the validation set is empty if `val_set_size` is 0 or there
        is only one prompt.
    """
    # 1. Read the data, and choose the prompts that are not trained on, with all their conversations
    # and all rows of these.
    encoded = encode_datasets(cfg, encoder, on_progress)
    test = None
    if cfg.test_datasets is not None:
        test_cfg = cfg.model_copy(update={"datasets": cfg.test_datasets})
        test = encode_datasets(test_cfg, encoder, on_progress)
        held_out = {example.prompt for example in test}
    elif held_out is None:
        held_out = select_validation(encoded.examples, cfg.val_set_size, cfg.seed)
    # 2. Split the examples.
    report, row_len = encoded.report, encoded.row_len
    trained = [example for example in encoded.examples if example.prompt not in held_out]
    others = [example for example in encoded.examples if example.prompt in held_out]
    train = EncodedDataset(trained, report, row_len)
    validation = EncodedDataset(others, report, row_len)
    if not trained:
        holder = "the validation set has" if test is None else "test_datasets have"
        raise DataError(f"no conversation left to train on: {holder} all of their prompts")
    # 3. Test data are the validation set.
    if test is not None:
        if others:
            report.notes.append(
                f"{validation.conversations} conversations not trained on, since test_datasets have"
                " their prompts"
            )
        return train, test
    # 4. Otherwise it is what is not trained on.
    if not others and cfg.early_stopping_patience is not None:
        raise DataError(
            "early_stopping_patience: no conversation is left for validation; set test_datasets"
        )
    if not others and cfg.val_set_size and encoded.conversations > 1:
        report.notes.append(
            f"no conversation is held out: all {encoded.conversations:,} begin with the same"
            " prompt; set test_datasets"
        )
    return train, validation


def select_validation(examples: Sequence[Example], share: float, seed: int) -> set[str]:
    """Return the prompts of the validation set (`Example.prompt`).

    Prompts are ranked by a hash with `seed`. In this order a prompt is held out, with all its
    conversations, if these still fit into `share` of all conversations. So the split does not
    depend on the order of files, and all answers to a prompt are on the same side of it. If `share`
    is above 0 and there are at least two prompts, at least one is held out and at least one is kept
    for training.
    """
    # 1. The conversations of each prompt. The smallest of their keys is hashed: that of the
    # conversation if the prompt has only one. Earlier versions hashed that key, so data without
    # repeated prompts keep their split.
    keys: dict[str, list[str]] = {}
    for example in examples:
        if example.row == 0:
            keys.setdefault(example.prompt, []).append(example.key)
    if share <= 0 or len(keys) < 2:
        return set()

    def rank(prompt: str) -> bytes:
        return hashlib.sha256(f"{seed}/{min(keys[prompt])}".encode()).digest()

    # 2. The first prompts whose conversations fit into the share.
    total = sum(map(len, keys.values()))
    room = min(max(1, round(share * total)), total - 1)
    order = sorted(keys, key=rank)
    chosen: set[str] = set()
    for prompt in order:
        if len(keys[prompt]) <= room:
            chosen.add(prompt)
            room -= len(keys[prompt])
    if not chosen:  # no prompt fits into `share`: hold out the one with the fewest answers
        chosen.add(min(order, key=lambda prompt: len(keys[prompt])))
    return chosen


class BatchLoader:
    """Infinite iterator over micro-batches, epoch after epoch. Its position can be saved and
    restored.

    Each epoch has every example once, in an order that depends only on (seed, epoch). Packed rows
    are composed again in each epoch. To limit padding, rows are sorted by length within windows of
    batches, then the batches are shuffled. Without shuffling every epoch has the same batches,
    longest first.

    Args:
        micro_batch_size: rows per batch; one batch of an epoch may have fewer.
        rank: rank of this process in data parallelism. The loader yields every `size`-th batch,
            starting with the `rank`-th.
        size: number of ranks. Loaders of all ranks are at the same position after the same number
            of batches.
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
            raise DataError("the data set has no conversation")
        self.dataset = dataset
        self.micro_batch_size = micro_batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.rank, self.size = rank, size
        self.epoch = 0  # epoch of the next batch
        self._batch = 0  # index of the next batch in its epoch
        self._batches = self._compose_epoch(0)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        # the next batch of each rank
        batches = [self._next_rows() for _ in range(self.size)]
        rows, draw = batches[self.rank]
        return replace(self.dataset.batch(rows), draw=draw)

    def _next_rows(self) -> tuple[list[list[int]], int]:
        """Return the rows of the next batch, and its `Batch.draw`. Neither depends on the number of
        ranks.
        """
        draw = random.Random(f"{self.seed}/{self.epoch}/{self._batch}").getrandbits(62)
        rows = self._batches[self._batch]
        self._batch += 1
        if self._batch == len(self._batches):
            self.epoch += 1
            self._batch = 0
            self._batches = self._compose_epoch(self.epoch)
        return rows, draw

    def _compose_epoch(self, epoch: int) -> list[list[list[int]]]:
        """Return an epoch's batches: lists of rows, and a row is a list of example indices.

        [[[3], [0]], [[1], [2]]]   four examples, two rows in a batch
        [[[3, 1], [0, 2]]]         the same examples in packed rows
        """
        size = self.micro_batch_size
        rng = random.Random(f"{self.seed}/{epoch}")
        # 1. Rows of examples in random order.
        order = list(range(len(self.dataset)))
        if self.shuffle:
            rng.shuffle(order)
        rows = self.dataset.rows(order)
        if self.shuffle and self.dataset.row_len is not None:
            rng.shuffle(rows)  # packing puts rows of long documents first
        # 2. Batches of rows of similar length, within windows.
        window = len(rows)
        if self.shuffle:
            window = _WINDOW * size
        batches = []
        for start in range(0, len(rows), window):
            similar = sorted(rows[start : start + window], key=self._row_length, reverse=True)
            for first in range(0, len(similar), size):
                batches.append(similar[first : first + size])
        # 3. Shuffle the batches.
        if self.shuffle:
            rng.shuffle(batches)
        return batches

    def _row_length(self, row: Sequence[int]) -> int:
        return sum(len(self.dataset.examples[index]) for index in row)

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches in an epoch."""
        return len(self._batches)

    @property
    def rows_per_epoch(self) -> int:
        """Number of rows in an epoch."""
        return sum(len(batch) for batch in self._batches)

    @property
    def positions_per_epoch(self) -> int:
        """Number of positions computed in the current epoch, padding included."""
        return sum(len(batch) * max(map(self._row_length, batch)) for batch in self._batches)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next batch, as JSON values for `load_state_dict`."""
        return {"epoch": self.epoch, "batch": self._batch, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a position: the same batches follow as after saving."""
        changed = [name for name, value in self._identity().items() if state.get(name) != value]
        if changed:
            raise DataError(
                f"cannot resume the data order, changed since the checkpoint: {', '.join(changed)}."
                " Resume with the data and settings of that run, or start a new one"
            )
        self.epoch = int(state["epoch"])
        self._batch = int(state["batch"])
        self._batches = self._compose_epoch(self.epoch)

    @cached_property
    def _fingerprint(self) -> str:
        return self.dataset.fingerprint()

    def _identity(self) -> dict[str, Any]:
        """Return everything that determines the order of batches."""
        return {
            "seed": self.seed,
            "shuffle": self.shuffle,
            "micro_batch_size": self.micro_batch_size,
            "packed rows": self.dataset.row_len,
            "data": self._fingerprint,
        }


def validation_batches(
    validation: EncodedDataset, micro_batch_size: int
) -> Callable[[], Iterable[Batch]] | None:
    """Return a function that iterates once over the validation set in a fixed order; None if the
    set is empty.
    """
    if not len(validation):
        return None

    def batches() -> Iterable[Batch]:
        loader = BatchLoader(validation, micro_batch_size, seed=0, shuffle=False)
        return islice(loader, loader.batches_per_epoch)

    return batches
