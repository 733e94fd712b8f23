"""Medusa-2 against Medusa-1: equal tokens, nothing done twice, and bars that can be missed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import m2_vs_m1
import pytest
from m2_report import comparisons, markdown, write_report
from m2_vs_m1 import Stage, cases, finished, keep, parse_arguments, train

from medusa_train.cli.common import split_arguments
from medusa_train.config.load import load_config
from medusa_train.config.schema import TrainConfig
from tests.training.conftest import backbone_dir, chats, sentence

__all__ = ["backbone_dir", "chats"]  # fixtures


def epochs(case: m2_vs_m1.Case) -> float:
    """Passes over the data in which a case's heads learn, as its configurations say."""
    total = 0.0
    for stage in case.stages:
        path, overrides = split_arguments([stage.config, *stage.overrides])
        total += load_config(TrainConfig, path, overrides).num_epochs
    return total


def test_every_case_learns_from_as_many_tokens_as_the_one_it_is_compared_with() -> None:
    asked = parse_arguments(["--epochs", "5", "--stage-one", "2", "--longer", "8", "--joint", "lora_r=8"])
    found = {case.name: case for case in cases(asked)}
    assert list(found) == ["m1", "m2", "m2-ce", "m1-longer", "m2-longer"]
    assert {name: epochs(case) for name, case in found.items()} == {
        "m1": 5, "m2": 5, "m2-ce": 5, "m1-longer": 8, "m2-longer": 8,
    }  # fmt: skip
    assert {case.against for case in found.values()} == {None, "m1", "m1-longer"}
    for name in ("m2", "m2-ce", "m2-longer"):
        first, second = found[name].stages
        assert first == found["m2"].stages[0]  # one stage one for all
        cfg = load_config(TrainConfig, *split_arguments([second.config, *second.overrides]))
        assert cfg.lora_model_dir == str(asked.out / "runs" / first.name)
        assert (cfg.recipe, cfg.lora_r, cfg.medusa_self_distillation) == ("medusa2", 8, name != "m2-ce")
        one = load_config(TrainConfig, *split_arguments([first.config, *first.overrides]))
        same = (
            "base_model",
            "datasets",
            "micro_batch_size",
            "sequence_len",
            "val_set_size",
            "seed",
            "medusa_num_heads",
        )
        assert all(getattr(cfg, key) == getattr(one, key) for key in same)


def test_a_stage_one_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--epochs", "2", "--stage-one", "2"])


def test_what_is_finished_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr(m2_vs_m1, "call", lambda words, threads: called.append(words))
    stage = Stage("m1", "configs/tiny_m1.yaml", ("num_epochs=5",))
    train(stage, tmp_path)
    train(stage, tmp_path)
    assert len(called) == 1
    assert called[0][-4:] == [
        "configs/tiny_m1.yaml",
        f"output_dir={tmp_path / 'runs' / 'm1'}",
        "num_epochs=5",
        "resume_from_checkpoint=auto",
    ]
    with pytest.raises(SystemExit, match=r"made with other settings.*\n.*overrides: \['num_epochs=5'\] there"):
        train(Stage("m1", "configs/tiny_m1.yaml", ("num_epochs=4",)), tmp_path)


def test_a_result_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "cases" / "m1.json"
    assert finished(path, {"limit": None}) is None
    keep(path, {"settings": {"limit": None}, "name": "m1"})
    assert finished(path, {"limit": None}) == {"settings": {"limit": None}, "name": "m1"}
    with pytest.raises(SystemExit, match="limit: None there, 3 now"):
        finished(path, {"limit": 3})


