"""What the key `deepspeed` must not hold: a value is passed on to DeepSpeed, agrees with the other
keys, or is refused with what to write instead.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from medusa_train.config.schema import TrainConfig
from medusa_train.config.types import format_value
from medusa_train.errors import ConfigError
from medusa_train.training.deepspeed_engine_config import (
    AUTO,
    OFFLOADS,
    PASSED_ON,
    batch_sizes,
    read_deepspeed,
)

#: Top-level keys with the one value that training here has, and why no other one is possible.
_FIXED: Mapping[str, tuple[Any, str]] = {
    "zero_allow_untested_optimizer": (True, "the optimizer is torch's or bitsandbytes'"),
    "zero_force_ds_cpu_optimizer": (False, "the optimizer is torch's, on a CPU too"),
    "gradient_allreduce_op": ("mean", "losses are scaled for the mean over processes"),
    "managed_gradient_accumulation": (True, "gradient_accumulation_steps sets the boundaries"),
    "dataloader_drop_last": (False, "batches are not made by DeepSpeed"),
    "sequence_parallel_size": (1, "a sequence is not split over processes"),
}
#: Top-level sections without an effect here, with what to do instead; one with `enabled: false`
# is accepted.
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
    "checkpoint": "checkpoints are written by save_steps, in a format of their own",
    "datastates_ckpt": "checkpoints are written by save_steps, in a format of their own",
    "compile": "set torch_compile: true in the YAML",
    "data_efficiency": "data are read by the YAML's datasets",
    "curriculum_learning": "data are read by the YAML's datasets",
    "quantize_training": "set load_in_4bit: true or load_in_8bit: true in the YAML",
    "weight_quantization": "set load_in_4bit: true or load_in_8bit: true in the YAML",
    "compression_training": "set load_in_4bit: true or load_in_8bit: true in the YAML",
    "autotuning": "set micro_batch_size in the YAML; --inspect estimates the memory",
    "elasticity": "a run resumes on another number of processes without it",
    "hybrid_engine": "remove it",
    "pipeline": "remove it",
    "tensor_parallel": "use ZeRO stage 3 to partition weights",
    "expert_parallel": "use ZeRO stage 3 to partition weights",
    "seq_parallel_communication_data_type": "a sequence is not split over processes; remove it",
    "use_data_before_expert_parallelism": "remove it",
    "disable_allgather": "DeepSpeed does not use it; remove it",
    "vocabulary_size": "it follows from the backbone; remove it",
    "sparse_gradients": "gradients here are dense; remove it",
    "sparse_attention": "set flash_attention in the YAML",
    "progressive_layer_drop": "remove it",
    "eigenvalue": "remove it",
    "nebula": "checkpoints are written by save_steps; remove it",
    "graph_harvesting": "set torch_compile: true in the YAML",
}
_BATCH = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
_SECTIONS = ("fp16", "bf16", "optimizer", "scheduler", "zero_optimization")
#: All top-level keys that are known.
_TOP_LEVEL = (*_BATCH, "gradient_clipping", *_SECTIONS, *PASSED_ON, *_FIXED, *_NOT_USED)

_STAGES = (0, 1, 2, 3)
_TYPE_NAMES = {
    int: "a number",
    bool: "true or false",
    str: "text",
    dict: "a mapping",
    list: "a list",
}
_FLAG: tuple[type, ...] = (bool,)
_NUMBER: tuple[type, ...] = (int, float)
#: Keys of `zero_optimization` that are passed on, with the types that they may have.
ZERO_KEYS: Mapping[str, tuple[type, ...]] = {
    "stage": (int,),
    "contiguous_gradients": _FLAG,
    "reduce_scatter": _FLAG,
    "reduce_bucket_size": _NUMBER,
    "use_multi_rank_bucket_allreduce": _FLAG,
    "allgather_partitions": _FLAG,
    "allgather_bucket_size": _NUMBER,
    "overlap_comm": _FLAG,
    "offload_param": (dict,),
    "offload_optimizer": (dict,),
    "sub_group_size": _NUMBER,
    "stage3_prefetch_bucket_size": _NUMBER,
    "stage3_param_persistence_threshold": _NUMBER,
    "stage3_model_persistence_threshold": _NUMBER,
    "stage3_max_live_parameters": _NUMBER,
    "stage3_max_reuse_distance": _NUMBER,
    "stage3_module_granularity_threshold": _NUMBER,
    "stage3_use_all_reduce_for_fetch_params": _FLAG,
    "stage3_allgather_sequential": _FLAG,
    "ignore_unused_parameters": _FLAG,
    "round_robin_gradients": _FLAG,
    "parameter_alignment": _FLAG,
    "zero_hpz_partition_size": _NUMBER,
    "zero_quantized_weights": _FLAG,
    "zero_quantized_nontrainable_weights": _FLAG,
    "zero_quantized_gradients": _FLAG,
    "memory_efficient_linear": _FLAG,
    "override_module_apply": _FLAG,
    "log_trace_cache_warnings": _FLAG,
    "enable_sanity_checks": _FLAG,
    "leaf_module": (dict,),
}
#: Keys of `zero_optimization` that concern what DeepSpeed does not do here, with what to do
# instead; false is accepted.
ZERO_NOT_USED: Mapping[str, str] = {
    "cpu_offload": "write offload_optimizer: {device: cpu}",
    "cpu_offload_param": "write offload_param: {device: cpu}",
    "cpu_offload_use_pin_memory": "write pin_memory: true in offload_optimizer and offload_param",
    "zenflow": "it replaces the optimizer; write offload_optimizer: {device: cpu}",
    "elastic_checkpoint": "a run resumes on another number of processes without it",
    "legacy_stage1": "remove it",
    "pipeline_loading_checkpoint": "remove it",
    "save_muon_momentum_buffer_in_memory": "the optimizer is AdamW; remove it",
}
#: Likewise where true is accepted: it is what is done here.
ZERO_DONE_HERE: Mapping[str, str] = {
    "stage3_gather_16bit_weights_on_model_save": "weights are always saved whole",
    "stage3_gather_fp16_weights_on_model_save": "weights are always saved whole",
    "load_from_fp32_weights": "optimizer states are always saved in float32",
    "compute_grad_norm": "the norm is needed for max_grad_norm and the log",
}
#: Keys of each kind of offloading, as DeepSpeed reads them.
_OFFLOAD_KEYS: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    "offload_param": {
        "device": (str,),
        "pin_memory": _FLAG,
        "buffer_count": _NUMBER,
        "buffer_size": _NUMBER,
        "max_in_cpu": _NUMBER,
        "nvme_path": (str,),
    },
    "offload_optimizer": {
        "device": (str,),
        "pin_memory": _FLAG,
        "buffer_count": _NUMBER,
        "pipeline_read": _FLAG,
        "pipeline_write": _FLAG,
        "fast_init": _FLAG,
        "nvme_path": (str,),
    },
}
#: Keys of `offload_optimizer` for DeepSpeed's own Adam, with the value that changes nothing.
_OF_CPU_ADAM = {"ratio": 1, "super_offload": False, "cpuadam_cores_perc": 0.8}
#: Keys of the sections that are passed on.
_PASSED_ON_KEYS: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    "flops_profiler": {
        "enabled": _FLAG,
        "recompute_fwd_factor": _NUMBER,
        "profile_step": _NUMBER,
        "module_depth": _NUMBER,
        "top_modules": _NUMBER,
        "detailed": _FLAG,
        "output_file": (str,),
    },
    "comms_logger": {
        "enabled": _FLAG,
        "prof_all": _FLAG,
        "prof_ops": (list,),
        "verbose": _FLAG,
        "debug": _FLAG,
    },
    "timers": {"throughput": (dict,)},
    "timers.throughput": {"enabled": _FLAG, "synchronized": _FLAG},
    "data_types": {
        "grad_accum_dtype": (str,),
        "param_dtype": (str,),
        "buffer_dtype": (str,),
        "keep_in_fp32_modules": (list,),
    },
}
_DTYPES = ("fp32", "fp16", "bf16")
#: DeepSpeed's schedules and ours.
_SCHEDULES = {
    "WarmupLR": "constant_with_warmup",
    "WarmupDecayLR": "linear",
    "WarmupCosineLR": "cosine",
}


def check_deepspeed(cfg: TrainConfig, size: int) -> Mapping[str, Any]:
    """Read `deepspeed` and check it for `size` processes, before anything is loaded.

    Raises:
        ConfigError: all problems at once.
    """
    config = read_deepspeed(cfg.deepspeed)
    problems = [
        *_top_level_problems(config),
        *_batch_problems(config, cfg, size),
        *_zero_problems(_section(config, "zero_optimization"), cfg),
        *_optimizer_problems(_section(config, "optimizer"), cfg),
        *_schedule_problems(_section(config, "scheduler"), cfg),
        *_precision_problems(config, cfg),
    ]
    if problems:
        raise ConfigError([f"deepspeed: {problem}" for problem in problems])
    return config


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section; empty if it is missing, or no mapping, which is reported once."""
    section = config.get(name)
    if isinstance(section, Mapping):
        return section
    return {}


