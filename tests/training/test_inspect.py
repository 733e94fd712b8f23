"""The page of `--inspect`: from a directory that holds no weights at all."""

import shutil

import pytest
import torch
from rich.console import Console
from transformers import AutoTokenizer
from typer.testing import CliRunner

from medusa_train.cli.train import app
from medusa_train.config.load import dump_config
from medusa_train.data.examples import Example
from medusa_train.training.inspect import GIVEN, LEARNT, inspect_run, masked_text


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
    assert styles == {"<s><|user|>two red<|assistant|>": GIVEN, "« one five</s>»": LEARNT}
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
    assert rows["steps"] == "4.0 an epoch (4 x 2 rows each), 12 in all on one device"
    assert rows["memory"].startswith("needed on one device")
    # 3 heads of (32 x 32 + 32 + 300 x 32) numbers
    assert "0.0M parameters trained" in text
    assert f"{3 * (32 * 32 + 32 + 300 * 32) * 4 / 2**20:.1f} MiB" in rows["heads"]


def test_packed_rows_are_counted(make_config, weightless, console):
    cfg = make_config(base_model=weightless, sample_packing=True, sequence_len=128, micro_batch_size=2, max_steps=None)
    rows = rows_of(page(cfg, console))
    count, _, fill = rows["rows"].partition(" packed rows of 128 tokens an epoch, ")
    assert 9 <= int(count) <= 11
    assert 90 < float(fill.partition("% full; ")[0]) <= 100
    assert fill.endswith("% of what is computed is padding")
    assert rows["steps"].startswith(f"{-(-int(count) // 2) / 2:.1f} an epoch")


def test_the_command_writes_nothing_and_minds_no_earlier_run(make_config, weightless, tmp_path):
    (tmp_path / "run" / "heads").mkdir(parents=True)
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(make_config(base_model=weightless)))
    result = CliRunner().invoke(app, [str(path), "--inspect"])
    assert result.exit_code == 0, result.output
    assert "needed on one device" in result.output
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["heads"]
