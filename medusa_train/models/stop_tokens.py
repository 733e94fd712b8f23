"""At which tokens an answer ends: said here once, for training, decoding, baselines, servers and
exports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from medusa_train.data.tokenize import ChatEncoder
from medusa_train.errors import DataError, TargetModelError

GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True)
class StopTokens:
    """The tokens that end an answer, by who names them; each a tuple of ids, possibly empty.

    A base model's generation config names the end of a text, its ChatML tokenizer or template the
    end of a turn: an answer may end with either.

    Attributes:
        generation_config: the model's `eos_token_id`.
        tokenizer: its EOS token.
        template: the token that the chat template writes after an answer's content.
    """

    generation_config: tuple[int, ...] = ()
    tokenizer: tuple[int, ...] = ()
    template: tuple[int, ...] = ()

    @property
    def ids(self) -> tuple[int, ...]:
        """All of them, those of the generation config first."""
        return tuple(dict.fromkeys(self.generation_config + self.tokenizer + self.template))

    @property
    def added(self) -> tuple[int, ...]:
        """Those that the generation config does not name."""
        return tuple(token for token in self.ids if token not in self.generation_config)

    def describe(self, tokenizer: Any) -> str | None:
        """Say at which tokens answers end, and who names them; None if it is the generation config
        alone.
        """
        if not self.added:
            return None
        sources: Mapping[str, tuple[int, ...]] = {
            GENERATION_CONFIG: self.generation_config,
            "the tokenizer's EOS": self.tokenizer,
            "the chat template": self.template,
        }
        parts = []
        for token in self.ids:
            named_by = [name for name, ids in sources.items() if token in ids]
            text = tokenizer.convert_ids_to_tokens(token)
            parts.append(f"{text} ({', '.join(named_by)})")
        return f"answers end at {' or '.join(parts)}"


def find_stop_tokens(
    generation_config: Any, tokenizer: Any, vocab_size: int, chat: ChatEncoder | None = None
) -> StopTokens:
    """Collect the tokens that end an answer.

    Args:
        generation_config: the model's, or None.
        vocab_size: V; a token without an embedding is never generated, so it ends nothing.
        chat: with the template of the chats; None: raw text only.
    """
    eos = getattr(generation_config, "eos_token_id", None)
    of_tokenizer = getattr(tokenizer, "eos_token_id", None)
    of_template = None if chat is None else chat.end_token_id()
    return StopTokens(
        _with_embedding(eos, vocab_size),
        _with_embedding(of_tokenizer, vocab_size),
        _with_embedding(of_template, vocab_size),
    )


def chat_encoder_or_none(
    tokenizer: Any, template: str | None, template_kwargs: Mapping[str, Any] | None
) -> ChatEncoder | None:
    """Return the encoder of a model's chats; None for a model that only continues raw text: its
    tokenizer has no chat template, or none that it can encode.

    Whoever sends it a chat gets the reason. Raises ConfigError for a named template that cannot be
    read.
    """
    try:
        return ChatEncoder(tokenizer, template, template_kwargs)
    except DataError:
        return None


def _with_embedding(tokens: Any, vocab_size: int) -> tuple[int, ...]:
    """Return ids as a tuple: none, one, or a list; those outside of [0, V) are left out.

    Raises TargetModelError for anything else.
    """
    if tokens is None:
        return ()
    ids = tokens if isinstance(tokens, (list, tuple)) else [tokens]
    for token in ids:
        if type(token) is not int:
            raise TargetModelError(
                "generation_config.json: eos_token_id must be the id of a token, or a list of ids;"
                f" it is {tokens!r}"
            )
    return tuple(token for token in ids if 0 <= token < vocab_size)
