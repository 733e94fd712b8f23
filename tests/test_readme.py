"""The README is true: its keys are the schema's, its paths exist, its commands are understood."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from medusa_train.cli.common import split_arguments
from medusa_train.config.load import load_config
from medusa_train.config.paths import PROJECT_ROOT
from medusa_train.config.schema import TrainConfig
from tests.evaluation.tiny_model import write_backbone, write_run

README = (PROJECT_ROOT / "README.md").read_text(encoding="utf-8")


def _commands() -> list[list[str]]:
    """Every command in the README's bash blocks, comments and line breaks undone."""
    lines: list[str] = []
    for block in re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL):
        lines += block.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def test_every_path_that_is_named_exists() -> None:
    named = set(re.findall(r"\b(?:configs|data|tests|benchmarks|medusa_train)/[\w./-]+\.\w+\b", README))
    assert {"configs/tiny_m1.yaml", "configs/vicuna7b_m1.yaml", "data/tiny/build.py"} <= named
    assert [name for name in sorted(named) if not (PROJECT_ROOT / name).exists()] == []


def test_every_module_of_the_architecture_exists() -> None:
    tree = README.split("```\nmedusa_train/\n")[1].split("```")[0]
    for line in tree.splitlines():
        if match := re.match(r"  (\w+)/ ", line):
            folder = PROJECT_ROOT / "medusa_train" / match[1]
            assert folder.is_dir(), line
            for name in re.findall(r"\b\w+\.py\b", line):
                assert (folder / name).is_file(), f"{match[1]}/{name}"


@pytest.mark.parametrize("words", [w for w in _commands() if w[0] == "make"], ids=" ".join)
def test_make_targets_exist(words: list[str]) -> None:
    makefile = (PROJECT_ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{words[1]}:", makefile, flags=re.MULTILINE)


@pytest.mark.parametrize("words", [w for w in _commands() if w[0] == "medusa-train"], ids=" ".join)
def test_training_commands_are_valid_configurations(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT_ROOT)
    line = re.sub(r"--(num-gpus|hostfile) \S+", "", shlex.join(words[1:]))
    path, overrides = split_arguments(word for word in shlex.split(line) if not word.startswith("--"))
    assert load_config(TrainConfig, path, overrides).base_model


def test_every_command_of_the_readme_is_installed() -> None:
    pyproject = (PROJECT_ROOT / "pyproject.toml").read_text(encoding="utf-8")
    used = {words[0] for words in _commands() if words[0].startswith("medusa-")}
    assert len(used) >= 3
    assert all(f"{name} = " in pyproject for name in used)
    assert (Path(PROJECT_ROOT) / ".ci" / "run").stat().st_mode & 0o111


def test_the_demo_s_table_is_there() -> None:
    table = README.split("<!-- demo:start -->")[1].split("<!-- demo:end -->")[0]
    assert "| **overall** |" in table
    assert table.count("\n| ") == 10  # title, eight categories, overall


def test_the_python_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "runs" / "demo", write_backbone(tmp_path / "backbone"))
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert any("model.generate" in block for block in blocks)
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()
