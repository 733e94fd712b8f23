"""When a machine is called busy."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from medusa_train.evaluation.machine_load import MachineLoad, huge_pages, spread
from medusa_train.io import HUGE_PAGES_VARIABLE

QUIET = MachineLoad(4, 4, 0.9, 4.9, 0.1)


def test_the_spread_is_of_the_slowest_over_the_fastest() -> None:
    assert spread([2.0, 1.0, 1.5]) == 1.0
    assert spread([1.0]) is spread([]) is None


@pytest.mark.parametrize(
    ("change", "sign"),
    [
        ({"load_before": 1.1}, "load average 1.1 on 4 cores before it"),
        ({"load_after": 5.1}, "load average 5.1 on 4 cores at its end, of which 4 its own"),
        ({"plain_step_spread": 0.34}, "equal plain steps took up to 34% longer"),
    ],
)
def test_each_sign_of_a_busy_machine_is_named(change: dict[str, float], sign: str) -> None:
    assert QUIET.signs() == []
    assert replace(QUIET, **change).signs() == [sign]
    assert MachineLoad(4, 4, None, None, None).signs() == []  # nothing is known


@pytest.mark.parametrize(
    ("choices", "asked", "given"),
    [
        ("always [madvise] never", "1", True),
        ("always [madvise] never", "0", False),
        ("[always] madvise never", "0", True),
        ("always madvise [never]", "1", False),
    ],
)
def test_the_system_decides_who_gets_huge_pages(
    choices: str, asked: str, given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HUGE_PAGES_VARIABLE, asked)
    setting = tmp_path / "enabled"
    setting.write_text(choices + "\n")
    assert huge_pages(torch.device("cpu"), setting) is given
    assert huge_pages(torch.device("cpu"), tmp_path / "absent") is None
    assert huge_pages(torch.device("cuda"), setting) is None
