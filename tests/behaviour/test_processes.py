"""Two processes on a CPU against one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.behaviour.world import (
    ROOT,
    make_chats,
    metrics,
    tensors,
    train,
    training_keys,
    write_lines,
)


def test_two_processes_train_what_one_does(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same global batch; losses are means over all of its targets, however they are split."""
    data = write_lines(tmp_path / "chats.jsonl", [{"messages": c} for c in make_chats(9, seed=5)])
    keys: dict[str, Any] = training_keys(model, data, tmp_path / "one", medusa_num_heads=2)
    keys |= {"micro_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 3}
    keys |= {"val_set_size": 0.2, "eval_steps": 3, "adam_epsilon": 1e-3}
    train(**keys).ok()
    keys |= {"output_dir": tmp_path / "two", "gradient_accumulation_steps": 1}
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    train("--num-gpus", "2", **keys).ok()
    ours, theirs = metrics(tmp_path / "two"), metrics(tmp_path / "one")
    for one, two in zip(theirs, ours, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
        assert (two["tokens"], two["head_top1"]) == (one["tokens"], one["head_top1"])
    (first,), (second,) = (metrics(tmp_path / name, "eval") for name in ("one", "two"))
    assert second["head_loss"] == pytest.approx(first["head_loss"], rel=1e-4)
    assert second["targets"] == first["targets"]
    name = "heads/medusa_lm_head.safetensors"
    expected = tensors(tmp_path / "one" / name)
    for key, tensor in tensors(tmp_path / "two" / name).items():
        torch.testing.assert_close(tensor, expected[key], rtol=0, atol=2e-5)
