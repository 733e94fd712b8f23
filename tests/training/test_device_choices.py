"""What `auto` means on a device: fixed rules, which a resumed run does not decide again."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from medusa_train.models import precision
from medusa_train.models.compiled import CompiledLayers
from medusa_train.models.precision import WeightMemory
from medusa_train.training import device_choices
from medusa_train.training.device_choices import (
    DeviceChoices,
    choose_for_device,
    precision_of_run,
)
from tests.training.conftest import LORA, figures, train

CPU, GPU = torch.device("cpu"), torch.device("cuda")
GIB = 2**30


def choose(cfg: Any, device: torch.device = GPU, needed: int = 0, **before: bool) -> DeviceChoices:
    return choose_for_device(cfg, device, lambda: needed, before)


@pytest.fixture
def gpu_of_80_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        device_choices, "gpu_bytes", lambda device: 80 * GIB if device.type == "cuda" else 0
    )
    monkeypatch.setattr(device_choices, "has_compiler", lambda device: True)


@pytest.mark.usefixtures("gpu_of_80_gib")
@pytest.mark.parametrize(
    ("gain", "device", "keys", "compiled"),
    [
        (None, GPU, {}, False),  # not measured
        (1.2, GPU, {}, True),
        (1.05, GPU, {}, True),
        (1.04, GPU, {}, False),
        (1.2, CPU, {}, False),
        (1.2, GPU, {"load_in_4bit": True}, False),
        (1.2, GPU, {"deepspeed": {"zero_optimization": {"stage": 3}}}, False),
        (1.2, GPU, LORA, False),
        (1.2, GPU, {"torch_compile": False}, False),
        (None, CPU, {"torch_compile": True}, True),
    ],
)
def test_layers_are_compiled_where_a_measured_gain_says_so(
    gain: float | None,
    device: torch.device,
    keys: dict[str, Any],
    compiled: bool,
    make_config: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_choices, "COMPILED_GAIN", gain)
    assert choose(make_config(**keys), device).torch_compile is compiled


@pytest.mark.usefixtures("gpu_of_80_gib")
@pytest.mark.parametrize(("gib", "recomputed"), [(10, False), (72, False), (73, True), (90, True)])
def test_activations_are_recomputed_where_they_do_not_fit(
    gib: int, recomputed: bool, make_config: Any
) -> None:
    cfg = make_config(**LORA, gradient_checkpointing="auto")
    choices = choose(cfg, needed=gib * GIB)
    assert choices.gradient_checkpointing is recomputed
    assert choices.notes == (
        f"gradient_checkpointing: auto: {str(recomputed).lower()}, without it about {gib}.0 GiB are"
        " needed, and the GPU has 80.0 GiB",
    )
    assert choices.apply(cfg).gradient_checkpointing is recomputed


@pytest.mark.usefixtures("gpu_of_80_gib")
def test_what_is_said_needs_no_rule(make_config: Any) -> None:
    for value in (True, False):
        choices = choose(make_config(**LORA, gradient_checkpointing=value), needed=500 * GIB)
        assert choices == DeviceChoices(False, value)
    assert choose(make_config(**LORA, gradient_checkpointing="auto"), CPU) == DeviceChoices(
        False, False
    )


@pytest.mark.usefixtures("gpu_of_80_gib")
def test_a_resumed_run_keeps_what_was_decided(make_config: Any) -> None:
    cfg = make_config(**LORA, gradient_checkpointing="auto")
    choices = choose(cfg, needed=500 * GIB, gradient_checkpointing=False, torch_compile=False)
    assert choices == DeviceChoices(False, False)
    assert choose(make_config(), torch_compile=True).torch_compile is True
    assert choose(make_config(torch_compile=False), torch_compile=True).torch_compile is False


@pytest.mark.parametrize(
    ("keys", "dtypes_that_fit", "dtype", "notes"),
    [
        ({"bf16": "auto"}, {"float32", "bfloat16"}, torch.float32, 0),
        ({"bf16": "auto"}, {"bfloat16"}, torch.bfloat16, 1),
        ({"bf16": True}, {"float32", "bfloat16"}, torch.bfloat16, 0),
        ({"bf16": False}, {"bfloat16"}, torch.float32, 0),
    ],
)
def test_bf16_auto_is_float32_on_a_cpu_that_emulates_bfloat16_if_the_weights_fit(
    keys: dict[str, Any],
    dtypes_that_fit: set[str],
    dtype: torch.dtype,
    notes: int,
    make_config: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(precision, "has_fast_bf16", lambda device: False)
    monkeypatch.setattr(WeightMemory, "fit", lambda self, dtype: dtype in dtypes_that_fit)
    lines: list[str] = []
    assert precision_of_run(make_config(**keys), CPU, lines.append).dtype == dtype
    assert len(lines) == notes


def compile_from_now_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the rule choose compilation on a CPU."""
    monkeypatch.setattr(device_choices, "_compiles", lambda cfg, device: True)


