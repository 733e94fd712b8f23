"""Random draws for the tiny prompts: numbers, people, and the expansion of `[one|or|other]`
alternatives.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

T = TypeVar("T")

WOMEN = """
Abena Adele Agnes Aiko Alma Anika Astrid Beatriz Camille Carla Chidinma Clara Daniela Delphine Edith Elif
Esther Fatima Freya Gabriela Greta Hana Harriet Helga Ida Imani Inez Irina Jasmine Joana Josephine Kavya
Keiko Lan Lara Lucia Magda Malia Marguerite Marisol Mina Nadia Naomi Ngozi Olga Paloma Petra Ramona Rekha
Renata Rosa Sabine Salma Selin Simone Soraya Tamsin Tova Ursula Valentina Vera Wanda Xiomara Yasmin Zainab Zuzana
""".split()  # noqa: SIM905
MEN = """
Adil Alonso Anders Andrei Arjun Aziz Bashir Bruno Caspian Cedric Cyrus Darius Desmond Diego Eduardo Elias
Emeka Emil Enzo Ezra Felipe Fergus Gideon Goran Hamid Haruto Hugo Ibrahim Igor Ilya Ismael Jamal Jonas Julio
Kaveh Kenji Kofi Kwame Laszlo Leif Lorenzo Luka Magnus Malik Mateo Mehmet Milan Nikolai Omar Otto Pablo Quentin
Rafael Ravi Reza Ruben Sanjay Stefan Sven Tariq Tobias Umberto Viktor Wei Yusuf Zoran
""".split()  # noqa: SIM905
ALTERNATIVES = re.compile(r"\[([^\[\]]*)\]")
# "a entry" needs "an"; "a user" and "a unit" do not
ARTICLE = re.compile(r"\b([Aa]) (?=[aeio])(?!one\b|once\b)")


@dataclass(frozen=True)
class Person:
    """A name with its pronouns; `str(person)` is the name."""

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
    """Random draws of one conversation; no person appears twice in it."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self._used_names: set[str] = set()

    def n(self, low: int, high: int, step: int = 1) -> int:
        """Draw one of low, low + step, ..., high."""
        return self.rng.randrange(low, high + 1, step)

    def pick(self, *options: T) -> T:
        """Draw one of the arguments."""
        return self.rng.choice(options)

    def sample(self, options: Sequence[T], count: int) -> list[T]:
        """Draw `count` different options in random order."""
        return self.rng.sample(options, count)

    def person(self) -> Person:
        """Draw a person who has not appeared yet."""
        while True:
            is_woman = self.rng.random() < 0.5
            name = self.rng.choice(WOMEN if is_woman else MEN)
            if name not in self._used_names:
                self._used_names.add(name)
                return (
                    Person(name, "she", "her", "her")
                    if is_woman
                    else Person(name, "he", "his", "him")
                )

    def expand(self, text: str) -> str:
        """Choose one of each `[a|b|c]`, innermost first; then fix spaces, articles and capitals."""
        while ALTERNATIVES.search(text):
            text = ALTERNATIVES.sub(lambda match: self.rng.choice(match[1].split("|")), text)
        text = re.sub(r" +([.,?;])", r"\1", " ".join(text.split()))
        text = ARTICLE.sub(r"\1n ", text)
        return re.sub(r"(^|[.?!] )([a-z])", lambda match: match[1] + match[2].upper(), text)
