"""The key `deepspeed`: what it may hold, and the configuration that DeepSpeed's engine is given.

Every entry is passed on to DeepSpeed, or repeats what the run's keys say, or is an error that says
what to write instead. This is checked without DeepSpeed, whose import takes seconds, except for the
entries of `zero_optimization`: `deepspeed_strategy.check_zero` leaves those to DeepSpeed's own model.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from medusa_train.config.paths import resolve_path
from medusa_train.config.schema import TrainConfig
from medusa_train.config.types import format_value
from medusa_train.errors import ConfigError
from medusa_train.io import parse_json

AUTO = "auto"
#: Used by several processes if `deepspeed` is not set.
DEFAULT: Mapping[str, Any] = {"zero_optimization": {"stage": 1}}

_SWITCH = "true or false"
_NUMBER = "a number"
#: Entries that may be given, with what is expected; all but `optimizer.type` are passed on. A dot
#: separates a section and its entry.
_PASSED_ON: Mapping[str, str] = {
    "steps_per_print": _NUMBER,
    "wall_clock_breakdown": _SWITCH,
    "memory_breakdown": _SWITCH,
    "dump_state": _SWITCH,
    "disable_python_gc": _SWITCH,
    "log_level": "text",
    "communication_data_type": "text",
    "prescale_gradients": _SWITCH,
    "gradient_predivide_factor": _NUMBER,
    "flops_profiler.enabled": _SWITCH,
    "flops_profiler.recompute_fwd_factor": _NUMBER,
    "flops_profiler.profile_step": _NUMBER,
    "flops_profiler.module_depth": _NUMBER,
    "flops_profiler.top_modules": _NUMBER,
    "flops_profiler.detailed": _SWITCH,
    "flops_profiler.output_file": "text",
    "comms_logger.enabled": _SWITCH,
    "comms_logger.prof_all": _SWITCH,
    "comms_logger.prof_ops": "a list",
    "comms_logger.verbose": _SWITCH,
    "comms_logger.debug": _SWITCH,
    "timers.throughput.enabled": _SWITCH,
    "timers.throughput.synchronized": _SWITCH,
    "data_types.grad_accum_dtype": "one of fp32, fp16, bf16",
    "data_types.param_dtype": "one of fp32, fp16, bf16",
    "data_types.buffer_dtype": "one of fp32, fp16, bf16",
    "data_types.keep_in_fp32_modules": "a list",
    "optimizer.type": "one of adam, adamw",
    "zero_optimization.stage": "one of 0, 1, 2, 3",
    "zero_optimization.offload_param.device": "one of cpu, none",
    "zero_optimization.offload_optimizer.device": "one of cpu, none",
}
_QUANTIZE = "set load_in_4bit: true or load_in_8bit: true in the YAML"
_OF_DATA = "data are read by the YAML's datasets"
_OF_CHECKPOINTS = "checkpoints are written by save_steps, in a format of their own"
_STAGE_3 = "use ZeRO stage 3 to partition weights"
#: Sections and entries without an effect here, with what to do instead. Accepted is what asks for
#: nothing: false, and a section with `enabled: false`.
_NOT_USED: Mapping[str, str] = {
    "activation_checkpointing": "set gradient_checkpointing: true in the YAML",
    "amp": "set fp16: true or bf16: true in the YAML",
    "torch_autocast": "set bf16: true or fp16: true in the YAML",
    "bfloat16": "set bf16: true in the YAML",
    "tensorboard": "set use_tensorboard: true in the YAML",
    "wandb": "set wandb_project in the YAML",
    "comet": "set use_tensorboard: true or wandb_project in the YAML",
    "csv_monitor": "output_dir/metrics.jsonl has the metrics",
    "aio": "it is for offloading to nvme, which is not supported; offload to cpu",
    "checkpoint": _OF_CHECKPOINTS,
    "datastates_ckpt": _OF_CHECKPOINTS,
    "nebula": _OF_CHECKPOINTS,
    "compile": "set torch_compile: true in the YAML",
    "graph_harvesting": "set torch_compile: true in the YAML",
    "data_efficiency": _OF_DATA,
    "curriculum_learning": _OF_DATA,
    "quantize_training": _QUANTIZE,
    "weight_quantization": _QUANTIZE,
    "compression_training": _QUANTIZE,
    "autotuning": "set micro_batch_size in the YAML; --inspect estimates the memory",
    "elasticity": "a run resumes on another number of processes without it",
    "tensor_parallel": _STAGE_3,
    "expert_parallel": _STAGE_3,
    "sparse_attention": "set flash_attention in the YAML",
    "hybrid_engine": "remove it",
    "pipeline": "remove it",
    "seq_parallel_communication_data_type": "a sequence is not split over processes; remove it",
    "use_data_before_expert_parallelism": "remove it",
    "disable_allgather": "remove it",
    "vocabulary_size": "it follows from the base model; remove it",
    "sparse_gradients": "gradients here are dense; remove it",
    "progressive_layer_drop": "remove it",
    "eigenvalue": "remove it",
    "zero_optimization.cpu_offload": "write offload_optimizer: {device: cpu}",
    "zero_optimization.cpu_offload_param": "write offload_param: {device: cpu}",
    "zero_optimization.cpu_offload_use_pin_memory": "write pin_memory: true in offload_optimizer",
    "zero_optimization.zenflow": "write offload_optimizer: {device: cpu}",
    "zero_optimization.elastic_checkpoint": "a run resumes on other numbers of processes without it",
    "zero_optimization.legacy_stage1": "remove it",
    "zero_optimization.pipeline_loading_checkpoint": "remove it",
    "zero_optimization.save_muon_momentum_buffer_in_memory": "the optimizer is AdamW; remove it",
}
#: Entries with only one value here.
_FIXED: Mapping[str, Any] = {
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "gradient_allreduce_op": "mean",
    "managed_gradient_accumulation": True,
    "dataloader_drop_last": False,
    "sequence_parallel_size": 1,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": True,
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": True,
    "zero_optimization.load_from_fp32_weights": True,
    "zero_optimization.compute_grad_norm": True,
    # of DeepSpeed's own Adam
    "zero_optimization.offload_optimizer.ratio": 1,
    "zero_optimization.offload_optimizer.super_offload": False,
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": 0.8,
    # of torch's AdamW
    "optimizer.legacy_fusion": False,
    "optimizer.params.torch_adam": True,
    "optimizer.params.adam_w_mode": True,
    "optimizer.params.bias_correction": True,
    "optimizer.params.amsgrad": False,
    "scheduler.params.warmup_min_lr": 0,
    "scheduler.params.warmup_min_ratio": 0,
    "scheduler.params.warmup_type": "linear",
    "scheduler.params.last_batch_iteration": -1,
    # loss scaling as by torch's GradScaler; weights and optimizer states in float32
    "fp16.auto_cast": True,
    "fp16.loss_scale": 0,
    "fp16.initial_scale_power": 16,
    "fp16.loss_scale_window": 2000,
    "fp16.hysteresis": 1,
    "fp16.consecutive_hysteresis": False,
    "fp16.min_loss_scale": 1,
    "fp16.fp16_master_weights_and_grads": False,
    "bf16.bf16_master_weights_and_grads": False,
    "bf16.bf16_optimizer_states": False,
    "bf16.immediate_grad_update": False,
    "bf16.check_grad_overflow": True,
}
#: Entries that repeat a key of the run.
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
#: Our schedules under DeepSpeed's names.
_SCHEDULES = {
    "constant_with_warmup": "WarmupLR",
    "linear": "WarmupDecayLR",
    "cosine": "WarmupCosineLR",
}
#: Mappings whose entries are checked one by one.
_SECTIONS = (
    "optimizer",
    "optimizer.params",
    "scheduler",
    "scheduler.params",
    "fp16",
    "bf16",
    "zero_optimization",
    "zero_optimization.offload_param",
    "zero_optimization.offload_optimizer",
    "flops_profiler",
    "comms_logger",
    "timers",
    "timers.throughput",
    "data_types",
)
#: What a type means in `_PASSED_ON`.
_TYPES: Mapping[str, tuple[type, ...]] = {
    _SWITCH: (bool,),
    _NUMBER: (int, float),
    "text": (str,),
    "a list": (list,),
}


def read_deepspeed(config: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the mapping in the key `deepspeed`, or read the JSON file that it names; `DEFAULT` if
    it is not set. What is null is left out.

    Raises:
        ConfigError: there is no such file, or it holds no JSON object.
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
    """Copy a value of JSON without the entries that are `left_out`, and with numbers in place of
    the text that YAML makes of them (5e8).
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
    """Return the ZeRO stage of a checked configuration: 0 (nothing partitioned) to 3 (weights too)."""
    zero = _without(AUTO, config).get("zero_optimization", {})
    return int(zero.get("stage", 0))


