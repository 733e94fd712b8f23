"""Experiments of the papers: every YAML file is a sound plan, nothing is trained or measured twice,
and the page.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import papers
import pytest
from papers import Plan, load_questions, named_tree, parse_arguments, read_experiment

from medusa_train.checkpoint.resolve import HeadFiles
from medusa_train.config.load import load_config
from medusa_train.config.schema import EvalConfig, TrainConfig
from medusa_train.errors import ConfigError, DataError
from medusa_train.evaluation import questions
from medusa_train.inference.generate import Decoder
from medusa_train.tree_search.fit import AcceptedLength, Trace
from medusa_train.tree_search.traces import TracedAnswers, trace_answer
from medusa_train.trees.tree import Tree
from tests.inference.test_drafts import PROMPTS
from tests.inference.test_kangaroo_decoding import early_exit, settled

NAMES = sorted(path.stem for path in papers.EXPERIMENTS.glob("*.yaml"))
SAME = ("base_model", "datasets", "sequence_len", "val_set_size", "seed", "cache_hidden_states")


def plan(name: str, *words: str) -> Plan:
    return Plan(parse_arguments([name, *words]), read_experiment(name))


@pytest.fixture
def benches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MT-Bench and Spec-Bench with two short questions of every category that is asked for."""
    categories = {
        "mtbench": ("writing", "roleplay", "coding"),
        "specbench": ("translation", "summarization", "qa", "math_reasoning", "rag"),
    }
    for name, parts in categories.items():
        rows = [
            {"question_id": f"{part}{i}", "category": part, "turns": ["Hi."]}
            for part in parts
            for i in range(2)
        ]
        (tmp_path / "benches" / name).mkdir(parents=True)
        path = tmp_path / "benches" / name / "question.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    monkeypatch.setenv(questions.BENCH_DIR_VARIABLE, str(tmp_path / "benches"))


