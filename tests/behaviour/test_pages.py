"""The pages of an evaluation: tables, sentences, drawings and answers say what its files say."""

from __future__ import annotations

import html
import json
import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.behaviour.scripted import write_scripted_model
from tests.behaviour.seams import colored_answers, drawn_bars, drawn_curves
from tests.behaviour.world import QUICK, evaluate, read_json, read_lines, write_lines

TITLES = {
    "answers": lambda figures: str(figures["answers"]),
    "tokens per step": lambda figures: f"{figures['acceleration_rate']:.2f}",
    "overhead": lambda figures: f"{figures['overhead']:.2f}",
    "speedup": lambda figures: f"{figures['speedup']:.2f}x",
    "over generate": lambda figures: f"{figures['speedup_over_generate']:.2f}x",
    "tokens /s": lambda figures: f"{figures['tokens_per_s']:.0f}",
    "plain /s": lambda figures: f"{figures['baseline_tokens_per_s']:.0f}",
    "generate /s": lambda figures: f"{figures['generate_tokens_per_s']:.0f}",
    "equal fp32": lambda figures: f"{figures['equal_answers']}/{figures['answers']}",
}


@pytest.fixture(scope="module")
def report(evaluated: Path) -> Any:
    return read_json(evaluated / "report.json")


@pytest.fixture(scope="module")
def page(evaluated: Path) -> str:
    return (evaluated / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def markdown(evaluated: Path) -> str:
    return (evaluated / "report.md").read_text(encoding="utf-8")


def rows_of_markdown(text: str, first: str) -> list[list[str]]:
    """Return the cells of the table whose first title is `first`, without stars and its rule."""
    lines = text.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"| {first} |"))
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        cells = re.split(r"(?<!\\)\|", line.strip("|"))
        rows.append([cell.replace(r"\|", "|").strip().strip("*") for cell in cells])
    return [rows[0], *rows[2:]]


def rows_of_page(text: str, first: str) -> list[list[str]]:
    for table in re.findall(r"<table>.*?</table>", text, flags=re.DOTALL):
        lines = re.findall(r"<tr[^>]*>(.*?)</tr>", table, flags=re.DOTALL)
        rows = [re.findall(r"<t[hd]>(.*?)</t[hd]>", line, flags=re.DOTALL) for line in lines]
        if rows[0][0] == first:
            return [[html.unescape(cell) for cell in row] for row in rows]
    raise AssertionError(f"no table with {first}")


@pytest.mark.parametrize("kind", ["page", "markdown"])
def test_a_row_for_each_category_and_all(kind: str, report: Any, page: str, markdown: str) -> None:
    if kind == "page":
        titles, *rows = rows_of_page(page, "category")
    else:
        titles, *rows = rows_of_markdown(markdown, "category")
    groups = {**report["categories"], "overall": report["overall"]}
    assert [row[0] for row in rows] == list(groups)
    for row in rows:
        cells = dict(zip(titles, row, strict=True))
        for title, expected in TITLES.items():
            assert cells[title].split(" ")[0] == expected(groups[row[0]]), title


def test_figures_without_a_column_are_sentences(report: Any, page: str, markdown: str) -> None:
    overall = report["overall"]
    rates = ", ".join(f"{k}: {rate:.2f}" for k, rate in enumerate(overall["chain_rates"], start=1))
    shares = ", ".join(f"{w}: {share:.1%}" for w, share in enumerate(overall["ctar"], start=1))
    for text in (html.unescape(page), markdown):
        assert rates in text
        assert shares in text
        for k, row in enumerate(overall["head_accuracy"], start=1):
            assert f"head {k}: {row[0]:.1%} / {row[4]:.1%}" in text
    low, high = overall["intervals"]["speedup_over_fastest"]
    assert f"{overall['speedup_over_fastest']:.2f}x ({low:.2f}-{high:.2f})" in page
    assert f"{overall['tokens_per_s']:.0f}" in page


def test_bars_are_as_long_as_their_values(report: Any, page: str) -> None:
    overall = report["overall"]
    rates = [overall["tokens_per_s"]]
    rates += [baseline["tokens_per_s"] for baseline in overall["baselines"].values()]
    lengths = drawn_bars(page, "Tokens per second")
    assert proportional(lengths, rates)
    assert proportional(drawn_bars(page, "Accepted length"), overall["accepted_lengths"])
    groups = [*report["categories"].values(), overall]
    lengths = drawn_bars(page, "Speedup per category")
    assert proportional(lengths, [group["speedup"] for group in groups])


def proportional(lengths: list[float], values: list[float]) -> bool:
    assert len(lengths) == len(values)
    factor = sum(lengths) / sum(values)
    return lengths == pytest.approx([factor * value for value in values], rel=0.01, abs=0.2)


def test_curves_go_through_their_values(report: Any, page: str) -> None:
    accuracy = report["overall"]["head_accuracy"]
    drawn = drawn_curves(page, "Head accuracy")
    assert len(drawn) == len(accuracy)
    places = sorted(
        (value, y)
        for row, curve in zip(accuracy, drawn, strict=True)
        for value, (_, y) in zip(row, curve, strict=True)
    )
    (low, bottom), (high, top) = places[0], places[-1]
    for value, y in places:
        expected = bottom + (value - low) * (top - bottom) / (high - low)
        assert y == pytest.approx(expected, abs=0.3)
    assert top > bottom
    for curve in drawn:
        steps = [after - before for (before, _), (after, _) in pairwise(curve)]
        assert min(steps) > 0
        assert max(steps) - min(steps) < 0.3


