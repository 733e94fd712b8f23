"""What a chat is: messages in a legal order; knows nothing of file formats, tokens or templates."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat."""

    role: Role
    content: str

    def as_dict(self) -> dict[str, str]:
        """Return the message as chat templates read it."""
        return {"role": self.role, "content": self.content}


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat: at most one leading system message, then user and assistant in turn, the user first.

    It may end with a user's turn (a prompt still to be answered). It may also be a seed: one or more turns of
    the user's without any answer.
    `source` says where it was read, as `file:line`, for messages to people.
    """

    id: str
    messages: tuple[Message, ...]
    source: str

    @property
    def content_key(self) -> str:
        """A digest of the messages alone: equal chats share it, wherever they stand and whatever their id."""
        digest = hashlib.sha256()
        for message in self.messages:
            for part in (message.role, message.content):
                data = part.encode("utf-8")
                digest.update(len(data).to_bytes(8, "big"))
                digest.update(data)
        return digest.hexdigest()

    def first(self, count: int) -> Conversation:
        """Return the same chat with its first `count` messages only."""
        return Conversation(self.id, self.messages[:count], self.source)


def problem_with(messages: tuple[Message, ...]) -> str | None:
    """Say what makes `messages` no legal chat, or return None if nothing does.

    Turns are counted from 1 in what is said, the system message included.
    """
    expected: Role = "user"
    is_seed = all(message.role != "assistant" for message in messages)
    for number, message in enumerate(messages, start=1):
        if not message.content.strip():
            return f"turn {number} ({message.role}) is empty"
        if not _encodes(message.content):
            return f"turn {number} ({message.role}) holds half of a surrogate pair, which is not text"
        if message.role == "system":
            if number > 1:
                return f"turn {number} is a system message; only the first may be"
            continue
        if message.role != expected:
            return f"turn {number} is from the {message.role} where the {expected}'s was expected"
        if not is_seed:
            expected = "assistant" if expected == "user" else "user"
    if not any(message.role == "user" for message in messages):
        return "it has no turn of the user's"
    return None


def _encodes(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
