"""Random draws for the seed conversations: people, numbers, and `[one|or|the other]` wordings.

Knows nothing of what is asked: scenarios and function ideas draw from here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

T = TypeVar("T")


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


WOMEN = _words("""
Abena Adele Agnes Aiko Alma Anika Astrid Beatriz Camille Carla Chidinma Clara Daniela Delphine Edith Elif
Esther Fatima Freya Gabriela Greta Hana Harriet Helga Ida Imani Inez Irina Jasmine Joana Josephine Kavya
Keiko Lan Lara Lucia Magda Malia Marguerite Marisol Mina Nadia Naomi Ngozi Olga Paloma Petra Ramona Rekha
Renata Rosa Sabine Salma Selin Simone Soraya Tamsin Tova Ursula Valentina Vera Wanda Xiomara Yasmin Zainab Zuzana
""")
MEN = _words("""
Adil Alonso Anders Andrei Arjun Aziz Bashir Bruno Caspian Cedric Cyrus Darius Desmond Diego Eduardo Elias
Emeka Emil Enzo Ezra Felipe Fergus Gideon Goran Hamid Haruto Hugo Ibrahim Igor Ilya Ismael Jamal Jonas Julio
Kaveh Kenji Kofi Kwame Laszlo Leif Lorenzo Luka Magnus Malik Mateo Mehmet Milan Nikolai Omar Otto Pablo Quentin
Rafael Ravi Reza Ruben Sanjay Stefan Sven Tariq Tobias Umberto Viktor Wei Yusuf Zoran
""")
VOWEL = re.compile(r"\b([Aa]) (?=[aeio])(?!one\b|once\b)")  # "a entry"; "a user" and "a unit" stay
CHOICE = re.compile(r"\[([^\[\]]*)\]")


def count(number: int, unit: str) -> str:
    """`1 mile`, `3 miles`."""
    return f"{number} {unit}" if number == 1 else f"{number} {unit}s"


@dataclass(frozen=True)
class Person:
    """A name and its pronouns; `str(person)` is the name."""

    name: str
    he: str
    his: str
    him: str

    def __str__(self) -> str:
        return self.name

    @property
    def He(self) -> str:
        return self.he.capitalize()

    @property
    def His(self) -> str:
        return self.his.capitalize()


class Draw:
    """One conversation's draws; no person and no picked pair appears twice in it."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self._used: set[str] = set()

    def n(self, low: int, high: int, step: int = 1) -> int:
        """A number of low, low + step, ..., high."""
        return self.rng.randrange(low, high + 1, step)

    def pick(self, *options: T) -> T:
        return self.rng.choice(options)

    def some(self, options: Sequence[T], count: int) -> list[T]:
        """`count` different ones, in random order."""
        return self.rng.sample(options, count)

    def person(self) -> Person:
        while True:
            woman = self.rng.random() < 0.5
            name = self.rng.choice(WOMEN if woman else MEN)
            if name not in self._used:
                self._used.add(name)
                return Person(name, "she", "her", "her") if woman else Person(name, "he", "his", "him")

    def say(self, text: str) -> str:
        """Choose one of each `[a|b|c]`, innermost first, and mend spaces, "a entry" and capitals."""
        while True:
            text, changed = CHOICE.subn(lambda match: self.rng.choice(match[1].split("|")), text)
            if not changed:
                break
        text = re.sub(r" +([.,?;])", r"\1", " ".join(text.split()))
        text = VOWEL.sub(r"\1n ", text)
        return re.sub(r"(^|[.?!] )([a-z])", lambda match: match[1] + match[2].upper(), text)