def _top_level_problems(config: Mapping[str, Any]) -> Iterator[str]:
    for name, value in config.items():
        if name in _SECTIONS and value is not None and not isinstance(value, Mapping):
            yield f"{name}: expected a mapping, got {value!r}"
        if name not in _TOP_LEVEL:
            yield _unknown(name, _TOP_LEVEL)
        elif name in PASSED_ON:
            yield from _wrong_type(name, value, PASSED_ON[name])
            yield from _passed_on_problems(name, value)
        elif name in _FIXED:
            only, reason = _FIXED[name]
            if not _agrees(value, only):
                yield f"{name}: {format_value(value)} is not used: {reason}; remove it"
        elif name in _NOT_USED and not _is_off(value):
            yield f"{name} is not used: {_NOT_USED[name]}"


def _passed_on_problems(name: str, section: Any) -> Iterator[str]:
    """Check the entries of a section that is passed on."""
    known = _PASSED_ON_KEYS.get(name)
    if known is None or not isinstance(section, Mapping):
        return
    yield from _unknown_or_wrong(name, section, known)
    for key, value in section.items():
        yield from _passed_on_problems(f"{name}.{key}", value)
        is_dtype = key.endswith("_dtype") and isinstance(value, str)
        if is_dtype and value not in (*_DTYPES, AUTO):
            yield f"{name}.{key}: {value!r} is not one of {', '.join(_DTYPES)}"


