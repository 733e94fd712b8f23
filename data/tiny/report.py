"""The README beside the tiny backbone: what it was made from, how, and how good it is, all of it measured.

Reads the finished directory back as a user would (bf16 weights, plain `AutoModelForCausalLM`).
"""

from __future__ import annotations

import dataclasses
import json
import math
import platform
from pathlib import Path

import torch
import transformers
from check import Answer, answer_all
from corpus import HELD_OUT_SHARE
from library import FUNCTION_COPIES, LONG_SHARE, Library
from losses import held_out_losses
from polish import REACH
from recipe import Recipe

SAMPLES = (
    (
        "problem",
        "A baker sells 24 rolls in the morning and half as many in the afternoon. Each roll costs $2. "
        "How much does she earn that day?",
    ),
    (
        "code",
        "Write a Python function `common_items(first, second)` that returns a list of the items that occur in "
        "both lists.",
    ),
    (
        "code",
        "Please implement a function called read_config(path) which reads a file of key=value lines and returns "
        "a dictionary.",
    ),
)


def held_out_table(directory: Path, library: Library) -> list[str]:
    """Markdown rows: held-out documents, answer tokens, nats and perplexity per token and per byte of each kind."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    rows = [
        "| Held out | documents | answer tokens | nats per token | perplexity per token | nats per byte "
        "| perplexity per byte |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, chats in library.held_out_chats().items():
        if not chats:
            continue
        loss = held_out_losses(model, chats, 4096)["assistant"]
        tokens = sum(sum(chat.assistant) for chat in chats)
        size = sum(len(item.answer.encode()) for item in library.held_out[kind])
        per_byte = loss * tokens / size
        rows.append(
            f"| {kind} | {len(chats)} | {tokens:,} | {loss:.3f} | {math.exp(loss):.2f} "
            f"| {per_byte:.3f} | {math.exp(per_byte):.3f} |"
        )
    return rows


def sample_lines(answers: list[Answer]) -> list[str]:
    """Questions and greedy answers, as Markdown."""
    lines = []
    for answer in answers:
        cut = "" if answer.ended else "\n(cut)"
        lines += [f"> {answer.asked}", "", "```", answer.text + cut, "```", ""]
    return lines


def settings(recipe: Recipe) -> str:
    """The recipe as a Markdown list."""
    return "\n".join(f"- `{key}`: {value}" for key, value in dataclasses.asdict(recipe).items())


def write_readme(directory: Path, recipe: Recipe, library: Library, log: Path) -> None:
    """Measure the model in `directory` and write its README.md."""
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    epochs = 1 + max(entry.get("epoch", 0) for entry in entries)
    before = [entry["held_out"] for entry in entries if entry["step"] <= recipe.steps and "held_out" in entry][-1]
    text_loss = ", ".join(f"{kind} {loss['assistant']:.3f}" for kind, loss in before.items())
    questions = [{"category": category, "turns": [text]} for category, text in SAMPLES]
    answers = answer_all(directory, questions, "float32", 256)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    parameters = sum(p.numel() for p in model.parameters())
    text = f"""# The embedded tiny backbone

A chat model of {parameters / 1e6:.1f}M parameters (Llama architecture, vocabulary {recipe.vocabulary}, bf16), small
enough to live in a repository and to train draft heads on in minutes. It writes worked answers to word problems, which
read well and are often wrong, and short Python functions. It is a test bench, not an assistant.

## Made from
- The training problems of [GSM8K](https://github.com/openai/grade-school-math) (MIT licence), calculator marks removed.
- The functions with docstrings of the standard library of Python {platform.python_version()} (PSF licence): the request
  is worded from the docstring, the answer is the code without it. Test cases and trivial functions are left out.

{len(library.short):,} training documents of ordinary length (plain functions count {FUNCTION_COPIES} times),
drawn anew each epoch into chats of one to three turns, and {LONG_SHARE:.0%} of the tokens in chats of 2,000 tokens or
more. No text of either source is stored here, only the weights and the tokenizer, which are ours, under Apache-2.0 like
the rest.

## Held out
{HELD_OUT_SHARE:.0%} of the documents, chosen by the hash of their text, never trained on. Loss of the saved bf16
weights on the answers, end mark included; bytes are those of the answers' text.

{chr(10).join(held_out_table(directory, library))}

## Trained with
    python data/tiny/build.py --gsm8k train.jsonl

{recipe.steps} steps on text, {epochs} epochs begun, the last {recipe.brief_steps} steps on problems and brief
functions; Muon for the matrices inside the layers, AdamW for the rest, bf16 autocast, torch {torch.__version__},
transformers {transformers.__version__}. From {recipe.lookahead_from:.0%} of the steps on, the hidden states also learn
to predict the tokens after the next one (`lookahead.py`; multi-token prediction, Gloeckle et al. 2024), as today's
large models do; the blocks for that are thrown away. It still looped when decoded greedily, so rounds of polishing
follow: it answers {recipe.polish_requests} requests greedily, most of them worded as the seed conversations are;
tokens that go on a loop (in code ever so gently) and hasty ends of worked answers are made less likely, good answers
and ordinary text likelier (`polish.py`; after Welleck et al. 2020, "Neural Text Generation with Unlikelihood
Training"); the weights are the mean of the last states, moved {REACH} times as far from the unpolished ones. Polishing
costs held-out loss: {text_loss} nats per answer token before it, the table's after.

The run that made these weights was re-planned on the way (the number of steps and rounds, the weights of what is made
less likely, which states the mean is of, chosen by `check.py` on the tiny bench), so the command makes a model like
this one, not these bytes.

{settings(recipe)}

## Samples
Greedy, in float32.

{chr(10).join(sample_lines(answers)).rstrip()}

`python data/tiny/check.py QUESTIONS.jsonl` judges the greedy answers to a question file: endings, loops, repeats,
length, code that parses.
"""
    (directory / "README.md").write_text(text)
