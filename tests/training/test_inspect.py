"""The page of `--inspect`: from a directory that holds no weights at all."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoTokenizer
from typer.testing import CliRunner

from medusa_train.cli.train import app
from medusa_train.config.load import dump_config
from medusa_train.config.schema import TrainConfig
from medusa_train.data.tokenize import Example
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.models.lora import Adapter, LoraSpec
from medusa_train.training.inspect import _NF4, CONTEXT, SUPERVISED, Memory, estimate_memory, inspect_run, masked_text
from tests.families import random_backbone


@pytest.fixture
def weightless(backbone_dir, tmp_path):
    """The backbone's directory without its weights."""
    where = tmp_path / "weightless"
    shutil.copytree(backbone_dir, where, ignore=shutil.ignore_patterns("*.safetensors"))
    return str(where)


def page(cfg, console):
    results = Console(record=True, width=140, file=console.file)
    assert inspect_run(cfg, console, results) == 0
    return results.export_text()


def rows_of(text):
    return {line.split()[0]: " ".join(line.split()[1:]) for line in text.splitlines() if line.strip()}


def test_the_mask_in_colour(backbone_dir):
    tokenizer = AutoTokenizer.from_pretrained(backbone_dir)
    tokens = tokenizer("<s><|user|>two red<|assistant|> one five</s>", add_special_tokens=False)["input_ids"]
    learnt = tokens.index(tokenizer.convert_tokens_to_ids("<|assistant|>")) + 1
    example = Example(torch.tensor(tokens), torch.arange(len(tokens)) >= learnt, "", "", "")
    text = masked_text(example, tokenizer)
    assert text.plain == "<s><|user|>two red<|assistant|>« one five</s>»"
    styles = {text.plain[span.start : span.end]: span.style for span in text.spans}
    assert styles == {"<s><|user|>two red<|assistant|>": CONTEXT, "« one five</s>»": SUPERVISED}
    cut = masked_text(example, tokenizer, limit=2)
    assert cut.plain == f"<s><|user|> ... and {len(tokens) - 2} more tokens"


def test_samples_counts_steps_and_memory_without_weights(make_config, weightless, console):
    text = page(make_config(base_model=weightless, num_epochs=3, max_steps=None), console)
    assert text.count("chats.jsonl:") == 3
    assert text.count("</s>»") >= 3
    rows = rows_of(text)
    assert rows["training"].startswith("32 conversations, 1,")
    assert rows["held"].startswith("out 8 conversations")
    assert rows["rows"].startswith("one conversation each; ")
    assert rows["steps"] == "4.0 per epoch (4 x 2 rows each), 12 in all on one device"
    assert rows["memory"].startswith("needed on one device")
    # 3 heads of (32 x 32 + 32 + 300 x 32) numbers
    assert "0.0M parameters trained" in text
    assert f"{3 * (32 * 32 + 32 + 300 * 32) * 4 / 2**20:.1f} MiB" in rows["heads"]


def test_packed_rows_are_counted(make_config, weightless, console):
    cfg = make_config(base_model=weightless, sample_packing=True, sequence_len=128, micro_batch_size=2, max_steps=None)
    rows = rows_of(page(cfg, console))
    count, _, fill = rows["rows"].partition(" packed rows of 128 tokens per epoch, ")
    assert 9 <= int(count) <= 11
    assert 90 < float(fill.partition("% full; ")[0]) <= 100
    assert fill.endswith("% of the computed positions are padding")
    assert rows["steps"].startswith(f"{-(-int(count) // 2) / 2:.1f} per epoch")


def test_the_command_writes_nothing_and_minds_no_earlier_run(make_config, weightless, tmp_path):
    (tmp_path / "run" / "heads").mkdir(parents=True)
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(make_config(base_model=weightless)))
    result = CliRunner().invoke(app, [str(path), "--inspect"])
    assert result.exit_code == 0, result.output
    assert "needed on one device" in result.output
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["heads"]


ACTIVATIONS = "activations (estimate)"


def config(**keys: Any) -> TrainConfig:
    values = {"base_model": "none", "datasets": [{"path": "none"}], "medusa_num_heads": 3}
    return TrainConfig.model_validate({**values, **keys}).resolved()


def estimate(family: str = "llama", **keys: Any) -> Memory:
    model_config = random_backbone(family).config
    return estimate_memory(config(**keys), model_config, rows=2, width=64, dtype=torch.bfloat16, device="cpu")


@pytest.mark.parametrize("family", ["llama", "llama-bias-tied", "qwen2", "qwen3", "gemma2"])
@pytest.mark.parametrize("layers", [0, 1, 2])
def test_heads_are_counted_as_they_are(family: str, layers: int) -> None:
    backbone = random_backbone(family)
    heads = sum(p.numel() for p in MedusaDraft.from_backbone(backbone, 3, layers).parameters())
    frozen = sum(p.numel() for p in backbone.model.parameters())
    memory = estimate(family, medusa_num_layers=layers)
    assert (memory.trained, memory.frozen) == (heads, frozen)
    assert memory.parts["backbone, frozen"] == 2 * frozen
    assert memory.parts["heads"] == memory.parts["gradients"] == 4 * heads
    assert memory.total == sum(memory.parts.values())


