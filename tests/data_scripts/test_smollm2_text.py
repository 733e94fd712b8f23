"""The text of SmolLM2: which prompts a run answers, and what is selected of the answers."""

import argparse
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from medusa_train.data.read_chats import read_conversations
from tests.data_scripts.scripts import load_script

PLAN = {
    "model": "models/smollm2-135m-instruct",
    "max_new_tokens": 256,
    "questions": {"temperature": 1.0},
    "validation": {"questions": 2, "temperature": 0.0},
    "runs": [
        {"questions": 4},
        {"prompts": "templates", "count": 3, "temperature": 0.5},
        {"prompts": "validation"},
        {"prompts": "questions", "count": 3, "temperature": 0.3},
        {"questions": 11},
        {"prompts": "questions", "count": 5, "temperature": 0.7},
        {"prompts": "templates", "count": 3, "temperature": 0.0},
        {"prompts": "questions", "count": 5, "temperature": 0.0},  # none is left
    ],
}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = load_script("make_text.py")
    monkeypatch.setattr(module, "PROMPT_COUNT", 9)
    return module


def answer(name: str, text: str, tokens: int = 5, reason: str = "stop") -> dict:
    messages = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": text}]
    counts = {"prompt": [9], "completion": [tokens]}
    sampling = {"temperature": 0.5, "seed": 42}
    return {
        "id": name, "messages": messages, "sampling": sampling, "finish_reasons": [reason], "token_counts": counts
    }  # fmt: skip


