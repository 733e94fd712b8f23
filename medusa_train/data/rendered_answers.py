r"""Answers as the model generates them: found in the rendered chat, by these names:

    prompt     <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n
    rendered   <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n
                   <think>\n\n</think>\n\nHello!<|im_end|>\n
                   [lead                 ][content][end   ]

`start` is the index in `rendered` at which the generated text starts, here that of `lead`.
`fixed_end` is the end of the prefix of `rendered` that does not depend on the answer.

Templates differ in what they render after the prompt:

    Llama 3.1, SmolLM2    content and end
    Mistral, Qwen3        a lead as well: a space, an empty reasoning
    gpt-oss               a lead, but earlier turns lack their analysis: `_answer_start`
    DeepSeek-V3           no `<|Assistant|>` after results of tools: `_answer_start`
    DeepSeek-R1           no `<think>`, with which the prompt ends: `_content_after`
    Qwen3, not thinking   another reasoning than the empty one in the prompt: `_content_after`
    Nemotron Nano 2       with calls, two turns: the content, then the calls (rejected)
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from os.path import commonprefix
from typing import NamedTuple

from medusa_train.data.chat_template import ChatTemplate, ChatTemplateError, placeholder
from medusa_train.data.conversation import Message
from medusa_train.data.marked_text import MARK, any_of


class RenderedAnswer(NamedTuple):
    """An answer as it is generated.

    For the question "Hi" and the answer "Hello!", the template of data/tiny gives

        prompt   <s><|user|>Hi</s><|assistant|>
        text     Hello!</s>
        end      </s>

    Attributes:
        prompt: the messages before it and the generation prompt, as rendered for decoding.
        text: what follows the prompt, up to and including the end token.
        end: the end token; '' if the answer reached the length limit.
    """

    prompt: str
    text: str
    end: str


def render_answer(template: ChatTemplate, messages: Sequence[Message]) -> RenderedAnswer | None:
    """Return the last message as the model generates it after the prompt; None if the template
    does not render all of its tool calls in the same turn.

    Raises ChatTemplateError if the template rejects the chat.
    """
    *history, message = messages
    # 1. Render the prompt and the chat. If the prompt closes the reasoning, an answer with calls
    # has none left to generate.
    prompt = template.render(history, prompt=True)
    if message.calls and template.closes_reasoning(prompt):
        message = replace(message, parts={"tool_calls": message.calls})
    rendered = template.render([*history, message])
    # 2. Find what the template writes before and after the content, whatever the content is.
    place = placeholder(len(history))
    outline = template.render([*history, Message("assistant", place)])
    before, found, after = outline.rpartition(place)
    if not found:
        raise ChatTemplateError("the chat template leaves out the content of answers")
    # 3. Find the generated text.
    fixed_end = _common_length(rendered, before)
    start = _answer_start(template, prompt, rendered, fixed_end)
    if message.calls:
        if start is None:
            turn = _turn_after_reasoning(template, prompt, rendered, fixed_end)
        else:
            turn = rendered[start:]
        return None if turn is None else _answer_with_calls(template, message, prompt, turn)
    # Neither the line break before the next turn nor a token that closes the whole text (Phi-3)
    # belongs to the answer.
    end = _up_to(template.added_tokens, after)[0]
    lead = turn = ""
    if start is not None:
        lead = before[start:]
        turn = rendered[start:]
    return _answer_without_calls(template, message, prompt, turn, lead, end)


def end_token(template: ChatTemplate) -> str | None:
    """Return the token that the template writes after the content of an answer: the one that
    answers are trained to end with.

    None if only plain text follows the content, or if the template rejects a chat of one question
    and one answer.
    """
    try:
        answer = render_answer(template, [Message("user", "Hello"), Message("assistant", "Hi")])
    except ChatTemplateError:
        return None
    end = answer.end if answer is not None else ""
    tokens = [token for token in template.added_tokens if token.strip() and end.endswith(token)]
    return max(tokens, key=len, default=None)


def _answer_without_calls(
    template: ChatTemplate, message: Message, prompt: str, turn: str, lead: str, end: str
) -> RenderedAnswer:
    """Return an answer that is only text: lead, content and end. If the template changes more of
    the content than white space around it, the content is as stored.

    Args:
        turn: the rendered chat from the answer on; '' if it does not continue the prompt.
    """
    content = _content_after(template, prompt, message)
    for words in (content, content.strip()):
        # Llama 3.1 renders " Hello!\n" as "Hello!".
        text = lead + words + end
        if turn.startswith(text):
            break
    else:
        # Qwen3 renders "<think>add</think> four" with line breaks around "add", and R1 only
        # " four". Qwen3's lead is left out, since the content has its own reasoning. A lead of
        # white space (Vicuna) stays.
        text = (lead if lead.isspace() else "") + content + end
    if not message.is_cut:
        return RenderedAnswer(prompt, text, end)
    # An answer that was cut off has no end token. If it was cut within the reasoning, its content
    # is all that was generated.
    opened, closed = map((prompt + content).rfind, template.reasoning_tags)
    text = content if content and opened > closed else text.removesuffix(end)
    return RenderedAnswer(prompt, text, "")


def _answer_with_calls(
    template: ChatTemplate, message: Message, prompt: str, turn: str
) -> RenderedAnswer | None:
    """Return an answer with tool calls: all of the rendered turn, up to a token at which decoding
    stops. None if the calls are in another turn.

        prompt     ...<|start|>assistant
        turn       <|channel|>commentary to=...<|call|>
    """
    text, end = _up_to(template.stops, turn)
    # Nemotron Nano 2 ends the turn before the calls: `text` is only the content.
    names = Counter(call["function"]["name"] for call in message.calls)
    if any(text.count(name) < count for name, count in names.items()):
        return None
    if message.is_cut:
        return RenderedAnswer(prompt, text.removesuffix(end), "")
    return RenderedAnswer(prompt, text, end)


# Where the generated text starts


def _answer_start(template: ChatTemplate, prompt: str, rendered: str, fixed_end: int) -> int | None:
    """Return the index in `rendered` at which the generated text starts: after the prompt, or after
    the header that the prompt ends with, if the template renders earlier turns differently in the
    whole chat. None if `rendered` has neither.

    gpt-oss drops the analysis next to calls once an answer without calls follows, so `rendered` has
    only the header:

        prompt     ...analysis<|message|>C<|end|>...R<|end|><|start|>assistant
        rendered   ...R<|end|><|start|>assistant<|channel|>final<|message|>A<|return|>
    """
    if rendered.startswith(prompt):
        return len(prompt)
    # The header begins with a token that no content contains, so not with a reasoning tag: R1's is
    # `<|Assistant|><think>\n`.
    tokens = _pattern(template.added_tokens - set(template.reasoning_tags))
    starts = [token.start() for token in tokens.finditer(prompt)]
    header = prompt[starts[-1] :] if starts else prompt
    headers = list(_pattern(frozenset([header])).finditer(rendered, 0, fixed_end + len(header)))
    if not headers:
        return None
    # If a turn ends after the last header, it is that of an earlier answer: DeepSeek-V3 writes none
    # between the results of tools and the answer.
    start = headers[-1].end()
    return None if _pattern(template.stops).search(rendered[start:fixed_end]) else start


# Reasoning that the prompt opens (DeepSeek-R1) or closes (Qwen3 with `enable_thinking: false`)


def _content_after(template: ChatTemplate, prompt: str, message: Message) -> str:
    r"""Return an answer's content without the part of its reasoning that the prompt already has, or
    with an empty reasoning if the prompt opens one that the content lacks.

        end of the prompt              content                             returned
        <think>\n\n</think>\n\n        <think>\nadd\n</think>\n\nfour      four
        <think>\n                      <think>\nadd\n</think>\n\nfour      add\n</think>\n\nfour
        <think>\n                      four                                \n</think>\n\nfour
    """
    content = message.content
    opening, closing = template.reasoning_tags
    if template.closes_reasoning(prompt):
        if closing not in content:
            return content
        return content.rpartition(closing)[2].lstrip("\n")
    opened = template.opened_reasoning(prompt)
    if opened and content.lstrip().startswith(opening):
        return content.lstrip()[len(opening) :].removeprefix(opened[len(opening) :])
    if opened and closing not in content and not message.is_cut:
        return f"\n{closing}\n\n{content}"
    return content


def _turn_after_reasoning(
    template: ChatTemplate, prompt: str, rendered: str, fixed_end: int
) -> str | None:
    r"""Return a turn with calls if `rendered` lacks the reasoning with which the prompt ends; None
    if the texts differ earlier.

    The prompt opens the reasoning, and a turn without reasoning gets an empty one:

        prompt     ...assistant\n<think>\n
        rendered   ...                                 the turn
        <think>T</think>C<tool_call>...                T</think>C<tool_call>...
        <think></think>C<tool_call>...                 \n</think>\n\nC<tool_call>...
        C<tool_call>...                                \n</think>\n\nC<tool_call>...

    Or it has a closed thought:

        prompt     ...<|turn>model\n<|channel>thought\n<channel|>
        rendered   ...<|turn>model\n<|tool_call>call:...
    """
    opened = template.opened_reasoning(prompt)
    before_opened = prompt.removesuffix(opened)
    if opened and rendered.startswith(before_opened):
        turn = rendered.removeprefix(before_opened)
        opening, closing = template.reasoning_tags
        if turn.startswith(opening):
            reasoning, _, turn = turn.removeprefix(opening).partition(closing)
            if reasoning.strip():
                return reasoning.lstrip("\n") + closing + turn
            turn = turn.lstrip("\n")
        return f"\n{closing}\n\n{turn}"
    start = _common_length(rendered, prompt)
    for token in _pattern(template.added_tokens).finditer(rendered):
        # Both texts may go on with the same characters of two tokens, here `<|`.
        if token.start() < start < token.end():
            start = token.start()
    if prompt[start:] in rendered or rendered[start:fixed_end].strip():
        return None
    return rendered[start:]


# Texts and tokens


@lru_cache(maxsize=8)
def _pattern(tokens: frozenset[str]) -> re.Pattern[str]:
    """Return a pattern that matches tokens which the template wrote. Tokens in contents follow a
    mark, and do not match.
    """
    return re.compile(f"(?<!{MARK})(?:{any_of(tokens)})")


def _up_to(tokens: frozenset[str], text: str) -> tuple[str, str]:
    """Return a text up to and including the first of the tokens, and that token. If the text has
    none of them, return it without trailing white space, and ''.
    """
    match = _pattern(tokens).search(text)
    return (text[: match.end()], match[0]) if match else (text.rstrip(), "")


def _common_length(left: str, right: str) -> int:
    """Return the length of the common prefix of two texts."""
    return len(commonprefix([left, right]))  # noqa: RUF071  (of texts, not of paths)
