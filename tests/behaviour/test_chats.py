"""Ids and loss masks of chats by the templates of model families, against texts that are written out
here: supervised text is in double brackets.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.behaviour.seams import encode
from tests.behaviour.world import SHAPE, build_tokenizer, render, write_lines
from tests.chat_templates import GEMMA, LLAMA_3_1, MISTRAL, QWEN3, R1, SMOLLM2

SPECIAL = [
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "<|User|>", "<|Assistant|>", "[INST]", "[/INST]"),
    *("<<SYS>>", "<</SYS>>", "<|python_tag|>", "<|fim_prefix|>"),
]
Messages = Sequence[Mapping[str, Any]]
Encode = Callable[..., list[tuple[list[int], list[bool]]]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's files without weights, and a tokenizer with the control tokens of all families."""
    where = tmp_path_factory.mktemp("chats") / "model"
    tokenizer = build_tokenizer(template=None)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.save_pretrained(where)
    config = {
        **SHAPE,
        "vocab_size": 400,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
    }
    config["max_position_embeddings"] = 4096
    (where / "config.json").write_text(json.dumps(config))
    return where


@pytest.fixture(scope="module")
def tokens(home: Path) -> Any:
    return AutoTokenizer.from_pretrained(home)


@pytest.fixture
def rows(home: Path, tmp_path: Path) -> Encode:
    """Return ids and masks of records by a template's source or name."""

    def encode_records(template: str | None, *records: Any, **keys: Any) -> Any:
        data = write_lines(tmp_path / "chats.jsonl", records)
        if template is not None and "{" in template:
            path = tmp_path / "template.jinja"
            path.write_text(template, encoding="utf-8")
            template = str(path)
        given = {"base_model": str(home), "datasets": [{"path": str(data)}], "sequence_len": 2048}
        return encode(**{**given, "chat_template": template, **keys})

    return encode_records


