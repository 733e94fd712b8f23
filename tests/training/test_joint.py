"""Medusa-2: adapters, free layers, the teacher, two stages, and going on after a stop."""

import json
import re

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from medusa_train.checkpoint.load_model import load_for_decoding
from medusa_train.checkpoint.resolve import resolve_model
from medusa_train.config.load import load_config
from medusa_train.config.schema import TrainConfig
from medusa_train.errors import CheckpointError, ConfigError
from medusa_train.inference.decoding_settings import DecodingSettings
from medusa_train.models.precision import Precision
from medusa_train.models.target_states import capture_inputs
from medusa_train.training.target_model_recipe import build_target_model_recipe
from tests.families import random_target_model
from tests.training.conftest import LORA, metrics, train


def train_records(run):
    return [record for record in metrics(run) if "lm_kl" in record and "grad_norm" in record]


def test_lora_and_kl_leave_heads_adapter_and_a_tree(
    make_config, console, tmp_path, target_model_dir
):
    run = tmp_path / "run"
    assert train(make_config(**LORA, calibration_tokens=80), console) == 0
    records = train_records(run)
    assert len(records) == 6
    # B = 0: the target model begins as its teacher, but for the adapter's dropout, which B = 0 hides
    assert records[0]["lm_kl"] == pytest.approx(0.0, abs=1e-6)
    assert records[-1]["lm_kl"] > 1e-6
    assert {"config.yaml", "heads", "adapter", "tree.json"} <= {path.name for path in run.iterdir()}
    evaluations = [
        record for record in metrics(run) if "lm_kl" in record and "grad_norm" not in record
    ]
    assert evaluations
    assert 0 < evaluations[-1]["lm_kl"] < 0.5 * evaluations[-1]["lm_loss"]


def test_in_bfloat16_the_teacher_rounds_as_the_student(make_config, console, tmp_path):
    assert (
        train(
            make_config(**LORA, bf16=True, max_steps=1, logging_steps=1, calibration_tokens=0),
            console,
        )
        == 0
    )
    assert train_records(tmp_path / "run")[0]["lm_kl"] == 0.0


def test_stage_two_starts_from_stage_one(make_config, console, tmp_path):
    train(make_config(output_dir=str(tmp_path / "m1")), console)
    train(
        make_config(**LORA, lora_model_dir=str(tmp_path / "m1"), output_dir=str(tmp_path / "m2")),
        console,
    )
    ends = [record for record in metrics(tmp_path / "m1") if "grad_norm" in record][-1]["loss"]
    begins = train_records(tmp_path / "m2")[0]
    fresh = next(record for record in metrics(tmp_path / "m1") if "grad_norm" in record)["loss"]
    heads = begins["loss"] / 0.2  # lambda0; the KL is 0 in the first step
    assert abs(heads - ends) < abs(heads - fresh)
    assert begins["step"] == 1  # counters start at zero
    with pytest.raises(
        ConfigError, match=r"have medusa_num_heads: 3, the configuration medusa_num_heads: 2"
    ):
        train(make_config(**LORA, medusa_num_heads=2, lora_model_dir=str(tmp_path / "m1"),
                          output_dir=str(tmp_path / "m3")), console)  # fmt: skip


def test_heads_of_a_joint_run_go_nowhere_without_its_adapter_or_model(
    make_config, console, tmp_path
):
    joint, free = str(tmp_path / "joint"), str(tmp_path / "free")
    train(make_config(**LORA, max_steps=1, output_dir=joint), console)
    train(make_config(recipe="medusa2", max_steps=1, output_dir=free), console)
    for keys in ({"recipe": "medusa1"}, {"recipe": "medusa2", "medusa_num_unfreeze_layers": 1}):
        with pytest.raises(ConfigError, match=r"belong to the adapter in .*joint/adapter"):
            train(make_config(**keys, lora_model_dir=joint), console)
    with pytest.raises(ConfigError, match=r"belong to the target model in .*free/model"):
        train(make_config(recipe="medusa1", lora_model_dir=free), console)
    keys = {"lora_model_dir": free, "base_model": f"{free}/model", "max_steps": 1}
    assert train(make_config(**keys, output_dir=str(tmp_path / "on")), console) == 0
    assert train(make_config(lora_model_dir=f"{joint}/heads", max_steps=1), console) == 0


