"""The loss mask, shown as text: supervised text is in double brackets."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from medusa_train.data.builtin_templates import TEMPLATES
from medusa_train.data.chat_template import ChatTemplate, ChatTemplateError
from medusa_train.data.conversation import Conversation, Message
from medusa_train.data.records import normalize
from medusa_train.data.tokenize import ChatEncoder, Row
from medusa_train.errors import ConfigError, DataError

Chat = Callable[..., Conversation]
Make = Callable[..., Any]

VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
# Two turns and a system message, by template; `é` is two tokens, " B" and ">B" are merged into one.
EXPECTED = {
    None: (
        "<s><system>S: be</s><user>Ask é</s><|assistant|>[[B 1.</s>]]<user>More</s><|assistant|>[[B"
        " é</s>]]"
    ),
    "vicuna_v1.1": "<s>S: be USER: Ask é ASSISTANT:[[ B 1.</s>]]USER: More ASSISTANT:[[ B é</s>]]",
    "zephyr": (
        "<|system|>\nS: be</s>\n<|user|>\nAsk é</s>\n<|assistant|>\n[[B 1.</s>]]\n"
        "<|user|>\nMore</s>\n<|assistant|>\n[[B é</s>]]"
    ),
    "chatml": (
        "<|im_start|>system\nS: be<|im_end|>\n<|im_start|>user\nAsk é<|im_end|>\n"
        "<|im_start|>assistant\n[[B 1.<|im_end|>]]\n<|im_start|>user\nMore<|im_end|>\n"
        "<|im_start|>assistant\n[[B é<|im_end|>]]"
    ),
    "llama-2": (
        "<s>[INST] <<SYS>>\nS: be\n<</SYS>>\n\nAsk é [/INST][[ B 1. </s>]]<s>[INST] More [/INST][["
        " B é </s>]]"
    ),
    "llama-3": (
        "<s><|start_header_id|>system<|end_header_id|>\n\nS: be<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nAsk é<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[[B 1.<|eot_id|>]]"
        "<|start_header_id|>user<|end_header_id|>\n\nMore<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[[B é<|eot_id|>]]"
    ),
    "mistral": "<s>[INST] S: be\n\nAsk é [/INST][[ B 1.</s>]][INST] More [/INST][[ B é</s>]]",
}


def masked(encoder: ChatEncoder, conversation: Conversation) -> str:
    """The tokens of all rows as text, supervised ones in double brackets, a bar between rows."""
    return " | ".join(masked_row(encoder, row) for row in encoder.encode(conversation))


def masked_row(encoder: ChatEncoder, encoded: Row) -> str:
    assert len(encoded.ids) == len(encoded.supervised)
    runs: list[tuple[bool, list[int]]] = []
    for token, supervised in zip(encoded.ids, encoded.supervised, strict=True):
        if not runs or runs[-1][0] != supervised:
            runs.append((supervised, []))
        runs[-1][1].append(token)
    texts = [(supervised, encoder.tokenizer.decode(ids)) for supervised, ids in runs]
    return "".join(f"[[{text}]]" if supervised else text for supervised, text in texts)


def unmarked(source: str) -> str:
    return source.replace("{% generation %}", "").replace("{% endgeneration %}", "")


@pytest.mark.parametrize("name", [None, *TEMPLATES])
def test_only_answers_and_their_end_token_are_supervised(
    name: str | None, make_tokenizer: Make, chat: Chat
) -> None:
    conversation = chat("S: be", "Ask é", "B 1.", "More", "B é")
    source = TEMPLATES[name] if name else make_tokenizer().chat_template
    assert "generation %}" in source
    for encoder in (
        ChatEncoder(make_tokenizer(), name),
        ChatEncoder(make_tokenizer(unmarked(source))),
    ):
        assert masked(encoder, conversation) == EXPECTED[name]
        (encoded,) = encoder.encode(conversation)
        starts = [
            t for t, s in enumerate(encoded.supervised) if s and not encoded.supervised[t - 1]
        ]
        assert encoder.prompt(conversation.messages[:2]) == encoded.ids[: starts[0]]
        assert encoder.prompt(conversation.messages[:4]) == encoded.ids[: starts[1]]


def test_vicuna_without_a_system_message_uses_its_own(tokenizer: Any, chat: Chat) -> None:
    expected = f"<s>{VICUNA_SYSTEM} USER: Ask ASSISTANT:[[ B</s>]]"
    assert masked(ChatEncoder(tokenizer, "vicuna_v1.1"), chat("Ask", "B")) == expected
    assert (
        masked(ChatEncoder(tokenizer, "llama-2"), chat("Ask", "B"))
        == "<s>[INST] Ask [/INST][[ B </s>]]"
    )


def test_vicuna_does_not_write_the_space_twice_that_a_tokenizer_kept(
    tokenizer: Any, chat: Chat
) -> None:
    """The history of the second turn is what the model wrote: one space before its answer."""
    encoder = ChatEncoder(tokenizer, "vicuna_v1.1")
    for kept in ("B", " B"):
        shown = masked(encoder, chat("S: be", "Ask", kept, "More", "B"))
        assert shown == "<s>S: be USER: Ask ASSISTANT:[[ B</s>]]USER: More ASSISTANT:[[ B</s>]]"


def test_a_last_turn_of_the_users_is_not_supervised(tokenizer: Any, chat: Chat) -> None:
    encoder = ChatEncoder(tokenizer)
    assert masked(encoder, chat("Ask", "B", "More")) == "<s><user>Ask</s><|assistant|>[[B</s>]]"
    assert encoder.encode(chat("Ask")) == []


def test_prompt_and_answer_are_tokenized_apart_where_a_token_would_cover_both(
    make_tokenizer: Make, chat: Chat
) -> None:
    source = "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"
    source += "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
    encoder = ChatEncoder(make_tokenizer(source))
    assert masked(encoder, chat("Ask", "B 1.")) == "<user>Ask<assistant>[[B 1.]]"
    # within the history the tokens are merged, so the second prompt does not begin with those of
    # the first row
    first, second = encoder.encode(chat("Ask", "B 1.", "More", "é"))
    assert masked_row(encoder, first) == "<user>Ask<assistant>[[B 1.]]"
    assert masked_row(encoder, second) == "<user>Ask<assistant>B 1.<user>More<assistant>[[é]]"
    for row, turns in ((first, ["Ask"]), (second, ["Ask", "B 1.", "More"])):
        assert row.ids[: row.supervised.index(True)] == encoder.prompt(chat(*turns).messages)
    assert second.ids[: len(first.ids)] != first.ids


@pytest.mark.parametrize("name", [None, *TEMPLATES])
def test_offsets_without_white_space_change_nothing(
    name: str | None, make_tokenizer: Make, chat: Chat
) -> None:
    conversation = chat("S: be", "Ask é", "B \n\n 1.", "More", "B  é")
    trimming, plain = (
        ChatEncoder(make_tokenizer(trim=True), name),
        ChatEncoder(make_tokenizer(), name),
    )
    offsets = [
        e.tokenizer("B \n\n 1.", return_offsets_mapping=True)["offset_mapping"]
        for e in (trimming, plain)
    ]
    assert offsets[0] != offsets[1]
    assert trimming.encode(conversation) == plain.encode(conversation)


@pytest.mark.parametrize("trim", [False, True])
def test_spaces_at_the_borders_belong_to_their_side(
    trim: bool, make_tokenizer: Make, chat: Chat
) -> None:
    source = "{% for m in messages %}{{ m['role'] + ':  ' + m['content'] }}{% endfor %}"
    source += "{% if add_generation_prompt %}{{ 'assistant:  ' }}{% endif %}"
    encoder = ChatEncoder(make_tokenizer(source, trim=trim)).with_settings(
        roles=["user", "assistant"]
    )
    text = "user:  [[1 ]]assistant:  [[2 ]]user:  [[3]]assistant:  [[ 4]]"
    assert masked(encoder, chat("1 ", "2 ", "3", " 4")) == text


@pytest.mark.parametrize("name", ["llama-2", "zephyr"])
@pytest.mark.parametrize("user", ["Ask ", "Ask\n", " Ask"])
def test_spaces_around_a_trained_user_turn_may_be_stripped(
    name: str, user: str, tokenizer: Any, chat: Chat
) -> None:
    encoder = ChatEncoder(tokenizer, name).with_settings(roles=["user", "assistant"])
    assert re.search(
        rf"\[\[({re.escape(user)}|{re.escape(user.strip())})\]\]", masked(encoder, chat(user, "B"))
    )


@pytest.mark.parametrize(
    ("call", "date"),
    [
        ("{{ strftime_now('%d %b %Y') }}", "26 Jul 2024"),
        ("{% set form = '%d %b %Y' %}{{ strftime_now(form) }}", "26 Jul 2024"),
        ("{{ strftime_now(form | default('%Y-%m-%d')) }}", "2024-07-26"),
        ("{{ strftime_now('%d ' ~ '%b') }}", "26 Jul"),
        ("{{ strftime_now(format='%Y') }}", "2024"),
        ("{% set now = strftime_now %}{{ now('%Y') }}", "2024"),
        ("{% macro year() %}{{ strftime_now('%Y') }}{% endmacro %}{{ year() }}", "2024"),
        ("{% if strftime_now is defined %}{{ strftime_now('%H:%M') }}{% endif %}", "00:00"),
        ("{{ strftime_now('%d') | int - 1 }}", "25"),
        ("{{ strftime_now('it\\'s %Y') }}", "it's 2024"),
    ],
)
def test_today_s_date_is_a_fixed_one(
    make_tokenizer: Make, chat: Chat, call: str, date: str
) -> None:
    source = call + "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    encoder = ChatEncoder(make_tokenizer(source))
    assert encoder.template.render(chat("Ask").messages) == f"{date}Ask"


def test_the_fixed_date_is_no_other_program_s(make_tokenizer: Make, chat: Chat) -> None:
    """A program that loads this package may render the same template with today's date."""
    source = "{{ strftime_now('%Y') }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer = make_tokenizer(source)
    assert ChatEncoder(tokenizer).template.render(chat("Ask").messages) == "2024Ask"
    messages = [{"role": "user", "content": "Ask"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) != "2024Ask"


def test_words_that_look_like_headers_or_end_tokens(make_tokenizer: Make, chat: Chat) -> None:
    source = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '</s>\n' }}{%"
        " endfor %}"
    )
    source += "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    encoder = ChatEncoder(make_tokenizer(source))
    expected = "<|user|>\nuser</s>\n<|assistant|>\n[[s</s>]]\n<|user|>\nassistant</s>\n<|assistant|>\n[[user</s>]]"
    assert masked(encoder, chat("user", "s", "assistant", "user")) == expected