def _unknown_or_wrong(
    where: str, section: Mapping[str, Any], known: Mapping[str, tuple[type, ...]]
) -> Iterator[str]:
    """Name entries that DeepSpeed does not have, and those of another type."""
    for key, value in section.items():
        if key not in known:
            yield _unknown(key, known, f"{where}.")
        else:
            yield from _wrong_type(f"{where}.{key}", value, known[key])


def _batch_problems(config: Mapping[str, Any], cfg: TrainConfig, size: int) -> Iterator[str]:
    product = f"{cfg.micro_batch_size} x {cfg.gradient_accumulation_steps} x {size}"
    reason = f"micro_batch_size x gradient_accumulation_steps x processes are {product}"
    for name, value in batch_sizes(cfg, size).items():
        if not _agrees(config.get(name), value):
            yield f'{name}: {config[name]}, but {reason}; set it to "auto"'
    clipping = config.get("gradient_clipping")
    if not _agrees(clipping, cfg.max_grad_norm):
        yield (
            f"gradient_clipping: {clipping}, but max_grad_norm is {cfg.max_grad_norm:g}; set it"
            ' to "auto"'
        )


def _zero_problems(zero: Mapping[str, Any], cfg: TrainConfig) -> Iterator[str]:
    # 1. Each key: passed on, without an effect here, or done here whatever it says.
    for name, value in zero.items():
        where = f"zero_optimization.{name}"
        if name == "stage":
            continue
        if name in ZERO_KEYS:
            yield from _wrong_type(where, value, ZERO_KEYS[name])
        elif name in ZERO_NOT_USED:
            if not _is_off(value):
                yield f"{where} is not used: {ZERO_NOT_USED[name]}"
        elif name in ZERO_DONE_HERE:
            if not _agrees(value, True):
                reason = ZERO_DONE_HERE[name]
                yield f"{where}: {format_value(value)} is not used: {reason}; remove it"
        else:
            known = (*ZERO_KEYS, *ZERO_NOT_USED, *ZERO_DONE_HERE)
            yield _unknown(name, known, "zero_optimization.")
    # 2. The stage, and what stage 3 cannot do.
    stage = zero.get("stage")
    if stage is not None and (isinstance(stage, bool) or stage not in _STAGES):
        yield f"zero_optimization.stage: {stage!r} is not one of 0, 1, 2, 3"
    if stage == 3 and cfg.quantization is not None:
        yield "stage 3 cannot partition a quantized backbone; use stage 2"
    if stage == 3 and cfg.torch_compile:
        yield "stage 3 gathers weights while layers run; use stage 2, or torch_compile: false"
    # 3. Offloading.
    for name in OFFLOADS:
        yield from _offload_problems(name, _section(zero, name))


