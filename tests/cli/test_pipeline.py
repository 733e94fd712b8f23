"""The whole way on a small random model: seeds -> its own answers -> heads -> a measured report."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from medusa_train.checkpoint.resolve import resolve_model
from medusa_train.cli import evaluate, selfdistill, train
from medusa_train.export.write import export_run
from tests import chatml
from tests.evaluation.tiny_model import write_target_model

SEEDS = [
    {"id": f"s{n}", "turns": [f"what is {n} + {n}", "and once more"][: n % 2 + 1]}
    for n in range(20)
]


def invoke(app: typer.Typer, *arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stderr + result.stdout


def test_seeds_become_heads_that_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_target_model(tmp_path / "backbone")
    Path("seeds.jsonl").write_text(
        "".join(json.dumps(seed) + "\n" for seed in SEEDS), encoding="utf-8"
    )
    answering = [
        "base_model=backbone",
        "temperature=0",
        "dtype=float32",
        "max_new_tokens=24",
        "drop_truncated=false",
    ]
    invoke(selfdistill.app, "--seed", "seeds.jsonl", "--output", "own.jsonl", *answering)
    own = [json.loads(line) for line in Path("own.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [record["id"] for record in own] == [seed["id"] for seed in SEEDS]

    keys = {
        "base_model": "backbone",
        "datasets": "[{path: own.jsonl, type: messages}]",
        "output_dir": "run",
        "medusa_num_heads": 2,
        "micro_batch_size": 4,
        "max_steps": 4,
        "val_set_size": 0.2,
        "calibration_tokens": 200,
        "bf16": "false",
        "sequence_len": 256,
    }
    output = invoke(train.app, *(f"{name}={value}" for name, value in keys.items()))
    assert (tmp_path / "run" / "heads" / "medusa_lm_head.safetensors").is_file()
    assert output.endswith("next: medusa-eval --bench mtbench --limit 16 --model run\n")

    bench = [
        {"question_id": n, "category": "sums", "turns": [f"what is {n} + 1"]} for n in range(3)
    ]
    Path("bench.jsonl").write_text(
        "".join(json.dumps(question) + "\n" for question in bench), encoding="utf-8"
    )
    output = invoke(
        evaluate.app,
        "--bench",
        "bench.jsonl",
        "--model",
        "run",
        "dtype=float32",
        "max_new_tokens=12",
        "warmup=0",
    )
    command = "medusa-export run --to transformers"
    assert output.endswith(f"next: {command}\n")
    overall = json.loads((tmp_path / "run" / "eval" / "bench" / "report.json").read_text())[
        "overall"
    ]
    assert overall["answers"] == 3
    # so little training may leave the tree empty: then there is nothing to compare
    if overall["equal_answers"] is None:
        assert json.loads((tmp_path / "run" / "tree.json").read_text())["medusa_choices"] == []
    else:
        assert overall["equal_answers"] + overall["tie_answers"] == 3


def test_answers_end_at_the_end_token_of_the_chat_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base model's generation config does not name it: nothing runs past it, and each command says
    so once.
    """
    monkeypatch.chdir(tmp_path)
    chatml.write_target_model(tmp_path / "backbone")
    Path("seeds.jsonl").write_text(
        "".join(json.dumps(seed) + "\n" for seed in SEEDS), encoding="utf-8"
    )
    options = ["base_model=backbone", "temperature=0", "dtype=float32", "max_new_tokens=60"]
    printed = [invoke(selfdistill.app, "--seed", "seeds.jsonl", "--output", "own.jsonl", *options)]
    own = [json.loads(line) for line in Path("own.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {record["messages"][1]["content"] for record in own} == {chatml.ANSWER}
    assert len(own) == len(SEEDS)

    keys = {
        "base_model": "backbone",
        "datasets": "[{path: own.jsonl, type: messages}]",
        "output_dir": "run",
        "medusa_num_heads": 2,
        "adapter": "lora",
        "lora_r": 2,
        "lora_target_linear": "true",
        "medusa_only_heads": "false",
        "micro_batch_size": 4,
        "max_steps": 2,
        "learning_rate": 1e-6,
        "val_set_size": 0.2,
        "calibration_tokens": 60,
        "bf16": "false",
        "sequence_len": 256,
    }
    printed.append(invoke(train.app, *(f"{name}={value}" for name, value in keys.items())))
    Path("bench.jsonl").write_text(
        json.dumps({"question_id": 1, "category": "sums", "turns": ["1 + 1"]}), encoding="utf-8"
    )
    asked = ["--model", "run", "--bench", "bench.jsonl", "--dtype", "float32", "warmup=0"]
    printed.append(invoke(evaluate.app, *asked, "max_new_tokens=60", "exactness=false"))
    (report,) = Path("run").glob("eval/*/report.json")
    meta = json.loads(report.read_text(encoding="utf-8"))["meta"]
    assert meta["stop_tokens"] == [chatml.END_OF_TEXT, chatml.IM_END]
    records = report.with_name("answers.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["text"] for line in records] == [chatml.ANSWER]
    for output in printed:
        assert " ".join(output.split()).count("or <|im_end|> (the chat template)") == 1

    paths = resolve_model("run", None, None)
    (warning,) = [line for line in export_run(paths, "vllm").warnings if "answers end" in line]
    assert f"add [{chatml.IM_END}] to eos_token_id" in warning
    merged = export_run(paths, "merged").target
    settings = json.loads((merged / "generation_config.json").read_text(encoding="utf-8"))
    assert settings["eos_token_id"] == [chatml.END_OF_TEXT, chatml.IM_END]
    again = export_run(paths, "vllm").warnings
    assert not [line for line in again if "answers end" in line]
    assert all(path.stat().st_mode & 0o044 for path in merged.rglob("*") if path.is_file())
    copied, own = [
        (directory / "tokenizer.json").read_bytes() for directory in (merged, Path("backbone"))
    ]
    assert copied == own
    other = resolve_model("run", None, None, chat_template="zephyr")
    merged = export_run(other, "merged").target
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        assert "<|assistant|>" in (merged / name).read_text(encoding="utf-8")
