"""Sums of a step over micro-batches and processes, and the means of a log line."""

from types import SimpleNamespace

import pytest
import torch

from medusa_train.losses.objective import LMSums
from medusa_train.training.step_metrics import Window, metrics_row


def row(loss, correct, counts, lm=None):
    counts = torch.tensor(counts)
    heads = {
        "head_correct": torch.tensor(correct),
        "head_counts": counts,
        "head_in_vocab": counts - 1,
    }
    output = SimpleNamespace(loss=torch.tensor(loss), lm=lm, **heads)
    return metrics_row(SimpleNamespace(segments=torch.zeros(1, 7)), output)


def test_rows_add_up_to_the_step():
    lm = LMSums(torch.tensor(3.0), torch.tensor(0.5), torch.tensor(4))
    added = row(0.25, [1, 0], [3, 2]) + row(0.5, [2, 2], [4, 3], lm)
    assert added.tolist() == [0.75, 14, 3.0, 0.5, 4, 3, 2, 7, 5, 5, 3]


def test_counts_beyond_float32_stay_whole():
    assert row(1.0, [2**40 + 1], [2**41 + 1])[6] == 2**41 + 1


def test_window_adds_per_head():
    def sums(correct, counts, known):
        return [1.0, 10, 0.0, 0.0, 0, *correct, *counts, *known]

    window = Window()
    window.add(sums([1, 0], [4, 0], [4, 0]), 0.5, 2.0)
    window.add(sums([2, 0], [2, 0], [2, 0]), 1.5, 2.0)
    means = window.means()
    assert means["head_top1"] == [pytest.approx(0.5), 0.0]
    assert (means["loss"], means["grad_norm"], means["tokens_per_s"]) == (1.0, 1.0, 5.0)
    assert not {"outside_vocabulary", "lm_loss", "lm_kl", "overscaled_steps"} & set(means)
    window.add(sums([0, 0], [3, 1], [1, 0]), 1.0, 1.0)
    assert window.means()["outside_vocabulary"] == pytest.approx(0.3)