def _offload_problems(kind: str, offload: Mapping[str, Any]) -> Iterator[str]:
    where = f"zero_optimization.{kind}"
    checked = dict(offload)
    for name, usual in _OF_CPU_ADAM.items():
        if kind == "offload_optimizer" and name in checked:
            value = checked.pop(name)
            if not _agrees(value, usual):
                yield (
                    f"{where}.{name}: {format_value(value)} is not used: it is for DeepSpeed's own"
                    " Adam, and the optimizer is torch's; remove it"
                )
    yield from _unknown_or_wrong(where, checked, _OFFLOAD_KEYS[kind])
    device = offload.get("device")
    if device == "nvme":
        yield f"{where}.device: nvme is not supported; use cpu"
    elif device not in (None, AUTO, "cpu", "none"):
        yield f"{where}.device: {device!r} is not one of cpu, none"


def _optimizer_problems(section: Mapping[str, Any], cfg: TrainConfig) -> Iterator[str]:
    """Compare the section with the run's AdamW."""
    kind = section.get("type")
    if kind not in (None, AUTO) and str(kind).lower() not in ("adam", "adamw"):
        yield (
            f"optimizer.type: {kind}, but optimizer is {cfg.optimizer}, an AdamW; remove the"
            " section, and set optimizer in the YAML"
        )
        return  # whose parameters are others
    yield from _unlike("optimizer", section, {"legacy_fusion": (False, None)})
    betas = [cfg.adam_beta1, cfg.adam_beta2]
    expected: dict[str, tuple[Any, str | None]] = {
        "lr": (cfg.learning_rate, "learning_rate"),
        "weight_decay": (cfg.weight_decay, "weight_decay"),
        "betas": (betas, "adam_beta1, adam_beta2"),
        "eps": (cfg.adam_epsilon, "adam_epsilon"),
        "max_grad_norm": (cfg.max_grad_norm, "max_grad_norm"),
        "torch_adam": (True, None),
        "adam_w_mode": (True, None),
        "bias_correction": (True, None),
        "amsgrad": (False, None),
    }
    yield from _unlike_params("optimizer", section, expected)


def _schedule_problems(section: Mapping[str, Any], cfg: TrainConfig) -> Iterator[str]:
    """Compare the section with the run's schedule."""
    kind = section.get("type")
    if kind not in (None, AUTO) and _SCHEDULES.get(str(kind)) != cfg.lr_scheduler:
        instead = "lr_scheduler"
        if str(kind) in _SCHEDULES:
            instead = f"lr_scheduler: {_SCHEDULES[str(kind)]}"
        yield (
            f"scheduler.type: {kind}, but lr_scheduler is {cfg.lr_scheduler}; remove the section,"
            f" or set {instead} in the YAML"
        )
    yield from _unlike("scheduler", section, {})
    steps: Any = cfg.warmup_steps
    if steps is None and cfg.warmup_ratio is None:
        steps = 0
    expected: dict[str, tuple[Any, str | None]] = {
        "warmup_min_lr": (0, None),
        "warmup_max_lr": (cfg.learning_rate, "learning_rate"),
        "warmup_num_steps": (steps, "warmup_steps"),
        "warmup_type": ("linear", None),
        "total_num_steps": (cfg.max_steps, "max_steps"),
        "warmup_min_ratio": (0, None),
        "cos_min_ratio": (cfg.cosine_min_lr_ratio, "cosine_min_lr_ratio"),
        "last_batch_iteration": (-1, None),
    }
    yield from _unlike_params("scheduler", section, expected)


