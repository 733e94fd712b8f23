"""The bench of draft vocabularies: same data and steps for all, nothing done twice, a page that adds up."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import draft_vocab
import pytest
from draft_vocab import parse_arguments, stage
from draft_vocab_report import markdown, summary

from medusa_train.cli.common import split_arguments
from medusa_train.config.load import load_config
from medusa_train.config.schema import TrainConfig
from tests.training.conftest import backbone_dir, chats, sentence

__all__ = ["backbone_dir", "chats"]  # fixtures


def test_runs_differ_in_their_vocabulary_alone() -> None:
    asked = parse_arguments(["--epochs", "3", "--set", "seed=7"])
    configs = {}
    for size in asked.sizes:
        made = stage(asked, size)
        cfg = load_config(TrainConfig, *split_arguments([made.config, *made.overrides]))
        assert (cfg.num_epochs, cfg.seed) == (3, 7)
        configs[size] = (cfg.medusa_vocab_size, cfg.model_dump(exclude={"medusa_vocab_size"}))
    assert [known for known, _ in configs.values()] == [None, 1024, 512, 256]
    assert all(rest == configs["full"][1] for _, rest in configs.values())


@pytest.mark.parametrize("words", [["--only", "300"], ["--sizes", "full", "some"]])
def test_sizes_that_are_none_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(words)


def result(rate: float, **keys: Any) -> dict[str, Any]:
    draw = random.Random(7)
    answers = {str(i): [round(100 * rate * draw.uniform(0.7, 1.3)), 100] for i in range(40)}
    counted = {"nodes": 16, "answers": answers, "coverage": 0.9}
    shares = {"coverage_train": 0.95, "coverage_held_out": 0.94, "bytes": 4_000_000, "propose_ms": 0.5}
    return {**shares, "own": counted, "equal": counted, **keys}


def test_the_page_says_what_a_smaller_vocabulary_costs() -> None:
    results = {"full": result(2.0), "256": result(1.8, bytes=1_000_000)}
    rows = {size: summary(size, results) for size in results}
    assert rows["full"]["equal"]["rate"] == pytest.approx(2.0, rel=0.15)
    assert "difference" not in rows["full"]["equal"]
    found = rows["256"]["equal"]
    assert found["ratio"] == pytest.approx(0.9, abs=0.01)
    low, high = found["difference_interval"]
    assert low < found["difference"] < high < 0
    machine = {"device": "a CPU", "cores": 2, "threads": 2, "python": "3", "torch": "2", "transformers": "5"}
    page = markdown(rows, {**machine, "cuda": None, "date": "today", "load": 0.0, "command": "x"}, "float32")
    row = next(line for line in page.splitlines() if line.startswith("| 256"))
    assert "| 95.00% | 94.00% | 90.00% | 1.00 | 0.500 |" in row
    assert f"{-found['difference']:.3f} [{-high:.3f}, {-low:.3f}]" in row


def test_without_a_full_run_there_is_a_page_too() -> None:
    alone = result(1.8)
    del alone["equal"]
    assert "rate" in summary("256", {"256": alone})["own"]


@pytest.mark.slow
def test_the_whole_command_on_a_random_model(tmp_path: Path, backbone_dir: Path, chats: Path) -> None:
    draw = random.Random(5)
    bench, out = tmp_path / "bench.jsonl", tmp_path / "out"
    questions = [{"question_id": i, "turns": [sentence(draw)]} for i in range(3)]
    bench.write_text("".join(json.dumps(question) + "\n" for question in questions))
    keys = [
        f"base_model={backbone_dir}",
        f"datasets=[{{path: {chats}, type: sharegpt}}]",
        "sequence_len=200",
        "bf16=false",
        "calibration_tokens=60",
        "medusa_num_heads=2",
        "val_set_size=0.2",
    ]
    words = ["--out", str(out), "--sizes", "full", "24", "--epochs", "1", "--bench", str(bench), "--rounds", "3"]
    words += ["--max-new-tokens", "12", "--set", *keys]
    draft_vocab.main([*words, "--only", "24"])
    first = json.loads((out / "draft_vocab.json").read_text())["sizes"]
    assert set(first) == {"24"}
    assert "equal" not in first["24"]
    draft_vocab.main(words)
    found = json.loads((out / "draft_vocab.json").read_text())["sizes"]
    assert set(found) == {"full", "24"}
    assert found["full"]["coverage_train"] == 1.0 > found["24"]["coverage_train"] > 0
    assert found["24"]["bytes"] < found["full"]["bytes"]
    assert found["24"]["equal"]["nodes"] == found["full"]["equal"]["nodes"]
    assert found["24"]["own"] == first["24"]["own"] | {
        key: found["24"]["own"][key] for key in ("difference", "difference_interval", "ratio")
    }
    assert found["24"]["propose_ms"] > 0
