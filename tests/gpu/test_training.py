"""Training steps on a GPU: they learn, take the memory that `--inspect` predicts, and use what was
asked for.

A machine without a GPU runs the same steps on a small model, where it can.
"""

import gc
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_train.config.paths import PROJECT_ROOT
from medusa_train.models.document_attention import (
    document_attention_forward,
    document_bounds,
)
from medusa_train.models.precision import emulates
from tests.gpu.steps import STEPS, WORDS_PER_ROW, Measured, measure, write_chats, write_model
from tests.training.conftest import metrics

LORA = {
    "recipe": "medusa2",
    "adapter": "lora",
    "lora_target_linear": True,
    "lora_r": 16,
    "lora_dropout": 0.0,
}
QLORA = {**LORA, "adapter": "qlora", "load_in_4bit": True}
PACKED = {"sample_packing": True, "sequence_len": 1024}
#: What is trained, on both devices.
CASES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "nf4": {"load_in_4bit": True},
    "packed": PACKED,
    "lora": LORA,
    "lora-recomputed": {**LORA, "gradient_checkpointing": True},
    "qlora-distilled": {**QLORA, "medusa_self_distillation": True, "gradient_checkpointing": True},
    "last-layer": {"recipe": "medusa2", "medusa_num_unfreeze_layers": 1},
}
#: What a CPU does in another way: 8-bit optimizers become AdamW there, float16 float32.
GPU_CASES: dict[str, dict[str, Any]] = {
    "adam-8bit": {"optimizer": "adamw_bnb_8bit"},
    "qlora-adam-8bit": {**QLORA, "optimizer": "adamw_bnb_8bit", "gradient_checkpointing": True},
    "fp16": {"bf16": False, "fp16": True},
}
TOLERANCE = 0.2  # of memory

MakeKeys = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def make_keys(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> MakeKeys:
    """Build the keys of a run in a directory of its own."""
    home = tmp_path_factory.mktemp(device.type)
    model, chats = (
        write_model(home / "model", device),
        write_chats(home / "chats.jsonl", WORDS_PER_ROW[device.type]),
    )

    def make(**keys: Any) -> dict[str, Any]:
        return {
            "base_model": str(model),
            "datasets": [{"path": str(chats), "type": "sharegpt"}],
            "output_dir": str(tmp_path_factory.mktemp("run")),
            "overwrite_output_dir": True,
            "medusa_num_heads": 3,
            "sequence_len": 4096,
            "micro_batch_size": 2,
            "max_steps": STEPS,
            "learning_rate": 1e-3,
            "medusa_lr_multiplier": 1.0,
            "warmup_steps": 0,
            "logging_steps": 1,
            "val_set_size": 0,
            "calibration_tokens": 0,
            "optimizer": "adamw_torch",
            # products of 1,772 x 128 x 2,048 would take seconds each where it is emulated
            "bf16": not emulates(device, torch.bfloat16),
            **keys,
        }

    return make


def check(measured: Measured) -> None:
    assert len(measured.losses) == STEPS
    assert all(math.isfinite(loss) for loss in measured.losses)
    assert measured.losses[-1] < measured.losses[0]
    assert measured.peak == pytest.approx(measured.estimate, rel=TOLERANCE)


@pytest.mark.parametrize("case", CASES)
def test_steps_learn_in_the_memory_that_is_predicted(case: str, make_keys: MakeKeys) -> None:
    check(measure(make_keys(**CASES[case])))


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES)
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_steps_with_what_only_a_gpu_has(case: str, make_keys: MakeKeys) -> None:
    measured = measure(make_keys(**GPU_CASES[case]))
    check(measured)
    strategy: Any = measured.trainer.strategy
    if "optimizer" in GPU_CASES[case]:
        assert type(strategy.optimizer).__module__.startswith("bitsandbytes")
        kinds = {
            value.dtype
            for state in strategy.optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        }
        assert torch.uint8 in kinds
    else:
        assert measured.trainer.recipe.precision.dtype == torch.float16
        assert strategy.loss_scale.value > 1


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_recomputed_activations_give_the_same_losses_in_less_memory(make_keys: MakeKeys) -> None:
    found = []
    for case in ("lora", "lora-recomputed"):
        measured = measure(make_keys(**CASES[case]))
        found.append((measured.losses, measured.peak))
        del measured  # its trainer's memory would count as the next one's
        gc.collect()
    (kept, most), (recomputed, least) = found
    assert recomputed == pytest.approx(kept, rel=2e-3)
    assert least < 0.9 * most


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["bf16", "nf4", "packed"])
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_compiled_layers_give_the_same_losses(case: str, make_keys: MakeKeys) -> None:
    plain, compiled = (
        measure(make_keys(**CASES[case], torch_compile=compiled)) for compiled in (False, True)
    )
    assert compiled.trainer.recipe.compiled is not None
    assert compiled.losses == pytest.approx(plain.losses, rel=5e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_zero_in_one_process_trains_as_without_it(stage: int, make_keys: MakeKeys) -> None:
    """`medusa-train` in a process of its own, for DeepSpeed keeps a process group open."""
    plain, partitioned = (
        run_command(make_keys(**keys))
        for keys in (
            {},
            {"deepspeed": str(PROJECT_ROOT / "configs" / "deepspeed" / f"zero{stage}.json")},
        )
    )
    assert len(plain) == STEPS
    assert partitioned == pytest.approx(plain, rel=5e-3)


def run_command(keys: dict[str, Any]) -> list[float]:
    """Run `medusa-train` and return the losses of its steps."""
    words = [f"{key}={json.dumps(value)}" for key, value in keys.items()]
    command = [sys.executable, "-m", "medusa_train.cli.train", *words]
    done = subprocess.run(command, cwd=PROJECT_ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [
        record["loss"] for record in metrics(Path(keys["output_dir"])) if record["kind"] == "train"
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("groups", [1, 4])
def test_documents_in_bfloat16_equal_those_in_float32(
    cuda: torch.device, groups: int, window: int | None
) -> None:
    """Values and gradients."""
    torch.manual_seed(0)
    lengths = (300, 1, 211, 512)
    segments = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None].to(
        cuda
    )
    shapes = [(1, heads, sum(lengths), 64) for heads in (8, 8 // groups, 8 // groups)]
    inputs = [torch.randn(shape, device=cuda) for shape in shapes]
    outputs = []
    for dtype in (torch.float32, torch.bfloat16):
        states = [tensor.to(dtype).requires_grad_() for tensor in inputs]
        out, _ = document_attention_forward(
            torch.nn.Module(),
            *states,
            None,
            sliding_window=window,
            scaling=0.125,
            **document_bounds(segments),
        )
        out.square().sum().backward()
        outputs.append([out.detach(), *(tensor.grad for tensor in states)])
    for exact, rounded in zip(*outputs, strict=True):
        assert (rounded.float() - exact).norm() < 0.02 * exact.norm()
