"""The same heads and questions through this project and through others that decode faster than one token at a time.

    python benchmarks/peers.py runs/demo
    python benchmarks/peers.py runs/mine --bench mtbench --assistant JackFram/llama-160m --rounds 3

Decoders: this project's loop with the run's tree and with the empty one; `generate` of transformers, plain, with
prompt-lookup decoding and with an assistant model (`--assistant`); vLLM, plain and with the exported heads, where it is
installed. Who is absent is left out with a line. All are greedy and in one dtype; they take turns on every question,
in an order that rotates. Writes peers.json and peers.md to `--out`. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # the sibling modules, and the package where it is not installed

from machine import facts, sentence, table, warning  # noqa: E402
from peers_vllm import vllm_answerers  # noqa: E402
from rich.console import Console  # noqa: E402

from medusa_train.checkpoint.load import LoadedModel, load_with_draft  # noqa: E402
from medusa_train.checkpoint.resolve import ModelPaths, resolve_model  # noqa: E402
from medusa_train.cli.common import quiet_libraries  # noqa: E402
from medusa_train.data.tokenize import ChatEncoder  # noqa: E402
from medusa_train.errors import MedusaError  # noqa: E402
from medusa_train.evaluation.choose_dtype import choose_dtype  # noqa: E402
from medusa_train.evaluation.questions import Bench, load_bench  # noqa: E402
from medusa_train.evaluation.records import TimedAnswer, TurnRecord  # noqa: E402
from medusa_train.evaluation.run_metadata import short_path  # noqa: E402
from medusa_train.evaluation.speed import (  # noqa: E402  # noqa: E402
    GENERATE,
    PLAIN,
    TREE,
    GenerateAnswerer,
    SpeedTest,
    describe,
    further_baselines,
)

WARM_UP = 2  # questions that every decoder answers before it is timed


class Counted:
    """`generate` that counts the model's passes: those of the backbone, an assistant's own not among them."""

    def __init__(self, answerer: GenerateAnswerer, model: Any) -> None:
        self._answerer = answerer
        self._model = model

    def answer(self, prompt_ids: Sequence[int], max_new_tokens: int) -> TimedAnswer:
        """Steps are all passes but the prefill."""
        passes = 0

        def count(*_: object) -> None:
            nonlocal passes
            passes += 1

        hook = self._model.register_forward_hook(count)
        try:
            made = self._answerer.answer(prompt_ids, max_new_tokens)
        finally:
            hook.remove()
        return TimedAnswer(made.tokens, made.seconds, steps=passes - 1)


@dataclass
class RunStats:
    """What one decoder came to, over all rounds and questions.

    Attributes:
        answers, tokens, seconds: sums; the seconds include prefill. steps: passes behind the prefill, 0: not known.
        same: how many answers are plain decoding's, token for token.
    """

    name: str
    answers: int = 0
    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    same: int = 0

    def add(self, made: TimedAnswer, plain: TimedAnswer) -> None:
        """One more answer, and plain decoding's to the same prompt."""
        self.answers += 1
        self.tokens += len(made.tokens)
        self.seconds += made.seconds
        self.steps += made.steps
        self.same += made.tokens == plain.tokens

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def tokens_per_step(self) -> float | None:
        """The prefill gives each answer's first token. None where the decoder does not count its steps."""
        return (self.tokens - self.answers) / self.steps if self.steps else None


def tallies(records: Sequence[TurnRecord]) -> dict[str, RunStats]:
    """Sums over all turns, by decoder, in the order of the table."""
    found: dict[str, RunStats] = {}
    for record in records:
        timed: dict[str, TimedAnswer | None] = {
            TREE: record.tree,
            PLAIN: record.plain,
            GENERATE: record.generate,
            **record.others,
        }
        timed[GENERATE] = replace(record.generate, steps=len(record.generate.tokens) - 1)  # one token at a time
        for name, made in timed.items():
            if made is not None:
                found.setdefault(name, RunStats(name)).add(made, record.plain)
    return found


def decode(
    subject: LoadedModel, chat: ChatEncoder, bench: Bench, further: Mapping[str, Any], asked: argparse.Namespace
) -> list[TurnRecord]:
    """The turns of all rounds."""
    test = SpeedTest(subject, chat, asked.max_new_tokens, further)
    test.warm_up(bench.questions[:WARM_UP])
    records: list[TurnRecord] = []
    for number in range(asked.rounds):
        records += test.run(bench.questions, lambda turn: None)[0]
        print(f"round {number + 1} of {asked.rounds}: {len(records)} turns", flush=True)
    return records


def peers_of(
    subject: LoadedModel,
    paths: ModelPaths,
    dtype: str,
    folder: Path,
    asked: argparse.Namespace,
    note: Callable[[str], None],
) -> dict[str, Any]:
    """Every decoder besides the loop and plain `generate` that can run here."""
    if asked.assistant is None:
        note("assisted generation: left out, no --assistant was named")
    baselines = further_baselines(subject.backbone, asked.assistant, prompt_lookup=True, note=note)
    counted = {name: Counted(one, subject.backbone.model) for name, one in baselines.items()}
    return {**counted, **vllm_answerers(subject, paths, dtype, folder, asked.vllm_memory, note)}


