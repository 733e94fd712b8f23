"""All drafts side by side: equal tokens, nothing trained or counted twice, figures of the page."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import draft_tables
import drafts
import pytest
import torch
import yaml
from drafts import benches_of, cases_of, parse_arguments, train

from medusa_train.checkpoint.heads import save_draft
from medusa_train.cli.common import split_arguments
from medusa_train.config.load import load_config
from medusa_train.config.schema import TrainConfig
from medusa_train.models.drafts import DRAFTS
from medusa_train.models.loading import load_backbone
from medusa_train.models.lora import Adapter, LoraSpec
from medusa_train.trees.tree import Tree
from tests.training.conftest import backbone_dir, chats, sentence

__all__ = ["backbone_dir", "chats"]  # fixtures

SAME = ("base_model", "datasets", "sequence_len", "val_set_size", "seed", "cache_hidden_states")


@pytest.mark.parametrize("prefix", ["configs/tiny", "configs/smollm2"])
def test_all_drafts_are_trained_on_the_same_tokens(prefix: str) -> None:
    words = ["--compare", *drafts.VARIANTS, "--draft-vocab", "512", "--set", "seed=7", "--joint", "lora_r=8"]
    args = parse_arguments([*words, "--configs", prefix])
    cases = {case.name: case for case in cases_of(args)}
    assert list(cases) == [*drafts.VARIANTS, "vocab512"]
    reference = cases["medusa1"].stages[0].load()
    assert reference.num_epochs == load_config(TrainConfig, Path(f"{prefix}_m1.yaml")).num_epochs
    for case in cases.values():
        configs = [stage.load() for stage in case.stages]
        assert sum(cfg.num_epochs for cfg in configs) == reference.num_epochs
        for cfg in configs:
            assert [getattr(cfg, key) for key in SAME] == [getattr(reference, key) for key in SAME]
            assert cfg.seed == 7
            assert cfg.micro_batch_size * cfg.gradient_accumulation_steps == 8
    for name in ("medusa2", "medusa2-ce"):
        first, second = cases[name].stages
        cfg = second.load()
        assert cfg.lora_model_dir == str(args.out / "runs" / first.name)
        assert (cfg.recipe, cfg.lora_r, cfg.medusa_self_distillation) == ("medusa2", 8, name == "medusa2")
    assert cases["vocab512"].stages[0].load().medusa_vocab_size == 512
    quick = {case.name: case for case in cases_of(parse_arguments(["--quick"]))}
    steps = [stage.load().max_steps or 0 for stage in quick["medusa2"].stages]
    assert sum(steps) == quick["medusa1"].stages[0].load().max_steps


def test_benches_have_n_questions_of_each_category_and_none_twice(tmp_path: Path) -> None:
    rows = [{"question_id": i, "category": "ab"[i % 2], "turns": [f"q{i}"]} for i in range(8)]
    for name, part in (("first", rows[:2]), ("second", rows)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    benches = benches_of(parse_arguments(["--bench", f"{tmp_path}/first.jsonl", f"{tmp_path}/second.jsonl:2"]))
    assert [[one.question_id for one in bench.questions] for bench in benches] == [[0, 1], [2, 3, 4, 5]]


def test_a_finished_training_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Sequence[str]] = []
    monkeypatch.setattr(drafts, "call", called.append)
    (tmp_path / "runs").mkdir()
    stage = drafts.Stage("m1", "configs/tiny_m1.yaml", ("num_epochs=5",))
    train(stage, tmp_path)
    train(stage, tmp_path)
    assert [list(words[3:]) for words in called] == [
        ["configs/tiny_m1.yaml", f"output_dir={tmp_path}/runs/m1", "num_epochs=5", "resume_from_checkpoint=auto"]
    ]
    with pytest.raises(SystemExit, match="trained with other settings"):
        train(drafts.Stage("m1", "configs/tiny_m1.yaml", ("num_epochs=4",)), tmp_path)


def fake_training(words: Sequence[str]) -> None:
    """Write what `medusa-train` leaves behind, with random drafts; Medusa-2's with an adapter."""
    path, overrides = split_arguments([word for word in words[3:] if not word.startswith("resume_from")])
    cfg = load_config(TrainConfig, path, overrides)
    run = Path(cfg.output_dir)
    run.mkdir(parents=True)
    backbone = load_backbone(cfg.base_model, dtype="float32")
    torch.manual_seed(1)
    draft = DRAFTS[cfg.draft].from_backbone(backbone, **cfg.draft_config.settings)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    save_draft(draft, run / "heads", cfg.base_model)
    if cfg.adapter:
        adapter = Adapter.attach(backbone, LoraSpec(4, 4, 0.0, ("q_proj", "lm_head")))
        for parameter in adapter.parameters():
            parameter.data.normal_(0, 0.3)
        adapter.save(run / "adapter")
    Tree.cartesian([2, 2]).save(run / "tree.json")
    (run / "config.yaml").write_text(
        yaml.safe_dump({
            "base_model": cfg.base_model, "val_set_size": 0.2, "sequence_len": 200,
            "datasets": [{"path": entry.path, "type": entry.type} for entry in cfg.datasets],
        })
    )  # fmt: skip
    line = {"kind": "train", "step": 4, "tokens": 800, "tokens_per_s": 400.0}
    (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """The training commands, each run by `fake_training`."""
    called: list[Sequence[str]] = []
    monkeypatch.setattr(drafts, "call", lambda words: called.append(words) or fake_training(words))
    return called


@pytest.fixture
def words(tmp_path: Path, backbone_dir: Path, chats: Path) -> list[str]:
    """A command line that measures two questions of two turns."""
    draw = random.Random(5)
    bench = tmp_path / "small.jsonl"
    questions = [{"question_id": i, "turns": [sentence(draw), sentence(draw)]} for i in range(2)]
    bench.write_text("".join(json.dumps(question) + "\n" for question in questions))
    keys = [f"base_model={backbone_dir}", f"datasets=[{{path: {chats}, type: sharegpt}}]", "sequence_len=200"]
    flags = ["--out", str(tmp_path / "out"), "--quick", "--bench", str(bench), "--max-new-tokens", "8"]
    flags += ["--dtype", "float32", "--nodes", "3", "5", "--tree-tokens", "60"]
    return [*flags, "--set", *keys, "bf16=false", "val_set_size=0.2"]


def read(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def test_the_whole_command(tmp_path: Path, words: list[str], trainings: list[Sequence[str]]) -> None:
    out, gsm8k = tmp_path / "out", tmp_path / "gsm8k.jsonl"
    gsm8k.write_text(json.dumps({"question": "one  two?", "answer": "1<<1=1>>\n#### 4"}) + "\n")
    words = [*words, "--gsm8k", str(gsm8k), "--compare", "medusa1", "medusa2", "kangaroo", "eagle3"]
    assert drafts.main(words) == 0
    assert len(trainings) == 5  # Medusa-2 has two stages
    record = read(out / "drafts-small.json")
    for cell in ("t0", "t0.7"):
        for name, row in record[cell].items():
            dynamic = ["dynamic 3", "dynamic 5"] if name == "eagle3" else []
            assert row["answers"] == dict.fromkeys(["chain", "3", "5", *dynamic], 4)
            assert all(row["trees"][tree]["over"] for tree in dynamic)
            assert all(tree["rate"] >= 1.0 for tree in row["trees"].values())
            assert list(row["categories"]) == ["general"]
    assert record["t0"]["medusa1"]["trees"]["5"]["over"] is None
    assert record["t0"]["kangaroo"]["trees"]["5"]["over"][0] > 0
    quality = record["training"]["medusa2"]["quality"]
    assert set(quality) == {"held-out answers", "GSM8K"}
    assert all(one["kl"] > 0 for one in quality.values())
    assert "The answer is 4." in (out / "gsm8k.jsonl").read_text()
    page = (out / "drafts-small.md").read_text()
    assert "not trained" in page
    assert page.count(draft_tables.STAGES_NOTE) == 1  # half an epoch each
    assert "Not run on a GPU" in page
    assert page.count("| Kangaroo with our MLP |") == 1 + 2 * 2
    assert page.count("| EAGLE-3 | dynamic 5 |") == 2
    times = {path: path.stat().st_mtime_ns for path in (out / "cells").glob("*/*")}
    assert len(times) == 4 * 4
    assert drafts.main(words) == 0  # nothing is repeated
    assert len(trainings) == 5
    assert {path: path.stat().st_mtime_ns for path in times} == times


@pytest.mark.slow
def test_real_trainings_use_equal_tokens(words: list[str], tmp_path: Path) -> None:
    words.remove("--quick")
    words += ["calibration_tokens=60", "--configs", "configs/tiny"]
    words += ["--compare", "medusa1", "medusa2", "hydra++", "--draft-vocab", "24", "--temperatures", "0"]
    assert drafts.main([*words, "--epochs", "2"]) == 0
    record = read(tmp_path / "out" / "drafts-small.json")
    tokens = {name: sum(row["tokens"]) for name, row in record["training"].items()}
    assert len(set(tokens.values())) == 1
    assert tokens["medusa1"] > 0
