"""What of a continuation is timed, and when timing ends."""

from collections.abc import Iterator
from typing import Any

import pytest

from medusa_train.inference.generate import Decoder, Step
from medusa_train.tree_search import time_steps as timing
from medusa_train.tree_search.time_steps import QUICK, time_steps
from medusa_train.trees.tree import Tree
from tests.families import random_target_model
from tests.tree_search.test_choose_tree import quiet
from tests.tree_search.test_traces import noisy_heads


def test_after_the_deadline_no_further_round_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    monkeypatch.setattr(timing, "_later_step_ms", lambda *given: counted.append(1) or 2.0)
    target_model = random_target_model("llama")
    for deadline, continuations in ((0.0, 2), (None, 1 + QUICK.rounds)):
        counted.clear()
        options: dict[str, Any] = {"deadline": deadline}
        measured = time_steps(
            target_model,
            noisy_heads(target_model),
            [Tree.chain(1)],
            [1, 2],
            quiet(),
            QUICK,
            **options,
        )
        assert measured == {Tree.chain(1): 2.0}
        assert len(counted) == continuations  # a warm-up and one round in any case


def test_the_first_step_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft reads the prompt in it, once in an answer of any length."""
    clock = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    class Steps(Decoder):
        def stream(self, *args: Any, **options: Any) -> Iterator[Step]:
            for seconds in (100.0, 50.0, *[0.002] * 20):  # prefill, first step, later steps
                clock[0] += seconds
                yield Step([1], 0)

    monkeypatch.setattr(timing, "Decoder", Steps)
    target_model, trees = random_target_model("llama"), [Tree.empty(), Tree.chain(1)]
    measured = time_steps(
        target_model, noisy_heads(target_model), [*trees, Tree.empty()], [1, 2, 3], quiet(), QUICK
    )
    assert measured == pytest.approx(dict.fromkeys(trees, 2.0))