def title(name: str, assistant: str | None, transformers: str) -> str:
    """A decoder's name in the table."""
    own = {TREE: "this project, the run's tree", PLAIN: "this project, plain decoding"}
    if name in own:
        return own[name]
    return name if name.startswith("vLLM") else describe(name, transformers, assistant)


def markdown(
    machine: Mapping[str, Any], run: Mapping[str, Any], found: Mapping[str, RunStats], notes: Sequence[str]
) -> str:
    """The page."""
    rows = []
    for name, one in found.items():
        steps = one.tokens_per_step
        rows.append(
            [
                title(name, run["assistant"], machine["transformers"]),
                f"{one.rate:,.1f}",
                "" if steps is None else f"{steps:.2f}",
                f"{one.rate / found[PLAIN].rate:.2f}x",
                f"{one.rate / found[GENERATE].rate:.2f}x",
                f"{one.same} of {one.answers}",
            ]
        )
    titles = ["decoder", "tokens/s", "tokens per step", "over plain", "over generate", "plain decoding's tokens"]
    what = (
        f"{run['model']} on {run['bench']}: {run['questions']} questions, {run['turns']} answers of up to "
        f"{run['max_new_tokens']} tokens in {run['rounds']} rounds, greedy, {run['dtype']}. Tokens over wall time, "
        f"prefill included."
    )
    parts = ["# Against other decoders", sentence(dict(machine)), what, table(titles, rows)]
    return "\n\n".join([*parts, *(["\n".join(f"- {line}" for line in notes)] if notes else [])]) + "\n"


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", help="run directory, or directory of heads; default: the newest run")
    parser.add_argument("--bench", default="tiny", help="of medusa-eval (tiny)")
    parser.add_argument("--limit", type=int, help="questions at most")
    parser.add_argument("--quick", action="store_true", help="12 questions, one round")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="of an answer (256)")
    parser.add_argument("--dtype", default="auto", help="auto: the fastest here for plain decoding")
    parser.add_argument(
        "--assistant", metavar="MODEL", help="small model of the same tokenizer, for assisted generation"
    )
    parser.add_argument("--rounds", type=int, help="times that all questions are asked (2)")
    parser.add_argument("--vllm-memory", type=float, default=0.3, help="share of the GPU for each vLLM engine (0.3)")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/peers"), metavar="DIR", help="results")
    asked = parser.parse_args(arguments)
    asked.limit = asked.limit or (12 if asked.quick else None)
    asked.rounds = asked.rounds or (1 if asked.quick else 2)
    return asked


def run(asked: argparse.Namespace, machine: Mapping[str, Any]) -> None:
    """Measure, and write both files.

    Raises:
        MedusaError: run, bench or assistant can't be found or loaded.
    """
    notes: list[str] = []

    def note(line: str) -> None:
        notes.append(line)
        print(line, flush=True)

    paths = resolve_model(asked.run, None, None)
    bench = load_bench(asked.bench, note).limited(asked.limit)
    dtype = asked.dtype if asked.dtype != "auto" else choose_dtype(bench, paths, Console(soft_wrap=True))
    subject = load_with_draft(paths, dtype)
    chat = ChatEncoder(subject.backbone.tokenizer, paths.chat_template)
    with tempfile.TemporaryDirectory() as folder:
        further = peers_of(subject, paths, dtype, Path(folder), asked, note)
        records = decode(subject, chat, bench, further, asked)
    found = tallies(records)
    about = {
        "model": short_path(paths.name or paths.base_model),
        "bench": bench.name,
        "questions": len(bench.questions),
        "turns": len(records),
        "max_new_tokens": asked.max_new_tokens,
        "rounds": asked.rounds,
        "dtype": dtype,
        "assistant": asked.assistant,
        "tree_nodes": None if subject.tree is None else subject.tree.size,
    }
    asked.out.mkdir(parents=True, exist_ok=True)
    decoders = [
        {
            **asdict(one),
            "title": title(name, asked.assistant, machine["transformers"]),
            "tokens_per_s": one.rate,
            "tokens_per_step": one.tokens_per_step,
        }
        for name, one in found.items()
    ]
    record = {"machine": machine, "run": about, "decoders": decoders, "notes": notes}
    (asked.out / "peers.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    text = markdown(machine, about, found, notes)
    (asked.out / "peers.md").write_text(text, encoding="utf-8")
    print(f"\n{text}\nwrote {asked.out}/peers.md, peers.json")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, or that of what is wrong with the run."""
    asked = parse_arguments(arguments)
    quiet_libraries()
    machine = facts(__file__, arguments)
    if line := warning(machine):
        print(line, flush=True)
    try:
        run(asked, machine)
    except MedusaError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
