"""All drafts side by side: equal tokens, nothing trained twice, counts that equal decoding, figures of the page."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import drafts
import pytest
import torch
import yaml
from drafts import Field, cases_of, describe, parse_arguments, ratio, summary, train

from medusa_train.checkpoint.heads import save_draft
from medusa_train.cli.common import split_arguments
from medusa_train.config.load import load_config
from medusa_train.config.schema import TrainConfig
from medusa_train.evaluation.records import TurnLog
from medusa_train.models.drafts import DRAFTS
from medusa_train.models.drafts.kangaroo import KangarooDraft
from medusa_train.models.loading import load_backbone
from medusa_train.models.lora import Adapter, LoraSpec
from medusa_train.trees.tree import Tree
from tests.training.conftest import backbone_dir, chats, sentence

__all__ = ["backbone_dir", "chats"]  # fixtures

SAME = ("base_model", "datasets", "micro_batch_size", "gradient_accumulation_steps", "sequence_len", "val_set_size")


def config_of(stage: drafts.Stage) -> TrainConfig:
    return load_config(TrainConfig, *split_arguments([stage.config, *stage.overrides]))


def test_all_drafts_are_trained_on_the_same_tokens() -> None:
    words = ["--compare", *drafts.VARIANTS, "--draft-vocab", "512", "--set", "seed=7", "--joint", "lora_r=8"]
    args = parse_arguments(words)
    cases = {case.name: case for case in cases_of(args)}
    assert list(cases) == [*drafts.VARIANTS, "vocab512"]
    reference = config_of(cases["medusa1"].stages[0])
    assert reference.num_epochs == load_config(TrainConfig, Path("configs/tiny_m1.yaml")).num_epochs
    for case in cases.values():
        configs = [config_of(stage) for stage in case.stages]
        assert sum(cfg.num_epochs for cfg in configs) == reference.num_epochs
        for cfg in configs:
            assert [getattr(cfg, key) for key in SAME] == [getattr(reference, key) for key in SAME]
            assert cfg.seed == 7
    for name in ("medusa2", "medusa2-ce"):
        first, second = cases[name].stages
        cfg = config_of(second)
        assert cfg.lora_model_dir == str(args.out / "runs" / first.name)
        assert (cfg.recipe, cfg.lora_r, cfg.medusa_self_distillation) == ("medusa2", 8, name == "medusa2")
    assert config_of(cases["vocab512"].stages[0]).medusa_vocab_size == 512
    quick = {case.name: case for case in cases_of(parse_arguments(["--quick"]))}
    steps = [config_of(stage).max_steps or 0 for stage in quick["medusa2"].stages]
    assert sum(steps) == config_of(quick["hydra"].stages[0]).max_steps


def test_variants_have_the_settings_of_their_names() -> None:
    configs = {
        case.name: config_of(case.stages[-1]) for case in cases_of(parse_arguments(["--compare", *drafts.VARIANTS]))
    }
    settings = {name: cfg.draft_config.settings for name, cfg in configs.items()}
    assert [settings[name]["prefix_layer"] for name in ("hydra", "hydra++")] == [False, True]
    assert [configs[name].draft_config.heads_loss.soft_targets for name in ("hydra", "hydra++")] == [0.0, 1.0]
    assert [settings[name]["mlp_size"] for name in ("kangaroo", "kangaroo-published")] == [640, 0]
    parts = {name: (of["auto_blocks"], of["adaptation_layers"], of["sampled_token"])
             for name, of in settings.items() if name.startswith("amphista")}  # fmt: skip
    assert parts == {
        "amphista": (1, 2, True), "amphista-alpha": (2, 2, True), "amphista-no-auto": (0, 2, True),
        "amphista-no-staged": (1, 0, True), "amphista-no-token": (1, 2, False),
    }  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [["--epochs", "2", "--stage-one", "2"], ["--compare", "eagle"], ["--bench", "tiny", "--limit", "7", "8"]],
)
def test_impossible_arguments_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(words)


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

    def call(words: Sequence[str]) -> None:
        called.append(words)
        fake_training(words)

    monkeypatch.setattr(drafts, "call", call)
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
    flags += ["--dtype", "float32", "--nodes", "5", "--tree-tokens", "60"]
    return [*flags, "--set", *keys, "bf16=false", "val_set_size=0.2"]


def read(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def test_the_whole_command(tmp_path: Path, words: list[str], trainings: list[Sequence[str]]) -> None:
    out, gsm8k = tmp_path / "out", tmp_path / "gsm8k.jsonl"
    gsm8k.write_text(json.dumps({"question": "one  two?", "answer": "1<<1=1>>\n#### 4"}) + "\n")
    words += ["--gsm8k", str(gsm8k), "--compare", "medusa1", "medusa2", "kangaroo"]
    assert drafts.main(words) == 0
    assert len(trainings) == 4  # Medusa-2 has two stages
    record = read(out / "drafts.json")
    assert record["benches"]["small"] | {"tokens_per_s": 0} == {
        "questions": 2, "answers": 4, "different": 0, "dtype": "float32", "tokens_per_s": 0,
    }  # fmt: skip
    for row in record["drafts"].values():
        assert [row["small"][tree]["nodes"] for tree in ("own", "equal")] == [6, 5]
        assert row["small"]["own"]["overhead"] > 0
        assert row["small"]["equal"]["tokens_per_step"] >= 1.0
    quality = record["drafts"]["medusa2"]["quality"]
    assert set(quality) == {"held-out answers", "GSM8K"}
    assert all(one["kl"] > 0 for one in quality.values())
    assert "The answer is 4." in (out / "gsm8k.jsonl").read_text()
    assert "chain, early stop" in record["drafts"]["kangaroo"]["small"]
    page = (out / "drafts.md").read_text()
    assert "not trained" in page
    assert "Not run on a GPU" in page
    times = {path: path.stat().st_mtime_ns for part in ("counts", "times", "cases") for path in (out / part).iterdir()}
    assert drafts.main(words) == 0  # nothing is repeated
    assert len(trainings) == 4
    assert {path: path.stat().st_mtime_ns for path in times} == times


@pytest.mark.usefixtures("trainings")
def test_counts_equal_decoding_and_continue_a_stopped_run(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    args = parse_arguments([*words, "--compare", "medusa1", "kangaroo"])
    described = [describe(case, args) for case in cases_of(args)]
    (bench,) = [drafts.load_bench(name, print) for name in args.bench]
    append, seen = TurnLog.append, []

    def stop(self: TurnLog, turn: Any) -> None:
        append(self, turn)
        seen.append(turn)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TurnLog, "append", stop)
        with pytest.raises(KeyboardInterrupt):
            drafts.Session(args, described).measure("counts", bench)
    monkeypatch.setattr(TurnLog, "append", lambda self, turn: (seen.append(turn), append(self, turn))[1])
    result = drafts.Session(args, described).measure("counts", bench)
    assert result["answers"] == 4
    assert len(seen) == 3 + 2  # the finished question is kept, the other one is asked again
    del seen[2]
    draft = result["drafts"]["kangaroo"]
    for question, (tokens, steps) in draft["trees"]["own"]["questions"].items():
        turns = [turn for turn in seen if str(turn.question_id) == question]
        answers = [turn.others["kangaroo/own"] for turn in turns]
        assert tokens == sum(len(answer.tokens) - 1 for answer in answers)
        assert tokens == sum(len(turn.plain.tokens) - 1 for turn in turns)
        assert steps == sum(answer.steps for answer in answers)


@pytest.mark.usefixtures("trainings")
def test_filled_chains_never_stop_early_and_equal_trees_use_no_clock(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = parse_arguments([*words, "--compare", "kangaroo"])
    (case,) = cases_of(args)
    described = describe(case, args)
    field = Field(args.out / "runs", [described], "float32", pack=False)
    (one,) = field.contenders
    draft = one.draft
    assert isinstance(draft, KangarooDraft)
    assert draft.threshold == 0.6
    decoders = field.answerers("counts")
    filled = decoders["kangaroo/chain"].answer([5, 6, 7], 24)
    assert draft.threshold == 0.6
    early = decoders["kangaroo/chain, early stop"].answer([5, 6, 7], 24)
    draft.threshold = 0.0
    never = decoders["kangaroo/chain, early stop"].answer([5, 6, 7], 24)
    assert filled.tokens == early.tokens == never.tokens
    assert (filled.steps, filled.accepted) == (never.steps, never.accepted)
    (args.out / "cases" / "kangaroo.json").unlink()
    with monkeypatch.context() as patch:
        patch.setattr("time.perf_counter", iter(range(10**9)).__next__)
        assert describe(case, args)["equal"] == described["equal"]


def counted(rate: float) -> dict[str, Any]:
    """Counts of a draft on 24 questions, at about `rate` tokens a step."""
    draw = random.Random(3)
    questions = {str(n): [round(100 * rate * draw.uniform(0.8, 1.2)), 100] for n in range(24)}
    tree = {"nodes": 16, "tokens_per_step": rate, "ctar": [0.6, 0.3, 0.1], "equal": 24, "questions": questions}
    return {"trees": dict.fromkeys(("own", "equal", "chain"), tree), "accuracy": [0.5, 0.25]}


def described(name: str, **more: Any) -> dict[str, Any]:
    common = {"depth": 2, "parameters": 2000, "backbone_parameters": 9000, "base_model": "data/tiny"}
    trained = {"tokens": [800, 200], "training_tokens_per_s": [9.0, 8.0]}
    return {"name": name, "title": name.capitalize(), **common, **trained, **more}


def test_the_page_shows_ratios_coverage_and_quality(tmp_path: Path) -> None:
    quality = {"GSM8K": {"tokens": 5, "perplexity_before": 3.0, "perplexity_change": 0.02, "kl": 0.013}}
    coverage = {"training": 0.95, "held-out": 0.9, "megabytes": 5.42}
    cases = [described("medusa1"), described("medusa2", quality=quality), described("vocab9", coverage=coverage)]
    rates = {"medusa1": 2.0, "medusa2": 2.4, "vocab9": 1.9}
    results: dict[str, Any] = {"b": {"counts": {"questions": 24, "answers": 24,
               "drafts": {name: counted(rate) for name, rate in rates.items()}}}}  # fmt: skip
    args = parse_arguments(["--out", str(tmp_path)])
    machine = drafts.machine_facts("drafts.py", [])
    assert "| Medusa2 | 2.40 |" in drafts.write_report(args, machine, cases, results)  # before it is timed
    speed = {"own": {"overhead": 1.5, "speedup": [1.25, [1.1, 1.4]]}}
    results["b"]["times"] = {"dtype": "float32", "tokens_per_s": {"plain": 100.0, "generate": 90.0},
                             "drafts": dict.fromkeys(rates, speed)}  # fmt: skip
    page = drafts.write_report(args, machine, cases, results)
    assert "| 16 | 2.40 | 1.50 | 1.25 [1.10, 1.40] | 2.40 | 0.30 0.10 0.00 | 0.50 0.25 |" in page
    assert "| 800 + 200 | 9 + 8 |  |  |  | +2.00% | 0.0130 |" in page
    assert "| 95.00% | 90.00% | 5.42 |  |  |" in page
    assert "flatters Medusa" in page
    rows = summary(cases, results)
    found = rows["medusa2"]["b"]["equal"]["ratio"]
    assert found[0] == pytest.approx(1.2, abs=0.01)
    assert found[1][0] > 1.1  # questions are drawn in pairs
    assert "ratio" not in rows["medusa1"]["b"]["equal"]
    assert ratio({"1": (2, 1)}, {"1": (3, 1)}) is None  # one question has no interval


@pytest.mark.slow
def test_real_trainings_use_equal_tokens(words: list[str], tmp_path: Path) -> None:
    words.remove("--quick")
    words += ["calibration_tokens=60", "--compare", "medusa1", "medusa2", "hydra++", "--draft-vocab", "24"]
    assert drafts.main([*words, "--epochs", "2"]) == 0
    record = read(tmp_path / "out" / "drafts.json")
    tokens = {name: sum(row["tokens"]) for name, row in record["drafts"].items()}
    assert len(set(tokens.values())) == 1
    assert tokens["medusa1"] > 0
    assert record["benches"]["small"]["different"] == 0
    assert 0 < record["drafts"]["vocab24"]["coverage"]["training"] < 1
