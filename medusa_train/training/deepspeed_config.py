"""Check the key `deepspeed`, and build the configuration of DeepSpeed's engine.

Every entry is either passed on to DeepSpeed, or repeats a key of the run, or is an error that says
what to write instead. The checks do not import DeepSpeed, because that takes seconds. The exception
is `zero_optimization`: `deepspeed_strategy.check_zero` checks it with DeepSpeed's own pydantic
model.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from medusa_train.config.paths import resolve_path
from medusa_train.config.schema import TrainConfig
from medusa_train.config.types import format_value
from medusa_train.errors import ConfigError
from medusa_train.io import parse_json

AUTO = "auto"
#: The default if several processes train and `deepspeed` is not set.
DEFAULT: Mapping[str, Any] = {"zero_optimization": {"stage": 1}}

#: Entries that are passed on to DeepSpeed -> the expected type, or a tuple of the allowed values.
#: `optimizer.type` is checked but not passed on. A dot separates a section and its entry.
_PASSED_ON: Mapping[str, Any] = {
    "steps_per_print": float,
    "wall_clock_breakdown": bool,
    "memory_breakdown": bool,
    "dump_state": bool,
    "disable_python_gc": bool,
    "log_level": str,
    "communication_data_type": str,
    "prescale_gradients": bool,
    "gradient_predivide_factor": float,
    "flops_profiler.enabled": bool,
    "flops_profiler.recompute_fwd_factor": float,
    "flops_profiler.profile_step": float,
    "flops_profiler.module_depth": float,
    "flops_profiler.top_modules": float,
    "flops_profiler.detailed": bool,
    "flops_profiler.output_file": str,
    "comms_logger.enabled": bool,
    "comms_logger.prof_all": bool,
    "comms_logger.prof_ops": list,
    "comms_logger.verbose": bool,
    "comms_logger.debug": bool,
    "timers.throughput.enabled": bool,
    "timers.throughput.synchronized": bool,
    "data_types.grad_accum_dtype": ("fp32", "fp16", "bf16"),
    "data_types.param_dtype": ("fp32", "fp16", "bf16"),
    "data_types.buffer_dtype": ("fp32", "fp16", "bf16"),
    "data_types.keep_in_fp32_modules": list,
    "optimizer.type": ("adam", "adamw"),
    "zero_optimization.stage": ("0", "1", "2", "3"),
    "zero_optimization.offload_param.device": ("cpu", "none"),
    "zero_optimization.offload_optimizer.device": ("cpu", "none"),
}
_EXPECTED = {bool: "true or false", float: "a number", str: "text", list: "a list"}
#: Sections and entries that have no effect here -> what to do instead. They are accepted only if
#: they are off: false, a section with `enabled: false`, or a section in which everything is false.
_NOT_USED: Mapping[str, str] = {
    "activation_checkpointing": "set gradient_checkpointing: true in the YAML",
    "amp": "set fp16: true or bf16: true in the YAML",
    "torch_autocast": "set bf16: true or fp16: true in the YAML",
    "bfloat16": "set bf16: true in the YAML",
    "tensorboard": "set use_tensorboard: true in the YAML",
    "wandb": "set wandb_project in the YAML",
    "csv_monitor": "output_dir/metrics.jsonl has the metrics",
    "aio": "it is for offloading to nvme, which is not supported; offload to cpu",
    "checkpoint": "checkpoints are written by save_steps, in a format of their own",
    "compile": "set torch_compile: true in the YAML",
    "data_efficiency": "data are read by the YAML's datasets",
    "curriculum_learning": "data are read by the YAML's datasets",
    "compression_training": "set load_in_4bit: true or load_in_8bit: true in the YAML",
    "autotuning": "set micro_batch_size in the YAML; --inspect estimates the memory",
    "elasticity": "a run resumes on another number of processes without it",
    "tensor_parallel": "use ZeRO stage 3 to partition weights",
    "sparse_attention": "set flash_attention in the YAML",
    "zero_optimization.cpu_offload": "write offload_optimizer: {device: cpu}",
    "zero_optimization.cpu_offload_param": "write offload_param: {device: cpu}",
    "zero_optimization.cpu_offload_use_pin_memory": "write pin_memory: true in offload_optimizer",
    "zero_optimization.zenflow": "write offload_optimizer: {device: cpu}",
    # DeepSpeed's own check accepts the entries below
    "zero_optimization.elastic_checkpoint": "a run resumes on other numbers of processes without"
    " it",
    "zero_optimization.legacy_stage1": "remove it",
    "zero_optimization.pipeline_loading_checkpoint": "remove it",
    "zero_optimization.save_muon_momentum_buffer_in_memory": "the optimizer is AdamW; remove it",
}
#: Entries for which only this value is allowed.
_FIXED: Mapping[str, Any] = {
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": True,
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": True,
    "zero_optimization.load_from_fp32_weights": True,
    "zero_optimization.compute_grad_norm": True,
    # settings of DeepSpeed's own Adam, which is not used
    "zero_optimization.offload_optimizer.ratio": 1,
    "zero_optimization.offload_optimizer.super_offload": False,
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": 0.8,
    # of examples for DeepSpeed, which write these values out
    "optimizer.params.torch_adam": True,
    "optimizer.params.adam_w_mode": True,
    "scheduler.params.warmup_min_lr": 0,
    "scheduler.params.warmup_type": "linear",
    "fp16.loss_scale": 0,
    "fp16.initial_scale_power": 16,
    "fp16.loss_scale_window": 2000,
    "fp16.hysteresis": 1,
    "fp16.min_loss_scale": 1,
}
#: Entries that repeat a key of the run -> that key.
_REPEATED: Mapping[str, str] = {
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "optimizer.params.max_grad_norm": "max_grad_norm",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "scheduler.params.total_num_steps": "max_steps",
    "scheduler.params.cos_min_ratio": "cosine_min_lr_ratio",
    "fp16.enabled": "fp16",
    "bf16.enabled": "bf16",
}
#: Sections that accept "auto" for every entry: the run's keys set the first four, and DeepSpeed
#: itself checks `zero_optimization`.
_ANSWERED = ("optimizer", "scheduler", "fp16", "bf16", "zero_optimization")
#: Our schedules under DeepSpeed's names.
_SCHEDULES = {
    "constant_with_warmup": "WarmupLR",
    "linear": "WarmupDecayLR",
    "cosine": "WarmupCosineLR",
}


def read_deepspeed(config: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the mapping in the key `deepspeed`, or the content of the JSON file that it names;
    `DEFAULT` if the key is not set. Null entries are left out.

    Raises:
        ConfigError: the file does not exist, or its content is not a JSON object.
    """
    if isinstance(config, str):
        path = resolve_path(config)
        if path is None or not path.is_file():
            raise ConfigError(
                f"deepspeed: {config}: no such file; configs/deepspeed/ has zero1.json to"
                " zero3.json"
            )
        try:
            config = parse_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"deepspeed: {path}: cannot read JSON: {error}") from error
        if not isinstance(config, dict):
            raise ConfigError(f"deepspeed: {path}: not a JSON object")
    read: dict[str, Any] = _without(None, DEFAULT if config is None else config)
    return read


