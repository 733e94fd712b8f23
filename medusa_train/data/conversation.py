"""Chats as messages, the rules for a valid chat, and detection of looping text."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
#: The tags before and after the reasoning part of an answer.
ReasoningTags = tuple[str, str]
REASONING_TAGS: ReasoningTags = ("<think>", "</think>")

#: Share of looping answers above which the user is warned.
NOTABLE_LOOPING = 0.05

SURROGATES = re.compile("[\ud800-\udfff]")
# Words, runs of other symbols (a ruled line is one), and single characters in scripts without
# spaces.
_WORDS = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|\w+|[^\w\s]+")
_FENCE = "```"  # around code in Markdown
_LOOP_LINES = 40  # longest repeated block of code that is detected, in lines


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat.

    Attributes:
        token_ids: the tokens of a generated answer, without the end token, if its content tokenizes
            to other tokens.
        is_cut: a generated answer reached the length limit, so it has no end token.
        is_target: whether the message is trained; None: its role decides.
        parts: further keys for the template. An answer may have `tool_calls` and
            `reasoning_content`, the result of a tool `tool_call_id` and `name`.
    """

    role: Role
    content: str
    token_ids: tuple[int, ...] | None = None
    is_cut: bool = False
    is_target: bool | None = None
    parts: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def as_dict(self) -> dict[str, Any]:
        """Return the message in the format of chat templates: `role`, `content` and its parts."""
        return {"role": self.role, "content": self.content, **self.parts}

    @property
    def calls(self) -> Sequence[Mapping[str, Any]]:
        """The tool calls of an answer."""
        return self.parts.get("tool_calls", ())


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat: at most one leading system message, then alternating user and assistant messages,
    user first. An answer with tool calls is followed by one result for each call, then by another
    answer.

    The last message may be the user's (an unanswered prompt). A chat without any answer may have
    several user messages in a row (prompts for self-distillation).

    Attributes:
        id: the record's id, or a digest of its content.
        messages: the messages in order.
        source: where it was read, as `file:line`, for error messages.
        variables: further variables of the chat template, such as `tools`. They are JSON text, so
            that chats can be compared and hashed.
    """

    id: str
    messages: tuple[Message, ...]
    source: str
    variables: str = ""

    @property
    def content_key(self) -> str:
        """SHA-256 of roles, contents, parts and variables. Equal chats have the same key, since id
        and source are left out.
        """
        digest = hashlib.sha256()
        for message in self.messages:
            parts = [json.dumps(message.parts, sort_keys=True)] if message.parts else []
            for part in (message.role, message.content, *parts):
                data = part.encode("utf-8")
                digest.update(len(data).to_bytes(8, "big"))
                digest.update(data)
        digest.update(self.variables.encode("utf-8"))
        return digest.hexdigest()

    @property
    def first_prompt(self) -> Conversation:
        """The first user turn, with the system message before it."""
        roles = [message.role for message in self.messages]
        return self.first(roles.index("user") + 1)

    def first(self, count: int) -> Conversation:
        """Return the chat truncated to its first `count` messages."""
        return replace(self, messages=self.messages[:count])


def problem_with(messages: tuple[Message, ...]) -> str | None:
    """Return why `messages` are not a valid `Conversation`, or None if they are.

    Messages are numbered from 1 in the text, the system message included.
    """
    expected: tuple[Role, ...] = ("user",)
    has_answers = any(message.role == "assistant" for message in messages)
    open_calls = 0  # calls whose results have not come yet
    for number, message in enumerate(messages, start=1):
        if not (message.content.strip() or message.calls or message.role == "tool"):
            return f"turn {number} ({message.role}) is empty"
        parts = json.dumps(message.parts, ensure_ascii=False) if message.parts else ""
        if SURROGATES.search(message.content + parts):
            return (
                f"turn {number} ({message.role}) contains a lone surrogate, which UTF-8 cannot"
                " encode"
            )
        if message.role == "system":
            if number > 1:
                return f"turn {number} is a system message; only the first may be"
            continue
        if message.role not in expected:
            return f"turn {number} has the role {message.role}, expected {' or '.join(expected)}"
        if message.role == "assistant":
            open_calls = len(message.calls)
            expected = ("tool",) if open_calls else ("user", "tool")
        elif message.role == "tool":
            open_calls -= 1
            # an answer without parsed calls may have several results as well
            expected = ("assistant",) if not open_calls else ("tool",)
            if open_calls < 0:
                expected = ("tool", "assistant")
        elif has_answers:
            expected = ("assistant",)
    if not any(message.role == "user" for message in messages):
        return "no user turn"
    return None


def join_reasoning(reasoning: str, content: str, tags: ReasoningTags = REASONING_TAGS) -> str:
    """Return reasoning and answer as one text, as a model generates it; '' if the answer is blank.

    Servers split the two, and some strip the line breaks around the tags. Missing line breaks are
    added the way Qwen3 and DeepSeek-R1 write them.
    """
    if not content.strip():
        return ""
    if not reasoning.strip():
        return content
    before = "" if reasoning.startswith("\n") else "\n"
    after = "" if reasoning.endswith("\n") else "\n"
    between = "" if content.startswith("\n") else "\n\n"
    return f"{tags[0]}{before}{reasoning}{after}{tags[1]}{between}{content}"


def without_reasoning(text: str) -> str:
    """Return what follows the reasoning part of a generated text; '' if the reasoning was cut off.

    A text without tags is returned unchanged.
    """
    opening, closing = REASONING_TAGS
    if closing in text:
        return text.rpartition(closing)[2].lstrip("\n")
    return "" if text.lstrip().startswith(opening) else text


def is_looping(text: str | Sequence[Hashable]) -> bool:
    """Return whether some 8-gram of words and symbols, or of tokens, occurs three times.
    Occurrences may overlap.

    An n-gram without letters must occur 12 times, so that ruled tables and lists of zeros do not
    count as loops. So must an n-gram in fenced code, since tests and records repeat their form. In
    code, a block of lines that occurs three times in a row also counts as a loop.
    """
    if not isinstance(text, str):
        return max(_ngrams(text).values(), default=0) >= 3
    parts = text.split(_FENCE)
    code = parts[1::2]  # an open fence reaches to the end
    for ngram, count in _ngrams(_WORDS.findall(" ".join(parts[::2]))).items():
        if count >= (3 if any(map(str.isalpha, "".join(ngram))) else 12):
            return True
    return any(_code_is_looping(block) for block in code)


def _code_is_looping(code: str) -> bool:
    """Return whether fenced code repeats a block of lines three times in a row, or an 8-gram 12
    times.
    """
    lines = [line.strip() for line in code.splitlines() if line.strip()]
    for size in range(1, min(_LOOP_LINES, len(lines) // 3) + 1):
        for start in range(len(lines) - 3 * size + 1):
            block = lines[start : start + size]
            has_letters = any(map(str.isalpha, "".join(block)))
            if has_letters and lines[start + size : start + 3 * size] == block * 2:
                return True
    return max(_ngrams(_WORDS.findall(code)).values(), default=0) >= 12


def _ngrams(tokens: Sequence[Hashable]) -> Counter[tuple[Any, ...]]:
    """Count the 8-grams of tokens."""
    return Counter(zip(*(tokens[start:] for start in range(8)), strict=False))
