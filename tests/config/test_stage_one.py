"""The configuration of stage one: what it has from the run, what it keeps, and what cannot go
together.
"""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from medusa_train.checkpoint.run_directory import write_config
from medusa_train.cli.train import app
from medusa_train.config.load import load_config, stage_one_config
from medusa_train.config.paths import PROJECT_ROOT
from medusa_train.config.removed_keys import REMOVED_KEYS
from medusa_train.config.schema import TrainConfig
from medusa_train.errors import ConfigError

TEXT = """\
base_model: model
datasets: [{path: chats.jsonl}]
stage_one:
  learning_rate: 2.0e-3
  num_epochs: 3
  load_in_4bit: true
adapter: lora
lora_r: 8
sequence_len: 100
learning_rate: 1.0e-3
warmup_ratio: 0.1
deepspeed: {zero_optimization: {stage: 2}}
medusa_self_distillation: true
export: vllm
resume_from_checkpoint: true
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A configuration of two stages."""
    (tmp_path / "two.yaml").write_text(TEXT)
    return tmp_path / "two.yaml"


def load(path: Path, *overrides: str) -> TrainConfig:
    first = stage_one_config(load_config(TrainConfig, path, overrides))
    assert first is not None
    return first


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(TrainConfig, path, overrides)
    return [problem.replace(f"{path.parent}/", "") for problem in caught.value.problems]


def test_stage_one_is_the_run_with_keys_of_its_own(file: Path) -> None:
    first = load(file, "seed=7", "wandb_project=p")
    assert (first.learning_rate, first.num_epochs, first.load_in_4bit) == (2e-3, 3, True)
    assert (first.base_model, first.datasets[0].path, first.sequence_len) == (
        "model",
        "chats.jsonl",
        100,
    )
    assert (first.seed, first.wandb_project, first.warmup_ratio) == (7, "p", 0.1)
    assert first.deepspeed == {"zero_optimization": {"stage": 2}}


def test_stage_one_trains_the_heads_alone_in_a_directory_of_its_own(file: Path) -> None:
    first = load(file, "output_dir=runs/x", "wandb_project=p", "wandb_name=n")
    assert (first.recipe, first.medusa_only_heads, first.output_dir) == (
        "medusa1",
        True,
        "runs/x/stage_one",
    )
    default = TrainConfig(base_model="m", datasets="d")
    joint = ("adapter", "lora_r", "medusa_self_distillation", "export", "resume_from_checkpoint")
    for name in (*joint, "wandb_name"):
        assert getattr(first, name) == getattr(default, name), name
    assert first.calibration_tokens == 0  # stage two changes the heads


def test_a_key_of_the_command_line_reaches_stage_one_that_has_none_of_its_own(file: Path) -> None:
    first = load(file, "sequence_len=50", "num_epochs=1", "datasets=new.jsonl")
    assert (first.sequence_len, first.num_epochs) == (50, 3)
    assert first.datasets[0].path == "new.jsonl"
    assert load(file, "max_steps=9", "stage_one.num_epochs=").max_steps == 9


def test_keys_of_stage_one_are_set_on_the_command_line(file: Path) -> None:
    overrides = ("stage_one.max_steps=3", "stage_one.calibration_tokens=9", "stage_one.deepspeed=")
    first = load(file, *overrides)
    assert (first.max_steps, first.calibration_tokens, first.deepspeed) == (3, 9, None)
    assert first.num_epochs == 3
    assert load(file, "stage_one={num_epochs: 5}").learning_rate == 1e-3


def test_text_of_stage_one_is_taken_as_it_is_typed(file: Path) -> None:
    first = load(file, "wandb_project=p", "stage_one.wandb_project=1.10")
    assert first.wandb_project == "1.10"


def test_its_own_form_of_a_key_replaces_the_other_one_of_the_run(file: Path) -> None:
    first = load(file, "stage_one.warmup_steps=5", "max_steps=9")
    assert (first.warmup_steps, first.warmup_ratio) == (5, None)
    assert (first.max_steps, first.num_epochs) == (None, 3)  # a note of the run says so


