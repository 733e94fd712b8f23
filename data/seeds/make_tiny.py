"""Write data/seeds/tiny.jsonl: seed conversations (user turns only) for the embedded tiny backbone.

    python data/seeds/make_tiny.py [--count 3000] [--seed 0] [--output data/seeds/tiny.jsonl]

and those behind data/selfdistill/tiny_more.jsonl, none of whose turns is among the first or among the bench's:

    python data/seeds/make_tiny.py --count 6000 --seed 7 --name more --output runs/more.jsonl \
        --without data/seeds/tiny.jsonl data/bench/tiny/question.jsonl

Word problems (55 %) and requests for Python functions (45 %), composed from our own scenarios, function ideas and
wordings; every third conversation has two or three turns. The same seed gives the same file on every Python.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from random import Random
from typing import Any

from code_requests import request, word_request
from drawing import Draw
from problems import word_problem

PROBLEM_SHARE = 0.55
MULTI_TURN = (2, 2, 3)  # how many turns a conversation of several has


def problem_turns(d: Draw, turns: int) -> list[str]:
    """A problem, a further question on it, then a problem of its own."""
    first, second = word_problem(d)
    return [first, second, word_problem(d)[0]][:turns]


def code_turns(d: Draw, turns: int) -> list[str]:
    """`turns` requests for different functions."""
    texts: list[str] = []
    names: set[str] = set()
    while len(texts) < turns:
        wanted = request(d)
        if wanted.name not in names:
            names.add(wanted.name)
            texts.append(word_request(d, wanted, later=bool(texts)))
    return texts


def conversation_turns(rng: Random, turns: int) -> list[str]:
    """The user turns of one conversation; one in six of the longer ones goes from one subject to the other."""
    kinds = [problem_turns, code_turns] if rng.random() < PROBLEM_SHARE else [code_turns, problem_turns]
    if turns > 1 and rng.random() < 1 / 6:
        return kinds[0](Draw(rng), turns - 1) + kinds[1](Draw(rng), 1)
    return kinds[0](Draw(rng), turns)


def make_seeds(count: int, seed: int, name: str = "tiny") -> list[dict[str, Any]]:
    """`count` conversations in ShareGPT form; no user turn occurs twice in the whole set. `name` begins their ids."""
    seeds: list[dict[str, Any]] = []
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
        seeds.append({"id": f"{name}-{number:04d}", "conversations": human})
    return seeds


def turns_of(path: Path) -> set[str]:
    """What users say in a file of seeds, or of a bench's questions."""
    said: set[str] = set()
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        said.update(record["turns"] if "turns" in record else (turn["value"] for turn in record["conversations"]))
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=3000, help="conversations (default 3000)")
    parser.add_argument("--seed", type=int, default=0, help="another seed, another set (default 0)")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("tiny.jsonl"))
    parser.add_argument("--name", default="tiny", help="what ids begin with (default tiny)")
    parser.add_argument("--without", type=Path, nargs="*", default=[], metavar="FILE", help="leave out what these hold")
    args = parser.parse_args()
    known = set().union(*(turns_of(path) for path in args.without))
    seeds = make_seeds(args.count, args.seed, args.name)
    seeds = [record for record in seeds if not known & {turn["value"] for turn in record["conversations"]}]
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in seeds]
    args.output.write_text("".join(lines), encoding="utf-8")
    print(f"{len(lines)} conversations -> {args.output}")


if __name__ == "__main__":
    main()
