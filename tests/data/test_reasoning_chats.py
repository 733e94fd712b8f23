"""Training rows equal what decoding sees, with templates of reasoning models and others."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, pre_tokenizers
from transformers import AutoTokenizer

from medusa_train.config.paths import PROJECT_ROOT
from medusa_train.config.schema import TrainConfig
from medusa_train.data.batch import Example
from medusa_train.data.builtin_templates import TEMPLATES as BUILTIN_TEMPLATES
from medusa_train.data.conversation import Conversation, Message
from medusa_train.data.dataset import load_datasets
from medusa_train.data.examples import encode_examples
from medusa_train.data.report import DataReport
from medusa_train.data.tokenize import ChatEncoder
from tests.chat_files import read_conversations
from tests.chat_templates import GEMMA, LLAMA_3_1, MISTRAL, QWEN3, R1, SMOLLM2, TEMPLATES
from tests.data.test_tokenize_chat import masked_row

Chat = Callable[..., Conversation]
Make = Callable[..., ChatEncoder]

SPECIAL = [
    "<s>",
    "</s>",
    "<pad>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
]
SPECIAL += [
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|User|>",
    "<|Assistant|>",
    "[INST]",
    "[/INST]",
]
FIRST, SECOND = "<think>\nadd\n</think>\n\nfour", "<think>\nadd one\n</think>\n\nfive"
#: The end token of each template.
ENDS = {
    QWEN3: "<|im_end|>",
    R1: "</s>",
    LLAMA_3_1: "<|eot_id|>",
    GEMMA: "<end_of_turn>",
    MISTRAL: "</s>",
}
ENDS[SMOLLM2] = "<|im_end|>"


@pytest.fixture(scope="module")
def make(make_tokenizer: Callable[..., Any]) -> Make:
    def build(template: str, kwargs: dict[str, Any] | None = None, **settings: Any) -> ChatEncoder:
        return ChatEncoder(make_tokenizer(template, special=SPECIAL), None, kwargs, **settings)

    return build


def rows(encoder: ChatEncoder, conversation: Conversation) -> list[str]:
    return [masked_row(encoder, row) for row in encoder.encode(conversation)]


# -- every family
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}], ids=str)
@pytest.mark.parametrize(
    "answers", [("four", "five", "six"), (FIRST, SECOND, "six"), (" four\n", "\n\nfive", "six ")]
)
@pytest.mark.parametrize("family", TEMPLATES)
def test_prompts_equal_those_of_decoding_and_each_answer_is_trained_once(
    family: str, answers: tuple[str, ...], kwargs: dict[str, Any], make: Make, chat: Chat
) -> None:
    encoder = make(TEMPLATES[family], kwargs)
    turns = [
        text
        for pair in zip(("two + two?", "plus one?", "more?"), answers, strict=True)
        for text in pair
    ]
    conversation = chat(*turns) if family == "Gemma" else chat("S: be", *turns)
    indices = [i for i, message in enumerate(conversation.messages) if message.role == "assistant"]
    trained = []
    for row in encoder.encode(conversation):
        starts = [t for t, s in enumerate(row.supervised) if s and not row.supervised[t - 1]]
        for start, (index, answer_end) in zip(starts, row.answers.items(), strict=True):
            assert row.ids[:start] == encoder.prompt(conversation.messages[:index])
            assert all(row.supervised[start:answer_end])
            answer = encoder.tokenizer.decode(row.ids[start:answer_end])
            said = answers[indices.index(index)]
            end = ENDS[TEMPLATES[family]]
            assert answer.endswith(end)
            assert answer.removesuffix(end).strip().endswith(said.strip().split("\n")[-1])
            trained.append(index)
    assert trained == indices


@pytest.mark.parametrize(
    "template", [LLAMA_3_1, GEMMA, MISTRAL, SMOLLM2], ids=["Llama", "Gemma", "Mistral", "SmolLM2"]
)
def test_a_template_that_keeps_earlier_turns_gives_one_row(
    template: str, make: Make, chat: Chat
) -> None:
    encoder = make(template)
    conversation = chat("two + two?", "four", "plus one?", "five")
    (row,) = encoder.encode(conversation)
    messages = [message.as_dict() for message in conversation.messages]
    whole = encoder.tokenizer.apply_chat_template(messages, tokenize=False).rstrip("\n")
    assert row.ids == encoder.tokenizer(whole, add_special_tokens=False)["input_ids"]
    learned = "".join(
        encoder.tokenizer.decode([t]) for t, s in zip(row.ids, row.supervised, strict=True) if s
    )
    lead = " " if template == MISTRAL else ""
    assert learned == f"{lead}four{ENDS[template]}{lead}five{ENDS[template]}"


# -- reasoning
# ------------------------------------------------------------------------------------------------


def test_qwen3_drops_the_reasoning_from_the_history_alone(make: Make, chat: Chat) -> None:
    assert rows(make(QWEN3), chat("two + two?", FIRST, "plus one?", SECOND)) == [
        "<|im_start|>user\ntwo + two?<|im_end|>\n<|im_start|>assistant\n[["
        + FIRST
        + "<|im_end|>]]",
        "<|im_start|>user\ntwo + two?<|im_end|>\n<|im_start|>assistant\nfour<|im_end|>\n"
        "<|im_start|>user\nplus one?<|im_end|>\n<|im_start|>assistant\n[["
        + SECOND
        + "<|im_end|>]]",
    ]


def test_an_answer_is_kept_as_it_was_generated_where_the_template_would_tidy_it(
    make: Make, chat: Chat
) -> None:
    odd = "<think>add</think> four "
    assert rows(make(QWEN3), chat("A", odd)) == [
        f"<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\n[[{odd}<|im_end|>]]"
    ]


@pytest.mark.parametrize("said", ["four", "<think>\n\n</think>\n\nfour", FIRST])
def test_thinking_disabled_puts_the_empty_reasoning_into_the_prompt(
    said: str, make: Make, chat: Chat
) -> None:
    prompt = "<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert rows(make(QWEN3, {"enable_thinking": False}), chat("A", said)) == [
        prompt + "[[four<|im_end|>]]"
    ]


@pytest.mark.parametrize("said", [FIRST, "add\n</think>\n\nfour", " " + FIRST])
def test_a_tag_that_the_prompt_opens_is_not_repeated(said: str, make: Make, chat: Chat) -> None:
    assert rows(make(R1), chat("A", said, "B", SECOND)) == [
        "<s><|User|>A<|Assistant|><think>\n[[add\n</think>\n\nfour</s>]]",
        (
            "<s><|User|>A<|Assistant|>\n\nfour</s><|User|>B<|Assistant|><think>\n[[add"
            " one\n</think>\n\nfive</s>]]"
        ),
    ]


def test_variables_that_the_template_does_not_have_are_named(make: Make) -> None:
    assert make(QWEN3, {"enable_thinking": False}).template.describe_unused_kwargs() is None
    note = make(
        QWEN3, {"enable_thinking": False, "enable_thinkin": False}
    ).template.describe_unused_kwargs()
    assert note == "chat_template_kwargs: not in the chat template: enable_thinkin"


def test_an_answer_without_reasoning_closes_the_one_that_the_prompt_opens(
    make: Make, chat: Chat
) -> None:
    assert rows(make(R1), chat("A", "four")) == [
        "<s><|User|>A<|Assistant|><think>\n[[\n</think>\n\nfour</s>]]"
    ]
    unfinished = rows(make(R1), chat("A", "<think>add"))  # cut at the length limit
    assert unfinished == ["<s><|User|>A<|Assistant|><think>\n[[add</s>]]"]


@pytest.mark.parametrize(
    ("said", "generated"),
    [
        ("add", "add"),
        ("<think>\nadd", "add"),
        ("add\n</think>\n\nfo", "add\n</think>\n\nfo"),
    ],
)
def test_a_cut_answer_continues_the_reasoning_that_the_prompt_opens(
    said: str, generated: str, make: Make
) -> None:
    messages = (Message("user", "A"), Message("assistant", said, is_cut=True))
    assert rows(make(R1), Conversation("x", messages, "x:1")) == [
        f"<s><|User|>A<|Assistant|><think>\n[[{generated}]]"
    ]


def test_other_tags(make: Make, chat: Chat) -> None:
    template = R1.replace("think>", "reason>")
    encoder = make(template, reasoning_tags=("<reason>", "</reason>"))
    said = "<reason>\nadd\n</reason>\n\nfour"
    assert rows(encoder, chat("A", said)) == [
        "<s><|User|>A<|Assistant|><reason>\n[[add\n</reason>\n\nfour</s>]]"
    ]
    again = encoder.with_settings(roles=["assistant"], reasoning_tags=("<reason>", "</reason>"))
    assert again.fingerprint() == encoder.fingerprint() != encoder.with_settings().fingerprint()
    assert (
        encoder.fingerprint()
        != make(template, {"x": 1}, reasoning_tags=("<reason>", "</reason>")).fingerprint()
    )


# -- other roles, long chats
# ----------------------------------------------------------------------------------


def test_other_messages_are_trained_in_the_first_row_that_has_them(make: Make, chat: Chat) -> None:
    conversation = chat("S: be", "A", FIRST, "B", SECOND)
    first, second = rows(make(QWEN3, roles=["user", "system", "assistant"]), conversation)
    assert first.startswith(
        "<|im_start|>system\n[[S: be]]<|im_end|>\n<|im_start|>user\n[[A]]<|im_end|>"
    )
    assert second.startswith("<|im_start|>system\nS: be<|im_end|>\n<|im_start|>user\nA<|im_end|>\n")
    assert second.endswith(
        f"four<|im_end|>\n<|im_start|>user\n[[B]]<|im_end|>\n<|im_start|>assistant\n[[{SECOND}<|im_end|>]]"
    )
    first, second = rows(make(QWEN3, train_on_inputs=True), conversation)
    assert first.startswith("[[<|im_start|>system")
    assert first.count("[[") == second.count("[[") == 1
    assert second.endswith(
        f"<|im_start|>user\n[[B<|im_end|>\n<|im_start|>assistant\n{SECOND}<|im_end|>]]"
    )


def test_rows_are_truncated_one_by_one(make: Make, chat: Chat) -> None:
    encoder = make(QWEN3)
    conversation = chat(
        "A", "<think>\n" + 300 * "x" + "\n</think>\n\nfour", "B", "five", "C", 300 * "y"
    )

    def encode(chat: Conversation, limit: int, by: ChatEncoder = encoder) -> list[Example]:
        return encode_examples(chat, by, DataReport(limit))

    whole = encode(conversation, 10_000)
    assert [example.row for example in whole] == [0, 1, 2]
    assert {example.key for example in whole} == {conversation.first(2).content_key}
    assert [(e.row, e.tokens.tolist(), e.key) for e in encode(conversation, 200)] == [
        (0, whole[1].tokens.tolist(), conversation.first(4).content_key)
    ]
    assert encode(conversation, 20) == []
    # the system message goes into the last user turn: the second prompt begins differently, the
    # third again
    mistral = make(MISTRAL)
    plain, system = (
        chat(*turns, "A", "four", "B", "five", "C", 99 * "y") for turns in ((), ("S: be",))
    )
    assert [len(encode(c, 1000, mistral)) for c in (plain, system)] == [1, 3]
    assert [len(encode(c, 60, mistral)) for c in (plain, system)] == [1, 2]


def test_rows_that_are_left_are_counted(make: Make, chat: Chat) -> None:
    encoder = make(QWEN3)
    conversation = chat(
        "A", "<think>\n" + 300 * "x" + "\n</think>\n\nfour", "B", "five", "C", 300 * "y"
    )
    counts = []
    for limit in (10_000, 200, 20):
        report = DataReport(limit)
        encode_examples(conversation, encoder, report)
        counts.append(+report.counts)
    answers = {"answers": 3}
    assert counts == [
        {"complete": 1, "split": 1, "rows": 3, **answers},
        {"truncated": 1, **answers},  # one row is left
        {"too_long": 1},
    ]


def test_an_end_token_before_others_ends_the_answer_alone(
    make_tokenizer: Callable[..., Any], chat: Chat
) -> None:
    """As of Phi-3: header and end tokens include the line break after them, and EOS closes the
    whole text.
    """
    template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{{ '<|assistant|>\n' if add_generation_prompt else eos_token }}"
    )
    tokenizer = make_tokenizer(template, special=["</s>"])
    tokenizer.add_tokens(
        [AddedToken(token, rstrip=True) for token in ("<|user|>", "<|assistant|>", "<|end|>")]
    )
    encoder, conversation = ChatEncoder(tokenizer), chat("A", "four", "B", "five")
    assert rows(encoder, conversation) == [
        "<|user|>A<|end|><|assistant|>[[four<|end|>]]<|user|>B<|end|><|assistant|>[[five<|end|>]]"
    ]
    (row,) = encoder.encode(conversation)
    assert row.ids[: row.supervised.index(True)] == encoder.prompt(conversation.messages[:1])


def test_a_prompt_has_the_tokens_that_it_has_alone(
    make_tokenizer: Callable[..., Any], chat: Chat
) -> None:
    """Even where white space is split by what follows it, as by GPT-2's tokenizer."""
    tokenizer = make_tokenizer(LLAMA_3_1, special=SPECIAL)
    lookahead = pre_tokenizers.Split(Regex(r"\s+(?!\S)|\s"), "isolated")
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([lookahead, bytes_alone])
    encoder, conversation = ChatEncoder(tokenizer), chat("A", "four", "B", "five")
    encoded = encoder.encode(conversation)
    assert [list(row.answers) for row in encoded] == [[1], [3]]
    for row, messages in zip(encoded, (1, 3), strict=True):
        assert row.ids[: row.supervised.index(True)] == encoder.prompt(
            conversation.messages[:messages]
        )
        assert (
            encoder.tokenizer.convert_ids_to_tokens(row.ids)[row.supervised.index(True) - 1] == "ĊĊ"
        )


