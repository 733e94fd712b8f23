"""The tiny test model's training text: word problems and library functions, worded as chats and
measured in tokens.

All randomness comes from seeded `random.Random` objects, so every epoch can be reproduced.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import re
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from chats import EncodedChat, Turn, encode_chats, encode_texts
from tokenizers import Tokenizer

#: Conversations of word problems and of requests for functions, without answers.
PROMPTS = Path(__file__).resolve().parents[1] / "seeds" / "tiny.jsonl"
HELD_OUT_SHARE = 0.03
# answer length of a function in an ordinary chat; a problem only has the upper bound
FUNCTION_TOKENS = (40, 250)
BRIEF_FUNCTION_TOKENS = (22, 90)  # answer length of a function in `Corpus.brief_epoch`
LONG_CHAT_ITEM_TOKENS = (40, 900)  # answer length of an item in a long chat
LONG_CHAT_TOKENS = 2000
LONG_CHAT_SHARE = 0.08  # share of an epoch's tokens in chats of LONG_CHAT_TOKENS or more
# plain functions come twice an epoch, in two wordings; methods and problems once
FUNCTION_COPIES = 2


@dataclass(frozen=True)
class Problem:
    """A word problem and its worked answer, which ends in "The answer is N."."""

    question: str
    answer: str


@dataclass(frozen=True)
class Function:
    """A library function: its code without docstring and decorators, and the first sentence of its
    docstring.
    """

    name: str
    signature: str  # name(arguments) with defaults and annotations
    bare_signature: str  # name(arguments) without them
    description: str
    is_method: bool
    answer: str


Item = Problem | Function


@dataclass(frozen=True)
class Request:
    """A message to answer after the turns in `history`, and an optional further message."""

    history: tuple[Turn, ...]
    text: str
    is_code: bool
    follow_up: str | None = None


def read_items(gsm8k: Path | None) -> list[Item]:
    """Read all problems and functions; test functions are left out, since nobody asks for them."""
    functions = read_functions(Path(sysconfig.get_path("stdlib")))
    return [
        *read_problems(gsm8k),
        *(function for function in functions if not function.name.startswith("test")),
    ]


def read_problems(path: Path | None) -> list[Problem]:
    """Read GSM8K's training problems from a JSONL file, or from the Hugging Face hub if `path` is
    None.
    """
    if path is None:
        from datasets import load_dataset

        rows = list(load_dataset("openai/gsm8k", "main", split="train"))
    else:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [Problem(" ".join(row["question"].split()), clean_answer(row["answer"])) for row in rows]


def clean_answer(answer: str) -> str:
    """Remove GSM8K's calculator annotations and turn "#### 72" into "The answer is 72."."""
    text = re.sub(r"<<[^<>]*>>", "", answer).strip()
    steps, _, result = text.rpartition("####")
    return f"{steps.strip()}\nThe answer is {result.strip()}." if steps else text


def read_functions(root: Path) -> list[Function]:
    """Return the documented functions of all modules below `root`, without duplicates and
    third-party packages.
    """
    functions: dict[str, Function] = {}
    for path in sorted(root.rglob("*.py")):
        if not {"site-packages", "dist-packages", "__pycache__"}.isdisjoint(
            path.relative_to(root).parts
        ):
            continue
        try:
            for function in functions_in(path.read_bytes()):
                functions.setdefault(function.answer, function)
        except (
            SyntaxError,
            ValueError,
        ):  # test data of the standard library that is broken on purpose
            continue
    return list(functions.values())


