"""Text in, text out: the decoder's answer, whole or streamed, stop strings, sampling, limits."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing

from medusa_train.api import load
from medusa_train.data.conversation import Message
from medusa_train.data.records import normalize
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.errors import DataError, MedusaError
from medusa_train.inference import answer_lock
from medusa_train.inference import generate as decoding
from medusa_train.inference.generate import Decoder
from medusa_train.inference.model import Model, Reply
from medusa_train.trees.tree import Tree
from tests.chat_templates import TOOLS_CHATML
from tests.evaluation.tiny_model import CONTEXT, write_run, write_target_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    home = tmp_path_factory.mktemp("model")
    return load(write_run(home / "run", write_target_model(home / "backbone")), dtype="float32")


def test_the_answer_is_the_loops_own(model: Model) -> None:
    tokenizer = model.target_model.tokenizer
    tokens = (
        Decoder(model.target_model)
        .generate(tokenizer("<bos><user>Hi?<assistant>")["input_ids"], 40)
        .tokens
    )
    text = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert model.generate("Hi?", 40) == text
    assert model.generate([{"role": "user", "content": "Hi?", "name": "Ann"}], 40) == text
    stopped = model.reply("Hi?", 40)
    assert (
        next(iter(stopped)).text + "".join(piece.text for piece in stopped)
        == stopped.read()
        == text
    )
    assert model.generate([Message("user", "Hi?")], 40) == text
    assert model.generate("<bos><user>Hi?<assistant>", 40, raw=True) == text
    reply = model.reply("Hi?", 40)
    assert "".join(piece.text for piece in reply) == reply.text == text
    assert reply.tokens == tokens
    assert reply.finish in ("eos", "length")
    assert reply.tokens_per_step == (len(tokens) - 1) / reply.steps


def test_a_loaded_run_decodes_with_its_heads(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", write_target_model(tmp_path / "backbone"))
    Tree.cartesian([300]).save(run / "tree.json")  # of all tokens: every step accepts one
    reply = load(run, dtype="float32").reply("Hi?", 21, eos_ids=[])
    assert sum(piece.drafted for piece in reply)
    assert (len(reply.tokens), reply.steps) == (21, 10)


def test_a_stop_string_ends_the_answer(model: Model) -> None:
    text = model.generate("Hi?", 40)
    stop = text[9:12]
    reply = model.reply("Hi?", 40, stop=stop)
    assert reply.read() == text[: text.index(stop)]
    assert reply.finish == "stop"
    assert len(reply.tokens) < 40
    other = model.reply("Hi?", 40, eos_ids=[reply.tokens[5], reply.tokens[3]])
    other.read()
    assert (other.finish, other.tokens) == ("eos", reply.tokens[:4])
    special = model.reply("x", 60, eos_ids=[], stop="<eos>")  # which the text leaves out
    special.read()
    assert 2 not in special.tokens[:-1]
    assert (special.tokens[-1], special.finish) == (2, "eos")


def test_sampling_is_seeded(model: Model) -> None:
    first = model.generate("Hi?", 30, temperature=1.0, seed=1)
    assert model.generate("Hi?", 30, temperature=1.0, seed=1) == first
    assert model.generate("Hi?", 30, temperature=1.0, seed=2) != first
    unseeded = {model.generate("Hi?", 30, temperature=1.0) for _ in range(5)}
    assert len(unseeded) > 1
    assert model.generate("Hi?", 30, temperature=1.0, top_k=1, seed=3) == model.generate("Hi?", 30)
    # greedy at temperature 0
    assert model.generate("Hi?", 30, typical=True) == model.generate("Hi?", 30)
    typical = model.reply("Hi?", 30, temperature=0.7, typical=True)
    assert typical.read() == model.generate("Hi?", 30, temperature=0.7, typical=True)


def test_limits(model: Model) -> None:
    with pytest.raises(MedusaError, match=f"the model's context is {CONTEXT}"):
        model.generate("x" * CONTEXT)
    with pytest.raises(MedusaError, match=r"top_p.*got 2"):
        model.generate("Hi?", temperature=1.0, top_p=2)
    with pytest.raises(MedusaError, match="temperature must be at least 1e-6"):
        model.generate("Hi?", temperature=1e-40)
    with pytest.raises(MedusaError, match="the prompt has the token 99999, but the model only"):
        Decoder(model.target_model).generate([1, 99999], 5)
    begun = iter(model.reply("Hi?", 30, raw=True))
    next(begun)
    model.generate("Hi?", 5)
    with pytest.raises(MedusaError, match="another answer was started"):
        list(begun)


PROMPTS = ["Hi?", "Name three fruits.", "x" * 40, "And now?"]


def streamed(model: Model, prompt: str, count: int) -> str:
    return "".join(piece.text for piece in model.reply(prompt, count))


@pytest.mark.parametrize("answer", [Model.generate, streamed])
def test_threads_that_share_a_model_get_their_own_answers(
    answer: Callable[[Model, str, int], str], model: Model
) -> None:
    expected = [model.generate(prompt, 40) for prompt in PROMPTS]
    assert len(set(expected)) == len(PROMPTS)
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        for _ in range(3):
            assert list(threads.map(lambda prompt: answer(model, prompt, 40), PROMPTS)) == expected


def close(reply: Reply) -> None:
    reply.close()


def interrupt(reply: Reply) -> None:
    reply._stream.push = lambda token: 1 // 0  # type: ignore[assignment, method-assign]
    with pytest.raises(ZeroDivisionError):
        next(reply)


def drop(reply: Reply) -> None:
    """The caller drops it."""


def stop(reply: Reply) -> None:
    reply._stream.stopped = True
    reply.read()


@pytest.mark.parametrize("leave", [drop, close, interrupt, stop])
def test_a_reply_that_was_left_lets_other_threads_answer(
    leave: Callable[[Reply], None], model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_lock, "ABANDONED_SECONDS", 600.0)
    reply: Reply | None = model.reply("x", 40)
    assert reply is not None
    next(reply)
    leave(reply)
    if leave is drop:
        reply = None
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(model.generate, "Hi?", 5).result(timeout=30)
    assert answer == model.generate("Hi?", 5)


def test_another_thread_waits_for_a_reply_that_is_read(model: Model) -> None:
    reply = model.reply("Name three fruits.", 40)
    next(reply)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(model.generate, "Hi?", 5)
        time.sleep(0.2)
        assert not waiting.done()
        assert reply.read() == reply.text
        assert waiting.result(timeout=30) == model.generate("Hi?", 5)
    assert reply.text == model.generate("Name three fruits.", 40)


def test_a_reply_that_nobody_reads_on_ends_with_an_error(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_lock, "ABANDONED_SECONDS", 0.1)
    reply = model.reply("Name three fruits.", 40)
    next(reply)
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(model.generate, "Hi?", 5).result(timeout=30)
    assert answer == model.generate("Hi?", 5)
    with pytest.raises(MedusaError, match="another answer was started"):
        reply.read()
    assert (reply.finish, list(reply)) == (None, [])


def test_pieces_of_one_answer_may_be_read_in_changing_threads(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As web servers read an iterator: each piece in any thread of a pool."""
    monkeypatch.setattr(answer_lock, "ABANDONED_HERE_SECONDS", 60.0)  # a busy machine pauses
    expected = [model.generate(prompt, 20) for prompt in PROMPTS]

    async def read(prompt: str) -> str:
        loop = asyncio.get_running_loop()
        reply = model.reply(prompt, 20)
        while await loop.run_in_executor(threads, lambda: next(reply, None)) is not None:
            pass
        return reply.text

    async def read_all() -> list[str]:
        return await asyncio.gather(*map(read, PROMPTS))

    with ThreadPoolExecutor(8) as threads:
        assert asyncio.run(read_all()) == expected


