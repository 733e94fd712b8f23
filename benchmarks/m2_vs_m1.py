"""Medusa-2 against Medusa-1 on the embedded tiny backbone, with equal head-training tokens, in one command.

    python benchmarks/m2_vs_m1.py --gsm8k train.jsonl              # about an hour on two CPU cores
    python benchmarks/m2_vs_m1.py --longer 10                      # also both recipes with 10 epochs instead of 2
    python benchmarks/m2_vs_m1.py --joint medusa_heads_coefficient=0.1 --out runs/benchmarks/m2_lambda0.1

Trains Medusa-1 for all epochs; Medusa-2 (LoRA, KL) for as many, the first of them as Medusa-1 (stage one); the same
with plain cross-entropy in place of KL. Each is decoded on the tiny bench (`medusa-eval`), and its backbone compared
with the original. Writes m2_vs_m1.json, .md and .png (with matplotlib) to `--out`, after every case: what is finished
is not done again, and a training that was stopped goes on. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE), str(ROOT)]  # the sibling modules, and the package where it is not installed

from medusa_train.cli.common import quiet_libraries  # noqa: E402


@dataclass(frozen=True)
class Stage:
    """One run of `medusa-train`: its directory's name, its configuration, and what is set otherwise."""

    name: str
    config: str
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """What is compared: the stages of its training, the last one's run being measured.

    `against` names the Medusa-1 that trained its heads on as many tokens.
    """

    name: str
    title: str
    stages: tuple[Stage, ...]
    against: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Compare Medusa-2 with Medusa-1 at equal head-training tokens.")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/m2_vs_m1"), metavar="DIR", help="results")
    parser.add_argument("--epochs", type=float, default=2, help="passes over the data in which heads learn (2)")
    parser.add_argument("--stage-one", type=float, default=1, help="of these, as Medusa-1 before Medusa-2 begins (1)")
    parser.add_argument("--longer", type=float, metavar="EPOCHS", help="both recipes with so many epochs as well")
    problems = "its train.jsonl, of which what the tiny backbone did not learn is taken; default: the hub's test split"
    parser.add_argument("--gsm8k", type=Path, metavar="FILE", help=problems)
    parser.add_argument("--problems", type=int, default=200, help="GSM8K problems at most (200)")
    parser.add_argument("--heads", nargs="*", default=[], metavar="key=value", help="set in every stage")
    parser.add_argument("--joint", nargs="*", default=[], metavar="key=value", help="set in Medusa-2's joint stage")
    parser.add_argument("--without-ce", action="store_true", help="leave out plain cross-entropy in place of KL")
    parser.add_argument("--bench", default="tiny", help="of medusa-eval (tiny)")
    parser.add_argument("--limit", type=int, help="questions at most")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="of an answer (256)")
    parser.add_argument("--dtype", default="auto", help="to decode in; auto: the fastest here, for all cases")
    asked = parser.parse_args(arguments)
    shortest = min(asked.epochs, asked.longer or asked.epochs)
    if not 0 < asked.stage_one < shortest:
        parser.error(f"--stage-one {asked.stage_one:g} has to leave some of the {shortest:g} epochs to the joint stage")
    return asked


def cases(asked: argparse.Namespace) -> Iterator[Case]:
    """All cases, each Medusa-1 before those that are compared with it."""
    yield from _pair("", asked.epochs, asked)
    if not asked.without_ce:
        yield _joint("m2-ce", "Medusa-2, plain CE", "m1", asked.epochs, asked, ("medusa_self_distillation=false",))
    if asked.longer:
        yield from _pair("-longer", asked.longer, asked)


def _pair(suffix: str, epochs: float, asked: argparse.Namespace) -> Iterator[Case]:
    also = f", {epochs:g} epochs" if suffix else ""
    stage = Stage(f"m1{suffix}", "configs/tiny_m1.yaml", (f"num_epochs={epochs:g}", *asked.heads))
    yield Case(f"m1{suffix}", f"Medusa-1{also}", (stage,), None, _measured(asked))
    yield _joint(f"m2{suffix}", f"Medusa-2{also}", f"m1{suffix}", epochs, asked)


