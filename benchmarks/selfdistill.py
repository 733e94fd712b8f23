"""How many tokens per second does self-distillation write, batched and with heads that speculate?

    python benchmarks/selfdistill.py runs/demo
    python benchmarks/selfdistill.py runs/demo --dtypes bfloat16 --seeds 64 --batch 8
    python benchmarks/selfdistill.py models/smollm2-135m-instruct --forced 128 --vllm /path/to/vllm/bin/python

Answers the same prompts with the Hugging Face engine in several modes, in turns: one conversation at a time, `--batch`
of them, and both with the heads of RUN, in the fastest of `--dtypes` at batch 1; with heads also in batches that are
completed before the next one starts. Tokens over wall time, prefill included. *rows per pass* shows how full the
batches were; with few prompts their end, where the last conversations run out, weighs too much.

`--forced N` measures serving instead, beside vLLM on the same CPU: the first turns of MT-Bench (`MEDUSA_BENCH_DIR`, or
`--questions`), N tokens for each whatever they are, greedy, in bfloat16, prefill included, in batches of `--batches`
rows, with `--compile` also compiled. `--vllm` names the interpreter of an environment that has vllm; without it vLLM
is left out.

Writes selfdistill.md and selfdistill.json, or selfdistill_forced.md and .json, to `--out`. Never run on a GPU.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

from shared import machine_facts, machine_line, rounded, table, warn_if_busy, write_result  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from medusa_train.checkpoint.load_model import LoadedModel, compile_backbone, load_with_draft  # noqa: E402
from medusa_train.checkpoint.resolve import ModelPaths, resolve_model  # noqa: E402
from medusa_train.data.sources import open_seed_dataset  # noqa: E402
from medusa_train.selfdistill.chat_prompting import ChatPrompting  # noqa: E402
from medusa_train.selfdistill.engines import Engine  # noqa: E402
from medusa_train.selfdistill.hf_engine import HFEngine  # noqa: E402
from medusa_train.selfdistill.modes import DropRules, replay  # noqa: E402
from medusa_train.selfdistill.prompts import Prompt, Selection, read_prompts, select_prompts  # noqa: E402


@dataclass(frozen=True)
class Mode:
    """How the prompts are answered."""

    name: str
    dtype: str
    batch: int
    speculates: bool = False
    refills: bool = True


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


KEEP_ALL = DropRules(drop_truncated=False, drop_looping=False)


def answer_all(engine: Engine, seeds: Sequence[Prompt]) -> tuple[int, int]:
    """Answer all turns of `seeds`, truncated answers included; returns numbers of answers and tokens."""
    chats = {n: replay(seed, random_seed=1, rules=KEEP_ALL) for n, seed in enumerate(seeds)}
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
    draft = subject.draft if mode.speculates else None
    if draft is not None and not mode.refills:
        draft = copy.copy(draft)
        draft.can_append_rows = False
    return HFEngine(
        subject.backbone,
        temperature=args.temperature,
        max_new_tokens=args.max_new_tokens,
        chat_template=paths.chat_template,
        batch_size=mode.batch,
        draft=draft,
        tree=None if draft is None else subject.tree,
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
            print(f"round {number + 1}: {mode.name:38} {mode.dtype:9} {result.rate:8,.0f} tokens/s", flush=True)
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
        modes.append(Mode(f"batch of {args.batch}, heads speculate", best, args.batch, speculates=True))
        modes.append(Mode(f"whole batches of {args.batch}, heads speculate", best, args.batch, True, refills=False))
    return [*measure(engines(modes), seeds, args.rounds), *(one for one in single if one.mode.dtype != best)]


# Forced tokens, beside vLLM

#: Run by vLLM's interpreter: model, file of prompts, tokens, batch -> a line with the seconds.
VLLM_SCRIPT = """
import json, sys, time
from vllm import LLM, SamplingParams
model, prompts, tokens, batch = sys.argv[1], json.load(open(sys.argv[2])), int(sys.argv[3]), int(sys.argv[4])
llm = LLM(model=model, dtype="bfloat16", max_num_seqs=batch, max_model_len=1024, enable_prefix_caching=False,
          generation_config="vllm")
sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
prompts = [{"prompt_token_ids": ids} for ids in prompts]
llm.generate(prompts[:2], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True), use_tqdm=False)
started = time.perf_counter()
outputs = llm.generate(prompts, sampling, use_tqdm=False)
seconds = time.perf_counter() - started
print("RESULT", json.dumps([seconds, sum(len(one.outputs[0].token_ids) for one in outputs)]), flush=True)
"""


def vllm_rate(python: str, model: str, prompts: Sequence[list[int]], tokens: int, batch: int, threads: int) -> float:
    """Return vLLM's tokens per second on the first `threads` cores; fails with its output."""
    bind = {"VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}", "VLLM_CPU_KVCACHE_SPACE": "2"}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(prompts, file)
        file.flush()
        command = [python, "-c", VLLM_SCRIPT, model, file.name, str(tokens), str(batch)]
        done = subprocess.run(command, env={**os.environ, **bind}, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise RuntimeError(f"vLLM failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    seconds, generated = json.loads(lines[-1].removeprefix("RESULT "))
    return float(generated / seconds)


def own_rate(
    paths: ModelPaths, prompts: Sequence[Prompt], tokens: int, batch: int, compiled: bool
) -> tuple[float, float]:
    """Return the engine's tokens per second, and the seconds to load and compile."""
    started = time.perf_counter()
    backbone = load_with_draft(replace(paths, heads=None), "bfloat16", prepack=True).backbone
    backbone.eos_ids = ()  # answers end at their last token only
    if compiled:
        compile_backbone(backbone, paths, rows=batch, trees=False)
    engine = HFEngine(backbone, temperature=0.0, max_new_tokens=tokens, exact=False, batch_size=batch)
    ready = time.perf_counter() - started
    answer_all(engine, prompts[:2])  # warm-up
    started = time.perf_counter()
    _, generated = answer_all(engine, prompts)
    return generated / (time.perf_counter() - started), ready


def prompt_ids(paths: ModelPaths, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Return the token ids of the prompts' first turns, as the engine gets them."""
    prompting = ChatPrompting(
        AutoTokenizer.from_pretrained(paths.base_model), paths.chat_template, paths.chat_template_kwargs
    )
    return [prompting.prompt(next(replay(prompt, random_seed=1, rules=DropRules()))) for prompt in prompts]


def forced(args: argparse.Namespace, machine: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Measure forced tokens in batches, ours and vLLM's; returns the record and the page."""
    paths = resolve_model(None, args.run, None)
    prompts, _ = select_prompts(read_prompts(open_seed_dataset(args.questions)), Selection(max_turns=1))
    prompts = prompts[: args.prompts]
    if args.vllm is None:
        print("vLLM is left out: --vllm names no interpreter")
    rates: dict[str, dict[int, float]] = {}
    for batch in args.batches:
        for compiled in (False, True) if args.compile else (False,):
            rate, ready = own_rate(paths, prompts, args.forced, batch, compiled)
            name = "compiled" if compiled else "not compiled"
            rates.setdefault(name, {})[batch] = rate
            print(f"batch {batch:3} {name:14} {rate:6.0f} tokens/s, ready after {ready:.0f} s", flush=True)
        if args.vllm is not None:
            ids = prompt_ids(paths, prompts)
            rate = vllm_rate(args.vllm, str(paths.base_model), ids, args.forced, batch, machine["threads"])
            rates.setdefault("vLLM", {})[batch] = rate
            print(f"batch {batch:3} {'vLLM':14} {rate:6.0f} tokens/s", flush=True)
    rows = [[name, *(f"{by_batch[batch]:.0f}" for batch in args.batches)] for name, by_batch in rates.items()]
    page = (
        f"# {args.forced} forced tokens for {len(prompts)} prompts, bfloat16, tokens/s\n\n{machine_line(machine)}\n\n"
        f"{table(['engine', *(f'batch of {batch}' for batch in args.batches)], rows)}\n"
    )
    return {"machine": dict(machine), "prompts": len(prompts), "tokens": args.forced, "rates": rates}, page


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


def mt_bench() -> str:
    """Return the path of MT-Bench's questions."""
    return str(Path(os.environ.get("MEDUSA_BENCH_DIR", "bench")) / "mt_bench" / "question.jsonl")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="run directory, whose heads speculate; with --forced a model")
    parser.add_argument("--seed-dataset", default="tiny", help="prompts (tiny)")
    parser.add_argument("--seeds", type=int, default=192, help="conversations drawn from them (192)")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--forced", type=int, metavar="N", help="measure N forced tokens per prompt")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32], help="of --forced (1 8 32)")
    parser.add_argument("--prompts", type=int, default=64, help="of --forced (64)")
    parser.add_argument("--questions", default=mt_bench(), help="question file of --forced (MT-Bench)")
    parser.add_argument("--compile", action="store_true", help="measure --forced with compiled passes too")
    parser.add_argument("--vllm", metavar="PYTHON", help="interpreter of an environment with vllm, for --forced")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/selfdistill"), metavar="DIR")
    args = parser.parse_args(arguments)
    machine = machine_facts(__file__, arguments)
    warn_if_busy(machine)
    if args.forced is not None:
        record, page = forced(args, machine)
        write_result(args.out, "selfdistill_forced", rounded(record), page)
        print(f"\n{page}\nwrote {args.out}/selfdistill_forced.md, selfdistill_forced.json")
        return 0
    results = run(args)
    sums = ("answers", "tokens", "seconds", "rate", "passes", "rows_per_pass")
    modes = [{**asdict(one.mode), **{name: getattr(one, name) for name in sums}} for one in results]
    page = markdown(machine, results)
    write_result(args.out, "selfdistill", rounded({"machine": machine, "modes": modes}), page)
    print(f"\n{page}\nwrote {args.out}/selfdistill.md, selfdistill.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
