"""Text in, text out: the decoder's answer, whole or streamed, stop strings, sampling, limits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from medusa_train.api import load
from medusa_train.data.conversation import Message
from medusa_train.errors import DataError, MedusaError
from medusa_train.inference.generate import Decoder
from medusa_train.inference.model import Model
from medusa_train.trees.tree import Tree
from tests.evaluation.tiny_model import CONTEXT, write_backbone, write_run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    home = tmp_path_factory.mktemp("model")
    return load(write_run(home / "run", write_backbone(home / "backbone")), dtype="float32")


def test_the_answer_is_the_loops_own(model: Model) -> None:
    tokenizer = model.backbone.tokenizer
    tokens = (
        Decoder(model.backbone)
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
    run = write_run(tmp_path / "run", write_backbone(tmp_path / "backbone"))
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
        Decoder(model.backbone).generate([1, 99999], 5)
    begun = iter(model.reply("Hi?", 30, raw=True))
    next(begun)
    model.generate("Hi?", 5)
    with pytest.raises(MedusaError, match="another answer was started"):
        list(begun)


def test_a_backbone_alone_answers_plainly(tmp_path: Path, model: Model) -> None:
    reply = load(base_model=write_backbone(tmp_path / "backbone"), dtype="float32").reply("Hi?", 20)
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
        ({"role": "assistant", "content": None, "tool_calls": [{}]}, "tool_calls"),
        ({"content": "Hi?"}, "message 1: expected"),
    ]
    for message, problem in bad:
        with pytest.raises(DataError, match=problem):
            model.generate([message], 20)
    for stop in ("", ["a", ""], [3]):
        with pytest.raises(MedusaError, match="stop"):
            model.generate("Hi?", 20, stop=stop)  # type: ignore[arg-type]


def test_a_script_that_ends_within_an_answer_prints_no_traceback(tmp_path: Path) -> None:
    write_backbone(tmp_path / "backbone")
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
    ],
)
def test_prompts_and_options_of_another_type_are_refused(
    model: Model, prompt: object, options: dict[str, object], reason: str
) -> None:
    with pytest.raises(MedusaError, match=reason):
        model.generate(prompt, 2, **options)  # type: ignore[arg-type]


def test_what_has_no_effect_on_a_loaded_model_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = write_run(tmp_path / "run", write_backbone(tmp_path / "backbone"))
    with pytest.raises(MedusaError, match="draft_settings are those of a draft without training"):
        load(run, draft_settings={"max_ngram": 3})
    with pytest.raises(MedusaError, match="cannot be read: Is a directory"):
        load(run, tree=run)
    model = load(run, dtype="float32", chat_template_kwargs={"enable_thinking_": False})
    model.generate("Hi?", 2)
    (record,) = caplog.records
    assert record.getMessage().endswith("not in the chat template: enable_thinking_")
