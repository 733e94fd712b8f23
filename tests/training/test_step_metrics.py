"""Sums of a step over micro-batches and processes, and the means of a log line."""

from types import SimpleNamespace

import pytest
import torch

from medusa_train.losses.objective import LMSums
from medusa_train.training.distributed import SINGLE_PROCESS
from medusa_train.training.step_metrics import MicroBatchResult, StepTotals, Window


def micro(loss, correct, counts, lm=None):
    counts = torch.tensor(counts)
    heads = {
        "head_correct": torch.tensor(correct),
        "head_counts": counts,
        "head_in_vocab": counts - 1,
    }
    output = SimpleNamespace(loss=torch.tensor(loss), lm=lm, **heads)
    return MicroBatchResult.from_output(
        SimpleNamespace(segments=torch.zeros(1, 7), records=["a"]), output
    )


def test_rows_add_up_to_the_step():
    ce, kl, count = torch.tensor(3.0), torch.tensor(0.5), torch.tensor(4)
    results = [micro(0.25, [1, 0], [3, 2]), micro(0.5, [2, 2], [4, 3], LMSums(ce, kl, count))]
    assert StepTotals.reduce(results, SINGLE_PROCESS) == StepTotals(
        0.75, 14, 3.0, 0.5, 4, [3, 2], [7, 5], [5, 3]
    )


def test_counts_beyond_float32_stay_whole():
    assert StepTotals.reduce([micro(1.0, [2**40 + 1], [2**41 + 1])], SINGLE_PROCESS).counts == [
        2**41 + 1
    ]


def test_window_adds_per_head():
    def totals(correct, counts, known):
        return StepTotals(1.0, 10, 0.0, 0.0, 0, correct, counts, known)

    window = Window()
    window.add(totals([1, 0], [4, 0], [4, 0]), 0.5, 2.0)
    window.add(totals([2, 0], [2, 0], [2, 0]), 1.5, 2.0)
    means = window.means()
    assert means["head_top1"] == [pytest.approx(0.5), 0.0]
    assert (means["loss"], means["grad_norm"], means["tokens_per_s"]) == (1.0, 1.0, 5.0)
    assert not {"outside_vocabulary", "lm_loss", "lm_kl", "overscaled_steps"} & set(means)
    window.add(totals([0, 0], [3, 1], [1, 0]), 1.0, 1.0)
    assert window.means()["outside_vocabulary"] == pytest.approx(0.3)
