import pytest

from medusa_train.errors import BackboneError, CheckpointError, ConfigError, DataError, MedusaError


@pytest.mark.parametrize("kind", [DataError, CheckpointError, BackboneError])
def test_a_failure_exits_1_with_its_message(kind: type[MedusaError]) -> None:
    error = kind("data/x.jsonl:3: no messages")
    assert isinstance(error, MedusaError)
    assert (str(error), error.exit_code) == ("data/x.jsonl:3: no messages", 1)


def test_one_configuration_problem_is_the_whole_message() -> None:
    error = ConfigError("x.yaml:3: seed: expected an integer")
    assert (str(error), error.exit_code) == ("x.yaml:3: seed: expected an integer", 2)


def test_several_configuration_problems_are_counted_and_listed() -> None:
    error = ConfigError(["a: one", "b: two"])
    assert error.problems == ("a: one", "b: two")
    assert str(error) == "2 problems in the configuration:\n  a: one\n  b: two"


def test_a_configuration_error_without_problems_is_a_bug() -> None:
    with pytest.raises(ValueError, match="at least one"):
        ConfigError([])
