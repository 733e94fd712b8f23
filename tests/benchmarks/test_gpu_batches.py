"""Batches of many rows: floors, the whole command without a GPU, and figures that fail alone."""

import json
from pathlib import Path
from typing import Any

import gpu_batches
import pytest
from decode import Shape
from shapes import Rates

RATES = Rates(3.09e12, {"bfloat16": 8e14})
WORDS = ["--shapes", "8B", "--rows", "2", "4", "--context", "40", "--seconds", "0.2"]


@pytest.fixture(autouse=True)
def _short_texts_and_known_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_batches, "PROMPTS", (2, 8))
    monkeypatch.setattr(gpu_batches, "ANSWERS", (2, 9))
    monkeypatch.setattr(gpu_batches, "measure_rates", lambda device, dtypes, seconds: RATES)


def run(out: Path, *more: str) -> tuple[int, dict[str, Any], str]:
    code = gpu_batches.main([*WORDS, *more, "--out", str(out)])
    record = json.loads((out / "gpu_batches.json").read_text())
    return code, record, (out / "gpu_batches.md").read_text()


def test_the_whole_command(tmp_path: Path) -> None:
    code, record, page = run(tmp_path)
    assert code == 0
    assert [row["rows"] for row in record["rows"]] == [2, 2, 2, 4, 4, 4]
    step, greedy, sampled = record["rows"][:3]
    assert step["ms"] > 0
    assert step["over_floor"] == pytest.approx(step["ms"] / step["floor_ms"], rel=0.1)
    assert step["tokens_per_s"] == pytest.approx(2000 / step["ms"], rel=0.01)
    assert step["classes"]["products"][0] > 0
    assert (greedy["answers"], sampled["answers"]) == ("greedy", "sampled")
    assert all(1 <= row["rows_per_step"] <= 2 for row in (greedy, sampled))
    assert "a small stand-in ran" in page


@pytest.mark.parametrize(
    ("name", "rows", "milliseconds"),
    [("1.5B", 64, 1.6), ("1.5B", 128, 2.2), ("8B", 64, 7.6), ("8B", 128, 10.4)],
)
def test_floors_are_those_of_the_page(name: str, rows: int, milliseconds: float) -> None:
    """docs/development/gpu.md has them for 3.09 TB/s; the matrix rate does not bind."""
    page = (Path(__file__).parents[2] / "docs" / "development" / "gpu.md").read_text()
    sizes = Shape.of(name).sizes
    size = 2 * (sizes.read + sizes.cached(1024, rows))
    floor = RATES.floor(size, sizes.step_operations(1, 1024, rows), "bfloat16")
    assert 1000 * floor == pytest.approx(milliseconds, abs=0.05)
    assert f"| {rows} | {milliseconds} | {rows / floor:,.0f}"[:-3] in page


def test_what_fails_is_named_and_the_rest_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = gpu_batches.measure_answers

    def failing(one: Any, rows: int, seconds: float, sampled: bool) -> dict[str, Any]:
        if sampled:
            raise RuntimeError("no such kernel\nmore")
        return measured(one, rows, seconds, sampled)

    monkeypatch.setattr(gpu_batches, "measure_answers", failing)
    code, record, page = run(tmp_path, "--settings", "static")
    assert code == 1
    obstacles = [row.get("obstacle") for row in record["rows"]]
    assert obstacles[:6] == [None, None, "failed: RuntimeError: no such kernel"] * 2
    assert "- small for 8B static 4: failed: RuntimeError: no such kernel" in page
