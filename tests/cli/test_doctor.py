"""`medusa-train --doctor`: a page on every machine, also where parts are missing or broken."""

import builtins
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
    text = page(
        "configs/tiny_m1.yaml",
        "optimizer=adamw_bnb_8bit",
        "fp16=true",
        "bf16=false",
        "sample_packing=true",
    )
    assert f"PyTorch version: {torch.__version__}" in text
    assert "DeepSpeed general environment info" in text
    if not torch.cuda.is_available():
        assert "optimizer: adamw_bnb_8bit: is slow on CPU; using adamw_torch" in text
        assert "fp16: true: computes in float32" in text
        assert (
            "sample_packing: true: one sdpa call per document (flash-attn needs a GPU, the device"
            " is cpu)" in text
        )
    assert "Traceback" not in text


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what torch and DeepSpeed report, which takes seconds."""
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", lambda: "PyTorch")
    monkeypatch.setattr(doctor, "_deepspeed_report", lambda: "DeepSpeed")


@pytest.mark.usefixtures("short")
def test_a_wrong_configuration_is_an_error_after_the_page() -> None:
    assert "PyTorch\nDeepSpeed\nerror" in page("configs/tiny_m1.yaml", "optimizers=adam", code=2)


def test_a_machine_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ImportError(f"libcudart.so.13: cannot open shared object file ({name})\nmore")
        return original(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    text = page("configs/tiny_m1.yaml", code=1)
    assert "cannot be imported: ImportError: libcudart.so.13" in text
    assert "packages: medusa-train " in text


@pytest.mark.usefixtures("short")
def test_parts_that_fail_say_so_and_the_page_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> str:
        raise OSError("no driver\nmore")

    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", fails)
    monkeypatch.setattr(doctor, "_deepspeed_report", fails)
    text = page("configs/tiny_m1.yaml")
    assert text.count("failed: OSError: no driver\n") == 2
    assert "optimizer: " in text


def test_a_dtype_that_the_device_emulates_is_called_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = load_config(TrainConfig, Path("configs/tiny_m1.yaml"), ["bf16=true"])
    monkeypatch.setattr(precision, "emulates", lambda device, dtype: dtype == torch.bfloat16)
    lines = list(doctor.choices(cfg))
    assert "bf16: true: computes in bfloat16, which this device emulates: slow" in lines
