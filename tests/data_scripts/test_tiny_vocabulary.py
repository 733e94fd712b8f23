"""The tiny backbone's tokenizer and chat template."""

from pathlib import Path

import vocabulary
from tiny_samples import MODULE
from transformers import AutoTokenizer


def test_digits_stand_alone_and_text_survives(directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer("12 and 345", add_special_tokens=False).input_ids
    assert [tokenizer.decode([i]) for i in ids if tokenizer.decode([i]).strip().isdigit()] == list("12345")
    for text in (MODULE, " leading", "trailing \n\n", "ünïcode → 漢字\t"):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text
    assert tokenizer("x").input_ids[0] == tokenizer.bos_token_id


def test_the_generation_mask_is_the_answers_and_their_end(directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Add 1 and 2."},
        {"role": "assistant", "content": " def f():\n    return 3\n"},
        {"role": "user", "content": " again "},
        {"role": "assistant", "content": "3"},
    ]
    rendered = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = rendered["input_ids"], rendered["assistant_masks"]
    assert ids.count(tokenizer.bos_token_id) == 1
    chosen = [i for i, marked in zip(ids, mask, strict=True) if marked]
    assert tokenizer.decode(chosen) == " def f():\n    return 3\n</s>3</s>"
    turns = [(messages[1]["content"], messages[2]["content"]), (messages[3]["content"], messages[4]["content"])]
    (ours,) = vocabulary.encode_chats(tokenizer.backend_tokenizer, [turns])
    plain = tokenizer.apply_chat_template(messages[1:], return_dict=True, return_assistant_tokens_mask=True)
    assert ours.ids == plain["input_ids"]
    assert [int(marked) for marked in ours.assistant] == plain["assistant_masks"]
    prompt = tokenizer.apply_chat_template(messages[1:2], tokenize=False, add_generation_prompt=True)
    assert prompt == "<s><|user|>Add 1 and 2.</s><|assistant|>"
    start = tokenizer(prompt, add_special_tokens=False).input_ids
    assert start == ours.ids[: len(start)]
    assert ours.assistant[len(start) - 1 : len(start) + 1] == [False, True]
