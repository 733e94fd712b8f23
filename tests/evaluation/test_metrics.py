import math
from dataclasses import replace

import pytest
import torch

from medusa_train.evaluation.metrics import (
    Counts,
    accepted_lengths,
    block_interval,
    by_category,
    chain_rates,
    ctar,
    interval,
    metrics,
    resample,
    speed_intervals,
    student_quantile,
)
from medusa_train.evaluation.turns import TimedAnswer, Turn, Verdict
from medusa_train.tree_search.fit import Trace, node_acceptance
from medusa_train.trees.tree import Tree
from tests.evaluation.make_turn import make_turn


def timed(tokens: int, seconds: float, prefill: float = 0.0, steps: int = 0) -> TimedAnswer:
    return TimedAnswer(tuple(range(tokens)), seconds, prefill, steps)


def record(
    category: str = "a",
    tree: TimedAnswer | None = None,
    plain: TimedAnswer | None = None,
    generate: TimedAnswer | None = None,
    **exact: Verdict,
) -> Turn:
    return make_turn(
        1,
        category,
        1,
        (1, 2),
        tree,
        plain or timed(11, 3.0, prefill=1.0, steps=10),
        generate or timed(11, 2.2),
        exact=exact,
    )


def test_tokens_per_step_leave_the_prefills_token_out_and_divide_sums() -> None:
    # (10 + 2) tokens in (4 + 2) steps; the mean of 2.5 and 1.0 would be 1.75
    figures = metrics([record(tree=timed(11, 1.0, steps=4)), record(tree=timed(3, 1.0, steps=2))])
    assert figures["acceleration_rate"] == 2.0
    assert figures["baselines"]["plain"]["tokens_per_step"] == 1.0


def test_a_batch_counts_its_passes_once() -> None:
    # a batch of two took 8 passes of 1 s after 2 s of prefill; the second answer was complete after
    # 4 passes
    plain = [TimedAnswer((1,) * (steps + 1), 5.0, 1.0, steps, (), 2, 8) for steps in (8, 4)]
    tree = [
        TimedAnswer((1,) * 9, 4.0, 1.0, 4, (1,) * 4, 2, 4),
        TimedAnswer((1,) * 5, 4.0, 1.0, 2, (1,) * 2, 2, 4),
    ]
    figures = metrics(
        [record(tree=one, plain=other) for one, other in zip(tree, plain, strict=True)]
    )
    assert figures["overhead"] == 1.5  # 6 s in 4 passes over 8 s in 8
    assert figures["acceleration_rate"] == 2.0
    assert figures["baseline_tokens_per_s"] == 14 / 10
    assert figures["time_to_first_token_s"] == 2.0


#: Turns that differ in all that is summed: of the tree and the plain loop.
DIFFERENT_TURNS = [
    (timed(11, 2.0, prefill=0.5, steps=4), timed(11, 4.0, prefill=1.0, steps=10)),
    (timed(21, 6.0, prefill=1.0, steps=12), timed(21, 11.0, prefill=2.0, steps=20)),
    (timed(5, 1.0, prefill=0.25, steps=1), timed(5, 2.0, prefill=0.5, steps=4)),
]


def test_rates_divide_sums_over_all_turns() -> None:
    figures = metrics([record(tree=tree, plain=plain) for tree, plain in DIFFERENT_TURNS])
    # decoding alone: 1.5 + 5 + 0.75 s in 17 passes, and 3 + 9 + 1.5 s in 34
    assert figures["overhead"] == pytest.approx((7.25 / 17) / (13.5 / 34))
    assert figures["acceleration_rate"] == pytest.approx((10 + 20 + 4) / 17)
    assert figures["tokens_per_s"] == pytest.approx(37 / 9)
    assert figures["baseline_tokens_per_s"] == pytest.approx(37 / 17)
    assert figures["speedup"] == pytest.approx(17 / 9)
    assert figures["time_to_first_token_s"] == pytest.approx((0.5 + 1.0 + 0.25) / 3)


