"""An answer's text token by token, for showing which token came from where. Knows no model and no report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_HALF_A_CHARACTER = "\ufffd"


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


def guessed_by(tokens: int, accepted: Sequence[int]) -> list[int]:
    """Whose guess every token of an answer was: k for head k, 0 for the backbone's own.

    The first token comes from the prefill; a step then gives as many accepted tokens as `accepted` says, from heads
    1, 2, ..., and one of the backbone's own, unless the answer ends before it.
    """
    heads = [0]
    for length in accepted:
        heads += [*range(1, length + 1), 0]
    return (heads + [0] * tokens)[:tokens]