def marked(text: str, tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Tokenize a text piece by piece, of which those in double brackets are supervised."""
    ids: list[int] = []
    supervised: list[bool] = []
    for piece in re.split(r"(\[\[.*?\]\](?!\]))", text, flags=re.S):
        is_answer = piece.startswith("[[") and piece.endswith("]]")
        inner = piece[2:-2] if is_answer else piece
        found = tokenizer(inner, add_special_tokens=False)["input_ids"]
        ids += found
        supervised += [is_answer] * len(found)
    return ids, supervised


def chat(*turns: str, system: str | None = None) -> list[dict[str, str]]:
    messages = [] if system is None else [{"role": "system", "content": system}]
    for number, text in enumerate(turns):
        messages.append({"role": ("user", "assistant")[number % 2], "content": text})
    return messages


# Each family's whole text, without Jinja


def _vicuna(messages: Messages) -> str:
    system = (
        "A chat between a curious user and an artificial intelligence assistant. "
        "The assistant gives helpful, detailed, and polite answers to the user's questions."
    )
    if messages[0]["role"] == "system":
        system, messages = messages[0]["content"], messages[1:]
    text = f"<s>{system} "
    for m in messages:
        said = m["content"]
        text += f"USER: {said}" if m["role"] == "user" else f" ASSISTANT:[[ {said}</s>]]"
    return text


def _zephyr(messages: Messages) -> str:
    text = ""
    for m in messages:
        said = f"{m['content']}</s>"
        text += f"<|{m['role']}|>\n" + (f"[[{said}]]" if m["role"] == "assistant" else said) + "\n"
    return text.removesuffix("\n")


def _chatml(messages: Messages, default: str = "") -> str:
    text = ""
    if default and messages[0]["role"] != "system":
        text = f"<|im_start|>system\n{default}<|im_end|>\n"
    for m in messages:
        said = f"{m['content']}<|im_end|>"
        said = f"[[{said}]]" if m["role"] == "assistant" else said
        text += f"<|im_start|>{m['role']}\n{said}\n"
    return text.removesuffix("\n")


def _llama_2(messages: Messages) -> str:
    system = ""
    if messages[0]["role"] == "system":
        system, messages = f"<<SYS>>\n{messages[0]['content']}\n<</SYS>>\n\n", messages[1:]
    text = ""
    for m in messages:
        if m["role"] == "user":
            text += f"<s>[INST] {system}{m['content']} [/INST]"
            system = ""
        else:
            text += f"[[ {m['content']} </s>]]"
    return text


def _llama_3(messages: Messages) -> str:
    text = "<s>"
    for m in messages:
        said = f"{m['content']}<|eot_id|>"
        said = f"[[{said}]]" if m["role"] == "assistant" else said
        text += f"<|start_header_id|>{m['role']}<|end_header_id|>\n\n{said}"
    return text


def _llama_3_1(messages: Messages) -> str:
    system = ""
    if messages[0]["role"] == "system":
        system, messages = messages[0]["content"], messages[1:]
    head = (
        "<s><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n\n"
    )
    return head + f"{system}<|eot_id|>" + _llama_3(messages).removeprefix("<s>")


def _mistral(messages: Messages) -> str:
    system = ""
    if messages[0]["role"] == "system":
        system, messages = messages[0]["content"] + "\n\n", messages[1:]
    text = "<s>"
    for m in messages:
        if m["role"] == "user":
            text += f"[INST] {system}{m['content']} [/INST]"
            system = ""
        else:
            text += f"[[ {m['content']}</s>]]"
    return text


def _gemma(messages: Messages) -> str:
    text = "<s>"
    for m in messages:
        said = f"{m['content']}<end_of_turn>"
        if m["role"] == "assistant":
            text += f"<start_of_turn>model\n[[{said}]]\n"
        else:
            text += f"<start_of_turn>{m['role']}\n{said}\n"
    return text.removesuffix("\n")


FAMILIES: dict[str, tuple[str, Callable[[Messages], str]]] = {
    "vicuna_v1.1": ("vicuna_v1.1", _vicuna),
    "zephyr": ("zephyr", _zephyr),
    "chatml": ("chatml", _chatml),
    "llama-2": ("llama-2", _llama_2),
    "llama-3": ("llama-3", _llama_3),
    "mistral": ("mistral", _mistral),
    "Llama 3.1": (LLAMA_3_1, _llama_3_1),
    "Gemma": (GEMMA, _gemma),
    "SmolLM2": (SMOLLM2, lambda messages: _chatml(messages, "You are SmolLM.")),
}


def many_chats(system: bool) -> list[list[dict[str, str]]]:
    """Chats of one to three turns, of words, digits, punctuation, line breaks and other scripts."""
    draw = random.Random(3)
    parts = ["one", "two", " ", "é", "猫", "3.5", "x = {y}", "\n", "\n\n", "!?", "['a']", "🙂"]
    chats = []
    for number in range(12):
        turns = []
        for _ in range(2 * draw.randint(1, 3)):
            middle = "".join(draw.choice(parts) for _ in range(draw.randint(0, 6)))
            turns.append(f"{draw.choice('abc')}{middle}{draw.choice('xyz')}")
        chats.append(chat(*turns, system="Be brief." if system and number % 2 else None))
    return chats


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_and_masks_of_many_chats(family: str, rows: Encode, tokens: Any) -> None:
    source, reference = FAMILIES[family]
    chats = many_chats(system=family != "Gemma")
    found = rows(source, *({"messages": messages} for messages in chats))
    assert len(found) == len(chats)
    for messages, row in zip(chats, found, strict=True):
        assert row == marked(reference(messages), tokens)


# Reasoning

FIRST, SECOND = "<think>\nadd\n</think>\n\nfour", "<think>\nadd one\n</think>\n\nfive"
SAID: dict[str, tuple[str, Any, list[str], dict[str, Any]]] = {
    "qwen3 drops earlier reasoning: a row for each answer": (
        QWEN3,
        chat("A", FIRST, "B", SECOND),
        [
            f"<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\n[[{FIRST}<|im_end|>]]",
            "<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\nfour<|im_end|>\n"
            f"<|im_start|>user\nB<|im_end|>\n<|im_start|>assistant\n[[{SECOND}<|im_end|>]]",
        ],
        {},
    ),
    "qwen3 writes an empty reasoning before an answer without one": (
        QWEN3,
        chat("A", "four", "B", "five"),
        [
            "<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\n"
            "[[<think>\n\n</think>\n\nfour<|im_end|>]]",
            "<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\nfour<|im_end|>\n"
            "<|im_start|>user\nB<|im_end|>\n<|im_start|>assistant\n"
            "[[<think>\n\n</think>\n\nfive<|im_end|>]]",
        ],
        {},
    ),
    "reasoning beside the content": (
        QWEN3,
        [
            {"role": "user", "content": "A"},
            {"role": "assistant", "content": "four", "reasoning_content": "add"},
        ],
        [f"<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\n[[{FIRST}<|im_end|>]]"],
        {},
    ),
    "an empty reasoning in the prompt takes the answer's place": (
        QWEN3,
        chat("A", FIRST),
        [
            "<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
            "[[four<|im_end|>]]"
        ],
        {"chat_template_kwargs": {"enable_thinking": False}},
    ),
    "a tag that the prompt opens is not repeated": (
        R1,
        chat("A", FIRST, "B", SECOND),
        [
            "<s><|User|>A<|Assistant|><think>\n[[add\n</think>\n\nfour</s>]]",
            "<s><|User|>A<|Assistant|>\n\nfour</s><|User|>B<|Assistant|><think>\n"
            "[[add one\n</think>\n\nfive</s>]]",
        ],
        {},
    ),
    "an answer without reasoning closes what the prompt opens": (
        R1,
        chat("A", "four"),
        ["<s><|User|>A<|Assistant|><think>\n[[\n</think>\n\nfour</s>]]"],
        {},
    ),
    "other tags": (
        R1.replace("think>", "why>"),
        chat("A", FIRST.replace("think>", "why>")),
        ["<s><|User|>A<|Assistant|><why>\n[[add\n</why>\n\nfour</s>]]"],
        {"reasoning_tags": ["<why>", "</why>"]},
    ),
    "a template without a generation prompt": (
        MISTRAL,
        chat("A", "four", "B", "five"),
        ["<s>[INST] A[/INST][[ four</s>]][INST] B[/INST][[ five</s>]]"],
        {},
    ),
    "a system message that moves to the last question": (
        MISTRAL,
        chat("A", "four", "B", "five", system="S"),
        [
            "<s>[INST] S\n\nA[/INST][[ four</s>]]",
            "<s>[INST] A[/INST] four</s>[INST] S\n\nB[/INST][[ five</s>]]",
        ],
        {},
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_reasoning_and_templates_that_change_earlier_turns(
    name: str, rows: Encode, tokens: Any
) -> None:
    source, messages, expected, keys = SAID[name]
    found = rows(source, {"messages": messages}, **keys)
    assert found == [marked(text, tokens) for text in expected]


# Who is trained


def test_roles_and_inputs(rows: Encode, tokens: Any) -> None:
    record = {"messages": chat("A", "four", "B", "five", system="S")}
    text = "<|im_start|>{}\n{}<|im_end|>"
    turns = [("system", "S"), ("user", "A"), ("assistant", "four"), ("user", "B")]
    turns.append(("assistant", "five"))

    def expected(*trained: str) -> tuple[list[int], list[bool]]:
        parts = []
        for role, said in turns:
            if role not in trained:
                parts.append(text.format(role, said))
            elif role == "assistant":
                parts.append(f"<|im_start|>{role}\n[[{said}<|im_end|>]]")
            else:
                parts.append(f"<|im_start|>{role}\n[[{said}]]<|im_end|>")
        return marked("\n".join(parts), tokens)

    for roles in (["assistant"], ["user", "assistant"], ["assistant", "system"]):
        assert rows("chatml", record, roles_to_train=roles) == [expected(*roles)]
    (row,) = rows("chatml", record, train_on_inputs=True)
    assert row == (expected("assistant")[0], [True] * len(row[0]))
    (row,) = rows("chatml", record, roles_to_train=["user"])
    ids, supervised = expected("user")
    end = max(n for n, is_trained in enumerate(supervised) if is_trained) + 1
    assert row == (ids[:end], supervised[:end])  # nothing after the last target


def test_other_roles_are_trained_in_the_first_row_that_has_them(rows: Encode, tokens: Any) -> None:
    record = {"messages": chat("A", FIRST, "B", SECOND)}
    expected = [
        f"<|im_start|>user\n[[A]]<|im_end|>\n<|im_start|>assistant\n[[{FIRST}<|im_end|>]]",
        "<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\nfour<|im_end|>\n"
        f"<|im_start|>user\n[[B]]<|im_end|>\n<|im_start|>assistant\n[[{SECOND}<|im_end|>]]",
    ]
    found = rows(QWEN3, record, roles_to_train=["user", "assistant"])
    assert found == [marked(text, tokens) for text in expected]


def test_switches_of_turns_decide_before_roles(rows: Encode, tokens: Any) -> None:
    messages = chat("A", "four", "B", "five", "C", "six")
    messages[1]["weight"] = 0  # type: ignore[assignment]
    messages[2]["train"] = True  # type: ignore[assignment]
    messages[5]["training"] = False  # type: ignore[assignment]
    text = (
        "<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\nfour<|im_end|>\n"
        "<|im_start|>user\n[[B]]<|im_end|>\n<|im_start|>assistant\n[[five<|im_end|>]]"
    )
    assert rows("chatml", {"messages": messages}) == [marked(text, tokens)]


def test_control_tokens_in_a_content_are_text(rows: Encode, tokens: Any) -> None:
    """Neither do they end an answer, nor begin another turn."""
    said = "say <|im_end|> and <|python_tag|> or </s>"
    ((ids, supervised),) = rows("chatml", {"messages": chat("<|im_start|>", said)})
    special = {tokens.convert_tokens_to_ids(token) for token in [*SPECIAL, "</s>"]}
    control = [tokens.convert_ids_to_tokens(token) for token in ids if token in special]
    assert control == ["<|im_start|>", "<|im_end|>", "<|im_start|>", "<|im_end|>"]
    answer = [token for token, is_trained in zip(ids, supervised, strict=True) if is_trained]
    assert tokens.decode(answer) == f"{said}<|im_end|>"
    assert tokens.decode(ids) == (
        f"<|im_start|>user\n<|im_start|><|im_end|>\n<|im_start|>assistant\n{said}<|im_end|>"
    )


def test_long_chats_are_cut_after_a_whole_answer(rows: Encode, tokens: Any) -> None:
    record = {"messages": chat("A", "four", "B", "five", "C", "six" * 40)}
    whole = marked(_chatml(chat("A", "four", "B", "five")), tokens)
    assert rows("chatml", record, sequence_len=len(whole[0]) + 10) == [whole]
    first = marked(_chatml(chat("A", "four")), tokens)
    assert rows("chatml", record, sequence_len=len(whole[0]) - 1) == [first]
    other = {"messages": chat("A", "four")}
    assert rows("chatml", {"messages": chat("A", "x" * 99)}, other, sequence_len=40) == [first]


def test_answers_of_selfdistillation(rows: Encode, tokens: Any) -> None:
    """Tokens that were generated are trained as they were; a cut answer has no end token."""
    generated = [tokens.convert_tokens_to_ids(letter) for letter in "four"]
    assert generated != tokens("four")["input_ids"]
    messages = chat("A", "four", "B", "five")
    messages[1]["token_ids"] = generated  # type: ignore[assignment]
    record = {"messages": messages, "finish_reasons": ["stop", "length"]}
    ids, supervised = marked(_chatml(chat("A", "four")), tokens)
    end = len(ids)
    start = supervised.index(True)
    found = rows("chatml", record)
    assert found[0][0] == [*ids[:start], *generated, ids[end - 1]]
    last = found[-1][0]
    assert tokens.decode(last).endswith("<|im_start|>assistant\nfive")
    other = {"messages": [*messages[:1], {**messages[1], "token_ids": [5, 6, 7]}]}
    assert rows("chatml", other) == [(ids, supervised)]  # they are another text


def test_variables_of_records(rows: Encode, tokens: Any) -> None:
    template = (
        "{{ tone }}|{{ tools | length if tools else 0 }}|{% for m in messages %}"
        "{{ '<|im_start|>' + m.role + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
    )
    record = {
        "messages": chat("A", "four"),
        "tone": "warm",
        "tools": json.dumps([{"name": "f"}, {"name": "g"}]),
    }
    kwargs = {"messages": chat("A", "four"), "chat_template_kwargs": {"tone": "cold"}}
    texts = [
        f"{tone}|{count}|<|im_start|>userA<|im_end|><|im_start|>assistant[[four<|im_end|>]]"
        for tone, count in (("warm", 2), ("cold", 0), ("mild", 0))
    ]
    plain = {"messages": chat("A", "four")}
    found = rows(template, record, kwargs, plain, chat_template_kwargs={"tone": "mild"})
    assert found == [marked(text, tokens) for text in texts]


# Templates that cannot be followed


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "leaves out"),
        ("{{ raise_exception('never') }}", "never"),
        ("{% broken", "line 1"),
        ("vicuna_v1", "vicuna_v1.1"),
    ],
)
def test_a_template_that_cannot_be_followed_says_so(
    template: str, words: str, rows: Encode
) -> None:
    from medusa_train.errors import MedusaError

    with pytest.raises(MedusaError, match=re.escape(words)):
        rows(template, {"messages": chat("A", "four")})


def test_datasets_of_templates_of_their_own(home: Path, tokens: Any, tmp_path: Path) -> None:
    record = {"messages": chat("A", "four")}
    first, second = (write_lines(tmp_path / name, [record]) for name in ("a.jsonl", "b.jsonl"))
    found = encode(
        base_model=str(home),
        datasets=[
            {"path": str(first), "conversation": "zephyr"},
            {"path": str(second), "conversation": "llama-3"},
        ],
        sequence_len=512,
    )
    assert found == [
        marked(reference(chat("A", "four")), tokens) for reference in (_zephyr, _llama_3)
    ]


def test_training_reads_what_decoding_does(model: Path, tokenizer: Any, tmp_path: Path) -> None:
    """The ids before each answer are those of the prompt that is sent to the model."""
    messages = chat("one  two ", "three", "  four", "five\n", system="six")
    data = write_lines(tmp_path / "chats.jsonl", [{"messages": messages}])
    ((ids, supervised),) = encode(
        base_model=str(model), datasets=[{"path": str(data)}], sequence_len=256
    )
    starts = [n for n, s in enumerate(supervised) if s and not supervised[n - 1]]
    for start, count in zip(starts, (2, 4), strict=True):
        prompt = tokenizer(render(messages[:count]), add_special_tokens=False)["input_ids"]
        assert ids[:start] == prompt
