"""What the key `deepspeed` may hold, and what becomes of it."""

import json

import pytest

from medusa_train.config.paths import PROJECT_ROOT
from medusa_train.config.schema import TrainConfig
from medusa_train.errors import ConfigError
from medusa_train.training.deepspeed_config import (
    check_deepspeed,
    engine_config,
    loading_config,
    stage_of,
)
from medusa_train.training.deepspeed_strategy import check_zero

SHIPPED = sorted((PROJECT_ROOT / "configs" / "deepspeed").glob("*.json"))


def config(**keys):
    values = {
        "base_model": "m",
        "datasets": [{"path": "d"}],
        "micro_batch_size": 4,
        "gradient_accumulation_steps": 2,
    }
    return TrainConfig(**{**values, **keys})


def problems(deepspeed, size=2, **keys):
    with pytest.raises(ConfigError) as caught:
        check_zero(check_deepspeed(config(deepspeed=deepspeed, **keys), size))
    return caught.value.problems


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_files_fit_every_configuration(path):
    cfg = config(deepspeed=f"configs/deepspeed/{path.name}", max_grad_norm=0.7)
    check_deepspeed(cfg, 3)
    whole = engine_config(cfg, 3, hidden_size=2048)
    assert stage_of(whole) == int(path.stem[len("zero")])
    assert whole["train_batch_size"] == 24
    assert whole["train_micro_batch_size_per_gpu"] == 4
    assert whole["gradient_accumulation_steps"] == 2
    assert whole["gradient_clipping"] == 0.7
    assert whole["zero_optimization"]["reduce_bucket_size"] == 2048 * 2048
    assert "auto" not in json.dumps(whole)


def test_a_file_of_another_trainer_fits():
    """Sections that our keys answer, all "auto", as such files have them."""
    theirs = {
        "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8},
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"warmup_min_lr": "auto", "warmup_num_steps": "auto"},
        },
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "wall_clock_breakdown": False,
    }
    cfg = config(deepspeed=theirs)
    check_deepspeed(cfg, 2)
    whole = engine_config(cfg, 2, 64)
    assert not {"bf16", "fp16", "optimizer", "scheduler"} & set(whole)
    assert whole["zero_optimization"] == {
        "stage": 2,
        "overlap_comm": True,
        "reduce_bucket_size": 5e8,
    }
    assert theirs["train_batch_size"] == "auto"  # what the user wrote is left as it is


def test_contradictions_are_listed_all_at_once():
    check_deepspeed(
        config(
            deepspeed={"scheduler": {"params": {"warmup_num_steps": 0, "warmup_max_lr": "auto"}}}
        ),
        2,
    )
    theirs = {"type": "AdamW", "params": {"lr": 1e-6, "weight_decay": 0.1}}
    keys = {
        "train_batch_size": 64,
        "gradient_clipping": 0.5,
        "optimizer": theirs,
        "fp16": {"enabled": True},
    }
    *found, lr, decay, half = problems(keys)
    assert "optimizer.params.weight_decay: 0.1, but weight_decay is 0 in the run;" in decay
    assert "optimizer.params.lr: 1e-06, but learning_rate is 0.0" in lr
    assert (
        "train_batch_size: 64, but micro_batch_size x gradient_accumulation_steps x processes are 4"
        " x 2 x 2" in found[0]
    )
    assert "max_grad_norm is 1" in found[1]
    assert "fp16.enabled: true, but fp16 is false in the run" in half


