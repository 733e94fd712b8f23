"""Configurations as they are written for the Medusa fork of Axolotl: every key with or without a
value, unchanged.
"""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from medusa_train.checkpoint.heads import read_heads
from medusa_train.cli.train import app
from medusa_train.config.load import load_config
from medusa_train.config.schema import TrainConfig
from medusa_train.errors import ConfigError

# What such files hold beside the model, the data and the output directory, in the order of the
# fork's own examples.
COMMON = """
base_model_config: {base}
model_type: LlamaForCausalLM
tokenizer_type: LlamaTokenizer
is_llama_derived_model: true
load_in_8bit: false
strict: false
dataset_prepared_path:
lora_model_dir:
lora_r: 4
lora_alpha: 16
lora_dropout: 0.05
lora_target_modules:
  - gate_proj
  - q_proj
lora_target_linear:
lora_fan_in_fan_out:
lora_modules_to_save:
sequence_len: 256
sample_packing: true
pad_to_sequence_len: true
wandb_project:
wandb_entity:
wandb_watch:
wandb_run_id:
wandb_log_model:
gradient_accumulation_steps: 2
micro_batch_size: 1
num_epochs: 2
max_steps: 2
optimizer: adamw_torch
lr_scheduler: cosine
learning_rate: 0.0005
train_on_inputs: false
group_by_length: false
bf16: false
fp16: false
tf32: false
gradient_checkpointing: true
early_stopping_patience:
resume_from_checkpoint:
local_rank:
logging_steps: 1
xformers_attention:
flash_attention: true
warmup_steps: 1
eval_steps: 2
save_steps:
save_total_limit: 1
debug:
deepspeed:
weight_decay: 0.0
fsdp:
fsdp_config:
special_tokens:
  bos_token: "<s>"
  eos_token: "</s>"
  unk_token: "<unk>"
medusa_num_heads: 2
medusa_num_layers: 1
medusa_heads_coefficient: 0.2
medusa_decay_coefficient: 0.8
medusa_logging: true
medusa_scheduler: constant
medusa_lr_multiplier: 4.0
ddp_find_unused_parameters: true
"""
STAGE_1 = "load_in_4bit: false\nadapter: lora\nmedusa_only_heads: true\n"
STAGE_2 = (
    "load_in_4bit: false\nadapter: lora\nlora_model_dir: {first}\nmedusa_self_distillation: true\n"
)


@pytest.fixture
def write(tmp_path: Path, bare_target_model: Path, chats: Path):  # type: ignore[no-untyped-def]
    """Write a YAML of a stage whose run goes to `name`."""

    def make(stage: str, name: str) -> Path:
        text = (
            f"base_model: {bare_target_model}\ndatasets:\n  - path: {chats}\n    type:"
            " sharegpt\nval_set_size: 0.2\n"
        )
        text += f"output_dir: {tmp_path / name}\n{COMMON}{stage}"
        path = tmp_path / f"{name}.yml"
        path.write_text(
            text.replace("{base}", str(bare_target_model)).replace(
                "{first}", str(tmp_path / "first")
            )
        )
        return path

    return make


def test_both_stages_train_unchanged(write, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Heads alone, then jointly from them; a tokenizer without a template gets Axolotl's for `type:
    sharegpt`.
    """
    first = CliRunner().invoke(app, [str(write(STAGE_1, "first"))])
    assert first.exit_code == 0, first.output
    assert "chat template: vicuna_v1.1" in first.output
    (ignored,) = [
        line for line in first.output.splitlines() if line.startswith("ignored keys (no effect)")
    ]
    for key in (
        "is_llama_derived_model",
        "strict",
        "group_by_length",
        "ddp_find_unused_parameters",
    ):
        assert key in ignored
    assert "not needed: unk_token: <unk>" in " ".join(first.output.split())
    assert "fsdp" not in ignored  # empty: nothing was set
    assert read_heads(tmp_path / "first" / "heads").num_heads == 2
    assert "chat_template: vicuna_v1.1" in (tmp_path / "first" / "config.yaml").read_text()

    second = CliRunner().invoke(app, [str(write(STAGE_2, "second"))])
    assert second.exit_code == 0, second.output
    assert "initializing the heads from" in second.output
    assert (tmp_path / "second" / "adapter" / "adapter_model.safetensors").is_file()
    records = [
        json.loads(line)
        for line in (tmp_path / "second" / "metrics.jsonl").read_text().splitlines()
    ]
    assert any("lm_kl" in record for record in records)


def test_an_empty_key_gives_way_to_the_same_key_with_a_value(tmp_path: Path) -> None:
    """The fork's examples for stage two name lora_model_dir twice, the first time without a value."""
    text = (
        "base_model: m\nlora_model_dir:\ndatasets:\n  - path: a\n    split:\n    split:"
        " b\nlora_model_dir: runs/x\n"
    )
    path = tmp_path / "x.yml"
    for order in (text, text.replace("lora_model_dir:\n", "", 1) + "lora_model_dir:\n"):
        path.write_text(order)
        cfg = load_config(TrainConfig, path)
        assert (cfg.lora_model_dir, cfg.datasets[0].split) == ("runs/x", "b")
    path.write_text(text + "lora_model_dir: runs/y\n")
    with pytest.raises(ConfigError, match="is set twice, on lines 7 and 8"):
        load_config(TrainConfig, path)
