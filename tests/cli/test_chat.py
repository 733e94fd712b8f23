"""The chat in the terminal: history, commands, colours and figures."""

import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from medusa_train.api import load
from medusa_train.cli.chat import Chat, printable
from medusa_train.cli.evaluate import app
from medusa_train.inference.detokenize import TextStream
from medusa_train.inference.generate import Step
from medusa_train.inference.model import Model, Reply
from tests.evaluation.tiny_model import write_run, write_target_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    home: Path = tmp_path_factory.mktemp("model")
    return load(write_run(home / "run", write_target_model(home / "backbone")), dtype="float32")


def _talk(model: Model, monkeypatch: pytest.MonkeyPatch, *lines: str, color: bool = False) -> str:
    waiting: Iterator[str] = iter(lines)

    def read(*_: object, **__: object) -> str:
        try:
            return next(waiting)
        except StopIteration:
            raise EOFError from None

    out = io.StringIO()
    console = Console(
        file=out, force_terminal=color, color_system="standard" if color else None, width=80
    )
    monkeypatch.setattr(console, "input", read)
    Chat(model, console, 24).run()
    return out.getvalue()


def test_an_answer_with_its_figures(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    out = _talk(model, monkeypatch, "Hi?", "")
    assert printable(model.generate("Hi?", 24)) in out
    reply = model.reply("Hi?", 24)
    reply.read()
    assert f"{len(reply.tokens)} tokens, {reply.tokens_per_step:.2f} tokens per step" in out
    assert out.count("tokens per step") == 1


def test_accepted_draft_tokens_are_green(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = model.target_model.tokenizer
    a, b, c, d = tokenizer("abcd")["input_ids"]

    def reply(*_: object, **__: object) -> Reply:
        steps = (step for step in (Step([a], 0), Step([b, c, d], 2)))
        return Reply(steps, TextStream(tokenizer), frozenset(), 4)

    monkeypatch.setattr(model, "reply", reply)
    coloured = _talk(model, monkeypatch, "Hi?", color=True)
    assert "a\x1b[32mb\x1b[0m\x1b[32mc\x1b[0md\n" in coloured
    assert "4 tokens, 3.00 tokens per step" in coloured


def test_the_history_is_kept_until_new(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    first = model.generate("Hi?", 24)
    history = [
        {"role": "user", "content": "Hi?"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "Go on."},
    ]
    out = _talk(model, monkeypatch, "Hi?", "Go on.", "/new", "Go on.", "/exit", "never read")
    assert printable(model.generate(history, 24)) in out
    assert printable(model.generate("Go on.", 24)) in out
    assert out.count("tokens per step") == 3


def test_mistakes_do_not_end_the_chat(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    out = _talk(
        model, monkeypatch, "x" * 300, "/what", "/temperature warm", "/temperature 0.5", "Hi?"
    )
    assert "the model's context is 256" in out
    assert out.count("/exit or Ctrl-D quits") == 3
    assert out.count("tokens per step") == 1
    once = (
        "{% if messages|length > 1 %}{{ raise_exception('one turn only') }}{% endif %}{{"
        " messages[0].content }}"
    )
    target_model = model.target_model
    monkeypatch.setattr(target_model.tokenizer, "chat_template", once)
    out = _talk(Model(target_model), monkeypatch, "Hi?", "And?", "/new", "Hi?")
    assert out.count("one turn only\n/new starts a new chat") == 1
    assert out.count("tokens per step") == 2


def test_control_characters_are_replaced() -> None:
    assert printable("a\tb\x1b[2J\r\nü世") == "a   b\ufffd[2J\ufffd\nü世"
    # of several scripts, and what joins an emoji
    spaces = "a\u00a0b\u3000c\u202fd, \U0001f469\u200d\U0001f52c"
    assert printable(spaces) == spaces
    assert printable("\u202egnp.exe\u2066") == "\ufffdgnp.exe\ufffd"  # writing turned about


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "runs" / "one", write_target_model(tmp_path / "backbone"))
    monkeypatch.chdir(tmp_path)
    arguments = ["--interactive", "--dtype", "float32", "--max-new-tokens", "8"]
    result = CliRunner().invoke(app, arguments, input="Hi?\n/exit\n")
    assert result.exit_code == 0, result.output
    assert "runs/one (the newest run)" in result.output.splitlines()[0]
    assert "tokens per step" in result.output


def test_the_options_of_sampling_reach_the_answers(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "run", write_target_model(tmp_path / "backbone"))
    monkeypatch.setattr("medusa_train.api.load_resolved", lambda *args, **keys: model)

    def answer(*options: str) -> str:
        words = ["--interactive", "--model", str(tmp_path / "run"), "--max-new-tokens", "8"]
        result = CliRunner().invoke(app, [*words, *options], input="Hi?\n/exit\n")
        assert result.exit_code == 0, result.output
        return re.split(r"\d+ tokens, ", result.output.partition("> ")[2])[0]

    greedy = answer()
    sampling = ["--acceptance", "sampling", "--temperature", "3", "seed=1"]
    assert answer(*sampling, "--top-k", "1") == answer(*sampling, "--top-p", "1e-6") == greedy
    sampled = answer(*sampling)
    assert sampled == answer(*sampling)
    assert len({greedy, sampled, answer(*sampling, "seed=2")}) == 3
    strict = ["--acceptance", "typical", "--temperature", "3", "epsilon=1", "delta=1e9"]
    assert answer(*strict) == greedy
