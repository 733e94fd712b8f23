"""Prompts and answers of reasoning models: what is written is what training reads."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from medusa_train.data.conversation import Conversation, Message
from medusa_train.data.records import parse_tool_chat
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.selfdistill.chat_prompting import ChatPrompting
from medusa_train.selfdistill.replay import ChatRequest
from tests.chat_templates import QWEN3, R1, TOOLS_CHATML, TOOLS_HEADLESS
from tests.tool_chats import CHAT

VICUNA = (
    "{% for m in messages %}{{ m.content + ' A:' if m.role == 'user' else ' ' + m.content + ' </s>'"
    " }}{% endfor %}"
)
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|User|>", "<|Assistant|>"]


def tokenizer(template: str, special: list[str]) -> PreTrainedTokenizerFast:
    """One token per character, and the special ones."""
    characters = {chr(code): number for number, code in enumerate([10, *range(32, 127)])}
    backend = Tokenizer(models.WordLevel(characters, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    fast.add_special_tokens({"additional_special_tokens": special[2:]})
    fast.chat_template = template
    return fast


@pytest.mark.parametrize(
    "special", [SPECIAL, [*SPECIAL, "<think>", "</think>"]], ids=["text", "special tokens"]
)
@pytest.mark.parametrize(
    ("template", "kwargs", "generated", "text"),
    [
        (QWEN3, {}, "<think>\nadd\n</think>\n\nfour", "<think>\nadd\n</think>\n\nfour"),
        (QWEN3, {"enable_thinking": False}, "four", "four"),
        (R1, {}, "add\n</think>\n\nfour", "<think>\nadd\n</think>\n\nfour"),
        (R1, {}, "  ", "  "),
        (QWEN3, {}, "<think>\nadd", "<think>\nadd"),
        (R1, {}, "add", "<think>\nadd"),
        (VICUNA, {}, "four", "four"),
        (VICUNA, {}, " four", " four"),
    ],
    ids=[
        "Qwen3",
        "Qwen3 without thinking",
        "R1",
        "blank",
        "Qwen3, cut",
        "R1, cut",
        "Vicuna",
        "Vicuna, space",
    ],
)
def test_an_answer_is_written_as_training_takes_it_apart(
    template: str, kwargs: dict[str, bool], generated: str, text: str, special: list[str]
) -> None:
    fast = tokenizer(template, special)
    prompting = ChatPrompting(fast, None, kwargs)
    messages = (
        Message("user", "2 + 2?"),
        Message("assistant", "<think>x</think>no"),
        Message("user", "sure?"),
    )
    request = ChatRequest(messages, seed=0)
    # others drop earlier reasoning
    prompt = fast.decode(prompting.prompt(request))
    assert ("x</think>no" in prompt) == (template == VICUNA)
    is_cut = generated.endswith("add")
    end = (
        []
        if is_cut
        else [fast.convert_tokens_to_ids("<|im_end|>" if template == QWEN3 else "</s>")]
    )
    tokens = [*fast(generated, add_special_tokens=False)["input_ids"], *end]
    answer = prompting.answer(request, 0, tokens, "length" if is_cut else "eos")
    assert answer.text == text
    # which puts spaces around it that were not generated
    assert (answer.token_ids is None) == (template != VICUNA)
    if text.strip():
        chat = Conversation(
            "", (*messages, Message("assistant", answer.text, answer.token_ids, is_cut=is_cut)), ""
        )
        assert ChatEncoder(fast, None, kwargs).encode(chat)[-1].ids == [
            *prompting.prompt(request),
            *tokens,
        ]


def test_a_call_is_trained_as_the_tokens_that_were_generated() -> None:
    fast = tokenizer(TOOLS_CHATML, [*SPECIAL, "<tool_call>", "</tool_call>"])
    chat = parse_tool_chat(CHAT)
    assert chat is not None
    request = ChatRequest(chat.messages[:4], 0, variables=chat.variables)
    prompting = ChatPrompting(fast)
    assert '<tools>{"type": "function"' in fast.decode(prompting.prompt(request))
    text = '<tool_call>\n{"name": "find", "arguments": {"n": 7}}\n</tool_call><|im_end|>'
    tokens = fast(text, add_special_tokens=False)["input_ids"]
    answer = prompting.answer(request, 0, tokens, "eos")
    message = Message("assistant", answer.text, answer.token_ids)
    trained = Conversation("", (*request.messages, message), "", chat.variables)
    row = ChatEncoder(fast).encode(trained)[-1]
    assert row.ids == [*prompting.prompt(request), *tokens]


def test_an_answer_that_training_would_leave_out_is_refused() -> None:
    fast = tokenizer(TOOLS_HEADLESS, SPECIAL)
    chat = parse_tool_chat(CHAT)
    assert chat is not None
    answer = ChatPrompting(fast).answer(ChatRequest(chat.messages[1:6], 0), 0, [40, 41], "length")
    assert answer.finish_reason == "refused"


TALK = (
    "{% for m in messages %}{{ 'USER: ' + m.content + ' BOT:' if m.role == 'user' else ' ' +"
    " m.content + '</s>' }}{% endfor %}"
)


def test_a_question_begins_with_its_space_and_ends_before_the_next_header() -> None:
    fast = tokenizer(TALK, SPECIAL)
    prompting = ChatPrompting(fast)
    request = ChatRequest((Message("user", "Hi."), Message("assistant", "Yes?")), 0, speaker="user")
    # the model writes a word with the space before it, as in its training data
    assert fast.decode(prompting.prompt(request)) == "USER: Hi. BOT: Yes?</s>USER:"
    tokens = fast(" Why? BOT: x", add_special_tokens=False)["input_ids"]
    answer = prompting.answer(request, 9, tokens, "length")
    assert (answer.text, answer.finish_reason) == ("Why?", "stop")
    cut = prompting.answer(request, 9, tokens[:4], "length")
    assert (cut.text, cut.finish_reason) == ("Why", "length")