def functions_in(source: str | bytes) -> Iterator[Function]:
    """Yield every function of a module that has a usable docstring and a body beyond it.

    Raises:
        SyntaxError, ValueError: the source does not parse.
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
        for inner in ast.walk(node):
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner.decorator_list = []
                if ast.get_docstring(inner) is not None:
                    inner.body = inner.body[1:] or [ast.Pass()]
        code = ast.unparse(node)
        if code.isascii():
            bare = bare_arguments(node.args)
            is_method = bare.split(",")[0] in ("self", "cls")
            signatures = f"{node.name}({ast.unparse(node.args)})", f"{node.name}({bare})"
            yield Function(node.name, *signatures, description, is_method, code)


def first_sentence(docstring: str) -> str:
    """Return the first sentence of a docstring on one line; "" if it is not 3 to 45 words of ASCII
    text.
    """
    paragraph = " ".join(re.split(r"\n\s*\n", docstring.strip())[0].split())
    sentence = re.split(r"(?<=[a-z0-9)'\"`][.!?])\s+(?=[A-Z`'\"])", paragraph)[0].strip()
    if (
        not 3 <= len(sentence.split()) <= 45
        or sentence.startswith((">>>", "@", ":"))
        or not sentence.isascii()
    ):
        return ""
    return sentence


def bare_arguments(arguments: ast.arguments) -> str:
    """Return an argument list without defaults and annotations: `a, b, *rest, key, **more`."""
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    if arguments.vararg:
        names.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        names.append("*")
    names += [a.arg for a in arguments.kwonlyargs]
    if arguments.kwarg:
        names.append(f"**{arguments.kwarg.arg}")
    return ", ".join(names)


def is_held_out(item: Item) -> bool:
    """Return whether an item is in the held-out split, decided by a hash of its text."""
    text = item.question if isinstance(item, Problem) else item.answer
    return hashlib.sha256(text.encode()).digest()[0] < 256 * HELD_OUT_SHARE


def third_person(verb: str) -> str:
    """Return `returns` for `return`, `searches` for `search`, `tries` for `try`."""
    if verb.endswith(("s", "sh", "ch", "x", "z")):
        return verb + "es"
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ies"
    return verb + "s"


# Verbs that docstrings begin with: "Return the x" becomes "that returns the x".
VERBS = frozenset(
    """
