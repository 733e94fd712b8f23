import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from medusa_train.evaluation.report import build_report, metrics_table, summary_of, write_report
from medusa_train.evaluation.turns import (
    Score,
    TimedAnswer,
    Turn,
    Verdict,
)
from tests.evaluation.make_turn import make_turn


def markdown(report: dict[str, Any]) -> str:
    return "\n\n".join([*summary_of(report), metrics_table(report).markdown()])


def meta(**changes: Any) -> dict[str, Any]:
    return {
        "bench": "tiny",
        "model": "runs/demo",
        "base_model": "data/tiny",
        "dtype": "bfloat16",
        "tree_nodes": 16,
        "heads": 5,
        "baselines": {"generate_tokens_per_s": "transformers generate"},
        "device": "a machine",
        "threads": 2,
        "questions": 1,
        "max_new_tokens": 16,
        "date": "2030-01-02T03:04:05+00:00",
        **changes,
    }


def records(with_tree: bool = True) -> list[Turn]:
    tokens = tuple(range(11))
    tree = TimedAnswer(tokens, 2.0, 1.0, 4, (3, 3, 0, 0)) if with_tree else None
    exact = {"float32": Verdict.TIE, "bfloat16": Verdict.EQUAL} if with_tree else {}
    plain, generate = TimedAnswer(tokens, 3.0, 1.0, 10), TimedAnswer(tokens, 2.2)
    return [
        make_turn(
            7,
            category,
            1,
            (1, 2, 3),
            tree,
            plain,
            generate,
            text="Twelve — dollars.",
            exact=dict(exact),
        )
        for category in ("math", "code")
    ]


def test_report_json_has_the_promised_keys_overall_and_per_category(tmp_path: Path) -> None:
    write_report(build_report(records(), meta()), records(), tmp_path / "eval" / "tiny")
    page = (tmp_path / "eval" / "tiny" / "report.md").read_text(encoding="utf-8")
    assert "| math |" in page
    assert "## Answers" not in page
    content = json.loads((tmp_path / "eval" / "tiny" / "report.json").read_text())
    assert set(content) == {"meta", "overall", "categories", "baselines", "judge"}
    assert set(content["baselines"]) == {"plain", "generate"}
    assert set(content["categories"]) == {"math", "code"}
    assert all(
        set(figures) == set(content["overall"]) for figures in content["categories"].values()
    )
    assert content["overall"]["answers"] == 2
    assert content["overall"]["tie_answers"] == 2
    assert content["meta"]["base_model"] == "data/tiny"