def _without(left_out: object, value: Any) -> Any:
    """Copy a JSON value without the entries whose value is `left_out`. Strings that look like
    numbers become numbers, because YAML reads 5e8 as a string.
    """
    if isinstance(value, Mapping):
        return {k: _without(left_out, item) for k, item in value.items() if item != left_out}
    if isinstance(value, list):
        return [_without(left_out, item) for item in value]
    if isinstance(value, str) and value[:1] in "+-.0123456789":
        with contextlib.suppress(ValueError):
            return float(value)
    return value


def stage_of(config: Mapping[str, Any]) -> int:
    """Return the ZeRO stage of a checked configuration: 0 (nothing partitioned) to
    3 (weights too).
    """
    zero = _without(AUTO, config).get("zero_optimization", {})
    return int(zero.get("stage", 0))


def check_deepspeed(cfg: TrainConfig, processes: int) -> dict[str, Any]:
    """Read `deepspeed` and check it for a run with this number of processes, before anything is
    loaded.

    Raises:
        ConfigError: lists all problems.
    """
    config = read_deepspeed(cfg.deepspeed)
    problems = list(_problems(config, cfg, processes))
    if not problems and stage_of(config) == 3:
        if cfg.quantization is not None:
            problems.append("stage 3 cannot partition a quantized target model; use stage 2")
        if cfg.torch_compile:
            problems.append(
                "stage 3 gathers weights while layers run; use stage 2, or torch_compile: false"
            )
    if problems:
        raise ConfigError([f"deepspeed: {problem}" for problem in problems])
    return config