def test_a_closed_reply_keeps_what_was_read(model: Model) -> None:
    reply = model.reply("Name three fruits.", 40)
    first = next(reply)
    reply.close()
    assert (reply.read(), reply.text, reply.finish) == (first.text, first.text, None)


def test_a_reply_may_be_closed_while_another_thread_reads_it(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a web server does when its client leaves."""
    monkeypatch.setattr(answer_lock, "ABANDONED_SECONDS", 600.0)
    within_pass, is_closed = threading.Event(), threading.Event()
    step_single = decoding.step_single

    def slow(*args: Any) -> Any:
        within_pass.set()
        is_closed.wait(30)
        return step_single(*args)

    monkeypatch.setattr(decoding, "step_single", slow)
    reply = model.reply("Name three fruits.", 40)
    with ThreadPoolExecutor(1) as threads:
        read = threads.submit(lambda: "".join(piece.text for piece in reply))
        within_pass.wait(30)
        reply.close()
        is_closed.set()
        assert read.result(timeout=30) == reply.text
    monkeypatch.undo()
    assert len(reply.tokens) < 5
    with ThreadPoolExecutor(1) as threads:  # the reply is still referred to
        answer = threads.submit(model.generate, "Hi?", 5).result(timeout=30)
    assert answer == model.generate("Hi?", 5)


def test_prompts_are_encoded_one_after_the_other(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control tokens in a text change a setting of the tokenizer while it is encoded."""
    encode = ChatEncoder.prompt
    at_once: list[int] = []
    encoding: set[int] = set()

    def slow(encoder: ChatEncoder, *chat: Any) -> list[int]:
        encoding.add(threading.get_ident())
        at_once.append(len(encoding))
        time.sleep(0.02)
        encoding.discard(threading.get_ident())
        return encode(encoder, *chat)

    monkeypatch.setattr(ChatEncoder, "prompt", slow)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda prompt: model.generate(prompt, 2), PROMPTS))
    assert at_once == [1, 1, 1, 1]


