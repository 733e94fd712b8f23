"""`medusa-train --doctor`: describe this machine for a bug report, and the choices that a
configuration leads to on it. Loads no model and no data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from medusa_train.cli.common import read_arguments
from medusa_train.config.schema import TrainConfig
from medusa_train.console_streams import printed_all
from medusa_train.hide_secrets import excerpt
from medusa_train.io import installed_version

if TYPE_CHECKING:
    import torch

#: Packages that are not in torch's own report.
PACKAGES = (
    "medusa-train",
    "transformers",
    "tokenizers",
    "datasets",
    "accelerate",
    "peft",
    "bitsandbytes",
    "flash-attn",
    "ninja",
    "vllm",
)


def describe_machine(arguments: Sequence[str] | None) -> int:
    """Print torch's and DeepSpeed's reports on this machine, then the choices of the configuration
    in `arguments` if there is one. Return the exit code: 1 if torch or transformers cannot be
    imported.
    """
    print("packages:", ", ".join(f"{name} {installed_version(name)}" for name in PACKAGES))
    try:
        import transformers  # noqa: F401
        from torch.utils.collect_env import get_pretty_env_info
    except Exception as error:
        print(f"torch or transformers cannot be imported: {_first_line(error)}")
        return 1
    print(_ask(get_pretty_env_info), flush=True)
    print(_ask(_deepspeed_report), flush=True)
    if arguments:
        for line in choices(read_arguments(TrainConfig, arguments)):
            print(line)
    return printed_all()


def choices(cfg: TrainConfig) -> Iterator[str]:
    """Yield a line for each setting of a configuration that this machine can change."""
    import torch

    from medusa_train.models.compiled import has_compiler
    from medusa_train.models.loading import bitsandbytes_unsupported_reason
    from medusa_train.models.precision import choose_precision, default_device, emulates
    from medusa_train.training.optimizer import build_optimizer

    device = default_device()
    precision = choose_precision(cfg.bf16, device, fp16=cfg.fp16)
    setting = "fp16: true" if cfg.fp16 else f"bf16: {str(cfg.bf16).lower()}"
    why_slow = ""
    if emulates(device, precision.dtype):
        why_slow = ", which this device emulates: slow"
    elif cfg.fp16 and device.type == "cpu":
        why_slow = ", since a CPU is slow in float16"
    yield f"{setting}: computes in {precision}{why_slow}"
    weight = torch.nn.Parameter(torch.zeros(1, device=device))
    group = {"params": [weight], "lr": 0.0, "weight_decay": 0.0}
    notice = _ask(lambda: build_optimizer(cfg.optimizer, [group], device)[1] or "as asked")
    yield f"optimizer: {cfg.optimizer}: {notice.removeprefix(f'optimizer: {cfg.optimizer} ')}"
    for key in ("load_in_4bit", "load_in_8bit"):
        if getattr(cfg, key):
            reason = _ask(lambda: bitsandbytes_unsupported_reason(device) or "as asked")
            yield f"{key}: true: {reason}"
    if cfg.sample_packing:
        yield f"sample_packing: true: {_ask(lambda: _attention(device, precision.dtype))}"
    if cfg.torch_compile:
        needed = "as asked" if has_compiler(device) else "needs a compiler (C++ or Triton)"
        yield f"torch_compile: true: {needed}"


def _deepspeed_report() -> str:
    """Print the report of DeepSpeed's `ds_report`."""
    from deepspeed.env_report import main

    main(hide_errors_and_warnings=True)
    return ""


def _ask(question: Callable[[], str]) -> str:
    """Return the answer, or the error in one line. The report must not stop at a missing or broken
    part, because such parts are its purpose.
    """
    try:
        return question()
    except Exception as error:
        return f"failed: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {excerpt(line, 200)}"


def _attention(device: torch.device, dtype: torch.dtype) -> str:
    from transformers.utils import is_flash_attn_2_available

    from medusa_train.models.document_attention import flash_unsupported_reason

    installed = is_flash_attn_2_available()
    unsupported_reason = flash_unsupported_reason(
        device.type, dtype, capped=False, supported=True, installed=installed
    )
    if unsupported_reason is None:
        return "flash-attn's varlen kernel, if the model supports it"
    return f"one sdpa call per document ({unsupported_reason})"