def test_everything_and_other_roles(tokenizer: Any, chat: Chat) -> None:
    conversation = chat("S: be", "user", "B")
    base = ChatEncoder(tokenizer)
    assert (
        masked(base.with_settings(train_on_inputs=True), conversation)
        == "[[<s><system>S: be</s><user>user</s><|assistant|>B</s>]]"
    )
    assert (
        masked(base.with_settings(roles=["user"]), conversation)
        == "<s><system>S: be</s><user>[[user]]</s><|assistant|>B</s>"
    )
    assert (
        masked(base.with_settings(roles=["assistant", "system"]), conversation)
        == "<s><system>[[S: be]]</s><user>user</s><|assistant|>[[B</s>]]"
    )
    assert base.with_settings(template="chatml").with_settings().template_name == "chatml"


def test_the_text_between_turns_that_share_a_row_is_trained_with_everything(
    make_tokenizer: Make, chat: Chat
) -> None:
    """One prompt is split otherwise, since ">B" is one token: the turns around it share rows."""
    source = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
    source += "{% if add_generation_prompt %}<assistant>{% endif %}"
    encoder = ChatEncoder(make_tokenizer(source), train_on_inputs=True)
    first, second = encoder.encode(chat("a", "B", "c", "d", "e", "f"))
    assert masked_row(encoder, first) == "[[<user>a</s><assistant>B</s>]]"
    history = "<user>a</s><assistant>B</s><user>"
    between = "c</s><assistant>d</s><user>e</s><assistant>f</s>"
    assert masked_row(encoder, second) == f"{history}[[{between}]]"


