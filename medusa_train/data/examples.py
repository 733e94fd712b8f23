"""Tokenized chats: rows cut to whole answers, the validation split, statistics, and their byte
format (safetensors).
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from medusa_train.data.conversation import Conversation, is_looping
from medusa_train.data.tokenize import ChatEncoder, SplitReason
from medusa_train.io import parse_json

Outcome = Literal["complete", "truncated", "too_long", "unsupervised"]
#: What is said of conversations that became several rows.
_SPLIT_WORDS: dict[SplitReason, str] = {
    "template": "the chat template changes earlier turns in later prompts",
    "token_ids": (
        "the data give tokens of answers (token_ids); in later prompts an answer has the tokens"
        " of its text"
    ),
    "tokenizer": "the tokenizer splits a prompt otherwise where an answer follows",
}


@dataclass(frozen=True, slots=True)
class Example:
    """A row of a tokenized conversation, truncated to the maximum length.

    Attributes:
        tokens: int32 [T].
        supervised: bool [T], the loss mask; the last is always true.
        key: `content_key` up to the first answer that is trained, the same for all rows of a
            conversation. id, source: of the record.
        row: index among the rows of its conversation.
        dataset: index of its data set, in the order of the configuration.
        prompt: `content_key` up to the first user turn: chats that begin with the same prompt are
            on the same side of the split.
    """

    tokens: Tensor
    supervised: Tensor
    key: str
    id: str
    source: str
    row: int = 0
    dataset: int = 0
    prompt: str = ""

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def prompts(self) -> list[list[int]]:
        """Return the prompt of each answer: all tokens before it, its header included."""
        before = torch.cat([self.supervised.new_ones(1), self.supervised[:-1]])  # [T]
        starts = torch.nonzero(self.supervised & ~before).flatten().tolist()
        return [self.tokens[:start].tolist() for start in starts]


class ConversationExamples(NamedTuple):
    """What `encode_examples` makes of a conversation.

    Attributes:
        examples: the rows.
        outcome: "complete" or "truncated"; without rows the reason: "too_long" (every row's first
            answer ends beyond the limit) or "unsupervised" (no supervised token).
        splits: why there are several rows; empty if there are not.
        ignored_token_ids: how many answers have `token_ids` that this tokenizer reads as another
            text.
    """

    examples: list[Example]
    outcome: Outcome
    splits: frozenset[SplitReason] = frozenset()
    ignored_token_ids: int = 0


def encode_examples(
    conversation: Conversation, encoder: ChatEncoder, max_length: int
) -> ConversationExamples:
    """Tokenize a conversation into rows of at most `max_length` tokens, truncating each after a
    complete answer.

    Tokens after the last supervised one are dropped. See `ChatEncoder.encode` for the rows and for
    the errors.
    """
    # 1. Rows that end with a supervised token, and how many answers they have.
    rows = []
    num_answers = 0
    for encoded in encoder.encode(conversation):
        row = encoded.trimmed()
        if row is not None and row.ids:
            rows.append(row)
            num_answers += len(row.answers)
    if not rows:
        return ConversationExamples([], "unsupervised")
    # 2. What of them fits into `max_length`.
    kept = []
    num_kept_answers = 0
    for row in rows:
        part = row.trimmed(max_length)
        if part is not None and part.ids:
            kept.append(part)
            num_kept_answers += len(part.answers)
    if not kept:
        return ConversationExamples([], "too_long")
    # 3. Tensors.
    first_answer = kept[0].answers[0]
    names: dict[str, Any] = {
        "key": conversation.first(first_answer.message + 1).content_key,
        "id": conversation.id,
        "source": conversation.source,
        "prompt": conversation.first_prompt.content_key,
    }
    examples = []
    for number, part in enumerate(kept):
        tokens = torch.tensor(part.ids, dtype=torch.int32)
        supervised = torch.tensor(part.supervised, dtype=torch.bool)
        examples.append(Example(tokens, supervised, row=number, **names))
    # 4. Why there are several: the first kept row is apart from nothing.
    splits = frozenset(part.split for part in kept[1:] if part.split is not None)
    outcome: Outcome = "complete"
    if num_kept_answers < num_answers:
        outcome = "truncated"
    ignored = sum(row.ignored_token_ids for row in rows)
    return ConversationExamples(examples, outcome, splits, ignored)


def select_validation(examples: Sequence[Example], share: float, seed: int) -> set[str]:
    """Return the prompts of the validation set (`Example.prompt`).

    Prompts are ranked by a hash with `seed`; the conversations of the first ones are held out until
    `share` of all conversations is reached. So the split does not depend on the order of files, and
    all answers to a prompt are on the same side of it. If `share` is above 0 and there are two
    prompts, at least one is held out and at least one is left.
    """
    # 1. The conversations of each prompt. The least key of its conversations is hashed: where every
    # prompt has one answer, the split is that of earlier versions.
    keys: dict[str, list[str]] = {}
    for example in examples:
        if example.row == 0:
            keys.setdefault(example.prompt, []).append(example.key)
    if share <= 0 or len(keys) < 2:
        return set()
    sizes = {prompt: len(found) for prompt, found in keys.items()}

    def rank(prompt: str) -> bytes:
        return hashlib.sha256(f"{seed}/{min(keys[prompt])}".encode()).digest()

    # 2. The first prompts whose conversations fit into the share.
    total = sum(sizes.values())
    room = max(1, round(share * total))
    room = min(room, total - 1)
    order = sorted(sizes, key=rank)
    chosen: set[str] = set()
    for prompt in order:
        if sizes[prompt] <= room:
            chosen.add(prompt)
            room -= sizes[prompt]
    if not chosen:  # every prompt has more answers than `share` allows: hold out the rarest
        chosen.add(min(order, key=lambda prompt: sizes[prompt]))
    return chosen


class CorruptDataError(Exception):
    """The bytes of tokenized examples are damaged; the message says how."""


@dataclass
class DataReport:
    """Statistics on reading and tokenization, for the user.

    Attributes:
        skipped: `file:line: reason` of invalid records.
        counts: conversations by `Outcome`; those "split", into how many "rows", and "split:REASON"
            for each `SplitReason`; "answers" in the kept ones, how many of these are "looping" or
            known to be "cut" off by a length limit, and of how many the given tokens were not used
            ("ignored_token_ids").
        read_notes: what the data hold that is not read; stored with the examples.
        notes: further sentences on this run.
    """

    sequence_len: int
    skipped: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    read_notes: list[str] = field(default_factory=list)

    def count_answers(self, conversation: Conversation) -> None:
        """Count the answers of a conversation."""
        answers = [message for message in conversation.messages if message.role == "assistant"]
        self.counts["answers"] += len(answers)
        self.counts["looping"] += sum(is_looping(answer.content) for answer in answers)
        self.counts["cut"] += sum(answer.is_cut for answer in answers)

    def count_rows(self, conversation: ConversationExamples) -> None:
        """Count the rows of a conversation that became several, and why it did; and the answers
        whose given tokens are not used.
        """
        if conversation.ignored_token_ids:
            self.counts["ignored_token_ids"] += conversation.ignored_token_ids
        if len(conversation.examples) < 2:
            return
        self.counts.update(split=1, rows=len(conversation.examples))
        for reason in conversation.splits:
            self.counts[f"split:{reason}"] += 1

    @property
    def looping_share(self) -> float:
        """Share of looping answers."""
        return self.counts["looping"] / max(1, self.counts["answers"])

    def describe_looping(self) -> str:
        """Say how many answers loop, and what to do about it."""
        return (
            f"{self.counts['looping']:,} of {self.counts['answers']:,} answers"
            f" ({self.looping_share:.0%}) loop: they repeat the same eight words three times, and"
            " heads learn to repeat. medusa-selfdistill drops such answers (drop_looping);"
            " sampling at a temperature of 0.3 to 0.7 makes fewer of them"
        )

    def describe(self) -> list[str]:
        """Return a sentence for each kind of conversation that was skipped or truncated, and the
        notes.
        """
        sentences = list(self.read_notes)
        if self.skipped:
            sentences.append(
                f"{len(self.skipped)} invalid records skipped, the first: {self.skipped[0]}"
            )
        limit = f"sequence_len {self.sequence_len}"
        outcomes = {
            "truncated": f"truncated at the end of a turn to fit {limit}",
            "too_long": f"skipped: their first answer ends beyond {limit}",
            "unsupervised": "skipped: no answer to train on",
        }
        for outcome, words in outcomes.items():
            count = self.counts[outcome]
            if count:
                sentences.append(f"{count} {words}")
        if self.counts["split"]:
            sentences.append(self._describe_rows())
        if self.counts["ignored_token_ids"]:
            sentences.append(
                "answers whose token_ids were not used, since they are another text in this"
                f" tokenizer: {self.counts['ignored_token_ids']}"
            )
        return sentences + self.notes

    def _describe_rows(self) -> str:
        """Say how many conversations became several rows, and for which reasons."""
        count = self.counts["split"]
        conversations = "conversation" if count == 1 else "conversations"
        sentence = f"{count} {conversations} became {self.counts['rows']} rows"
        found = {reason: self.counts[f"split:{reason}"] for reason in _SPLIT_WORDS}
        reasons = []
        for reason, words in _SPLIT_WORDS.items():
            if found[reason] == count:
                reasons.append(words)
            elif found[reason]:
                reasons.append(f"in {found[reason]} {words}")
        if not reasons:  # prepared by a version that did not count them
            return sentence
        return f"{sentence}: {'; '.join(reasons)}"


@dataclass
class EncodedExamples:
    """The examples of all data sets in order, and how they came about."""

    report: DataReport
    examples: list[Example] = field(default_factory=list)

    def extend(self, other: EncodedExamples) -> None:
        """Append the examples of `other`, and add up the reports."""
        self.examples += other.examples
        self.report.skipped += other.report.skipped
        self.report.notes += other.report.notes
        self.report.read_notes += other.report.read_notes
        self.report.counts.update(other.report.counts)

    def to_bytes(self) -> bytes:
        """Return the examples and the counts of the report, without its notes, as a safetensors
        file.
        """
        examples = self.examples
        names = [
            [
                example.key,
                example.id,
                example.source,
                example.row,
                example.dataset,
                example.prompt,
            ]
            for example in examples
        ]
        info = {
            "examples": names,
            "counts": self.report.counts,
            "skipped": self.report.skipped,
            "read_notes": self.report.read_notes,
        }
        empty = torch.zeros(0, dtype=torch.int32)  # torch.cat needs at least one tensor
        tensors = {
            "tokens": torch.cat([empty, *(example.tokens for example in examples)]),
            "supervised": torch.cat([empty.bool(), *(example.supervised for example in examples)]),
            "lengths": torch.tensor([len(example) for example in examples], dtype=torch.int64),
            "about": torch.frombuffer(bytearray(json.dumps(info).encode()), dtype=torch.uint8),
        }
        return save(tensors, metadata={"crc32": str(_checksum(tensors))})

    @classmethod
    def from_bytes(cls, content: bytes, sequence_len: int) -> EncodedExamples:
        """Restore what `to_bytes` returned, or raise CorruptDataError."""
        try:
            tensors = load(content)
            header = parse_json(content[8 : 8 + int.from_bytes(content[:8], "little")])
            if header["__metadata__"]["crc32"] != str(_checksum(tensors)):
                raise CorruptDataError("checksum mismatch")
            info = parse_json(tensors["about"].numpy().tobytes())
            lengths = tensors["lengths"].tolist()
        except (SafetensorError, KeyError, ValueError) as error:
            raise CorruptDataError(str(error).split("\n")[0]) from None
        parts = zip(
            info["examples"],
            tensors["tokens"].split(lengths),
            tensors["supervised"].split(lengths),
            strict=True,
        )
        examples = [Example(tokens, supervised, *names) for names, tokens, supervised in parts]
        report = DataReport(
            sequence_len,
            skipped=info["skipped"],
            counts=Counter(info["counts"]),
            read_notes=info["read_notes"],
        )
        return cls(report, examples)


def _checksum(tensors: dict[str, Tensor]) -> int:
    value = 0
    for name in sorted(tensors):
        value = zlib.crc32(tensors[name].numpy().tobytes(), zlib.crc32(name.encode(), value))
    return value
