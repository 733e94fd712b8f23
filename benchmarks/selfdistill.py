"""Tokens per second of self-distillation: many conversations at a time, and heads that speculate.

    python benchmarks/selfdistill.py runs/demo                  # some minutes on two CPU cores
    python benchmarks/selfdistill.py runs/demo --dtypes bfloat16 --seeds 64 --batch 8

Answers the same seeds with the local engine in several ways, in turn, and reports tokens over wall time, prefill
included: one conversation at a time, `--batch` of them, and one at a time with the heads of RUN. The dtype is the
fastest of `--dtypes` at batch 1, each loaded as medusa-selfdistill loads it. "rows per pass" says how full the batches
were: places wait until a quarter is free, and at the end of the seeds the last conversations run out by themselves. A
real job has thousands of seeds; too few of them here and that end, with the later turns of the longest conversations,
counts for too much. Writes selfdistill.json and selfdistill.md to `--out`. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from medusa_train.checkpoint.load import LoadedModel, load_with_draft
from medusa_train.checkpoint.resolve import ModelPaths, resolve_model
from medusa_train.selfdistill.engines import Engine
from medusa_train.selfdistill.hf_engine import HFEngine
from medusa_train.selfdistill.modes import Rules, replay
from medusa_train.selfdistill.prompts import Seed, find_seeds, read_seeds
from medusa_train.selfdistill.select_prompts import Selection, choose

BAR = 4.0  # how many times faster a batch of 16 has to be than one conversation at a time


@dataclass(frozen=True)
class Way:
    """How the seeds are answered."""

    name: str
    dtype: str
    batch: int
    speculates: bool = False


@dataclass
class Result:
    """Sums over all rounds."""

    way: Way
    answers: int = 0
    tokens: int = 0
    seconds: float = 0.0
    passes: int = 0
    steps: int = 0

    @property
    def rate(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def rows_per_pass(self) -> float:
        return self.steps / max(self.passes, 1)


def answer(engine: Engine, seeds: Sequence[Seed]) -> tuple[int, int]:
    """Answer all turns of `seeds`, cut-off answers included: (answers, tokens)."""
    steps = {n: replay(seed, random_seed=1, rules=Rules(drop_truncated=False)) for n, seed in enumerate(seeds)}
    waiting = [(n, next(step)) for n, step in steps.items()][::-1]
    answers = tokens = asked = 0
    while waiting or asked:
        while waiting and asked < engine.capacity:
            engine.submit(*waiting.pop())
            asked += 1
        ticket, made = engine.next()
        asked, answers, tokens = asked - 1, answers + 1, tokens + made.completion_tokens
        try:
            waiting.append((ticket, steps[ticket].send(made)))
        except StopIteration:
            continue
    return answers, tokens


def build(subject: LoadedModel, paths: ModelPaths, way: Way, options: argparse.Namespace) -> HFEngine:
    heads = (subject.draft, subject.tree) if way.speculates else (None, None)
    return HFEngine(
        subject.backbone,
        temperature=options.temperature,
        max_new_tokens=options.max_new_tokens,
        chat_template=paths.chat_template,
        batch_size=way.batch,
        draft=heads[0],
        tree=heads[1],
        exact=False,
        compare=0,
    )


def measure(engines: dict[Way, HFEngine], seeds: Sequence[Seed], rounds: int) -> list[Result]:
    """The ways take turns, so that a change of the machine's mood meets all of them."""
    results = {way: Result(way) for way in engines}
    for engine in engines.values():
        answer(engine, seeds[:2])  # warm-up: memory, kernels, thread pools
    for turn in range(rounds):
        for way, engine in engines.items():
            result, (passes, steps) = results[way], engine.steps
            started = time.perf_counter()
            answers, tokens = answer(engine, seeds)
            result.seconds += time.perf_counter() - started
            result.answers, result.tokens = result.answers + answers, result.tokens + tokens
            result.passes += engine.steps[0] - passes
            result.steps += engine.steps[1] - steps
            print(f"round {turn + 1}: {way.name:32} {way.dtype:9} {result.rate:8,.0f} tokens/s", flush=True)
    return list(results.values())


def run(options: argparse.Namespace) -> list[Result]:
    paths = resolve_model(options.run, None, None)
    seeds, _ = choose(read_seeds(find_seeds(options.seed_dataset)), Selection(sample=options.seeds))
    # as the command: float32 is for sets that are the same elsewhere, where other layouts round otherwise
    subjects = {dtype: load_with_draft(paths, dtype, pack=dtype != "float32") for dtype in options.dtypes}
    alone = {Way("one at a time", dtype, 1): dtype for dtype in options.dtypes}
    results = measure({way: build(subjects[way.dtype], paths, way, options) for way in alone}, seeds, options.rounds)
    best = max(results, key=lambda result: result.rate).way.dtype
    ways = [Way("one at a time", best, 1), Way(f"batch of {options.batch}", best, options.batch)]
    if subjects[best].draft is not None:
        ways.append(Way("one at a time, heads speculate", best, 1, speculates=True))
    others = [result for result in results if result.way.dtype != best]
    engines = {way: build(subjects[best], paths, way, options) for way in ways}
    return [*measure(engines, seeds, options.rounds), *others]


def table(results: Sequence[Result]) -> str:
    base = results[0].rate
    lines = [
        "| way | dtype | tokens/s | against one at a time | rows per pass | answers | tokens per answer |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {r.way.name} | {r.way.dtype} | {r.rate:,.0f} | {r.rate / base:.2f}x | {r.rows_per_pass:.1f} "
        f"| {r.answers} | {r.tokens / max(r.answers, 1):.0f} |"
        for r in results
    ]
    return "\n".join(lines)


def facts() -> dict[str, Any]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _processor()
    return {
        "device": device,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "load": os.getloadavg()[0],
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def write(out: Path, machine: dict[str, Any], results: Sequence[Result], command: str) -> str:
    out.mkdir(parents=True, exist_ok=True)
    figures = ("answers", "tokens", "seconds", "rate", "passes", "rows_per_pass")
    ways = [{**asdict(result.way), **{name: getattr(result, name) for name in figures}} for result in results]
    record = {"command": command, "machine": machine, "ways": ways}
    (out / "selfdistill.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    where = (
        f"{machine['device']}, {machine['cores']} cores, {machine['threads']} threads, torch {machine['torch']}, "
        f"{machine['date']}, load average {machine['load']:.2f} before. `{command}`"
    )
    text = f"# Self-distillation, local engine\n\n{where}\n\n{table(results)}\n"
    (out / "selfdistill.md").write_text(text, encoding="utf-8")
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="run directory; its heads speculate")
    parser.add_argument("--seed-dataset", default="tiny")
    parser.add_argument("--seeds", type=int, default=192, help="conversations, drawn from the set")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(arguments)
    machine = facts()
    results = run(options)
    command = "python benchmarks/selfdistill.py " + " ".join(sys.argv[1:] if arguments is None else arguments)
    print("\n" + write(options.out, machine, results, command))
    batched = results[1].rate / results[0].rate
    print(f"batch of {options.batch}: {batched:.2f}x (the bar at 16: {BAR:g}x)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