@pytest.fixture
def shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes of a target model that need not be on this machine."""
    sizes = SimpleNamespace(intermediate_size=1536, hidden_size=576, num_hidden_layers=6)
    monkeypatch.setattr(papers, "target_model_config", lambda cfg: sizes)


@pytest.mark.usefixtures("benches", "shape")
@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_is_a_sound_plan(name: str) -> None:
    for prefix in ("configs/tiny", "configs/smollm2", "configs/vicuna7b"):
        one = plan(name, "--configs", prefix)
        for run in one.names:
            for stage in one.stages(run):
                cfg = stage.load()  # every override is a key with a valid value
                assert max(cfg.draft_config.aux_layers(6), default=0) < 6
                assert (cfg.recipe == "medusa2") == stage.config.endswith("m2.yaml")
            for point in one.points(run):
                tree = str(point.keys.get("tree"))
                if papers.TREE_NAME.fullmatch(tree):
                    assert named_tree(
                        tree, 5, {int(tree[7:]): Tree.chain(1)} if "sparse" in tree else {}
                    ).size
                counted = one.experiment.evaluations[point.evaluation].count
                cfg = EvalConfig.model_validate(
                    {key: value for key, value in point.keys.items() if key != "tree"}
                )
                assert not counted or cfg.acceptance == "greedy"
                assert not set(cfg.ignored) - {"prompt_lookup", "exactness", "epsilon", "delta"}
                assert load_questions(cfg.bench).questions


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name.startswith(("medusa", "kangaroo", "amphista"))]
)
def test_published_figures_stand_in_columns_of_the_table(name: str) -> None:
    experiment = read_experiment(name)
    titles = {column.title for column in experiment.columns}
    assert experiment.published.where
    assert experiment.published.rows or experiment.published.claims
    assert all(set(row) <= titles for row in experiment.published.rows.values())
    assert {experiment.chart.y, experiment.chart.x or experiment.chart.y} <= titles
    assert all(set(column.mean_of) <= titles for column in experiment.columns)
    assert all(
        run.after is None or run.after in experiment.runs for run in experiment.runs.values()
    )
    page = (papers.ROOT / "docs" / "explanation" / "papers.md").read_text(encoding="utf-8")
    assert f"- `{name}`\n" in page or f"| `{name}` |" in page


@pytest.mark.usefixtures("shape")
@pytest.mark.parametrize("prefix", ["configs/tiny", "configs/smollm2"])
@pytest.mark.parametrize("name", ["drafts", "embeddings", "variants"])
def test_all_drafts_are_trained_on_the_same_tokens(name: str, prefix: str) -> None:
    one = plan(name, "--configs", prefix, "--set", "seed=7")
    like = load_config(TrainConfig, Path(f"{prefix}_m1.yaml"))
    for run in one.names:
        configs = [stage.load() for stage in one.stages(run)]
        assert sum(cfg.num_epochs for cfg in configs) == like.num_epochs
        for cfg in configs:
            expected = {
                **{key: getattr(like, key) for key in SAME},
                "seed": 7,
                "cache_hidden_states": False,
            }
            assert {key: getattr(cfg, key) for key in SAME} == expected
            assert cfg.micro_batch_size * cfg.gradient_accumulation_steps == 8
        assert len({stage.directory for stage in one.stages(run)}) == len(configs)
        assert len(configs) < 2 or configs[1].lora_model_dir == str(one.stages(run)[0].directory)


@pytest.mark.usefixtures("shape")
def test_keys_of_the_command_line_replace_swept_ones() -> None:
    points = list(plan("medusa_fig7", "--eval", "epsilon=0.05", "bench=tiny").points("medusa2"))
    assert [point.keys.get("delta") for point in points[:4]] == [None, None, 0.1, 0.1414]
    assert {point.keys["bench"] for point in points} == {"tiny"}
    assert {point.keys.get("epsilon") for point in points[2:]} == {0.05}
    # three trees and one sampled
    assert len(list(plan("drafts", "--eval", "bench=tiny").points("medusa1"))) == 4


def test_columns_of_other_values_stay_empty_and_edits_make_other_runs(tmp_path: Path) -> None:
    one = plan("kangaroo_table1", "--runs", "medusa1", "--eval", "bench=mtbench:5")
    assert [(point.swept["bench"], point.keys["bench"]) for point in one.points("medusa1")] == [
        ("mtbench", "mtbench:5")
    ]
    with pytest.raises(ConfigError, match="--eval: no column of kangaroo_table1 has these values"):
        plan("kangaroo_table1", "--runs", "medusa1", "--eval", "bench=tiny")
    path, directories = tmp_path / "edited_m1.yaml", set()
    for rate in (1e-3, 2e-3, 1e-3):
        path.write_text(
            "base_model: data/tiny\ndatasets: [{path:"
            f" data/selfdistill/tiny.jsonl}}]\nlearning_rate: {rate}\n"
        )
        (stage,) = plan(
            "drafts", "--runs", "medusa1", "--configs", str(tmp_path / "edited")
        ).stages("medusa1")
        directories.add(stage.directory)
    assert len(directories) == 2


@pytest.mark.usefixtures("shape")
def test_runs_are_chosen_and_shared_by_their_settings() -> None:
    one = plan("drafts", "--runs", "kangaroo", "medusa2", "--epochs", "2")
    assert one.names == ["kangaroo", "medusa2"]
    assert [stage.load().num_epochs for stage in one.stages("medusa2")] == [1, 1]
    with pytest.raises(ConfigError, match="--runs nothing: not in medusa1"):
        plan("drafts", "--runs", "nothing")
    assert plan("medusa_table1").stages("medusa2") == plan("medusa_table2").stages("medusa2")
    assert plan("medusa_table1", "--set", "seed=7").stages("medusa2") != plan(
        "medusa_table2"
    ).stages("medusa2")
    counted = plan("kangaroo_table2", "--counted")
    assert counted.names == ["kangaroo", "head", "mlp", "mlp-only"]  # Medusa is only timed
    assert [
        counted.experiment.evaluations[point.evaluation].count for point in counted.points("head")
    ] == [True]
    with pytest.raises(ConfigError, match="medusa_table1 measures depends on the clock"):
        plan("medusa_table1", "--counted")
    with pytest.raises(ConfigError, match="no such file"):
        read_experiment("nothing")


@pytest.mark.usefixtures("benches")
def test_benches_of_some_categories_and_questions() -> None:
    assert [
        question.question_id for question in load_questions("specbench@qa+rag:1").questions
    ] == ["qa0", "rag0"]
    with pytest.raises(ConfigError, match="no questions; categories"):
        load_questions("mtbench@nothing")
    with pytest.raises(DataError):
        load_questions("no-such-bench:2")


def test_trees_by_name() -> None:
    assert named_tree("chain:6", 4, {}) == Tree.chain(4)
    assert named_tree("dense:4x4x2", 2, {}) == Tree.cartesian([4, 4])
    random_trees = {named_tree(f"random:{seed}", 4, {}) for seed in range(20)}
    assert len(random_trees) > 10
    assert max(tree.size for tree in random_trees) > 100
    for tree in random_trees:
        assert tree.size <= papers.MOST_NODES
        widths = [
            len({path[depth] for path in tree.paths if len(path) > depth})
            for depth in range(tree.max_depth)
        ]
        assert tree == Tree.cartesian(widths)


def fake(calls: list[list[str]], command: str, words: Sequence[str]) -> None:
    """Write what the commands leave behind: two answers of five tokens, of which heads guess the
    first two.
    """
    calls.append([command, *words])
    if command == "train":
        config, *overrides = [word for word in words if not word.startswith("resume_from")]
        run = Path(load_config(TrainConfig, Path(config), overrides).output_dir)
        run.mkdir(parents=True)
        (run / "config.yaml").write_text(
            "base_model: data/tiny\ndatasets: [{path: data/selfdistill/tiny.jsonl}]\n"
        )
        (run / "metrics.jsonl").write_text(json.dumps({"kind": "train", "tokens": 800}) + "\n")
        return
    out = Path(next(word for word in words if word.startswith("output_dir=")).partition("=")[2])
    out.mkdir(parents=True)
    overall = {
        "speedup": 1.5,
        "intervals": {"speedup": [1.25, 1.75]},
        "acceleration_rate": 2.0,
        "answers": 2,
    }
    overall |= {"looping_answers": 0, "head_accuracy": [[0.5] * 10] * 2}
    meta = {"tree_nodes": 4, "early_stop": 0.0, "decoding": {}}
    (out / "report.json").write_text(json.dumps({"meta": meta, "overall": overall}))
    answers = [
        {"question_id": i, "turn": 1, "tokens": 5, "accepted": [1, 1], "loops": bool(i)}
        for i in (0, 1)
    ]
    (out / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in answers))
    ranks = [[0, 0, 2], [0, 2, -1], [2, -1, -1], [-1, -1, -1], [-1, -1, -1]]
    lines = [{"question_id": i, "turn": 1, "ranks": ranks} for i in (0, 1)]
    (out / "ranks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that were run, each by `fake`."""
    made: list[list[str]] = []
    monkeypatch.setattr(papers, "call", lambda command, words: fake(made, command, words))
    monkeypatch.setattr(papers, "find_heads", lambda directory: HeadFiles(directory, None, []))
    monkeypatch.setattr(papers.Measurement, "_sparse", {size: Tree.chain(3) for size in range(300)})
    return made


