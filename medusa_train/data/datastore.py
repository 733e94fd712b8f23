"""A datastore of tokenized text with a suffix array, to look up what followed a sequence of tokens
(REST).
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medusa_train.config.schema import DatasetConfig
from medusa_train.data.read_chats import read_chats
from medusa_train.data.sources import SUFFIXES, LocalFiles
from medusa_train.errors import DataError
from medusa_train.io import warn_once

SEPARATOR = -1  # after every document


class Datastore:
    """Documents of token ids, and their positions sorted by the tokens that follow.

    Positions are sorted by their next `order` tokens, so all occurrences of an n-gram are adjacent,
    and binary search finds them. Evenly spaced occurrences have the continuations in proportion to
    their frequency.

    Args:
        documents: token ids of each document.
        order: number of following tokens by which positions are sorted.
    """

    def __init__(self, documents: Iterable[Sequence[int]], order: int) -> None:
        started = time.perf_counter()
        parts = [[*document, SEPARATOR] for document in documents if document]
        if not parts:
            raise DataError("the datastore has no tokens")
        self._tokens: NDArray[np.int32] = np.concatenate(
            [np.array(part, dtype=np.int32) for part in parts]
        )
        self._suffixes = _sort_suffixes(self._tokens, order)
        self.size = len(self._tokens) - len(parts)
        self.seconds = time.perf_counter() - started

    def describe(self) -> str:
        """Return size, memory and sorting time in one phrase."""
        megabytes = (self._tokens.nbytes + self._suffixes.nbytes) / 1e6
        return f"{self.size:,} tokens, {megabytes:,.1f} MB, sorted in {self.seconds:.1f} s"

    def continuations(self, recent: Sequence[int], length: int, count: int) -> list[list[int]]:
        """Return what follows the longest suffix of `recent` that occurs in the documents.

        Args:
            recent: the last tokens of a text.
            length: maximum number of tokens of a continuation.
            count: maximum number of continuations, evenly spaced among all occurrences.
        """
        # 1. The longest suffix that occurs, by bisection: an n-gram occurs only if its own suffixes
        # do.
        found = range(0)
        shortest = 0  # length of the suffix whose occurrences are in `found`
        longest = len(recent)
        while shortest < longest:
            n = (shortest + longest + 1) // 2
            occurrences = self._occurrences(recent[len(recent) - n :])
            if occurrences:
                found = occurrences
                shortest = n
            else:
                longest = n - 1
        # 2. What follows some of its occurrences, evenly spaced.
        stride = max(1, math.ceil(len(found) / count))
        continuations = []
        for number in found[::stride]:
            following = self._after(int(self._suffixes[number]) + shortest, length)
            if following:
                continuations.append(following)
        return continuations

    def _occurrences(self, ngram: Sequence[int]) -> range:
        """Return the range of `_suffixes` that begin with `ngram`."""
        pattern = list(ngram)

        def start(suffix: int) -> list[int]:
            return self._tokens[suffix : suffix + len(pattern)].tolist()

        low = bisect_left(self._suffixes, pattern, key=start)
        return range(low, bisect_right(self._suffixes, pattern, lo=low, key=start))

    def _after(self, position: int, length: int) -> list[int]:
        """Return the tokens from a position on, up to the end of its document."""
        tokens: list[int] = self._tokens[position : position + length].tolist()
        if SEPARATOR in tokens:
            return tokens[: tokens.index(SEPARATOR)]
        return tokens


def _sort_suffixes(tokens: NDArray[np.int32], order: int) -> NDArray[np.int32]:
    """Sort positions by their next `order` tokens, compared as big-endian bytes."""
    padded = np.pad((tokens + 2).astype(">u4"), (0, order))  # 0 pads the end; SEPARATOR is 1
    windows = np.lib.stride_tricks.sliding_window_view(padded, order)[: len(tokens)]
    keys = np.ascontiguousarray(windows).view(f"S{4 * order}").reshape(-1)
    return np.argsort(keys, kind="stable").astype(np.int32)


def read_datastore(path: Path, tokenizer: Any, order: int) -> Datastore:
    """Build a datastore from the assistant turns of a file of chats (JSON, JSON Lines, parquet), or
    from a text file.
    """
    if path.name.lower().endswith(SUFFIXES):
        source = LocalFiles((path,))
        entry = DatasetConfig(path=source.name)
        result = read_chats(source, entry, skip_bad=True)
        for note in [
            *(f"{path}: {line}" for line in result.report.describe()),
            *result.report.unread.describe(str(path)),
        ]:
            warn_once(note)
        texts = []
        for chat in result.conversations:
            texts += [message.content for message in chat.messages if message.role == "assistant"]
    else:
        try:
            texts = [path.read_text(encoding="utf-8-sig")]
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: cannot be read as text ({error})") from error
    texts = [text for text in texts if text]
    if not texts:
        raise DataError(f"{path}: has no text for a datastore")
    documents = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return Datastore(documents, order)