def test_nodes_of_the_tree_have_their_shares(report: Any, page: str) -> None:
    drawing = page.partition("<h3>The tree</h3>")[2].partition("</figure>")[0]
    for path, share in zip(
        report["tree"]["medusa_choices"], report["tree"]["accepted"], strict=True
    ):
        told = f"{path}: top-{path[-1] + 1} token of head {len(path)}, accepted in"
        assert f"{told} {100 * share:.1f} %" in drawing
        if share >= 0.01:
            assert f">{100 * share:.0f}" in drawing
    assert "4 nodes" in drawing


def test_answers_are_shown_with_the_heads_of_their_tokens(evaluated: Path, page: str) -> None:
    lines = read_lines(evaluated / "answers.jsonl")
    categories = list(dict.fromkeys(line["category"] for line in lines))
    lines.sort(key=lambda line: categories.index(line["category"]))
    shown = colored_answers(page)
    assert len(shown) == len(lines)
    for line, runs in zip(lines, shown, strict=True):
        heads = [0]
        for accepted in line["accepted"]:
            heads += [*range(1, accepted + 1), 0]
        pieces = [piece for piece in zip(heads, line["pieces"], strict=False) if piece[1]]
        text = "".join(text for _, text in runs)
        whole = "".join(line["pieces"])
        assert text.strip() in (whole.strip(), whole.removesuffix("</s>").strip())
        for head in (1, 2):
            drafted = "".join(piece for place, piece in pieces if place == head)
            told = "".join(piece for place, piece in runs if place == head)
            assert drafted.startswith(told)
            assert len(drafted) - len(told) <= len("</s>")
        assert f"{line['tokens']} tokens, {line['steps']} steps" in page
        assert html.escape(line["asked"], quote=False) in page
    assert any(head for runs in shown for head, _ in runs)


def test_text_of_questions_and_answers_is_no_markup(tmp_path: Path) -> None:
    pieces = ["<script>", "alert(1)", "</script>"]
    model = write_scripted_model(tmp_path / "model", *pieces)
    questions = [{"question_id": 1, "category": "<u>", "turns": ["<img src=x>"]}]
    bench = write_lines(tmp_path / "b.jsonl", questions)
    evaluate("--bench", bench, "--base-model", model, **QUICK, output_dir=tmp_path / "out").ok()
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    for text in ("<script>", "</script>", "<u>", "<img src=x>"):
        assert html.escape(text) in page
        assert text not in page


def test_a_page_that_compares(report: Any, tmp_path: Path) -> None:
    """The newest report of a run, or that of a bench."""
    for bench, factor in (("a", 1.0), ("b", 0.5), ("c", 2.0)):
        faster = json.loads(json.dumps(report))
        faster["meta"]["bench"] = bench
        for group in [faster["overall"], *faster["categories"].values()]:
            group["speedup"] *= factor
            group["acceleration_rate"] *= factor
            group["intervals"].pop("speedup", None)
            group["speedup_over_generate"] = None if bench == "a" else 1.25
        path = tmp_path / "run" / "eval" / bench / "report.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(faster), encoding="utf-8")
        os.utime(path, (10**9 + factor, 10**9 + factor))
    run, out = tmp_path / "run", tmp_path / "out"
    evaluate("--compare", run, run / "eval" / "a", "--output-dir", out).ok()
    page = (out / "compare.html").read_text(encoding="utf-8")
    groups = [*report["categories"].values(), report["overall"]]
    titles, *rows = rows_of_page(page, "run")
    first, second = (dict(zip(titles, row, strict=True)) for row in rows)
    assert (first["run"], second["run"]) == (f"{run} (c)", f"{run}/eval/a (a)")
    assert first["speedup"] == f"{2 * report['overall']['speedup']:.2f}x"
    assert first["tokens per step"].startswith(f"{2 * report['overall']['acceleration_rate']:.2f}")
    assert second["tokens per step"].startswith(f"{report['overall']['acceleration_rate']:.2f}")
    assert (first["heads"], first["nodes"]) == ("3", "4")
    assert (first["over generate"][:5], second["over generate"]) == ("1.25x", "-")
    pairs = [(2 * group["speedup"], group["speedup"]) for group in groups]
    assert proportional(
        drawn_bars(page, "Speedup per category"), [v for pair in pairs for v in pair]
    )
    _, *rows = rows_of_page(page, "speedup")
    assert rows == [
        [category, f"{2 * group['speedup']:.2f}x", f"{group['speedup']:.2f}x"]
        for category, group in report["categories"].items()
    ]
    shown = evaluate("--compare", run, run, "--bench", "b", "--output-dir", out).ok()
    shown.says(f"{report['overall']['speedup'] / 2:.2f}x")
    assert len(read_json(out / "compare.json")) == 1
    evaluate("--compare", run, run, "--bench", "d").fails(1, "d")
