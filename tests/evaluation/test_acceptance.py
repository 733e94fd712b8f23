import pytest

from medusa_train.evaluation.acceptance import (
    accepted_lengths,
    accuracy_on_answers,
    chain_acceleration_rate,
    ctar,
    node_acceptance,
)
from medusa_train.evaluation.records import TimedAnswer
from medusa_train.inference.ranks import Trace
from medusa_train.trees.tree import Tree

ANSWERS = [TimedAnswer((1,) * 8, 1.0, steps=4, accepted=(3, 0, 0, 1)), TimedAnswer((1,), 1.0)]
# an answer of six tokens, two heads; -1: no guess of rank 9 or better
TRACE = Trace([[0, 1], [0, 0], [-1, 0], [1, 0], [0, -1], [-1, -1]], [2, 2, 2, 2, 1, 0])


def test_accepted_lengths_are_counted_from_none_to_the_most() -> None:
    assert accepted_lengths(ANSWERS) == [2, 1, 0, 1]
    assert accepted_lengths([TimedAnswer((1,), 1.0)]) == []


def test_ctar_is_the_share_of_steps_with_at_least_w_accepted() -> None:
    assert ctar(ANSWERS) == [0.5, 0.25, 0.25]
    assert ctar([]) == []


def test_nodes_count_in_the_steps_that_accept_them() -> None:
    # steps start at 0 (accepts [0], [0, 1]), at 3 (accepts [1], though not [1, 0]) and end there
    tree = Tree.from_paths([(0,), (1,), (0, 1)])
    assert TRACE.walk(tree) == [0, 3]
    assert node_acceptance([TRACE], tree) == [0.5, 0.5, 0.5]
    assert node_acceptance([], tree) is None


def test_the_chain_takes_first_guesses_only() -> None:
    # 0 accepts one, 2 and 3 none, 4 one: five tokens after the first in four steps
    assert chain_acceleration_rate([TRACE]) == pytest.approx(5 / 4)
    assert chain_acceleration_rate([]) is None


def test_accuracy_is_per_head_and_rank() -> None:
    accuracy = accuracy_on_answers([TRACE])
    assert accuracy is not None
    assert accuracy[0][:2] == [3 / 5, 4 / 5]
    assert accuracy_on_answers([]) is None
