"""What a run does beside its steps: the order of data, logs, evaluations, checkpoints, early
stopping, bad numbers, stored states, and its directory.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import medusa_train
from tests.behaviour.conftest import RunOf, document
from tests.behaviour.seams import encode
from tests.behaviour.world import (
    make_chats,
    metrics,
    read_json,
    read_lines,
    tensors,
    train,
    training_keys,
    write_lines,
)


@pytest.fixture
def keys(model: Path, chats: Path, tmp_path: Path) -> dict[str, Any]:
    """Keys of a run of two steps in the test's directory."""
    return training_keys(model, chats, tmp_path / "run", medusa_num_heads=2)


def token_counts(run: Path) -> list[int]:
    """Return how many tokens each step read."""
    totals = [record["tokens"] for record in metrics(run)]
    return [after - before for before, after in zip([0, *totals], totals, strict=False)]


def without_times(run: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in record.items() if key not in ("time", "tokens_per_s")}
        for record in read_lines(run / "metrics.jsonl")
    ]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return tensors(run / "heads" / "medusa_lm_head.safetensors")


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    assert set(first) == set(second)
    return all(torch.equal(first[name], second[name]) for name in first)


# Data order


def test_every_epoch_has_each_chat_once_in_an_order_of_its_own(
    keys: dict[str, Any], chats: Path, tokenizer: Any, tmp_path: Path
) -> None:
    one_by_one = {**keys, "micro_batch_size": 1, "max_steps": None, "num_epochs": 3}
    train(**one_by_one).ok()
    train(**one_by_one | {"output_dir": tmp_path / "again"}).ok()
    train(**one_by_one | {"output_dir": tmp_path / "other", "seed": 5}).ok()
    lengths = Counter(len(document(r["messages"], tokenizer).tokens) for r in read_lines(chats))
    counts = token_counts(tmp_path / "run")
    epochs = [tuple(counts[start : start + 6]) for start in (0, 6, 12)]
    assert [Counter(epoch) for epoch in epochs] == [lengths] * 3
    assert len(set(epochs)) > 1
    assert token_counts(tmp_path / "again") == counts
    assert token_counts(tmp_path / "other") != counts
    assert same(weights(tmp_path / "run"), weights(tmp_path / "again"))


def test_steps_epochs_and_fractions(keys: dict[str, Any], tmp_path: Path) -> None:
    """Six chats, two a batch, two batches a step: 1.5 steps an epoch."""
    keys |= {"micro_batch_size": 2, "gradient_accumulation_steps": 2}
    keys |= {"max_steps": None, "num_epochs": 2.5, "save_steps": 0.5, "save_total_limit": 9}
    train(**keys).ok()
    records = metrics(tmp_path / "run")
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert [record["epoch"] for record in records] == pytest.approx(
        [2 / 3, 4 / 3, 2, 8 / 3], abs=1e-4
    )
    assert checkpoints(tmp_path / "run") == {"step-2", "step-4"}


def checkpoints(run: Path) -> set[str]:
    return {path.name for path in (run / "checkpoints").iterdir() if path.name[0] != "."}


def test_logs_are_means_over_their_steps(keys: dict[str, Any], tmp_path: Path) -> None:
    keys |= {"micro_batch_size": 2, "max_steps": 5}
    train(**keys).ok()
    train(**keys | {"output_dir": tmp_path / "two", "logging_steps": 2}).ok()
    single, pairs = metrics(tmp_path / "run"), metrics(tmp_path / "two")
    assert [record["step"] for record in pairs] == [2, 4, 5]
    for record, window in zip(pairs, (single[:2], single[2:4], single[4:]), strict=True):
        for name in ("loss", "grad_norm"):
            mean = sum(step[name] for step in window) / len(window)
            assert record[name] == pytest.approx(mean, rel=1e-6)
        assert record["lr"] == window[-1]["lr"]
        assert record["tokens"] == window[-1]["tokens"]


def test_logging_of_accuracies(keys: dict[str, Any], tmp_path: Path) -> None:
    train(**keys, medusa_logging=True).ok()
    for record in metrics(tmp_path / "run"):
        assert [len(top) for top in record["head_top"]] == [10, 10]
        assert all(top == sorted(top) for top in record["head_top"])


# Evaluations, checkpoints, early stopping


