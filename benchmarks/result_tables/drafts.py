"""Which draft guesses best?"""

from __future__ import annotations

from result_tables.lookup import compiled_rows
from result_tables.writing import (
    Cells,
    Json,
    millions,
    over,
    results,
    shares,
    speed,
    table,
    times,
    two_digits,
)


def drafts_run() -> Json:
    """Return the run of the page: bench tiny, 2.5 epochs."""
    run: Json = results("drafts")["runs"][0]
    return run


def four_epochs(content: Json) -> dict[str, Json]:
    """Return the drafts of four epochs of both texts by their short name."""
    return {
        name.split(", mtbench")[0]: row
        for name, row in content["four_epochs_of_both_texts"].items()
    }


def drafts_smollm2_answer() -> str:
    """After equal text, and after four epochs."""
    content = results("drafts_smollm2")
    equal = content["equal_text"]
    longest = four_epochs(content)
    return (
        f"EAGLE-3 and Hydra++. After equal text they make {equal['eagle3']['32']['over'][0]:.2f} and"
        f" {equal['hydra++']['32']['over'][0]:.2f} times Medusa-1's tokens per step. After four"
        f" epochs of twice the text EAGLE-3 makes {longest['EAGLE-3']['32 nodes']:.2f} tokens per"
        f" step, and {longest['EAGLE-3']['without loops']:.2f} without the answers that loop."
    )


def drafts_smollm2_short() -> str:
    """The same for the list of results."""
    equal = results("drafts_smollm2")["equal_text"]
    return (
        f"From equal text EAGLE-3 makes {equal['eagle3']['32']['over'][0]:.2f} times Medusa-1's"
        f" tokens per step, Hydra++ {equal['hydra++']['32']['over'][0]:.2f}."
    )


def drafts_smollm2_table() -> str:
    """Two epochs of the first file, then four of both."""
    content = results("drafts_smollm2")
    rows: list[Cells] = []
    for name in ("medusa1", "markov", "amphista", "hydra++", "eagle3"):
        draft = content["equal_text"][name]
        rows.append(
            [
                draft["title"],
                "two epochs of the first file",
                millions(draft["parameters"]),
                *(f"{draft[tree]['rate']:.3f}" for tree in ("chain", "16", "32")),
                over(draft["32"]["over"]),
                f"{draft['32']['without_loops']:.3f}",
                shares(draft["ctar"]),
            ]
        )
    for name, draft in four_epochs(content).items():
        rows.append(
            [
                name,
                "four epochs of both files",
                millions(draft["parameters"]),
                *(f"{draft[tree]:.3f}" for tree in ("chain", "16 nodes", "32 nodes")),
                over(draft["over (32)"]),
                f"{draft['without loops']:.3f}",
                shares(draft[f"ctar{number}"] for number in (1, 2, 3)),
            ]
        )
    head = ("draft", "training", "parameters:", "chain:", "16 nodes:", "32 nodes:")
    return table((*head, "over Medusa-1:", "without loops:", "CTAR(1) (2) (3):"), rows)


def eagle3_answer() -> str:
    """By counts yes, by the clock not distinguishable."""
    draft = four_epochs(results("drafts_smollm2"))["EAGLE-3"]
    return (
        "By tokens per step yes: after four epochs EAGLE-3 makes"
        f" {two_digits(draft['over (32)'])} times those of Medusa-1 with a Markov bias. By the clock, in"
        " this project on a CPU, the two cannot be told apart."
    )


def eagle3_short() -> str:
    """The same for the list of results."""
    value = four_epochs(results("drafts_smollm2"))["EAGLE-3"]["over (32)"][0]
    return (
        f"By tokens per step yes, {value:.2f} times after four epochs. By the clock on a CPU they"
        " cannot be told apart, except in vLLM."
    )


def eagle3_pairs() -> list[tuple[str, Json, Json]]:
    """Return the runs of Medusa-1 and EAGLE-3 on one machine and day, by name of the text."""
    runs: dict[str, tuple[str, Json]] = {}
    for name, place, _, run in compiled_rows():
        runs.setdefault(name, (place, run))  # of two alike, that of more questions
    pairs = (
        ("Medusa-1, Markov bias, four epochs of both texts", "EAGLE-3, four epochs of both texts"),
        ("Medusa-1, one epoch of both texts", "EAGLE-3, one epoch of both texts"),
        ("Medusa-1, text without loops", "EAGLE-3, text without loops"),
    )
    found = []
    for medusa1, eagle3 in pairs:
        place, run = runs[medusa1]
        text = eagle3.split(", ", 1)[1]
        found.append((f"{text}, {place}", run, runs[eagle3][1]))
    return found


def eagle3_table() -> str:
    """Three pairs by the clock: plain rates, then heads alone."""
    rows = []
    for name, medusa1, eagle3 in eagle3_pairs():
        cells: Cells = [name]
        for run in (medusa1, eagle3):
            plain = run["plain_tokens_per_s"]
            heads = run["over"]["heads_alone"]
            cells += [
                f"{heads['tokens_per_step']:.2f}",
                speed(plain),
                speed(plain * heads["over_plain"]),
                times(heads["over_plain"]),
            ]
        rows.append(cells)
    head = ["text, machine, date"]
    for draft in ("Medusa-1", "EAGLE-3"):
        head += [f"{draft}: per step:", "plain tokens/s:", "alone tokens/s:", "ratio:"]
    return table(head, rows)
