"""At which tokens answers end, where the generation config, the tokenizer and the template differ."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from medusa_train.api import load
from medusa_train.checkpoint.load_model import load_for_decoding, read_stop_tokens
from medusa_train.checkpoint.resolve import resolve_model
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.errors import ConfigError
from medusa_train.evaluation.timed_decoders import GenerateDecoder, LoopDecoder
from medusa_train.inference.batch_decoder import BatchDecoder
from medusa_train.inference.generate import Decoder
from medusa_train.models.loading import load_target_model, load_tokenizer, unneeded_special_tokens
from medusa_train.models.stop_tokens import StopTokens, find_stop_tokens
from tests import chatml
from tests.chatml import ANSWER, END_OF_TEXT, IM_END, IM_START


def stops(tokenizer: Any, eos: Any = END_OF_TEXT, vocab_size: int = 300) -> StopTokens:
    config = SimpleNamespace(eos_token_id=eos)
    return find_stop_tokens(config, tokenizer, vocab_size, ChatEncoder(tokenizer))


def test_an_answer_ends_where_the_template_ends_it(tmp_path: Path) -> None:
    target_model = chatml.write_target_model(tmp_path / "backbone")
    model = load(chatml.write_run(tmp_path / "run", target_model), dtype="float32")
    reply = model.reply("Hi?", 40)
    assert (reply.read(), reply.finish, reply.tokens[-1]) == (ANSWER, "eos", IM_END)
    prompt = ChatEncoder(model.target_model.tokenizer).prompt([chatml_question()])
    decoders = [
        LoopDecoder(Decoder(model.target_model)),
        LoopDecoder(BatchDecoder(model.target_model)),
        GenerateDecoder(model.target_model),
    ]
    for decoder in decoders:
        answer = decoder.answer([prompt], 40)[0]
        assert list(answer.tokens) == reply.tokens


def chatml_question() -> Any:
    from medusa_train.data.conversation import Message

    return Message("user", "Hi?")


def test_all_sources_count_and_are_named() -> None:
    tokenizer = chatml.chatml_tokenizer()
    found = stops(tokenizer)
    assert found == StopTokens((END_OF_TEXT,), (END_OF_TEXT,), (IM_END,))
    assert (found.ids, found.added) == ((END_OF_TEXT, IM_END), (IM_END,))
    assert found.describe(tokenizer) == (
        "answers end at <|endoftext|> (generation_config.json, the tokenizer's EOS)"
        " or <|im_end|> (the chat template)"
    )
    of_tokenizer = stops(chatml.chatml_tokenizer(chatml.PLAIN_TEMPLATE, eos_token="<|im_end|>"))
    assert of_tokenizer == StopTokens((END_OF_TEXT,), (IM_END,), ())
    assert stops(tokenizer, eos=[IM_END, END_OF_TEXT]).describe(tokenizer) is None
    assert stops(tokenizer, eos=None).ids == (END_OF_TEXT, IM_END)
    assert stops(tokenizer, vocab_size=IM_END).template == ()  # no embedding: never generated


@pytest.mark.parametrize(
    ("after", "end"),
    [
        ("\n\n", None),
        ("\nEND", None),
        ("<|im_end|>\n<|endoftext|>", IM_END),
        (" <|im_end|>", IM_END),
        ("{{ eos_token }}", END_OF_TEXT),
        ("\n\n<|im_end|>", IM_END),
    ],
)
def test_the_end_is_the_first_special_token_after_an_answer(after: str, end: int | None) -> None:
    """A tokenizer may have line breaks as added tokens, at which no answer ends."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.content }}"
        f"{{% if m.role == 'assistant' %}}{after}{{% endif %}}{{% endfor %}}"
    )
    tokenizer = chatml.chatml_tokenizer(template)
    tokenizer.add_tokens(["\n\n"])
    assert ChatEncoder(tokenizer).end_token_id() == end


def test_a_template_that_rejects_a_question_names_no_end() -> None:
    tokenizer = chatml.chatml_tokenizer("{{ raise_exception('a system message is missing') }}")
    assert ChatEncoder(tokenizer).end_token_id() is None


def test_configured_special_tokens_count(tmp_path: Path) -> None:
    directory = str(
        chatml.write_target_model(tmp_path / "backbone", template=chatml.PLAIN_TEMPLATE)
    )
    paths = resolve_model(None, directory, None)
    assert read_stop_tokens(paths)[0].ids == (END_OF_TEXT,)
    run = chatml.write_run(
        tmp_path / "run", Path(directory), "special_tokens: {eos_token: <|im_end|>}\n"
    )
    paths = resolve_model(str(run), None, None)
    assert read_stop_tokens(paths)[0].added == (IM_END,)
    assert load_for_decoding(paths, "float32").target_model.eos_ids == (END_OF_TEXT, IM_END)
    other = resolve_model(str(run), None, None, special_tokens={"eos_token": "<|im_start|>"})
    assert read_stop_tokens(other)[0].added == (IM_START,)


def test_special_tokens_are_of_the_vocabulary(tmp_path: Path) -> None:
    directory = str(chatml.write_target_model(tmp_path / "backbone"))
    options: dict[str, Any] = {"trust_remote_code": False}
    given = {"bos_token": "<|im_start|>", "pad_token": "<mine>", "unk_token": "<unk>"}
    tokenizer = load_tokenizer(directory, special_tokens=given, **options)
    assert tokenizer.bos_token_id == IM_START
    assert len(tokenizer) == len(load_tokenizer(directory, **options))
    note = unneeded_special_tokens(tokenizer, given)
    assert note is not None
    assert "pad_token: <mine>, unk_token: <unk>" in note
    assert "<|im_start|>" not in note
    assert unneeded_special_tokens(tokenizer, None) is None
    for bad in ({"eos_token": "<nowhere>"}, {"mask_token": "<|im_end|>"}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            load_tokenizer(directory, special_tokens=bad, **options)


def test_saved_and_converted_models_end_alike(tmp_path: Path) -> None:
    target_model = load_target_model(
        str(chatml.write_target_model(tmp_path / "backbone")), dtype="float32"
    )
    assert target_model.eos_ids == (END_OF_TEXT,)
    target_model.end_answers_by(None)
    target_model.save(tmp_path / "saved")
    assert target_model.to_dtype("bfloat16").eos_ids == (END_OF_TEXT, IM_END)
    saved = load_target_model(str(tmp_path / "saved"), dtype="float32")
    assert saved.stop_tokens.generation_config == (END_OF_TEXT, IM_END)
