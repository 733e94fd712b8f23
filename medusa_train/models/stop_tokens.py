"""Find the tokens at which an answer ends, for training, decoding, baselines, servers and exports
alike.
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
    """The tokens that end an answer, by their source; each a tuple of ids, possibly empty.

    In a base model, the generation config may name the end of a text while its ChatML tokenizer or
    template names the end of a turn. An answer may end with either.

    Attributes:
        generation_config: `eos_token_id` of the model's generation config.
        tokenizer: the tokenizer's EOS token.
        template: the token that the chat template writes after the content of an answer.
    """

    generation_config: tuple[int, ...] = ()
    tokenizer: tuple[int, ...] = ()
    template: tuple[int, ...] = ()

    @property
    def ids(self) -> tuple[int, ...]:
        """All stop tokens without duplicates, those of the generation config first."""
        return tuple(dict.fromkeys(self.generation_config + self.tokenizer + self.template))

    @property
    def added(self) -> tuple[int, ...]:
        """The stop tokens that are not in the generation config."""
        return tuple(token for token in self.ids if token not in self.generation_config)

    def describe(self, tokenizer: Any) -> str | None:
        """Describe at which tokens answers end, with their sources; None if all of them are in the
        generation config.
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
        generation_config: the model's generation config, or None.
        tokenizer: the model's tokenizer.
        vocab_size: V. Tokens without an embedding are never generated, so they are left out.
        chat: encoder with the chat template; None: raw text only.
    """
    eos = getattr(generation_config, "eos_token_id", None)
    tokenizer_eos = getattr(tokenizer, "eos_token_id", None)
    template_end = None if chat is None else chat.end_token_id()
    return StopTokens(
        _with_embedding(eos, vocab_size),
        _with_embedding(tokenizer_eos, vocab_size),
        _with_embedding(template_end, vocab_size),
    )


def chat_encoder_or_none(
    tokenizer: Any, template: str | None, template_kwargs: Mapping[str, Any] | None
) -> ChatEncoder | None:
    """Return the encoder of a model's chats; None for a model that only continues raw text: its
    tokenizer has no chat template, or its template cannot be used.

    The reason is reported later, if a chat is encoded.

    Raises:
        ConfigError: a template that was asked for by name cannot be read.
    """
    try:
        return ChatEncoder(tokenizer, template, template_kwargs)
    except DataError:
        return None


def _with_embedding(tokens: Any, vocab_size: int) -> tuple[int, ...]:
    """Return `tokens` (None, one id, or a list of ids) as a tuple without ids outside [0, V).

    Raises:
        TargetModelError: `tokens` is something else.
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
