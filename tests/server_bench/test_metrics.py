import pytest

from medusa_train.data.conversation import Message
from medusa_train.evaluation.questions import Question
from medusa_train.server_bench.blocks import (
    BlockKey,
    DraftCounts,
    Measurement,
    ServedAnswer,
    parse_metrics,
    plan_blocks,
)
from medusa_train.server_bench.metrics import (
    Cell,
    busy_shares,
    collect_cells,
    compare_cells,
    recommend,
    reference_of,
    summarize,
)
from tests.server_bench.servers import GENERATED, METRICS


def answer(
    question: int,
    started: float,
    seconds: float,
    tokens: int = 10,
    text: str = "a",
    turn: int = 1,
    repeat: int = 0,
) -> ServedAnswer:
    return ServedAnswer(question, turn, repeat, text, tokens, started, seconds / 4, seconds)


def cell(
    server: str,
    answers: list[ServedAnswer],
    session: str = "s",
    concurrency: int = 1,
    blocks: int = 1,
) -> Cell:
    parts = {
        BlockKey(session, concurrency, n): {server: Measurement(tuple(answers[n::blocks]))}
        for n in range(blocks)
    }
    (made,) = collect_cells(parts, {concurrency: blocks})
    return made


def test_moments_are_divided_among_the_answers_under_way() -> None:
    # 0-1: first; 1-3: both; 3-4: second; 4-6: nothing; 6-7: third
    answers = [answer(1, 0, 3), answer(2, 1, 3), answer(3, 6, 1), answer(4, 6, 0)]
    assert busy_shares(answers) == [2.0, 2.0, 1.0, 0.0]


def test_rates_are_tokens_over_the_busy_time() -> None:
    made = cell("plain", [answer(1, 0, 4), answer(2, 0, 4), answer(3, 4, 2)], concurrency=2)
    assert made.metrics["tokens_per_s"] == pytest.approx(30 / 6)
    assert made.metrics["time_to_first_token_s"] == {"median": 1.0}
    assert made.metrics["time_per_token_s"]["median"] == pytest.approx(3 / 9)
    assert made.metrics["acceptance"] is None


def test_incomplete_cells_are_left_out_and_blocks_joined() -> None:
    counts = DraftCounts(5, (3, 1))
    one = Measurement((answer(1, 0, 1),), 1, counts)
    two = Measurement((answer(2, 0, 3),), 0, counts)
    blocks = {
        BlockKey("s", 1, 0): {"k=2": one},
        BlockKey("s", 1, 1): {"k=2": two},
        BlockKey("s", 2, 0): {"k=2": one},
    }
    (made,) = collect_cells(blocks, {1: 2, 2: 2})
    metrics = made.metrics
    assert (metrics["concurrency"], metrics["tokens_per_s"]) == (1, 5.0)
    assert (metrics["skipped_turns"], metrics["drafts"]) == (1, 10)
    assert metrics["acceptance"] == [0.6, 0.2]
    assert metrics["num_speculative_tokens"] == 2
    blocks[BlockKey("s", 1, 1)] = {"k=2": Measurement((answer(2, 0, 3),))}
    assert collect_cells(blocks, {1: 2})[0].metrics["drafts"] is None


def test_turns_that_only_one_server_answered_are_not_in_the_ratio() -> None:
    """One server may skip turns that do not fit into its context."""
    plain = cell("plain", [answer(n, n * 10, 2) for n in range(4)], blocks=2)
    answered = [answer(0, 0, 1), answer(9, 10, 9), answer(2, 20, 1), answer(3, 30, 1)]
    compared = compare_cells(cell("k=1", answered, blocks=2), plain, greedy=True)
    assert compared is not None
    assert (compared["ratio"], compared["compared_answers"]) == (pytest.approx(2.0), 3)


@pytest.mark.parametrize(
    ("seconds", "ratio", "interval", "verdict", "equal"),
    [
        ([1] * 8, 2.0, [2.0, 2.0], "wins", 8),
        ([3] * 8, 2 / 3, [2 / 3, 2 / 3], "loses", 8),
        ([1] * 7 + [8], 16 / 15, ..., "undecided", 8),
        ([1], 2.0, None, "undecided", 1),
    ],
)
def test_a_ratio_wins_only_with_its_whole_interval(
    seconds: list[float], ratio: float, interval: object, verdict: str, equal: int
) -> None:
    plain = cell("plain", [answer(n, n * 10, 2) for n in range(8)], blocks=8)
    heads = cell(
        "k=1", [answer(n, n * 10, one) for n, one in enumerate(seconds)], blocks=len(seconds)
    )
    compared = compare_cells(heads, plain, greedy=True)
    assert compared is not None
    assert (compared["ratio"], compared["verdict"]) == (pytest.approx(ratio), verdict)
    assert interval is ... or compared["ratio_interval"] == (interval and pytest.approx(interval))
    assert (compared["equal_answers"], compared["compared_answers"]) == (equal, equal)
    assert (compare_cells(heads, plain, greedy=False) or {})["equal_answers"] is None
    assert compare_cells(cell("k=1", [answer(99, 0, 1)]), plain, greedy=True) is None