@pytest.mark.usefixtures("benches")
@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_writes_its_page_and_repeats_nothing(
    name: str, tmp_path: Path, calls: list[list[str]]
) -> None:
    words = [name, "--quick", "--out", str(tmp_path / "out")]
    assert papers.main(words) == 0
    experiment = read_experiment(name)
    text = (tmp_path / "out" / f"{name}.md").read_text(encoding="utf-8")
    record = json.loads((tmp_path / "out" / f"{name}.json").read_text(encoding="utf-8"))
    assert "not trained" in text
    assert experiment.published.where in text
    for row, cells in experiment.published.rows.items():
        assert f"*{row}, published*" in text
        assert all(str(cell) in text for cell in cells.values())
    assert any(cell is not None for cells in record["rows"].values() for cell in cells.values())
    assert all(command.startswith("configs/tiny_") for command in text.split("`medusa-train ")[1:])
    if (tmp_path / "out" / f"{name}.svg").exists():
        ElementTree.parse(tmp_path / "out" / f"{name}.svg")
    assert (made := len(calls)) >= len(experiment.evaluations)
    assert papers.main(words) == 0
    assert len(calls) == made


@pytest.mark.usefixtures("benches")
def test_steps_are_simulated_along_the_answers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, calls: list[list[str]]
) -> None:
    monkeypatch.setattr("paper_tables.LEAST_QUESTIONS", 2)
    assert (
        papers.main(["drafts", "--quick", "--runs", "medusa1", "amphista", "--out", str(tmp_path)])
        == 0
    )
    rows = json.loads((tmp_path / "drafts.json").read_text())["rows"]
    cells = rows["Medusa-1, tiny:1"]  # in place of both benches
    # chain: four tokens after the prefill's, in two steps: two guesses are accepted, then none; one
    # answer loops
    assert [cells[key] for key in ("chain", "without loops", "tokens trained on", "over")] == [
        2.0,
        2.0,
        800,
        None,
    ]
    assert rows["Amphista, tiny:1"]["over"] == [1.0, 1.0, 1.0]
    assert len([words for words in calls if words[0] == "train"]) == 2


def test_a_plan_is_printed_without_its_model_and_trains_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, calls: list[list[str]]
) -> None:
    words = ["medusa_table2", "--configs", "configs/vicuna7b", "--inspect", "--runs", "medusa1"]
    assert papers.main([*words, "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "to train: medusa-train configs/vicuna7b_m1.yaml output_dir=" in shown
    assert "medusa1: 1 evaluations, 1 points" in shown
    assert not calls


def test_sparse_trees_are_fitted_to_the_traces_of_the_run(tmp_path: Path) -> None:
    traces = [Trace([[2, 0], [-1, -1]]), Trace([[0, 1], [3, -1], [-1, -1]])]
    TracedAnswers([traces[:1], traces[1:]], [1, 2]).save(tmp_path / "tree_traces.npz")
    assert papers.read_traces(tmp_path / "tree_traces.npz") == traces


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.6])
def test_an_early_stop_is_simulated_from_the_confidence_along_an_answer(threshold: float) -> None:
    target_model = settled("llama", sharpness=3.0)
    draft, lengths = (
        early_exit(target_model, num_heads=5, threshold=threshold),
        AcceptedLength(Tree.chain(4)),
    )
    stopped = 0
    for prompt in PROMPTS:
        out = Decoder(target_model, draft, Tree.chain(4)).generate(prompt, 40, ())
        whole = trace_answer(target_model, draft, prompt, out.tokens)
        trace = papers.stop_early(whole, threshold)
        assert [lengths[trace.path(start)] for start in trace.simulate(lengths)] == out.accepted
        stopped += len(trace.simulate(lengths)) - len(whole.simulate(lengths))
    assert (stopped > 0) == (threshold > 0.3)
