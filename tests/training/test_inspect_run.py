"""The page of `--inspect`: from a directory that holds no weights at all."""

import json
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer
from typer.testing import CliRunner

from medusa_train.cli.train import app, take_tokens
from medusa_train.config.load import dump_config
from medusa_train.config.paths import PROJECT_ROOT
from medusa_train.data.batch import Example
from medusa_train.errors import ConfigError
from medusa_train.models import precision
from medusa_train.training.distributed import DistributedContext
from medusa_train.training.estimate import Estimate
from medusa_train.training.inspect_run import (
    CONTEXT,
    SUPERVISED,
    _time_table,
    inspect_run,
    masked_text,
)
from tests.training.conftest import LORA, train


@pytest.fixture
def weightless(target_model_dir, tmp_path):
    """The target model's directory without its weights."""
    where = tmp_path / "weightless"
    shutil.copytree(target_model_dir, where, ignore=shutil.ignore_patterns("*.safetensors"))
    return str(where)


def page(cfg, console):
    results = Console(record=True, width=140, file=console.file)
    assert inspect_run(cfg, console, results) == 0
    return results.export_text()


def rows_of(text):
    return {
        line.split()[0]: " ".join(line.split()[1:]) for line in text.splitlines() if line.strip()
    }


def test_the_mask_in_colour(target_model_dir):
    tokenizer = AutoTokenizer.from_pretrained(target_model_dir)
    tokens = tokenizer("<s><|user|>two red<|assistant|> one five</s>", add_special_tokens=False)[
        "input_ids"
    ]
    learnt = tokens.index(tokenizer.convert_tokens_to_ids("<|assistant|>")) + 1
    example = Example(torch.tensor(tokens), torch.arange(len(tokens)) >= learnt, "", "")
    text = masked_text(example, tokenizer)
    assert text.plain == "<s><|user|>two red<|assistant|>« one five</s>»"
    styles = {text.plain[span.start : span.end]: span.style for span in text.spans}
    assert styles == {"<s><|user|>two red<|assistant|>": CONTEXT, "« one five</s>»": SUPERVISED}
    assert (
        masked_text(example, tokenizer, limit=2).plain
        == f"<s><|user|> ... and {len(tokens) - 2} more tokens"
    )


def test_samples_counts_steps_and_memory_without_weights(make_config, weightless, console):
    text = page(make_config(base_model=weightless, num_epochs=3, max_steps=None), console)
    assert text.count("chats.jsonl:") == 3
    assert text.count("</s>»") >= 3
    rows = rows_of(text)
    assert rows["training"].startswith("32 conversations, 1,")
    assert (
        rows["answers"]
        == "61, of which 0.0% loop and 0.0% are known to be cut off by a length limit"
    )
    assert rows["held"].startswith("out 8 conversations")
    assert rows["rows"].startswith("one conversation each; ")
    assert rows["loss"] == "cross-entropy against the tokens of the data; head k weighted by 0.8^k"
    assert rows["steps"] == "4.0 per epoch (4 x 2 rows each), 12 in all on one device"
    assert rows["memory"].startswith("needed on one device")
    # 3 heads of (32 x 32 + 32 + 300 x 32) numbers
    assert "0.0M parameters trained" in text
    assert f"{3 * (32 * 32 + 32 + 300 * 32) * 4 / 2**10:.1f} KiB" in rows["heads"]


def test_samples_and_counts_are_of_every_data_set(make_config, weightless, console, tmp_path):
    paths = []
    for number, count in enumerate((5, 2)):
        paths.append(tmp_path / f"part{number}.jsonl")
        turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
        lines = [
            json.dumps({"messages": [*turns, {"role": "user", "content": f"w{i}"}, turns[1]]})
            for i in range(count)
        ]
        paths[-1].write_text("\n".join(lines) + "\n")
    cfg = make_config(
        base_model=weightless, datasets=[{"path": str(path)} for path in paths], val_set_size=0
    )
    text = page(cfg, console)
    for path, count in zip(paths, (5, 2), strict=True):
        assert f"{path}:1: " in text  # a sample
        assert re.search(rf"{re.escape(str(path))}: {count} conversations, [\d,]+ tokens", text)


@pytest.mark.parametrize(
    ("keys", "rows", "steps"),
    [
        (
            {"micro_batch_size": 4},
            "one conversation each; 0.0%",
            "125.0 per epoch (4 x 2 rows each)",
        ),
        (
            {"sample_packing": True, "sequence_len": 250},
            "1,024 packed rows of 250 tokens per epoch, 100.0% full",
            "128.0 per epoch (4 x 2 rows each)",
        ),
    ],
    ids=["rows of one conversation", "packed rows"],
)
def test_data_that_do_not_exist_yet_can_be_assumed(
    keys, rows, steps, make_config, weightless, console
):
    """The model has a context of 256 tokens, to which conversations of 1,000 are cut."""
    absent = [{"path": "absent.jsonl"}]
    cfg = make_config(base_model=weightless, datasets=absent, max_steps=None, **keys)
    results = Console(record=True, width=140, file=console.file)
    assert inspect_run(cfg, console, results, tokens=256_000) == 0
    shown = rows_of(results.export_text())
    assert shown["training"].endswith("% supervised: assumed, none are read")
    assert shown["rows"].startswith(rows)
    assert shown["steps"].startswith(steps)
    assert shown["memory"].startswith("needed on one device")