@pytest.mark.parametrize(
    "text",
    ["<user>Hi?<assistant>", "<bos><user>Hi?<assistant>", "<bos><bos><user>Hi?<assistant>"],
)
def test_a_raw_text_begins_with_one_bos_token(text: str, model: Model) -> None:
    """As with a text that a chat template rendered, for a tokenizer that adds BOS by itself."""
    expected = model.generate("Hi?", 20)
    backend = model.target_model.tokenizer.backend_tokenizer
    before = backend.post_processor
    backend.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    try:
        assert model.target_model.tokenizer("Hi?")["input_ids"][0] == 1
        assert model.generate(text, 20, raw=True) == expected
    finally:
        backend.post_processor = before


def test_a_raw_text_begins_with_all_tokens_that_the_tokenizer_puts_before_texts(
    model: Model,
) -> None:
    """Some put several there, as GLM's `[gMASK]<sop>`."""
    backend = model.target_model.tokenizer.backend_tokenizer
    before = backend.post_processor
    backend.post_processor = TemplateProcessing(
        single="<pad> <bos> $A", special_tokens=[("<pad>", 0), ("<bos>", 1)]
    )
    try:
        expected = model.generate(
            [0, 1, *model.target_model.tokenizer("Hi?")["input_ids"][2:]], 20, raw=True
        )
        assert model.generate("Hi?", 20, raw=True) == expected
        assert model.generate("<pad><bos>Hi?", 20, raw=True) == expected
    finally:
        backend.post_processor = before


def test_an_answer_without_a_limit_ends_with_the_context(model: Model) -> None:
    reply = model.reply("x" * (CONTEXT - 40), None, eos_ids=[])
    reply.read()
    assert (len(reply.tokens), reply.finish) == (
        CONTEXT - prompt_length(model, CONTEXT - 40) + 1,
        "context",
    )


def prompt_length(model: Model, characters: int) -> int:
    prompt = "<bos><user>" + "x" * characters + "<assistant>"
    return len(model.target_model.tokenizer(prompt)["input_ids"])


SAMPLED = {"temperature": 0.9, "seed": 3}