def test_an_adapter_is_trained_on_as_it_was_made(make_config, console, tmp_path):
    joint = str(tmp_path / "joint")
    train(make_config(**LORA, max_steps=1, output_dir=joint), console)
    other = {**LORA, "lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.0}
    differing = r"has lora_r: 4, lora_dropout: 0.2, the configuration lora_r: 8, lora_dropout: 0.0"
    with pytest.raises(ConfigError, match=differing):
        train(make_config(**other, lora_model_dir=joint), console)
    narrow = {**LORA, "lora_target_linear": False, "lora_target_modules": ["q_proj", "v_proj"]}
    with pytest.raises(
        ConfigError, match=r"configuration lora_target_modules: \['q_proj', 'v_proj'\]"
    ):
        train(make_config(**narrow, lora_model_dir=joint), console)
    unsaid = {key: value for key, value in LORA.items() if key not in ("lora_r", "lora_dropout")}
    with pytest.raises(ConfigError, match=r"configuration lora_modules_to_save: \['lm_head'\]"):
        train(
            make_config(**unsaid, lora_model_dir=joint, lora_modules_to_save=["lm_head"]), console
        )
    assert train(make_config(**unsaid, lora_model_dir=joint, max_steps=1), console) == 0
    assert json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())["r"] == 4
    # not its default: it resumes
    assert load_config(TrainConfig, tmp_path / "run" / "config.yaml").lora_r == 4
    keys = {
        **LORA,
        "lora_alpha": 99,
        "max_steps": 2,
        "output_dir": joint,
        "resume_from_checkpoint": "auto",
    }
    assert train(make_config(**keys), console) == 0
    assert (
        "warning: changed since that checkpoint: lora_alpha: was 16, now 99"
        in console.file.getvalue()
    )


def save_adapter(target_model_dir, directory, **settings):
    """Save a new adapter of another program, with these settings of PEFT's LoraConfig."""
    model = AutoModelForCausalLM.from_pretrained(target_model_dir)
    config = peft.LoraConfig(r=4, lora_alpha=16, task_type="CAUSAL_LM", **settings)
    peft.get_peft_model(model, config).save_pretrained(directory)


ALL_LINEAR = {
    "recipe": "medusa2",
    "adapter": "lora",
    "lora_target_linear": True,
    "max_steps": 1,
    "medusa_num_heads": 2,
}
OF_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(
    ("settings", "left_out"),
    [
        (
            {"target_modules": ["q_proj", "v_proj"]},
            "down_proj, gate_proj, k_proj, o_proj, up_proj, lm_head",
        ),
        ({"target_modules": "all-linear"}, "lm_head"),  # PEFT's meaning of it
        ({"target_modules": r".*\.(self_attn|mlp)\..*_proj"}, "lm_head"),
        (
            {"target_modules": [*OF_LAYERS, "lm_head"], "layers_to_transform": [0]},
            "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj",
        ),
        ({"target_modules": [*OF_LAYERS, "lm_head"], "exclude_modules": ["k_proj"]}, "k_proj"),
    ],
    ids=["two of them", "all-linear", "pattern", "one layer", "excluded"],
)
def test_an_adapter_that_lacks_layers_is_not_one_of_every_linear_layer(
    make_config, console, tmp_path, target_model_dir, settings, left_out
):
    save_adapter(target_model_dir, tmp_path / "given", **settings)
    message = re.escape(f"it leaves out {left_out}. Remove lora_target_linear")
    with pytest.raises(ConfigError, match=message):
        train(make_config(**ALL_LINEAR, lora_model_dir=str(tmp_path / "given")), console)


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": [*OF_LAYERS, "lm_head"]},
        {"target_modules": OF_LAYERS, "modules_to_save": ["lm_head"]},
        {"target_modules": OF_LAYERS[:4], "modules_to_save": ["mlp", "lm_head"]},
    ],
    ids=["LoRA", "lm_head in full", "MLPs in full"],
)
def test_an_adapter_of_every_linear_layer_is_trained(
    make_config, console, tmp_path, target_model_dir, settings
):
    save_adapter(target_model_dir, tmp_path / "given", **settings)
    cfg = make_config(**ALL_LINEAR, lora_model_dir=str(tmp_path / "given"))
    assert train(cfg, console) == 0


def test_the_layers_of_the_adapter_to_start_from_stand_in_the_run_s_configuration(
    make_config, console, tmp_path, target_model_dir
):
    settings = {"target_modules": ["v_proj", "q_proj"], "modules_to_save": ["lm_head"]}
    save_adapter(target_model_dir, tmp_path / "given", **settings)
    keys = {**ALL_LINEAR, "lora_target_linear": False, "lora_model_dir": str(tmp_path / "given")}
    assert train(make_config(**keys), console) == 0
    used = load_config(TrainConfig, tmp_path / "run" / "config.yaml")
    assert used.lora_target_modules == ["q_proj", "v_proj"]
    assert used.lora_modules_to_save == ["lm_head"]
    # and the run resumes with it
    overrides = ["resume_from_checkpoint=auto", "max_steps=2"]
    again = load_config(TrainConfig, tmp_path / "run" / "config.yaml", overrides)
    assert train(again, console) == 0
    assert "changed since that checkpoint" not in console.file.getvalue()