def _joint(
    name: str, title: str, against: str, epochs: float, asked: argparse.Namespace, overrides: tuple[str, ...] = ()
) -> Case:
    first = Stage("stage-one", "configs/tiny_m1.yaml", (f"num_epochs={asked.stage_one:g}", *asked.heads))
    start = (f"num_epochs={epochs - asked.stage_one:g}", f"lora_model_dir={asked.out / 'runs' / first.name}")
    second = Stage(name, "configs/tiny_m2.yaml", (*start, *asked.heads, *asked.joint, *overrides))
    return Case(name, title, (first, second), against, _measured(asked))


def _measured(asked: argparse.Namespace) -> dict[str, Any]:
    """What a measurement depends on beside the runs."""
    names = ("bench", "limit", "max_new_tokens", "dtype", "problems")
    return {**{name: getattr(asked, name) for name in names}, "gsm8k": str(asked.gsm8k or "hub")}


def finished(path: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """What was written to `path` before, or None; refuses what was made with other settings."""
    if not path.is_file():
        return None
    written: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    before = written["settings"]
    if differing := [key for key in settings if settings[key] != before.get(key)]:
        shown = "\n".join(f"  {key}: {before.get(key)} there, {settings[key]} now" for key in differing)
        raise SystemExit(f"{path} was made with other settings; choose another --out, or delete it:\n{shown}")
    return written


def keep(path: Path, content: dict[str, Any]) -> None:
    """Write JSON whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    fresh.replace(path)


def command(module: str, *arguments: str) -> list[str]:
    """A command of the package, in a process of its own."""
    return [sys.executable, "-m", f"medusa_train.cli.{module}", *arguments]


def call(words: Sequence[str], threads: int | None = None) -> None:
    """Run a command, with so many threads; end as it ended where it failed."""
    print("$", " ".join(words[1:]), flush=True)
    searched = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    limit = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    code = subprocess.run(words, check=False, env={**os.environ, "PYTHONPATH": searched, **limit}).returncode
    if code:
        raise SystemExit(code)


def train(stage: Stage, out: Path, threads: int | None = None) -> None:
    """Run a stage, or go on with it, unless it is done."""
    done = out / "runs" / f"{stage.name}.json"
    settings = {"config": stage.config, "overrides": list(stage.overrides)}
    if finished(done, settings) is not None:
        return
    going_on = "resume_from_checkpoint=auto"  # starts anew where there is nothing to go on from
    words = command("train", stage.config, f"output_dir={out / 'runs' / stage.name}", *stage.overrides, going_on)
    call(words, threads)
    keep(done, {"settings": settings})


def evaluate(case: Case, out: Path, dtype: str) -> None:
    """Decode the bench with the run's own tree: `medusa-eval`'s report, under `out`/eval."""
    limit = [] if case.settings["limit"] is None else ["--limit", str(case.settings["limit"])]
    words = {
        "--model": out / "runs" / case.stages[-1].name,
        "--bench": case.settings["bench"],
        "--max-new-tokens": case.settings["max_new_tokens"],
        "--dtype": dtype,
        "--output-dir": out / "eval" / case.name,
    }
    call(command("evaluate", *(str(word) for pair in words.items() for word in pair), *limit))


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and measure what is not yet done, and write the report after every case."""
    asked = parse_arguments(arguments)
    quiet_libraries()  # works only before they are imported
    results: list[dict[str, Any]] = []
    dtype = asked.dtype
    for case in cases(asked):
        home = asked.out / "cases" / f"{case.name}.json"
        settings = {**case.settings, "stages": [[stage.config, *stage.overrides] for stage in case.stages]}
        result = finished(home, settings)
        if result is None:
            for stage in case.stages:
                train(stage, asked.out)
            evaluate(case, asked.out, dtype)
            from m2_case import measure  # torch comes with it
            from machine import facts

            result = {"settings": settings, "name": case.name, "title": case.title, "against": case.against}
            result["machine"] = facts(__file__, arguments)
            result |= measure(asked.out, [stage.name for stage in case.stages], case.name, case.settings)
            keep(home, result)
        dtype = result["decoding"]["dtype"]  # one for all
        results.append(result)
        from m2_report import write_report

        write_report(asked.out, results)
    print(f"report: {asked.out / 'm2_vs_m1.md'}")


if __name__ == "__main__":
    main()
