"""Read the key `deepspeed`, check it against the other keys, and complete it for DeepSpeed."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from medusa_train.config.paths import resolve_path
from medusa_train.config.schema import TrainConfig
from medusa_train.errors import ConfigError, MedusaError

AUTO = "auto"
#: Used by several processes if `deepspeed` is not set.
DEFAULT: Mapping[str, Any] = {"zero_optimization": {"stage": 1}}
#: Sections set by other keys of the configuration: checked against them, then removed.
SET_BY_KEYS = ("fp16", "bf16", "optimizer", "scheduler")
#: Section, its parameter, and the key that sets it.
_PARAMETERS = (
    ("optimizer", "lr", "learning_rate"),
    ("optimizer", "weight_decay", "weight_decay"),
    ("scheduler", "warmup_max_lr", "learning_rate"),
    ("scheduler", "warmup_num_steps", "warmup_steps"),
)
_STAGES = (0, 1, 2, 3)
OFFLOADS = ("offload_optimizer", "offload_param")


def read_deepspeed(config: str | Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the mapping in the key `deepspeed`, or read the JSON file that it names; `DEFAULT` if
    it is not set.
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
    zero = config.get("zero_optimization", {})
    sections = {
        name: config[name] for name in (*SET_BY_KEYS, "zero_optimization") if name in config
    }
    if isinstance(zero, Mapping):
        sections |= {
            f"zero_optimization.{name}": zero[name]
            for name in OFFLOADS
            if zero.get(name) is not None
        }
    if wrong := [name for name, section in sections.items() if not isinstance(section, Mapping)]:
        raise ConfigError(
            [f"deepspeed: {name}: expected a mapping, got {sections[name]!r}" for name in wrong]
        )
    stage = stage_of(config)
    if stage not in _STAGES:
        raise ConfigError(f"deepspeed: zero_optimization.stage: {stage!r} is not one of 0, 1, 2, 3")
    return config


def stage_of(config: Mapping[str, Any]) -> Any:
    """Return the ZeRO stage of a DeepSpeed configuration: 0 (nothing partitioned) to 3 (weights
    too).
    """
    return config.get("zero_optimization", {}).get("stage", 0)


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
    filled = {name: value for name, value in config.items() if name not in SET_BY_KEYS}
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
    name = {"bfloat16": "bf16", "float16": "fp16"}.get(dtype)
    return {**config, **({} if name is None else {name: {"enabled": True}})}


def check_deepspeed(cfg: TrainConfig, size: int) -> Mapping[str, Any]:
    """Read `deepspeed` and check it for `size` processes, before anything is loaded."""
    config = read_deepspeed(cfg.deepspeed)
    problems = list(_contradictions(config, cfg, size))
    if stage_of(config) == 3 and cfg.quantization is not None:
        problems.append("stage 3 cannot partition a quantized backbone; use stage 2")
    if stage_of(config) == 3 and cfg.torch_compile:
        problems.append(
            "stage 3 gathers weights while layers run; use stage 2, or torch_compile: false"
        )
    for name in OFFLOADS:
        if (config.get("zero_optimization", {}).get(name) or {}).get("device") == "nvme":
            problems.append(f"zero_optimization.{name}.device: nvme is not supported; use cpu")
    if problems:
        raise ConfigError([f"deepspeed: {problem}" for problem in problems])
    return config


def _contradictions(config: Mapping[str, Any], cfg: TrainConfig, size: int) -> Iterator[str]:
    """Yield a line for every setting that differs from the run's keys; "auto" always agrees."""
    micro, accumulation = cfg.micro_batch_size, cfg.gradient_accumulation_steps
    batch = (
        f"micro_batch_size x gradient_accumulation_steps x processes are {micro} x {accumulation} x"
        f" {size}"
    )
    expected = [(name, value, batch) for name, value in batch_sizes(cfg, size).items()]
    clipping = ("gradient_clipping", cfg.max_grad_norm, f"max_grad_norm is {cfg.max_grad_norm:g}")
    for name, value, reason in (*expected, clipping):
        if (actual := config.get(name, AUTO)) not in (AUTO, value):
            yield f'{name}: {actual}, but {reason}; set it to "auto"'
    for name, parameter, key in _PARAMETERS:
        value = (config.get(name, {}).get("params") or {}).get(parameter, AUTO)
        if value not in (AUTO, getattr(cfg, key) or 0):
            yield (
                f"{name}.params.{parameter}: {value}, but {key} is {getattr(cfg, key)}; set it to"
                ' "auto"'
            )
    for name, wanted in (("fp16", cfg.fp16), ("bf16", cfg.bf16)):
        actual = config.get(name, {}).get("enabled", AUTO)
        if actual is True and (wanted is False or (name == "bf16" and cfg.fp16)):
            yield (
                f"{name}.enabled: true, but the run does not compute in {name}; set {name}: true,"
                ' or "auto" here'
            )
        if actual is False and wanted is True:
            yield f'{name}.enabled: false, but the run sets {name}: true; set it to "auto"'


def check_compiler(cuda: bool, environ: Mapping[str, str] = os.environ) -> None:
    """Check for a C++ compiler and ninja, with which DeepSpeed builds its CPU communication
    extension.
    """
    if cuda:
        return  # NCCL comes with torch, and the optimizers are torch's or bitsandbytes'
    compiler = environ.get("CXX") or "c++"
    path = search_path(environ)
    missing = [f"a C++ compiler ({compiler})"] if shutil.which(compiler, path=path) is None else []
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
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"deepspeed: {path}: cannot read JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"deepspeed: {path}: not a JSON object")
    return value


def _without_auto(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_auto(item) for name, item in value.items() if item != AUTO}
    is_number = isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value)
    return float(value) if is_number else value  # YAML reads 5e8 as text