def test_answers_are_kept_with_their_accepted_lengths_and_the_skipped_turns(tmp_path: Path) -> None:
    write_report(
        build_report(records(), meta()),
        [*records(), Turn(9, "math", 2, (1,) * 5000)],
        tmp_path,
    )
    lines = [
        json.loads(line)
        for line in (tmp_path / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert lines[0]["accepted"] == [3, 3, 0, 0]
    assert lines[0]["text"] == "Twelve — dollars."
    assert (lines[0]["question_id"], lines[0]["turn"], lines[0]["tokens"]) == (7, 1, 11)
    assert lines[0]["exact"] == {"float32": "tie", "bfloat16": "equal"}
    assert lines[2] == {"question_id": 9, "turn": 2, "prompt_tokens": 5000, "skipped": True}


def test_the_report_says_in_which_dtype_the_output_is_exact() -> None:
    def output(meta: dict[str, Any], *verdicts: dict[str, Verdict]) -> str:
        compared = records()
        for record, exact in zip(compared, verdicts, strict=False):
            record.exact = exact
        return next(
            line
            for line in markdown(build_report(compared, meta)).split("\n\n")
            if "Output" in line
        )

    assert (
        "float32: 0 of 2 answers equal plain decoding's token for token, 2 first differ at a tie"
        in output(meta())
    )
    different = {"float32": Verdict.DIFFERENT, "bfloat16": Verdict.DIFFERENT}
    assert "1 differ without a tie; bfloat16: 1 of 2, since" in output(meta(), different)
    assert "bfloat16: 1 of 1 (drawn at random from 2)." in output(meta(), {})
    outcomes = meta(exactness={"float32": "compared", "bfloat16": "not enough memory"})
    text = output(outcomes, *[{"float32": Verdict.EQUAL}] * 2)
    assert "float32: 2 of 2" in text
    assert "bfloat16: not compared (not enough memory)" in text


def test_quality_is_reported_where_they_are_known() -> None:
    graded = {"model": "judge-1", "score": 6.25, "graded": 2, "without_grade": 1, "failed": 0}
    failed = {
        "model": "judge-1",
        "score": None,
        "graded": 0,
        "without_grade": 0,
        "failed": 2,
        "reason": "HTTP 401",
    }
    joint = {"tokens": 900, "perplexity_before": 8.0, "perplexity_after": 8.2, "kl": 0.0213}
    means = {"rouge1": 40.0, "rouge2": 8.44, "rougeL": 12.6}
    rouge = {"answers": 2, "tree": means, "plain": {"rouge1": 1.0, "rouge2": 2.0, "rougeL": 3.0}}
    for extra, expected in (
        ({}, "Quality: not judged."),
        ({"judge": graded}, "6.25 of 10 by judge-1 (2 answers, 1 without a grade)"),
        ({"judge": failed}, "graded no answer (HTTP 401)"),
        (
            {"rouge": rouge},
            (
                "Quality: ROUGE-1/2/L 40.00/8.44/12.60, plain decoding 1.00/2.00/3.00 (F1 in % of 2"
                " answers"
            ),
        ),
        ({"joint": joint}, "8.200 after joint training, 8.000 before (+2.5%), KL 0.0213"),
    ):
        text = markdown(build_report(records(), meta(), parts=extra))
        assert expected in text
        assert "correct" not in text  # there are no scores


def test_a_busy_machine_and_an_overhead_below_one_are_named() -> None:
    quiet = {"cores": 2, "other_cores": 0.3, "plain_step_spread": 0.05}
    assert "busy" not in markdown(build_report(records(), meta(machine_load=quiet)))
    busy = {**quiet, "other_cores": 1.5}
    text = markdown(build_report(records(), meta(machine_load=busy)))
    assert "seems to have been busy: other processes used 1.5 of 2 cores meanwhile. " in text
    fast = records()
    for record in fast:
        record.answers["tree"] = TimedAnswer(tuple(range(11)), 1.4, 1.0, 4, (3, 3, 0, 0))
    text = markdown(build_report(fast, meta(machine_load=quiet)))
    assert "busy: overhead 0.50, though a step with a tree costs no less than a plain one" in text


def scored(tree: bool, plain: bool, with_tree: bool = True, questions: int = 5) -> list[Turn]:
    scores = {"tree": Score("exact match", tree, "12"), "plain": Score("exact match", plain, "12")}
    if not with_tree:
        del scores["tree"]
    answers = []
    for question in range(questions):
        math, code = records(with_tree)
        answers += [replace(math, question_id=question, scores=scores), code]
    return answers


def test_correct_answers_are_reported_beside_plain_decodings(tmp_path: Path) -> None:
    equal = build_report(scored(True, True), meta())
    expected = (
        "Quality: exact match 5 of 5 (100.0%, 95 % interval 56.6% to 100.0%), with plain decoding"
        " equal on every"
    )
    assert expected in markdown(equal)
    assert "| 5/5 |" in markdown(equal)
    differing = markdown(build_report(scored(True, False), meta()))
    assert (
        "with plain decoding 0 of 5 (0.0%, 95 % interval 0.0% to 43.4%); 5 questions scored"
        " differently" in differing
    )
    assert "| 5/5 (plain 0) |" in differing
    alone = build_report(
        scored(True, False, with_tree=False), meta(model=None, heads=None, tree_nodes=None)
    )
    assert "Quality: exact match 0 of 5 (0.0%, 95 % interval 0.0% to 43.4%)." in markdown(alone)
    write_report(equal, scored(True, True), tmp_path)
    line = json.loads((tmp_path / "answers.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert line["scores"]["plain"] == {"metric": "exact match", "correct": True, "detail": "12"}
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["overall"]["scores"]["tree"]["correct"] == 5
    assert content["categories"]["code"]["scores"] is None


def test_fewer_than_five_questions_have_figures_without_intervals_and_it_says_why() -> None:
    # three scored questions, and one that is not
    few = markdown(build_report(scored(True, True, questions=3), meta()))
    assert "1.10x (no interval: fewer than 5 questions, or batches of them) the speed" in few
    assert "3 of 3 (100.0%, no interval: fewer than 5 answers)" in few
    enough = markdown(build_report(scored(True, True), meta()))
    assert "no interval" not in enough