def test_passes_of_several_batches_are_summed_once_each() -> None:
    """A batch of two with 8 passes in 8 s after 2 s of prefill, and one of one with 3 in 6 s."""
    batch = [TimedAnswer((1,) * (steps + 1), 5.0, 1.0, steps, (), 2, 8) for steps in (8, 4)]
    plain = [*batch, TimedAnswer((1,) * 4, 7.0, 1.0, 3, (), 1, 3)]
    tree = timed(4, 3.0, prefill=1.0, steps=2)
    figures = metrics([record(tree=tree, plain=one) for one in plain])
    assert figures["overhead"] == pytest.approx((6 / 6) / (14 / 11))


def test_a_category_sums_its_own_turns() -> None:
    first, second, third = DIFFERENT_TURNS
    records = [
        record("a", *first),
        record("b", *second),
        record("a", *third),
    ]
    figures = by_category(records)
    assert figures["a"]["overhead"] == pytest.approx((2.25 / 5) / (4.5 / 14))
    assert figures["b"]["overhead"] == pytest.approx((5 / 12) / (9 / 20))


def test_the_interval_of_the_overhead_is_that_of_whole_questions() -> None:
    """By hand: a sample sums decoding seconds and passes over the turns of the drawn questions."""
    records, rows = [], []
    for number in range(6):
        tree, plain = DIFFERENT_TURNS[number % 3]
        slower = replace(tree, seconds=tree.seconds * (1 + number / 10))
        for turn_number in (1, 2):
            records.append(make_turn(number, "a", turn_number, (1,), slower, plain, None))
        rows.append([slower.decode_seconds, slower.steps, plain.decode_seconds, plain.steps])
    tree_seconds, passes, plain_seconds, plain_passes = resample(torch.tensor(rows)).unbind(1)
    expected = interval((tree_seconds / passes) / (plain_seconds / plain_passes))
    assert speed_intervals(records)["overhead"] == pytest.approx(expected, rel=1e-5)


def test_summary_gives_every_ratio_and_count() -> None:
    tree = timed(11, 2.0, prefill=1.0, steps=4)
    records = [
        record(tree=tree, float32=Verdict.EQUAL, bfloat16=Verdict.EQUAL),
        record(tree=tree, float32=Verdict.TIE, bfloat16=Verdict.DIFFERENT),
        record(tree=tree, float32=Verdict.DIFFERENT, bfloat16=Verdict.DIFFERENT),
    ]
    figures = metrics(records)
    assert figures["acceleration_rate"] == pytest.approx(2.5)
    assert figures["overhead"] == pytest.approx(0.25 / 0.2)
    assert figures["tokens_per_s"] == pytest.approx(5.5)
    assert figures["baseline_tokens_per_s"] == pytest.approx(11 / 3)
    assert figures["generate_tokens_per_s"] == pytest.approx(5.0)
    assert figures["speedup"] == pytest.approx(1.5)
    assert figures["speedup_over_generate"] == pytest.approx(1.1)
    assert figures["speedup_over_fastest"] == pytest.approx(1.1)
    counts = ("answers", "equal_answers", "tie_answers", "equal_answers_bf16", "looping_answers")
    assert [figures[key] for key in counts] == [3, 1, 1, 1, 0]


def test_without_a_tree_only_the_baselines_have_figures() -> None:
    figures = metrics([record()])
    absent = [
        "acceleration_rate",
        "overhead",
        "speedup",
        "speedup_over_generate",
        "speedup_over_fastest",
    ]
    absent += ["tokens_per_s", "equal_answers", "tie_answers", "equal_answers_bf16"]
    assert [figures[key] for key in absent] == [None] * len(absent)
    assert figures["answers"] == 1
    assert figures["baseline_tokens_per_s"] == pytest.approx(11 / 3)


def test_speedup_without_loops_leaves_looping_answers_out() -> None:
    loop = TimedAnswer((1,) * 40, 1.0, steps=8)
    plain = TimedAnswer((1,) * 40, 4.0, steps=39)
    records = [
        record(tree=loop, plain=plain),
        record(tree=timed(40, 2.0, steps=20), plain=timed(40, 4.0, steps=39)),
    ]
    figures = metrics(records)
    assert figures["speedup"] == pytest.approx(8 / 3)
    assert figures["speedup_without_loops"] == pytest.approx(2.0)
    assert metrics(records[:1])["speedup_without_loops"] is None


