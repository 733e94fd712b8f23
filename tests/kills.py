"""Kill commands at random moments until they are done, and compare with a run that nobody killed.

    python -m tests.kills --seed 1 --kills 15 DIRECTORY

Four jobs on data/tiny: Medusa-2 QLoRA in two stages, EAGLE-3 with stored hidden states,
self-distillation and an evaluation. Each is started again with the command that resumes it, and
killed again, by SIGKILL, SIGTERM or SIGINT. Once it is complete it begins anew, until it was killed
`--kills` times.
"""

import argparse
import importlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from medusa_train.checkpoint.store import CheckpointStore
from medusa_train.config.paths import PROJECT_ROOT
from tests.training.conftest import figures
from tests.training.mishap import start, wait

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
#: Exit codes by signal.
CODES = {
    signal.SIGKILL: -signal.SIGKILL,
    signal.SIGTERM: 128 + signal.SIGTERM,
    signal.SIGINT: 128 + signal.SIGINT,
}


@dataclass
class Job:
    """A command that can be started again.

    Attributes:
        program: name of the module in medusa_train.cli. arguments: for its directory.
        results: reads from the directory what must not depend on kills.
    """

    name: str
    program: str
    arguments: Callable[[Path], list[str]]
    results: Callable[[Path], object]


@dataclass
class Tally:
    """What happened to a job: kills by signal and phase, and how often it was complete."""

    kills: Counter[str] = field(default_factory=Counter)
    ended_first: int = 0
    complete: int = 0


def prepare(where: Path) -> None:
    """Write short data: conversations, prompts and a bench."""
    where.mkdir(parents=True, exist_ok=True)
    for name, source, count in (
        ("chats.jsonl", "data/selfdistill/tiny.jsonl", 40),
        ("prompts.jsonl", "data/seeds/tiny.jsonl", 20),
    ):
        lines = (PROJECT_ROOT / source).read_text(encoding="utf-8").splitlines(keepends=True)
        (where / name).write_text("".join(lines[:count]), encoding="utf-8")
    questions = []
    for number, line in enumerate((where / "prompts.jsonl").read_text().splitlines()[:3]):
        text = json.loads(line)["conversations"][0]["value"]
        questions.append(json.dumps({"question_id": number, "turns": [text, "Why?"]}) + "\n")
    (where / "bench.jsonl").write_text("".join(questions))


def jobs(where: Path, steps: int = 9) -> list[Job]:
    """Return the four jobs, which read the data that `prepare` wrote; the evaluation needs a run in
    `where`/heads.
    """
    chats = json.dumps([{"path": str(where / "chats.jsonl"), "type": "messages"}])
    training = [
        f"datasets={chats}",
        "bf16=false",
        "sequence_len=128",
        "micro_batch_size=2",
        "val_set_size=0.1",
        "logging_steps=1",
        "save_steps=3",
        "eval_steps=7",
        "calibration_tokens=0",
        "resume_from_checkpoint=auto",
    ]

    def two_stages(out: Path) -> list[str]:
        stages = [f"max_steps={steps}", f"stage_one.max_steps={steps}"]
        return ["configs/tiny_m2_qlora.yaml", *training, *stages, f"output_dir={out}"]

    def stored_states(out: Path) -> list[str]:
        stored = ["cache_hidden_states=true", f"dataset_prepared_path={out / 'prepared'}"]
        epochs = [f"max_steps={steps * 4}"]  # each state is read more than once
        return ["configs/tiny_eagle3.yaml", *training, *stored, *epochs, f"output_dir={out}"]

    def answers(out: Path) -> list[str]:
        words = ["--prompts", str(where / "prompts.jsonl"), "--model", "data/tiny"]
        sampling = ["temperature=0.7", "dtype=float32", "max_new_tokens=40", "batch_size=4"]
        return [*words, *sampling, "drop_truncated=false", f"output={out / 'answers.jsonl'}"]

    def evaluation(out: Path) -> list[str]:
        words = ["--model", str(where / "heads"), "--bench", str(where / "bench.jsonl")]
        return [*words, "dtype=float32", "max_new_tokens=16", f"output_dir={out}"]

    return [
        Job("Medusa-2 QLoRA in two stages", "train", two_stages, weights_and_figures),
        Job("EAGLE-3 with stored states", "train", stored_states, weights_and_figures),
        Job("self-distillation", "selfdistill", answers, written_lines),
        Job("evaluation", "evaluate", evaluation, answers_and_counts),
    ]


def train_heads(where: Path) -> None:
    """Train heads for the evaluation to use."""
    arguments = jobs(where)[0].arguments(where / "heads")
    arguments = ["configs/tiny_m1.yaml", *(word for word in arguments[1:] if "stage" not in word)]
    code, text = run(arguments, "train", where / "heads.log")
    assert code == 0, text


