"""The DeepSpeed configuration of a run: what the key `deepspeed` holds, filled in from our own keys. Knows no torch."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from medusa_train.config.paths import resolve_path
from medusa_train.config.schema import TrainConfig
from medusa_train.errors import ConfigError, MedusaError

AUTO = "auto"
#: For several processes where `deepspeed` is silent.
DEFAULT: Mapping[str, Any] = {"zero_optimization": {"stage": 1}}
#: Sections that say what our keys say already; they only have to agree, see `_contradictions`.
_OURS = ("fp16", "bf16", "optimizer", "scheduler")
_STAGES = (0, 1, 2, 3)


def read_deepspeed(cfg: TrainConfig) -> dict[str, Any] | None:
    """Return the mapping that `deepspeed` holds, or the JSON file that it names; None where it is silent.

    Raises:
        ConfigError: no such file, no JSON, or a section of a kind that DeepSpeed does not know.
    """
    given = cfg.deepspeed
    if given is None:
        return None
    if isinstance(given, str):
        path = resolve_path(given)
        if path is None or not path.is_file():
            raise ConfigError(f"deepspeed: {given}: no such file; configs/deepspeed/ holds zero1.json to zero3.json")
        given = _read(path)
    stage = stage_of(given)
    if stage not in _STAGES:
        raise ConfigError(f"deepspeed: zero_optimization.stage: {stage!r} is none of 0, 1, 2 and 3")
    return given


def stage_of(config: Mapping[str, Any]) -> Any:
    """The ZeRO stage that a DeepSpeed configuration asks for: 0 (everything everywhere) to 3 (weights split too)."""
    return config.get("zero_optimization", {}).get("stage", 0)


def check_deepspeed(cfg: TrainConfig, size: int) -> None:
    """Refuse what `deepspeed` can't do for `size` processes; asked before anything is loaded.

    Raises:
        ConfigError: the file can't be used, or contradicts other keys: every problem at once.
    """
    config = read_deepspeed(cfg)
    if config is None:
        return
    problems = list(_contradictions(config, cfg, size))
    if stage_of(config) == 3 and (cfg.load_in_4bit or cfg.load_in_8bit):
        problems.append("stage 3 splits the backbone's matrices, which can't be done to quantised ones; take stage 2")
    for name in ("offload_optimizer", "offload_param"):
        if _offload(config, name) == "nvme":
            problems.append(f"zero_optimization.{name}.device: nvme is not supported, cpu is")
    if problems:
        raise ConfigError([f"deepspeed: {problem}" for problem in problems])


def complete_config(config: Mapping[str, Any], cfg: TrainConfig, size: int, hidden_size: int) -> dict[str, Any]:
    """Fill in what DeepSpeed has to know of our keys; every other "auto" becomes DeepSpeed's own default.

    The numbers' format is ours, by autocast over float32 weights, and so are optimizer and schedule: DeepSpeed splits
    them over the processes and adds up gradients, in float32.

    Args:
        config: what `read_deepspeed` gave, or `DEFAULT`; checked. size: processes. hidden_size: d of the backbone.
    """
    filled = {name: value for name, value in deepcopy(dict(config)).items() if name not in _OURS}
    filled.update(_batch(cfg, size), gradient_clipping=cfg.max_grad_norm)
    zero = filled.setdefault("zero_optimization", {})
    # DeepSpeed's own bucket of 500 million numbers is 2 GB in float32
    if zero.get("reduce_bucket_size", AUTO) == AUTO:
        zero["reduce_bucket_size"] = max(hidden_size * hidden_size, 1 << 20)
    filled["zero_allow_untested_optimizer"] = True  # torch's and ours, which the tests compare with one process
    # torch's fused AdamW runs on CPUs as well, and needs no compiler
    filled["zero_force_ds_cpu_optimizer"] = False
    filled.setdefault("steps_per_print", 1 << 62)
    return _without_auto(filled)


def check_compiler(cuda: bool, environ: Mapping[str, str] = os.environ) -> None:
    """Refuse processes that talk through the CPU where DeepSpeed can't build what it needs for that.

    Raises:
        MedusaError: there is no C++ compiler, or no ninja.
    """
    if cuda:
        return  # nccl comes with torch, and our optimizers are torch's and bitsandbytes'
    compiler = environ.get("CXX") or "c++"
    path = search_path(environ)
    missing = [f"a C++ compiler ({compiler})"] if shutil.which(compiler, path=path) is None else []
    if shutil.which("ninja", path=path) is None:
        missing.append("ninja")
    if missing:
        raise MedusaError(
            f"several processes on CPUs need {' and '.join(missing)}: DeepSpeed builds a small extension the first "
            "time it runs. Install build-essential (or gcc-c++), and ninja with pip, or train in one process"
        )


def search_path(environ: Mapping[str, str] = os.environ) -> str:
    """PATH with this Python's own directory before it, where ninja lies even if no environment is activated."""
    return os.pathsep.join([str(Path(sys.executable).parent), environ.get("PATH", "")])


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"deepspeed: {path}: can't be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"deepspeed: {path}: holds no JSON object")
    return value


def _offload(config: Mapping[str, Any], name: str) -> Any:
    return (config.get("zero_optimization", {}).get(name) or {}).get("device")


def _batch(cfg: TrainConfig, size: int) -> dict[str, int]:
    micro, accumulation = cfg.micro_batch_size, cfg.gradient_accumulation_steps
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": micro * accumulation * size,
    }


def _contradictions(config: Mapping[str, Any], cfg: TrainConfig, size: int) -> Iterator[str]:
    """Compare what is written in both places; "auto" agrees with everything."""
    micro, accumulation = cfg.micro_batch_size, cfg.gradient_accumulation_steps
    batch = f"micro_batch_size x gradient_accumulation_steps x processes are {micro} x {accumulation} x {size}"
    told: list[tuple[str, float, str]] = [(name, ours, batch) for name, ours in _batch(cfg, size).items()]
    told.append(("gradient_clipping", cfg.max_grad_norm, f"max_grad_norm is {cfg.max_grad_norm:g}"))
    for name, ours, why in told:
        if (theirs := config.get(name, AUTO)) not in (AUTO, ours):
            yield f'{name}: {theirs}, but {why}; write "auto" there'
    for name, wanted in (("fp16", cfg.fp16), ("bf16", cfg.bf16)):
        theirs = config.get(name, {}).get("enabled", AUTO)
        if theirs is True and (wanted is False or (name == "bf16" and cfg.fp16)):
            yield f'{name}.enabled: true, but {name} is not what the run computes in; set {name}: true, or write "auto"'
        if theirs is False and wanted is True:
            yield f'{name}.enabled: false, but the run says {name}: true; write "auto" there'


def _without_auto(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_auto(item) for name, item in value.items() if item != AUTO}
    return value
