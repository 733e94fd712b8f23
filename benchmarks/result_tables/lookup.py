"""What does prompt lookup bring, beside trained heads and with them?"""

from __future__ import annotations

from result_tables.writing import Json, results, speed, table, times


def compiled_rows() -> list[tuple[str, str, str, Json]]:
    """Return draft and text, machine and date, questions, and the run, all in one form."""
    content = results("compiled_smollm2")
    rows = []

    # 1. Four epochs of both texts
    four = content["four_epochs_of_both_texts"]
    place = f"AMD EPYC, {four['date']}"
    for name, key in (("Medusa-1, Markov bias", "medusa1_markov"), ("EAGLE-3", "eagle3")):
        run = _with_ratios(four[key])
        rows.append((f"{name}, four epochs of both texts", place, "16", run))

    # 2. One epoch of both texts, unless the name says how many; beside the runs stand notes
    for name, run in content["both_texts"].items():
        if not isinstance(run, dict):
            continue
        text = _draft_name(name)
        if "epochs" not in text:
            text += ", one epoch"
        rows.append((f"{text} of both texts", f"AMD EPYC, {run['date']}", "8", run))

    # 3. Text without loops
    for name, run in content["text_without_loops"].items():
        if not isinstance(run, dict):
            continue
        place = f"Intel Xeon, {run['date'][:10]}"
        rows.append((f"{_draft_name(name)}, text without loops", place, "8", run))

    # 4. Older text
    for run in content["rows"]:
        if run["bench"] != "MT-Bench" or "min_probability" in run["draft"]:
            continue
        place = f"AMD EPYC, {run['date'][:10]}"
        rows.append((f"{_draft_name(run['draft'])}, older text", place, "16", run))
    return rows


def _with_ratios(run: Json) -> Json:
    """Return a run of four epochs in the form of the others, with ratios to its plain decoding."""
    plain = run["baselines"]["plain"]["tokens_per_s"]
    parts = {}
    for part in ("heads_alone", "lookup_alone"):
        baseline = run["baselines"][part]
        parts[part] = {**baseline, "over_plain": baseline["tokens_per_s"] / plain}
    return {
        **run,
        "plain_tokens_per_s": plain,
        "speedup_interval": run["interval"],
        "over": parts,
    }


def _draft_name(name: str) -> str:
    """Return the name of a draft as tables write it: some runs name the Markov bias otherwise."""
    for written in ("Medusa-1 with a Markov bias", "Markov bias"):
        if name.startswith(written):
            return name.replace(written, "Medusa-1, Markov bias", 1)
    return name


def compiled_answer() -> str:
    """The run of most questions and text."""
    _, place, _, run = compiled_rows()[0]
    lookup = run["over"]["lookup_alone"]["over_plain"]
    heads = run["over"]["heads_alone"]["over_plain"]
    return (
        "Both in one tree. Medusa-1 with a Markov bias after four epochs and lookup together make"
        f" {times(run['speedup'], run['speedup_interval'])} compiled plain decoding ({place})."
        f" Lookup alone makes {times(lookup)} and heads alone {times(heads)}."
    )


def compiled_short() -> str:
    """The same for the list of results."""
    _, place, _, run = compiled_rows()[0]
    lookup = run["over"]["lookup_alone"]["over_plain"]
    heads = run["over"]["heads_alone"]["over_plain"]
    return (
        f"Both in one tree, where the text repeats itself ({place}): together"
        f" {times(run['speedup'])}, lookup alone {times(lookup)}, heads alone {times(heads)}."
    )


def compiled_table() -> str:
    """Every run beside its own plain decoding."""
    rows = []
    for name, place, questions, run in compiled_rows():
        plain = run["plain_tokens_per_s"]
        heads = run["over"]["heads_alone"]
        lookup = run["over"]["lookup_alone"]
        rows.append(
            [
                name,
                f"{place}, {questions} questions",
                speed(plain),
                f"{heads['tokens_per_step']:.2f}",
                f"{speed(plain * heads['over_plain'])}, {times(heads['over_plain'])}",
                f"{speed(plain * lookup['over_plain'])}, {times(lookup['over_plain'])}",
                f"{run['tokens_per_step']:.2f}",
                f"{speed(plain * run['speedup'])}, {times(run['speedup'], run['speedup_interval'])}",
                times(run["speedup_without_loops"]),
            ]
        )
    head = ("draft, text", "machine, date, MT-Bench", "plain tokens/s:", "heads: per step:")
    speeds = ("heads: tokens/s, ratio:", "lookup: tokens/s, ratio:")
    both = ("both: per step:", "both: tokens/s, ratio:", "without loops:")
    return table((*head, *speeds, *both), rows)


def specbench_table() -> str:
    """Heads alone on Spec-Bench, those that lose included."""
    rows = []
    for run in results("compiled_smollm2")["rows"]:
        if run["bench"] != "Spec-Bench":
            continue
        plain = run["plain_tokens_per_s"]
        heads = run["over"]["heads_alone"]["over_plain"]
        rows.append(
            [
                run["draft"],
                f"AMD EPYC, {run['date'][:10]}",
                speed(plain),
                f"{speed(plain * heads)}, {heads:.3f}x",
                times(run["over"]["lookup_alone"]["over_plain"]),
                times(run["speedup"], run["speedup_interval"]),
            ]
        )
    head = ("draft, older text", "machine, date", "plain tokens/s:", "alone: tokens/s, ratio:")
    return table((*head, "lookup:", "both:"), rows)
