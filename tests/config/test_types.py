"""What each type of key takes and refuses."""

from typing import Any

import pytest
from pydantic import TypeAdapter, create_model

from medusa_train.config import types
from medusa_train.config.keys import Config, key
from medusa_train.config.load import load_config
from medusa_train.errors import ConfigError

TAKEN = [
    (types.PositiveFloat, "1e-3", 0.001),
    (types.PositiveFloat, "5", 5.0),
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
    (types.OneOrMore[types.PlainText], "q_proj", ["q_proj"]),
    (types.TextOrMapping, {"zero": 1}, {"zero": 1}),
    (types.Schedule, "sine_0.5", "sine_0.5"),
    (types.VariableName, "MY_KEY", "MY_KEY"),
]
REFUSED = [
    (types.PositiveFloat, "fast", "expected a number, got 'fast'"),
    (types.PositiveFloat, True, "expected a number, got true"),
    (types.NonNegativeFloat, ".nan", "expected a number, got '.nan'"),
    (types.PositiveFloat, float("inf"), "got inf"),
    (types.PositiveFloat, 10**400, "expected a number of 64 bits, got a number of many digits"),
    (types.Int, 10**20, "expected a number of 64 bits, got a number of many digits"),
    (types.Int, "1e300", "expected a number of 64 bits, got '1e300'"),
    (types.Int, True, "YAML reads yes, no, on and off as true and false"),
    (types.Int, "yes", "expected an integer, got 'yes'"),
    (types.Int, 1.5, "expected an integer, got 1.5"),
    (types.Bool, 1, "expected true or false, got 1"),
    (types.Text, " ", "is empty"),
    (types.Text, "https://me:word@host/x", "contains a user name or a password"),
    (types.PlainText, "s3://me@host/x", "contains a user name or a password"),
    (types.Text, 1.10, "expected text (put it in quotes), got 1.1"),
    (types.Text, False, "expected text (put it in quotes), got false"),
    (types.BoolOrAuto, "maybe", "expected true, false or auto, got 'maybe'"),
    (types.Interval, 0, "a share of the run below 1, got 0"),
    (types.Interval, 1.5, "got 1.5"),
    (types.TextOrMapping, [1], "got a list"),
    (types.Schedule, "sine_0", "got 'sine_0'"),
    (types.Schedule, "sine_2", "got 'sine_2'"),
    (types.VariableName, "hf_PlantedKey0123456789", "not the key itself"),
    (types.VariableName, "sk-PlantedKey0123456789", "not the key itself"),
]


@pytest.mark.parametrize(("kind", "given", "value"), TAKEN)
def test_taken(kind: Any, given: object, value: object) -> None:
    taken = TypeAdapter(kind).validate_python(given)
    assert (taken, type(taken)) == (value, type(value))


def test_a_variable_in_lower_case_is_taken_if_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("my_key", "x")
    assert TypeAdapter(types.VariableName).validate_python("my_key") == "my_key"


def problem_of(kind: Any, given: object) -> str:
    """Return the one problem of a configuration whose only key has this type."""
    cls = create_model("Config", __base__=Config, key=(kind, key(None, "a key")))
    with pytest.raises(ConfigError) as caught:
        load_config(cls, None, flags={"key": given})
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize(("kind", "given", "message"), REFUSED)
def test_refused(kind: Any, given: object, message: str) -> None:
    assert message in problem_of(kind, given)


def test_braces_in_a_value_do_not_break_the_message() -> None:
    assert problem_of(types.Int, "{x}") == "--key: expected an integer, got '{x}'"
