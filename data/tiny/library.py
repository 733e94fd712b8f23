"""The documents of the tiny backbone, split and measured in tokens: what an epoch is drawn from.

Knows nothing of the model or of how long it trains.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random

import corpus
from corpus import Function, Item, Problem
from phrasing import phrase_function, phrase_problem
from polish import Request
from tokenizers import Tokenizer
from vocabulary import Encoded, encode_chats, encode_texts

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "seeds"))

from drawing import Draw
from make_tiny import code_turns, problem_turns

SHORT_ANSWER = (40, 250)  # tokens: what a function of an ordinary chat has; shorter ones are trivial
LONG_ANSWER = 900  # tokens: the longest that a long chat may hold
LONG_SHARE = 0.08  # of an epoch's tokens, in chats of 2,000 tokens or more
BRIEF_ANSWER = (22, 90)  # tokens: what a function of the last steps and of the polishing has
FUNCTION_COPIES = 2  # plain functions come twice an epoch, in two wordings; methods and problems once


class Library:
    """The documents, split and measured: what an epoch is drawn from."""

    def __init__(self, items: Sequence[Item], tokenizer: Tokenizer) -> None:
        answers = [len(ids) for ids in encode_texts(tokenizer, [item.answer for item in items])]
        asked = [i.question if isinstance(i, Problem) else i.description for i in items]
        questions = [len(ids) for ids in encode_texts(tokenizer, asked)]
        self.tokenizer = tokenizer
        self.short: list[Item] = []
        self.brief: list[Item] = []
        self.long: list[Item] = []
        self.long_lengths: list[int] = []
        self.held_out: dict[str, list[Item]] = {"problems": [], "functions": []}
        low, high = SHORT_ANSWER
        for item, answer, question in zip(items, answers, questions, strict=True):
            is_function = isinstance(item, Function)
            fits = answer <= high and (not is_function or answer >= low)
            if corpus.is_held_out(item):
                if fits:
                    self.held_out["functions" if is_function else "problems"].append(item)
                continue
            if fits:
                copies = FUNCTION_COPIES if is_function and not item.is_method else 1
                self.short += [item] * copies
            if BRIEF_ANSWER[0] <= answer <= BRIEF_ANSWER[1] if is_function else fits:
                self.brief.append(item)
            if low <= answer <= LONG_ANSWER:
                self.long.append(item)
                self.long_lengths.append(answer + question + 10)

    def epoch(self, seed: int, number: int) -> list[Encoded]:
        """The chats of one epoch as token ids: every short document, and long chats beside them."""
        rng = Random(f"epoch {seed} {number}")
        chats = encode_chats(self.tokenizer, corpus.short_chats(self.short, rng))
        tokens = sum(len(chat.ids) for chat in chats)
        long = corpus.long_chats(self.long, self.long_lengths, int(tokens * LONG_SHARE), rng)
        return chats + encode_chats(self.tokenizer, long)

    def brief_epoch(self, seed: int, number: int) -> list[Encoded]:
        """The chats of an epoch of problems and brief functions: the last text sets the length of greedy answers."""
        return encode_chats(self.tokenizer, corpus.short_chats(self.brief, Random(f"brief {seed} {number}")))

    def requests(self, count: int, rng: Random) -> list[Request]:
        """Requests to practise on, half of them for code.

        Two of three are worded as the seed conversations are (with other draws than data/seeds/tiny.jsonl), some with
        a second turn. The others are from the documents, a third of them after another turn; half of those problems
        come with other numbers, half of those functions with another one's description: what is asked later will not
        be what was learned by heart either.
        """
        problems = [item for item in self.short if isinstance(item, Problem)]
        functions = [item for item in self.short if isinstance(item, Function)]
        made: list[Request] = []
        for number in range(count):
            is_code = number % 2 == 1
            if number % 3:
                turns = rng.choice((1, 2))
                first, *more = (code_turns if is_code else problem_turns)(Draw(rng), turns)
                made.append(Request((), first, is_code, more[0] if more else None))
                continue
            history = (corpus.single_turn(rng.choice(self.short), rng),) if rng.random() < 1 / 3 else ()
            if is_code:
                function, other = rng.choice(functions), rng.choice(functions)
                if rng.random() < 0.5 and function.is_method == other.is_method:
                    function = dataclasses.replace(function, description=other.description)
                made.append(Request(history, phrase_function(function, rng), True))
            else:
                text = phrase_problem(rng.choice(problems).question, rng)
                if rng.random() < 0.5:
                    text = re.sub(r"(?<=\d)\d|[1-9]", lambda _: str(rng.randint(1, 9)), text)
                made.append(Request(history, text, False))
        return made

    def held_out_chats(self) -> dict[str, list[Encoded]]:
        """Held-out documents as chats of one turn, always in the same wording."""
        rng = Random("held out")
        return {
            kind: encode_chats(self.tokenizer, [[corpus.single_turn(item, rng)] for item in items])
            for kind, items in self.held_out.items()
        }
