"""The comparison compares the same: both methods compute one loss, and what does not fit is a result."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import train
import train_step
from decode_floor import Sizes
from train_case import Case, Result
from train_loss import measure_loss, naive_loss
from train_report import Measured, bars, report, shape_table, write_report
from train_shape import measure_shape, needed_operations, nominal_operations
from train_step import Step, measure_joint

from medusa_train.config.schema import TrainConfig
from medusa_train.data.batch import Batch
from medusa_train.data.targets import IGNORE
from medusa_train.models.precision import Precision
from tests.families import random_backbone

SMALL = Case("loss", "naive", tokens=64, vocab=61, width=16, heads=2, repeats=1)
FACTS = {
    "device": "a CPU",
    "cores": 2,
    "threads": 2,
    "python": "3",
    "torch": "2",
    "cuda": None,
    "transformers": "5",
    "command": "train.py",
    "date": "today",
    "load": 0.0,
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("masked", [0.0, 0.5])
def test_both_methods_compute_one_loss(dtype: str, masked: float) -> None:
    naive = measure_loss(replace(SMALL, dtype=dtype, masked=masked))
    ours = measure_loss(replace(SMALL, dtype=dtype, masked=masked, method="ours"))
    assert ours.loss == pytest.approx(naive.loss, rel=1e-6 if dtype == "float32" else 5e-3)
    assert len(ours.seconds) == 1


def test_the_naive_loss_by_hand() -> None:
    logits = [torch.tensor([[[0.0, 0.0], [2.0, 0.0], [0.0, 0.0], [9.0, 9.0]]])] * 2
    labels = torch.tensor([[0, IGNORE, 0, 1]])
    first = (torch.tensor([2.0, 0.0]).log_softmax(0)[0] + torch.tensor(0.5).log()) / 2  # t = 1 -> 0, t = 2 -> 1
    second = (torch.tensor(0.5).log() + torch.tensor([2.0, 0.0]).log_softmax(0)[1]) / 2  # t = 0 -> 0, t = 1 -> 1
    assert naive_loss(logits, labels, [1.0, 0.5]).item() == pytest.approx(-(first + 0.5 * second).item())
    assert naive_loss(logits[:1], labels, [0.5], first=1).item() == pytest.approx(-0.5 * second.item())


@pytest.mark.parametrize("keys", [{}, {"recipe": "medusa2", "adapter": "lora", "lora_dropout": 0.0}])
def test_steps_of_both_methods_train_alike(keys: dict[str, Any]) -> None:
    tokens = torch.randint(2, 61, (2, 12), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(12).expand_as(tokens)
    batch = Batch(tokens, tokens.masked_fill(positions < 4, IGNORE), positions, torch.zeros_like(tokens), [])
    values = {"base_model": "none", "datasets": [{"path": "none"}], "medusa_num_heads": 3, "learning_rate": 0.01}
    cfg = TrainConfig.model_validate({**values, **keys}).resolved()
    losses = []
    for naive in (True, False):
        torch.manual_seed(0)
        backbone = random_backbone("llama", dtype=torch.float32)
        step = Step(cfg, backbone, Precision(torch.device("cpu"), torch.float32), naive)
        losses.append([step(batch) for _ in range(3)])
    assert losses[0][2] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_joint_step_is_measured_beside_its_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    monkeypatch.setattr(train_step, "LLAMA", {**train_step.LLAMA, **small, "num_attention_heads": 4})
    kept, recomputed = (measure_joint(replace(SMALL, what="joint", method=method)) for method in ("kept", "recomputed"))
    assert recomputed.loss == pytest.approx(kept.loss, rel=1e-5)
    assert kept.tokens == 64
    assert kept.estimate is not None
    assert recomputed.estimate is not None
    assert kept.estimate > recomputed.estimate


def test_a_case_runs_in_a_process_of_its_own_and_need_not_fit() -> None:
    result = train.measure_apart(replace(SMALL, method="ours"), 1)
    assert result.fits
    assert result.loss == pytest.approx(measure_loss(SMALL).loss, rel=1e-6)
    assert not train.measure_apart(replace(SMALL, vocab=10**12), 1).fits


def test_cases_that_are_compared_are_measured_in_turn() -> None:
    asked = train.parse_arguments(["--quick", "--dtypes", "float32", "--parts", "loss", "heads"])
    found = list(train.groups(asked))
    assert [[case.method for case in group] for group in found[:2]] == [["naive", "ours"]] * 2
    assert [case.heads for case in found[2]] == [1, 3, 5]
    everything = [case for group in train.groups(train.parse_arguments([])) for case in group]
    assert {(case.tokens, case.vocab) for case in everything if case.what == "loss"} == {
        (tokens, vocab) for tokens in (512, 1024, 2048, 4096) for vocab in (32000, 128000)
    }
    assert {case.what for case in everything} == {"loss", "medusa1", "medusa2", "joint", "shape1", "shape2"}


def test_processes_add_up() -> None:
    one, two = Result(True, [1.0, 3.0], peak=5, accumulating=9), Result(True, [2.0], peak=7, accumulating=8)
    both = one.and_also(two)
    assert (both.median, both.peak, both.accumulating) == (2.0, 7, 9)
    assert not one.and_also(Result(False, [])).fits


def measured(share: float, gain: float) -> list[Measured]:
    case = Case("loss", "naive")
    found = []
    for masked in (0.0, 0.5):
        found.append(Measured(replace(case, masked=masked), Result(True, [10.0], peak=1_000_000_000)))
        ours = Result(True, [10.0 / gain], peak=int(1e9 * share), accumulating=5)
        found.append(Measured(replace(case, method="ours", masked=masked), ours))
    return found


def test_bars_are_kept_or_missed() -> None:
    text = bars(measured(0.1, 1.2))
    assert "- kept: float32, 0% masked: memory 0.100" in text
    assert "- kept: float32, 0% masked: 1.20x faster" in text
    assert "**missed**: float32, 50% masked: 1.20x faster, at least 1.3" in text
    assert "**missed**: float32, 0% masked: memory 0.300" in bars(measured(0.3, 1.4))


def test_memory_over_the_number_of_heads_is_a_bar() -> None:
    """A head's logits take 262 MB at this shape."""
    found = [
        Measured(Case("loss", "ours", heads=heads), Result(True, [1.0], peak=peak * 1_000_000))
        for heads, peak in ((1, 200), (3, 220), (5, 400))
    ]
    assert "**missed**: float32: memory flat in K: 50 MB for a further head, whose logits" in bars(found)
    assert "- kept: float32: memory flat in K: 10 MB for a further head" in bars(found[:2])


