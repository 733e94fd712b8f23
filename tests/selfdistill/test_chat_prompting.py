"""Prompts and answers of reasoning models: what is written is what training reads."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from medusa_train.data.conversation import Conversation, Message
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.selfdistill.answers import Request
from medusa_train.selfdistill.chat_prompting import ChatPrompting
from tests.chat_templates import QWEN3, R1

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


@pytest.mark.parametrize("special", [SPECIAL, [*SPECIAL, "<think>", "</think>"]], ids=["text", "special tokens"])
@pytest.mark.parametrize(
    ("template", "kwargs", "generated", "text"),
    [
        (QWEN3, {}, "<think>\nadd\n</think>\n\nfour", "<think>\nadd\n</think>\n\nfour"),
        (QWEN3, {"enable_thinking": False}, "four", "four"),
        (R1, {}, "add\n</think>\n\nfour", "<think>\nadd\n</think>\n\nfour"),
        (R1, {}, "  ", "  "),
    ],
    ids=["Qwen3", "Qwen3 without thinking", "R1", "blank"],
)
def test_an_answer_is_written_as_training_takes_it_apart(
    template: str, kwargs: dict[str, bool], generated: str, text: str, special: list[str]
) -> None:
    fast = tokenizer(template, special)
    prompting = ChatPrompting(fast, None, kwargs)
    messages = (Message("user", "2 + 2?"), Message("assistant", "<think>x</think>no"), Message("user", "sure?"))
    request = Request(messages, seed=0)
    assert "x</think>no" not in prompting.text(request)  # the template drops the reasoning of earlier turns
    end = fast.convert_tokens_to_ids("</s>" if template == R1 else "<|im_end|>")
    tokens = [*fast(generated, add_special_tokens=False)["input_ids"], end]
    answer = prompting.answer(request, 0, tokens, "eos")
    assert answer.text == text
    if text.strip():
        chat = Conversation("", (*messages, Message("assistant", answer.text)), "")
        assert ChatEncoder(fast, None, kwargs).encode(chat)[-1].ids == [*prompting.prompt(request), *tokens]