@pytest.mark.parametrize(
    ("deepspeed", "words"),
    [
        (
            {"optimizer": {"type": "Lion"}},
            "optimizer.type: expected one of adam, adamw, got 'Lion'",
        ),
        ({"optimizer": {"params": {"betas": [0.9, 0.95]}}}, "adam_beta1, adam_beta2 are"),
        ({"optimizer": {"params": {"eps": 1e-6}}}, "adam_epsilon is 1e-08"),
        ({"optimizer": {"params": {"momentum": 0.9}}}, "optimizer.params.momentum: unknown key"),
        (
            {"scheduler": {"type": "WarmupLR"}},
            "scheduler.type: 'WarmupLR', but lr_scheduler is cosine",
        ),
        ({"scheduler": {"params": {"total_num_steps": 9}}}, "max_steps is null"),
        ({"fp16": {"enabled": True}}, "fp16 is false in the run"),
        ({"bf16": {"enabled": True}}, "bf16 is 'auto' in the run"),
        (
            {"bf16": {"check_grad_overflow": False}},
            "bf16.check_grad_overflow: unknown key, or one that is not used here; remove it",
        ),
        (
            {"zero_allow_untested_optimizer": False},
            "zero_allow_untested_optimizer: false, but it is true here",
        ),
        (
            {"zero_force_ds_cpu_optimizer": True},
            "zero_force_ds_cpu_optimizer: true, but it is false here",
        ),
        (
            {"gradient_allreduce_op": "sum"},
            "gradient_allreduce_op: unknown key, or one that is not",
        ),
        ({"pipeline": {"stages": 2}}, "pipeline: unknown key, or one that is not used here"),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, "gradient_checkpointing: true"),
        ({"zero_optimisation": {"stage": 2}}, "did you mean zero_optimization?"),
        (
            {"zero_optimization": {"overlap_com": True}},
            "did you mean zero_optimization.overlap_comm",
        ),
        (
            {"zero_optimization": {"overlap_comm": 3}},
            "overlap_comm: Input should be a valid boolean",
        ),
        ({"zero_optimization": {"cpu_offload": True}}, "write offload_optimizer"),
        ({"steps_per_print": "often"}, "steps_per_print: expected a number"),
    ],
)
def test_what_is_not_used_is_refused(deepspeed, words):
    (found,) = problems(deepspeed)
    assert words in found


def test_what_agrees_is_accepted_and_the_rest_is_passed_on():
    same = {
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "5e-4", "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_num_steps": 7, "warmup_min_lr": 0, "warmup_type": "linear"},
        },
        "fp16": {"enabled": False, "loss_scale_window": 1000},
        "amp": {"enabled": False},
        "autotuning": {},
        "activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 5,
        "communication_data_type": "fp32",
        "zero_optimization": {"stage": 2, "overlap_comm": True},
        "comms_logger": None,
    }
    cfg = config(
        deepspeed=same, adam_beta2=0.95, lr_scheduler="constant_with_warmup", warmup_steps=7
    )
    check_deepspeed(cfg, 2)
    whole = engine_config(cfg, 2, 64)
    assert whole["steps_per_print"] == 5
    assert whole["communication_data_type"] == "fp32"
    assert whole["zero_optimization"]["overlap_comm"] is True
    assert not {"amp", "optimizer", "scheduler", "fp16", "comms_logger"} & set(whole)


def test_a_run_in_float16_takes_files_that_turn_bfloat16_off():
    theirs = {"fp16": {"enabled": True}, "bf16": {"enabled": False}}
    check_deepspeed(config(fp16=True, deepspeed=theirs), 2)
    (found,) = problems({"bf16": {"enabled": True}}, fp16=True)
    assert "bf16.enabled: true, but bf16 is false in the run" in found


def test_problems_do_not_hide_each_other():
    found = problems({"zero_optimization": 3, "optimizer": {"type": "Lion"}, "unknown": 1})
    assert len(found) == 3


def test_what_can_not_work_is_refused():
    (found,) = problems({"zero_optimization": {"stage": 3}}, load_in_4bit=True)
    assert "stage 2" in found
    (found,) = problems({"zero_optimization": {"stage": 3}}, torch_compile=True)
    assert "stage 3 gathers weights while layers run" in found
    check_deepspeed(config(deepspeed={"zero_optimization": {"stage": 2}}, torch_compile=True), 2)
    (found,) = problems({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}})
    assert "offload_param" in found


@pytest.mark.parametrize(
    ("deepspeed", "section"),
    [
        ({"zero_optimization": 3}, "zero_optimization: expected a mapping, got 3"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": "cpu"}},
            "zero_optimization.offload_optimizer: expected",
        ),
        ({"fp16": True}, "fp16: expected a mapping, got True"),
    ],
)
def test_sections_that_are_no_mappings_are_named(deepspeed, section):
    (found,) = problems(deepspeed)
    assert found.startswith(f"deepspeed: {section}")


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"flops_profiler": {"enabled": True, "depth": 1}}, "flops_profiler.depth: unknown key"),
        ({"flops_profiler": {"enabled": "yes"}}, "flops_profiler.enabled: expected true or false"),
        ({"comms_logger": {"verbos": True}}, "did you mean comms_logger.verbose?"),
        ({"timers": {"speed": {}}}, "timers.speed: unknown key"),
        ({"timers": {"throughput": {"sync": True}}}, "timers.throughput.sync: unknown key"),
        (
            {"data_types": {"grad_accum_dtype": "fp99"}},
            "expected one of fp32, fp16, bf16, got 'fp99'",
        ),
    ],
)
def test_entries_of_sections_that_are_passed_on_are_checked(section, problem):
    (found,) = problems(section)
    assert problem in found