def test_when_a_run_evaluates_and_saves(
    keys: dict[str, Any], held_out: Path, tmp_path: Path
) -> None:
    keys |= {"max_steps": 7, "val_set_size": None, "test_datasets": [{"path": str(held_out)}]}
    keys |= {"eval_steps": 3, "save_steps": 2, "save_total_limit": 2}
    out = train(**keys).ok()
    assert [record["step"] for record in metrics(tmp_path / "run", "eval")] == [3, 6, 7]
    evaluations = metrics(tmp_path / "run", "eval")
    best = min(evaluations, key=lambda record: record["objective"])
    lowest = [min(e["objective"] for e in evaluations[: n + 1]) for n in range(len(evaluations))]
    assert [e["best"] for e in evaluations] == [
        e["objective"] == low for e, low in zip(evaluations, lowest, strict=True)
    ]
    assert checkpoints(tmp_path / "run") == {"step-6", "step-7", f"best-{best['step']}"}
    out.says(f"{evaluations[-1]['objective']:.4f}")


def test_a_run_stops_early_and_keeps_its_best_weights(
    keys: dict[str, Any], held_out: Path, tmp_path: Path
) -> None:
    keys |= {"max_steps": 30, "val_set_size": None, "test_datasets": [{"path": str(held_out)}]}
    keys |= {"learning_rate": 0.3, "eval_steps": 1, "early_stopping_patience": 3}
    train(**keys).ok().says("stopped early")
    evaluations = metrics(tmp_path / "run", "eval")
    objectives = [record["objective"] for record in evaluations]
    best = objectives.index(min(objectives))
    assert len(objectives) == best + 1 + 3 < 30
    until_best = {**keys, "output_dir": tmp_path / "best", "early_stopping_patience": None}
    until_best |= {"lr_scheduler": "constant", "max_steps": best + 1}
    train(**keys | {"output_dir": tmp_path / "constant", "lr_scheduler": "constant"}).ok()
    objectives = [record["objective"] for record in metrics(tmp_path / "constant", "eval")]
    best = objectives.index(min(objectives))
    train(**until_best | {"max_steps": best + 1}).ok()
    assert same(weights(tmp_path / "constant"), weights(tmp_path / "best"))


def test_patience_begins_again_after_each_best_evaluation(
    model: Path, chats: Path, held_out: Path, tmp_path: Path
) -> None:
    keys = training_keys(model, chats, tmp_path / "run", learning_rate=0.03, micro_batch_size=1)
    keys |= {"max_steps": 24, "val_set_size": None, "test_datasets": [{"path": str(held_out)}]}
    train(**keys | {"eval_steps": 1, "early_stopping_patience": 3}).ok().says("stopped early")
    is_best = [record["best"] for record in metrics(tmp_path / "run", "eval")]
    assert is_best[-4:] == [True, False, False, False]
    assert False in is_best[:-4]  # there was no improvement before, and then one


def test_held_out_chats_are_none_of_those_trained_on(
    model: Path, tokenizer: Any, tmp_path: Path
) -> None:
    """A share of the chats by content; equal chats are on the same side, in any order of files."""
    records = [{"messages": chat} for chat in make_chats(20, seed=4, turns=1)]
    repeated = [*records, records[0], records[0]]
    counts = set()
    for name, data in (("a", repeated), ("b", repeated[::-1])):
        path = write_lines(tmp_path / f"{name}.jsonl", data)
        keys = training_keys(model, path, tmp_path / name, micro_batch_size=1, medusa_num_heads=1)
        keys |= {"val_set_size": 0.3, "max_steps": None, "num_epochs": 1}
        shown = train(**keys).ok()
        shown.says("2 of 22 conversations equal an earlier one")
        (evaluation,) = metrics(tmp_path / name, "eval")
        counts.add((evaluation["targets"][0], metrics(tmp_path / name)[-1]["tokens"]))
        trained = len(metrics(tmp_path / name))
        assert trained in (14, 15, 16)
        shown.says(f"{trained} conversations for training", f"{22 - trained} conversations for")
    assert len(counts) == 1


