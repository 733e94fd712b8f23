"""The text that the tiny backbone learns from: word problems and library functions, phrased as chats.

Knows nothing of tokens, tensors or models: items carry text, and `lengths` (a token count per item) comes from
the caller. Everything random is drawn from a `random.Random` that the caller seeds, so an epoch is reproducible.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from phrasing import phrase_bundle, phrase_function, phrase_problem

HELD_OUT_SHARE = 0.03
LONG_CHAT = 2000  # tokens; what a chat of `long_chats` reaches
CALCULATOR_MARK = re.compile(r"<<[^<>]*>>")

Turn = tuple[str, str]  # (what the user asks, what the assistant answers)


@dataclass(frozen=True)
class Problem:
    """One word problem: its text, and the worked answer ending in "The answer is N."."""

    question: str
    answer: str


@dataclass(frozen=True)
class Function:
    """One library function: its code without docstring or decorators, and what its docstring says first."""

    name: str
    signature: str  # name(arguments), defaults included
    bare_signature: str  # name(arguments), without defaults and annotations
    description: str  # first sentence of the docstring, one line
    is_method: bool
    answer: str


Item = Problem | Function


def clean_answer(answer: str) -> str:
    """GSM8K's answer without calculator marks, "#### 72" turned into the sentence "The answer is 72."."""
    text = CALCULATOR_MARK.sub("", answer).strip()
    steps, _, result = text.rpartition("####")
    return f"{steps.strip()}\nThe answer is {result.strip()}." if steps else text


def read_problems(path: Path | None) -> list[Problem]:
    """GSM8K's training problems from a JSONL file (`question`, `answer`), or from the hub without a path."""
    if path is None:
        from datasets import load_dataset

        rows = list(load_dataset("openai/gsm8k", "main", split="train"))
    else:
        rows = []
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                row = json.loads(line)
                row["question"], row["answer"]
            except (ValueError, KeyError, TypeError) as error:
                raise SystemExit(
                    f"{path}, line {number}: not a JSON object with `question` and `answer` ({error!r})"
                ) from None
            rows.append(row)
    return [Problem(" ".join(row["question"].split()), clean_answer(row["answer"])) for row in rows]


def first_sentence(docstring: str) -> str:
    """The first sentence of a docstring's first paragraph, on one line; "" if there is no usable one."""
    paragraph = " ".join(re.split(r"\n\s*\n", docstring.strip())[0].split())
    sentence = re.split(r"(?<=[a-z0-9)'\"`][.!?])\s+(?=[A-Z`'\"])", paragraph)[0].strip()
    words = sentence.split()
    if not 3 <= len(words) <= 45 or sentence.startswith((">>>", "@", ":")) or not sentence.isascii():
        return ""
    return sentence


def _without_docstrings(node: ast.AST) -> None:
    """Remove the docstrings of `node` and of everything defined inside it."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner.decorator_list = []
            if ast.get_docstring(inner) is not None:
                inner.body = inner.body[1:] or [ast.Pass()]


def _bare_arguments(arguments: ast.arguments) -> str:
    """`a, b, *rest, key, **more`: an argument list without defaults and annotations."""
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    if arguments.vararg:
        names.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        names.append("*")
    names += [a.arg for a in arguments.kwonlyargs]
    if arguments.kwarg:
        names.append(f"**{arguments.kwarg.arg}")
    return ", ".join(names)


def functions_in(source: str | bytes) -> Iterator[Function]:
    """Every function of a module that has a usable docstring and a body beyond it.

    Raises:
        SyntaxError, ValueError: the source does not parse (the library's own test data holds such files).
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in old modules
        tree = ast.parse(source)
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        description = first_sentence(ast.get_docstring(node) or "")
        if not description or len(node.body) < 2:
            continue
        _without_docstrings(node)
        code = ast.unparse(node)
        if not code.isascii():
            continue
        bare = _bare_arguments(node.args)
        yield Function(
            name=node.name,
            signature=f"{node.name}({ast.unparse(node.args)})",
            bare_signature=f"{node.name}({bare})",
            description=description,
            is_method=bare.split(",")[0] in ("self", "cls"),
            answer=code,
        )


def read_functions(root: Path | None = None) -> list[Function]:
    """The documented functions below `root` (default: this Python's standard library), duplicates dropped."""
    root = root or Path(sysconfig.get_path("stdlib"))
    found: dict[str, Function] = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if "site-packages" in parts or "dist-packages" in parts or "__pycache__" in parts:
            continue
        try:
            for function in functions_in(path.read_bytes()):
                found.setdefault(function.answer, function)
        except (SyntaxError, ValueError):
            continue  # test data of the library that is broken on purpose
    return list(found.values())


def is_held_out(item: Item) -> bool:
    """Whether an item belongs to the held-out split: decided by its own text, so it never changes sides."""
    text = item.question if isinstance(item, Problem) else item.answer
    return hashlib.sha256(text.encode()).digest()[0] < 256 * HELD_OUT_SHARE


def single_turn(item: Item, rng: Random) -> Turn:
    """One item as one turn, phrased at random."""
    if isinstance(item, Problem):
        return phrase_problem(item.question, rng), item.answer
    return phrase_function(item, rng), item.answer


def short_chats(items: Sequence[Item], rng: Random) -> list[list[Turn]]:
    """All items in random order, grouped into chats of one (half of them), two or three turns."""
    order = list(items)
    rng.shuffle(order)
    chats: list[list[Turn]] = []
    while order:
        count = min(rng.choices((1, 2, 3), weights=(55, 30, 15))[0], len(order))
        chats.append([single_turn(order.pop(), rng) for _ in range(count)])
    return chats


def long_chats(items: Sequence[Item], lengths: Sequence[int], tokens: int, rng: Random) -> list[list[Turn]]:
    """Chats of three turns that reach `LONG_CHAT` tokens, about `tokens` in all.

    A turn is one long function, or a bundle of problems or functions asked for together. `lengths[i]` is the
    token count of `items[i]`, question and answer.
    """
    chats: list[list[Turn]] = []
    left = tokens
    while left > 0 and items:
        chat: list[Turn] = []
        size = 0
        while len(chat) < 3:
            goal = max(150, (LONG_CHAT + 100 - size) // (3 - len(chat)))
            kind = Problem if rng.random() < 0.5 else Function
            bundle: list[Item] = []
            got = 0
            for _ in range(200):
                if got >= goal:
                    break
                index = rng.randrange(len(items))
                if isinstance(items[index], kind) and lengths[index] <= goal * 1.3:
                    bundle.append(items[index])
                    got += lengths[index]
            if bundle:
                chat.append(single_turn(bundle[0], rng) if len(bundle) == 1 else phrase_bundle(bundle, rng))
                size += got
        chats.append(chat)
        left -= size
    return chats
