"""Requests for a Python function or method: an idea or a composed family, in one of many wordings.

Knows nothing of word problems, conversations or files.
"""

from __future__ import annotations

import re

from drawing import Draw
from families import FAMILIES, Request
from ideas import IDEAS

FIRST = (  # {sig}: with arguments; {does} / {do}: "returns ..." / "return ..."; {kind}: function or method
    "Write a Python {kind} `{sig}` that {does}.",
    "Write `{sig}` in Python: it should {do}.",
    "Please write {sig}, a {kind} which {does}.",
    "I need some code. {sig} should {do}.",
    "Can you show me a {kind} {sig} that {does}?",
    "Implement `{sig}` so that it {does}.",
    "How would {sig} look in Python if it has to {do}?",
    "Define {sig}. The {kind} {does}.",
    "I want to {do}. Write {sig} for that.",
    "My script has to {do}; give me `{sig}`.",
    "Help me out with {sig}: a {kind} that {does}.",
    "Create a small {kind} `{sig}` to {do}.",
    "What is the code of a Python {kind} {sig} that {does}?",
    "Make a {kind} `{sig}` which {does}.",
    "For a project at work I need {sig}, which {does}.",
    "Is there a short way to {do}? Write it as {sig}.",
    "Python please: {sig}, to {do}.",
    "Task: {do}. Signature: {sig}.",
    "Could you implement a {kind} that {does}? Call it `{sig}`.",
    "Give me {sig}; it {does}.",
    "Let's write {sig}. It {does}.",
    "I'm looking for a {kind} `{sig}` that {does}.",
    "Show me how to {do} with a {kind} {sig}.",
    "We need a {kind} named {sig} in our program. It {does}.",
    "{sig} is missing from my module. It {does}. Please write it.",
    "Write the code for {sig}. What it does: it {does}.",
    "In Python, how do I {do}? The {kind} should be {sig}.",
    "Complete `def {sig}:` so that the {kind} {does}.",
)
LATER = (
    "Now write {sig}, which {does}.",
    "Also `{sig}`, to {do}.",
    "Next comes `{sig}`: it {does}.",
    "And a {kind} {sig} that {does}?",
    "Good, and {sig}? It should {do}.",
    "One more: {sig}, which {does}.",
    "Thanks! Can you also write {sig}, a {kind} that {does}?",
    "That helps. The next {kind} is `{sig}`; it {does}.",
    "I also have to {do}. Let that be {sig}.",
)
OWNED = (
    "I have {owner}. {text}",
    "For {owner}: {text}",
    "There is {owner}. {text}",
    "{text} It belongs to {owner}.",
    "Think of {owner}. {text}",
)


def third_person(verb: str) -> str:
    """`return` -> `returns`, `search` -> `searches`, `try` -> `tries`."""
    if verb.endswith(("s", "sh", "ch", "x", "z")):
        return verb + "es"
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ies"
    return verb + "s"


def from_idea(d: Draw, line: str) -> Request:
    """One drawn form of a line of `ideas.py`."""
    names, arguments, does = (part.strip() for part in line.split(";"))
    chosen: list[str] = []
    for argument in re.split(r", (?![^(]*\))", arguments):
        names_of, equals, default = argument.partition("=")
        chosen.append(d.rng.choice(names_of.split("|")) + equals + default)
    bare = [argument.partition("=")[0] for argument in chosen]
    for index, argument_name in enumerate(bare):
        does = does.replace(f"{{{index}}}", argument_name)
    return Request(d.rng.choice(names.split("|")), ", ".join(chosen), does)


def request(d: Draw) -> Request:
    """An idea (60 %) or a member of a family."""
    if d.rng.random() < 0.6:
        return from_idea(d, d.rng.choice(IDEAS))
    families, weights = zip(*FAMILIES, strict=True)
    return d.rng.choices(families, weights)[0](d)  # type: ignore[no-any-return]


def word_request(d: Draw, wanted: Request, *, later: bool) -> str:
    """The request as a user writes it; `later` picks wordings for a second or third turn, half of the time."""
    does = d.say(wanted.does)
    wording = d.rng.choice(LATER if later and d.rng.random() < 0.5 else FIRST)
    text = wording.format(
        sig=f"{wanted.name}({wanted.arguments})",
        kind="method" if wanted.owner else "function",
        do=re.sub(r"(\w+)~", r"\1", does[:1].lower() + does[1:]),
        does=re.sub(r"(\w+)~", lambda match: third_person(match[1]), does[:1].lower() + does[1:]),
    )
    if wanted.owner and not later:
        text = d.rng.choice(OWNED).format(owner=wanted.owner, text=text)
    elif wanted.owner:
        text = d.rng.choice(("{text}", "{text} It is for {owner}.")).format(owner=wanted.owner, text=text)
    return text
