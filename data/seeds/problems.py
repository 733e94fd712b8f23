# ruff: noqa: E501  (a wording is one line of text)
"""Word problems: grammars that compose one from parts, and one drawn from all grammars and scenarios.

Knows nothing of conversations, files or code requests.
"""

from __future__ import annotations

from collections.abc import Callable

import more_scenarios
import scenarios
from drawing import Draw

Scenario = Callable[[Draw], tuple[str, str]]


def event_chain(d: Draw) -> tuple[str, str]:
    """A quantity and a chain of two to four things that happen to it, drawn one by one."""
    p = d.person()
    thing, place = d.pick(
        ("balloons", "bag"),
        ("pencils", "drawer"),
        ("acorns", "basket"),
        ("buttons", "tin"),
        ("bricks", "yard"),
        ("tickets", "envelope"),
        ("chocolates", "box"),
        ("bulbs", "shed"),
        ("pebbles", "bucket"),
        ("badges", "album"),
    )
    events = [
        f"[{p.he} gives {d.n(3, 15)} to {d.person()}|{d.person()} takes {d.n(3, 15)} of them]",
        f"[{p.he} gets {d.n(6, 30)} more|{d.person()} brings {d.n(6, 30)} more]",
        f"{p.he} [buys|finds] {d.n(2, 4)} packs with {d.n(4, 12)} {thing} in each",
        f"[half of what is there gets lost|{p.he} sells half of what {p.he} has]",
        f"{p.he} [doubles|triples] {p.his} stock",
        f"{d.n(2, 4)} friends [come and take|receive] {d.n(2, 5)} each",
    ]
    first, *others = d.some(events, d.n(2, 4))
    chain = "".join(f". {d.pick('Then', 'After that', 'Next', 'Later', 'The day after')} {event}" for event in others)
    return (
        f"[There are {2 * d.n(20, 60)} {thing} in {p}'s {place}|{p}'s {place} holds {2 * d.n(20, 60)} {thing}|{p} starts with {2 * d.n(20, 60)} {thing} in a {place}]. [First|One morning] {first}{chain}. "
        f"[How many {thing} are there in the end|With how many {thing} does {p.he} end up]?",
        f"[Start again with|Now begin with] {2 * d.n(20, 60)} {thing}: {first}, and then [a fourth|half] of [them|all {thing}] are thrown away. How many [{thing} |]are left?",
    )


def compare_three(d: Draw) -> tuple[str, str]:
    """Three quantities, each told by the one before it, in drawn relations."""
    a, b, c = d.person(), d.person(), d.person()
    verb, thing = d.pick(
        ("picked", "blueberries"),
        ("sold", "tickets"),
        ("wrote", "postcards"),
        ("planted", "tulips"),
        ("caught", "crabs"),
        ("washed", "cars"),
        ("folded", "paper cranes"),
        ("painted", "eggs"),
        ("delivered", "parcels"),
        ("scored", "points"),
    )
    relations = [
        f"twice as many {thing} as",
        f"{d.n(3, 12)} fewer {thing} than",
        f"{d.n(5, 25)} more {thing} than",
        f"three times as many {thing} as",
        f"half as many {thing} as",
    ]
    r, s = d.some(relations, 2)
    ask = d.pick(
        f"How many {thing} was that in total?",
        f"How many was that for {d.pick('the three of them', 'all of them')} together?",
        "What was their average?",
        f"How many more or fewer was that for {c} than for {a}?",
    )
    base = d.n(24, 60, 4)
    return (
        f"[Last week|In one afternoon|During the holidays|On the weekend], {a} {verb} {base} {thing}. {b} {verb} {r} {a}, and {c} {verb} {s} {b}. {ask}",
        f"[And if|What if] {a} had {verb.replace('wrote', 'written')} {base + 12} {thing}, {b} half as many, and {c} {d.n(4, 14)} more than {b}: how many would [it|that] be [in all|together]?",
    )


def basket(d: Draw) -> tuple[str, str]:
    """Goods of a drawn kind of shop, counts and prices, and what happens at the cash desk."""
    p = d.person()
    shop, goods = d.pick(
        ("greengrocer's", ("cabbages", "pineapples", "bunches of carrots", "bags of onions", "mangoes")),
        ("hardware store", ("hammers", "boxes of nails", "rolls of tape", "light bulbs", "brushes")),
        ("pet store", ("collars", "bags of hay", "cans of cat food", "chew bones", "fish nets")),
        ("garden center", ("rose bushes", "flower pots", "packets of seeds", "bags of soil", "spades")),
        ("sports shop", ("tennis balls", "jump ropes", "water bottles", "caps", "pairs of socks")),
        ("bookstore", ("novels", "cookbooks", "maps", "calendars", "bookmarks")),
        ("craft shop", ("sheets of felt", "glue sticks", "tubes of paint", "canvases", "pairs of scissors")),
    )
    x, y, z = d.some(goods, 3)
    end = d.pick(
        f"{p.He} pays with a $200 bill. What change is {p.he} given?",
        f"A coupon takes ${d.n(3, 9)} off. What is left to pay?",
        f"A tax of {d.pick(5, 10)}% is added. What is the total?",
        f"{p.He} and {d.person()} share the bill equally. What does each pay?",
        "What does the whole purchase cost?",
    )
    return (
        f"[At the {shop}|In the {shop}], {p} [buys|gets|puts in the cart] {d.n(2, 6)} {x} at ${d.n(2, 9)} [each|apiece], {d.n(1, 5) + 1} {y} at ${d.n(3, 12)} each and {d.n(2, 4)} {z} [that cost ${d.n(2, 8)} each|for ${d.n(2, 8)} each]. {end}",
        f"[The next day|A week later] {p} [brings back|returns] {d.n(1, 2) + 1} {x} and buys {d.n(2, 5)} {z} for ${d.n(9, 15)} each. If {p.he} gets ${d.n(2, 9)} back for each of the {x}, how much does {p.he} have to pay?",
    )


SCENARIOS: tuple[Scenario, ...] = scenarios.SCENARIOS + more_scenarios.MORE_SCENARIOS
GRAMMARS: tuple[Scenario, ...] = (event_chain, compare_three, basket)  # each as varied as many scenarios

OPENERS = (
    "Can you solve this one?",
    "Here's a puzzle for you.",
    "A question from my daughter's math class:",
    "I got stuck on this.",
    "Quick question.",
)
CLOSERS = (
    "Please write down every step.",
    "Show how you calculate it.",
    "Go through it slowly.",
    "I'd like to see the calculation.",
)


def word_problem(d: Draw) -> tuple[str, str]:
    """A problem and a further question on it; a third of them from the grammars, one in eight framed."""
    scenario = d.rng.choice(GRAMMARS) if d.rng.random() < 0.3 else d.rng.choice(SCENARIOS)
    first, second = (d.say(text) for text in scenario(d))
    draw = d.rng.random()
    if draw < 0.06:
        first = f"{d.rng.choice(OPENERS)} {first}"
    elif draw < 0.12:
        first = f"{first} {d.rng.choice(CLOSERS)}"
    return first, second
