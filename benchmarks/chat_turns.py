"""What does a chat gain when the text so far is not read again?

    python benchmarks/chat_turns.py data/tiny

Each turn is a question and an answer of 150 tokens each. `Decoder` answers the same chat twice in
turns: reading the whole text at each turn, and continuing (`continues`, as `load().generate` does).
Writes chat_turns.md and chat_turns.json to `--out`.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

import torch  # noqa: E402
from shapes import default_dtypes  # noqa: E402
from shared import machine_facts, table, warn_if_busy, write_page  # noqa: E402

from medusa_train.cli.common import quiet_libraries  # noqa: E402
from medusa_train.inference.generate import Decoder  # noqa: E402
from medusa_train.models.loading import load_backbone  # noqa: E402

QUESTION_TOKENS = 150
ANSWER_TOKENS = 150


@dataclass
class Turn:
    """One turn, its time to the first token in ms and its whole time in s, by the median of rounds."""

    turn: int
    read_again_ms: float
    continued_ms: float
    read_again_s: float
    continued_s: float
    same_tokens: bool


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the table and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", help="directory or hub name of a model")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default=default_dtypes()[-1])
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "benchmarks")
    options = parser.parse_args(arguments)
    quiet_libraries()
    machine = machine_facts(__file__, arguments)
    warn_if_busy()
    turns = measure(options.model, options.dtype, options.turns, options.rounds)
    record = {"model": options.model, "dtype": options.dtype, "machine": machine}
    record["turns"] = [asdict(turn) for turn in turns]
    title = "What does a chat gain when the text so far is not read again?"
    print(write_page(options.out, "chat_turns", title, record, [turns_table(turns)]))


def measure(model: str, dtype: str, turns: int, rounds: int) -> list[Turn]:
    """Answer one chat by two decoders in turns, and return the medians of each turn."""
    backbone = load_backbone(model, dtype=dtype)
    decoders = [Decoder(backbone), Decoder(backbone, continues=True)]
    generator = torch.Generator().manual_seed(0)
    shape = (turns, QUESTION_TOKENS)
    questions = torch.randint(1, backbone.vocab_size, shape, generator=generator).tolist()
    # by decoder and turn: (ms to the first token, seconds), one of each round
    first: list[list[list[float]]] = [[[] for _ in range(turns)] for _ in decoders]
    whole: list[list[list[float]]] = [[[] for _ in range(turns)] for _ in decoders]
    answers: list[list[list[int]]] = [[], []]
    for counted in range(rounds + 1):  # the first round warms up
        for i, decoder in enumerate(decoders):
            answers[i] = []
            prompt: list[int] = []
            decoder.generate([0], 1)  # the chat of the round before is forgotten
            for turn, question in enumerate(questions):
                prompt = [*prompt, *question]
                started = time.perf_counter()
                answer = decoder.generate(prompt, ANSWER_TOKENS, eos_ids=())
                if counted:
                    first[i][turn].append(1000 * answer.prefill_seconds)
                    whole[i][turn].append(time.perf_counter() - started)
                answers[i].append(answer.tokens)
                prompt = [*prompt, *answer.tokens]  # each decoder's own answers
    return [
        Turn(
            turn + 1,
            median(first[0][turn]),
            median(first[1][turn]),
            median(whole[0][turn]),
            median(whole[1][turn]),
            answers[0][turn] == answers[1][turn],
        )
        for turn in range(turns)
    ]


def turns_table(turns: list[Turn]) -> str:
    """Return the result as a Markdown table."""
    rows = []
    for turn in turns:
        rows.append(
            [
                str(turn.turn),
                f"{turn.read_again_ms:.0f}",
                f"{turn.continued_ms:.0f}",
                f"{turn.read_again_s:.2f}",
                f"{turn.continued_s:.2f}",
                "yes" if turn.same_tokens else "no",
            ]
        )
    titles = [
        "turn",
        "first token, ms: read again",
        "continued",
        "whole turn, s: read again",
        "continued",
        "same tokens",
    ]
    return table(titles, rows)


if __name__ == "__main__":
    main()