def weights_and_figures(out: Path) -> object:
    """Every logged figure, and every file of weights, to the bit; of the checkpoints the last and
    the best, since a signal leaves one more.
    """
    runs = [run for run in (out, out / "stage_one") if run.is_dir()]
    files = {}
    for run in runs:
        last = CheckpointStore(run).latest()
        assert last is not None
        for pattern in (
            "heads/*",
            "adapter/*",
            "checkpoints/best-*/*",
            f"checkpoints/{last.name}/*",
        ):
            for path in run.glob(f"{pattern}.safetensors"):
                files[str(path.relative_to(out))] = path.read_bytes()
    assert "heads/draft.safetensors" in files or "heads/medusa_lm_head.safetensors" in files
    return files, [figures(run) for run in runs]


def written_lines(out: Path) -> object:
    """The conversations by id; a batch is written in the order in which its answers end."""
    lines = (out / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    assert lines
    return sorted(lines)


def answers_and_counts(out: Path) -> object:
    """Answers, their tokens and steps; not their times."""
    found = {}
    for path in ("answers.jsonl", "ranks.jsonl"):
        for line in (out / path).read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            timed = [key for key in record if "second" in key or "speed" in key or "ms" in key]
            for key in timed:
                del record[key]
            found.setdefault(path, []).append(record)
    report = json.loads((out / "report.json").read_text())
    found["counts"] = {
        name: report["overall"][name]
        for name in ("answers", "tokens", "tokens_per_step")
        if name in report["overall"]
    }
    assert found["answers.jsonl"]
    return found


def run(arguments: Sequence[str], program: str, log: Path) -> tuple[int, str]:
    """Run a command to its end; return its exit code and output."""
    code = wait(start(log, call, program, list(arguments)))
    return code, log.read_text(encoding="utf-8", errors="replace")


def call(program: str, arguments: list[str]) -> None:
    """Run a command in this process."""
    os.chdir(PROJECT_ROOT)
    sys.argv = [f"medusa-{program}", *arguments]
    importlib.import_module(f"medusa_train.cli.{program}").app()


def kill_until_done(job: Job, where: Path, kills: int, draw: random.Random) -> Tally:
    """Kill a job so many times, and compare each complete one with one that was not killed."""
    tally = Tally()
    whole = where / "whole"
    whole.mkdir(parents=True)
    began = time.monotonic()
    code, text = run(job.arguments(whole), job.program, where / "whole.log")
    assert code == 0, text
    seconds = time.monotonic() - began
    expected = job.results(whole)

    out = where / "killed"
    while tally.kills.total() < kills or not tally.complete:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        while True:
            log = where / f"{tally.kills.total()}.log"
            log.write_text("")  # a kill may come before it is opened
            process = start(log, call, job.program, job.arguments(out))
            number = draw.choice(SIGNALS)
            # most in the middle of what is left, some at once
            process.join(seconds * draw.random() ** 2)
            enough = tally.kills.total() >= kills
            if process.exitcode is None and not enough:
                os.kill(process.pid, number)
                code = wait(process)
                text = log.read_text(encoding="utf-8", errors="replace")
                assert "Traceback" not in text, text
                if not text:
                    continue  # the command had not begun
                if code == CODES[number]:
                    tally.kills[number.name] += 1
                    continue
                tally.ended_first += 1
            else:
                code = wait(process)
                text = log.read_text(encoding="utf-8", errors="replace")
            assert code == 0, f"{job.name}: exit code {code}\n{text}"
            break
        assert job.results(out) == expected, f"{job.name}: {out} differs from {whole}"
        left = [path for path in out.rglob("*") if path.name.startswith((".tmp", ".old"))]
        assert not left, left
        tally.complete += 1
    return tally


def main() -> None:
    """Run all jobs, and print how often each was killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=15, help="of each job")
    parser.add_argument("--jobs", nargs="*", help="words in the names of the jobs to run")
    given = parser.parse_args()
    where = given.directory.resolve()
    prepare(where)
    if not (where / "heads" / "heads").is_dir():
        train_heads(where)
    for number, job in enumerate(jobs(where)):
        if given.jobs and not any(word in job.name for word in given.jobs):
            continue
        draw = random.Random(f"{given.seed} {job.name}")
        tally = kill_until_done(job, where / f"job{number}-{given.seed}", given.kills, draw)
        signals = ", ".join(f"{count} {name}" for name, count in sorted(tally.kills.items()))
        print(
            f"{job.name}: {tally.kills.total()} kills ({signals}), {tally.ended_first} came too"
            f" late, complete and equal {tally.complete} times",
            flush=True,
        )


if __name__ == "__main__":
    main()
