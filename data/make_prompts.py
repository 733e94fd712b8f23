"""Write conversations (user turns only) to prompt a model with, composed from its prompts.yaml.

    python data/make_prompts.py smollm2 --count 6000 --output runs/smollm2_prompts.jsonl
    python data/make_prompts.py qwen_coder --output runs/qwen_coder_prompts.jsonl

Every third conversation of a category has a follow-up turn. No first turn occurs twice, and none is
in the bench. The same seed gives the same file on every Python.

A model's answers to them are in data/selfdistill.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from pathlib import Path
from random import Random
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
FENCE = "```"  # around code
SLOT = re.compile(r"\{([a-z]+)(\d?)\}")
NUMBER = re.compile(r"\{n:(\d+):(\d+)\}")
FOLLOW_UP = 3  # every third conversation of a category has a second turn


def fill(template: str, slots: dict[str, list[str]], chosen: dict[str, str], rng: Random) -> str:
    """Fill the slots of `template`; `chosen` remembers the entries of a conversation, and no slot
    repeats one.
    """

    def entry(match: re.Match[str]) -> str:
        key, slot = match[1] + match[2], match[1]
        if key not in chosen:
            used = {value for other, value in chosen.items() if other.rstrip("0123456789") == slot}
            chosen[key] = rng.choice([option for option in slots[slot] if option not in used])
        return chosen[key]

    text = template
    while SLOT.search(text):  # entries may have slots themselves
        text = SLOT.sub(entry, text)
    text = NUMBER.sub(lambda match: str(rng.randint(int(match[1]), int(match[2]))), text)
    parts = text.split(FENCE)
    parts[::2] = [correct_prose(prose) for prose in parts[::2]]
    return FENCE.join(parts).strip()


def correct_prose(text: str) -> str:
    """Write "an" before a vowel and a capital at the beginning of a sentence; not for code."""
    text = re.sub(r"\b([Aa]) (?=[aeio])(?!one\b)", r"\1n ", text)
    return re.sub(r"(^|[.?!] )([a-z])", lambda match: match[1] + match[2].upper(), text)


def make_prompts(
    count: int, seed: int, phrases: dict[str, Any], excluded: set[str], name: str = "smollm2"
) -> list[dict[str, Any]]:
    """Return `count` conversations in ShareGPT form, with `name` in their ids; the categories take
    turns.
    """
    categories = list(phrases["categories"])
    records: list[dict[str, Any]] = []
    seen = set(excluded)
    attempt = 0
    while len(records) < count:
        number = len(records)
        digest = hashlib.sha256(f"{seed}:{number}:{attempt}".encode()).digest()
        rng = Random(int.from_bytes(digest[:8], "big"))
        category = categories[number % len(categories)]
        chosen: dict[str, str] = {}
        turns = [fill(rng.choice(phrases["categories"][category]), phrases["slots"], chosen, rng)]
        if turns[0] in seen:
            attempt += 1
            if attempt > 1000:
                raise ValueError(
                    f"{category}: no new prompt in 1,000 attempts after {number} conversations"
                )
            continue
        attempt = 0
        seen.add(turns[0])
        if (number // len(categories)) % FOLLOW_UP == FOLLOW_UP - 1:
            turns.append(fill(rng.choice(phrases["follow_ups"]), phrases["slots"], chosen, rng))
        human = [{"from": "human", "value": text} for text in turns]
        records.append({"id": f"{name}-{number:05d}", "category": category, "conversations": human})
    return records


def read_bench(path: Path) -> set[str]:
    """Return the user's turns of a question file."""
    turns: set[str] = set()
    for line in path.read_text(encoding="utf-8").splitlines():
        turns.update(json.loads(line)["turns"])
    return turns


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=["smollm2", "qwen_coder"], help="folder of prompts.yaml")
    parser.add_argument(
        "--count", type=int, default=6000, help="number of conversations (default 6000)"
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    phrases = yaml.safe_load((HERE / arguments.name / "prompts.yaml").read_text(encoding="utf-8"))
    bench = read_bench(ROOT / phrases["bench"])
    records = make_prompts(arguments.count, arguments.seed, phrases, bench, arguments.name)
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text("".join(lines), encoding="utf-8")
    print(f"{len(lines)} conversations -> {arguments.output}")


if __name__ == "__main__":
    main()