@pytest.mark.parametrize(
    ("options", "same"),
    [
        ({"max_new_tokens": np.int64(9)}, {"max_new_tokens": 9}),
        ({"max_new_tokens": torch.tensor(9)}, {"max_new_tokens": 9}),
        ({**SAMPLED, "seed": np.int64(3)}, SAMPLED),
        ({**SAMPLED, "seed": np.uint64(2**63)}, {**SAMPLED, "seed": 2**63}),
        ({**SAMPLED, "seed": torch.tensor(3)}, SAMPLED),
        ({**SAMPLED, "temperature": np.float64(0.9)}, SAMPLED),
        ({**SAMPLED, "temperature": torch.tensor(0.9, dtype=torch.float64)}, SAMPLED),
        ({**SAMPLED, "top_p": None, "top_k": None}, SAMPLED),
        ({**SAMPLED, "top_k": np.int32(4)}, {**SAMPLED, "top_k": 4}),
        ({**SAMPLED, "top_p": np.float64(0.5)}, {**SAMPLED, "top_p": 0.5}),
        (
            {**SAMPLED, "typical": True, "epsilon": None, "delta": None},
            {**SAMPLED, "typical": True},
        ),
        ({"temperature": None, "top_p": None, "top_k": None}, {}),
    ],
    ids=str,
)
def test_options_may_be_numbers_of_other_libraries_or_none(
    options: dict[str, Any], same: dict[str, Any], model: Model
) -> None:
    limit = {"max_new_tokens": 20}
    assert model.generate("Hi?", **{**limit, **options}) == model.generate(
        "Hi?", **{**limit, **same}
    )


@pytest.mark.parametrize(
    "kind",
    [
        *[list, tuple, set, np.array, torch.tensor],
        *[lambda ids: ids[0], lambda ids: np.int64(ids[0]), lambda ids: torch.tensor(ids[0])],
    ],
)
def test_eos_ids_are_one_token_or_any_collection(kind: Callable[[Any], Any], model: Model) -> None:
    plain = model.reply("Hi?", 20)
    plain.read()
    reply = model.reply("Hi?", 20, eos_ids=kind([plain.tokens[4]]))
    reply.read()
    assert reply.finish == "eos"
    assert reply.tokens == plain.tokens[: plain.tokens.index(plain.tokens[4]) + 1]


def test_the_token_that_ends_an_answer_is_no_text(model: Model) -> None:
    plain = model.reply("Hi?", 12)
    plain.read()
    texts = [model.generate("Hi?", count) for count in range(1, 13)]
    shown = 0
    for token in set(plain.tokens[1:]):
        end = plain.tokens.index(token)
        if end:
            assert model.generate("Hi?", 12, eos_ids=[token]) == texts[end - 1]
            shown += texts[end] != texts[end - 1]
    assert shown  # as text, where it ends nothing


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_a_raw_prompt_may_be_token_ids(kind: Callable[[Any], Any], model: Model) -> None:
    ids = model.target_model.tokenizer("<bos><user>Hi?<assistant>")["input_ids"]
    assert model.generate(kind(ids), 20, raw=True) == model.generate("Hi?", 20)


def test_a_target_model_alone_answers_plainly(tmp_path: Path, model: Model) -> None:
    reply = load(base_model=write_target_model(tmp_path / "backbone"), dtype="float32").reply(
        "Hi?", 20
    )
    assert reply.read() == model.generate("Hi?", 20)
    assert reply.tokens_per_step == 1.0


def test_contents_are_text_or_parts_of_text(model: Model) -> None:
    text = model.generate("Hi?", 20)
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i?"}]
    assert model.generate([{"role": "user", "content": parts}], 20, stop=None) == text
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    bad: list[tuple[dict[str, object], str]] = [
        ({"role": "user", "content": None}, "turn 1: 'content'.*null"),
        ({"role": "user"}, "turn 1: 'content'.*missing"),
        ({"role": "user", "content": image}, "not text"),
        ({"role": "assistant", "content": None, "tool_calls": [{}]}, "tool call"),
        ({"content": "Hi?"}, "turn 1: 'role' must be a string"),
    ]
    for message, problem in bad:
        with pytest.raises(DataError, match=problem):
            model.generate([message], 20)
    for stop in ("", ["a", ""], [3]):
        with pytest.raises(MedusaError, match="stop"):
            model.generate("Hi?", 20, stop=stop)  # type: ignore[arg-type]