def test_an_answer_of_weight_0_is_not_supervised(tokenizer: Any) -> None:
    turns = [
        {"role": ("user", "assistant")[n % 2], "content": "ABCD"[n], "weight": int(n != 1)}
        for n in range(4)
    ]
    (row,) = ChatEncoder(tokenizer).encode(normalize({"messages": turns}))
    assert masked_row(ChatEncoder(tokenizer), row).endswith(
        "A</s><|assistant|>B</s><user>C</s><|assistant|>[[D</s>]]"
    )


def test_templates_that_cannot_be_followed_say_so(make_tokenizer: Make, chat: Chat) -> None:
    loud = ChatEncoder(
        make_tokenizer("{% for m in messages %}{{ m['content'] | upper }}{% endfor %}")
    )
    # generated after this prompt, whatever history makes of it
    assert masked(loud, chat("Ask", "b")) == "ASK[[b]]"
    with pytest.raises(
        DataError, match=r"chats\.jsonl:1: the chat template modifies message contents"
    ):
        loud.with_settings(roles=["user"]).encode(chat("Ask", "b"))
    mute = "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(
        DataError, match=r"chats\.jsonl:1: the chat template leaves out the content of answers"
    ):
        ChatEncoder(make_tokenizer(mute)).encode(chat("Ask", "b"))
    strict = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system, please') }}{%"
        " endif %}x"
    )
    encoder = ChatEncoder(make_tokenizer(strict))
    with pytest.raises(
        DataError, match=r"chats\.jsonl:1: the chat template rejects the chat: no system, please"
    ):
        encoder.encode(chat("S: be", "Ask", "B"))
    with pytest.raises(DataError, match="no system, please"):
        encoder.prompt([Message("system", "S"), Message("user", "Ask")])
    with pytest.raises(ChatTemplateError, match="concatenate"):
        ChatTemplate("{{ messages[0].content + 1 }}").render([Message("user", "Ask")])
    with pytest.raises(ConfigError, match="chat template, line 1: "):
        ChatTemplate("{% broken").render([Message("user", "Ask")])


