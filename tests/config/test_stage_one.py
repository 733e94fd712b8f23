"""The configuration of stage one: what it takes from the run, what it keeps, and what cannot go
together.
"""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from medusa_train.checkpoint.run_directory import write_config
from medusa_train.cli.train import app
from medusa_train.config.load import load_config, stage_one_config
from medusa_train.config.paths import PROJECT_ROOT
from medusa_train.config.schema import TrainConfig
from medusa_train.errors import ConfigError

ONE = """\
base_model: one
datasets: [{path: one.jsonl}]
learning_rate: 2.0e-3
num_epochs: 3
val_set_size: 0.2
tf32: true
load_in_4bit: true
export: vllm
resume_from_checkpoint: true
"""
TWO = """\
base_model: two
datasets: [{path: two.jsonl}]
stage_one: one.yaml
adapter: lora
sequence_len: 100
learning_rate: 1.0e-3
deepspeed: {zero_optimization: {stage: 2}}
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Configurations of both stages, side by side and not in the working directory."""
    (tmp_path / "one.yaml").write_text(ONE)
    (tmp_path / "two.yaml").write_text(TWO)
    return tmp_path / "two.yaml"


def load(path: Path, *overrides: str) -> TrainConfig:
    first = stage_one_config(load_config(TrainConfig, path, overrides))
    assert first is not None
    return first


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(TrainConfig, path, overrides)
    return [problem.replace(f"{path.parent}/", "") for problem in caught.value.problems]


def test_the_run_decides_on_model_data_and_machine_and_stage_one_on_its_training(
    files: Path,
) -> None:
    first = load(
        files, "wandb_project=p", "seed=7", "num_epochs=1", "sequence_len=90", "output_dir=runs/x"
    )
    assert (first.base_model, first.datasets[0].path, first.sequence_len) == (
        "two",
        "two.jsonl",
        90,
    )
    assert (first.seed, first.wandb_project, first.deepspeed) == (
        7,
        "p",
        {"zero_optimization": {"stage": 2}},
    )
    assert (first.learning_rate, first.num_epochs, first.load_in_4bit, first.tf32) == (
        2e-3,
        3,
        True,
        True,
    )
    assert (first.recipe, first.adapter, first.output_dir) == ("medusa1", None, "runs/x/stage_one")
    two = load_config(TrainConfig, files, ["test_datasets=[{path: t.jsonl}]"]).resolved()
    theirs = load(files, "test_datasets=[{path: t.jsonl}]")
    assert (theirs.val_set_size, theirs.test_datasets) == (two.val_set_size, two.test_datasets)
    assert first.val_set_size == 0.05
    assert (first.export, first.resume_from_checkpoint, first.calibration_tokens) == (None, None, 0)


@pytest.mark.parametrize("written", ["stage_one={path}", "stage_one={{config: {path}}}"])
def test_stage_one_has_overrides(files: Path, written: str) -> None:
    written = written.format(path=files.with_name("one.yaml"))
    changed = [
        "stage_one.max_steps=3",
        "stage_one.sequence_len=50",
        "stage_one.calibration_tokens=9",
    ]
    first = load(files, written, *changed, "stage_one.deepspeed=")
    assert (first.max_steps, first.sequence_len, first.calibration_tokens) == (3, 50, 9)
    assert (first.deepspeed, first.num_epochs) == (None, 3)


def test_all_problems_of_both_stages_are_reported_at_once(files: Path) -> None:
    files.with_name("one.yaml").write_text(ONE + "medusa_num_heads: 3\nmicro_batch_size: many\n")
    files.write_text(
        TWO.replace("one.yaml", "\n  config: one.yaml\n  max_step: 3\n  output_dir: x")
        + "warmup_steps: x\n"
    )
    assert problems(files, "stage_one.base_model=other") == [
        "two.yaml:11: warmup_steps: expected an integer, got 'x'",
        (
            "one.yaml:10: medusa_num_heads: 3: the heads of stage two have 5 (default); both must"
            " be equal"
        ),
        "one.yaml:11: micro_batch_size: expected an integer, got 'many'",
        "two.yaml:6: stage_one: output_dir: is set for the whole run; remove it",
        "two.yaml:5: stage_one: max_step: unknown key; did you mean max_steps?",
        (
            "override 'stage_one.base_model=other': stage_one: base_model: 'other': the heads of"
            " stage two have 'two' (two.yaml:1); both must be equal"
        ),
    ]
    files.write_text(
        TWO.replace("datasets:", "dataset:").replace("sequence_len: 100", "sequence_len: many")
    )
    keys = [problem.partition(": ")[2].partition(":")[0] for problem in problems(files)]
    assert keys == ["dataset", "sequence_len", "datasets", "micro_batch_size"]
    assert (
        "override 'stage_one=5': stage_one: 5: no such file" in problems(files, "stage_one=5")[-1]
    )


