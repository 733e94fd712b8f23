"""All drafts side by side: equal tokens, nothing done twice, counts without a clock, and lines that can say no."""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import drafts
import m2_vs_m1
import pytest
import torch
import yaml
from drafts import cases, parse_arguments
from drafts_case import Field, describe, load_field
from drafts_compare import guessed, lines, paired_difference, reached, taken
from drafts_decode import COUNTS, answerers, measure
from drafts_report import accuracies, markdown, write_report
from m2_vs_m1 import Stage

from medusa_train.checkpoint.heads import save_draft
from medusa_train.cli.common import split_arguments
from medusa_train.config.load import load_config
from medusa_train.config.schema import TrainConfig
from medusa_train.evaluation.bootstrap import Counts
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts import DRAFTS
from medusa_train.models.drafts.kangaroo import KangarooDraft
from medusa_train.models.lora import Adapter, LoraSpec
from medusa_train.trees.tree import Tree
from tests.training.conftest import backbone_dir, chats, sentence

__all__ = ["backbone_dir", "chats"]  # fixtures

MACHINE = {
    "device": "a CPU", "kind": "cpu", "cores": 2, "threads": 1, "load": 0.1, "python": "3", "torch": "2", "cuda": None,
    "transformers": "5", "command": "python benchmarks/drafts.py", "date": "today",
}  # fmt: skip
SAME = ("base_model", "datasets", "micro_batch_size", "gradient_accumulation_steps", "sequence_len", "val_set_size")


def config_of(stage: m2_vs_m1.Stage) -> TrainConfig:
    return load_config(TrainConfig, *split_arguments([stage.config, *stage.overrides]))


def test_every_draft_learns_from_the_same_tokens() -> None:
    asked = parse_arguments(["--ablations", "--set", "seed=7"])
    found = {case.name: case for case in cases(asked)}
    assert tuple(found) == drafts.NAMES
    reference = config_of(found["medusa1"].stages[0])
    assert reference.num_epochs == load_config(TrainConfig, Path("configs/tiny_m1.yaml")).num_epochs
    for case in found.values():
        configs = [config_of(stage) for stage in case.stages]
        assert sum(cfg.num_epochs for cfg in configs) == reference.num_epochs
        for cfg in configs:
            assert [getattr(cfg, key) for key in SAME] == [getattr(reference, key) for key in SAME]
            assert cfg.seed == 7
    first, second = found["medusa2"].stages
    assert config_of(second).lora_model_dir == str(asked.out / "runs" / first.name)


def test_variants_and_ablations_are_what_their_names_say() -> None:
    made = {case.name: config_of(case.stages[-1]) for case in cases(parse_arguments(["--ablations"]))}
    kinds = {name: cfg.draft for name, cfg in made.items()}
    assert kinds == {
        "medusa1": "medusa", "medusa2": "medusa", "hydra": "hydra", "hydra++": "hydra", "amphista": "amphista",
        "amphista-alpha": "amphista", "kangaroo": "kangaroo", "amphista-no-auto": "amphista",
        "amphista-no-staged": "amphista", "amphista-no-token": "amphista",
    }  # fmt: skip
    settings = {name: cfg.drafted.settings for name, cfg in made.items()}
    assert [settings[name]["prefix_layer"] for name in ("hydra", "hydra++")] == [False, True]
    assert [made[name].drafted.loss.soft for name in ("hydra", "hydra++")] == [0.0, 1.0]
    parts = {name: (of["auto_blocks"], of["adaptation_layers"], of["sampled_token"])
             for name, of in settings.items() if name.startswith("amphista")}  # fmt: skip
    assert parts == {
        "amphista": (1, 2, True), "amphista-alpha": (2, 2, True), "amphista-no-auto": (0, 2, True),
        "amphista-no-staged": (1, 0, True), "amphista-no-token": (1, 2, False),
    }  # fmt: skip


