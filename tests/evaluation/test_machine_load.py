"""When a machine is called busy."""

import time
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import pytest

from medusa_train.evaluation.machine_load import OtherProcesses, busy_signs, machine_load

QUIET: dict[str, Any] = {"cores": 4, "other_cores": 0.9, "plain_step_spread": 0.1}


class SystemTimes(NamedTuple):
    """Processor seconds of the whole machine, as psutil gives them."""

    user: float
    system: float
    idle: float
    iowait: float


def test_only_the_time_of_other_processes_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 14 busy seconds in 10, this process used 11 and the others 3; waiting uses none."""
    system = iter([SystemTimes(100.0, 20.0, 500.0, 7.0), SystemTimes(112.0, 22.0, 505.0, 9.0)])
    own = iter([SimpleNamespace(user=30.0, system=5.0), SimpleNamespace(user=40.0, system=6.0)])
    clock = iter([1000.0, 1010.0])
    monkeypatch.setattr(psutil, "cpu_times", lambda: next(system))
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(cpu_times=lambda: next(own)))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    assert OtherProcesses().cores() == 0.3


def test_the_spread_is_of_the_slowest_over_the_fastest() -> None:
    others = OtherProcesses()
    spreads = [
        machine_load(others, seconds)["plain_step_spread"]
        for seconds in ([2.0, 1.0, 1.5], [1.0], [])
    ]
    assert spreads == [1.0, None, None]


@pytest.mark.parametrize(
    ("change", "sign"),
    [
        ({"other_cores": 1.1}, "other processes used 1.1 of 4 cores meanwhile"),
        ({"plain_step_spread": 0.34}, "equal plain steps took up to 34% longer"),
    ],
)
def test_each_sign_of_a_busy_machine_is_named(change: dict[str, float], sign: str) -> None:
    assert busy_signs(**QUIET) == []
    assert busy_signs(**QUIET | change) == [sign]
    assert busy_signs(**QUIET | {"plain_step_spread": None}) == []  # too few were timed
