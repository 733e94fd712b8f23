"""Choose the compute dtype of a run on its device, and whether it recomputes activations. The rules
are fixed: nothing is timed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from medusa_train.config.schema import TrainConfig
from medusa_train.data.examples import EncodedDataset
from medusa_train.io import describe_size
from medusa_train.losses.chunked_logits import gpu_bytes
from medusa_train.models.loading import auto_dtype_that_fits, resolve_target_model
from medusa_train.models.precision import Precision, choose_precision
from medusa_train.training.distributed import SINGLE_PROCESS, DistributedContext
from medusa_train.training.estimate import Estimate

#: The share of a GPU's memory that the estimate of a run may reach. For large models the estimate
#: is a few percent off.
USABLE = 0.9


def precision_of_run(
    cfg: TrainConfig, device: torch.device, report: Callable[[str], None]
) -> Precision:
    """Return the compute precision of a run on `device`.

    If `bf16: auto` is slow on this device, `report` receives the reason.

    Raises:
        TargetModelError: the target model cannot be found.
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


def decide_auto(
    cfg: TrainConfig,
    train: EncodedDataset,
    report: Callable[[str], None],
    distributed: DistributedContext = SINGLE_PROCESS,
) -> tuple[TrainConfig, Precision]:
    """Replace `gradient_checkpointing: auto` by true or false; return the new configuration and the
    compute precision of the run.

    It becomes true if a joint run would not fit into the GPU's memory otherwise. The dtype is the
    same in every process, even if their devices differ in memory.
    """
    device = distributed.device
    dtype = distributed.run_on_main(lambda: precision_of_run(cfg, device, report).dtype)
    precision = Precision(device, dtype)
    if cfg.gradient_checkpointing != "auto":
        return cfg, precision
    without_checkpointing = cfg.model_copy(update={"gradient_checkpointing": False})
    memory = gpu_bytes(device)
    recomputes = False
    if cfg.recipe == "medusa2" and memory:
        _, model_config = resolve_target_model(
            cfg.base_model, trust_remote_code=cfg.trust_remote_code
        )
        needed_bytes = (
            Estimate(without_checkpointing, model_config).memory_of_run(train, precision).total
        )
        recomputes = needed_bytes > USABLE * memory
        report(
            f"gradient_checkpointing: auto: {str(recomputes).lower()}, without it about"
            f" {describe_size(needed_bytes)} are needed, and the GPU has {describe_size(memory)}"
        )
    return cfg.model_copy(update={"gradient_checkpointing": recomputes}), precision