def test_the_report_shows_what_does_not_fit(tmp_path: Path) -> None:
    found = [*measured(0.1, 2.0), Measured(Case("loss", "naive", vocab=128000), Result(False, []))]
    found.append(Measured(Case("loss", "ours", vocab=128000), Result(True, [4.0], peak=2_000_000)))
    found.append(
        Measured(Case("joint", "kept"), Result(True, [4.0], peak=3_000_000, total=5_000_000, estimate=6_000_000))
    )
    found.append(
        Measured(Case("joint", "recomputed"), Result(True, [5.0], peak=1_000_000, total=2_000_000, estimate=3))
    )
    text = report(FACTS, found)
    assert "| float32 | 128,000 | 2,048 | 0% | does not fit | 4.00 |  | does not fit | 2 |  | 0 |" in text
    assert "| float32 | kept | 4.00 | 3 | 5 | 6 |" in text
    write_report(tmp_path, FACTS, found)
    assert len(json.loads((tmp_path / "train.json").read_text())["cases"]) == len(found)
    assert (tmp_path / "train.md").read_text() == text


SHAPE = Sizes(layers=2, hidden=3, vocab=5, body=100, norms=15, queries=4, keys=2)


def test_operations_of_a_step_by_hand() -> None:
    head = 2 * (3 * 3 + 3) + 2 * 5 * 3  # two heads: W1, b1 and W2
    attention = 4 * 2 * 4 * 10 // 2  # scores and values, two layers, half of ten positions
    assert needed_operations(SHAPE, 2, 10, learnt=0) == 2 * 100 + attention + 6 * head - 2 * 2 * 9
    assert needed_operations(SHAPE, 2, 10, learnt=7) == 4 * (100 + 15) + 3 * attention + 6 * head + 6 * 7
    assert nominal_operations(SHAPE, 2) == 6 * (100 + 15 + head)


@pytest.mark.parametrize("what", ["shape1", "shape2"])
def test_both_methods_train_the_7b_shape_s_small_stand_in_alike(what: str) -> None:
    if what == "shape2":
        pytest.importorskip("bitsandbytes")
    case = Case(what, "naive", dtype="bfloat16", tokens=16, rows=2, heads=2, repeats=1)
    naive, ours = (measure_shape(replace(case, method=method)) for method in ("naive", "ours"))
    assert ours.loss == pytest.approx(naive.loss, rel=2e-2)
    assert (ours.tokens, ours.shape) == (32, "small")
    assert ours.operations == naive.operations > 0
    assert ours.rate > 0
    assert ours.peak >= 0
    assert ours.estimate == naive.estimate


def test_the_7b_shape_s_table_shows_rates_and_hours() -> None:
    case = Case("shape1", "naive", tokens=2048, rows=2)
    result = Result(True, [2.0], tokens=4096, peak=3_000_000_000, total=30_000_000_000, estimate=29_000_000_000)
    ours = replace(result, operations=10**14, nominal=3 * 10**14, rate=10**14, shape="7B")
    both = [Measured(case, Result(False, [])), Measured(replace(case, method="ours"), ours)]
    text = shape_table(both)
    assert "| Medusa-1, frozen backbone in bfloat16 | 2 x 2,048 | naive | does not fit |" in text
    # 2,048 tokens/s; 120,000 samples of 1,500 tokens are 180 million
    assert "| ours | 2,048 | 0.50 | 1.50 | 30.00 | 3.00 | 29.00 | 24.4 | 33.3 |" in text
    assert "No GPU" not in text
    assert "**No GPU here" in shape_table([both[0], replace(both[1], result=replace(ours, shape="small"))])
    assert shape_table(measured(0.1, 1.2)) == ""
