import re
from dataclasses import asdict
from html.parser import HTMLParser
from typing import Any

import pytest

from medusa_train.evaluation.report import build_report, decoders_table, metrics_table, summary_of
from medusa_train.evaluation.report_page import (
    answers_section,
    colored_runs,
    html_page,
    proposing_heads,
    sections_of,
)
from medusa_train.evaluation.turns import Score, TimedAnswer, Turn
from medusa_train.tree_search.fit import Trace
from medusa_train.trees.tree import Tree
from tests.evaluation.make_turn import make_turn
from tests.evaluation.test_report import meta

TREE = Tree.from_paths([(0,), (1,), (0, 0)])


def record(question: int, category: str, with_tree: bool = True) -> Turn:
    tokens = tuple(range(7))
    tree = TimedAnswer(tokens, 1.0 + question / 10, 0.5, 3, (2, 0, 1)) if with_tree else None
    trace = Trace([[0, 0], [0, -1], [-1, -1], [1, 0], [0, 0], [0, -1], [-1, -1]])
    return make_turn(
        question,
        category,
        1,
        (1,),
        tree,
        TimedAnswer(tokens, 2.0, 0.5, 6),
        TimedAnswer(tokens, 2.5),
        asked="What is <b>?",
        text="a<i>b & c",
        pieces=("a", "<", "i>", "b", " &", " ", "c"),
        trace=trace if with_tree else None,
    )


def answer(record: Turn) -> dict[str, Any]:
    return {
        "question_id": record.question_id,
        "category": record.category,
        "turn": 1,
        "asked": record.asked,
        "text": record.text,
        "pieces": list(record.pieces),
        "tokens": 7,
        "steps": record.answer.steps,
        "accepted": list(record.answer.accepted),
    }


def page(records: list[Turn], **changes: Any) -> str:
    tree = TREE if records[0].tree is not None else None
    extra = {"calibration": changes["calibration"]} if "calibration" in changes else {}
    report = build_report(records, meta(**changes), tree, extra)
    tables = [metrics_table(report), decoders_table(report)]
    answers = [answer(one) for one in records]
    sections = sections_of(report, answers, tables, summary_of(report))
    return html_page(report, sections)


class Balance(HTMLParser):
    """Fails where an element is closed that is not open; `open` holds what never was."""

    VOID = ("meta", "link", "br", "line", "rect", "circle", "path", "polyline")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.seen.append(tag)
        if tag not in self.VOID or tag in ("rect", "circle"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: Any) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_takes_nothing_from_elsewhere() -> None:
    html = page([record(1, "math"), record(2, "code")])
    balance = Balance()
    balance.feed(html)
    assert balance.open == []
    assert balance.seen.count("svg") >= 5
    assert not re.search(r"<(script|link|img|iframe)|url\(|@import|\bsrc=", html)
    assert re.findall(r"https?://[^\"' ]*", html) == []
    assert "default-src 'none'" in html


def test_a_bench_of_one_category_is_shown_once() -> None:
    two = build_report([record(1, "math"), record(2, "code")], meta())
    assert [row[0] for row in metrics_table(two).rows] == ["math", "code", "overall"]
    assert "Speedup per category" in page([record(1, "math"), record(2, "code")])
    one = build_report([record(1, "math"), record(2, "math")], meta())
    assert [row[0] for row in metrics_table(one).rows] == ["math"]
    assert "Speedup per category" not in page([record(1, "math"), record(2, "math")])


def test_it_compares_the_decoders() -> None:
    one = record(1, "math")
    one.answers["prompt_lookup"] = TimedAnswer(tuple(range(6)), 2.0, steps=2, prefill_tokens=2)
    assert decoders_table(build_report([one], meta())).rows == [
        ["tree", "6", "2.00", "-", "-"],
        ["plain", "4", "1.00", "1.82x", "1"],
        ["generate", "3", "-", "2.27x", "1"],
        ["prompt lookup", "3", "2.00", "2.12x", "0"],
    ]


def test_accepted_tokens_are_coloured_by_their_head_and_text_is_escaped() -> None:
    one = answer(record(1, "math"))
    # prefill a | step 1: head 1 <, head 2 i>, target model b | step 2: target model & | step 3: head 1
    # space, target model c
    assert colored_runs(one) == [(0, "a"), (1, "<"), (2, "i>"), (0, "b &"), (1, " "), (0, "c")]
    assert colored_runs({"pieces": [], "text": "<x>", "accepted": []}) == [(0, "<x>")]
    ended = {**one, "pieces": [*one["pieces"], "</s>"], "accepted": [2, 0, 1, 0]}
    assert colored_runs(ended) == colored_runs(one)  # the end token is no text
    shown = (
        "<div class=answer>a<i class=h1>&lt;</i><i class=h2>i&gt;</i>b &amp;<i class=h1>"
        " </i>c</div>"
    )
    assert shown in page([record(1, "math")])


def test_every_answer_has_its_score() -> None:
    right, wrong = Score("exact match", True, "4"), Score("exact match", False, "<5>")
    scored = [record(1, "math"), record(2, "math")]
    scored[0].scores = {"tree": right, "plain": right}
    scored[1].scores = {"tree": wrong, "plain": wrong}
    assert "1 of 2 (50.0%, no interval: fewer than 5 answers), with plain decoding" in page(scored)
    scored[1].scores["plain"] = right
    lines = [
        {**answer(one), "scores": {name: asdict(score) for name, score in one.scores.items()}}
        for one in scored
    ]
    right, wrong = (one["details"] for one in answers_section(lines).answers["math"])
    assert right.endswith("tokens per step, correct")
    assert wrong.endswith("wrong (<5>), plain: correct")


def test_skipped_turns_are_counted_and_the_legend_names_the_heads() -> None:
    section = answers_section(
        [answer(record(1, "math")), {"question_id": 9, "turn": 1, "skipped": True}]
    )
    assert section.remarks[0].startswith("1 turns were skipped")
    assert section.legend == ["token 1", "token 2"]
    assert not answers_section([]).answers


@pytest.mark.parametrize(
    ("tokens", "accepted", "heads"),
    [
        (8, [2, 0, 2], [0, 1, 2, 0, 0, 1, 2, 0]),
        (7, [2, 0, 2], [0, 1, 2, 0, 0, 1, 2]),  # the answer ended with an accepted token
        (1, [], [0]),
        (3, [0, 0], [0, 0, 0]),
    ],
)
def test_accepted_tokens_are_the_heads_in_order_and_then_one_of_the_target_model(
    tokens: int, accepted: list[int], heads: list[int]
) -> None:
    assert proposing_heads(tokens, accepted) == heads


def test_simulated_speed_is_told_from_that_of_the_bench() -> None:
    sizes = [
        {"nodes": nodes, "tokens_per_step": 1.0 + nodes, "tokens_per_s": 9.0} for nodes in (0, 2)
    ]
    html = page([record(1, "math")], calibration={"sizes": sizes, "nodes": 2})
    assert "<span>tokens per second on this benchmark</span>" in html
    assert "these are of the calibration&#39;s answers and without prefill" in html


def test_a_tree_file_without_sizes_has_no_charts_of_them() -> None:
    html = page([record(1, "math")], calibration={"sizes": [], "nodes": 2})
    assert "over tree size" not in html