def test_what_is_asked_for() -> None:
    assert [case.name for case in cases(parse_arguments(["--only", "kangaroo", "medusa1"]))] == ["medusa1", "kangaroo"]
    assert "amphista-no-auto" not in [case.name for case in cases(parse_arguments([]))]
    quick = {case.name: case for case in cases(parse_arguments(["--quick"]))}
    steps = [config_of(stage).max_steps or 0 for stage in quick["medusa2"].stages]
    assert sum(steps) == config_of(quick["hydra"].stages[0]).max_steps
    with pytest.raises(SystemExit):
        parse_arguments(["--epochs", "2", "--stage-one", "2"])
    with pytest.raises(SystemExit):
        parse_arguments(["--only", "eagle"])
    assert parse_arguments([]).limit == [None]
    assert parse_arguments(["--bench", "tiny", "specbench", "--limit", "7"]).limit == [7, 7]
    assert parse_arguments(["--bench", "tiny", "specbench", "--limit", "7", "8"]).limit == [7, 8]
    with pytest.raises(SystemExit):
        parse_arguments(["--bench", "tiny", "--limit", "7", "8"])


def test_trained_together_each_run_s_tree_is_chosen_when_all_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafts.os, "cpu_count", lambda: 4)
    trained: list[tuple[str, int | None]] = []
    chosen: list[str] = []

    def train(stage: Stage, out: Path, threads: int) -> None:
        done = out / "runs" / f"{stage.name}.json"
        if not done.is_file():
            done.parent.mkdir(exist_ok=True)
            done.touch()
            trained.append((stage.name, threads))

    monkeypatch.setattr(drafts, "train", train)

    def call(words: Sequence[str]) -> None:
        assert len(trained) >= 3
        chosen.append(words[-2])

    monkeypatch.setattr(drafts, "call", call)
    asked = parse_arguments(["--together", "2", "--only", "medusa2", "hydra", "--out", str(tmp_path)])
    drafts.train_together(asked)
    assert set(trained) == {("medusa2-stage-one", 2), ("medusa2", 2), ("hydra", 2)}
    assert [name for name, _ in trained if "2" in name] == ["medusa2-stage-one", "medusa2"]
    assert chosen == [str(tmp_path / "runs" / name) for name in ("medusa2", "hydra")]
    drafts.train_together(asked)
    assert len(chosen) == 2  # a tree is chosen once
    os.utime(tmp_path / "runs" / "hydra.json", ns=(1 << 62, 1 << 62))  # deleted, and trained anew
    drafts.train_together(asked)
    assert chosen[2:] == [str(tmp_path / "runs" / "hydra")]