accept add adjust append apply assert attach begin break build bind calculate call cancel change check choose clean
clear close collect combine compare compile compute configure connect construct convert copy count create decode decrypt
define delete determine disable dispatch display do draw dump emit enable encode ensure enter escape evaluate exit
expand extract fetch fill filter find finish fix flush force format gather generate get give go guess handle hide
identify import indent initialize insert install invoke iterate join kill list load locate log look make mark match
merge modify move normalize notify open parse pack perform pop prepare print process produce provide push put query
quote raise read receive record register release remove rename render repeat replace report reset resolve restore
retrieve return rotate round run save scan schedule search see seek select send serve set show shut skip sleep sort
split start stop store strip subtract swap switch take terminate test transform translate truncate try turn unpack
unregister update use validate verify wait walk wrap write yield""".split()  # noqa: SIM905
)
THIRD_PERSON = {verb: verb + "es" if verb in ("do", "go") else third_person(verb) for verb in VERBS}

CLAUSE_WORDINGS = (
    "Write a Python {kind} {sig} that {does}.",
    "Write a {kind} {sig} that {does}.",
    "Write {sig}, a Python {kind} that {does}.",
    "Implement {sig}. It {does}.",
    "Implement a {kind} {sig} which {does}.",
    "Can you code a {kind} {sig} that {does}?",
    "Can you write {sig} for me? It {does}.",
    "I need a {kind} called {sig} that {does}.",
    "I need a Python {kind} named {sig} which {does}.",
    "Please write a {kind} {sig} in Python that {does}.",
    "Please implement {sig}, which {does}.",
    "Create a Python {kind} {sig} that {does}.",
    "Create {sig}: it {does}.",
    "Give me a {kind} {sig} that {does}.",
    "Show me a Python {kind} {sig} that {does}.",
    "How would you write a {kind} {sig} that {does}?",
    "How do I write a Python {kind} {sig} which {does}?",
    "Define a {kind} {sig} that {does}.",
    "Code up {sig} in Python. The {kind} {does}.",
    "Could you help me with a {kind} {sig} that {does}?",
    "Help me write {sig}; it {does}.",
    "In Python, write {sig} so that it {does}.",
    "My program needs a {kind} {sig} that {does}.",
    "Provide Python code for {sig}. The {kind} {does}.",
    "Develop a {kind} named {sig} that {does}.",
    "We want {sig}, a {kind} that {does}. Please write it.",
    "Complete the {kind} {sig} so that it {does}.",
    "What does a {kind} {sig} look like that {does}?",
)
SENTENCE_WORDINGS = (
    "Write the Python {kind} {sig}. {desc}",
    "Write {sig}. {desc}",
    "{desc} Write this as {sig}.",
    "{desc} Please implement it as a {kind} {sig}.",
    "Implement {sig} in Python: {desc}",
    "Implement the {kind} {sig} with this description: {desc}",
    "I need {sig} in Python. {desc}",
    "Can you write the {kind} {sig}? {desc}",
    "Could you code {sig}? What it should do: {desc}",
    "Task: {desc} Name: {sig}.",
    "Please code the {kind} {sig} for me. {desc}",
    "Give me the code of {sig}. {desc}",
    "Fill in {sig}. Its docstring is: {desc}",
    "Python {kind}: {sig}. {desc}",
)
PROBLEM_OPENERS = (
    "Solve this problem: ",
    "Please solve: ",
    "Here is a word problem. ",
    "Can you help me with this? ",
    "Work this out step by step: ",
    "Question: ",
    "I have a math question. ",
    "Help me with my homework. ",
)
PROBLEM_CLOSERS = (
    " Show your steps.",
    " Explain how you get the answer.",
    " Please show your work.",
    " Think step by step.",
    " Give the steps and the final answer.",
    " How do you work it out?",
)
BUNDLE_OPENERS = (
    "Please do all of the following.",
    "Here are several tasks. Answer them in order.",
    "I have a list for you:",
    "Do these one after the other:",
    "Answer each of these:",
)


def as_clause(description: str) -> str | None:
    """Turn "Return the sum of x." into "returns the sum of x"; None if the first word is not in
    VERBS.
    """
    word, _, rest = description.rstrip(".").partition(" ")
    verb = word.lower()
    if verb in THIRD_PERSON.values():
        return f"{verb} {rest}"
    return f"{THIRD_PERSON[verb]} {rest}" if verb in THIRD_PERSON else None


def word_item(item: Item, rng: Random) -> str:
    """Word an item as a request; a problem mostly stays as it is."""
    if isinstance(item, Problem):
        frame = rng.random()
        if frame < 0.7:
            return item.question
        if frame < 0.85:
            return rng.choice(PROBLEM_OPENERS) + item.question
        return item.question + rng.choice(PROBLEM_CLOSERS)
    name = rng.choices((item.signature, item.bare_signature, item.name), weights=(30, 50, 20))[0]
    if rng.random() < 0.5:
        name = f"`{name}`"
    kind = "method" if item.is_method else "function"
    clause = as_clause(item.description)
    if clause is not None and rng.random() < 0.8:
        return rng.choice(CLAUSE_WORDINGS).format(kind=kind, sig=name, does=clause)
    return rng.choice(SENTENCE_WORDINGS).format(kind=kind, sig=name, desc=item.description)


def single_turn(item: Item, rng: Random) -> Turn:
    """Return an item as one turn."""
    return word_item(item, rng), item.answer


def bundle_turn(items: Sequence[Item], rng: Random) -> Turn:
    """Return several items as one turn with numbered requests and answers."""
    requests = [word_item(item, rng) for item in items]
    question = "\n".join(
        [rng.choice(BUNDLE_OPENERS), *(f"{n}. {text}" for n, text in enumerate(requests, 1))]
    )
    answer = "\n\n".join(f"# {n}\n{item.answer}" for n, item in enumerate(items, 1))
    return question, answer


def short_chats(items: Sequence[Item], rng: Random) -> list[list[Turn]]:
    """Shuffle the items and group them into chats of one (55 %), two or three turns."""
    order = list(items)
    rng.shuffle(order)
    chats: list[list[Turn]] = []
    while order:
        turns = min(rng.choices((1, 2, 3), weights=(55, 30, 15))[0], len(order))
        chats.append([single_turn(order.pop(), rng) for _ in range(turns)])
    return chats


def long_chats(
    items: Sequence[Item], lengths: Sequence[int], tokens: int, rng: Random
) -> list[list[Turn]]:
    """Draw chats of three turns and LONG_CHAT_TOKENS or more until they have `tokens` tokens in
    all.

    A turn is one long item or a bundle of problems or of functions. `lengths[i]` is the number of
    tokens of `items[i]`, question and answer.
    """
    chats: list[list[Turn]] = []
    while tokens > 0 and items:
        chat: list[Turn] = []
        size = 0
        while len(chat) < 3:
            goal = max(150, (LONG_CHAT_TOKENS + 100 - size) // (3 - len(chat)))
            kind = Problem if rng.random() < 0.5 else Function
            bundle: list[Item] = []
            bundle_size = 0
            for _ in range(200):
                if bundle_size >= goal:
                    break
                index = rng.randrange(len(items))
                if isinstance(items[index], kind) and lengths[index] <= goal * 1.3:
                    bundle.append(items[index])
                    bundle_size += lengths[index]
            if bundle:
                chat.append(
                    single_turn(bundle[0], rng) if len(bundle) == 1 else bundle_turn(bundle, rng)
                )
                size += bundle_size
        chats.append(chat)
        tokens -= size
    return chats


def read_requests() -> dict[bool, list[Request]]:
    """Return the first turns of `PROMPTS` by whether they ask for code, with the second turn if it is
    of the same kind.
    """
    requests: dict[bool, list[Request]] = {True: [], False: []}
    for line in PROMPTS.read_text(encoding="utf-8").splitlines():
        first, *more = (turn["value"] for turn in json.loads(line)["conversations"])
        is_code = asks_for_code(first)
        follow_up = more[0] if more and asks_for_code(more[0]) == is_code else None
        requests[is_code].append(Request((), first, is_code, follow_up))
    return requests


def asks_for_code(prompt: str) -> bool:
    """Return whether a prompt of `PROMPTS` names a function with its arguments."""
    return re.search(r"\w\(", prompt) is not None


class Corpus:
    """The items, split into training and held-out ones and sorted by answer length."""

    def __init__(self, items: Sequence[Item], tokenizer: Tokenizer, seed: int) -> None:
        self.tokenizer, self.seed = tokenizer, seed
        self.short: list[Item] = []
        self.brief: list[Item] = []
        self.long: list[Item] = []
        self.long_lengths: list[int] = []
        self.held_out: dict[str, list[Item]] = {"problems": [], "functions": []}
        answers = encode_texts(tokenizer, [item.answer for item in items])
        questions = encode_texts(
            tokenizer,
            [item.question if isinstance(item, Problem) else item.description for item in items],
        )
        for item, answer, question in zip(
            items, map(len, answers), map(len, questions), strict=True
        ):
            is_function = isinstance(item, Function)
            low, high = FUNCTION_TOKENS if is_function else (0, FUNCTION_TOKENS[1])
            if is_held_out(item):
                if low <= answer <= high:
                    self.held_out["functions" if is_function else "problems"].append(item)
                continue
            if low <= answer <= high:
                self.short += [item] * (
                    FUNCTION_COPIES if is_function and not item.is_method else 1
                )
            low, high = BRIEF_FUNCTION_TOKENS if is_function else (0, FUNCTION_TOKENS[1])
            if low <= answer <= high:
                self.brief.append(item)
            if LONG_CHAT_ITEM_TOKENS[0] <= answer <= LONG_CHAT_ITEM_TOKENS[1]:
                self.long.append(item)
                self.long_lengths.append(answer + question + 10)

    def epoch(self, number: int) -> list[EncodedChat]:
        """Return an epoch: every short item in chats of one to three turns, and long chats."""
        rng = Random(f"epoch {self.seed} {number}")
        chats = encode_chats(self.tokenizer, short_chats(self.short, rng))
        tokens = sum(len(chat.ids) for chat in chats)
        long = long_chats(self.long, self.long_lengths, int(tokens * LONG_CHAT_SHARE), rng)
        return chats + encode_chats(self.tokenizer, long)

    def brief_epoch(self, number: int) -> list[EncodedChat]:
        """Return an epoch of problems and brief functions; the last text sets the length of greedy
        answers.
        """
        return encode_chats(
            self.tokenizer, short_chats(self.brief, Random(f"brief {self.seed} {number}"))
        )

    def held_out_chats(self) -> dict[str, list[EncodedChat]]:
        """Return the held-out items as chats of one turn, always in the same wording."""
        rng = Random("held out")
        return {
            kind: encode_chats(self.tokenizer, [[single_turn(item, rng)] for item in items])
            for kind, items in self.held_out.items()
        }

    def requests(self, count: int, number: int) -> list[Request]:
        """Draw the requests of one round of `unlikelihood.py`, every second one for code.

        Two of three are prompts of data/seeds, some with a second turn. The others come from the
        items, a third of them after another turn. Half of those problems get other numbers and half
        of those functions another description, so that the model cannot answer from memory.
        """
        rng = Random(f"requests {self.seed} {number}")
        problems = [item for item in self.short if isinstance(item, Problem)]
        functions = [item for item in self.short if isinstance(item, Function)]
        prompts = read_requests()
        requests: list[Request] = []
        for index in range(count):
            is_code = index % 2 == 1
            if index % 3:
                requests.append(rng.choice(prompts[is_code]))
                continue
            history = (single_turn(rng.choice(self.short), rng),) if rng.random() < 1 / 3 else ()
            if is_code:
                function, other = rng.choice(functions), rng.choice(functions)
                if rng.random() < 0.5 and function.is_method == other.is_method:
                    function = dataclasses.replace(function, description=other.description)
                text = word_item(function, rng)
            else:
                text = word_item(rng.choice(problems), rng)
                if rng.random() < 0.5:
                    text = re.sub(r"(?<=\d)\d|[1-9]", lambda _: str(rng.randint(1, 9)), text)
            requests.append(Request(history, text, is_code))
        return requests
