import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from medusa_train.checkpoint.load_model import LoadedModel
from medusa_train.evaluation.output_equality import (
    compare_answers,
    compare_regenerated_answers,
    compare_timed_answers,
    first_difference,
    logit_gaps,
)
from medusa_train.evaluation.turns import TimedAnswer, Turn, Verdict
from medusa_train.trees.tree import Tree
from tests.evaluation.make_turn import make_turn
from tests.families import random_target_model


class StubTargetModel:
    """Tokens 6 and 9 lead, `margin` apart after a prefix of `at` tokens and 1 apart elsewhere; the
    others are far.
    """

    device = torch.device("cpu")

    def __init__(self, at: int, margin: float) -> None:
        self.at, self.margin = at, margin

    def run(self, tokens: torch.Tensor) -> Any:
        hidden = torch.full((1, tokens.shape[1], 1), 1.0)
        hidden[0, -1] = self.margin if tokens.shape[1] == self.at else 1.0
        return SimpleNamespace(final=hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = torch.full((*hidden.shape[:-1], 12), -5.0)
        logits[..., 6] = hidden[..., 0]
        logits[..., 9] = 0.0
        return logits


PROMPT = (1, 2, 3)
PLAIN = (5, 6, 7)


@pytest.mark.parametrize(
    ("tree", "margin", "ties", "expected"),
    [
        ((5, 6, 7), 1e-9, True, Verdict.EQUAL),
        ((5, 9, 7), 9e-5, True, Verdict.TIE),
        ((5, 9, 7), 2e-4, True, Verdict.DIFFERENT),
        (
            (5, 9, 7),
            -9e-5,
            True,
            Verdict.TIE,
        ),  # an uncached pass may find the tree's token the best
        ((5, 9, 7), -2e-4, True, Verdict.DIFFERENT),
        ((5, 9, 7), 9e-5, False, Verdict.DIFFERENT),
        ((5, 4, 7), 9e-5, True, Verdict.DIFFERENT),  # a near-tie, but of two other tokens
        ((9, 6, 7), 9e-5, True, Verdict.DIFFERENT),  # the tie lies one token later
        (
            (5,),
            9e-5,
            True,
            Verdict.DIFFERENT,
        ),  # one answer ends where the other goes on: no tie does that
    ],
)
def test_verdicts(tree: tuple[int, ...], margin: float, ties: bool, expected: Verdict) -> None:
    target_model: Any = StubTargetModel(at=len(PROMPT) + 1, margin=margin)
    dtype = "float32" if ties else "bfloat16"
    assert compare_answers(target_model, PROMPT, tree, PLAIN, dtype) is expected


def test_logits_are_compared_where_the_token_was_chosen() -> None:
    target_model = random_target_model("llama", dtype=torch.float32)
    logits = target_model.model(input_ids=torch.tensor([[*PROMPT, *PLAIN]])).logits[
        0, len(PROMPT) + 1
    ]
    expected = [float(logits.max() - logits[token]) for token in (4, int(logits.argmax()))]
    assert logit_gaps(target_model, PROMPT, PLAIN[:2], (4, int(logits.argmax()))) == pytest.approx(
        expected, abs=1e-4
    )
    assert expected[0] > 1e-2
    assert expected[1] == 0.0


def record(tree: tuple[int, ...]) -> Turn:
    return make_turn(
        1, "a", 1, PROMPT, TimedAnswer(tree, 1.0), TimedAnswer(PLAIN, 1.0), TimedAnswer(PLAIN, 1.0)
    )


def test_timed_answers_are_compared_without_decoding() -> None:
    records = [record(PLAIN), record((5, 9, 7))]
    target_model: Any = StubTargetModel(at=0, margin=0.0)
    compare_timed_answers(records, target_model, "bfloat16")
    assert [found.exact for found in records] == [
        {"bfloat16": Verdict.EQUAL},
        {"bfloat16": Verdict.DIFFERENT},
    ]


def test_answers_are_generated_again_from_the_same_prompts() -> None:
    from medusa_train.models.drafts.medusa import MedusaDraft

    target_model = random_target_model("llama", dtype=torch.float32)
    subject = LoadedModel(
        target_model,
        MedusaDraft.from_target_model(target_model, num_heads=2),
        Tree.cartesian([3, 2]),
    )
    records = [record((9, 9, 9)), record((8, 8, 8))]
    counted: list[int] = []
    compare_regenerated_answers(
        records, subject, "float32", max_new_tokens=12, on_turn=counted.append
    )
    assert [found.exact["float32"] for found in records] == [Verdict.EQUAL, Verdict.EQUAL]
    assert counted == [24, 24]


@pytest.mark.parametrize(
    ("tick", "seconds", "compared"),
    [
        pytest.param(1.0, 5.0, 30, id="all within a minute"),
        pytest.param(10.0, 50.0, 8, id="at least eight"),
        pytest.param(10.0, 125.0, 12, id="as many as fit"),
        pytest.param(10.0, None, 30, id="all asked for"),
    ],
)
def test_a_long_comparison_takes_as_many_answers_as_fit_into_its_seconds(
    tick: float, seconds: float | None, compared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from medusa_train.models.drafts.medusa import MedusaDraft

    times = itertools.count(0.0, tick)
    clock = SimpleNamespace(monotonic=lambda: next(times))
    monkeypatch.setattr("medusa_train.evaluation.output_equality.time", clock)
    target_model = random_target_model("llama", dtype=torch.float32)
    draft = MedusaDraft.from_target_model(target_model, num_heads=2)
    subject = LoadedModel(target_model, draft, Tree.cartesian([2, 1]))
    records = [record((9, 9, 9)) for _ in range(30)]
    compare_regenerated_answers(
        records, subject, "float32", 2, on_turn=lambda tokens: None, seconds=seconds
    )
    chosen = [bool(found.exact) for found in records]
    assert sum(chosen) == compared
    assert compared == 30 or not all(chosen[:compared])  # at random, not the first


@pytest.mark.parametrize(
    ("first", "second", "place"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 9, 3], 1),
        ([1, 2], [1, 2, 3], 2),
        ([], [], None),
        ([], [5], 0),
    ],
)
def test_first_difference(first: list[int], second: list[int], place: int | None) -> None:
    assert first_difference(first, second) == place
