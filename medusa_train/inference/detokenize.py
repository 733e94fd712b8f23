"""Tokens -> text as they come: whole characters only, and nothing of a stop string. Knows no model and no chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_HALF_A_CHARACTER = "\ufffd"


class TextStream:
    """The text of a growing answer, special tokens left out.

    Text is held back where it ends inside a character, and where a stop string may have begun. All that `push` and
    `finish` return is the decoded answer up to the first stop string, which is not part of it.

    Attributes:
        stopped: whether a stop string was found; then nothing more is to be pushed.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = [text for text in stop if text]
        self._tokens: list[int] = []
        self._context = self._read = 0  # decoded together: tokens[context:read], whose text is known, and what follows
        self._held = ""

    def push(self, token: int) -> str:
        """The text that `token` makes safe to show, which may be none.

        A token is decoded behind the ones before it, because the first token of a text may lose its leading space.
        """
        self._tokens.append(token)
        text = self._decode(self._context)
        if text.endswith(_HALF_A_CHARACTER):
            return ""
        known = self._decode(self._context, self._read)
        self._context, self._read = self._read, len(self._tokens)
        return self._until_stop(text[len(known) :])

    def finish(self) -> str:
        """What was held back: the answer ends here."""
        if self.stopped:
            return ""
        rest = self._decode(self._context)[len(self._decode(self._context, self._read)) :]
        return self._until_stop(rest) + self._take_held()

    def _decode(self, start: int, end: int | None = None) -> str:
        tokens = self._tokens[start:end]
        if not tokens:
            return ""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _until_stop(self, text: str) -> str:
        self._held += text
        found = [place for stop in self._stop if (place := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = self._held[: min(found)]
            return self._take_held()
        return self._take_held(self._may_begin_a_stop())

    def _may_begin_a_stop(self) -> int:
        """How many characters at the end could be the beginning of a stop string."""
        for count in range(min(len(self._held), max(map(len, self._stop), default=1) - 1), 0, -1):
            if any(stop.startswith(self._held[-count:]) for stop in self._stop):
                return count
        return 0

    def _take_held(self, but: int = 0) -> str:
        cut = len(self._held) - but
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown


def token_pieces(tokenizer: Any, tokens: Sequence[int]) -> tuple[str, ...]:
    """What each token adds to the text, special tokens included; the pieces put together are the text.

    A token that ends inside a character adds nothing, and the one that completes it adds the character. Each token is
    decoded behind the piece before it, because the first token of a text may lose its leading space.
    """
    pieces: list[str] = []
    context, read = 0, 0  # decoded together: tokens[context:read], whose text is known, and what follows
    for end in range(1, len(tokens) + 1):
        known = _decode(tokenizer, tokens[context:read])
        text = _decode(tokenizer, tokens[context:end])
        if text.endswith(_HALF_A_CHARACTER) and end < len(tokens):
            pieces.append("")
            continue
        pieces.append(text[len(known) :])
        context, read = read, end
    return tuple(pieces)


def _decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    if not tokens:
        return ""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def guessing_heads(tokens: int, accepted: Sequence[int]) -> list[int]:
    """Whose guess every token of an answer was: k for head k, 0 for the backbone's own.

    The first token comes from the prefill; a step then gives as many accepted tokens as `accepted` says, from heads
    1, 2, ..., and one of the backbone's own, unless the answer ends before it.
    """
    heads = [0]
    for length in accepted:
        heads += [*range(1, length + 1), 0]
    return (heads + [0] * tokens)[:tokens]