def _precision_problems(config: Mapping[str, Any], cfg: TrainConfig) -> Iterator[str]:
    """Compare fp16 and bf16 with the run's; parameters of one that it does not compute in are
    without effect anywhere.
    """
    fp16 = _section(config, "fp16")
    bf16 = _section(config, "bf16")
    # false where fp16 is on, whatever bf16: auto would choose
    wanted_bf16 = False if cfg.fp16 else cfg.bf16
    for name, section, wanted in (("fp16", fp16, cfg.fp16), ("bf16", bf16, wanted_bf16)):
        enabled = section.get("enabled")
        if not _agrees(enabled, wanted):
            yield (
                f"{name}.enabled: {format_value(enabled)}, but {name} is {format_value(wanted)} in"
                f' the run; set it to "auto", and {name}: true or false in the YAML'
            )
    scaling: dict[str, tuple[Any, str | None]] = {
        "enabled": (fp16.get("enabled"), None),
        "auto_cast": (True, None),
        "loss_scale": (0, None),
        "initial_scale_power": (16, None),
        "loss_scale_window": (2000, None),
        "hysteresis": (1, None),
        "consecutive_hysteresis": (False, None),
        "min_loss_scale": (1, None),
        "fp16_master_weights_and_grads": (False, None),
    }
    yield from _unlike("fp16", fp16, scaling, compare=cfg.fp16)
    updates: dict[str, tuple[Any, str | None]] = {
        "enabled": (bf16.get("enabled"), None),
        "immediate_grad_update": (False, None),
        "check_grad_overflow": (True, None),
        "bf16_master_weights_and_grads": (False, None),
        "bf16_optimizer_states": (False, None),
    }
    yield from _unlike("bf16", bf16, updates, compare=wanted_bf16 is not False)


def _unlike_params(
    name: str, section: Mapping[str, Any], expected: Mapping[str, tuple[Any, str | None]]
) -> Iterator[str]:
    params = section.get("params")
    if params is not None and not isinstance(params, Mapping):
        yield f"{name}.params: expected a mapping, got {params!r}"
    yield from _unlike(f"{name}.params", _section(section, "params"), expected)


def _unlike(
    where: str,
    section: Mapping[str, Any],
    expected: Mapping[str, tuple[Any, str | None]],
    compare: bool = True,
) -> Iterator[str]:
    """Yield a line for each unknown entry of a section, and, if `compare`, each that differs.

    Args:
        expected: by name: the run's value, and the key that sets it, if there is one.
    """
    for name, value in section.items():
        if name in ("type", "params") and "." not in where:
            continue
        if name not in expected:
            yield _unknown(name, expected, f"{where}.")
            continue
        run_value, key = expected[name]
        if not compare or _agrees(value, run_value):
            continue
        shown = run_value
        if not isinstance(run_value, list):
            shown = format_value(run_value)
        if key is None:
            yield f'{where}.{name}: {value}, but it is {shown} here; remove it, or set it to "auto"'
        else:
            noun = "are" if "," in key else "is"
            yield f'{where}.{name}: {value}, but {key} {noun} {shown}; set it to "auto"'


def _unknown(name: str, known: Iterable[str], prefix: str = "") -> str:
    nearest = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.65)
    if nearest:
        return f"{prefix}{name}: unknown key; did you mean {prefix}{nearest[0]}?"
    return f"{prefix}{name}: unknown key; remove it"


def _wrong_type(where: str, value: Any, types: tuple[type, ...]) -> Iterator[str]:
    if value is None or value == AUTO:
        return
    if int in types:  # YAML reads 5e8 as text
        fits = _number(value) is not None
    else:
        fits = isinstance(value, types)
    if not fits:
        yield f"{where}: expected {_TYPE_NAMES[types[0]]}, got {value!r}"


def _agrees(value: Any, run_value: Any) -> bool:
    """Return whether a value is left to the run, or equal to the run's."""
    if value is None or value == AUTO:
        return True
    if isinstance(value, bool) or isinstance(run_value, bool):
        return value is run_value
    if isinstance(run_value, list):
        return isinstance(value, list) and [_number(item) for item in value] == run_value
    number = _number(value)
    if number is None:
        return bool(value == run_value)
    return bool(number == run_value)


def _number(value: Any) -> float | None:
    """Return a number, also one that YAML reads as text (1e-3); None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):  # an integer of hundreds of digits
        return None


def _is_off(value: Any) -> bool:
    """Return whether a section or key asks for nothing."""
    if isinstance(value, Mapping):
        return value.get("enabled", bool(value)) is False
    return value is None or value is False
