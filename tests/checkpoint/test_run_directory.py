"""The run directory: where one may be, and what a failed write leaves of it. (Whole runs:
test_run.py.)
"""

import os
from pathlib import Path

import pytest

from medusa_train.checkpoint.run_directory import (
    RUN_FILES,
    check_output_dir,
    prepare_output_dir,
    write_config,
)
from medusa_train.config.load import load_config
from medusa_train.config.schema import TrainConfig
from medusa_train.errors import CheckpointError, ConfigError
from tests.full_disk import full_disk


def config(out: Path, **keys: object) -> TrainConfig:
    return TrainConfig(
        **{"base_model": "m", "datasets": [{"path": "d.jsonl"}], "output_dir": str(out), **keys}
    )


def test_a_file_in_the_way_is_named_before_anything_loads(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(ConfigError, match=f"output_dir: {tmp_path / 'runs'} is a file"):
        check_output_dir(config(tmp_path / "runs" / "mine" / "first"))


def test_a_directory_without_permission_is_named_before_anything_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []
    # root may write anywhere
    monkeypatch.setattr(os, "access", lambda path, mode: asked.append(path))
    with pytest.raises(ConfigError, match=f"output_dir: {tmp_path} cannot be written to"):
        check_output_dir(config(tmp_path / "runs" / "mine"))
    assert asked == [tmp_path]  # the nearest one that is there


def test_resuming_without_a_checkpoint_and_overwriting_delete_no_results(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    with pytest.raises(CheckpointError, match=r"no checkpoint to resume from: .* holds eval/"):
        check_output_dir(config(tmp_path, resume_from_checkpoint="auto"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"that no run wrote, .*: model/config.json; move them"):
        check_output_dir(config(tmp_path, overwrite_output_dir=True))
    write_config(config(tmp_path), tmp_path)  # which a run that was killed at once leaves
    check_output_dir(config(tmp_path, overwrite_output_dir=True))
    with pytest.raises(ConfigError, match="would delete the target model, base_model"):
        check_output_dir(
            config(tmp_path, base_model=str(tmp_path / "model"), overwrite_output_dir=True)
        )
    with pytest.raises(ConfigError, match="would delete the heads of lora_model_dir"):
        check_output_dir(config(tmp_path, overwrite_output_dir=True, lora_model_dir=str(tmp_path)))


OTHERS = {
    "another program's run": {
        "config.yaml": "defaults: [model]\n",
        "checkpoints/step-100/model.safetensors": "weights",
        "model/config.json": "{}",
        "wandb/run-1/logs": "x",
    },
    "without a configuration": {"tree.json": "{}", "wandb/run-1/logs": "x"},
    "metrics of others": {"metrics.jsonl": '{"loss": 1.0}\n', "heads/config.json": "{}"},
    "the user's configuration": {"config.yaml": "base_model: m  # mine\ndatasets: d.jsonl\n"},
    "no JSON": {"metrics.jsonl": "step,loss\n1,2\n", "tree.json": "[1"},
}


def put(out: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text)


@pytest.mark.parametrize("files", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize(
    "keys",
    [{}, {"overwrite_output_dir": True}, {"resume_from_checkpoint": "auto"}],
    ids=["new", "overwriting", "resuming"],
)
def test_files_of_others_are_listed_and_stay(
    tmp_path: Path, files: dict[str, str], keys: dict[str, object]
) -> None:
    put(tmp_path, files)
    with pytest.raises(ConfigError, match="files that no run wrote") as caught:
        check_output_dir(config(tmp_path, **keys))
    at_top = {name for name in files if "/" not in name}
    named = at_top if "resume_from_checkpoint" in keys else set(files)
    assert all(name in str(caught.value) for name in named)
    with pytest.raises(ConfigError, match="files that no run wrote"):
        prepare_output_dir(tmp_path, 0)
    assert {name: (tmp_path / name).read_text() for name in files} == files


#: What a run writes, at least in part.
OURS = {
    "metrics.jsonl": '{"kind": "train", "step": 10, "loss": 2.0, "time": 1.5}\n',
    "heads/config.json": "{}",
    "heads/medusa_lm_head.safetensors": "x",
    "adapter/adapter_model.safetensors": "x",
    "model/model-00001-of-00002.safetensors": "x",
    "model/tokenizer.json": "{}",
    "tree.json": "{}",
    "checkpoints/step-4/manifest.json": '{"format": 1, "step": 4, "files": {}, "crc32": 0}',
    "checkpoints/step-4/draft.safetensors": "x",
    "checkpoints/.tmp-step-8/draft.safetensors": "x",
    "eval/tiny/report.html": "x",
    "eval/tiny/model_judgment/gpt_single.jsonl": "x",
    "eval/tiny/model_answer/medusa.jsonl": "x",
    "export/vllm/README.md": "x",
    "tensorboard/events.out.tfevents.1.host": "x",
    "wandb/run-1/files/output.log": "x",
    "wandb/run_id.txt": "x",
}


def test_a_run_is_overwritten_and_nothing_of_it_stays(tmp_path: Path) -> None:
    put(tmp_path, OURS)
    put(tmp_path / "stage_one", OURS)
    put(tmp_path, {"notes.txt": "mine", "data/a.jsonl": "mine"})
    write_config(config(tmp_path), tmp_path)
    check_output_dir(config(tmp_path, overwrite_output_dir=True))
    prepare_output_dir(tmp_path, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "notes.txt"]


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints/step-4/manifest.json"])
def test_a_run_without_its_configuration_is_one(tmp_path: Path, name: str) -> None:
    put(tmp_path, {name: OURS[name]})
    check_output_dir(config(tmp_path, overwrite_output_dir=True))


@pytest.mark.parametrize(
    "name",
    [
        "heads/notes.txt",
        "heads/mine.safetensors",
        "checkpoints/notes.md",
        "checkpoints/step-4/notes.md",
        "checkpoints/mine/model.safetensors",
        "model/train.py",
        "eval/tiny/mine.ipynb",
        "export/vllm/deploy.sh",
        "wandb/sweep.yaml",
        "tensorboard/mine.csv",
        "stage_one/heads/notes.txt",
        "stage_one/config.yaml",
    ],
)
def test_files_of_the_user_within_a_run_are_listed_before_it_is_overwritten(
    tmp_path: Path, name: str
) -> None:
    put(tmp_path, OURS)
    put(tmp_path / "stage_one", OURS)
    put(tmp_path, {name: "mine"})
    with pytest.raises(ConfigError, match=f"replace or delete them: {name}; move them"):
        check_output_dir(config(tmp_path, overwrite_output_dir=True))
    with pytest.raises(ConfigError, match=name):
        prepare_output_dir(tmp_path, 0)
    assert (tmp_path / name).read_text() == "mine"


def test_a_configuration_of_a_run_that_was_edited_is_not_replaced(tmp_path: Path) -> None:
    put(tmp_path, OURS)
    write_config(config(tmp_path), tmp_path)
    edited = (tmp_path / "config.yaml").read_text() + "# mine\n"
    (tmp_path / "config.yaml").write_text(edited)
    for keys in ({"overwrite_output_dir": True}, {"resume_from_checkpoint": "auto"}):
        with pytest.raises(ConfigError, match=r"config\.yaml; move them"):
            check_output_dir(config(tmp_path, **keys))


def test_a_name_that_no_directory_can_have_is_a_message(tmp_path: Path) -> None:
    """A file system may take shorter names than 255 bytes."""
    long = str(tmp_path / ("a" * 300))
    cfg = config(tmp_path).model_copy(update={"output_dir": long})
    check_output_dir(cfg)
    with pytest.raises(CheckpointError, match="File name too long"):
        prepare_output_dir(cfg.run_dir, 0)
    with pytest.raises(ConfigError, match="home of ~nosuchuser"):
        check_output_dir(config(Path("~nosuchuser/x")))


def test_a_failed_write_of_the_config_leaves_the_earlier_one(tmp_path: Path) -> None:
    write_config(config(tmp_path, seed=7), tmp_path)
    with (
        full_disk(100),
        pytest.raises(
            CheckpointError, match=r"could not write run files .*: File too large .* free"
        ),
    ):
        write_config(config(tmp_path, seed=8), tmp_path)
    assert load_config(TrainConfig, tmp_path / "config.yaml", []).seed == 7
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_local_paths_are_written_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "d.jsonl").write_text("")
    (tmp_path / "zero.json").write_text("{}")
    (tmp_path / "mine.jinja").write_text("")
    monkeypatch.chdir(tmp_path)
    first = {"path": "d.jsonl", "conversation": "mine.jinja"}
    keys = {
        "datasets": [first, {"path": "some/hub-name", "conversation": "zephyr"}],
        "deepspeed": "zero.json",
    }
    keys["chat_template"] = "mine.jinja"
    keys["test_datasets"] = [first]
    write_config(TrainConfig(base_model="m", output_dir=str(tmp_path), **keys), tmp_path)
    monkeypatch.chdir("/")
    saved = load_config(TrainConfig, tmp_path / "config.yaml", [])
    assert [source.path for source in saved.datasets] == [
        str(tmp_path / "d.jsonl"),
        "some/hub-name",
    ]
    assert saved.test_datasets == saved.datasets[:1]
    assert saved.deepspeed == str(tmp_path / "zero.json")
    assert [source.conversation for source in saved.datasets] == [
        str(tmp_path / "mine.jinja"),
        "zephyr",
    ]
    assert saved.chat_template == str(tmp_path / "mine.jinja")


def test_run_files_lists_everything_that_a_run_writes(tmp_path: Path) -> None:
    """So that overwriting leaves nothing of it, and nothing else goes."""
    for name in (*RUN_FILES, "notes.txt"):
        (tmp_path / name).mkdir()
    files = {"config.yaml", "metrics.jsonl", "tree.json", "tree_traces.npz", "decoding.json"}
    results = {"heads", "adapter", "model", "checkpoints", "eval", "export", "stage_one"}
    assert set(RUN_FILES) == files | results | {"tensorboard", "wandb"}
    prepare_output_dir(tmp_path, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("filled", ["", "checkpoints", "eval"])
def test_parts_of_a_run_may_be_links_to_another_disk(tmp_path: Path, filled: str) -> None:
    run, disk = tmp_path / "run", tmp_path / "disk"
    run.mkdir()
    for name in ("checkpoints", "eval", "heads", "export"):
        (disk / name).mkdir(parents=True)
        (run / name).symlink_to(disk / name)
    if not filled:
        check_output_dir(config(run))
        check_output_dir(config(run, resume_from_checkpoint="auto"))
        prepare_output_dir(run, 0)
    elif filled == "checkpoints":
        for name in ("step-4", "best-4", ".tmp-step-8", "step-12", "others"):
            (disk / filled / name).mkdir()
            (disk / filled / name / "manifest.json").touch()
        write_config(config(run), run)
        step = str(run / "checkpoints" / "step-4")
        check_output_dir(config(run, resume_from_checkpoint=step))
        check_output_dir(config(run, resume_from_checkpoint=str(disk / filled / "step-4")))
        prepare_output_dir(run, 4)
        left = ["best-4", "others", "step-4"]
        assert sorted(path.name for path in (disk / filled).iterdir()) == left
        check_output_dir(config(run, overwrite_output_dir=True))
        prepare_output_dir(run, 0)
        assert [path.name for path in (disk / filled).iterdir()] == ["others"]
    else:
        (disk / filled / "report.json").touch()
        write_config(config(run), run)
        with pytest.raises(ConfigError, match="already holds a run"):
            check_output_dir(config(run))
        with pytest.raises(ConfigError, match="eval is a link or a mount point, whose content"):
            check_output_dir(config(run, overwrite_output_dir=True))
    assert all((run / name).is_symlink() for name in ("checkpoints", "eval", "heads", "export"))


def test_a_link_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").symlink_to(tmp_path / "disk")
    with pytest.raises(ConfigError, match=r"checkpoints links to .*disk, which does not exist"):
        check_output_dir(config(tmp_path))