def test_a_script_that_ends_within_an_answer_prints_no_traceback(tmp_path: Path) -> None:
    write_target_model(tmp_path / "backbone")
    script = (
        "from medusa_train import load\n"
        "model = load(base_model='backbone', dtype='float32')\n"
        "text = model.generate('Hi?', 20)\n"
        "stopped = model.reply('Hi?', 20, stop=text[2:4])\n"
        "print(repr(stopped.read()), stopped.finish)\n"
        "abandoned = model.reply('Hi?', 20)\n"
        "next(iter(abandoned))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.endswith(" stop\n")
    assert "Traceback" not in done.stderr


def test_keys_of_messages_that_are_not_read_are_named_once(
    model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    part = {"type": "text", "text": "Hi?", "cache": 1}
    chat = [{"role": "user", "content": [part], "weight_of_it": 0, "reasoning": "R", "x": None}]
    for _ in range(2):
        model.generate(chat, 2)
    (record,) = caplog.records
    assert record.getMessage() == "messages: not read: content.cache, reasoning, weight_of_it"


@pytest.mark.parametrize(
    ("prompt", "options", "reason"),
    [
        (None, {}, "a prompt is text, or a list of messages"),
        (5, {}, "it is a number"),
        ([], {}, "it is an empty list"),
        (["Hi?", "Ho?"], {}, r"a string.*\[model.generate\(prompt\) for prompt in prompts\]"),
        ([[{"role": "user", "content": "Hi?"}]], {}, "it is a list with a list"),
        ([5, 6], {}, r"for token ids model.generate\(tokenizer.decode\(ids\), raw=True\)"),
        (["Hi?"], {"raw": True}, r"\[model.generate\(text, raw=True\) for text in texts\]"),
        ([{"role": "user", "content": "Hi?"}], {"raw": True}, "leave raw out for a chat"),
        ("\ud800", {}, "lone surrogate"),
        ("Hi?", {"stop": 5}, "expected a string or a list of strings, got 5"),
        ("Hi?", {"max_new_tokens": 5.0}, "max_new_tokens: expected an integer, got 5.0"),
        ("Hi?", {"max_new_tokens": "5"}, "max_new_tokens: expected an integer, got '5'"),
        ("Hi?", {"seed": "a"}, "seed: expected an integer, got 'a'"),
        ("Hi?", {"seed": 2**64}, "seed: expected a number of 64 bits"),
        ("Hi?", {"temperature": "warm"}, "temperature: expected a number, got 'warm'"),
        ("Hi?", {"temperature": 1, "top_p": [1]}, r"top_p: expected a number, got \[1\]"),
        ("Hi?", {"temperature": 1, "top_k": 2.5}, "top_k: expected an integer, got 2.5"),
        ("Hi?", {"temperature": 1, "typical": True, "delta": "x"}, "delta: expected a number"),
        ("Hi?", {"eos_ids": "<eos>"}, "eos_ids: expected a token id or a list of them, got '<eos>"),
        ("Hi?", {"eos_ids": [[2]]}, "eos_ids: expected a token id"),
        ("Hi?", {"eos_ids": [None]}, "eos_ids: expected a token id"),
        (None, {"raw": True}, "with raw=True, expected a text or a list of token ids, got None"),
        (b"Hi?", {"raw": True}, "with raw=True, expected a text"),
        (["Hi?"], {"raw": True}, "with raw=True, expected a text"),
        ([[1, 2]], {"raw": True}, "with raw=True, expected a text"),
        ([{"role": "user", "content": "Hi?"}], {"raw": True}, "with raw=True, expected a text"),
        ([1, -1], {"raw": True}, "the prompt has the token -1"),
        ([], {"raw": True}, "the prompt is empty"),
        ("\ud800", {"raw": True}, "lone surrogate"),
        (np.array([1, 2]), {}, "a prompt is text, or a list of messages"),
        ("Hi?", {"tools": ["find"]}, "'tools' must be a list of objects"),
        ("Hi?", {"tools": [{"name": "find"}]}, "the chat template does not render tools"),
        ("Hi?", {"tools": [{"name": "find"}], "raw": True}, "which raw=True leaves out"),
        (
            [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "We"}],
            {},
            r"turn 2 \(assistant\): a chat that is to be answered ends with the user's turn",
        ),
    ],
)
def test_prompts_and_options_of_another_type_are_refused(
    model: Model, prompt: object, options: dict[str, object], reason: str
) -> None:
    with pytest.raises(MedusaError, match=reason):
        model.generate(prompt, **{"max_new_tokens": 2, **options})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("run")
    return write_run(home / "run", write_target_model(home / "backbone"))


def test_chats_with_tools_are_rendered_as_in_training(run_dir: Path, tmp_path: Path) -> None:
    template = tmp_path / "tools.jinja"
    template.write_text(TOOLS_CHATML, encoding="utf-8")
    model = load(run_dir, dtype="float32", chat_template=template)
    call = {"id": "c1", "function": {"name": "find", "arguments": '{"place": "Ulm"}'}}
    turns = [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "There."},
    ]
    tools = [{"name": "find", "parameters": {"type": "object"}}]
    answer = {"role": "assistant", "content": "Yes."}
    record = {"messages": [*turns, answer], "tools": tools}
    chat = normalize(record, variables=["tools"])
    (row,) = ChatEncoder(model.target_model.tokenizer, str(template)).encode(chat)
    end = list(row.answers.values())[-1]
    start = 1 + max(token for token in range(end) if not row.supervised[token])
    assert model._ids(turns, False, tools) == row.ids[:start]