@pytest.mark.parametrize(
    ("one", "overrides", "expected"),
    [
        ("medusa_num_heads: 3\nmedusa_vocab_size: 64\n", (), [
            "one.yaml:10: medusa_num_heads: 3: the heads of stage two have 5 (default); both must be equal",
            "one.yaml:11: medusa_vocab_size: 64: the heads of stage two have null (default); both must be equal",
        ]),
        ("", ("stage_one.base_model=other", "stage_one.medusa_num_layers=2", "medusa_num_layers=1"), [
            "override 'stage_one.base_model=other': stage_one: base_model: 'other': the heads of stage two have 'two' "
            "(two.yaml:1); both must be equal",
            "override 'stage_one.medusa_num_layers=2': stage_one: medusa_num_layers: 2: the heads of stage two have 1 "
            "(override 'medusa_num_layers=1'); both must be equal",
        ]),
        ("adapter: lora\nload_in_4bit: true\n", (), None),
        ("recipe: medusa2\nmedusa_num_unfreeze_layers: 1\n", ("stage_one.load_in_4bit=",), [
            "one.yaml:10: recipe: medusa2: stage one trains heads on a frozen backbone, recipe: medusa1",
        ]),
        ("stage_one: one.yaml\n", (), ["one.yaml:10: stage_one: a stage one cannot have a stage one itself"]),
    ],
)  # fmt: skip
def test_heads_that_stage_two_cannot_start_from(files: Path, one: str, overrides: tuple[str, ...],
                                                 expected: list[str] | None) -> None:  # fmt: skip
    files.with_name("one.yaml").write_text(ONE + one)
    found = problems(files, *overrides)
    assert found == expected or (expected is None and "is set twice" in found[0])


@pytest.mark.parametrize("name", ["a" * 300, "b/" + "c" * 300 + "/d.yaml"])
def test_a_name_that_no_file_can_have(files: Path, name: str) -> None:
    assert f": stage_one: {name}: no such file" in problems(files, f"stage_one={name}")[0]


def test_a_file_that_is_not_there(files: Path) -> None:
    files.write_text(TWO.replace("one.yaml", "on.yaml"))
    assert problems(files)[0].startswith("two.yaml:3: stage_one: on.yaml: no such file")


def test_a_finished_stage_one_replaces_it(files: Path) -> None:
    cfg = load_config(TrainConfig, files, ["lora_model_dir=runs/m1"])
    assert cfg.ignored == ("stage_one",)
    assert stage_one_config(cfg) is None
    assert stage_one_config(load_config(TrainConfig, files, ["stage_one="])) is None


def test_the_written_configuration_stands_alone_and_later_keys_still_reach_stage_one(
    files: Path,
) -> None:
    overrides = ["stage_one.max_steps=3", "stage_one.deepspeed=", "output_dir=runs/x"]
    cfg, first = load_config(TrainConfig, files, overrides), load(files, *overrides)
    write_config(cfg, files.parent)
    files.with_name("one.yaml").unlink()
    saved = files.with_name("config.yaml")
    assert load(saved).model_dump() == first.model_dump()
    assert load(saved, "datasets=[{path: three.jsonl}]", "seed=3").datasets[0].path == "three.jsonl"


def test_it_is_printed_in_comments(files: Path) -> None:
    text = CliRunner().invoke(app, [str(files), "--print-config", "stage_one.max_steps=3"]).stdout
    rows = [line.split() for line in text.split("# stage one:\n")[1].splitlines()]
    assert ["#", "max_steps:", "3", "#", f"{files}:3:", "stage_one"] in rows
    assert ["#", "base_model:", "two", "#", f"{files}:1"] in rows


@pytest.mark.parametrize(
    "path", sorted((PROJECT_ROOT / "configs").glob("*_m2*.yaml")), ids=lambda path: path.stem
)
def test_shipped_configurations_of_joint_training_train_their_heads_first(path: Path) -> None:
    """But for those that train in one stage, as in the paper."""
    cfg = load_config(TrainConfig, path)
    first = stage_one_config(cfg)
    assert (first is None) == (path.stem in ("vicuna33b_m2", "zephyr7b_m2"))
    if first is not None:
        assert first.heads_keys == cfg.heads_keys
        batches = [c.micro_batch_size * c.gradient_accumulation_steps for c in (first, cfg)]
        assert batches[0] == batches[1]