def test_an_adapter_of_another_kind_is_refused(make_config, console, tmp_path, target_model_dir):
    model = AutoModelForCausalLM.from_pretrained(target_model_dir)
    config = peft.LoHaConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "given")
    keys = {"recipe": "medusa2", "adapter": "lora", "lora_model_dir": str(tmp_path / "given")}
    with pytest.raises(ConfigError, match="of the type LOHA; only LoRA adapters"):
        train(make_config(**keys), console)


def test_the_best_evaluation_is_that_of_the_whole_objective(make_config, console, tmp_path):
    """With a small lambda0 the heads' loss falls while the target model drifts from its teacher."""
    train(
        make_config(
            **{**LORA, "medusa_heads_coefficient": 0.01, "learning_rate": 3e-2, "warmup_steps": 1},
            eval_steps=1,
        ),
        console,
    )
    found = [record for record in metrics(tmp_path / "run") if record["kind"] == "eval"]
    assert [r["objective"] for r in found] == pytest.approx(
        [r["lm_kl"] + 0.01 * r["loss"] for r in found]
    )
    for name in ("objective", "loss"):
        values = [record[name] for record in found]
        lowest = [all(value < earlier for earlier in values[:i]) for i, value in enumerate(values)]
        assert (lowest == [record["best"] for record in found]) == (name == "objective")


def test_a_stage_one_that_is_not_there_is_said_before_data_are_read(make_config, console, tmp_path):
    cfg = make_config(
        **LORA,
        lora_model_dir=str(tmp_path / "m1"),
        datasets=[{"path": str(tmp_path / "absent.jsonl")}],
    )
    with pytest.raises(CheckpointError, match="holds neither heads nor an adapter"):
        train(cfg, console)


def test_only_the_freed_layers_learn(make_config, console, tmp_path, target_model_dir):
    train(make_config(recipe="medusa2", medusa_num_unfreeze_layers=1), console)
    before = load_file(target_model_dir / "model.safetensors")
    after = load_file(tmp_path / "run" / "model" / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {
        n for n in before if "layers.1." in n or n in ("model.norm.weight", "lm_head.weight")
    }
    # nothing to diverge from is kept
    assert not any("lm_kl" in record for record in metrics(tmp_path / "run"))
    subject = load_for_decoding(resolve_model(str(tmp_path / "run"), None, None), "float32")
    assert torch.equal(subject.target_model.output_embeddings.weight, after["lm_head.weight"])


def test_the_tree_is_fitted_to_the_form_that_decodes(make_config, console, tmp_path):
    """QLoRA decodes merged into dequantized weights, so the first evaluation keeps the tree."""
    pytest.importorskip("bitsandbytes")
    # trained in float32, decoded in bfloat16
    whole = {"lora_modules_to_save": ["lm_head"], "bf16": True}
    quantized = {**LORA, "adapter": "qlora", "load_in_4bit": True, **whole}
    assert train(make_config(**quantized, max_steps=2, calibration_tokens=80), console) == 0
    fitted = DecodingSettings.load(tmp_path / "run" / "tree.json")
    assert fitted is not None
    assert (fitted.quantization, fitted.merged) == (None, True)
    paths = resolve_model(str(tmp_path / "run"), None, None)
    subject = load_for_decoding(paths, fitted.dtype)
    decoding = DecodingSettings.of(subject.target_model)
    assert decoding.differences(fitted) == []
    assert (tmp_path / "run" / "tree_traces.npz").is_file()


def test_without_memory_for_the_merged_weights_the_command_is_named(
    make_config, console, tmp_path, monkeypatch
):
    pytest.importorskip("bitsandbytes")
    monkeypatch.setattr("medusa_train.training.train_stage.free_memory", lambda device: 10)
    quantized = {**LORA, "adapter": "qlora", "load_in_4bit": True}
    assert train(make_config(**quantized, max_steps=1, calibration_tokens=80), console) == 0
    assert not (tmp_path / "run" / "tree.json").exists()
    shown = " ".join(console.file.getvalue().split())
    assert "no tree was chosen: decoding merges the adapter into dequantized weights" in shown
    assert "medusa-eval --calibrate --model" in shown


@pytest.mark.parametrize(("layers", "is_trained"), [(1, False), (0, True)])
def test_a_tied_embedding_is_trained_as_an_input_if_the_whole_model_is(
    layers, is_trained, make_config
):
    target_model = random_target_model("llama-bias-tied", dtype=torch.float32)
    cfg = make_config(recipe="medusa2", medusa_num_unfreeze_layers=layers)
    build_target_model_recipe(cfg, target_model, Precision(torch.device("cpu"), torch.float32))
    with capture_inputs(target_model.layers[-layers]) as captured:  # of the first trained layer
        target_model.model(torch.arange(2, 9)[None])
    assert captured[0].requires_grad == is_trained  # gradients end above frozen layers
