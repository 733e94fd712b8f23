"""How well do drafts guess, by tokens of text that they were trained on?"""

from __future__ import annotations

from result_tables.drafts import four_epochs
from result_tables.writing import Cells, results, shares, table

_DRAFTS = (("medusa1", "Medusa-1"), ("eagle3", "EAGLE-3"))


def acceptance_table() -> str:
    """Top-1 per head and tokens per step of the models at hand, by tokens of text."""
    rows = [*_little_text(), *_both_texts(), *_texts_four_times(), _tiny_target_model(), *_coder()]
    head = ("draft (of SmolLM2)", "tokens read", "top-1 per head:", "printed by training:")
    bench = ("bench, chain:", "bench, 16 nodes:", "bench, 32 nodes:", "bench, fitted tree:")
    return table((*head, *bench), [[*row, "-"] if len(row) < 8 else row for row in rows])


def _little_text() -> list[Cells]:
    """SmolLM2 with less than a million tokens."""
    few = results("eagle3_smollm2")["ablation"]["rows"]
    heads = results("papers_smollm2")["experiments"]["amphista_fig1"]["rows"]["Medusa"]
    top1 = shares(heads[f"head {number}, top 1"] for number in range(1, 5))
    chains = {draft: f"{few[draft]['chain of 3']:.2f}" for draft in ("Medusa-1", "EAGLE-3")}

    levers = results("drafts_smollm2")["levers"]
    printed = levers["held out, 16 nodes, two seeds"]["medusa1"][0]
    half = [f"{rate:.2f}" for rate in levers["medusa1"]]

    older = results("studies")["removed_pages"]["medusa1_of_older_text"]
    loops = [f"{older[tree]:.2f}" for tree in ("chain", "16", "32")]
    return [
        ["Medusa-1", "0.20M", f"{top1} (answers)", "-", chains["Medusa-1"], "-", "-"],
        ["EAGLE-3", "0.20M", "-", "-", chains["EAGLE-3"], "-", "-"],
        ["Medusa-1", "0.49M", "-", f"{printed:.2f}", *half],
        ["Medusa-1", "0.86M, half of it loops", "-", "-", *loops],
    ]


def _both_texts() -> list[Cells]:
    """SmolLM2 with 1.94M tokens: one text twice, or both once."""
    content = results("drafts_smollm2")
    held_out = results("eagle3_smollm2")["held_out"]
    rows: list[Cells] = []
    for name, title in _DRAFTS:
        top1 = shares(held_out[name]["top1"][1])
        printed = f"{held_out[name]['tokens_per_step'][1]:.2f}"
        draft = content["equal_text"][name]
        bench = [f"{draft[tree]['rate']:.2f}" for tree in ("chain", "16", "32")]
        rows.append([title, "1.94M, the same text twice", top1, printed, *bench])
    for name, title in _DRAFTS:
        draft = content["both_texts"][name]
        top1 = shares(draft["held_out_top1"])
        printed = f"{draft['held_out_tokens_per_step']:.2f}"
        bench = [f"{draft[tree]:.2f}" for tree in ("chain", "16", "32")]
        rows.append([title, "1.94M, each text once", top1, printed, *bench])
    return rows


def _texts_four_times() -> list[Cells]:
    """SmolLM2 with both texts four times; training printed a figure after each epoch."""
    content = results("drafts_smollm2")
    eagle3 = results("eagle3_smollm2")["four_epochs_of_both_texts"]["held_out"]["eagle3"]
    markov = content["medusa1_markov_four_epochs_of_both_texts"]["held_out_tokens_per_step"]
    rows: list[Cells] = []
    for title, printed in (("Medusa-1, Markov bias", markov[-1]), ("EAGLE-3", eagle3[-1])):
        draft = four_epochs(content)[title]
        bench = [f"{draft[tree]:.2f}" for tree in ("chain", "16 nodes", "32 nodes")]
        rows.append([title, "7.77M, the same texts four times", "-", f"{printed:.2f}", *bench])
    return rows


def _tiny_target_model() -> Cells:
    """Medusa-1 of the built-in model."""
    tiny = results("studies")["removed_pages"]["medusa1_of_the_test_model"]
    return [
        "built-in 11M model, Medusa-1, its own questions",
        "1.18M",
        f"{shares(tiny['accuracy'])} (answers)",
        "-",
        f"{tiny['chain']:.2f}",
        f"{tiny['16']:.2f}",
        "-",
    ]


def _coder() -> list[Cells]:
    """Drafts of the coder, by amount of text; those that were evaluated last, with their tree."""
    content = results("qwen_coder")
    evaluated = {run["draft"]: run for run in content["runs"]}
    last = {draft["draft"]: draft["text"] for draft in content["held_out"]}
    rows: list[Cells] = []
    for draft in content["held_out"]:
        name = f"Qwen2.5-Coder 0.5B, {draft['draft']}, on code"
        printed = f"{draft['tokens_per_step']:.2f}"
        fitted = "-"
        if draft["text"] == last[draft["draft"]]:
            run = evaluated[draft["draft"]]
            fitted = f"{run['overall']['acceleration_rate']:.2f} ({run['tree_nodes']} nodes)"
        top1 = shares(draft["top1"])
        rows.append([name, draft["text"], top1, printed, "-", "-", "-", fitted])
    return rows
