"""`medusa_train.load` and the model that it returns: answers, streams, stop strings, samples, chats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import medusa_train
from medusa_train.errors import MedusaError
from tests.behaviour import plain
from tests.behaviour.scripted import write_scripted_model
from tests.behaviour.world import (
    EOS,
    NARROW,
    SYSTEM,
    TEMPLATE,
    VOCABULARY,
    greedy,
    read_lines,
    render,
    write_lines,
    write_model,
    write_tree,
)


@pytest.fixture(scope="module")
def loaded(skilled: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    tree = write_tree(tmp_path_factory.mktemp("tree") / "tree.json", NARROW)
    return medusa_train.load(skilled("medusa"), tree=tree, dtype="float32")


@pytest.fixture(scope="module")
def question(own: Path) -> str:
    text: str = read_lines(own)[0]["messages"][0]["content"]
    return text


def ids_of(question: str, tokenizer: Any) -> list[int]:
    prompt: list[int] = tokenizer(render([{"role": "user", "content": question}]))["input_ids"]
    return prompt


def test_an_answer_is_the_models_own_and_its_pieces_say_what_was_drafted(
    loaded: Any, question: str, exact_model: Any, tokenizer: Any
) -> None:
    expected = greedy(exact_model, ids_of(question, tokenizer), 24)
    text = tokenizer.decode(expected, skip_special_tokens=True)
    assert loaded.generate(question, max_new_tokens=24) == text
    reply = loaded.reply(question, max_new_tokens=24)
    pieces = list(reply)
    assert "".join(piece.text for piece in pieces) == reply.text == text
    assert reply.tokens == expected
    assert reply.finish == ("eos" if expected[-1] == EOS else "length")
    assert reply.tokens_per_step == pytest.approx((len(expected) - 1) / reply.steps)
    assert reply.steps < len(expected) - 1
    drafted = sum(piece.drafted for piece in pieces)
    assert 0 < drafted <= len(expected) - reply.steps
    assert not pieces[0].drafted  # the prefill's
    assert reply.seconds > 0


def test_a_stream_can_be_left_and_read_on(loaded: Any, question: str) -> None:
    whole = loaded.generate(question, max_new_tokens=20)
    reply = loaded.reply(question, max_new_tokens=20)
    first = next(iter(reply)).text
    assert reply.finish is None
    assert first + "".join(piece.text for piece in reply) == whole
    abandoned = loaded.reply(question, max_new_tokens=20)
    next(iter(abandoned))
    assert loaded.generate(question, max_new_tokens=20) == whole
    with pytest.raises(MedusaError, match="another answer"):
        abandoned.read()


def test_a_chat_continues_what_was_read(
    loaded: Any, question: str, exact_model: Any, tokenizer: Any
) -> None:
    """Each turn is answered as if the whole text was read anew."""
    messages: list[dict[str, Any]] = []
    for asked in (question, "two red", "large"):
        messages.append({"role": "user", "content": asked})
        prompt = tokenizer(render(messages))["input_ids"]
        expected = tokenizer.decode(greedy(exact_model, prompt, 16), skip_special_tokens=True)
        assert loaded.generate(messages, max_new_tokens=16) == expected
        messages.append({"role": "assistant", "content": expected})
    other = [
        {"role": "system", "content": "five"},
        {"role": "user", "content": [{"type": "text", "text": "six"}]},
    ]
    prompt = tokenizer(render([other[0], {"role": "user", "content": "six"}]))["input_ids"]
    expected = tokenizer.decode(greedy(exact_model, prompt, 16), skip_special_tokens=True)
    assert loaded.generate(other, max_new_tokens=16) == expected


def test_stop_strings_end_an_answer_before_them(loaded: Any, question: str) -> None:
    whole = loaded.generate(question, max_new_tokens=24)
    for start, length in ((4, 1), (5, 3), (9, 2)):
        stop = whole[start : start + length]
        for given in (stop, [stop, "never to be seen"]):
            reply = loaded.reply(question, max_new_tokens=24, stop=given)
            assert reply.read() == whole[: whole.index(stop)]
            assert reply.finish == "stop"
    assert loaded.generate(question, max_new_tokens=24, stop=whole[-1] + "x") == whole
    for bad in ("", [""], 5):
        with pytest.raises(MedusaError, match="stop"):
            loaded.generate(question, stop=bad)


def test_other_end_tokens_and_raw_prompts(
    loaded: Any, question: str, exact_model: Any, tokenizer: Any
) -> None:
    answer = greedy(exact_model, ids_of(question, tokenizer), 24, ())
    reply = loaded.reply(question, max_new_tokens=24, eos_ids=[answer[6]])
    reply.read()
    assert reply.tokens == answer[: answer.index(answer[6]) + 1]
    assert reply.finish == "eos"
    raw = greedy(exact_model, tokenizer("one two")["input_ids"], 12)
    text = tokenizer.decode(raw, skip_special_tokens=True)
    assert loaded.generate("one two", max_new_tokens=12, raw=True) == text
    ends = tokenizer.decode([answer[6]])
    if not ends.startswith("<"):
        stopped = loaded.generate(question, max_new_tokens=24, stop=ends)
        assert ends not in stopped


def test_samples_repeat_with_their_seed(loaded: Any, question: str) -> None:
    def sample(**options: Any) -> str:
        return str(loaded.generate(question, max_new_tokens=12, temperature=1.0, **options))

    assert sample(seed=3) == sample(seed=3)
    assert len({sample(seed=seed) for seed in range(6)}) > 3
    assert len({sample() for _ in range(6)}) > 3
    whole = loaded.generate(question, max_new_tokens=12)
    assert sample(seed=1, top_k=1) == whole
    assert sample(seed=1, top_p=1e-6) == whole
    assert loaded.generate(question, max_new_tokens=12, temperature=1e-5, seed=1) == whole
    assert sample(seed=1, typical=True) == sample(seed=2, typical=True)
    for bad in ({"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -1}, {"max_new_tokens": 0}):
        with pytest.raises(MedusaError):
            loaded.generate(question, **{"temperature": 1.0, **bad})


@pytest.mark.parametrize(
    "chat",
    [
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
        [{"role": "assistant", "content": "x", "tool_calls": [{"id": 1}]}],
        [{"content": "x"}],
        5,
    ],
)
def test_messages_that_are_refused(chat: Any, loaded: Any) -> None:
    with pytest.raises(MedusaError):
        loaded.generate(chat)


def test_other_keys_of_messages_are_named_once(
    loaded: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        loaded.generate([{"role": "user", "content": "one", "nickname": "x"}], max_new_tokens=2)
    assert caplog.text.count("nickname") == 1


def test_a_model_alone_and_drafts_without_training(
    model: Path,
    skilled: Callable[[str], Path],
    own: Path,
    question: str,
    exact_model: Any,
    tokenizer: Any,
    tmp_path: Path,
) -> None:
    expected = greedy(exact_model, ids_of(question, tokenizer), 24)
    text = tokenizer.decode(expected, skip_special_tokens=True)
    tree = write_tree(tmp_path / "tree.json", NARROW)
    ways: list[dict[str, Any]] = [
        {"base_model": model},
        {"base_model": model, "draft": "prompt_lookup", "draft_settings": {"max_ngram": 2}},
        {"base_model": model, "draft": "lookahead"},
        {"base_model": model, "draft": "rest", "draft_settings": {"datastore": str(own)}},
        {"model": skilled("medusa"), "tree": tree, "draft": "medusa+prompt_lookup"},
        {"model": skilled("eagle3"), "tree": "dynamic:8x3"},
        {"model": skilled("hydra++") / "heads", "base_model": model},
    ]
    for way in ways:
        found = medusa_train.load(**way, dtype="float32")
        reply = found.reply(question, max_new_tokens=24)
        assert reply.read() == text, way
        if len(way) == 1:
            assert reply.tokens_per_step == 1.0
        elif way.get("draft") == "rest":
            assert reply.tokens_per_step > 1.5  # which copies the very answer


@pytest.mark.parametrize(
    "way",
    [
        {"draft_settings": {"max_ngram": 2}},
        {"draft": "no_such"},
        {"draft": "prompt_lookup", "draft_settings": {"max_ngrams": 2}},
        {"draft": "rest"},
        {"base_model": "./none"},
        {"model": "./none"},
        {"chat_template": "no_such"},
        {"special_tokens": {"eos_token": "<none>"}},
    ],
)
def test_what_cannot_be_loaded(way: dict[str, Any], model: Path) -> None:
    given = {"base_model": str(model), **way} if "model" not in way else way
    with pytest.raises(MedusaError):
        medusa_train.load(**given, dtype="float32").generate("x", max_new_tokens=1)


def test_a_template_and_end_tokens_of_ones_own(
    model: Path, exact_model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("{{ style }}{% for m in messages %}[{{ m.content }}]{% endfor %}:")
    prompt = tokenizer("S[two]:")["input_ids"]
    answer = greedy(exact_model, prompt, 12, ())
    end = next(token for token in answer[3:] if tokenizer.decode([token]).strip())
    found = medusa_train.load(
        base_model=model,
        dtype="float32",
        chat_template=str(path),
        chat_template_kwargs={"style": "S"},
        special_tokens={"eos_token": tokenizer.convert_ids_to_tokens(end)},
    )
    reply = found.reply("two", max_new_tokens=12)
    reply.read()
    assert reply.tokens == answer[: answer.index(end) + 1]


def test_an_answer_ends_where_its_template_ends_a_turn(tmp_path: Path) -> None:
    """At a token that neither the tokenizer nor generation_config.json names."""
    model = write_scripted_model(tmp_path / "model", " one", " two", "<|system|>", " red")
    template = tmp_path / "turns.jinja"
    template.write_text(TEMPLATE.replace("eos_token", "'<|system|>'"), encoding="utf-8")
    found = medusa_train.load(base_model=model, dtype="float32", chat_template=str(template))
    reply = found.reply("two", max_new_tokens=12)
    assert reply.read() == " one two"
    assert (reply.finish, reply.tokens[-1]) == ("eos", SYSTEM)


def test_a_prompt_beyond_the_context_is_refused(loaded: Any, tmp_path: Path) -> None:
    with pytest.raises(MedusaError, match="256"):
        loaded.generate("~" * 300)
    reply = loaded.reply("~" * 250, max_new_tokens=50)
    reply.read()
    assert reply.finish in ("context", "eos")
    assert write_lines(tmp_path / "x", []).exists()


def test_an_answer_without_a_limit_remembers_its_text_as_it_grows(tmp_path: Path) -> None:
    """To more positions than memory is reserved for at first."""
    model = write_model(tmp_path / "model", max_position_embeddings=290)
    prompt = [5 + 7 * n % (VOCABULARY - 5) for n in range(250)]
    reply = medusa_train.load(base_model=model, dtype="float32").reply(
        prompt, max_new_tokens=None, raw=True, eos_ids=[]
    )
    reply.read()
    assert (reply.finish, len(reply.tokens)) == ("context", 41)
    text = [*prompt, *reply.tokens[:-1]]
    logits = plain.load_model(model)(torch.tensor([text])).logits[0]
    assert reply.tokens == logits[len(prompt) - 1 :].argmax(-1).tolist()