@pytest.mark.parametrize("text", ["60M", "60_000_000", "60,000,000", "0.06B", "60000K"])
def test_tokens_are_written_as_people_write_them(text):
    assert take_tokens(["a.yaml", f"tokens={text}", "seed=1"]) == (["a.yaml", "seed=1"], 60_000_000)
    assert take_tokens(["a.yaml"]) == (["a.yaml"], None)


@pytest.mark.parametrize("text", ["", "many", "0", "1.2.3M", "-5M"])
def test_other_words_for_tokens_are_an_error(text):
    with pytest.raises(ConfigError, match="expected a number such as 60M or 60000000"):
        take_tokens([f"tokens={text}"])


def test_the_command_needs_no_data_with_a_number_of_tokens(make_config, weightless, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        dump_config(make_config(base_model=weightless, datasets=[{"path": "no.jsonl"}]))
    )
    assert CliRunner().invoke(app, [str(path), "--inspect"]).exit_code == 1
    result = CliRunner().invoke(app, [str(path), "--inspect", "tokens=1M"])
    assert result.exit_code == 0, result.output
    assert "needed on one device" in result.output


def test_so_many_devices_are_planned_for_and_checked(make_config, weightless, console):
    cfg = make_config(base_model=weightless, num_epochs=3, max_steps=None, bf16=False)
    results = Console(record=True, width=140, file=console.file)
    assert inspect_run(cfg, console, results, processes=2) == 0
    rows = rows_of(results.export_text())
    assert rows["steps"] == "2.0 per epoch (4 x 2 x 2 rows each), 6 in all on 2 devices"
    zero2 = str(PROJECT_ROOT / "configs" / "deepspeed" / "zero2.json")
    cfg = make_config(base_model=weightless, optimizer="paged_adamw_8bit", deepspeed=zero2)
    with pytest.raises(ConfigError, match=r"8-bit|8bit"):
        inspect_run(cfg, console, results, processes=2)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            {"medusa_self_distillation": True, "adapter": "lora", "medusa_scheduler": "sine_0.5"},
            "KL divergence to the target model without its adapter; plus lambda0, which rises along a"
            " sine over 50% of the run to 0.3, times the heads' cross-entropy",
        ),
        (
            {"medusa_scheduler": "linear"},
            "cross-entropy of the target model against the tokens of the data; plus lambda0, which"
            " rises linearly to 0.3, times the heads' cross-entropy",
        ),
        ({}, "tokens of the data; plus lambda0 = 0.3 times the heads' cross-entropy"),
    ],
)
def test_the_loss_of_joint_training_is_described(keys, expected, make_config):
    cfg = make_config(recipe="medusa2", medusa_heads_coefficient=0.3, **keys)
    assert expected in cfg.describe_loss()
    alone = make_config(recipe="medusa1").describe_loss()
    assert alone.startswith("cross-entropy against the tokens of the data")


def test_the_size_of_cached_hidden_states_is_shown(make_config, weightless, console, tmp_path):
    cached = {"cache_hidden_states": True, "dataset_prepared_path": str(tmp_path / "prepared")}
    text = page(make_config(base_model=weightless, bf16=False, **cached), console)
    assert re.search(r"[\d,]+ tokens x 32 values x 4 bytes: [\d.]+ [KM]iB in", text)


def test_the_time_of_two_stages_is_their_sum(make_config):
    one, two = (SimpleNamespace(operations=count, cfg=make_config()) for count in (5e20, 1e21))
    assert (
        list(_time_table([one, one]).columns[1].cells)[1]
        == list(_time_table([two]).columns[1].cells)[1]
    )


def test_a_rate_says_for_which_recipe_it_was_measured(make_config, weightless, console):
    text = page(make_config(base_model=weightless), console)
    assert (
        "38% of the matrix rate, as measured with Medusa-1 on an H100 at 7B shape: 20,898 tokens/s"
        in text
    )
    text = page(make_config(base_model=weightless, **LORA), console)
    assert (
        "27% of the matrix rate, as measured with Medusa-2 with QLoRA on an H100 at 7B shape"
        in text
    )


def test_what_gradient_checkpointing_costs_and_saves_is_said(make_config, weightless, console):
    cfg = make_config(base_model=weightless, **LORA, gradient_checkpointing=True)
    recomputed = page(cfg, console)
    kept = page(cfg.model_copy(update={"gradient_checkpointing": False}), console)
    needed = rows_of(kept)["memory"].removeprefix("needed on one device ")
    (line,) = [line for line in recomputed.splitlines() if "gradient_checkpointing: false" in line]
    saved, size = line.split("which saves ")[1].split(" of the operations ")
    assert size.strip() == needed
    more, fewer = (float(rows_of(text)["time"].split()[0]) for text in (recomputed, kept))
    assert float(saved.rstrip("%")) == pytest.approx(100 * (1 - fewer / more), abs=2)
    assert "gradient_checkpointing" not in kept


