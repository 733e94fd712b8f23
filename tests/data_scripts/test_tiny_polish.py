"""Polishing the tiny backbone: which tokens are unlearned, by how much, and the weights that are kept."""

from dataclasses import replace
from pathlib import Path

import polish
import pytest
import torch
from polish import judge_answer, repeated, signed_losses
from tiny_samples import TINY, chats
from training import Run
from transformers import AutoTokenizer


def test_tokens_that_go_on_a_loop_are_marked() -> None:
    once = list(range(8))
    assert not any(repeated([*once, 99, *once[:7]]))
    assert repeated(once + once) == [False] * 8 + [True] * 8  # 8 tokens twice: the whole second time
    assert not any(repeated(once + once, polish.CODE_SPANS))
    assert repeated(once * 3, polish.CODE_SPANS) == [False] * 8 + [True] * 16  # in code, three times
    assert any(repeated([1, 2, 3, 4, 11, 1, 2, 3, 4, 12, 1, 2, 3, 4, 13, 1, 2, 3, 4, 14, 1, 2, 3, 4]))


def test_unlikelihood_pushes_down_what_was_chosen_where_there_was_a_choice() -> None:
    logits = torch.tensor([[[1.0, 0.0, -1.0], [9.0, 0.0, -1.0], [1.0, 0.0, -1.0], [1.0, 0.0, 2.0]]], requires_grad=True)
    ids = torch.tensor([[2, 0, 0, 1, 2]])
    sign = torch.tensor([[1.0, -1.0, -1.0, 2.0, 0.0]])
    losses = signed_losses(logits, ids, sign)
    p = logits.detach().softmax(-1)[0]
    choice = (1 - p[:2, 0]) ** 2 + 1e-4
    share = choice / choice.sum()
    assert share[0] > 0.99  # the second token was certain
    rest = torch.log1p(-p[:2, 0].clamp(max=1 - 1e-4))
    expected = torch.stack([-share[0] * rest[0], -share[1] * rest[1], -2 * torch.log(p[2, 1]), torch.tensor(0.0)])
    torch.testing.assert_close(losses[0], expected)
    losses.sum().backward()
    assert logits.grad is not None
    assert logits.grad[0, 0, 0] > 0 > logits.grad[0, 2, 1]
    assert not logits.grad[0, 3].any()


def test_answers_are_judged_and_nothing_but_loops_and_hasty_ends_is_unlearned(directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory).backend_tokenizer

    def judged(text: str, is_code: bool) -> tuple[list[float], set[str], list[str]]:
        ids = [*tokenizer.encode(text, add_special_tokens=False).ids, 1]
        weights, kinds = judge_answer(tokenizer, ids, is_code)
        return weights, kinds, [tokenizer.decode([i], skip_special_tokens=False) for i in ids]

    weights, kinds, _ = judged("def f(a):\n    if a = 2:\n        return a", True)
    assert kinds == {"broken_code", "short"}
    assert not any(weights)
    weights, kinds, pieces = judged("One line.\nThe answer is 3.", False)
    assert kinds == {"short"}
    assert weights[pieces.index("\n") + 1] == -polish.SHORT_WEIGHT
    varied = "def f(a):\n" + "".join(f"    {name} = {name}{name}({value})\n" for value, name in enumerate("bcghklm"))
    weights, kinds, _ = judged(varied, True)
    assert kinds == {"good"}
    assert set(weights) == {polish.GOOD_WEIGHT}
    weights, kinds, _ = judged("x = 1\n" * 20, True)
    assert kinds == {"looping"}
    assert min(weights) == -polish.CODE_WEIGHT
    weights, kinds, _ = judged("So it is 3 + 4 = 7 in all.\n" * 9, False)
    assert kinds == {"looping"}
    assert min(weights) == -polish.LOOP_WEIGHT


def test_the_model_settles_beyond_the_mean_of_its_last_states() -> None:
    run = Run(TINY, Path("absent"), torch.device("cpu"))
    weight = run.model.lm_head.weight

    def become(value: float) -> None:
        with torch.no_grad():
            weight.fill_(value)

    polish.settle(run)
    become(1.0)
    run.keep("unpolished")
    become(2.0)
    run.keep("mean", 1.0)
    become(4.0)
    run.keep("mean", 0.5)
    polish.settle(run)
    assert torch.allclose(weight, torch.tensor(1.0 + polish.REACH * 2.0))


def test_a_run_re_planned_in_the_middle_of_its_rounds_still_has_a_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(replace(TINY, polish_rounds=4), Path("absent"), torch.device("cpu"))
    run.step = TINY.steps + 3  # of more rounds, before the second half of which this run stopped
    weight = run.model.lm_head.weight
    before = weight.detach().clone()

    def round_of_polishing(run: Run, *_: object) -> dict[str, float]:
        with torch.no_grad():
            weight.add_(1.0)
        run.step += 1
        return {}

    monkeypatch.setattr(polish, "polish_round", round_of_polishing)
    monkeypatch.setattr(run, "save", lambda: None)
    polish.polish(run, None, lambda number: [], lambda number: chats(12, number), {}, print, 9, lambda model: None)
    assert torch.equal(run.kept["unpolished"]["lm_head.weight"], before)
    assert torch.equal(run.kept["mean"]["lm_head.weight"], before + 1)
    polish.settle(run)
    torch.testing.assert_close(weight.detach(), before + polish.REACH)
