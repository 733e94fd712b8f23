"""The whole way on a small random model: seeds -> its own answers -> heads -> a measured report."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from medusa_train.cli import evaluate, selfdistill, train
from tests.evaluation.tiny_model import write_backbone

SEEDS = [
    {"id": f"s{n}", "turns": [f"what is {n} + {n}", "and once more"][: n % 2 + 1]}
    for n in range(20)
]


def invoke(app: typer.Typer, *arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def test_seeds_become_heads_that_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_backbone(tmp_path / "backbone")
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
    invoke(train.app, *(f"{name}={value}" for name, value in keys.items()))
    assert (tmp_path / "run" / "heads" / "medusa_lm_head.safetensors").is_file()

    bench = [
        {"question_id": n, "category": "sums", "turns": [f"what is {n} + 1"]} for n in range(3)
    ]
    Path("bench.jsonl").write_text(
        "".join(json.dumps(question) + "\n" for question in bench), encoding="utf-8"
    )
    invoke(
        evaluate.app,
        "--bench",
        "bench.jsonl",
        "--model",
        "run",
        "dtype=float32",
        "max_new_tokens=12",
        "warmup=0",
    )
    overall = json.loads((tmp_path / "run" / "eval" / "bench" / "report.json").read_text())[
        "overall"
    ]
    assert overall["answers"] == 3
    assert overall["equal_answers"] + overall["tie_answers"] == 3