def test_further_baselines_are_compared_by_name() -> None:
    records = [
        record(tree=timed(10, 1.0, steps=4), plain=timed(10, 2.0), generate=timed(10, 4.0))
        for _ in range(2)
    ]
    records[0].answers["prompt_lookup"] = timed(10, 1.0)
    records[1].answers["prompt_lookup"] = timed(9, 0.9)
    compared = metrics(records)["baselines"]
    assert list(compared) == ["plain", "generate", "prompt_lookup"]
    assert compared["prompt_lookup"]["tokens_per_s"] == pytest.approx(10.0)
    assert compared["prompt_lookup"]["speedup"] == pytest.approx(1.0)
    assert [compared[name]["equal_to_plain"] for name in compared] == [2, 2, 1]
    assert compared["generate"]["speedup"] == pytest.approx(4.0)
    assert [compared[name]["tokens_per_step"] for name in compared] == [None, None, None]
    for answers in records:
        answers.answers["prompt_lookup"] = TimedAnswer((1,) * 10, 1.0, steps=3, prefill_tokens=4)
    assert metrics(records)["baselines"]["prompt_lookup"]["tokens_per_step"] == pytest.approx(2.0)


ANSWERS = [TimedAnswer((1,) * 8, 1.0, steps=4, accepted=(3, 0, 0, 1)), TimedAnswer((1,), 1.0)]
# an answer of six tokens, two heads; -1: no guess of rank 9 or better
TRACE = Trace([[0, 1], [0, 0], [-1, 0], [1, 0], [0, -1], [-1, -1]])


def test_accepted_lengths_are_counted_and_ctar_is_the_share_of_steps_with_at_least_w() -> None:
    assert accepted_lengths(ANSWERS) == [2, 1, 0, 1]
    assert ctar(ANSWERS) == [0.5, 0.25, 0.25]
    assert accepted_lengths([TimedAnswer((1,), 1.0)]) == ctar([]) == []


def test_nodes_count_in_the_steps_that_accept_them() -> None:
    # steps start at 0 (accepts [0], [0, 1]), at 3 (accepts [1], though not [1, 0]) and end there
    tree = Tree.from_paths([(0,), (1,), (0, 1)])
    assert TRACE.simulate(tree) == [0, 3]
    assert node_acceptance([TRACE], tree) == [0.5, 0.5, 0.5]
    assert node_acceptance([], tree) is None


def test_the_chain_takes_first_guesses_only() -> None:
    # 0 accepts one, 2 and 3 none, 4 one: five tokens after the first in four steps; head 2 never
    # helps
    assert chain_rates([TRACE]) == pytest.approx([5 / 4, 5 / 4])
    # the first guesses of both heads are right at 0
    assert chain_rates([Trace([[0, 0], [0, -1], [-1, -1], [-1, -1]])]) == pytest.approx([3 / 2, 3])
    assert chain_rates([]) == []


# Intervals


def turn(question: int, tree_seconds: float, turn: int = 1) -> Turn:
    tokens = tuple(range(11))
    tree = TimedAnswer(tokens, tree_seconds, tree_seconds / 2, 4)
    return make_turn(
        question, "a", turn, (1,), tree, TimedAnswer(tokens, 2.0, 1.0, 10), TimedAnswer(tokens, 2.0)
    )


def test_the_mean_of_normal_data_is_covered_about_19_times_in_20() -> None:
    generator = torch.Generator().manual_seed(1)
    covered = 0
    for _ in range(200):
        rows = torch.stack(
            [5 + torch.randn(40, generator=generator).double(), torch.ones(40).double()], dim=1
        )
        sums = resample(rows, resamples=400)
        result = interval(sums[:, 0] / sums[:, 1])
        assert result is not None
        covered += result[0] <= 5 <= result[1]
    assert 180 <= covered <= 199


def test_intervals_hold_the_ratios_of_the_whole_bench() -> None:
    records = [turn(question, 1.0 + 0.1 * question) for question in range(8)]
    result = speed_intervals(records)
    speedup = sum(2.0 for _ in records) / sum(1.0 + 0.1 * question for question in range(8))
    low, high = result["speedup"] or (0, 0)
    assert 1.2 < low < speedup < high < 2.0
    assert result["acceleration_rate"] == pytest.approx((2.5, 2.5))  # the same for every question
    assert result["tree_over_generate"] == result["speedup"]  # as fast as the plain loop here