def test_a_run_without_keys_of_its_own_for_stage_one_still_has_it(file: Path) -> None:
    first = load(file, "stage_one={}")
    assert (first.recipe, first.learning_rate) == ("medusa1", 1e-3)


def test_all_problems_of_both_stages_are_reported_at_once(file: Path) -> None:
    text = TEXT.replace("num_epochs: 3", "num_epochs: many\n  max_step: 3\n  output_dir: x")
    file.write_text(text + "warmup_steps: x\nmicro_batch: 3\n")
    assert problems(file, "stage_one.base_model=other", "stage_one.adapter=dora") == [
        "two.yaml:5: stage_one: num_epochs: expected a number, got 'many'",
        "two.yaml:6: stage_one: max_step: unknown key; did you mean max_steps?",
        "two.yaml:7: stage_one: output_dir: is set for the whole run; remove it",
        "two.yaml:18: warmup_steps: expected an integer, got 'x'",
        "two.yaml:19: micro_batch: unknown key; did you mean micro_batch_size?",
        "override 'stage_one.base_model=other': stage_one: base_model: is set for the whole run;"
        " remove it",
        "override 'stage_one.adapter=dora': stage_one: adapter: must be lora or qlora, got 'dora'",
    ]


@pytest.mark.parametrize(
    "key",
    [
        "base_model=other",
        "draft=hydra",
        "medusa_num_heads=3",
        "medusa_vocab_size=64",
        "hydra={num_heads: 3}",
        "seed=3",
        "val_set_size=0.2",
        "test_datasets=t.jsonl",
        "stage_one={}",
        "lora_model_dir=runs/x",
        "export=vllm",
    ],
)
def test_keys_that_the_run_decides_are_refused_in_stage_one(file: Path, key: str) -> None:
    name = key.partition("=")[0]
    (problem, *_) = problems(file, f"stage_one.{key}")
    assert problem.endswith(f"stage_one: {name}: is set for the whole run; remove it")


@pytest.mark.parametrize(
    "key", ["recipe=medusa2", "medusa_only_heads=false", "medusa_num_unfreeze_layers=1"]
)
def test_joint_training_is_refused_in_stage_one(file: Path, key: str) -> None:
    found = problems(file, f"stage_one.{key}", "stage_one.load_in_4bit=")
    assert all("stage_one" in problem for problem in found)


def test_joint_training_in_stage_one_hides_no_other_problem(file: Path) -> None:
    file.write_text(TEXT.replace("num_epochs: 3", "recipe: medusa2\n  num_epochs: many"))
    assert problems(file) == [
        "two.yaml:5: stage_one: recipe: stage one trains heads on a frozen target model: medusa1",
        "two.yaml:6: stage_one: num_epochs: expected a number, got 'many'",
    ]


def test_an_empty_key_means_the_default_of_stage_one(file: Path) -> None:
    first = load(
        file, "stage_one.recipe=", "stage_one.adapter=lora", "stage_one.calibration_tokens="
    )
    assert (first.recipe, first.calibration_tokens) == ("medusa1", 0)


def test_keys_without_effect_in_stage_one_are_listed(file: Path) -> None:
    cfg = load_config(TrainConfig, file, ["stage_one.lora_r=4", "stage_one.train_on_inputs=true"])
    assert cfg.ignored == ("stage_one.lora_r",)


@pytest.mark.parametrize("written", ["stage_one=one.yaml", f"stage_one={'a' * 300}.yaml"])
def test_a_file_is_an_error_that_says_what_to_write(file: Path, written: str) -> None:
    (problem,) = problems(file, written)
    assert problem.startswith(f"override '{written}': stage_one: a second file is no longer read;")
    assert "write the keys in which stage one differs from the run" in problem


@pytest.mark.parametrize("written", ["stage_one.config=one.yaml", "stage_one={config: one.yaml}"])
def test_the_key_of_a_second_file_is_reported_where_it_was_set(file: Path, written: str) -> None:
    (problem,) = problems(file, written)
    assert problem.startswith(
        f"override '{written}': stage_one: config: a second file is no longer"
    )
    assert "write the keys in which stage one differs from the run" in problem


