"""When a machine is called busy."""

from dataclasses import replace

import pytest

from medusa_train.evaluation.machine_load import MachineLoad, spread

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
