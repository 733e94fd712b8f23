"""Write data/seeds/tiny.jsonl: 3,000 conversations (user turns only) to prompt the embedded tiny
backbone with.

    python data/seeds/make_tiny.py

The prompts behind data/selfdistill/tiny_more.jsonl, none of which is in that file or in the tiny
bench:

    python data/seeds/make_tiny.py --count 6000 --seed 7 --name more --output runs/more.jsonl \
        --without data/seeds/tiny.jsonl data/bench/tiny/question.jsonl

55 % word problems and 45 % requests for Python functions, composed from the templates in
`problems.py` and `functions.py`; every third conversation has two or three turns. The same seed
gives the same file on every Python.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

from drawing import Draw
from functions import draw_function, word_request
from problems import word_problem

PROBLEM_SHARE = 0.55
MIXED_SHARE = 1 / 6  # of the conversations with several turns: the last turn is of the other kind
MULTI_TURN = (2, 2, 3)  # numbers of turns that conversations with several turns cycle through


def problem_turns(d: Draw, turns: int) -> list[str]:
    """Return up to three turns: a problem, a follow-up question, another problem."""
    problem, follow_up = word_problem(d)
    return [problem, follow_up, word_problem(d)[0]][:turns]


def code_turns(d: Draw, turns: int) -> list[str]:
    """Return `turns` requests for different functions."""
    texts: list[str] = []
    names: set[str] = set()
    while len(texts) < turns:
        spec = draw_function(d)
        if spec.name not in names:
            names.add(spec.name)
            texts.append(word_request(d, spec, is_later=bool(texts)))
    return texts


def conversation_turns(rng: Random, turns: int) -> list[str]:
    """Return the user turns of one conversation."""
    main, other = (
        (problem_turns, code_turns) if rng.random() < PROBLEM_SHARE else (code_turns, problem_turns)
    )
    if turns > 1 and rng.random() < MIXED_SHARE:
        return main(Draw(rng), turns - 1) + other(Draw(rng), 1)
    return main(Draw(rng), turns)


def make_prompts(count: int, seed: int, name: str = "tiny") -> list[dict[str, Any]]:
    """Return `count` conversations in ShareGPT form with the ids `name`-0000, ...; no user turn
    occurs twice.
    """
    records: list[dict[str, Any]] = []
    seen: set[str] = set()
    for number in range(count):
        turns = MULTI_TURN[(number // 3) % 3] if number % 3 == 2 else 1
        attempt = 0
        while True:
            digest = hashlib.sha256(f"{seed}:{number}:{attempt}".encode()).digest()
            texts = conversation_turns(Random(int.from_bytes(digest[:8], "big")), turns)
            if len(set(texts) - seen) == len(texts):
                break
            attempt += 1
        seen.update(texts)
        human = [{"from": "human", "value": text} for text in texts]
        records.append({"id": f"{name}-{number:04d}", "conversations": human})
    return records


def user_turns(path: Path) -> Iterable[str]:
    """Yield the user turns of a file of prompts (ShareGPT form) or of bench questions (MT-Bench
    form).
    """
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        yield from (
            record["turns"]
            if "turns" in record
            else (turn["value"] for turn in record["conversations"])
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--count", type=int, default=3000, help="number of conversations (default 3000)"
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("tiny.jsonl"))
    parser.add_argument("--name", default="tiny", help="prefix of the ids (default tiny)")
    parser.add_argument(
        "--without",
        type=Path,
        nargs="*",
        default=[],
        metavar="FILE",
        help="drop conversations with a turn in these",
    )
    args = parser.parse_args()
    excluded = {text for path in args.without for text in user_turns(path)}
    records = make_prompts(args.count, args.seed, args.name)
    records = [
        record
        for record in records
        if not excluded & {turn["value"] for turn in record["conversations"]}
    ]
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    args.output.write_text("".join(lines), encoding="utf-8")
    print(f"{len(lines)} conversations -> {args.output}")


if __name__ == "__main__":
    main()