def test_the_turns_of_a_question_are_drawn_together() -> None:
    # one turn of each question is fast, the other slow: whole questions are all alike
    records = [
        turn(question, seconds, place)
        for question in range(6)
        for place, seconds in ((1, 1.0), (2, 3.0))
    ]
    assert speed_intervals(records)["speedup"] == pytest.approx((1.0, 1.0))


def test_times_of_batches_are_drawn_by_batch() -> None:
    alone = [turn(n, 1.0 + 0.2 * (n // 4)) for n in range(24)]
    shared = [
        replace(one, batch=n // 4, answers=one.answers | {"plain": replace(one.plain, rows=4)})
        for n, one in enumerate(alone)
    ]
    widths = [
        high - low
        for low, high in (speed_intervals(each)["speedup"] or (0, 0) for each in (alone, shared))
    ]
    assert widths[1] > 1.5 * widths[0] > 0
    assert set(speed_intervals(shared[:16])) == {"acceleration_rate"}  # four batches do not tell


def test_equal_servers_differ_once_in_twenty_times() -> None:
    draw, apart = torch.Generator().manual_seed(3), 0
    for _ in range(300):
        plain, heads = (
            [Counts(9, math.exp(one)) for one in torch.randn(5, generator=draw) / 20]
            for _ in range(2)
        )
        low, high = block_interval(plain, heads) or (0, 0)
        apart += not low <= 1 <= high
    assert 5 <= apart <= 30
    assert block_interval(plain[:2], heads[:2]) is None


@pytest.mark.parametrize(
    ("freedom", "quantile"),  # of published tables
    [(2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (9, 2.262), (30, 2.042)],
)
def test_quantiles_of_students_t(freedom: int, quantile: float) -> None:
    assert student_quantile(freedom) == pytest.approx(quantile, rel=0.01)


@pytest.mark.parametrize(
    "seconds",
    [
        [(3.0, 2.0), (3.3, 2.0), (2.8, 2.1)],
        [(3.0, 2.0), (3.3, 2.0), (2.8, 2.1), (3.1, 1.7), (2.9, 1.9)],
    ],
    ids=["three blocks", "five blocks"],
)
def test_the_interval_of_blocks_is_that_of_the_jackknife(
    seconds: list[tuple[float, float]],
) -> None:
    """By hand: of n blocks there are n - 1 degrees of freedom."""
    count = len(seconds)
    ratios = []
    for left_out in range(count):
        kept = [pair for block, pair in enumerate(seconds) if block != left_out]
        ratios.append(math.log(sum(first for first, _ in kept) / sum(second for _, second in kept)))
    mean = sum(ratios) / count
    error = math.sqrt((count - 1) / count * sum((ratio - mean) ** 2 for ratio in ratios))
    whole = math.log(sum(first for first, _ in seconds) / sum(second for _, second in seconds))
    margin = {3: 4.303, 5: 2.776}[count] * error
    result = block_interval(
        [Counts(9, first) for first, _ in seconds], [Counts(9, second) for _, second in seconds]
    )
    assert result is not None
    assert math.log(result[0]) == pytest.approx(whole - margin, abs=0.01 * margin)
    assert math.log(result[1]) == pytest.approx(whole + margin, abs=0.01 * margin)


def test_fewer_than_five_questions_or_no_tree_have_no_interval() -> None:
    assert speed_intervals([turn(n, 1.0, place) for n in range(4) for place in (1, 2)]) == {}
    alone = [
        make_turn(n, "a", 1, (1,), None, TimedAnswer((1,), 1.0), TimedAnswer((1,), 1.0))
        for n in range(5)
    ]
    assert speed_intervals(alone) == {}
    assert speed_intervals([]) == {}


def test_answers_of_one_token_leave_step_ratios_open() -> None:
    one = TimedAnswer((1,), 1.0, 1.0, 0)
    result = speed_intervals([make_turn(n, "a", 1, (1,), one, one, one) for n in range(5)])
    assert result["acceleration_rate"] is None
    assert result["speedup"] == pytest.approx((1.0, 1.0))