def test_another_seed_holds_out_other_chats(model: Path, tmp_path: Path) -> None:
    records = [{"messages": chat} for chat in make_chats(20, seed=4, turns=1)]
    data = [{"path": str(write_lines(tmp_path / "chats.jsonl", records))}]
    settings = {"base_model": str(model), "datasets": data, "val_set_size": 0.3}
    first, again, other = (encode(**settings, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert len(first) == len(other)
    assert first != other


def test_chats_of_test_datasets_are_not_trained_on(
    keys: dict[str, Any], chats: Path, tmp_path: Path
) -> None:
    some = write_lines(tmp_path / "some.jsonl", read_lines(chats)[:2])
    keys |= {"val_set_size": None, "test_datasets": [{"path": str(some)}]}
    train(**keys).ok().says("2 conversations not trained on", "4 conversations for training")


# Bad numbers


@pytest.fixture
def broken_model(model: Path, tmp_path: Path) -> Path:
    """The model with an embedding that is no number."""
    directory = tmp_path / "broken"
    directory.mkdir()
    for path in model.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    state = load_file(directory / "model.safetensors")
    state["model.embed_tokens.weight"][ord("~") - 33 + 5] = torch.nan
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_a_loss_that_is_no_number_stops_the_run_and_names_the_record(
    broken_model: Path, keys: dict[str, Any], chats: Path, tokenizer: Any, tmp_path: Path
) -> None:
    token = ord("~") - 33 + 5
    assert tokenizer("~")["input_ids"] == [token]
    records = [json.dumps(record) for record in read_lines(chats)]
    bad = {"messages": [{"role": "user", "content": "~"}, {"role": "assistant", "content": "one"}]}
    path = write_lines(tmp_path / "bad.jsonl", [*records, bad])
    keys |= {"base_model": broken_model, "datasets": [{"path": str(path)}], "micro_batch_size": 1}
    keys |= {"max_steps": 7}
    train(**keys).fails(1, "bad.jsonl:7", "nan")
    train(**keys, overwrite_output_dir=True, max_nonfinite_steps=1).ok()
    (skipped,) = metrics(tmp_path / "run", "skipped")
    assert [Path(record).name for record in skipped["records"]] == ["bad.jsonl:7"]
    assert len(metrics(tmp_path / "run")) == 6
    assert metrics(tmp_path / "run")[-1]["skipped_steps"] == 1
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "run").values())
    train(**keys | {"max_steps": 14}, overwrite_output_dir=True, max_nonfinite_steps=1).fails(1)


# Stored data and states


def test_stored_hidden_states_change_nothing(
    keys: dict[str, Any], held_out: Path, tmp_path: Path
) -> None:
    keys |= {"micro_batch_size": 1, "max_steps": 14, "eval_steps": 7, "val_set_size": None}
    keys |= {"test_datasets": [{"path": str(held_out)}]}
    train(**keys).ok()
    stored = {"cache_hidden_states": True, "dataset_prepared_path": tmp_path / "prepared"}
    train(**keys | {"output_dir": tmp_path / "stored", **stored}).ok()
    train(**keys | {"output_dir": tmp_path / "again", **stored}).ok()
    for name in ("stored", "again"):
        assert without_times(tmp_path / name) == without_times(tmp_path / "run")
        assert same(weights(tmp_path / name), weights(tmp_path / "run"))
    assert list((tmp_path / "prepared").glob("hidden-states-*"))


