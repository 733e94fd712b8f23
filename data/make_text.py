"""Generate a model's training text with medusa-selfdistill, and select the part that is shipped.

    python data/make_text.py smollm2 --out runs/smollm2_text            # days on two cores; continues after any stop
    python data/make_text.py smollm2 --out runs/smollm2_text --select   # of what is there: text.jsonl.gz and others

`make smollm2-text` and `make qwen-text` do the first. NAME/text.yaml lists the runs. Written to --out:

- a file of each run, as medusa-selfdistill writes it. Looping answers are dropped, those cut by the
  limit are kept.
- text.jsonl.gz: all conversations without near-duplicates, in random order.
- NAME.jsonl.gz: the first of these, as many as --tokens says: data/selfdistill/NAME.jsonl.gz.
  smollm2_more.jsonl.gz, a second part, has answers of later runs (templates from the 3,000th on,
  further questions of the model).
- NAME_validation.jsonl.gz: answers to the validation prompts:
  data/selfdistill/NAME_validation.jsonl.gz.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PROMPT_COUNT = 18000  # of templates; at least what text.yaml answers
FOLLOW_UP = 3  # every third of the model's own questions has a second turn
MIN_CHARS = 20  # of a question
NGRAM = 8
EARLIER = "00_earlier_t0.0.jsonl"  # conversations of a shipped part; each has its own temperature
MAX_SEEN = 0.5  # share of an answer's n-grams that earlier conversations have

Record = dict[str, Any]


def read_lines(path: Path) -> list[Record]:
    """Return the records of a JSONL file in the order of their ids; none if there is no such file."""
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    return sorted(lines, key=lambda record: record["id"])


def write_lines(path: Path, records: Iterable[Record]) -> None:
    """Write records as JSONL; compressed if the name ends with .gz, the same bytes for the same
    records.
    """
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


# Which prompts does a run answer?


def read_prompts(plan: Record, out: Path, name: str = "smollm2") -> dict[str, list[Record]]:
    """Return the prompts of each kind for the model of folder `name`, the model's own questions as
    far as they are written.
    """
    templates = out / "templates.jsonl"
    if not templates.exists():
        count = str(plan.get("templates", PROMPT_COUNT))
        script = [sys.executable, str(HERE / "make_prompts.py"), name, "--count", count]
        subprocess.run([*script, "--output", str(templates)], check=True)
    by_hand = (HERE / name / "validation_prompts.txt").read_text(encoding="utf-8").splitlines()[1:]
    validation = [
        conversation(f"validation-{n:03d}", line.split(" | ")) for n, line in enumerate(by_hand)
    ]
    phrases = yaml.safe_load((HERE / name / "prompts.yaml").read_text(encoding="utf-8"))
    plain = [turn for turn in phrases["follow_ups"] if "{" not in turn]
    questions = own_questions(read_lines(out / "questions.jsonl"), plain)
    held_out = plan["validation"]["questions"]
    return {
        "templates": read_lines(templates),
        "functions": functions_to_complete(HERE / name / "functions.txt", phrases, plain),
        "more_functions": functions_to_complete(
            HERE / name / "more_functions.txt", phrases, plain, first="more-function"
        ),
        "questions": questions[held_out:],
        "validation": [*validation, *questions[:held_out]],
    }


def functions_to_complete(
    path: Path, phrases: Record, follow_ups: Sequence[str], first: str = "function"
) -> list[Record]:
    """Return a prompt for each function of `path`, an instruction before its signature and docstring.

    Ids begin with `first`. The order is random, and every third has a follow-up. A model without
    such a file has none.
    """
    if not path.exists():
        return []
    functions = path.read_text(encoding="utf-8").strip().split("\n---\n")
    functions.sort(key=lambda function: hashlib.sha256(function.encode()).digest())
    instructions = phrases["functions"]
    prompts: list[Record] = []
    for number, function in enumerate(functions):
        instruction = instructions[number % len(instructions)]
        turns = [instruction.replace("FUNCTION", function)]
        if number % FOLLOW_UP == 0:
            turns.append(follow_ups[number // FOLLOW_UP % len(follow_ups)])
        prompts.append(conversation(f"{first}-{number:05d}", turns))
    return prompts


def own_questions(records: Sequence[Record], follow_ups: Sequence[str]) -> list[Record]:
    """Return the model's questions as prompts, without short and repeated ones, every third with a
    follow-up.
    """
    prompts: dict[str, Record] = {}
    for record in records:
        question = record["messages"][0]["content"].strip()
        key = " ".join(re.findall(r"\w+", question.lower()))
        if len(question) < MIN_CHARS or key in prompts:
            continue
        turns = [question]
        number = int(record["id"].rpartition("-")[2])
        if number % FOLLOW_UP == 0:
            turns.append(follow_ups[number // FOLLOW_UP % len(follow_ups)])
        prompts[key] = conversation(record["id"], turns)
    return list(prompts.values())


def conversation(name: str, turns: Sequence[str]) -> Record:
    """Return a conversation without answers, in ShareGPT form."""
    return {"id": name, "conversations": [{"from": "human", "value": turn} for turn in turns]}


# Generation


def generate(plan: Record, out: Path, arguments: argparse.Namespace) -> None:
    """Do every run of `plan`; what an earlier call finished is not repeated."""
    used: Counter[str] = Counter()
    for number, run in enumerate(plan["runs"]):
        wanted = arguments.runs is None or number in arguments.runs
        if "questions" in run:
            if not wanted:
                continue
            options = plan["questions"]
            mode = ["--mode", "questions", "--limit", str(run["questions"])]
            distill(out / "questions.jsonl", plan["model"], arguments, options, *mode)
            continue
        kind = run["prompts"]
        options = {
            "max_new_tokens": plan["max_new_tokens"],
            "temperature": plan["validation"]["temperature"],
            **run,
        }
        prompts = read_prompts(plan, out, arguments.name)[kind]
        if kind == "validation":
            name = kind
        else:
            start = run.get("first", used[kind])
            end = start + run["count"]
            used[kind] = max(used[kind], end)
            prompts = prompts[start:end]
            name = f"{number:02d}_{kind}_t{run['temperature']}"
        if not wanted:
            continue
        if not prompts:
            print(f"== {name}: no {kind} are left to answer", flush=True)
            continue
        write_lines(out / f"{name}.prompts.jsonl", prompts)
        distill(
            out / f"{name}.jsonl",
            plan["model"],
            arguments,
            options,
            "--prompts",
            f"{name}.prompts.jsonl",
            "drop_truncated=false",
        )


def distill(
    output: Path, model: str, arguments: argparse.Namespace, options: Record, *more: str
) -> None:
    """Call medusa-selfdistill in the directory of `output`; end this command with its exit code if
    it fails.
    """
    print(f"== {output.name}", flush=True)
    keys = [
        f"{key}={options[key]}"
        for key in ("temperature", "top_p", "max_new_tokens")
        if key in options
    ]
    keys += [f"batch_size={arguments.batch_size}", "compile=true", "dtype=bfloat16"]
    command = [
        sys.executable,
        "-m",
        "medusa_train.cli.selfdistill",
        "--model",
        str(ROOT / model),
        "--output",
        output.name,
    ]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    try:
        code = subprocess.run(
            [*command, *more, *keys], cwd=output.parent, env=environment
        ).returncode
    except KeyboardInterrupt:
        code = 130
    if code:
        sys.exit(code)


# Selection


def select(records: Iterable[Record], seen: set[int]) -> Iterator[Record]:
    """Yield conversations whose answers are not mostly n-grams of earlier ones; `seen` is updated."""
    for record in records:
        answers = [
            message["content"] for message in record["messages"] if message["role"] == "assistant"
        ]
        grams = {gram for answer in answers for gram in ngrams(answer)}
        if grams and len(grams & seen) > MAX_SEEN * len(grams):
            continue
        seen |= grams
        yield record


def ngrams(text: str) -> set[int]:
    """Return hashes of all sequences of eight words; of a shorter text, of the whole."""
    words = re.findall(r"\w+", text.lower())
    return {hash(tuple(words[i : i + NGRAM])) for i in range(max(1, len(words) - NGRAM + 1))}


def shipped(record: Record) -> Record:
    """Return the fields of a conversation that training reads, and its temperature."""
    fields = {name: record[name] for name in ("id", "messages", "finish_reasons")}
    return {**fields, "temperature": record["sampling"]["temperature"]}


def supervised_tokens(record: Record) -> int:
    """Return the number of an output record's trained tokens: its answers with the end token of
    complete ones.
    """
    return sum(record["token_counts"]["completion"]) + record["finish_reasons"].count("stop")


def add_earlier(path: Path, out: Path, model: Path) -> None:
    """Write the conversations of a shipped part to `out` as a run, and its validation text where
    `out` has none. The tokens of their answers are counted again.
    """
    from transformers import AutoTokenizer  # slow to import, and only needed here

    tokenizer = AutoTokenizer.from_pretrained(model)

    def as_generated(shipped_file: Path) -> list[Record]:
        records = []
        for line in gzip.decompress(shipped_file.read_bytes()).splitlines():
            record = json.loads(line)
            answers = [
                turn["content"] for turn in record["messages"] if turn["role"] == "assistant"
            ]
            counts = [len(tokenizer.encode(answer, add_special_tokens=False)) for answer in answers]
            record["token_counts"] = {"completion": counts}
            record["sampling"] = {"temperature": record.pop("temperature")}
            records.append(record)
        return records

    write_lines(out / EARLIER, as_generated(path))
    validation = out / "validation.jsonl"
    if not validation.exists():
        held_out = path.with_name(path.name.replace(".jsonl", "_validation.jsonl"))
        write_lines(validation, as_generated(held_out))


def write_selection(out: Path, tokens: int, name: str = "smollm2") -> None:
    """Write the whole text, the shipped part and the validation text of what is generated so far.

    Ends this command with an error where there is none.
    """
    validation = read_lines(out / "validation.jsonl")
    records = [
        record
        for path in sorted(out.glob("[0-9][0-9]_*_t?.?.jsonl"))
        for record in read_lines(path)
    ]
    if not records and not validation:
        sys.exit(f"error: {out} holds no answers to select from; generate them without --select")
    records.sort(key=lambda record: hashlib.sha256(record["id"].encode()).digest())
    seen: set[int] = set()
    validation = list(select(validation, seen))
    text = list(select(records, seen))
    part, counted = [], 0
    for record in text:
        if counted >= tokens:
            break
        part.append(record)
        counted += supervised_tokens(record)
    for file, chosen in {"text": text, name: part, f"{name}_validation": validation}.items():
        path = out / f"{file}.jsonl.gz"
        write_lines(path, map(shipped, chosen))
        total = sum(map(supervised_tokens, chosen))
        print(
            f"{path}: {len(chosen):,} conversations, {total:,} supervised tokens,"
            f" {path.stat().st_size:,} bytes"
        )
    print(
        f"left out as near-duplicates: {len(records) - len(text):,} of {len(records):,}"
        " conversations"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=["smollm2", "qwen_coder"], help="folder of text.yaml")
    parser.add_argument("--out", type=Path, required=True, help="directory of the text")
    parser.add_argument(
        "--select", action="store_true", help="generate nothing, select from what is there"
    )
    parser.add_argument(
        "--tokens", type=int, default=2_000_000, help="supervised tokens of the shipped part"
    )
    parser.add_argument(
        "--runs",
        type=int,
        nargs="+",
        metavar="N",
        help="do only these runs, numbered from 0 (default: all); two processes with a directory"
        " each can share the work",
    )
    parser.add_argument(
        "--add",
        type=Path,
        metavar="FILE",
        help="select also from the conversations of this shipped part, made earlier",
    )
    parser.add_argument(
        "--batch-size", type=int, default=32, help="conversations at a time (default 32)"
    )
    arguments = parser.parse_args()
    plan = yaml.safe_load((HERE / arguments.name / "text.yaml").read_text(encoding="utf-8"))
    unknown = set(arguments.runs or ()) - set(range(len(plan["runs"])))
    if unknown:
        parser.error(
            f"--runs: {', '.join(map(str, sorted(unknown)))} is no run of text.yaml, which has 0 to"
            f" {len(plan['runs']) - 1}"
        )
    if arguments.add is not None and not arguments.add.is_file():
        parser.error(f"--add: there is no file {arguments.add}")
    out = arguments.out.resolve()
    if not arguments.select:
        out.mkdir(parents=True, exist_ok=True)
        generate(plan, out, arguments)
    if arguments.add:
        out.mkdir(parents=True, exist_ok=True)
        add_earlier(arguments.add, out, ROOT / plan["model"])
    write_selection(out, arguments.tokens, arguments.name)


if __name__ == "__main__":
    main()