def _problems(config: Mapping[str, Any], cfg: TrainConfig, processes: int) -> Iterator[str]:
    """Compare every entry with the tables above and with the run's keys; yield the problems."""
    if cfg.fp16:  # fp16 replaces `bf16: auto`
        cfg = cfg.model_copy(update={"bf16": False})
    run_values = _values_of_run(cfg, processes)
    known_entries = [*run_values, *_NOT_USED, *_PASSED_ON]
    # the entries of a precision that the run does not use have no effect, so they are accepted
    idle = [name for name in ("fp16", "bf16") if getattr(cfg, name) is False]
    for name, value in _entries(config, known_entries):
        section, _, entry = name.partition(".")
        is_idle = section in idle and entry != "enabled"
        is_auto = value == AUTO and (name in known_entries or section in _ANSWERED)
        if _is_section(name, known_entries):
            yield f"{name}: expected a mapping, got {value!r}"
        elif name in _NOT_USED:
            if not _is_off(value):
                yield f"{name} is not used: {_NOT_USED[name]}"
        elif is_idle or is_auto:
            continue
        elif name in run_values:
            expected, reason = run_values[name]
            if value != expected:
                yield f'{name}: {format_value(value)}, but {reason}; remove it, or set it to "auto"'
        elif name in _PASSED_ON:
            yield from _check_value(name, value, _PASSED_ON[name])
        elif section != "zero_optimization":  # DeepSpeed itself checks the entries of this section
            sections = {entry.partition(".")[0] for entry in known_entries}
            yield unknown_entry(name, [*known_entries, *sorted(sections)])


def _is_off(value: Any) -> bool:
    """Return whether a section or entry is switched off."""
    if isinstance(value, Mapping):
        return value.get("enabled", any(value.values())) is False
    return value is False


def _is_section(name: str, entries: Iterable[str]) -> bool:
    return any(entry.startswith(f"{name}.") for entry in entries)