def test_answers_after_a_differing_one_are_not_compared() -> None:
    plain = cell(
        "plain",
        [answer(n, n, 1, turn=turn, text=f"{n}{turn}") for n in range(2) for turn in (1, 2)],
    )
    heads = [answer(0, 0, 1, text="01"), answer(0, 1, 1, text="other", turn=2)]
    heads += [answer(1, 2, 1, text="other"), answer(1, 3, 1, text="12", turn=2)]
    compared = compare_cells(cell("k=1", heads), plain, greedy=True)
    assert compared is not None
    assert (compared["equal_answers"], compared["compared_answers"]) == (1, 3)


def test_heads_measured_alone_have_to_beat_the_faster_plain_measurement() -> None:
    first = cell("plain", [answer(n, n * 10, 2) for n in range(4)], "plain, first", blocks=4)
    last = cell("plain", [answer(n, n * 10, 1) for n in range(4)], "plain, last", blocks=4)
    heads = cell("k=1", [answer(n, n * 10, 1.5) for n in range(4)], "k=1", blocks=4)
    together = cell("plain", [answer(n, n * 10, 9) for n in range(4)], "k=1", blocks=4)
    assert reference_of(heads, [first, heads, last]) is last
    assert reference_of(heads, [first, heads, last, together]) is together
    summary = summarize([first, heads, last], greedy=True)
    assert summary["recommendation"] == [
        {
            "concurrency": 1,
            "use": False,
            "server": "k=1",
            "num_speculative_tokens": None,
            "ratio": pytest.approx(1 / 1.5),
            "ratio_interval": pytest.approx([1 / 1.5, 1 / 1.5]),
            "verdict": "loses",
        }
    ]
    assert summary["plain"][0]["session"] == "plain, last"


def test_nothing_is_recommended_that_does_not_win() -> None:
    measured = [
        *[(1, 2, 1.3, "wins"), (1, 3, 1.4, "wins"), (1, 4, 1.9, "undecided")],
        *[(8, 2, 1.1, "undecided"), (8, 3, 0.8, "loses")],
    ]
    names = ("concurrency", "num_speculative_tokens", "ratio", "verdict")
    advice = recommend(
        [
            {"server": "", "ratio_interval": None, **dict(zip(names, m, strict=True))}
            for m in measured
        ]
    )
    chosen = [(one["concurrency"], one["use"], one["num_speculative_tokens"]) for one in advice]
    assert chosen == [(1, True, 3), (8, False, 2)]


# Counters of vLLM

PAGE = METRICS.format(drafts=10, accepted=8.0, first=6.0, second=2.0)


def test_counters_are_read_and_summed_over_engines() -> None:
    assert parse_metrics(PAGE) == DraftCounts(10, (6, 2))
    assert parse_metrics(PAGE + PAGE.replace('engine="0"', 'engine="1"')) == DraftCounts(
        20, (12, 4)
    )


def test_a_server_without_heads_counts_no_drafts() -> None:
    counts = parse_metrics(GENERATED.format(generated=5.0))
    assert counts == DraftCounts(0, (), 5)
    assert (counts.tokens_per_step, counts.acceptance, counts.speculative_tokens) == (
        None,
        [],
        None,
    )


@pytest.mark.parametrize(
    "page", ["", "<html>not found</html>", "python_gc_objects_collected_total 3.0\n"]
)
def test_a_page_of_another_program_has_none(page: str) -> None:
    assert parse_metrics(page) is None


def test_differences_are_those_of_the_requests_between() -> None:
    before, after = DraftCounts(10, (6,), 5), DraftCounts(20, (12, 4), 7)
    difference = after.plus(before, -1)
    assert difference == DraftCounts(10, (6, 4), 2)
    assert difference.tokens_per_step == 2.0
    assert difference.acceptance == [0.6, 0.4]
    assert difference.speculative_tokens == 2
    assert before.plus(after) == DraftCounts(30, (18, 4), 12)


def test_blocks_hold_answers_of_chats_with_tools_of_one_category() -> None:
    message = Message("user", "q")
    questions = [
        Question(n, category, ("q",), "", messages=(message,))
        for n, category in enumerate(["with calls", "without calls"] * 5)
    ]
    blocks = plan_blocks(questions, 2)
    assert sum(map(len, blocks)) == 20
    for block in blocks:
        assert len({conversation.question.category for conversation in block}) == 1
