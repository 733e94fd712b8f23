"""Steps of a batch with both attentions: the cache stays as it was, and only transformers' copies keys and values."""

from __future__ import annotations

import json
from pathlib import Path

import batch
import pytest
import torch
from shapes import llama_config, random_model

from medusa_train.models.backbone import Backbone

CPU = torch.device("cpu")
SMALL = llama_config(32, 48, 2, 4, 2, 61)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "load", lambda *names: Backbone(random_model(SMALL, torch.float32, CPU), None, "small"))


def test_both_attentions_run_and_only_one_copies(tmp_path: Path) -> None:
    arguments = ["--shapes", "small", "--rows", "3", "--context", "300", "--nodes", "0", "4"]
    arguments += ["--dtypes", "float32", "--seconds", "0.01", "--out", str(tmp_path)]
    assert batch.main(arguments) == 0
    rows = json.loads((tmp_path / "batch.json").read_text())["rows"]
    assert [row["nodes"] for row in rows] == [0, 4]
    assert rows[1]["keys_mb"] == pytest.approx(2 * 2 * 3 * 2 * 300 * 8 * 4 / 1e6)
    stock, ours = rows[1]["allocated_mb"].values()
    assert stock - ours > rows[1]["keys_mb"]  # copies for two query heads each, less the repeated mask
    assert all(ms > 0 for row in rows for ms in row["ms"].values())
    assert "| small | float32 | 3 | 300 | 4 |" in (tmp_path / "batch.md").read_text()


def test_a_step_leaves_the_cache_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = batch.load()
    seen: list[list[int]] = []
    original = backbone.run
    monkeypatch.setattr(
        backbone, "run", lambda *args, **given: (seen.append(given["cache"].lengths), original(*args, **given))[1]
    )
    step = batch.new_step(backbone, 3, 20, batch.likely_tree(4))
    step()
    step()
    assert seen == [[20, 19, 18]] * 2


def test_a_context_shorter_than_the_rows_are_many_is_refused() -> None:
    with pytest.raises(SystemExit):
        batch.main(["--rows", "8", "--context", "4"])