@pytest.mark.usefixtures("traced_layers")
def test_a_run_that_a_later_version_resumes_is_exact(
    make_config: Any, console: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its default changes between the stop and the resume, in both directions."""
    entered: list[bool] = []
    active = CompiledLayers.active
    monkeypatch.setattr(CompiledLayers, "active", lambda self: entered.append(True) or active(self))
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    keys = {"save_steps": 2, "max_steps": 4, "lr_scheduler": "constant"}
    # 1. not compiled, and then the default becomes to compile
    assert train(make_config(**keys, output_dir=str(whole)), console) == 0
    assert train(make_config(**{**keys, "max_steps": 2}, output_dir=str(stopped)), console) == 0
    config = yaml.safe_load((stopped / "config.yaml").read_text())
    assert config["torch_compile"] is False
    with monkeypatch.context() as patch:
        compile_from_now_on(patch)
        again = make_config(**keys, output_dir=str(stopped), resume_from_checkpoint="auto")
        assert again.torch_compile == "auto"
        assert train(again, console) == 0
    assert not entered
    assert figures(stopped)[-1] == figures(whole)[-1]
    assert "up to the checkpoint" not in console.file.getvalue()
    # 2. compiled, and then no longer the default
    other = str(tmp_path / "other")
    with monkeypatch.context() as patch:
        compile_from_now_on(patch)
        assert train(make_config(**{**keys, "max_steps": 2}, output_dir=other), console) == 0
    entered.clear()
    more = {**keys, "output_dir": other, "resume_from_checkpoint": "auto"}
    assert train(make_config(**more), console) == 0
    assert entered
    # 3. what is asked for is done, and named
    entered.clear()
    assert train(make_config(**{**more, "max_steps": 6}, torch_compile=False), console) == 0
    assert not entered
    assert (
        "note: torch_compile: was true up to the checkpoint, now false: losses may differ by"
        in console.file.getvalue()
    )


def test_a_run_without_a_note_of_it_decides_anew(make_config: Any, console: Any) -> None:
    """config.yaml is gone."""
    cfg = make_config(save_steps=2, max_steps=2)
    assert train(cfg, console) == 0
    (cfg.run_dir / "config.yaml").unlink()
    assert train(make_config(max_steps=4, resume_from_checkpoint="auto"), console) == 0
    assert yaml.safe_load((cfg.run_dir / "config.yaml").read_text())["torch_compile"] is False


def test_auto_recomputes_on_a_small_gpu(
    make_config: Any, console: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of a run of this size is estimated, and what came of it stands in config.yaml."""
    monkeypatch.setattr(device_choices, "gpu_bytes", lambda device: 1)
    cfg = make_config(**LORA, gradient_checkpointing="auto", max_steps=1)
    assert train(cfg, console) == 0
    assert "gradient_checkpointing: auto: true, without it about " in console.file.getvalue()
    written = yaml.safe_load((cfg.run_dir / "config.yaml").read_text())
    assert written["gradient_checkpointing"] is True