def check_deepspeed(cfg: TrainConfig, processes: int) -> dict[str, Any]:
    """Read `deepspeed` and check it for so many processes, before anything is loaded.

    Raises:
        ConfigError: all problems at once.
    """
    config = read_deepspeed(cfg.deepspeed)
    problems = list(_problems(config, cfg, processes))
    if not problems and stage_of(config) == 3:
        if cfg.quantization is not None:
            problems.append("stage 3 cannot partition a quantized base model; use stage 2")
        if cfg.torch_compile:
            problems.append(
                "stage 3 gathers weights while layers run; use stage 2, or torch_compile: false"
            )
    if problems:
        raise ConfigError([f"deepspeed: {problem}" for problem in problems])
    return config


def _problems(config: Mapping[str, Any], cfg: TrainConfig, processes: int) -> Iterator[str]:
    """Compare every entry with the tables above and with the run's keys."""
    if cfg.fp16:  # in the place of `bf16: auto`
        cfg = cfg.model_copy(update={"bf16": False})
    wanted = _values_of_run(cfg, processes)
    known = [*wanted, *_NOT_USED, *_PASSED_ON, *_SECTIONS]
    # entries of a precision that the run does not compute in have no effect anywhere
    idle = [name for name in ("fp16", "bf16") if getattr(cfg, name) is False]
    for name, value in _entries(config):
        section, _, entry = name.partition(".")
        if name in _SECTIONS:
            yield f"{name}: expected a mapping, got {value!r}"
        elif name in _NOT_USED:
            if not _is_off(value):
                yield f"{name} is not used: {_NOT_USED[name]}"
        elif name not in known:
            # of this section DeepSpeed itself checks the entries
            if section != "zero_optimization":
                yield unknown_entry(name, known)
        elif value == AUTO or (section in idle and entry != "enabled"):
            continue
        elif name in wanted:
            expected, reason = wanted[name]
            if value != expected:
                yield f'{name}: {format_value(value)}, but {reason}; remove it, or set it to "auto"'
        elif not _fits(value, _PASSED_ON[name]):
            yield f"{name}: expected {_PASSED_ON[name]}, got {value!r}"


