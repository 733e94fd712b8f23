"""Tokens of rendered chats. Control tokens in a content, such as `<|im_end|>` in a text on
chat templates, are marked before the chat is rendered, and tokenized as plain text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from medusa_train.data.conversation import ReasoningTags

Span = tuple[int, int]
#: Stands before a control token in a content, and before the same character in a content. A private
#: use character, which templates do not contain.
MARK = "\ue002"
_MAX_KNOWN = 256


class _Piece(NamedTuple):
    """A part of a text that is tokenized on its own.

    Attributes:
        is_plain: it is a control token that is to be split as any other text.
        follows: other text comes before it that is tokenized elsewhere.
    """

    text: str
    is_plain: bool = False
    follows: bool = False


class MarkedTextTokenizer:
    """Tokenizes texts with marks, without special tokens of its own.

    Texts are tokenized in pieces, each of which begins with a control token. A tokenizer never merges
    a control token with other text, so the pieces have the tokens of the whole text. The prompts of a
    chat share most pieces, which are tokenized once.
    """

    def __init__(self, tokenizer: Any, reasoning_tags: ReasoningTags) -> None:
        self._tokenizer = tokenizer
        control = _control_tokens(tokenizer, reasoning_tags)
        self._to_mark = re.compile(f"{control}|{MARK}")
        self._borders = re.compile(f"{MARK}({control}|{MARK})|{control}")
        self._known: dict[_Piece, tuple[list[int], list[Span]]] = {}

    def mark(self, content: str) -> str:
        """Mark the control tokens of a content."""
        return self._to_mark.sub(MARK + r"\g<0>", content)

    def unmark(self, text: str) -> str:
        """Return the text without marks."""
        return "".join(piece.text for piece in self._pieces(text))

    def ids(self, text: str, follows: bool = False) -> list[int]:
        """Return the tokens of a text with marks.

        Args:
            follows: other text comes before it.
        """
        found: list[int] = []
        for piece in self._pieces(text, follows):
            found += self._tokenize(piece)[0]
        return found

    def overlaps(self, text: str, spans: Sequence[Span]) -> list[bool]:
        """Return for each token of a text with marks whether it overlaps any of the spans of
        characters [start, end), which are sorted and disjoint.
        """
        # 1. The characters of each token, and the spans, in the text without marks.
        offsets: list[Span] = []
        position = 0
        for piece in self._pieces(text):
            of_piece = self._tokenize(piece)[1]
            offsets += [(position + start, position + end) for start, end in of_piece]
            position += len(piece.text)
        plain = []
        for start, end in spans:
            plain.append((len(self.unmark(text[:start])), len(self.unmark(text[:end]))))
        # 2. Tokens and spans side by side.
        inside = []
        current = 0  # the first span that may still overlap
        for start, end in offsets:
            # Many tokenizers exclude spaces from offsets: a token of one space has the empty span
            # after it.
            first = start if start < end else end - 1
            while current < len(plain) and plain[current][1] <= first:
                current += 1
            inside.append(current < len(plain) and plain[current][0] < end)
        return inside

    def _pieces(self, text: str, follows: bool = False) -> list[_Piece]:
        """Split a text with marks before every control token, and around those that are plain."""
        pieces = []
        piece = _Piece("", follows=follows)
        position = 0
        for found in self._borders.finditer(text):
            piece = piece._replace(text=piece.text + text[position : found.start()])
            position = found.end()
            marked = found[1]
            if marked == MARK:
                piece = piece._replace(text=piece.text + MARK)
                continue
            pieces.append(piece)
            if marked is None:
                piece = _Piece(found[0])
            else:
                pieces.append(_Piece(marked, is_plain=True, follows=True))
                piece = _Piece("", follows=True)
        pieces.append(piece._replace(text=piece.text + text[position:]))
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
    """Return a pattern of the tokenizer's special tokens; the tags of the reasoning, which are part
    of answers, are none.
    """
    tokens = {str(token) for token in tokenizer.all_special_tokens}
    tokens |= {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special}
    tokens -= set(reasoning_tags)
    names = [token for token in tokens if token.strip()]  # white space is text, too
    names.sort(key=len, reverse=True)
    return "|".join(map(re.escape, names)) or "(?!)"
