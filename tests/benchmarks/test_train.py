"""Training costs: both methods compute one loss, steps train, what does not fit is a result, and
the tables add up.
"""

from dataclasses import replace

import pytest
import train
from train import Case, measure_loss, measure_step

SMALL = Case("loss", "naive", tokens=64, vocab=61, width=16, heads=2, repeats=1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("masked", [0.0, 0.5])
def test_both_methods_compute_one_loss(dtype: str, masked: float) -> None:
    naive = measure_loss(replace(SMALL, dtype=dtype, masked=masked))
    ours = measure_loss(replace(SMALL, dtype=dtype, masked=masked, method="ours"))
    assert ours.loss == pytest.approx(naive.loss, rel=1e-6 if dtype == "float32" else 5e-3)
    assert len(ours.seconds) == 1


@pytest.mark.parametrize("what", ["shape1", "shape2"])
def test_the_small_stand_in_for_7b_is_measured(what: str) -> None:
    if what == "shape2":
        pytest.importorskip("bitsandbytes")
    one = measure_step(Case(what, "ours", dtype="bfloat16", tokens=16, rows=2, heads=2, repeats=1))
    assert one.tokens == 32
    assert min(one.operations, one.rate, one.estimate or 0) > 0


def test_parts_name_their_cases() -> None:
    pairs = train.case_pairs(
        train.parse_arguments(["--parts", "shape7b", "compiled7b", "--sequences", "64"])
    )
    assert [case.method for (case,) in pairs if case.what == "shape1"] == ["ours", "compiled"]


@pytest.mark.slow
def test_a_case_runs_in_its_own_process_and_need_not_fit() -> None:
    result = train.measure_in_process(replace(SMALL, method="ours"), 1)
    assert result.fits
    assert result.loss == pytest.approx(measure_loss(SMALL).loss, rel=1e-6)
    assert not train.measure_in_process(replace(SMALL, vocab=10**12), 1).fits
