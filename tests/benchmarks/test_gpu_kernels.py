"""The check of attention with split keys as a command: in Triton's interpreter, and without it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import gpu_kernels
import pytest
from gpu_plan import ROOT


def test_without_a_gpu_it_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert gpu_kernels.main(["--out", str(tmp_path)]) == 2
    assert "TRITON_INTERPRET=1" in capsys.readouterr().err


@pytest.mark.slow  # ten seconds
def test_small_shapes_in_the_interpreter(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is for Linux alone")
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu_kernels.py", "--out", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    record = json.loads((tmp_path / "gpu_kernels.json").read_text())
    assert len(record["attention"]) == len(gpu_kernels.cpu_shapes())
    assert all(row["split_error"] < 1e-6 for row in record["attention"])


def test_a_wrong_result_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(
        gpu_kernels, "measure", lambda *given: {"split_error": float("nan"), "rows": 1}
    )
    assert gpu_kernels.main(["--out", str(tmp_path)]) == 1
