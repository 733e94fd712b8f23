"""Decode tokens to text one at a time: whole characters only, and cut at stop strings."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from medusa_train.data.conversation import REASONING_TAGS

#: A decoded text ends with this if its last character needs further tokens.
_INCOMPLETE = "\ufffd"


def hidden_ids(tokenizer: Any, shown: Collection[str] = REASONING_TAGS) -> frozenset[int]:
    """Return the special tokens that are left out of answers: all except those in `shown`, by
    default reasoning tags, which are special tokens in some models.
    """
    special: dict[int, str] = {}
    for token, added in tokenizer.added_tokens_decoder.items():
        if added.special:
            special[token] = str(added)
    special |= dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    return frozenset(token for token, text in special.items() if text not in shown)


def answer_text(
    tokenizer: Any, tokens: Sequence[int], shown: Collection[str] = REASONING_TAGS
) -> str:
    """Decode an answer without special tokens, see `hidden_ids`."""
    hidden = hidden_ids(tokenizer, shown)
    kept = [token for token in tokens if token not in hidden]
    return _decode(tokenizer, kept)


def _decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Return the text of exactly these tokens, special ones and spaces included."""
    text = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return str(text)


class Detokenizer:
    """Decode a growing sequence of tokens incrementally. The returned pieces add up to the decoded
    text.

    A token that ends inside a character adds nothing; the token that completes the character adds
    it. Each token is decoded together with the piece before it, because the first token of a text
    may lose its leading space.

    Args:
        tokenizer: decodes the tokens.
        hidden: tokens that are left out of the text.
    """

    def __init__(self, tokenizer: Any, hidden: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._tokens: list[int] = []
        # The text of tokens[done:] is not returned yet. tokens[context:done] are decoded again as
        # their context
        self._context = 0
        self._done = 0

    def push(self, token: int) -> str:
        """Add a token and return the text that it completes, which may be empty."""
        self._tokens.append(token)
        text = self._decode(self._context, len(self._tokens))
        if text.endswith(_INCOMPLETE):
            return ""
        return self.finish()

    def finish(self) -> str:
        """Return the remaining text, with an incomplete character as U+FFFD."""
        text = self._decode(self._context, len(self._tokens))
        returned = self._decode(self._context, self._done)
        # an incomplete character can change how the bytes before it are decoded
        if not text.startswith(returned):
            text = returned + self._decode(self._done, len(self._tokens))
        if len(text) > len(returned):  # a token without text is not enough context
            self._context = self._done
            self._done = len(self._tokens)
        return text[len(returned) :]

    def _decode(self, start: int, end: int) -> str:
        tokens = [token for token in self._tokens[start:end] if token not in self._hidden]
        if not tokens:
            return ""
        return _decode(self._tokenizer, tokens)


def token_pieces(tokenizer: Any, tokens: Sequence[int]) -> tuple[str, ...]:
    """Return the text that each token adds, special tokens included; see `Detokenizer`."""
    if not tokens:
        return ()
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token) for token in tokens]
    pieces[-1] += detokenizer.finish()
    return tuple(pieces)


class TextStream:
    """The text of a growing answer without special tokens, up to the first stop string.

    Text is held back while it ends inside a character or could be the beginning of a stop string.
    The results of `push` and `finish` add up to the decoded answer before the first stop string.

    Attributes:
        stopped: whether a stop string was found; nothing more may be pushed then.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self.stopped = False
        self._detokenizer = Detokenizer(tokenizer, hidden_ids(tokenizer))
        self._stop = [text for text in stop if text]
        self._held = ""

    def push(self, token: int) -> str:
        """Add a token and return the text that can be shown, which may be empty."""
        return self._until_stop(self._detokenizer.push(token))

    def finish(self) -> str:
        """End the answer and return the text that was held back."""
        if self.stopped:
            return ""
        return self._until_stop(self._detokenizer.finish()) + self._release()

    def _until_stop(self, text: str) -> str:
        self._held += text
        # the text ends before the first stop string
        positions = [self._held.find(stop) for stop in self._stop]
        matches = [index for index in positions if index >= 0]
        if matches:
            self.stopped = True
            self._held = self._held[: min(matches)]
            return self._release()
        return self._release(self._partial_stop_length())

    def _partial_stop_length(self) -> int:
        """Return how many characters at the end could be the beginning of a stop string."""
        longest_stop = max((len(stop) for stop in self._stop), default=1)
        longest = min(len(self._held), longest_stop - 1)
        for count in range(longest, 0, -1):
            end = self._held[-count:]
            if any(stop.startswith(end) for stop in self._stop):
                return count
        return 0

    def _release(self, keep: int = 0) -> str:
        """Return the held text except its last `keep` characters."""
        end = len(self._held) - keep
        released = self._held[:end]
        self._held = self._held[end:]
        return released