def _entries(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of every entry, of sections those that they have."""
    for key, value in section.items():
        name = prefix + key
        if name in _SECTIONS and isinstance(value, Mapping):
            yield from _entries(value, f"{name}.")
        else:
            yield name, value


def _values_of_run(cfg: TrainConfig, processes: int) -> dict[str, tuple[Any, str]]:
    """Return the only value of each entry that the run decides on, and where it comes from."""
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
    for name, size in _batch_sizes(cfg, processes).items():
        reason = f"micro_batch_size x gradient_accumulation_steps x processes are {product}"
        values[name] = (size, reason)
    return values


def _batch_sizes(cfg: TrainConfig, processes: int) -> dict[str, int]:
    return {
        "train_batch_size": cfg.micro_batch_size * cfg.gradient_accumulation_steps * processes,
        "train_micro_batch_size_per_gpu": cfg.micro_batch_size,
        "gradient_accumulation_steps": cfg.gradient_accumulation_steps,
    }


def _fits(value: Any, expected: str) -> bool:
    """Return whether a value is as a word of `_PASSED_ON` says."""
    if expected in _TYPES:
        return type(value) in _TYPES[expected]
    return str(value).lower() in expected.removeprefix("one of ").split(", ")


def _is_off(value: Any) -> bool:
    """Return whether a section or entry asks for nothing."""
    if isinstance(value, Mapping):
        return value.get("enabled", bool(value)) is False
    return value is False


def unknown_entry(name: str, known: Iterable[str]) -> str:
    """Say that an entry is unknown, with the nearest one that is known."""
    for nearest in difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.65):
        return f"{name}: unknown key; did you mean {nearest}?"
    return f"{name}: unknown key; remove it"


def engine_config(cfg: TrainConfig, processes: int, hidden_size: int) -> dict[str, Any]:
    """Return what DeepSpeed's engine is given: the checked key `deepspeed` with the run's batch and
    clipping, and without what repeats other keys.

    Compute dtype (autocast over float32 weights), optimizer and schedule are built here and not by
    DeepSpeed, which partitions them over the processes and reduces gradients in float32. Every
    entry that is left to "auto" takes DeepSpeed's default, except for the buckets of gradients,
    whose 500 million elements would take 2 GB in float32.

    Args:
        hidden_size: of the base model.
    """
    given = _without(AUTO, read_deepspeed(cfg.deepspeed))
    passed_on = {name.partition(".")[0] for name in _PASSED_ON} - {"optimizer"}
    config: dict[str, Any] = {"steps_per_print": 1 << 62}  # never
    config.update({name: value for name, value in given.items() if name in passed_on})
    zero = {"reduce_bucket_size": max(hidden_size * hidden_size, 1 << 20)}
    return {
        **config,
        **_batch_sizes(cfg, processes),
        "zero_optimization": zero | config.get("zero_optimization", {}),
        "gradient_clipping": cfg.max_grad_norm,
        "zero_allow_untested_optimizer": True,  # the tests compare torch's with one process
        # torch's fused AdamW runs on CPUs as well, and nothing has to be compiled for it
        "zero_force_ds_cpu_optimizer": False,
    }


def loading_config(cfg: TrainConfig, processes: int, dtype: str) -> dict[str, Any] | None:
    """Return the configuration with which ZeRO-3 partitions weights of `dtype` while they are
    loaded; None without it.

    Modules that PEFT copies are loaded whole, and the base model with which each process computes
    its hidden states.
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
