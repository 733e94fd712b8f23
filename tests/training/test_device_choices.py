"""What `auto` means on a device: fixed rules."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import yaml

from medusa_train.data.examples import DataReport, EncodedDataset
from medusa_train.models import precision
from medusa_train.models.precision import WeightMemory
from medusa_train.training import device_choices
from medusa_train.training.device_choices import decide_auto, precision_of_run
from medusa_train.training.distributed import DistributedContext
from medusa_train.training.estimate import Estimate, Memory
from tests.training.conftest import LORA, train

CPU, GPU = torch.device("cpu"), torch.device("cuda")
GIB = 2**30
Choose = Callable[..., tuple[bool, str | None]]


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Choose:
    """Decide for a run that needs so many bytes, on a device of 80 GiB if it is a GPU."""

    def choose(cfg: Any, device: torch.device = GPU, needed: int = 0) -> tuple[bool, str | None]:
        memory = Memory({"all": needed}, 0, 0, 0)
        monkeypatch.setattr(Estimate, "memory_of_run", lambda *arguments: memory)
        monkeypatch.setattr(DistributedContext, "device", device)
        lines: list[str] = []
        train = EncodedDataset([], DataReport(1))
        chosen, _ = decide_auto(cfg, train, lines.append)
        return chosen.gradient_checkpointing, lines[0] if lines else None

    monkeypatch.setattr(
        device_choices, "gpu_bytes", lambda device: 80 * GIB if device.type == "cuda" else 0
    )
    return choose


@pytest.mark.parametrize(("gib", "recomputed"), [(10, False), (72, False), (73, True), (90, True)])
def test_activations_are_recomputed_where_they_do_not_fit(
    gib: int, recomputed: bool, make_config: Any, choose: Choose
) -> None:
    cfg = make_config(**LORA, gradient_checkpointing="auto")
    assert choose(cfg, needed=gib * GIB) == (
        recomputed,
        f"gradient_checkpointing: auto: {str(recomputed).lower()}, without it about {gib}.0 GiB are"
        " needed, and the GPU has 80.0 GiB",
    )


def test_what_is_said_needs_no_rule(make_config: Any, choose: Choose) -> None:
    for value in (True, False):
        cfg = make_config(**LORA, gradient_checkpointing=value)
        assert choose(cfg, needed=500 * GIB) == (value, None)
    assert choose(make_config(**LORA, gradient_checkpointing="auto"), CPU) == (False, None)


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


def test_a_run_without_config_yaml_is_resumed(make_config: Any, console: Any) -> None:
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