def test_load_takes_torchs_dtypes_and_paths(run_dir: Path, tmp_path: Path) -> None:
    template = tmp_path / "short.jinja"
    template.write_text("{{ messages[0].content }}", encoding="utf-8")
    model = load(run_dir, dtype=torch.float32, chat_template=template)
    assert model.target_model.dtype == torch.float32
    assert model.generate("Hi?", 5) == load(run_dir, dtype="float32").generate("Hi?", 5, raw=True)
    assert load(run_dir, dtype=None).target_model.dtype == load(run_dir).target_model.dtype


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": 5}, "dtype: must be auto.*got 5"),
        ({"tree": 5}, "tree '5': no such file"),
        ({"draft": 5}, "draft: must be"),
        ({"chat_template_kwargs": [("a", 1)]}, "chat_template_kwargs: expected a mapping, got"),
        ({"special_tokens": ["<eos>"]}, "special_tokens: expected a mapping, got"),
        ({"draft": "prompt_lookup", "draft_settings": [1]}, "draft_settings: expected a mapping"),
    ],
    ids=str,
)
def test_arguments_of_load_of_another_type_are_errors(
    options: dict[str, Any], reason: str, run_dir: Path
) -> None:
    with pytest.raises(MedusaError, match=reason):
        load(run_dir, **options)


def test_what_has_no_effect_on_a_loaded_model_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = write_run(tmp_path / "run", write_target_model(tmp_path / "backbone"))
    with pytest.raises(MedusaError, match="draft_settings are those of a draft without training"):
        load(run, draft_settings={"max_ngram": 3})
    with pytest.raises(MedusaError, match="cannot be read: Is a directory"):
        load(run, tree=run)
    model = load(run, dtype="float32", chat_template_kwargs={"enable_thinking_": False})
    model.generate("Hi?", 2)
    (record,) = caplog.records
    assert record.getMessage().endswith("not in the chat template: enable_thinking_")