def test_a_gpu_holds_more_than_tensors(make_config, weightless, console, monkeypatch):
    monkeypatch.setattr(DistributedContext, "device", torch.device("cuda"))
    for deepspeed, left in ((None, 1), ({"zero_optimization": {"stage": 2}}, 2)):
        text = page(make_config(base_model=weightless, bf16=False, deepspeed=deepspeed), console)
        assert rows_of(text)["memory"].startswith(f"needed on one device {left}.0")
        assert text.count(", assumed") == left


def test_rows_of_a_template_that_changes_earlier_turns_are_counted(
    make_config, weightless, tmp_path, console
):
    template = tmp_path / "last_answer_marked.jinja"
    template.write_text(
        "{% for m in messages %}{{ '<|' + m.role + '|>' if m.role == 'user' else '<|assistant|>'"
        " }}{{ ' one' if m.role == 'assistant' and loop.last else '' }}{{ m.content + eos_token"
        " }}{% endfor %}{{ '<|assistant|>' if add_generation_prompt else '' }}"
    )
    text = page(
        make_config(base_model=weightless, chat_template=str(template), max_steps=None), console
    )
    described = re.match(r"32 conversations in (\d+) rows, ", rows_of(text)["training"])
    assert described is not None
    assert 32 < int(described[1]) <= 64
    assert re.search(r"data: \d+ conversations became \d+ rows: ", console.file.getvalue())
    assert ", row 2: " in text
    # a later row is shown, too, where the first samples are whole conversations
    one_turn = {
        "conversations": [{"from": "human", "value": "two"}, {"from": "gpt", "value": "red"}]
    }
    records = [one_turn] * 5 + [{"conversations": one_turn["conversations"] * 2}] * 2
    path = tmp_path / "later.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    datasets = [{"path": str(path), "type": "sharegpt"}]
    keys = {
        "datasets": datasets,
        "val_set_size": 0,
        "chat_template": str(template),
        "max_steps": None,
    }
    text = page(
        make_config(base_model=weightless, chat_template_kwargs={"thinking": True}, **keys), console
    )
    assert (
        "note: chat_template_kwargs: not in the chat template: thinking\n"
        in console.file.getvalue()
    )
    assert re.findall(r"later\.jsonl:(\d+)(, row 2)?:", text) == [
        ("1", ""),
        ("2", ""),
        ("3", ""),
        ("6", ", row 2"),
    ]
    assert rows_of(text)["rows"].startswith("one row of a conversation each; ")


def test_the_command_writes_nothing_and_minds_no_earlier_run(make_config, weightless, tmp_path):
    (tmp_path / "run" / "heads").mkdir(parents=True)
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(make_config(base_model=weightless)))
    result = CliRunner().invoke(app, [str(path), "--inspect"])
    assert result.exit_code == 0, result.output
    assert "needed on one device" in result.output
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["heads"]


def test_a_checkpoint_takes_what_a_run_writes(
    make_config, weightless, console, tmp_path, target_model_dir
):
    """Of those that are kept; whole files have headers besides."""
    cfg = make_config(base_model=str(target_model_dir), eval_steps=2, save_steps=2)
    config = AutoConfig.from_pretrained(target_model_dir)
    memory = Estimate(cfg, config).memory(rows=4, width=64, dtype=torch.float32, device="cpu")
    train(cfg, console)
    for name, expected in (("step-6", memory.checkpoint), ("best-6", memory.weights)):
        files = (tmp_path / "run" / "checkpoints" / name).glob("[de]*.safetensors")
        assert (
            sum(
                tensor.nbytes
                for path in files
                for tensor in load_file(path).values()
                if tensor.dim()
            )
            == expected
        )
    assert "2 checkpoints of " in rows_of(page(make_config(base_model=weightless), console))["disk"]
    assert (
        "1 checkpoint of "
        in rows_of(page(make_config(base_model=weightless, save_total_limit=1), console))["disk"]
    )


def test_the_disk_also_holds_a_checkpoint_that_is_written_and_two_evaluations(
    make_config, weightless, console
):
    """The weights are a third of a checkpoint; AdamW's moments are the rest."""
    row = rows_of(page(make_config(base_model=weightless), console))["disk"]
    units = {"KiB": 1, "MiB": 1024}
    sizes = re.findall(r"([\d.]+) (KiB|MiB)", row)
    checkpoint, most = (float(size) * units[unit] for size, unit in sizes)
    assert most == pytest.approx((2 + 1 + 2 / 3) * checkpoint, rel=0.05)


def test_a_dtype_that_memory_forces_is_named(make_config, weightless, console, monkeypatch):
    monkeypatch.setattr(precision, "has_fast_bf16", lambda device: False)
    monkeypatch.setattr(precision.WeightMemory, "fit", lambda self, dtype: dtype == "bfloat16")
    text = page(make_config(base_model=weightless, bf16="auto"), console)
    assert "dtype: bfloat16, since the weights need" in " ".join(text.split())
