"""Training costs: steps train, what does not fit is a result, and a case that fails ends no other."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import train
from shared import machine_facts
from train import Case, measure_step

from medusa_train.models.precision import Precision

SMALL = Case("shape1", "ours", tokens=16, heads=2, repeats=1)


@pytest.mark.parametrize("what", ["shape1", "shape2"])
def test_the_small_stand_in_for_7b_is_measured(what: str) -> None:
    if what == "shape2":
        pytest.importorskip("bitsandbytes")
    case = Case(what, "ours", tokens=16, rows=2, heads=2, accumulation=3, repeats=1)
    one = measure_step(case)
    assert one.tokens == 3 * 32
    assert min(one.operations, one.rate, one.estimate) > 0


@pytest.mark.parametrize(("what", "teacher"), [("shape1", 0), ("shape2", 2)])
def test_medusa_2_has_its_teachers_pass(
    what: str, teacher: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "shape2":
        pytest.importorskip("bitsandbytes")
    precision = Precision(torch.device("cpu"), torch.bfloat16)
    cfg, target_model, batch = train.shape_setup(Case(what, "ours", tokens=16, heads=2), precision)
    step = train.Step(cfg, target_model, precision)
    updates, passes = [], []
    run, update = step.student.teacher, step.optimizer.step
    monkeypatch.setattr(step.student, "teacher", lambda *given: passes.append(1) or run(*given))
    monkeypatch.setattr(step.optimizer, "step", lambda: updates.append(1) or update())
    step(batch, 2)
    assert (len(updates), len(passes)) == (1, teacher)


def test_steps_accumulate_as_the_configurations_do() -> None:
    assert train.configured("shape1").gradient_accumulation_steps == 16
    assert train.configured("shape2").gradient_accumulation_steps == 32


def test_parts_name_their_cases() -> None:
    words = ["--parts", "shape7b", "compiled7b", "--sequences", "64"]
    cases = train.cases_of(train.parse_arguments(words))
    assert [case.method for case in cases if case.what == "shape1"] == ["ours", "compiled"]


def test_a_case_that_fails_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(case: Case) -> train.Result:
        if case.method == "compiled":
            raise RuntimeError("case failed with exit code 1")
        return train.Result(True, [0.5], tokens=100, rate=1e12, operations=10)

    monkeypatch.setattr(train, "measure_in_process", measured)
    words = ["--parts", "medusa1_7b", "compiled7b", "packed7b", "--sequences", "64"]
    with pytest.raises(SystemExit, match="case failed with exit code 1"):
        train.main([*words, "--out", str(tmp_path)])
    cases = json.loads((tmp_path / "train.json").read_text())["cases"]
    assert [case["method"] for case in cases] == ["ours", "packed"]


def test_packed_rows_are_whole_documents_and_name_what_computes_them(tmp_path: Path) -> None:
    case = Case("shape1", "packed", tokens=48, rows=2, heads=2, repeats=1)
    lengths = train.document_lengths(48)
    assert (len(lengths), sum(lengths)) == (len(train.DOCUMENTS), 48)
    _, _, batch = train.shape_setup(case, Precision(torch.device("cpu"), torch.bfloat16))
    assert torch.equal(batch.segments[1].unique(return_counts=True)[1], torch.tensor(lengths))
    assert torch.equal(
        batch.positions == 0, batch.segments.diff(prepend=batch.segments[:, :1] - 1) > 0
    )
    one = measure_step(case)
    assert one.attention is not None
    assert one.attention.startswith("attention: ")
    machine = {**machine_facts("train.py", []), "kind": "cpu"}
    train.write_report(tmp_path, machine, {case: one})
    assert f"Packed rows: {one.attention}." in (tmp_path / "train.md").read_text()
    (written,) = json.loads((tmp_path / "train.json").read_text())["cases"]
    assert (written["method"], written["attention"]) == ("packed", one.attention)


@pytest.mark.slow
def test_a_case_runs_in_its_own_process_and_need_not_fit() -> None:
    result = train.measure_in_process(SMALL)
    assert result.fits
    assert result.loss == pytest.approx(measure_step(SMALL).loss, rel=1e-2)  # in bfloat16
    assert not train.measure_in_process(replace(SMALL, tokens=10**12)).fits
