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


def test_more_heads_and_wider_vocabularies_take_more_memory(keys: dict[str, Any]) -> None:
    def memory(**changes: Any) -> float:
        shown = train("--inspect", **keys, **changes).ok()
        text = line_of(shown, "memory")
        value, unit = re.findall(r"([\d,.]+) ([KMG]iB)", text)[-1]
        return float(value.replace(",", "")) * {"KiB": 1, "MiB": 1 << 10, "GiB": 1 << 20}[unit]

    few, many = memory(medusa_num_heads=2), memory(medusa_num_heads=30)
    assert many > few
    assert memory(medusa_num_heads=30, medusa_vocab_size=16) < many
    assert memory(medusa_num_heads=30, medusa_share_lm_head=True) < many


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
    assert f"{100 * share:.1f}%" in shown.text


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
