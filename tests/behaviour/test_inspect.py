"""`medusa-train --inspect`: what would be trained and what it would take, without loading weights."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.behaviour.conftest import document
from tests.behaviour.world import (
    Ran,
    make_chats,
    numbers_in,
    read_lines,
    tensors,
    train,
    training_keys,
    write_lines,
)


@pytest.fixture
def keys(model: Path, tmp_path: Path) -> dict[str, Any]:
    """Keys of a run on twenty chats, of a model without weights."""
    base = tmp_path / "model"
    shutil.copytree(model, base)
    (base / "model.safetensors").unlink()
    data = write_lines(tmp_path / "chats.jsonl", [{"messages": c} for c in make_chats(20, seed=6)])
    return training_keys(base, data, tmp_path / "run", max_steps=None, num_epochs=3)


def line_of(shown: Ran, title: str) -> str:
    """Return what stands behind a title of the table, its further lines included."""
    lines = shown.out.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(title))
    found = [lines[start].removeprefix(title)]
    for line in lines[start + 1 :]:
        if not line.startswith(" "):
            break
        found.append(line)
    return " ".join(" ".join(found).split())


def test_numbers_of_the_data_and_steps(
    keys: dict[str, Any], tokenizer: Any, tmp_path: Path
) -> None:
    shown = train("--inspect", **keys).ok()
    documents = [document(r["messages"], tokenizer) for r in read_lines(tmp_path / "chats.jsonl")]
    tokens = sum(len(d.tokens) for d in documents)
    supervised = sum(sum(d.supervised) for d in documents)
    data = line_of(shown, "training")
    assert numbers_in(data)[:2] == [20, tokens]
    assert f"{100 * supervised / tokens:.1f}% supervised" in data
    lengths = sorted(len(d.tokens) for d in documents)
    found = numbers_in(line_of(shown, "lengths"))
    assert found[:2] == [lengths[0], lengths[-1]]
    assert lengths[9] <= found[2] <= lengths[10]
    steps = line_of(shown, "steps")
    assert numbers_in(steps)[0] == 5.0
    assert "15 in all" in steps
    assert "memory" in shown.out
    assert not (tmp_path / "run").exists()


def test_samples_show_their_targets(keys: dict[str, Any], tmp_path: Path) -> None:
    shown = train("--inspect", **keys).ok()
    records = read_lines(tmp_path / "chats.jsonl")
    text = " ".join(shown.out.split())
    seen = 0
    for number, record in enumerate(records, start=1):
        if f"chats.jsonl:{number}:" in text:
            seen += 1
            assert f"«{record['messages'][1]['content']}</s>»" in text
    assert seen


def test_packing_and_several_rows(keys: dict[str, Any]) -> None:
    apart = train("--inspect", **keys).ok()
    packed = train("--inspect", **keys | {"sample_packing": True, "sequence_len": 200}).ok()
    first, second = (numbers_in(line_of(shown, "steps"))[0] for shown in (apart, packed))
    assert second < first
    processes = train("--inspect", "--num-gpus", "2", **keys).ok()
    assert numbers_in(line_of(processes, "steps"))[0] == first / 2


@pytest.mark.parametrize(
    ("written", "tokens"),
    [("900", 900), ("20k", 2e4), ("60_000", 6e4), ("0.3M", 3e5), ("0.0005B", 5e5)],
)
def test_tokens_of_data_that_need_not_exist(
    keys: dict[str, Any], written: str, tokens: float
) -> None:
    """Three epochs of rows of 128 tokens, four in a step."""
    keys["datasets"] = [{"path": "missing.jsonl"}]
    shown = train("--inspect", f"tokens={written}", **keys).ok()
    in_all = re.search(r"([\d,]+) in all", line_of(shown, "steps"))
    assert in_all is not None
    assert int(in_all[1].replace(",", "")) == pytest.approx(3 * tokens / (4 * 128), rel=0.01, abs=4)


def test_memory_of_heads_gradients_and_moments(keys: dict[str, Any], model: Path) -> None:
    """Of each head a layer and a row of lm_head for every token of its vocabulary, in float32."""
    frozen = sum(t.numel() for t in tensors(model / "model.safetensors").values())
    for heads, vocabulary in ((2, 300), (30, 300), (30, 20)):
        changes = {} if vocabulary == 300 else {"medusa_vocab_size": vocabulary}
        shown = train("--inspect", **keys, medusa_num_heads=heads, **changes).ok()
        trained = heads * (32 * 32 + 32 + vocabulary * 32)
        memory = line_of(shown, "memory")
        assert f"heads {in_units(4 * trained)}" in memory
        assert f"gradients {in_units(4 * trained)}" in memory
        assert re.search(rf"optimizer states \S+ {re.escape(in_units(8 * trained))}", memory)
        assert f"frozen {in_units(4 * frozen)}" in memory
        parts = [in_kib(found) for found in re.findall(r"[\d.,]+ [KMG]iB", memory)]
        assert parts[0] == pytest.approx(sum(parts[1:]), rel=0.05)


def in_units(size: float) -> str:
    return f"{size / 1024:.1f} KiB" if size < 1 << 20 else f"{size / (1 << 20):.1f} MiB"


def in_kib(text: str) -> float:
    value, unit = text.split(" ")
    return float(value.replace(",", "")) * {"KiB": 1, "MiB": 1 << 10, "GiB": 1 << 20}[unit]


def test_stored_states_are_counted(keys: dict[str, Any], tokenizer: Any, tmp_path: Path) -> None:
    """Tokens x width x bytes; four times that for EAGLE-3."""
    stored = {"cache_hidden_states": True, "dataset_prepared_path": tmp_path / "prepared"}
    shown = train("--inspect", **keys, **stored).ok()
    tokens = sum(
        len(document(r["messages"], tokenizer).tokens) for r in read_lines(tmp_path / "chats.jsonl")
    )
    assert f"{tokens * 32 * 4 / 1024:.1f} KiB" in shown.text
    eagle = train("--inspect", "draft=eagle3", **keys, **stored).ok()
    assert f"{4 * tokens * 32 * 4 / 1024:.1f} KiB" in eagle.text


def test_a_reduced_vocabulary_covers_a_share_of_the_targets(
    keys: dict[str, Any], tokenizer: Any, tmp_path: Path
) -> None:
    from collections import Counter

    shown = train("--inspect", **keys, medusa_vocab_size=20).ok()
    counts: Counter[int] = Counter()
    for record in read_lines(tmp_path / "chats.jsonl"):
        found = document(record["messages"], tokenizer)
        counts.update(t for t, s in zip(found.tokens, found.supervised, strict=True) if s)
    share = sum(count for _, count in counts.most_common(20)) / counts.total()
    assert f"20 of 300 tokens, covering {100 * share:.2f}%" in shown.text


def test_loops_and_cut_answers_are_counted(keys: dict[str, Any], tmp_path: Path) -> None:
    records = [{"messages": chat} for chat in make_chats(4, turns=1)]
    records[0]["messages"][1]["content"] = "one two three four five six seven eight " * 3
    records[1]["finish_reasons"] = ["length"]  # type: ignore[assignment]
    data = write_lines(tmp_path / "loops.jsonl", records)
    shown = train("--inspect", **keys | {"datasets": [{"path": str(data)}]}).ok()
    answers = line_of(shown, "answers")
    assert numbers_in(answers)[0] == 4
    assert "25.0% loop" in answers
    assert "25.0% are known to be cut off" in answers
