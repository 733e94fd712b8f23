"""How many tokens per second does self-distillation write, batched and with heads that speculate?

    python benchmarks/selfdistill.py runs/demo
    python benchmarks/selfdistill.py runs/demo --dtypes bfloat16 --seeds 64 --batch 8

Answers the same prompts with the Hugging Face engine in several modes, in turns: one conversation at a time, `--batch`
of them, and one at a time with the heads of RUN, in the fastest of `--dtypes` at batch 1. Tokens over wall time,
prefill included. *rows per pass* shows how full the batches were; with few prompts their end, where the last
conversations run out, weighs too much. Writes selfdistill.md and selfdistill.json to `--out`. Never run on a GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

from shared import machine_facts, machine_line, rounded, table, warn_if_busy, write_result  # noqa: E402

from medusa_train.checkpoint.load_model import LoadedModel, load_with_draft  # noqa: E402
from medusa_train.checkpoint.resolve import ModelPaths, resolve_model  # noqa: E402
from medusa_train.data.sources import open_seed_dataset  # noqa: E402
from medusa_train.selfdistill.engines import Engine  # noqa: E402
from medusa_train.selfdistill.hf_engine import HFEngine  # noqa: E402
from medusa_train.selfdistill.modes import DropRules, replay  # noqa: E402
from medusa_train.selfdistill.prompts import Prompt, read_prompts  # noqa: E402
from medusa_train.selfdistill.select_prompts import Selection, select_prompts  # noqa: E402


@dataclass(frozen=True)
class Mode:
    """How the prompts are answered."""

    name: str
    dtype: str
    batch: int
    speculates: bool = False


@dataclass
class Result:
    """Sums over all rounds; `steps` counts rows, `passes` forward passes."""

    mode: Mode
    answers: int = 0
    tokens: int = 0
    seconds: float = 0.0
    passes: int = 0
    steps: int = 0

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def rows_per_pass(self) -> float:
        """Mean number of conversations in a forward pass."""
        return self.steps / max(self.passes, 1)


def answer_all(engine: Engine, seeds: Sequence[Prompt]) -> tuple[int, int]:
    """Answer all turns of `seeds`, truncated answers included; returns numbers of answers and tokens."""
    chats = {n: replay(seed, random_seed=1, rules=DropRules(drop_truncated=False)) for n, seed in enumerate(seeds)}
    waiting = [(n, next(chat)) for n, chat in chats.items()][::-1]
    answers = tokens = running = 0
    while waiting or running:
        while waiting and running < engine.capacity:
            engine.submit(*waiting.pop())
            running += 1
        request_id, completion = engine.next()
        running, answers, tokens = running - 1, answers + 1, tokens + completion.completion_tokens
        try:
            waiting.append((request_id, chats[request_id].send(completion)))
        except StopIteration:
            continue
    return answers, tokens


def build_engine(subject: LoadedModel, paths: ModelPaths, mode: Mode, args: argparse.Namespace) -> HFEngine:
    """Create the engine of a mode."""
    return HFEngine(
        subject.backbone,
        temperature=args.temperature,
        max_new_tokens=args.max_new_tokens,
        chat_template=paths.chat_template,
        batch_size=mode.batch,
        draft=subject.draft if mode.speculates else None,
        tree=subject.tree if mode.speculates else None,
        exact=False,
        compare=0,
    )


def measure(engines: Mapping[Mode, HFEngine], seeds: Sequence[Prompt], rounds: int) -> list[Result]:
    """Time all modes in turns."""
    results = {mode: Result(mode) for mode in engines}
    for engine in engines.values():
        answer_all(engine, seeds[:2])  # warm-up
    for number in range(rounds):
        for mode, engine in engines.items():
            result, (passes, steps) = results[mode], engine.steps
            started = time.perf_counter()
            answers, tokens = answer_all(engine, seeds)
            result.seconds += time.perf_counter() - started
            result.answers, result.tokens = result.answers + answers, result.tokens + tokens
            result.passes += engine.steps[0] - passes
            result.steps += engine.steps[1] - steps
            print(f"round {number + 1}: {mode.name:32} {mode.dtype:9} {result.rate:8,.0f} tokens/s", flush=True)
    return list(results.values())


def run(args: argparse.Namespace) -> list[Result]:
    """Measure all modes; "one at a time" in the fastest dtype comes first."""
    paths = resolve_model(args.run, None, None)
    seeds, _ = select_prompts(read_prompts(open_seed_dataset(args.seed_dataset)), Selection(sample=args.seeds))
    # as medusa-selfdistill: float32 stays unpacked, so that a set is the same on every machine
    subjects = {dtype: load_with_draft(paths, dtype, prepack=dtype != "float32") for dtype in args.dtypes}

    def engines(modes: Sequence[Mode]) -> dict[Mode, HFEngine]:
        return {mode: build_engine(subjects[mode.dtype], paths, mode, args) for mode in modes}

    single = measure(engines([Mode("one at a time", dtype, 1) for dtype in args.dtypes]), seeds, args.rounds)
    best = max(single, key=lambda result: result.rate).mode.dtype
    modes = [Mode("one at a time", best, 1), Mode(f"batch of {args.batch}", best, args.batch)]
    if subjects[best].draft is not None:
        modes.append(Mode("one at a time, heads speculate", best, 1, speculates=True))
    return [*measure(engines(modes), seeds, args.rounds), *(one for one in single if one.mode.dtype != best)]


def markdown(machine: Mapping[str, Any], results: Sequence[Result]) -> str:
    """Format the page."""
    base = results[0].rate
    rows = [
        [
            one.mode.name,
            one.mode.dtype,
            f"{one.rate:,.0f}",
            f"{one.rate / base:.2f}x",
            f"{one.rows_per_pass:.1f}",
            str(one.answers),
            f"{one.tokens / max(one.answers, 1):.0f}",
        ]
        for one in results
    ]
    titles = ["mode", "dtype", "tokens/s", "over one at a time", "rows per pass", "answers", "tokens per answer"]
    return f"# Self-distillation, Hugging Face engine\n\n{machine_line(machine)}\n\n{table(titles, rows, 2)}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="run directory; its heads speculate")
    parser.add_argument("--seed-dataset", default="tiny", help="prompts (tiny)")
    parser.add_argument("--seeds", type=int, default=192, help="conversations drawn from them (192)")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/selfdistill"), metavar="DIR")
    args = parser.parse_args(arguments)
    machine = machine_facts(__file__, arguments)
    warn_if_busy(machine)
    results = run(args)
    sums = ("answers", "tokens", "seconds", "rate", "passes", "rows_per_pass")
    modes = [{**asdict(one.mode), **{name: getattr(one, name) for name in sums}} for one in results]
    page = markdown(machine, results)
    write_result(args.out, "selfdistill", rounded({"machine": machine, "modes": modes}), page)
    print(f"\n{page}\nwrote {args.out}/selfdistill.md, selfdistill.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
