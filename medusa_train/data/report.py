"""What became of the records of data sets: skipped, not read, truncated, split, looping."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from medusa_train.data.unread import Unread

#: What is said of conversations that became several rows, by `SplitReason`.
_SPLIT_WORDS: dict[str, str] = {
    "template": "the chat template changes earlier turns in later prompts",
    "token_ids": (
        "the data give tokens of answers (token_ids); in later prompts an answer has the tokens"
        " of its text"
    ),
    "tokenizer": "the tokenizer splits a prompt otherwise where an answer follows",
}
#: What is said of chats with tool calls, with their number.
_TOOL_WORDS = {
    "results_of_user": (
        "the chat template does not know the role tool: results of tools are turns of the user"
    ),
    "text_arguments": (
        "the chat template rejects arguments of tool calls as objects: it gets them as JSON text"
    ),
    "dropped_content": "the chat template leaves out the text beside tool calls",
    "cut_before_turn": (
        "cut before a turn that the chat template renders differently after a prompt"
    ),
}


@dataclass
class DataReport:
    """Statistics on reading and tokenization, for the user.

    Attributes:
        sequence_len: to which rows were cut; 0 if no chat was tokenized.
        skipped: `file:line: reason` of invalid records.
        unread: what the records of a data set hold that is not read.
        counts: conversations that are "complete" or "truncated", or have no row since they are
            "too_long" or "unsupervised"; those "split", into how many "rows", and "split:REASON"
            for each `SplitReason`; "answers" in the kept ones, how many of these are "looping" or
            known to be "cut" off by a length limit, and of how many the given tokens were not used
            ("ignored_token_ids"); what `_TOOL_WORDS` has.
        read_notes: sentences on files and on what is not read; stored with the examples.
        notes: further sentences on this run.
    """

    sequence_len: int = 0
    skipped: list[str] = field(default_factory=list)
    unread: Unread = field(default_factory=Unread)
    counts: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    read_notes: list[str] = field(default_factory=list)

    def add(self, other: DataReport) -> None:
        """Add what was skipped and counted in another part of the data, and the notes on it."""
        self.skipped += other.skipped
        self.unread.update(other.unread)
        self.counts.update(other.counts)
        self.notes += other.notes
        self.read_notes += other.read_notes

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
        for name, words in _TOOL_WORDS.items():
            if count := self.counts[name]:
                sentences.append(f"chats with tools ({count}): {words}")
        if count := self.counts["dropped_rows"]:
            sentences.append(f"{count} rows of long chats with tools left out (max_rows_per_chat)")
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