def test_entries_that_deepspeed_reads_are_passed_on():
    sections = {
        "flops_profiler": {"enabled": True, "profile_step": 2, "output_file": "flops.txt"},
        "comms_logger": {"enabled": True, "prof_ops": ["all_reduce"]},
        "timers": {"throughput": {"enabled": False}},
        "data_types": {"grad_accum_dtype": "fp32", "keep_in_fp32_modules": "auto"},
    }
    check_deepspeed(config(deepspeed=sections), 2)


@pytest.mark.parametrize("kind", ["offload_optimizer", "offload_param"])
def test_each_kind_of_offloading_has_the_keys_that_deepspeed_reads(kind):
    from deepspeed.runtime.zero import offload_config

    model = {
        "offload_optimizer": offload_config.DeepSpeedZeroOffloadOptimizerConfig,
        "offload_param": offload_config.DeepSpeedZeroOffloadParamConfig,
    }[kind]
    values = {
        name: None if field.default is None else getattr(field.default, "value", field.default)
        for name, field in model.model_fields.items()
    }
    check_deepspeed(config(deepspeed={"zero_optimization": {"stage": 3, kind: values}}), 2)
    (problem,) = problems({"zero_optimization": {"stage": 3, kind: {"pin": True}}})
    assert f"zero_optimization.{kind}.pin: unknown key" in problem


def test_entries_of_offloading_may_be_left_to_deepspeed():
    zero = {"stage": 3, "offload_param": {"device": "auto", "buffer_count": "auto"}}
    check_zero(check_deepspeed(config(deepspeed={"zero_optimization": zero}), 2))


@pytest.mark.parametrize(
    "entry", [{"ratio": 0.3}, {"super_offload": True}, {"cpuadam_cores_perc": 0.5}]
)
def test_what_needs_deepspeeds_own_adam_says_so(entry):
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu", **entry}}
    found = problems({"zero_optimization": zero})
    assert f"{next(iter(entry))}: " in found[0]


def test_a_number_of_hundreds_of_digits_is_refused():
    optimizer = {"type": "AdamW", "params": {"lr": 10**400}}
    (problem,) = problems({"optimizer": optimizer})
    assert "learning_rate is" in problem


# Reading and completing


def test_zero_3_loads_weights_in_their_dtype():
    cfg = config(deepspeed={"zero_optimization": {"stage": 3}})
    complete = engine_config(cfg, 2, hidden_size=1)
    assert complete.items() >= {"train_batch_size": 16}.items()
    assert loading_config(cfg, 2, "bfloat16") == {**complete, "bf16": {"enabled": True}}
    assert loading_config(cfg, 2, "float32") == complete
    assert loading_config(cfg, 1, "float32") is None
    assert (
        loading_config(config(deepspeed={"zero_optimization": {"stage": 2}}), 2, "float32") is None
    )


def test_a_name_twice_in_the_file_is_refused(tmp_path):
    (tmp_path / "a.json").write_text('{"steps_per_print": 1, "steps_per_print": 2}')
    with pytest.raises(ConfigError, match=r"steps_per_print. occurs twice"):
        check_deepspeed(config(deepspeed=str(tmp_path / "a.json")), 1)


def test_files_that_can_not_be_used_are_named(tmp_path):
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "deep.json").write_text('{"a":' * 5000)
    (tmp_path / "b.json").write_text('{"zero_optimization": {"stage": 4}}')
    for name, words in {
        "absent.json": "no such file",
        "a.json": "JSON",
        "b.json": "stage: expected one of 0, 1, 2, 3, got 4",
        "deep.json": "nested too deeply",
    }.items():
        with pytest.raises(ConfigError, match=words):
            check_deepspeed(config(deepspeed=str(tmp_path / name)), 1)
