"""How a user asks for things: many wordings of the same request, drawn at random.

Knows nothing of where problems and functions come from, and nothing of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

# Verbs that docstrings of functions begin with; "Return the x" becomes "that returns the x".
_VERBS = (
    "accept add adjust append apply assert attach begin break build bind calculate call cancel change check "
    "choose clean clear close collect combine compare compile compute configure connect construct convert copy "
    "count create decode decrypt define delete determine disable dispatch display do draw dump emit enable encode "
    "ensure enter escape evaluate exit expand extract fetch fill filter find finish fix flush force format gather "
    "generate get give go guess handle hide identify import indent initialize insert install invoke iterate join "
    "kill list load resolve_model log look make mark match merge modify move normalize notify open parse pack perform "
    "pop prepare print process produce provide push put query quote raise read receive record register release "
    "remove rename render repeat replace report reset resolve restore retrieve return rotate round run save scan "
    "schedule search see seek select send serve set show shut skip sleep sort split start stop store strip "
    "subtract swap switch take terminate test transform translate truncate try turn unpack unregister update "
    "use validate verify wait walk wrap write yield"
)
IMPERATIVES = frozenset(_VERBS.split())

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
PROBLEM_BEFORE = (
    "Solve this problem: ",
    "Please solve: ",
    "Here is a word problem. ",
    "Can you help me with this? ",
    "Work this out step by step: ",
    "Question: ",
    "I have a math question. ",
    "Help me with my homework. ",
)
PROBLEM_AFTER = (
    " Show your steps.",
    " Explain how you get the answer.",
    " Please show your work.",
    " Think step by step.",
    " Give the steps and the final answer.",
    " How do you work it out?",
)
BUNDLE_OPENINGS = (
    "Please do all of the following.",
    "Here are several tasks. Answer them in order.",
    "I have a list for you:",
    "Do these one after the other:",
    "Answer each of these:",
)


def third_person(verb: str) -> str:
    """`return` -> `returns`, `match` -> `matches`, `copy` -> `copies`."""
    if verb in ("do", "go"):
        return verb + "es"
    if verb.endswith(("s", "sh", "ch", "x", "z")):
        return verb + "es"
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ies"
    return verb + "s"


def as_clause(description: str) -> str | None:
    """ "Return the sum of x." -> "returns the sum of x"; None where the sentence starts with no known verb."""
    word, _, rest = description.rstrip(".").partition(" ")
    verb = word.lower()
    if verb in IMPERATIVES:
        return f"{third_person(verb)} {rest}"
    if any(third_person(known) == verb for known in (verb[:-1], verb[:-2], verb[:-3] + "y") if known in IMPERATIVES):
        return f"{verb} {rest}"
    return None


def phrase_function(function: Any, rng: Random) -> str:
    """A request for a `corpus.Function`: one of 42 wordings, with its signature, a bare one or only its name."""
    name = rng.choices((function.signature, function.bare_signature, function.name), weights=(30, 50, 20))[0]
    if rng.random() < 0.5:
        name = f"`{name}`"
    kind = "method" if function.is_method else "function"
    clause = as_clause(function.description)
    if clause is not None and rng.random() < 0.8:
        return rng.choice(CLAUSE_WORDINGS).format(kind=kind, sig=name, does=clause)
    return rng.choice(SENTENCE_WORDINGS).format(kind=kind, sig=name, desc=function.description)


def phrase_problem(question: str, rng: Random) -> str:
    """A word problem as it stands (mostly), or with a few words before or after it."""
    draw = rng.random()
    if draw < 0.7:
        return question
    if draw < 0.85:
        return rng.choice(PROBLEM_BEFORE) + question
    return question + rng.choice(PROBLEM_AFTER)


def phrase_bundle(items: Sequence[Any], rng: Random) -> tuple[str, str]:
    """Several items asked for in one message and answered in one, numbered: (question, answer)."""
    asked = [
        phrase_problem(item.question, rng) if hasattr(item, "question") else phrase_function(item, rng)
        for item in items
    ]
    head = rng.choice(BUNDLE_OPENINGS)
    question = "\n".join([head, *(f"{n}. {text}" for n, text in enumerate(asked, 1))])
    answer = "\n\n".join(f"# {n}\n{item.answer}" for n, item in enumerate(items, 1))
    return question, answer
