"""What each type of key takes and refuses."""

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from medusa_train.config import types

TAKEN = [
    (types.Float, "1e-3", 0.001),
    (types.Float, "5", 5.0),
    (types.Int, 3, 3),
    (types.Int, "1e3", 1000),
    (types.Int, 4.0, 4),
    (types.Bool, True, True),
    (types.Bool, "False", False),
    (types.Text, "data/tiny", "data/tiny"),
    (types.Text, 123456, "123456"),
    (types.BoolOrAuto, "auto", "auto"),
    (types.Resume, "auto", "latest"),
    (types.Resume, False, None),
    (types.Resume, "runs/x/checkpoints/step-5", "runs/x/checkpoints/step-5"),
    (types.Interval, 20, 20),
    (types.Interval, 0.25, 0.25),
    (types.Interval, "5e1", 50),
    (types.TextList, "q_proj", ["q_proj"]),
    (types.TextOrMapping, {"zero": 1}, {"zero": 1}),
    (types.Schedule, "sine_0.5", "sine_0.5"),
]
REFUSED = [
    (types.Float, "fast", "expected a number, got 'fast'"),
    (types.Float, True, "expected a number, got true"),
    (types.Float, ".nan", "expected a number, got '.nan'"),
    (types.Float, float("inf"), "expected a number, got inf"),
    (types.Float, 10**400, "expected a number, got a number of many digits"),
    (types.Int, 10**20, "expected an integer of 64 bits, got a number of many digits"),
    (types.Int, "1e300", "expected an integer of 64 bits, got '1e300'"),
    (types.Int, True, "YAML reads yes, no, on and off as true and false"),
    (types.Int, "yes", "expected an integer, got 'yes'"),
    (types.Int, 1.5, "expected an integer, got 1.5"),
    (types.Bool, 1, "expected true or false, got 1"),
    (types.Text, " ", "is empty"),
    (types.Text, 1.10, "expected text (put it in quotes), got 1.1"),
    (types.Text, False, "expected text (put it in quotes), got false"),
    (types.BoolOrAuto, "maybe", "expected true, false or auto, got 'maybe'"),
    (types.Interval, 0, "a share of the run below 1, got 0"),
    (types.Interval, 1.5, "got 1.5"),
    (types.TextOrMapping, [1], "got a list"),
    (types.Schedule, "sine_0", "got 'sine_0'"),
    (types.Schedule, "sine_2", "got 'sine_2'"),
]


@pytest.mark.parametrize(("kind", "given", "value"), TAKEN)
def test_taken(kind: Any, given: object, value: object) -> None:
    taken = TypeAdapter(kind).validate_python(given)
    assert (taken, type(taken)) == (value, type(value))


@pytest.mark.parametrize(("kind", "given", "message"), REFUSED)
def test_refused(kind: Any, given: object, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(kind).validate_python(given)
    (problem,) = caught.value.errors()
    assert message in problem["msg"]
    assert problem["loc"] == ()


def test_braces_in_a_value_do_not_break_the_message() -> None:
    with pytest.raises(ValidationError, match=r"got '\{x\}'"):
        TypeAdapter(types.Int).validate_python("{x}")