def test_a_template_may_be_a_file(tmp_path: Path, tokenizer: Any, chat: Chat) -> None:
    path = tmp_path / "plain.jinja"
    path.write_text(
        "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + eos_token }}{% endfor %}"
    )
    assert (
        masked(ChatEncoder(tokenizer, str(path)), chat("Ask", "B"))
        == "<user>Ask</s>[[<assistant>B</s>]]"
    )
    with pytest.raises(
        ConfigError, match=r"chat template '.*none\.jinja': cannot be read \(.*No such file"
    ):
        ChatEncoder(tokenizer, str(tmp_path / "none.jinja"))


def test_tokenizers_that_do_not_fit_are_refused(make_tokenizer: Make) -> None:
    with pytest.raises(DataError, match="no chat template; set chat_template to one of vicuna"):
        ChatEncoder(make_tokenizer(None))
    with pytest.raises(ConfigError, match=r"'vicuna_v1' is unknown; did you mean vicuna_v1.1\?"):
        ChatEncoder(make_tokenizer(), "vicuna_v1")
    plain = make_tokenizer(special=["<s>", "</s>"])
    with pytest.raises(
        DataError, match=r"'chatml' ends answers with <\|im_end\|>, which is not a single token"
    ):
        ChatEncoder(plain, "chatml")
    with pytest.raises(
        DataError,
        match="'zephyr' ends answers with the EOS token, which the tokenizer does not have",
    ):
        ChatEncoder(make_tokenizer(special=["<s>"]), "zephyr")
