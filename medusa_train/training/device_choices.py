"""Decide what the keys that say `auto` mean on the device of a run.

Rules are fixed: nothing is timed. A resumed run keeps what was decided before, whatever a later version
decides, so that it goes on as without an interruption.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from medusa_train.config.schema import TrainConfig
from medusa_train.data.dataset import EncodedDataset
from medusa_train.io import describe_size
from medusa_train.losses.chunked_loss import gpu_bytes
from medusa_train.models.compiled import has_compiler
from medusa_train.models.loading import auto_dtype_that_fits
from medusa_train.models.precision import Precision, choose_precision
from medusa_train.training.estimate import Estimate, device_overhead

#: Tokens/s of Medusa-1 with compiled layers over those without, on a GPU at 7B shape (step train-7b
#: of benchmarks/gpu.sh); None: not measured. A figure of `LEAST_GAIN` or more makes it the default.
COMPILED_GAIN: float | None = None
LEAST_GAIN = 1.05
#: Of a GPU's memory, what a run may take by the estimate, which is right within 10 %.
USABLE = 0.9


@dataclass(frozen=True)
class DeviceChoices:
    """What is done on this device, and a line for each `auto` that chose something."""

    torch_compile: bool
    gradient_checkpointing: bool
    notes: tuple[str, ...] = ()

    def apply(self, cfg: TrainConfig) -> TrainConfig:
        """Return the configuration with true or false in place of each `auto`."""
        return cfg.model_copy(
            update={
                "torch_compile": self.torch_compile,
                "gradient_checkpointing": self.gradient_checkpointing,
            }
        )


def choose_for_device(
    cfg: TrainConfig,
    device: torch.device,
    needed: Callable[[], int],
    before: Mapping[str, bool] | None = None,
) -> DeviceChoices:
    """Decide for a run on `device`.

    Args:
        needed: returns the bytes that the run takes without gradient checkpointing.
        before: decisions of the run that is resumed, by key.
    """
    notes = []
    before = before or {}
    # 1. The layers of a frozen backbone.
    compiled = cfg.torch_compile
    if compiled == "auto":
        compiled = before.get("torch_compile", _compiles(cfg, device))
    # 2. Activations that are kept, or computed again.
    recomputed = cfg.gradient_checkpointing
    if recomputed == "auto" and "gradient_checkpointing" in before:
        recomputed = before["gradient_checkpointing"]
    if recomputed == "auto":
        recomputed = False
        memory = gpu_bytes(device)
        if cfg.recipe == "medusa2" and memory:
            size = needed()
            recomputed = size > USABLE * memory
            notes.append(
                f"gradient_checkpointing: auto: {str(recomputed).lower()}, without it about"
                f" {describe_size(size)} are needed, and the GPU has {describe_size(memory)}"
            )
    return DeviceChoices(compiled, recomputed, tuple(notes))


def _compiles(cfg: TrainConfig, device: torch.device) -> bool:
    """Return whether the layers are compiled by default: on a GPU, once that was measured to pay."""
    is_faster = COMPILED_GAIN is not None and COMPILED_GAIN >= LEAST_GAIN
    # measured for these alone: a frozen backbone that is not quantized, without partitioned weights
    is_measured = cfg.recipe == "medusa1" and cfg.quantization is None and cfg.deepspeed is None
    return is_faster and is_measured and device.type == "cuda" and has_compiler(device)


def precision_of_run(
    cfg: TrainConfig, device: torch.device, report: Callable[[str], None]
) -> Precision:
    """Return in what a run on `device` computes; `report` receives why `bf16: auto` is slow here.

    Raises:
        BackboneError: the base model cannot be found.
    """
    bf16 = cfg.bf16
    if bf16 == "auto" and not cfg.fp16:
        dtype = auto_dtype_that_fits(
            cfg.base_model,
            report,
            float16=False,
            quantization=cfg.quantization,
            trust_remote_code=cfg.trust_remote_code,
        )
        bf16 = dtype == "bfloat16"
    return choose_precision(bf16, device, fp16=cfg.fp16)


def memory_without_checkpointing(
    cfg: TrainConfig, model_config: Any, train: EncodedDataset, precision: Precision
) -> int:
    """Estimate the bytes that a training step takes if it keeps all activations.

    Args:
        model_config: of transformers.
    """
    kept = cfg.model_copy(update={"gradient_checkpointing": False})
    device = precision.device.type
    memory = Estimate(kept, model_config).memory(
        rows=min(cfg.micro_batch_size, len(train)),
        width=train.row_len or max(map(len, train.examples)),
        dtype=precision.dtype,
        device=device,
    )
    overhead = device_overhead(device, deepspeed=cfg.deepspeed is not None)
    return memory.total + sum(overhead.values())
