"""The configuration that DeepSpeed's engine is given: the key `deepspeed`, read and completed.

What cannot be in the key is refused before, in `deepspeed_checks`.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from medusa_train.config.paths import resolve_path
from medusa_train.config.schema import TrainConfig
from medusa_train.errors import ConfigError, MedusaError
from medusa_train.io import parse_json

AUTO = "auto"
#: Used by several processes if `deepspeed` is not set.
DEFAULT: Mapping[str, Any] = {"zero_optimization": {"stage": 1}}
#: Top-level keys that are passed on, with the types that they may have.
PASSED_ON: Mapping[str, tuple[type, ...]] = {
    "steps_per_print": (int,),
    "wall_clock_breakdown": (bool,),
    "memory_breakdown": (bool,),
    "dump_state": (bool,),
    "disable_python_gc": (bool,),
    "log_level": (str,),
    "communication_data_type": (str,),
    "prescale_gradients": (bool,),
    "gradient_predivide_factor": (int, float),
    "flops_profiler": (dict,),
    "comms_logger": (dict,),
    "timers": (dict,),
    "data_types": (dict,),
}
OFFLOADS = ("offload_optimizer", "offload_param")


def read_deepspeed(config: str | Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the mapping in the key `deepspeed`, or read the JSON file that it names; `DEFAULT` if
    it is not set. Values are checked by `deepspeed_checks`.
    """
    if config is None:
        return DEFAULT
    if isinstance(config, str):
        path = resolve_path(config)
        if path is None or not path.is_file():
            raise ConfigError(
                f"deepspeed: {config}: no such file; configs/deepspeed/ has zero1.json to"
                " zero3.json"
            )
        config = _read(path)
    # null means the default, as in the YAML
    return {name: value for name, value in config.items() if value is not None}


def stage_of(config: Mapping[str, Any]) -> Any:
    """Return the ZeRO stage of a DeepSpeed configuration: 0 (nothing partitioned) to 3 (weights
    too).
    """
    zero = config.get("zero_optimization", {})
    if not isinstance(zero, Mapping):
        return 0
    return zero.get("stage") or 0


def batch_sizes(cfg: TrainConfig, processes: int) -> dict[str, int]:
    """Return DeepSpeed's keys of the batch."""
    return {
        "train_micro_batch_size_per_gpu": cfg.micro_batch_size,
        "gradient_accumulation_steps": cfg.gradient_accumulation_steps,
        "train_batch_size": cfg.micro_batch_size * cfg.gradient_accumulation_steps * processes,
    }


def complete_config(cfg: TrainConfig, processes: int, hidden_size: int) -> dict[str, Any]:
    """Read `deepspeed`, fill in batch sizes, clipping and buckets; every other "auto" becomes
    DeepSpeed's default.

    Compute dtype (autocast over float32 weights), optimizer and schedule are built here and not by
    DeepSpeed, which partitions them over the processes and reduces gradients in float32.

    Args:
        hidden_size: of the backbone.
    """
    config = deepcopy(dict(read_deepspeed(cfg.deepspeed)))
    # the check has seen that what is left out agrees with the keys, or is off
    filled = {
        name: value for name, value in config.items() if name in (*PASSED_ON, "zero_optimization")
    }
    filled.update(batch_sizes(cfg, processes), gradient_clipping=cfg.max_grad_norm)
    zero = filled.setdefault("zero_optimization", {})
    # DeepSpeed's default bucket of 500 million elements takes 2 GB in float32
    if zero.get("reduce_bucket_size", AUTO) == AUTO:
        zero["reduce_bucket_size"] = max(hidden_size * hidden_size, 1 << 20)
    filled["zero_allow_untested_optimizer"] = True  # the tests compare torch's with one process
    # torch's fused AdamW runs on CPUs as well, without a compiler
    filled["zero_force_ds_cpu_optimizer"] = False
    filled.setdefault("steps_per_print", 1 << 62)
    return _without_auto(filled)


def loading_config(cfg: TrainConfig, processes: int, dtype: str) -> dict[str, Any] | None:
    """Return the configuration with which ZeRO-3 partitions weights of `dtype` while they are
    loaded; None without it.

    Modules that PEFT copies are loaded whole, and the backbone with which each process computes its
    hidden states.
    """
    if processes == 1 or cfg.lora_modules_to_save or cfg.cache_hidden_states:
        return None
    config = complete_config(cfg, processes, hidden_size=1)
    if stage_of(config) != 3:
        return None
    switches = {"bfloat16": "bf16", "float16": "fp16"}
    if dtype in switches:
        config[switches[dtype]] = {"enabled": True}
    return config


def check_compiler(cuda: bool, environ: Mapping[str, str] = os.environ) -> None:
    """Check for a C++ compiler and ninja, with which DeepSpeed builds its CPU communication
    extension.
    """
    if cuda:
        return  # NCCL comes with torch, and the optimizers are torch's or bitsandbytes'
    compiler = environ.get("CXX") or "c++"
    path = search_path(environ)
    missing = []
    if shutil.which(compiler, path=path) is None:
        missing.append(f"a C++ compiler ({compiler})")
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        missing.append("Python.h (python3-dev)")
    if shutil.which("ninja", path=path) is None:
        missing.append("ninja")
    if missing:
        raise MedusaError(
            f"training with DeepSpeed on CPU needs {' and '.join(missing)}: it compiles an"
            " extension on first use. Install build-essential (or gcc-c++), and ninja with pip, or"
            " train in one process without `deepspeed`"
        )


def search_path(environ: Mapping[str, str] = os.environ) -> str:
    """Return PATH with this Python's directory first, which has ninja even if no environment is
    activated.
    """
    return os.pathsep.join([str(Path(sys.executable).parent), environ.get("PATH", "")])


def _read(path: Path) -> dict[str, Any]:
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"deepspeed: {path}: cannot read JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"deepspeed: {path}: not a JSON object")
    return value


def _without_auto(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: _without_auto(item)
            for name, item in value.items()
            if item is not None and item != AUTO
        }
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        return float(value)  # YAML reads 5e8 as text
    return value