def test_states_of_several_layers_are_stored_too(run_of: RunOf, tmp_path: Path) -> None:
    prepared = tmp_path / "prepared"
    for kind in ("eagle3", "kangaroo"):
        plain = run_of(kind)
        stored = run_of(kind, cache_hidden_states=True, dataset_prepared_path=prepared)
        for ours, theirs in zip(metrics(stored), metrics(plain), strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


def test_prepared_data_are_read_again_unless_something_changed(
    keys: dict[str, Any], chats: Path, tmp_path: Path
) -> None:
    keys["dataset_prepared_path"] = tmp_path / "prepared"
    train(**keys).ok()
    first = token_counts(tmp_path / "run")
    stored = {path for path in (tmp_path / "prepared").rglob("*") if path.is_file()}
    train(**keys, overwrite_output_dir=True).ok()
    assert token_counts(tmp_path / "run") == first
    assert {path for path in (tmp_path / "prepared").rglob("*") if path.is_file()} == stored
    train(**keys | {"train_on_inputs": True}, overwrite_output_dir=True).ok()
    assert metrics(tmp_path / "run")[0]["loss"] != 0
    assert {path for path in (tmp_path / "prepared").rglob("*") if path.is_file()} != stored


# The run directory


def test_a_run_directory_holds_what_the_next_command_needs(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    out = train(**keys).ok()
    run = tmp_path / "run"
    names = {path.name for path in run.iterdir() if path.name[0] != "."}
    assert names == {"config.yaml", "heads", "metrics.jsonl", "checkpoints"}
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["base_model"] == str(keys["base_model"])
    assert (config["medusa_num_heads"], config["max_steps"], config["bf16"]) == (2, 2, False)
    assert read_json(run / "heads" / "config.json") == {
        "medusa_num_heads": 2,
        "medusa_num_layers": 1,
        "base_model_name_or_path": str(keys["base_model"]),
    }
    shapes = {name: tuple(tensor.shape) for name, tensor in weights(run).items()}
    assert shapes == {
        **{f"{k}.0.linear.weight": (32, 32) for k in range(2)},
        **{f"{k}.0.linear.bias": (32,) for k in range(2)},
        **{f"{k}.1.weight": (300, 32) for k in range(2)},
    }
    out.says("medusa-eval", str(run))
    again = train(run / "config.yaml", output_dir=tmp_path / "again").ok()
    assert same(weights(run), weights(tmp_path / "again"))
    assert again.code == 0


def test_a_run_is_found_with_its_model_and_data_from_any_directory(
    keys: dict[str, Any],
    model: Path,
    chats: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where they were named from the directory in which it was trained."""
    shutil.copytree(model, tmp_path / "here" / "model")
    shutil.copy(chats, tmp_path / "here" / "chats.jsonl")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    train(**keys | {"base_model": "model", "datasets": [{"path": "chats.jsonl"}]}).ok()
    monkeypatch.chdir(tmp_path / "elsewhere")
    medusa_train.load(tmp_path / "run", dtype="float32")
    train("--resume", tmp_path / "run" / "config.yaml", max_steps=3).ok()


def test_an_existing_run_is_not_written_over(keys: dict[str, Any], tmp_path: Path) -> None:
    train(**keys).ok()
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    train(**keys).fails(2, str(tmp_path / "run"), "overwrite_output_dir")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    (tmp_path / "run" / "notes.txt").write_text("mine")
    train("--overwrite", **keys | {"max_steps": 1}).ok()
    assert len(metrics(tmp_path / "run")) == 1
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"
    assert checkpoints(tmp_path / "run") == {"step-1"}


def test_an_untrained_head_says_what_the_model_says(
    run_of: RunOf, exact_model: Any, documents: Any
) -> None:
    """Before any step each Medusa head has the model's own logits."""
    from tests.behaviour import plain

    run = run_of("medusa", learning_rate=1e-30, max_steps=1)
    draft = plain.PlainDraft.read(run / "heads", exact_model)
    tokens = documents[0][0].tokens
    states = plain.run_model(exact_model, tokens)
    for logits in draft.head_logits(tokens, states):
        torch.testing.assert_close(logits, states.logits, rtol=0, atol=1e-9)


def test_dropout_of_a_draft_acts_in_training_alone(run_of: RunOf) -> None:
    runs = [run_of("hydra", **{"hydra.dropout": p}, max_steps=2) for p in (0.0, 0.5)]
    without, dropped = (metrics(run) for run in runs)
    # the branch of a new draft adds nothing, so that there is nothing to drop in the first step
    assert without[0]["loss"] == pytest.approx(dropped[0]["loss"], rel=1e-6)
    assert without[1]["loss"] != dropped[1]["loss"]


def test_half_precision_on_a_cpu(keys: dict[str, Any], tmp_path: Path) -> None:
    train(**keys).ok()
    train(**keys | {"output_dir": tmp_path / "half", "bf16": True}).ok().says("bfloat16")
    ours, theirs = metrics(tmp_path / "half")[0], metrics(tmp_path / "run")[0]
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.03)
    assert ours["loss"] != theirs["loss"]
    assert {tensor.dtype for tensor in weights(tmp_path / "half").values()} == {torch.bfloat16}


def test_an_optimizer_that_needs_a_gpu_is_replaced_with_a_line(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    train(**keys).ok()
    other = train(**keys | {"output_dir": tmp_path / "other", "optimizer": "paged_adamw_8bit"})
    other.ok().says("paged_adamw_8bit", "adamw_torch")
    assert same(weights(tmp_path / "run"), weights(tmp_path / "other"))


def test_exports_after_training(keys: dict[str, Any], tmp_path: Path) -> None:
    train(**keys, export=["vllm", "tgi"]).ok()
    exports = tmp_path / "run" / "export"
    assert {path.name for path in exports.iterdir()} == {"vllm", "tgi"}
    assert (exports / "vllm" / "model.safetensors").is_file()


def test_tensorboard_gets_what_the_log_gets(keys: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(**keys, use_tensorboard=True).ok()
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    (loss,) = [tag for tag in events.Tags()["scalars"] if tag.endswith("/loss")]
    logged = [record["loss"] for record in metrics(tmp_path / "run")]
    assert [event.value for event in events.Scalars(loss)] == pytest.approx(logged)
