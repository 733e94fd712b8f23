from __future__ import annotations

import pytest

from medusa_train.server_bench.draft_counts import DraftCounts, parse_metrics
from tests.server_bench.servers import GENERATED, METRICS

PAGE = METRICS.format(drafts=10, draft_tokens=20.0, accepted=8.0, first=6.0, second=2.0)


def test_counters_are_read_and_summed_over_engines() -> None:
    assert parse_metrics(PAGE + GENERATED.format(generated="1.9e+01")) == DraftCounts(10, 20, (6, 2), 19)
    other = PAGE.replace('engine="0"', 'engine="1"')
    assert parse_metrics(PAGE + other) == DraftCounts(20, 40, (12, 4), 0)


def test_a_server_without_heads_counts_no_drafts() -> None:
    counts = parse_metrics(GENERATED.format(generated=5.0))
    assert counts == DraftCounts(0, 0, (), 5)
    assert (counts.tokens_per_step, counts.acceptance, counts.speculative_tokens) == (None, [], None)


@pytest.mark.parametrize("page", ["", "<html>not found</html>", "python_gc_objects_collected_total 3.0\n"])
def test_a_page_of_another_program_has_none(page: str) -> None:
    assert parse_metrics(page) is None


def test_differences_are_those_of_the_requests_between() -> None:
    before, after = DraftCounts(10, 20, (6,), 30), DraftCounts(20, 40, (12, 4), 50)
    difference = after.since(before)
    assert difference == DraftCounts(10, 20, (6, 4), 20)
    assert difference.tokens_per_step == 2.0
    assert difference.acceptance == [0.6, 0.4]
    assert difference.speculative_tokens == 2
    assert before.since(after) is None  # restarted
    assert DraftCounts(30, 60, (6,), 60).since(after) is None
    assert before + after == DraftCounts(30, 60, (18, 4), 80)
