"""Typical acceptance over epsilon beside rejection sampling and greedy decoding: the paper's Figure 7 in small.

    python benchmarks/acceptance_sweep.py runs/demo --bench tiny

For every rule: tokens per step, and the perplexity of what was written under the backbone itself (temperature 1).
delta is the root of epsilon, as in the paper. The rules take turns on every prompt. Writes
benchmarks/results/acceptance_sweep.{json,md,html}.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import torch
from machine import facts, sentence

from medusa_train.checkpoint.subject import Subject, load_subject, locate
from medusa_train.data.chat import ChatEncoder
from medusa_train.data.conversation import Message
from medusa_train.evaluation.benches import load_bench
from medusa_train.evaluation.page.charts import Curve, curves
from medusa_train.evaluation.page.page import document, figure, figures_table
from medusa_train.inference.accept import Rule, Typical
from medusa_train.inference.generate import Decoder
from medusa_train.inference.sampling import Sampling

EPSILONS = (0.01, 0.03, 0.05, 0.07, 0.09, 0.12, 0.15, 0.2, 0.25)
RESULTS = Path(__file__).parent / "results"


@dataclass
class Tally:
    """What one rule came to: sums over all prompts."""

    name: str
    rule: Rule
    epsilon: float | None = None
    tokens: int = 0
    steps: int = 0
    loss: float = 0.0
    targets: int = 0
    answers: list[list[int]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.tokens / max(self.steps, 1)

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss / max(self.targets, 1))


def rules(temperature: float) -> list[Tally]:
    typical = [
        Tally(f"typical, epsilon {epsilon:g}", Typical(temperature, epsilon, math.sqrt(epsilon)), epsilon)
        for epsilon in EPSILONS
    ]
    return [Tally("greedy", None), Tally("rejection", Sampling(temperature)), *typical]


@torch.inference_mode()
def answer_loss(subject: Subject, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Sum of -log p over the answer's tokens, by the backbone at temperature 1."""
    tokens = torch.tensor([[*prompt, *answer]], device=subject.backbone.device)
    hidden = subject.backbone.run(tokens[:, :-1]).hidden[0, len(prompt) - 1 :]
    log_p = subject.backbone.logits(hidden).float().log_softmax(-1)
    return -float(log_p.gather(-1, tokens[0, len(prompt) :, None]).sum())


def sweep(subject: Subject, prompts: Sequence[list[int]], max_new_tokens: int, temperature: float) -> list[Tally]:
    decoder = Decoder(subject.backbone, subject.draft, subject.tree)
    tallies = rules(temperature)
    for number, prompt in enumerate(prompts):
        for tally in tallies:
            generator = torch.Generator(device=subject.backbone.device).manual_seed(number)
            made = decoder.generate(prompt, max_new_tokens, rule=tally.rule, generator=generator)
            tally.tokens += len(made.tokens) - 1
            tally.steps += made.steps
            tally.loss += answer_loss(subject, prompt, made.tokens)
            tally.targets += len(made.tokens)
        print(f"{number + 1}/{len(prompts)} prompts", flush=True)
    return tallies


def write(tallies: Sequence[Tally], machine: dict[str, Any], title: str, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    record = [
        {
            "rule": t.name,
            "epsilon": t.epsilon,
            "tokens_per_step": t.rate,
            "perplexity": t.perplexity,
            "tokens": t.tokens,
        }
        for t in tallies
    ]
    rows = [[t.name, f"{t.rate:.3f}", f"{t.perplexity:.3f}", str(t.tokens)] for t in tallies]
    titles = ["rule", "tokens per step", "perplexity", "tokens"]
    table = ["| " + " | ".join(titles) + " |", "|---|" + "---:|" * 3, *("| " + " | ".join(row) + " |" for row in rows)]
    (directory / "acceptance_sweep.json").write_text(
        json.dumps({"title": title, "machine": machine, "rules": record}, indent=1) + "\n"
    )
    (directory / "acceptance_sweep.md").write_text(f"# {title}\n\n{sentence(machine)}\n\n" + "\n".join(table) + "\n")
    cards = [
        figure("Tokens per step over epsilon", _drawing(tallies, "rate"), "Flat lines: greedy and rejection sampling."),
        figure("Perplexity over epsilon", _drawing(tallies, "perplexity"), "Of the answers, under the backbone."),
    ]
    sections = [f"<h1>{escape(title)}</h1>", f"<div class=cards>{''.join(cards)}</div>"]
    page = document(title, [*sections, figures_table(titles, rows, overall=False)])
    (directory / "acceptance_sweep.html").write_text(page, encoding="utf-8")


def _drawing(tallies: Sequence[Tally], key: str) -> str:
    drawn = [Curve("typical", [(t.epsilon, getattr(t, key)) for t in tallies if t.epsilon is not None])]
    for tally in tallies[:2]:
        drawn.append(Curve(tally.name, [(epsilon, getattr(tally, key)) for epsilon in EPSILONS]))
    return curves(drawn, f"{key} over epsilon", "epsilon", y_text=lambda y: f"{y:.2f}", from_zero=False, width=520)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="run directory, or directory of heads")
    parser.add_argument("--bench", default="tiny")
    parser.add_argument("--limit", type=int, default=None, help="only so many questions, of all categories")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--output-dir", type=Path, default=RESULTS)
    args = parser.parse_args()
    machine = facts(__file__, None)
    paths = locate(args.run, None, None)
    subject = load_subject(paths, args.dtype)
    if subject.draft is None:
        parser.error(f"{args.run} has no heads")
    chat = ChatEncoder(subject.backbone.tokenizer, paths.chat_template)
    bench = load_bench(args.bench).limited(args.limit)
    prompts = [chat.prompt([Message("user", question.turns[0])]) for question in bench.questions]
    fitting = [prompt for prompt in prompts if len(prompt) + args.max_new_tokens <= subject.backbone.max_context]
    tallies = sweep(subject, fitting, args.max_new_tokens, args.temperature)
    title = f"Acceptance rules at temperature {args.temperature:g}: {Path(args.run).name} on {bench.name}"
    write(tallies, machine, title, args.output_dir)
    print((args.output_dir / "acceptance_sweep.md").read_text())


if __name__ == "__main__":
    main()