def fake_training(words: Sequence[str]) -> None:
    """What `medusa-train` leaves behind, from noise instead of training; Medusa-2's with an adapter."""
    path, overrides = split_arguments([word for word in words[3:] if not word.startswith("resume_from")])
    cfg = load_config(TrainConfig, path, overrides)
    run = Path(cfg.output_dir)
    run.mkdir(parents=True)
    backbone = Backbone.load(cfg.base_model, dtype="float32")
    torch.manual_seed(1)
    draft = DRAFTS[cfg.draft].from_backbone(backbone, **cfg.drafted.settings)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    save_draft(draft, run / "heads", cfg.base_model)
    if cfg.adapter:
        adapter = Adapter.attach(backbone, LoraSpec(4, 4, 0.0, ("q_proj", "lm_head")))
        for parameter in adapter.parameters():
            parameter.data.normal_(0, 0.3)  # another backbone, that gives other answers
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
def trainings(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that were run, each of them by `fake_training`."""
    called: list[list[str]] = []

    def call(words: list[str], threads: int | None = None) -> None:
        called.append(words)
        fake_training(words)

    monkeypatch.setattr(m2_vs_m1, "call", call)
    return called


def words_for(out: Path, backbone_dir: Path, chats: Path, bench: Path, *more: str) -> list[str]:
    short = [f"base_model={backbone_dir}", f"datasets=[{{path: {chats}, type: sharegpt}}]", "sequence_len=200"]
    words = ["--out", str(out), "--quick", "--bench", str(bench), "--max-new-tokens", "12", "--dtype", "float32"]
    return [*words, "--nodes", "5", "--set", *short, "bf16=false", "val_set_size=0.2", *more]


@pytest.fixture
def bench(tmp_path: Path) -> Path:
    draw = random.Random(5)
    path = tmp_path / "small.jsonl"
    questions = [
        {"question_id": i, "category": "even" if i % 2 else "odd", "turns": [sentence(draw), sentence(draw)]}
        for i in range(3)
    ]
    path.write_text("".join(json.dumps(question) + "\n" for question in questions))
    return path


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_the_whole_command_and_nothing_twice(
    tmp_path: Path, backbone_dir: Path, chats: Path, bench: Path, trainings: list[list[str]]
) -> None:
    out = tmp_path / "out"
    words = words_for(out, backbone_dir, chats, bench)
    assert drafts.main(words) == 0
    assert len(trainings) == 8  # Medusa-2 has two stages
    assert all(words[-1] == "resume_from_checkpoint=auto" for words in trainings)
    found = read(out / "drafts.json")
    names = [case["name"] for case in found["cases"]]
    assert names == list(drafts.NAMES[:7])
    counts, times = found["counts"]["small"], found["times"]["small"]
    assert list(counts["drafts"]) == list(times["drafts"]) == names
    for name, draft in counts["drafts"].items():
        for tree, one in draft["trees"].items():
            assert one["equal"] + one["ties"] == counts["answers"] == 6, (name, tree)  # lossless, each of them
            assert one["acceleration_rate"] >= 1.0
        assert [draft["trees"][tree]["nodes"] for tree in ("own", "equal")] == [6, 5]
    assert [list(times["drafts"][name]) for name in ("kangaroo", "medusa1")] == [
        ["own", "equal", "chain"],
        ["own", "equal"],
    ]
    page = (out / "drafts.md").read_text()
    assert "| Hydra++ | equal | 5 |" in page
    assert "nothing is trained" in page
    assert (out / "drafts.png").stat().st_size > 10_000
    written = {
        path: path.stat().st_mtime_ns for phase in ("counts", "times", "cases") for path in (out / phase).iterdir()
    }
    assert drafts.main(words) == 0
    assert len(trainings) == 8
    assert {path: path.stat().st_mtime_ns for path in written} == written

    # a draft less: nothing is trained again, but decoders take turns anew
    assert drafts.main([*words, "--only", "medusa1", "kangaroo"]) == 0
    assert len(trainings) == 8
    fewer = read(out / "counts" / "small.json")
    assert list(fewer["drafts"]) == ["medusa1", "kangaroo"]
    assert fewer["drafts"]["kangaroo"] == counts["drafts"]["kangaroo"]  # and counts what it counted


def settled(out: Path, names: Sequence[str], words: list[str]) -> tuple[argparse.Namespace, list[dict[str, Any]]]:
    asked = parse_arguments([*words, "--only", *names])
    return asked, [drafts.settled(case, asked, MACHINE) for case in cases(asked)]


@pytest.mark.usefixtures("trainings")
def test_counts_are_those_of_decoding_and_go_on_where_they_stopped(
    tmp_path: Path, backbone_dir: Path, chats: Path, bench: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    asked, described = settled(out, ["medusa1", "kangaroo"], words_for(out, backbone_dir, chats, bench))
    field = load_field(out / "runs", described, "float32", pack=False)
    assert set(answerers(field, COUNTS)) == {
        *(f"{name}/{tree}" for name in ("medusa1", "kangaroo") for tree in ("own", "equal", "chain")),
        "kangaroo/whole chain",
    }
    assert all(one.backbone is field.backbone for one in field.contenders)

    from medusa_train.evaluation.records import TurnLog

    append, seen = TurnLog.append, []

    def stop(self: TurnLog, turn: Any) -> None:
        append(self, turn)
        seen.append(turn)
        if len(seen) == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TurnLog, "append", stop)
        with pytest.raises(KeyboardInterrupt):
            next(measure(asked, described, MACHINE))
    assert len(seen) == 4
    monkeypatch.setattr(TurnLog, "append", lambda self, turn: (seen.append(turn), append(self, turn))[1])
    phase, name, result = next(measure(asked, described, MACHINE))
    assert (phase, name, result["answers"]) == (COUNTS, "small", 6)
    assert len(seen) == 4 + 4 + 2  # two questions are taken over, one is asked

    draft = result["drafts"]["kangaroo"]
    for question, one in draft["trees"]["own"]["questions"].items():
        turns = [turn for turn in seen[4:] if str(turn.question_id) == question]
        made = [turn.others["kangaroo/own"] for turn in turns]
        assert one["tokens"] == sum(len(answer.tokens) - 1 for answer in made)
        assert sum(one["accepted"]) == sum(answer.steps for answer in made)
        plain = sum(len(turn.plain.tokens) - 1 for turn in turns)
        assert one["tokens"] == plain
        assert draft["hits"][question][0][1] == plain  # at depth 1 all tokens but the first are guessed


@pytest.mark.usefixtures("trainings")
def test_a_draft_is_described_and_its_tree_is_fitted_without_a_clock(
    tmp_path: Path, backbone_dir: Path, chats: Path, bench: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    _, (kangaroo,) = settled(out, ["kangaroo"], words_for(out, backbone_dir, chats, bench))
    backbone = Backbone.load(str(backbone_dir), dtype="float32")
    draft = DRAFTS["kangaroo"].from_backbone(backbone, exit_layer=1, mlp_size=640)
    assert kangaroo["parameters"] == sum(parameter.numel() for parameter in draft.parameters())
    assert (kangaroo["kind"], kangaroo["backbone_layers"], kangaroo["draft"]["exit_layer"]) == ("kangaroo", 2, 1)
    learnt = {"run": "kangaroo", "steps": 4, "tokens": 800, "seconds": 2.0, "tokens_per_s": 400.0}
    assert kangaroo["training"] == [learnt]
    assert len(kangaroo["equal"]) == 5
    with monkeypatch.context() as patch:
        patch.setattr("time.perf_counter", iter(range(10**9)).__next__)
        assert describe([out / "runs" / "kangaroo"], 5, 400)["equal"] == kangaroo["equal"]


@pytest.mark.usefixtures("trainings")
def test_filled_trees_end_no_chain_early(tmp_path: Path, backbone_dir: Path, chats: Path, bench: Path) -> None:
    out = tmp_path / "out"
    _, described = settled(out, ["kangaroo"], words_for(out, backbone_dir, chats, bench))
    (one,) = load_field(out / "runs", described, "float32", pack=False).contenders
    draft = one.draft
    assert isinstance(draft, KangarooDraft)
    assert draft.threshold == 0.6
    found = answerers(Field(one.backbone, None, [one]), COUNTS)  # type: ignore[arg-type]
    filled = found["kangaroo/whole chain"].answer([5, 6, 7], 24)
    assert draft.threshold == 0.6
    as_published = found["kangaroo/chain"].answer([5, 6, 7], 24)
    draft.threshold = 0.0
    never = found["kangaroo/chain"].answer([5, 6, 7], 24)
    assert filled.tokens == as_published.tokens == never.tokens
    assert (filled.steps, filled.accepted) == (never.steps, never.accepted)


def counted(rate: float, accuracy: Sequence[float], reach: Sequence[int], seed: int = 3) -> dict[str, Any]:
    """A draft on 24 questions: about `rate` tokens a step, `reach` of 100 steps with 0, 1, ... guesses accepted."""
    draw = random.Random(seed)
    questions = {}
    for number in range(24):
        tokens = round(sum(reach) * rate * draw.uniform(0.8, 1.2))
        questions[str(number)] = {"tokens": tokens, "accepted": list(reach)}
    steps = sum(reach)
    tree = {
        "nodes": 16, "tree_depth": 4, "acceleration_rate": rate, "acceleration_interval": [rate - 0.1, rate + 0.1],
        "ctar": [sum(reach[w:]) / steps for w in range(1, len(reach))], "equal": 23, "ties": 1,
        "questions": questions, "categories": {"easy": rate, "hard": rate},
    }  # fmt: skip
    hits = {str(n): [[round(1000 * share), 1000] for share in accuracy] for n in range(24)}
    return {"trees": dict.fromkeys(("own", "equal", "chain"), tree), "hits": hits}


def timed(speed: float) -> dict[str, Any]:
    one = {
        "tokens_per_s": 100 * speed, "overhead": 1.5, "speedup": speed, "speedup_over_generate": speed,
        "speedup_over_fastest": speed, "categories": {"easy": speed, "hard": speed},
        "intervals": {"overhead": [1.4, 1.6], "speedup_over_fastest": [speed - 0.1, speed + 0.1]},
    }  # fmt: skip
    return {"own": one, "equal": one}


def case(name: str, parameters: int) -> dict[str, Any]:
    return {
        "name": name, "title": name.capitalize(), "kind": name.partition("-")[0], "draft": {"exit_layer": 1},
        "depth": 4, "parameters": parameters, "backbone_parameters": 10_000, "backbone_layers": 6,
        "training": [{"run": name, "steps": 1, "tokens": 1000, "seconds": 2.0, "tokens_per_s": 500.0}],
    }  # fmt: skip


def everything(good: bool) -> dict[str, Any]:
    """Results in which every line says yes, or every line no."""
    rates = {"medusa1": 2.0, "hydra++": 2.6, "amphista": 2.5, "amphista-alpha": 2.6, "kangaroo": 2.0}
    speeds = {"medusa1": 1.2, "hydra++": 1.3, "amphista": 1.5, "amphista-alpha": 1.6, "kangaroo": 1.4}
    if not good:
        rates = dict.fromkeys(rates, 2.0)
        speeds = {name: 3 - speed for name, speed in speeds.items()}
    reach = {"kangaroo": [10, 10, 20, 20, 40] if good else [90, 5, 5, 0, 0]}
    accuracy = {"amphista": [0.5, 0.4, 0.4, 0.4 if good else 0.1]} if good else {"amphista": [0.5, 0.2, 0.1, 0.1]}
    even = {name: counted(rate, accuracy.get(name, [0.5, 0.4, 0.3, 0.2]), reach.get(name, [40, 30, 20, 5, 5]))
            for name, rate in rates.items()}  # fmt: skip
    common = {"bench": "b", "questions": 24, "answers": 24, "skipped": 0, "settings": {"max_new_tokens": 9}}
    clock = {"machine": MACHINE, "dtype": "float32", "tokens_per_s": {"plain": 100.0, "generate": 90.0}}
    return {
        "machine": MACHINE,
        "quick": False,
        "together": 1,
        "cases": [case(name, 400 if name == "kangaroo" and good else 2000) for name in rates],
        "counts": {"b": {**common, "dtype": "float32", "drafts": even}},
        "times": {"b": {**common, **clock, "drafts": {name: timed(speed) for name, speed in speeds.items()}}},
    }


def test_lines_say_yes_and_no() -> None:
    good = list(lines(everything(good=True)))
    bad = list(lines(everything(good=False)))
    # sizes, own and equal trees of two drafts, two heads, three windows with four trees, five orders
    assert len(good) == len(bad) == 2 + 4 + 2 + 12 + 5
    assert sum("eta 0" in line.text for line in good) == 3
    assert [line.text for line in good if not line.holds] == []
    assert {line.answer for line in good} == {"yes"}
    assert [line.text for line in bad if line.holds] == [
        "Kangaroo leaves the backbone after 1 of its 6 layers; at most 25%"
    ]
    assert {line.answer for line in bad} == {"yes", "no"}
    assert any("ratio 1.250 [1.2" in line.text for line in good)


def test_a_line_says_when_its_interval_does_not_agree() -> None:
    found = everything(good=True)
    found["counts"]["b"]["drafts"]["amphista"] = counted(2.22, [0.5, 0.4, 0.4, 0.4], [40, 30, 20, 5, 5], seed=9)
    (own, _) = (line for line in lines(found) if "Amphista 2" in line.text and "tokens per step" in line.text)
    assert own.answer in {"yes, but not for sure", "no, but not for sure"}


def test_no_difference_at_all_is_no() -> None:
    found = everything(good=True)
    drafts_of = found["counts"]["b"]["drafts"]
    drafts_of["kangaroo"] = drafts_of["medusa1"]
    windows = [line for line in lines(found) if "CTAR" in line.text]
    assert {(line.holds, line.answer) for line in windows} == {(False, "no")}


def test_counts_by_question() -> None:
    draft = counted(2.0, [0.5, 0.25], [10, 20, 30])
    assert set(taken(draft, "own").values()) != set()
    assert set(reached(draft, "own", 1).values()) == {Counts(50, 60)}
    assert set(reached(draft, "own", 2).values()) == {Counts(30, 60)}
    assert set(reached(draft, "own", 3).values()) == {Counts(0, 60)}
    assert set(guessed(draft, 2).values()) == {Counts(250, 1000)}
    assert accuracies(draft) == [0.5, 0.25]


def test_a_difference_of_zero_rates_has_an_interval() -> None:
    zero, some = {"1": Counts(0, 10), "2": Counts(0, 5)}, {"1": Counts(5, 10), "2": Counts(1, 5)}
    assert paired_difference(zero, zero) == (0.0, (0.0, 0.0))
    difference, found = paired_difference(zero, some)
    assert difference == pytest.approx(0.4)
    assert found is not None
    assert 0.2 <= found[0] < 0.4 < found[1] <= 0.5
    assert paired_difference({"1": Counts(0, 10)}, {"1": Counts(5, 10)}) == (0.5, None)


def test_the_page_grows_with_what_is_known(tmp_path: Path) -> None:
    found = everything(good=True)
    for part in ("counts", "times"):
        page = markdown({**found, "counts": {}, "times": {}} if part == "counts" else {**found, "times": {}})
        assert "## What was trained" in page
        assert ("## b" in page) == (part == "times")
    assert "Not timed yet" in page
    write_report(tmp_path, found)
    page = (tmp_path / "drafts.md").read_text()
    assert (
        "| Amphista | own | 16 | 2.50 [2.40, 2.60] | 1.50 [1.40, 1.60] | 1.50x [1.40, 1.60] | 150.0 | 0.600 |" in page
    )
    assert "| Kangaroo | 400 | 500 | 2.00 | 1.50 | 1.40x |" in page
    assert "| easy | 2.00, 1.20x | 2.60, 1.30x |" in page
    assert read(tmp_path / "drafts.json")["lines"][0]["holds"] is True


@pytest.mark.slow
def test_real_trainings_learn_from_equal_tokens(tmp_path: Path, backbone_dir: Path, chats: Path, bench: Path) -> None:
    out = tmp_path / "out"
    words = [*words_for(out, backbone_dir, chats, bench), "--only", "medusa1", "medusa2", "hydra++", "kangaroo"]
    words.remove("--quick")
    assert drafts.main([*words, "--epochs", "2", "--limit", "2", "--tree-tokens", "200"]) == 0
    found = read(out / "drafts.json")
    tokens = {case["name"]: sum(stage["tokens"] for stage in case["training"]) for case in found["cases"]}
    assert len(set(tokens.values())) == 1
    assert tokens["medusa1"] > 0
    medusa2 = found["counts"]["small"]["drafts"]["medusa2"]["trees"]["equal"]
    assert medusa2["equal"] + medusa2["ties"] == found["counts"]["small"]["answers"]
