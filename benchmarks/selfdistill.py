"""How many tokens per second does self-distillation write, in batches and beside vLLM?

    python benchmarks/selfdistill.py models/smollm2-135m-instruct --compile --vllm
    /path/to/vllm/bin/python

Generates `--tokens` tokens, whatever they are, for the first turns of MT-Bench (`MEDUSA_BENCH_DIR`,
or `--questions`): greedy, in bfloat16, prefill included, in batches of `--batches` rows, with
`--compile` also compiled. `--vllm` names the interpreter of an environment that has vllm; without
it vLLM is left out. Writes selfdistill.md and selfdistill.json to `--out`. Never run on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

from shared import machine_facts, rounded, table, warn_if_busy, write_page  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from medusa_train.checkpoint.load_model import compile_backbone, load_for_decoding  # noqa: E402
from medusa_train.checkpoint.resolve import ModelPaths, resolve_model  # noqa: E402
from medusa_train.config.schema import DatasetConfig  # noqa: E402
from medusa_train.data.sources import open_source  # noqa: E402
from medusa_train.selfdistill.answers import DropRules, Engine, Request  # noqa: E402
from medusa_train.selfdistill.chat_prompting import ChatPrompting  # noqa: E402
from medusa_train.selfdistill.hf_engine import HFEngine  # noqa: E402
from medusa_train.selfdistill.modes import replay  # noqa: E402
from medusa_train.selfdistill.prompts import (  # noqa: E402
    Prompt,
    Selection,
    read_prompts,
    select_prompts,
)


def requests_of(prompts: Sequence[Prompt]) -> list[Request]:
    """Return the requests for the prompts' first turns."""
    return [next(replay(prompt, random_seed=1, rules=DropRules())) for prompt in prompts]


def answer_all(engine: Engine, requests: Sequence[Request]) -> int:
    """Answer all requests; returns the number of tokens."""
    waiting = list(enumerate(requests))[::-1]
    tokens = running = 0
    while waiting or running:
        while waiting and running < engine.capacity:
            engine.submit(*waiting.pop())
            running += 1
        tokens += engine.next()[1].completion_tokens
        running -= 1
    return tokens


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


def vllm_rate(
    python: str, model: str, prompts: Sequence[list[int]], tokens: int, batch: int, threads: int
) -> float:
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
    paths: ModelPaths, requests: Sequence[Request], tokens: int, batch: int, compiled: bool
) -> tuple[float, float]:
    """Return the engine's tokens per second, and the seconds to load and compile."""
    started = time.perf_counter()
    backbone = load_for_decoding(replace(paths, heads=None), "bfloat16", prepack=True).backbone
    backbone.eos_ids = ()  # answers end at their last token only
    if compiled:
        compile_backbone(backbone, paths, rows=batch, trees=False)
    engine = HFEngine(backbone, temperature=0.0, max_new_tokens=tokens, batch_size=batch)
    ready = time.perf_counter() - started
    answer_all(engine, requests[: max(2, batch)])  # warm-up, which captures the steps on a GPU
    started = time.perf_counter()
    generated = answer_all(engine, requests)
    return generated / (time.perf_counter() - started), ready


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="directory of the model")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer (128)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32], help="rows (1 8 32)")
    parser.add_argument("--prompts", type=int, default=64, help="at most (64)")
    questions = Path(os.environ.get("MEDUSA_BENCH_DIR", "bench")) / "mt_bench" / "question.jsonl"
    parser.add_argument("--questions", default=str(questions), help="question file (MT-Bench)")
    parser.add_argument("--compile", action="store_true", help="measure compiled passes too")
    parser.add_argument("--vllm", metavar="PYTHON", help="interpreter of an environment with vllm")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/benchmarks/selfdistill"), metavar="DIR"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the result."""
    args = parse_arguments(arguments)
    machine = machine_facts(__file__, arguments)
    warn_if_busy()
    paths = resolve_model(None, args.model, None)
    prompts, _ = select_prompts(
        read_prompts(open_source(DatasetConfig(path=args.questions))), Selection(max_turns=1)
    )
    requests = requests_of(prompts[: args.prompts])
    rates: dict[str, dict[int, float]] = {}
    for batch in args.batches:
        for compiled in (False, True) if args.compile else (False,):
            rate, ready = own_rate(paths, requests, args.tokens, batch, compiled)
            name = "compiled" if compiled else "not compiled"
            rates.setdefault(name, {})[batch] = rate
            print(
                f"batch {batch:3} {name:14} {rate:6.0f} tokens/s, ready after {ready:.0f} s",
                flush=True,
            )
        if args.vllm is not None:
            tokenizer = AutoTokenizer.from_pretrained(paths.base_model)
            prompting = ChatPrompting(tokenizer, paths.chat_template, paths.chat_template_kwargs)
            ids = [prompting.prompt(request) for request in requests]
            rate = vllm_rate(
                args.vllm, str(paths.base_model), ids, args.tokens, batch, machine["threads"]
            )
            rates.setdefault("vLLM", {})[batch] = rate
            print(f"batch {batch:3} {'vLLM':14} {rate:6.0f} tokens/s", flush=True)
    rows = [
        [name, *(f"{by_batch[batch]:.0f}" for batch in args.batches)]
        for name, by_batch in rates.items()
    ]
    record = rounded(
        {"machine": machine, "prompts": len(requests), "tokens": args.tokens, "rates": rates}
    )
    title = f"{args.tokens} tokens for {len(requests)} prompts, bfloat16, tokens/s"
    parts = [table(["engine", *(f"batch of {batch}" for batch in args.batches)], rows)]
    print(write_page(args.out, "selfdistill", title, record, parts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
