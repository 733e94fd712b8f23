"""Tokens of rendered chats.

Control tokens in a content, such as `<|im_end|>` in a text about chat templates, are marked before
the chat is rendered. They are then tokenized as plain text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from medusa_train.data.conversation import ReasoningTags

Span = tuple[int, int]
#: Escape character. It comes before a control token in a content, so that the token is tokenized as
#: plain text, and before itself. A private use character, which templates do not contain.
MARK = "\ue002"
_MAX_KNOWN = 256


class _Piece(NamedTuple):
    """A part of a text that is tokenized on its own.

    Attributes:
        is_plain: the piece is a control token to tokenize as plain text.
        follows: other text comes before this piece, in another piece.
    """

    text: str
    is_plain: bool = False
    follows: bool = False


class MarkedTextTokenizer:
    """Tokenizes texts with marks. It adds no special tokens.

    Texts are tokenized in pieces, each of which begins with a control token. A tokenizer never
    merges a control token with other text, so the pieces have the tokens of the whole text. The
    prompts of a chat share most pieces; each piece is tokenized only once.
    """

    def __init__(self, tokenizer: Any, reasoning_tags: ReasoningTags) -> None:
        self._tokenizer = tokenizer
        control = _control_tokens(tokenizer, reasoning_tags)
        self._to_mark = re.compile(f"{control}|{MARK}")
        self._borders = re.compile(f"({MARK}(?:{control}|{MARK})|{control})")
        self._known: dict[_Piece, tuple[list[int], list[Span]]] = {}

    def mark(self, content: str) -> str:
        """Mark the control tokens of a content."""
        return self._to_mark.sub(MARK + r"\g<0>", content)

    def unmark(self, text: str) -> str:
        """Return the text without marks."""
        return self._borders.sub(lambda found: found[0].removeprefix(MARK), text)

    def ids(self, text: str, follows: bool = False) -> list[int]:
        """Return the tokens of a text with marks.

        Args:
            follows: other text comes before `text`.
        """
        ids: list[int] = []
        for piece in self._pieces(text, follows):
            ids += self._tokenize(piece)[0]
        return ids

    def overlaps(self, text: str, is_chosen: Sequence[bool]) -> list[bool]:
        """Return for each token of a text with marks whether any of its characters is chosen."""
        # 1. Drop the marks from `is_chosen`.
        chosen = list(is_chosen)
        for border in reversed(list(self._borders.finditer(text))):
            if border[0].startswith(MARK):
                del chosen[border.start()]
        # 2. Check the characters of each token.
        inside = []
        position = 0
        for piece in self._pieces(text):
            for start, end in self._tokenize(piece)[1]:
                # Many tokenizers exclude spaces from offsets: a token of one space has the empty
                # span after it.
                first = min(start, end - 1)
                inside.append(any(chosen[max(0, position + first) : position + end]))
            position += len(piece.text)
        return inside

    def _pieces(self, text: str, follows: bool = False) -> list[_Piece]:
        """Split a text with marks before every control token, and around those to read as plain
        text.
        """
        first, *others = self._borders.split(text)
        pieces = [_Piece(first, follows=follows)]
        for border, words in zip(others[::2], others[1::2], strict=True):
            if border == MARK * 2:  # the text itself contains the character
                pieces[-1] = pieces[-1]._replace(text=pieces[-1].text + MARK + words)
            elif border.startswith(MARK):
                plain = _Piece(border.removeprefix(MARK), is_plain=True, follows=True)
                pieces += [plain, _Piece(words, follows=True)]
            else:
                pieces.append(_Piece(border + words))
        return [piece for piece in pieces if piece.text]

    def _tokenize(self, piece: _Piece) -> tuple[list[int], list[Span]]:
        """Return the tokens of a piece, and for each its characters [start, end) in it."""
        if piece not in self._known:
            if len(self._known) == _MAX_KNOWN:
                self._known.clear()
            self._known[piece] = self._tokenize_new(piece)
        return self._known[piece]

    def _tokenize_new(self, piece: _Piece) -> tuple[list[int], list[Span]]:
        # 1. Some tokenizers put a space before the first word of a text. A piece that follows other
        # text is therefore tokenized after a line break.
        text = "\n" + piece.text if piece.follows else piece.text
        options = {"split_special_tokens": True} if piece.is_plain else {}
        encoding = self._tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False, **options
        )
        ids = list(encoding["input_ids"])
        offsets = encoding["offset_mapping"]
        if not piece.follows:
            return ids, offsets
        # 2. The tokens of the line break are dropped, unless it has merged with the text.
        line_break, _ = self._tokenize(_Piece("\n"))
        count = len(line_break)
        if ids[:count] != line_break:
            return self._tokenize(piece._replace(follows=False))
        return ids[count:], [(max(start - 1, 0), end - 1) for start, end in offsets[count:]]


def _control_tokens(tokenizer: Any, reasoning_tags: ReasoningTags) -> str:
    """Return a pattern of the tokenizer's special tokens, except the reasoning tags, which are part
    of answers.
    """
    tokens = {str(token) for token in tokenizer.all_special_tokens}
    tokens |= {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special}
    return any_of(tokens - set(reasoning_tags))


def any_of(tokens: Iterable[str]) -> str:
    """Return a pattern of tokens, of which the longest one matches. White space is no token, but
    plain text.
    """
    names = sorted(filter(str.strip, tokens), key=len, reverse=True)
    return "|".join(map(re.escape, names)) or "(?!)"
