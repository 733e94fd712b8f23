"""Tokenized chats: rows truncated after whole answers, their statistics and their byte format."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load, save

from medusa_train.data.batch import Batch, Example, collate, pack
from medusa_train.data.conversation import Conversation, is_looping
from medusa_train.data.report import DataReport
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.io import parse_json

_CHECKSUM_SIZE = 4


def encode_examples(
    conversation: Conversation, encoder: ChatEncoder, report: DataReport
) -> list[Example]:
    """Tokenize a conversation into rows of at most `report.sequence_len` tokens, and count in the
    report what happened.

    Each row is truncated after a complete answer. Tokens after the last supervised one are dropped.
    See `ChatEncoder.encode` for the rows and for the errors.
    """
    counts = report.counts
    # 1. Keep the rows with supervised tokens, and the part of each that fits.
    rows = [row for row in encoder.encode(conversation, counts) if any(row.supervised)]
    kept_rows = [row for row in (row.trimmed(report.sequence_len) for row in rows) if row]
    if not kept_rows:
        counts["too_long" if rows else "unsupervised"] += 1
        return []
    # 2. Build an example of each row.
    key = conversation.first(min(kept_rows[0].answers) + 1).content_key
    prompt = conversation.first_prompt.content_key
    examples = [
        Example(
            torch.tensor(row.ids, dtype=torch.int32),
            torch.tensor(row.supervised, dtype=torch.bool),
            key,
            conversation.source,
            number,
            prompt=prompt,
        )
        for number, row in enumerate(kept_rows)
    ]
    # 3. Count what happened.
    num_answers = sum(len(row.answers) for row in rows)
    is_complete = num_answers == sum(len(row.answers) for row in kept_rows)
    counts["complete" if is_complete else "truncated"] += 1
    answers = [message for message in conversation.messages if message.role == "assistant"]
    counts.update(
        answers=len(answers),
        looping=sum(is_looping(answer.content) for answer in answers),
        cut=sum(answer.is_cut for answer in answers),
    )
    if len(kept_rows) > 1:
        counts.update(split=1, rows=len(kept_rows))
    return examples


@dataclass
class EncodedDataset(Sequence[Example]):
    """Tokenized conversations. A conversation that became several rows has an example for each row.

    Attributes:
        report: statistics on reading and tokenization.
        row_len: maximum number of tokens of a packed row; None without sample packing (one
            conversation per row).
    """

    examples: list[Example]
    report: DataReport
    row_len: int | None = None

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: Any) -> Any:
        return self.examples[index]

    @property
    def tokens(self) -> int:
        """Total number of tokens, without padding."""
        return sum(len(example) for example in self.examples)

    @property
    def conversations(self) -> int:
        """Number of conversations."""
        return sum(example.row == 0 for example in self.examples)

    def describe_count(self) -> str:
        """Return text on the number of conversations, and of rows if some have several."""
        count = self.conversations
        in_rows = "" if count == len(self) else f" in {len(self):,} rows"
        return f"{count:,} conversation{'' if count == 1 else 's'}{in_rows}"

    @property
    def supervised_tokens(self) -> int:
        """Number of supervised tokens."""
        return sum(int(example.supervised.sum()) for example in self.examples)

    def rows(self, order: Sequence[int]) -> list[list[int]]:
        """Distribute the examples at the indices in `order` over rows: packed, or one per row."""
        if self.row_len is None:
            return [[index] for index in order]
        rows = []
        for places in pack([len(self.examples[index]) for index in order], self.row_len):
            rows.append([order[place] for place in places])
        return rows

    def batch(self, rows: Sequence[Sequence[int]]) -> Batch:
        """Collate rows of example indices."""
        documents = []
        for row in rows:
            documents.append([self.examples[index] for index in row])
        return collate(documents)

    def fingerprint(self) -> str:
        """Return a digest of all tokens and loss masks, in order."""
        digest = hashlib.sha256()
        for example in self.examples:
            digest.update(len(example).to_bytes(8, "big"))
            digest.update(example.tokens.numpy().tobytes())
            digest.update(example.supervised.numpy().tobytes())
        return digest.hexdigest()

    def extend(self, other: EncodedDataset) -> None:
        """Append the examples of `other`, and add its skipped records and its counts."""
        self.examples += other.examples
        self.report.add(other.report)

    def __reduce__(self) -> Any:
        # Pickled tensors would be far larger: a view is pickled with the whole storage that it
        # shares.
        return EncodedDataset.from_bytes, (self.to_bytes(),)

    def to_bytes(self) -> bytes:
        """Return the data set as a checksum followed by a safetensors file."""
        examples = self.examples
        report = self.report
        info = {
            "row_len": self.row_len,
            # `unread` is already described in the notes
            **{name: value for name, value in vars(report).items() if name != "unread"},
            "examples": [[e.key, e.source, e.row, e.dataset, e.prompt] for e in examples],
        }
        empty = torch.zeros(0, dtype=torch.int32)  # torch.cat needs at least one tensor
        content = save(
            {
                "tokens": torch.cat([empty, *(e.tokens for e in examples)]),
                "supervised": torch.cat([empty.bool(), *(e.supervised for e in examples)]),
                "lengths": torch.tensor([len(e) for e in examples], dtype=torch.int64),
                "info": torch.frombuffer(bytearray(json.dumps(info).encode()), dtype=torch.uint8),
            }
        )
        return zlib.crc32(content).to_bytes(_CHECKSUM_SIZE, "little") + content

    @classmethod
    def from_bytes(cls, content: bytes) -> EncodedDataset:
        """Restore what `to_bytes` returned; raise ValueError if the bytes are damaged."""
        checksum, content = content[:_CHECKSUM_SIZE], content[_CHECKSUM_SIZE:]
        if zlib.crc32(content).to_bytes(_CHECKSUM_SIZE, "little") != checksum:
            raise ValueError("checksum mismatch")
        tensors = load(content)
        info = parse_json(tensors["info"].numpy().tobytes())
        lengths = tensors["lengths"].tolist()
        parts = zip(
            tensors["tokens"].split(lengths),
            tensors["supervised"].split(lengths),
            info.pop("examples"),
            strict=True,
        )
        examples = [Example(tokens, supervised, *names) for tokens, supervised, names in parts]
        row_len = info.pop("row_len")
        info["counts"] = Counter(info["counts"])
        return cls(examples, DataReport(**info), row_len)