def test_adamw_holds_the_states_that_are_counted() -> None:
    draft = MedusaDraft.from_backbone(random_backbone("llama"), 3, 1, dtype=torch.float32)
    optimizer = torch.optim.AdamW(draft.parameters())
    for parameter in draft.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    held = sum(t.nbytes for state in optimizer.state.values() for t in state.values() if t.numel() > 1)
    assert estimate(optimizer="adamw_torch").parts["optimizer states (adamw_torch)"] == held
    assert estimate(optimizer="adamw_bnb_8bit").parts["optimizer states (adamw_bnb_8bit)"] < 0.26 * held


@pytest.mark.parametrize(
    ("keys", "targets"),
    [
        ({"lora_target_linear": True}, None),
        ({"lora_target_modules": ["q_proj", "lm_head"]}, ("q_proj", "lm_head")),
    ],
)
def test_an_adapter_is_counted_as_it_is(keys: dict[str, Any], targets: tuple[str, ...] | None) -> None:
    backbone = random_backbone("llama")
    adapter = Adapter.attach(backbone, LoraSpec(r=4, targets=targets))
    real = sum(p.numel() for p in adapter.parameters())
    assert estimate(adapter="lora", lora_r=4, **keys).parts["adapter"] == 4 * real


def test_a_tied_lm_head_gets_no_adapter() -> None:
    backbone = random_backbone("llama-bias-tied")
    real = sum(p.numel() for p in Adapter.attach(backbone, LoraSpec(r=4)).parameters())
    memory = estimate("llama-bias-tied", adapter="lora", lora_r=4, lora_target_linear=True)
    assert memory.parts["adapter"] == 4 * real


def test_nf4_takes_what_bitsandbytes_stores() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    matrix = torch.randn(1024, 1024)
    packed, state = functional.quantize_4bit(matrix, quant_type="nf4", compress_statistics=True)
    stored = packed.nbytes + state.absmax.nbytes + state.state2.absmax.nbytes
    assert stored / matrix.numel() == pytest.approx(_NF4, rel=1e-6)


def test_quantisation_leaves_lm_head_and_embeddings_alone() -> None:
    model = random_backbone("llama").model
    plain = sum(p.numel() for n, p in model.named_parameters() if "proj" not in n)
    linear = sum(p.numel() for n, p in model.named_parameters() if "proj" in n)
    assert estimate(load_in_8bit=True).parts["backbone, frozen"] == 2 * plain + linear
    nf4 = estimate(load_in_4bit=True, adapter="qlora").parts["backbone, frozen"]
    assert nf4 == round(2 * plain + _NF4 * linear)


def test_what_joint_training_trains() -> None:
    model = random_backbone("llama").model
    everything = sum(p.numel() for p in model.parameters())
    last = sum(
        p.numel() for n, p in model.named_parameters() if n.startswith(("model.layers.2.", "model.norm.", "lm_head."))
    )
    heads = estimate().trained
    whole = estimate(recipe="medusa2")
    assert (whole.trained, whole.frozen) == (heads + everything, 0)
    part = estimate(recipe="medusa2", medusa_num_unfreeze_layers=1)
    assert (part.trained, part.frozen) == (heads + last, everything - last)
    assert part.parts["backbone, trained"] == 4 * last
    assert part.parts["backbone, frozen"] == 2 * (everything - last)
    shared = estimate(medusa_share_lm_head=True)
    assert heads - shared.trained == 3 * model.lm_head.weight.numel()


def test_activations_follow_the_settings() -> None:
    def size(**keys: Any) -> int:
        return estimate(**keys).parts[ACTIVATIONS]

    frozen, joint = size(), size(recipe="medusa2")
    assert frozen < size(recipe="medusa2", gradient_checkpointing=True) < joint
    assert size(sample_packing=True) == frozen + 2 * 64 * 64 * 2
    assert size(gradient_accumulation_steps=2) == frozen + 3 * 61 * 32 * 4
    assert size(gradient_accumulation_steps=2, medusa_share_lm_head=True) == size(medusa_share_lm_head=True)
    assert size(medusa_soft_targets=0.5) == frozen + 2 * 64 * 61 * 2


def test_a_reduced_vocabulary_needs_less() -> None:
    whole, part = estimate(), estimate(medusa_vocab_size=20)
    assert whole.trained - part.trained == 3 * 41 * 32
    assert part.total < whole.total
    shared = estimate(medusa_vocab_size=20, medusa_share_lm_head=True)
    assert shared.parts["lm_head rows of the draft vocabulary (shared)"] == 20 * 32 * 2
    taught = estimate(medusa_vocab_size=20, medusa_soft_targets=0.5).parts[ACTIVATIONS]
    assert taught - part.parts[ACTIVATIONS] == 2 * 64 * 20 * 2 + 20 * 32 * 2
    joint, joint_part = (estimate(recipe="medusa2", **keys) for keys in ({}, {"medusa_vocab_size": 20}))
    assert joint.parts[ACTIVATIONS] == joint_part.parts[ACTIVATIONS]  # the backbone's own loss is over all tokens
