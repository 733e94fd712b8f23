"""`make` fetches a model once, and says that an installation goes on."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from medusa_train.config.paths import PROJECT_ROOT

#: From the oldest to the newest.
STAMPED = ("models/{model}/config.json", "pyproject.toml", "constraints.txt", ".venv/.installed")


@pytest.mark.parametrize(
    ("target", "model"),
    [
        ("smollm2-model", "smollm2-135m-instruct"),
        ("qwen-model", "qwen2.5-coder-0.5b-instruct"),
        ("qwen-model QWEN=1.5B", "qwen2.5-coder-1.5b-instruct"),
    ],
)
def test_a_newer_installation_fetches_no_model_again(
    tmp_path: Path, target: str, model: str
) -> None:
    shutil.copy(PROJECT_ROOT / "Makefile", tmp_path)
    (tmp_path / "models" / model).mkdir(parents=True)
    (tmp_path / ".venv").mkdir()
    for age, name in enumerate(STAMPED):
        path = tmp_path / name.format(model=model)
        path.touch()
        os.utime(path, (1_000_000 + age, 1_000_000 + age))
    command = ["make", "--dry-run", *target.split()]
    planned = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "convert.py" not in planned.stdout
    (tmp_path / "models" / model / "config.json").unlink()
    planned = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "convert.py" in planned.stdout


@pytest.mark.parametrize("code", [0, 1])
def test_an_installation_says_that_it_goes_on_until_it_ends(tmp_path: Path, code: int) -> None:
    shutil.copy(PROJECT_ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text("torch==1\n")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    # the first installation takes longer than a tick
    slow_once = '[ "$3" = install ] || exit 0; mkdir slept 2>/dev/null && sleep 1.5'
    python.write_text(f"#!/bin/sh\n{slow_once}\nexit {code}\n")
    python.chmod(0o755)
    done = subprocess.run(
        ["make", "install", "TICK=1"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "\ninstalling: 1 s so far\n" in done.stdout
    assert (done.returncode == 0) == (code == 0), done.stderr
    assert (tmp_path / ".venv" / ".installed").exists() == (code == 0)
