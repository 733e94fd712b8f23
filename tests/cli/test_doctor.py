"""`medusa-train --doctor`: a page on every machine, also where parts are missing or broken."""

import builtins
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from medusa_train.cli import doctor
from medusa_train.cli.train import app
from medusa_train.config.load import load_config
from medusa_train.config.schema import TrainConfig
from medusa_train.models import precision


def page(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, [*arguments, "--doctor"], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def test_this_machine_and_a_configuration() -> None:
    started = time.monotonic()
    text = page(
        "configs/tiny_m1.yaml",
        "optimizer=adamw_bnb_8bit",
        "fp16=true",
        "bf16=false",
        "sample_packing=true",
    )
    assert time.monotonic() - started < 60  # ten seconds where nothing else runs
    assert f"torch {torch.__version__}" in text
    if not torch.cuda.is_available():
        assert (
            "optimizer: adamw_bnb_8bit: optimizer: adamw_bnb_8bit is slow on CPU; using adamw_torch"
            in text
        )
        assert "fp16: true: computes in float32" in text
        assert (
            "sample_packing: true: one sdpa call per document (flash-attn needs a GPU, the device"
            " is cpu)" in text
        )
        assert "CUDA graphs: none without a GPU" in text
    assert "Traceback" not in text


def test_a_wrong_configuration_is_an_error_after_the_page() -> None:
    assert "Python: " in page("configs/tiny_m1.yaml", "optimizers=adam", code=2)


def test_a_machine_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ImportError(f"libcudart.so.13: cannot open shared object file ({name})\nmore")
        return original(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    assert "torch: failed: ImportError: libcudart.so.13" in page("configs/tiny_m1.yaml", code=1)


def test_a_faked_gpu_of_which_every_part_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is there, so each line says what failed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: False)
    monkeypatch.setattr(doctor, "SHARED_MEMORY", 1 << 62)
    monkeypatch.setenv("CXX", "no-such-compiler")
    lines = dict(doctor.machine())
    assert lines["GPU 1"].startswith("failed: ")
    assert lines["CUDA graphs"].startswith("failed: ")
    assert lines["C++ compiler"].startswith("no-such-compiler not found")
    assert "--shm-size" in lines["/dev/shm"]
    assert lines["bfloat16"] == "emulated"
    assert "\n" not in "".join(lines.values())


def test_a_driver_that_hangs_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\nexec sleep 60\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(doctor, "TIMEOUT", 0.3)
    assert doctor._ask(doctor._driver).startswith("failed: TimeoutExpired")


def test_a_dtype_that_the_device_emulates_is_called_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = load_config(TrainConfig, Path("configs/tiny_m1.yaml"), ["bf16=true"])
    monkeypatch.setattr(precision, "emulates", lambda device, dtype: dtype == torch.bfloat16)
    lines = dict(doctor.choices(cfg))
    assert lines["bf16: true"] == "computes in bfloat16, which this device emulates: slow"