def test_a_finished_stage_one_replaces_it(file: Path) -> None:
    cfg = load_config(TrainConfig, file, ["lora_model_dir=runs/m1"])
    assert cfg.ignored == ("stage_one",)
    assert stage_one_config(cfg) is None
    assert stage_one_config(load_config(TrainConfig, file, ["stage_one="])) is None


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["stage_one={}"],
        ["stage_one.max_steps=3", "stage_one.deepspeed=", "output_dir=runs/x"],
        ["max_steps=5", "stage_one.max_steps=", "stage_one.num_epochs=0.5"],
        ["max_steps=5", "stage_one.max_steps=5"],
        ["test_datasets=t.jsonl", "stage_one.warmup_steps=5"],
        ["medusa_lr_multiplier=2", "stage_one.medusa_lr_multiplier=1"],
        ["stage_one.datasets=other.jsonl", "stage_one.chat_template=zephyr"],
    ],
    ids=" ".join,
)
def test_the_written_configuration_gives_the_same_stages(file: Path, overrides: list[str]) -> None:
    cfg, first = load_config(TrainConfig, file, overrides), load(file, *overrides)
    write_config(cfg, file.parent)
    file.unlink()
    saved = file.with_name("config.yaml")
    assert load(saved).model_dump() == first.model_dump()


def test_a_runs_own_file_neither_allows_code_in_stage_one_nor_fails_by_its_old_keys(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(REMOVED_KEYS, "old", "was removed")
    file.with_name("metrics.jsonl").touch()
    run = file.with_name("config.yaml")
    run.write_text(
        TEXT.replace("  num_epochs", "  trust_remote_code: true\n  old: 1\n  num_epochs")
    )
    cfg = load_config(TrainConfig, run)
    assert cfg.ignored == ("stage_one.old", "stage_one.trust_remote_code")
    assert not load(run).trust_remote_code
    assert load(run, "stage_one.trust_remote_code=true").trust_remote_code


def test_later_keys_still_reach_stage_one_of_a_written_configuration(file: Path) -> None:
    write_config(load_config(TrainConfig, file), file.parent)
    saved = file.with_name("config.yaml")
    first = load(saved, "datasets=[{path: three.jsonl}]", "seed=3")
    assert (first.datasets[0].path, first.seed) == ("three.jsonl", 3)


def test_it_is_printed_in_comments(file: Path) -> None:
    text = CliRunner().invoke(app, [str(file), "--print-config", "stage_one.max_steps=3"]).stdout
    rows = [line.split() for line in text.split("# stage one:\n")[1].splitlines()]
    assert [
        "#",
        "max_steps:",
        "3",
        "#",
        "override",
        "'stage_one.max_steps=3':",
        "stage_one",
    ] in rows
    assert ["#", "base_model:", "model", "#", f"{file}:1"] in rows
    assert ["#", "recipe:", "medusa1", "#", f"{file}:3:", "stage_one"] in rows


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


@pytest.mark.parametrize(
    ("name", "file_of_heads"),
    [
        ("tiny_m2", "tiny_m1"),
        ("tiny_m2_qlora", "tiny_m1"),
        ("smollm2_m2", "smollm2_m1"),
        ("smollm2_m2_qlora", "smollm2_m1"),
        ("qwen25_coder_05b_m2_qlora", "qwen25_coder_05b_m1"),
        ("llama31_8b_m2", "llama31_8b_m1"),
        ("vicuna7b_m2", "vicuna7b_m1"),
        ("vicuna13b_m2", "vicuna7b_m1"),
    ],
)
def test_shipped_first_stages_train_as_the_configurations_of_heads_alone(
    name: str, file_of_heads: str
) -> None:
    first = load(PROJECT_ROOT / f"configs/{name}.yaml")
    alone = load_config(TrainConfig, PROJECT_ROOT / f"configs/{file_of_heads}.yaml")
    of_the_run = {"output_dir", "calibration_tokens", "wandb_name", "save_total_limit"}
    if name == "vicuna13b_m2":
        of_the_run.add("base_model")
    compared = set(TrainConfig.model_fields) - of_the_run - set(first.ineffective_keys())
    different = {key for key in compared if getattr(first, key) != getattr(alone, key)}
    assert different == set()
