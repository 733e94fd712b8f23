"""How fast are the same heads and questions through this project and through other decoders?

    python benchmarks/peers.py runs/demo --quick
    python benchmarks/peers.py runs/mine --bench mtbench --assistant JackFram/llama-160m

Decoders: this project's loop with the run's tree and with the empty one; `generate` of transformers, plain, with
prompt-lookup decoding and with an assistant model (`--assistant`); vLLM, plain and with the exported heads as a chain,
where it is installed. All are greedy, in one dtype, and take turns on every question in a rotating order. Writes
peers.md and peers.json to `--out`. Never run on a GPU, nor with a real vLLM.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

from rich.console import Console  # noqa: E402
from shared import backbone_note, machine_facts, machine_line, rounded, table, warn_if_busy, write_result  # noqa: E402

from medusa_train.checkpoint.load_model import LoadedModel, load_with_draft  # noqa: E402
from medusa_train.checkpoint.resolve import ModelPaths, resolve_model  # noqa: E402
from medusa_train.cli.common import quiet_libraries  # noqa: E402
from medusa_train.data.tokenize import ChatEncoder  # noqa: E402
from medusa_train.errors import MedusaError  # noqa: E402
from medusa_train.evaluation.answerers import (  # noqa: E402
    GENERATE,
    PLAIN,
    TREE,
    describe_baseline,
    extra_baselines,
)
from medusa_train.evaluation.choose_dtype import choose_dtype  # noqa: E402
from medusa_train.evaluation.metrics import acceleration_rate, tokens_per_second  # noqa: E402
from medusa_train.evaluation.questions import load_bench  # noqa: E402
from medusa_train.evaluation.records import TimedAnswer, TurnRecord  # noqa: E402
from medusa_train.evaluation.run_metadata import short_path  # noqa: E402
from medusa_train.evaluation.speed import SpeedTest  # noqa: E402
from medusa_train.export.write import export_run  # noqa: E402
from medusa_train.progress import RunProgress  # noqa: E402

WARM_UP = 2  # questions that every decoder answers before it is timed
VLLM, VLLM_MEDUSA = "vLLM", "vLLM, medusa"


class VllmAnswerer:
    """vLLM's engine in this process, greedy, one question at a time.

    Args:
        model: a directory or hub name. eos_ids: tokens that end an answer. max_context: positions.
        memory: share of the GPU's memory. heads: a directory in vLLM's layout and their number; None: plain decoding.
    """

    def __init__(
        self,
        model: str,
        dtype: str,
        eos_ids: Collection[int],
        max_context: int,
        memory: float,
        heads: tuple[Path, int] | None = None,
    ) -> None:
        from vllm import LLM

        speculative = None
        if heads is not None:
            speculative = {"method": "medusa", "model": str(heads[0]), "num_speculative_tokens": heads[1]}
        self._stop_ids = list(eos_ids)
        self._llm = LLM(
            model=model,
            dtype=dtype,
            max_model_len=max_context,
            gpu_memory_utilization=memory,
            generation_config="vllm",  # the checkpoint's may set a temperature or a penalty
            disable_log_stats=False,  # needed for the number of drafts
            speculative_config=speculative,
        )

    def answer(self, prompt_ids: Sequence[int], max_new_tokens: int) -> TimedAnswer:
        """Decode; steps are those that verified a draft, 0 where vLLM does not report them."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=max_new_tokens, stop_token_ids=self._stop_ids)
        before = self._drafts()
        started = time.perf_counter()
        (result,) = self._llm.generate([{"prompt_token_ids": list(prompt_ids)}], sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        return TimedAnswer(tuple(result.outputs[0].token_ids), seconds, steps=self._drafts() - before)

    def _drafts(self) -> int:
        """Number of drafts verified so far."""
        metrics = self._llm.get_metrics() if hasattr(self._llm, "get_metrics") else []
        return sum(int(metric.value) for metric in metrics if metric.name == "vllm:spec_decode_num_drafts")


def vllm_answerers(
    subject: LoadedModel, paths: ModelPaths, dtype: str, folder: Path, memory: float, note: Callable[[str], None]
) -> dict[str, Any]:
    """Start vLLM with and without the heads, exported into `folder`; empty, with a note, where that is impossible."""
    if importlib.util.find_spec("vllm") is None:
        note("vLLM: skipped, not installed")
        return {}
    if paths.quantization is not None and paths.adapter is None:
        note(f"vLLM: skipped, it would load the original of this {paths.quantization} backbone")
        return {}
    backbone, model = subject.backbone, paths.base_model
    common = (dtype, backbone.eos_ids, backbone.max_context, memory)
    engines: dict[str, Any] = {}
    try:
        if paths.adapter is not None:
            model = str(export_run(paths, "merged", folder / "merged").target)
        engines[VLLM] = VllmAnswerer(model, *common)
        if subject.draft is not None:
            heads = export_run(paths, "vllm", folder / "vllm").target
            engines[VLLM_MEDUSA] = VllmAnswerer(model, *common, heads=(heads, subject.draft.num_heads))
    except Exception as error:  # any failure of vLLM's processes must not stop the other decoders
        note(f"vLLM: skipped ({type(error).__name__}: {str(error).partition(chr(10))[0]})")
    return engines


def answers_by_decoder(records: Sequence[TurnRecord]) -> dict[str, list[TimedAnswer]]:
    """Collect all answers by decoder, in the order of the table."""
    answers: dict[str, list[TimedAnswer]] = {}
    for record in records:
        generate = replace(record.generate, steps=len(record.generate.tokens) - 1)  # one token at a time
        for name, answer in {TREE: record.tree, PLAIN: record.plain, GENERATE: generate, **record.others}.items():
            if answer is not None:
                answers.setdefault(name, []).append(answer)
    return answers


def figures(answers: Mapping[str, Sequence[TimedAnswer]]) -> dict[str, dict[str, Any]]:
    """Sum each decoder's answers; `equal`: how many are plain decoding's, token for token."""
    return {
        name: {
            "answers": len(some),
            "tokens": sum(len(answer.tokens) for answer in some),
            "seconds": sum(answer.seconds for answer in some),
            "tokens_per_s": tokens_per_second(some),
            "tokens_per_step": acceleration_rate(some) if any(answer.steps for answer in some) else None,
            "equal": sum(one.tokens == plain.tokens for one, plain in zip(some, answers[PLAIN], strict=True)),
        }
        for name, some in answers.items()
    }


def title(name: str, assistant: str | None, transformers: str) -> str:
    """Return a decoder's name in the table."""
    own = {TREE: "this project, the run's tree", PLAIN: "this project, plain decoding"}
    if name in own:
        return own[name]
    return name if name.startswith("vLLM") else describe_baseline(name, transformers, assistant)


def markdown(
    machine: Mapping[str, Any], run: Mapping[str, Any], decoders: Mapping[str, Any], notes: Sequence[str]
) -> str:
    """Format the page."""
    rows = []
    for name, one in decoders.items():
        rate, steps = one["tokens_per_s"], one["tokens_per_step"]
        row = [title(name, run["assistant"], machine["transformers"]), f"{rate:,.1f}"]
        row.append("" if steps is None else f"{steps:.2f}")
        row += [f"{rate / decoders[base]['tokens_per_s']:.2f}x" for base in (PLAIN, GENERATE)]
        rows.append([*row, f"{one['equal']} of {one['answers']}"])
    titles = ["decoder", "tokens/s", "tokens per step", "over plain", "over generate", "equal to plain decoding"]
    what = (
        f"{run['model']} on {run['bench']}: {run['questions']} questions, {run['turns']} answers of up to "
        f"{run['max_new_tokens']} tokens in {run['rounds']} rounds, greedy, {run['dtype']}. Tokens over wall time, "
        f"prefill included. {backbone_note(run['base_model'])}"
    )
    parts = ["# Against other decoders", machine_line(machine), what, table(titles, rows)]
    return "\n\n".join([*parts, *(["\n".join(f"- {line}" for line in notes)] if notes else [])]) + "\n"


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", help="run directory, or directory of heads; default: the newest run")
    parser.add_argument("--bench", default="tiny", help="of medusa-eval (tiny)")
    parser.add_argument("--limit", type=int, help="questions at most")
    parser.add_argument("--quick", action="store_true", help="12 questions, one round")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="of an answer (256)")
    parser.add_argument("--dtype", default="auto", help="auto: the fastest here for plain decoding")
    parser.add_argument("--assistant", metavar="MODEL", help="small model with the same tokenizer")
    parser.add_argument("--rounds", type=int, help="times that all questions are asked (2)")
    parser.add_argument("--vllm-memory", type=float, default=0.3, help="share of the GPU for each vLLM engine (0.3)")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/peers"), metavar="DIR")
    args = parser.parse_args(arguments)
    args.limit = args.limit or (12 if args.quick else None)
    args.rounds = args.rounds or (1 if args.quick else 2)
    return args