def test_the_encoder_is_picklable(make: Make, chat: Chat) -> None:
    encoder, conversation = make(QWEN3, {"enable_thinking": False}), chat("A", "four", "B", "five")
    assert pickle.loads(pickle.dumps(encoder)).encode(conversation) == encoder.encode(conversation)


# -- data sets
# ------------------------------------------------------------------------------------------------


def config(path: Path, **keys: Any) -> TrainConfig:
    return TrainConfig.model_validate(
        {"base_model": "none", "datasets": [{"path": str(path)}], **keys}
    )


@pytest.mark.parametrize("cached", [False, True])
def test_all_rows_of_a_conversation_are_on_one_side_of_the_split(
    cached: bool, tmp_path: Path, make: Make
) -> None:
    path = tmp_path / "chats.jsonl"
    with path.open("w") as file:
        for n in range(20):
            turns = [("user", f"q{n}"), ("assistant", "four"), ("user", "B"), ("assistant", "five")]
            messages = [
                {"role": by, "content": text, "reasoning_content": "add"}
                for by, text in turns[: 2 + n % 3]
            ]
            for message in messages:
                if message["role"] == "user":
                    del message["reasoning_content"]
            file.write(json.dumps({"messages": messages}) + "\n")
    cfg = config(
        path, val_set_size=0.25, dataset_prepared_path=str(tmp_path / "cache") if cached else None
    )
    for _ in range(1 + cached):
        train, validation = load_datasets(cfg, make(QWEN3))
        assert (train.conversations, validation.conversations) == (15, 5)
        assert not {e.source for e in train} & {e.source for e in validation}
        assert len(train) + len(validation) == 26
        assert train.describe_count() == f"15 conversations in {len(train)} rows"
        assert (train.report.counts["split"], train.report.counts["rows"]) == (6, 12)
        sentence = (
            "6 conversations became 12 rows: their later prompts do not begin with the tokens of the"
            " row before"
        )
        assert sentence in train.report.describe()
        # rows of one conversation are no repeated ones
        assert not any("equal an earlier one" in line for line in train.report.describe())
    assert "<think>\nadd\n</think>\n\nfour" in make(QWEN3).tokenizer.decode(train[0].tokens)


@pytest.mark.parametrize("name", [None, *BUILTIN_TEMPLATES])
def test_chats_with_built_in_templates_are_encoded_as_by_their_generation_marks(
    name: str | None,
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(PROJECT_ROOT / "data" / "tiny")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>", "<|eot_id|>"]})
    encoder = ChatEncoder(tokenizer, name)
    chats = read_conversations(PROJECT_ROOT / "data" / "selfdistill" / "tiny.jsonl").conversations
    pairs = zip(chats[:40], chats[40:80], strict=True)
    two_turns = [
        Conversation("", (*one.messages[:2], *other.messages[:2]), "") for one, other in pairs
    ]
    for conversation in [
        *chats[:40],
        *two_turns,
        Conversation("", (Message("system", "Be brief."), *chats[0].messages), ""),
    ]:
        expected = tokenizer.apply_chat_template(
            [message.as_dict() for message in conversation.messages],
            chat_template=BUILTIN_TEMPLATES[name] if name else None,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        (row,) = encoder.encode(conversation)
        end = len(row.ids)
        assert row.ids == expected["input_ids"][:end]
        assert row.supervised == list(map(bool, expected["assistant_masks"][:end]))
        assert not any(expected["assistant_masks"][end:])