def result(name: str, against: str | None, rate: float, kl: float = 0.0, worse: float = 0.0) -> dict[str, Any]:
    """A case whose answers took 100 steps each, at about this rate."""
    draw = random.Random(7)
    answers = {str(i): [round(100 * rate * draw.uniform(0.7, 1.3)), 100] for i in range(48)}
    figures = {"acceleration_rate": rate, "overhead": 1.3, "speedup": rate / 1.3, "speedup_over_generate": rate}
    counts = {"answers": 96, "equal_answers": 95, "tie_answers": 1, "looping_answers": 2}
    facts = {"dtype": "bfloat16", "tree_nodes": 8, "device": "a CPU", "threads": 2, "torch": "2", "date": "today"}
    machine = {"device": "a CPU", "cores": 2, "threads": 2, "python": "3", "torch": "2", "transformers": "5"}
    return {
        "name": name,
        "title": f"title of {name}",
        "against": against,
        "settings": {},
        "machine": {**machine, "cuda": None, "date": "today", "load": 0.5, "command": f"python {name}"},
        "decoding": {**figures, **counts, **facts},
        "answers": answers,
        "equal_tree": {"nodes": 16, "answers": answers},
        "training": [{"run": name, "steps": 10, "tokens": 12345, "seconds": 90.0}],
        "held_out": {"loss": 8.0, "head_top": [[0.1 * n for n in range(10)]] * 5, "acceptance_length": 2.125},
        "quality": {"GSM8K": {"tokens": 500, "loss_before": 1.0, "loss_after": 1.0 + worse, "kl": kl}},
    }


def test_a_clear_gain_at_no_cost_keeps_every_bar(tmp_path: Path) -> None:
    results = [result("m1", None, 2.0), result("m2", "m1", 2.4, kl=0.005, worse=0.002)]
    found = comparisons(results)["m2/equal"]
    assert found.ratio == pytest.approx(1.2, abs=0.01)
    assert found.ratio_interval[0] > 1.1  # the same draw of easy and hard questions: pairs leave little
    write_report(tmp_path, results)
    page = (tmp_path / "m2_vs_m1.md").read_text()
    assert "missed" not in page
    assert page.count("- kept: title of m2") == 4
    assert "1.20 times Medusa-1's speedup (the paper's ratio is 1.30)" in page
    assert "today, load average 0.50 before. `python m2`" in page
    content = json.loads((tmp_path / "m2_vs_m1.json").read_text())
    assert content["comparisons"]["m2/own"]["questions"] == 48


def test_every_bar_can_be_missed() -> None:
    results = [result("m1", None, 2.0), result("m2", "m1", 2.0, kl=0.03, worse=0.02)]
    page = markdown(results, comparisons(results))
    assert page.count("- **missed**: title of m2") == 4
    assert "- kept" not in page


def test_after_the_first_case_there_is_a_page_too() -> None:
    assert "nothing to compare yet" in markdown([result("m1", None, 2.0)], {})


@pytest.mark.slow
def test_the_whole_command_on_a_random_model(tmp_path: Path, backbone_dir: Path, chats: Path) -> None:
    draw = random.Random(5)
    bench, problems = tmp_path / "bench.jsonl", tmp_path / "gsm8k.jsonl"
    questions = [{"question_id": i, "turns": [sentence(draw), sentence(draw)]} for i in range(3)]
    bench.write_text("".join(json.dumps(question) + "\n" for question in questions))
    rows = [{"question": sentence(draw), "answer": f"{sentence(draw)}\n#### 4"} for _ in range(300)]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out"
    heads = [
        f"base_model={backbone_dir}",
        f"datasets=[{{path: {chats}, type: sharegpt}}]",
        "sequence_len=200",
        "bf16=false",
        "calibration_tokens=80",
        "medusa_num_heads=3",
        "val_set_size=0.2",
    ]
    words = ["--out", str(out), "--epochs", "2", "--stage-one", "1", "--bench", str(bench), "--gsm8k", str(problems)]
    words += ["--max-new-tokens", "16", "--dtype", "float32", "--without-ce", "--heads", *heads]
    words += ["--joint", "lora_r=4", "learning_rate=0.05", "warmup_steps=0"]
    m2_vs_m1.main(words)
    page = (out / "m2_vs_m1.md").read_text()
    results = {path.stem: json.loads(path.read_text()) for path in (out / "cases").iterdir()}
    assert set(results) == {"m1", "m2"}
    tokens = {name: sum(stage["tokens"] for stage in found["training"]) for name, found in results.items()}
    assert tokens["m1"] == tokens["m2"] > 0
    assert results["m1"]["quality"]["GSM8K"]["kl"] == 0.0 < results["m2"]["quality"]["GSM8K"]["kl"]
    assert set(results["m1"]["answers"]) == set(results["m2"]["equal_tree"]["answers"]) == {"0", "1", "2"}
    written = (out / "cases" / "m2.json").stat().st_mtime_ns
    m2_vs_m1.main(words)  # nothing is left to do
    assert (out / "cases" / "m2.json").stat().st_mtime_ns == written
    assert (out / "m2_vs_m1.md").read_text() == page
