"""The commands that README takes one after the other."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from medusa_train.checkpoint.next_command import (
    after_evaluation,
    after_export,
    after_serving,
    after_training,
)
from medusa_train.checkpoint.resolve import DSPARK, ModelPaths, resolve_model
from medusa_train.config.paths import PROJECT_ROOT


def make_run(run: Path, draft: str, base_model: str = "org/model") -> ModelPaths:
    heads = run / "heads"
    heads.mkdir(parents=True)
    (run / "config.yaml").write_text(f"base_model: {base_model}\n")
    if draft == "medusa":
        (heads / "medusa_lm_head.safetensors").touch()
    else:
        (heads / "draft.safetensors").touch()
        (heads / "config.json").write_text(json.dumps({"draft": draft}))
    return resolve_model(str(run), None, None)


def make_export(run: Path, architecture: str) -> None:
    directory = run / "export" / "vllm"
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({"architectures": [architecture]}))


def test_a_run_is_measured_on_sixteen_questions() -> None:
    assert after_training("org/model", Path("my run")) == (
        "medusa-eval --bench mtbench --limit 16 --model 'my run'"
    )


def test_a_run_of_the_embedded_model_is_measured_on_its_own_bench() -> None:
    command = after_training(str(PROJECT_ROOT / "data" / "tiny"), Path("run"))
    assert command == "medusa-eval --bench tiny --limit 16 --model run"


def test_a_run_without_a_tree_gets_one_first() -> None:
    command = after_training("org/model", Path("run"), lacks_tree=True)
    assert command == "medusa-eval --calibrate --model run"


@pytest.mark.parametrize(
    ("draft", "command"),
    [
        ("eagle3", "medusa-export {run} --to vllm"),
        ("medusa", "medusa-export {run} --to transformers"),
        ("hydra", None),
        ("kangaroo", None),
    ],
)
def test_a_measured_draft_is_exported_for_what_runs_it(
    tmp_path: Path, draft: str, command: str | None
) -> None:
    run = tmp_path / "run"
    expected = None if command is None else command.format(run=run)
    assert after_evaluation(make_run(run, draft)) == expected


def test_a_target_model_that_was_trained_is_merged_first(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "adapter").mkdir(parents=True)
    (run / "adapter" / "adapter_config.json").write_text("{}")
    assert after_evaluation(make_run(run, "medusa")) == (
        f"medusa-export {run} --to merged && medusa-export {run} --to transformers"
    )


def test_the_demo_is_followed_by_a_real_model(tmp_path: Path) -> None:
    paths = make_run(tmp_path / "run", "medusa", str(PROJECT_ROOT / "data" / "tiny"))
    assert after_evaluation(paths) == "make qwen"


def test_a_target_model_alone_has_nothing_to_export() -> None:
    assert after_evaluation(resolve_model(None, "org/model", None)) is None


def test_an_export_for_vllm_is_measured_there(tmp_path: Path) -> None:
    run = tmp_path / "run"
    paths = make_run(run, "eagle3")
    assert after_export(paths, "vllm") == (
        f"medusa-eval --serve --bench mtbench --limit 16 --model {run} 'concurrency=[1, 8]'"
        " 'serve_speculative_tokens=[2, 4]'"
    )
    assert after_export(paths, "sglang") is None


@pytest.mark.parametrize(("use", "exported"), [(True, True), (True, False), (False, True)])
def test_a_draft_that_was_measured_to_win_is_served(
    tmp_path: Path, use: bool, exported: bool
) -> None:
    run = tmp_path / "run"
    paths = make_run(run, "eagle3")
    if exported:
        make_export(run, "LlamaForCausalLMEagle3")
    lost = {"use": False, "num_speculative_tokens": 4}
    # of eight concurrent requests and of sixteen; the least load counts
    won = [{"use": use, "num_speculative_tokens": count} for count in (2, 1)]
    report = {"recommendation": [lost, *won]}
    command = after_serving(paths, report)
    assert (command is not None) == (use and exported)
    if command is not None:
        *words, draft = shlex.split(command)
        assert words == ["vllm", "serve", "org/model", "--speculative-config"]
        export = str(run / "export" / "vllm")
        expected = {"method": "eagle3", "model": export, "num_speculative_tokens": 2}
        assert json.loads(draft) == expected


def test_a_block_draft_with_a_markov_bias_is_served_by_its_own_method(tmp_path: Path) -> None:
    paths = make_run(tmp_path / "run", "dflash")
    make_export(paths.home, DSPARK)
    command = after_serving(paths, {"recommendation": [{"use": True, "num_speculative_tokens": 3}]})
    assert command is not None
    assert json.loads(shlex.split(command)[-1])["method"] == "dspark"


@pytest.mark.parametrize("is_merged", [True, False])
def test_the_target_model_of_a_lora_run_is_merged_before_it_is_served(
    tmp_path: Path, is_merged: bool
) -> None:
    paths = make_run(tmp_path / "run", "medusa")
    paths = replace(paths, adapter=paths.home / "adapter")
    make_export(paths.home, "MedusaModel")
    merged = paths.home / "export" / "merged"
    if is_merged:
        merged.mkdir()
    command = after_serving(paths, {"recommendation": [{"use": True, "num_speculative_tokens": 3}]})
    assert command is not None
    serve = f"vllm serve {merged} --speculative-config"
    expected = serve if is_merged else f"medusa-export {paths.home} --to merged && {serve}"
    assert command.startswith(f"{expected} ")


def test_a_model_with_code_of_its_own_is_allowed_in_every_command(tmp_path: Path) -> None:
    paths = make_run(tmp_path / "run", "eagle3")
    paths = replace(paths, trust_remote_code=True, adapter=paths.home / "adapter")
    make_export(paths.home, "LlamaForCausalLMEagle3")
    served = {"recommendation": [{"use": True, "num_speculative_tokens": 3}]}
    for command in (
        after_training("org/model", paths.home, trust_remote_code=True),
        after_evaluation(paths),
        after_export(paths, "vllm"),
        after_serving(paths, served),
    ):
        assert command is not None
        for one in command.split(" && "):
            assert one.split()[-1] in ("trust_remote_code=true", "--trust-remote-code")