def _entries(
    section: Mapping[str, Any], known: Sequence[str], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of every entry, including the entries of sections."""
    for key, value in section.items():
        name = prefix + key
        if isinstance(value, Mapping) and _is_section(name, known):
            yield from _entries(value, known, f"{name}.")
        else:
            yield name, value


def _check_value(name: str, value: Any, expected: Any) -> Iterator[str]:
    """Compare a value with its type in `_PASSED_ON`, or with the values listed there."""
    if isinstance(expected, tuple):
        if str(value).lower() not in expected:
            yield f"{name}: expected one of {', '.join(expected)}, got {value!r}"
    elif type(value) is not expected and not (expected is float and type(value) is int):
        yield f"{name}: expected {_EXPECTED[expected]}, got {value!r}"


def _values_of_run(cfg: TrainConfig, processes: int) -> dict[str, tuple[Any, str]]:
    """Return, for each entry that the run sets, the only allowed value and the reason for it."""
    values = {name: (value, f"it is {format_value(value)} here") for name, value in _FIXED.items()}
    for name, key in _REPEATED.items():
        value = getattr(cfg, key)
        values[name] = (value, f"{key} is {format_value(value)} in the run")
    if cfg.warmup_steps is None and cfg.warmup_ratio is None:
        values["scheduler.params.warmup_num_steps"] = (0, "the run has no warmup")
    schedule = _SCHEDULES.get(cfg.lr_scheduler)
    values["scheduler.type"] = (schedule, f"lr_scheduler is {cfg.lr_scheduler}")
    betas = [cfg.adam_beta1, cfg.adam_beta2]
    values["optimizer.params.betas"] = (betas, f"adam_beta1, adam_beta2 are {betas}")
    product = f"{cfg.micro_batch_size} x {cfg.gradient_accumulation_steps} x {processes}"
    reason = f"micro_batch_size x gradient_accumulation_steps x processes are {product}"
    return values | {name: (size, reason) for name, size in _batch_sizes(cfg, processes).items()}


def _batch_sizes(cfg: TrainConfig, processes: int) -> dict[str, int]:
    return {
        "train_batch_size": cfg.micro_batch_size * cfg.gradient_accumulation_steps * processes,
        "train_micro_batch_size_per_gpu": cfg.micro_batch_size,
        "gradient_accumulation_steps": cfg.gradient_accumulation_steps,
    }


def unknown_entry(name: str, known_entries: Iterable[str]) -> str:
    """Return the message for an unknown entry; it suggests the most similar known entry."""
    for nearest in difflib.get_close_matches(name.lower(), known_entries, n=1, cutoff=0.7):
        return f"{name}: unknown key; did you mean {nearest}?"
    return f"{name}: unknown key, or one that is not used here; remove it"


def engine_config(cfg: TrainConfig, processes: int, hidden_size: int) -> dict[str, Any]:
    """Return the configuration of DeepSpeed's engine: the checked key `deepspeed`, plus the run's
    batch sizes and gradient clipping, without the entries that repeat other keys.

    This package sets the compute dtype (autocast over float32 weights) and builds the optimizer and
    the schedule. DeepSpeed only partitions them over the processes and reduces the gradients in
    float32. Every entry with "auto" takes DeepSpeed's default, except for the size of the gradient
    buckets: the default of 500 million elements would take 2 GB in float32.

    Args:
        hidden_size: hidden size of the target model.
    """
    user_entries = _without(AUTO, read_deepspeed(cfg.deepspeed))
    passed_on = {name.partition(".")[0] for name in _PASSED_ON} - {"optimizer"}
    config: dict[str, Any] = {"steps_per_print": 1 << 62}  # never
    config.update({name: value for name, value in user_entries.items() if name in passed_on})
    zero = {"reduce_bucket_size": max(hidden_size * hidden_size, 1 << 20)}
    return {
        **config,
        **_batch_sizes(cfg, processes),
        "zero_optimization": zero | config.get("zero_optimization", {}),
        "gradient_clipping": cfg.max_grad_norm,
        "zero_allow_untested_optimizer": True,  # our tests compare torch's AdamW with one process
        # torch's fused AdamW also runs on CPUs, and needs no compilation
        "zero_force_ds_cpu_optimizer": False,
    }


def loading_config(cfg: TrainConfig, processes: int, dtype: str) -> dict[str, Any] | None:
    """Return the configuration with which ZeRO-3 partitions weights of `dtype` while they are
    loaded; None if they are not partitioned during loading.

    Two cases need whole weights: PEFT copies modules (`lora_modules_to_save`), and each process
    computes cached hidden states with its own target model (`cache_hidden_states`).
    """
    if processes == 1 or cfg.lora_modules_to_save or cfg.cache_hidden_states:
        return None
    config = engine_config(cfg, processes, hidden_size=1)
    if stage_of(config) != 3:
        return None
    switches = {"bfloat16": "bf16", "float16": "fp16"}
    if dtype in switches:
        config[switches[dtype]] = {"enabled": True}
    return config