def test_every_prompt_is_answered_once_and_none_of_validation(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answered: dict[str, list[dict]] = {}

    def distill(output: Path, model: str, arguments: object, options: dict, *more: str) -> None:
        if output.name == "questions.jsonl":
            texts = [f"What is the use of number {n}?" for n in range(int(more[-1]))]
            texts[1] = texts[0].upper()  # a repetition
            records = [
                {"id": f"question-{n:06d}", "messages": [{"content": text}]}
                for n, text in enumerate(texts)
            ]
            # in the order in which they were finished
            script.write_lines(output, reversed(records))
        else:
            answered[output.stem] = script.read_lines(tmp_path / more[1])
            assert output.stem == "validation" or output.stem.endswith(
                f"_t{options['temperature']}"
            )

    monkeypatch.setattr(script, "distill", distill)
    script.generate(PLAN, tmp_path, argparse.Namespace(name="smollm2", runs=None))
    assert {name: len(prompts) for name, prompts in answered.items()} == {
        "01_templates_t0.5": 3, "validation": 118 + 2, "03_questions_t0.3": 1, "05_questions_t0.7": 5,
        "06_templates_t0.0": 3,
    }  # fmt: skip
    names = [prompt["id"] for prompts in answered.values() for prompt in prompts]
    turns = [
        prompt["conversations"][0]["value"] for prompts in answered.values() for prompt in prompts
    ]
    assert len(set(names)) == len(names) == len(set(turns))
    assert {len(prompt["conversations"]) for prompt in answered["05_questions_t0.7"]} == {1, 2}


def test_only_the_runs_that_are_named_are_done(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two processes share the work: each prompt has the place it has in the whole."""
    done: dict[str, list[str]] = {}

    def distill(output: Path, model: str, arguments: object, options: dict, *more: str) -> None:
        done[output.stem] = [prompt["id"] for prompt in script.read_lines(tmp_path / more[1])]

    monkeypatch.setattr(script, "distill", distill)
    script.generate(PLAN, tmp_path, argparse.Namespace(name="smollm2", runs=[6]))
    assert list(done) == ["06_templates_t0.0"]
    assert done["06_templates_t0.0"] == [
        prompt["id"] for prompt in script.read_lines(tmp_path / "templates.jsonl")[3:6]
    ]


def test_a_shipped_part_is_selected_from_again(script: ModuleType, tmp_path: Path) -> None:
    """Its conversations come back as they were, and its validation text stays held out."""
    texts = [" ".join(f"word{n}{m}" for m in range(20)) for n in range(4)]
    first = tmp_path / "first"
    first.mkdir()
    script.write_lines(
        first / "01_templates_t0.5.jsonl", [answer(f"s-{n}", text) for n, text in enumerate(texts)]
    )
    script.write_lines(first / "validation.jsonl", [answer("v-0", "held out " * 20)])
    script.write_selection(first, tokens=10_000)
    second = tmp_path / "second"
    second.mkdir()
    new = [answer("n-0", "quite another text " * 9), answer("n-1", "held out " * 20)]
    script.write_lines(second / "02_templates_t0.3.jsonl", new)
    script.add_earlier(first / "smollm2.jsonl.gz", second, script.ROOT / "data/tiny")
    script.write_selection(second, tokens=10_000)
    before = read_conversations(first / "smollm2.jsonl.gz", "messages").conversations
    after = read_conversations(second / "smollm2.jsonl.gz", "messages").conversations
    assert {chat.id for chat in after} == {"n-0"} | {chat.id for chat in before}
    assert {chat.id: chat.messages for chat in before}.items() <= {
        chat.id: chat.messages for chat in after
    }.items()
    assert (second / "smollm2_validation.jsonl.gz").read_bytes() == (
        first / "smollm2_validation.jsonl.gz"
    ).read_bytes()


def test_near_duplicates_and_more_than_the_wanted_tokens_are_left_out(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    texts = [" ".join(f"word{n}{m}" for m in range(20)) for n in range(6)]
    answers = [answer(f"s-{n}", text, reason="length") for n, text in enumerate(texts)]
    script.write_lines(tmp_path / "01_templates_t0.5.jsonl", answers)
    nearly = answer("s-7", texts[1].removesuffix("word119") + "another")
    held_out = answer("s-8", texts[2])  # what validation has is not trained on either
    script.write_lines(tmp_path / "02_questions_t0.3.jsonl", [nearly])
    script.write_lines(tmp_path / "validation.jsonl", [held_out])
    script.write_selection(tmp_path, tokens=11)
    text = read_conversations(tmp_path / "text.jsonl.gz", "messages").conversations
    assert {"s-1", "s-7"} - {chat.id for chat in text} in ({"s-1"}, {"s-7"})
    assert len(text) == 5
    assert read_conversations(tmp_path / "smollm2.jsonl.gz", "messages").conversations == [
        chat.__class__(chat.id, chat.messages, chat.source.replace("text.", "smollm2."))
        for chat in text[:3]
    ]
    assert [
        chat.id
        for chat in read_conversations(tmp_path / "smollm2_validation.jsonl.gz").conversations
    ] == ["s-8"]
    assert "3 conversations, 15 supervised tokens" in capsys.readouterr().out
    before = (tmp_path / "text.jsonl.gz").read_bytes()
    script.write_selection(tmp_path, tokens=11)
    assert (tmp_path / "text.jsonl.gz").read_bytes() == before
    assert json.loads(json.dumps(script.shipped(nearly))).keys() == {
        "id",
        "messages",
        "finish_reasons",
        "temperature",
    }


@pytest.mark.parametrize("made", [False, True])
def test_nothing_to_select_from_is_an_error(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, made: bool
) -> None:
    out = tmp_path / "text"
    if made:
        out.mkdir()
    monkeypatch.setattr(sys, "argv", ["make_text.py", "smollm2", "--out", str(out), "--select"])
    with pytest.raises(SystemExit, match=r"error: .*text holds no answers to select from"):
        script.main()
    assert list(tmp_path.rglob("*")) == [out] * made


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--runs", "0", "99"], "--runs: 99 is no run of text.yaml, which has 0 to"),
        (["--select", "--add", "none.jsonl.gz"], "--add: there is no file none.jsonl.gz"),
    ],
)
def test_runs_and_files_that_are_not_there_are_refused(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    command = ["make_text.py", "smollm2", "--out", str(tmp_path / "text"), *words]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "text").exists()