def run(args: argparse.Namespace, machine: Mapping[str, Any]) -> None:
    """Measure all decoders and write the result.

    Raises:
        MedusaError: run, bench or assistant cannot be found or loaded.
    """
    notes: list[str] = []

    def note(line: str) -> None:
        notes.append(line)
        print(line, flush=True)

    paths = resolve_model(args.run, None, None)
    bench = load_bench(args.bench, note).limited(args.limit)
    dtype = args.dtype if args.dtype != "auto" else choose_dtype(bench, paths, RunProgress(Console()))
    subject = load_with_draft(paths, dtype)
    chat = ChatEncoder(subject.backbone.tokenizer, paths.chat_template, paths.chat_template_kwargs)
    if args.assistant is None:
        note("assisted generation: skipped, no --assistant given")
    others: dict[str, Any] = dict(extra_baselines(subject.backbone, args.assistant, prompt_lookup=True, note=note))
    records: list[TurnRecord] = []
    with tempfile.TemporaryDirectory() as folder:
        others |= vllm_answerers(subject, paths, dtype, Path(folder), args.vllm_memory, note)
        test = SpeedTest(subject, chat, args.max_new_tokens, others)
        test.warm_up(bench.questions[:WARM_UP])
        for number in range(args.rounds):
            records += test.run(bench.questions, lambda turn: None)[0]
            print(f"round {number + 1} of {args.rounds}: {len(records)} turns", flush=True)
    about = {
        "model": short_path(paths.name or paths.base_model),
        "base_model": short_path(paths.base_model),
        "bench": bench.name,
        "questions": len(bench.questions),
        "turns": len(records),
        "max_new_tokens": args.max_new_tokens,
        "rounds": args.rounds,
        "dtype": dtype,
        "assistant": args.assistant,
        "tree_nodes": None if subject.tree is None else subject.tree.size,
    }
    decoders = figures(answers_by_decoder(records))
    page = markdown(machine, about, decoders, notes)
    record = {"machine": machine, "run": about, "decoders": decoders, "notes": notes}
    write_result(args.out, "peers", rounded(record), page)
    print(f"\n{page}\nwrote {args.out}/peers.md, peers.json")


def main(arguments: Sequence[str] | None = None) -> int:
    """Return exit code 0, or that of an error with the run."""
    args = parse_arguments(arguments)
    quiet_libraries()
    machine = machine_facts(__file__, arguments)
    warn_if_busy(machine)
    try:
        run(args, machine)
    except MedusaError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
