"""`medusa-eval --interactive`: a chat in the terminal that shows which tokens were guessed. Knows no bench."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING
from unicodedata import category

from rich.console import Console
from rich.text import Text

from medusa_train.errors import MedusaError

if TYPE_CHECKING:
    from medusa_train.data.conversation import Message
    from medusa_train.inference.model import Model, Reply


DRAFTED = "green"
_HELP = "/new forgets the chat, /temperature 0.7 samples (0: greedy), /exit or Ctrl-D leaves"


class Chat:
    """A conversation at the terminal: a line in, an answer out, its accepted draft tokens in green."""

    def __init__(self, model: Model, console: Console, max_new_tokens: int) -> None:
        self._model = model
        self._console = console
        self._max_new_tokens = max_new_tokens
        self._temperature = 0.0
        self._history: list[Message] = []

    def run(self) -> None:
        """GeneratedChat until the input ends, `/exit`, or Ctrl-C where no answer is under way."""
        self._console.print(Text.assemble("guessed tokens are ", ("green", DRAFTED), f". {_HELP}"), soft_wrap=True)
        for line in self._lines():
            if line == "/exit":
                break
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._answer(line)

    def _lines(self) -> Iterator[str]:
        while True:
            try:
                yield self._console.input("[bold]> [/bold]").strip()
            except (EOFError, KeyboardInterrupt):
                self._console.print()
                return

    def _command(self, line: str) -> None:
        name, _, value = line.partition(" ")
        if name == "/new":
            self._history.clear()
            return
        if name == "/temperature":
            try:
                self._temperature = max(0.0, float(value))
                return
            except ValueError:
                pass
        self._note(_HELP)

    def _answer(self, line: str) -> None:
        from medusa_train.data.conversation import Message

        asked = [*self._history, Message("user", line)]
        reply = self._model.reply(asked, self._max_new_tokens, temperature=self._temperature)
        try:
            for piece in reply:
                shown = Text(printable(piece.text), style=DRAFTED if piece.drafted else "")
                self._console.print(shown, end="", soft_wrap=True)
        except KeyboardInterrupt:
            pass  # leaves the answer off; what was said of it stays in the chat
        except MedusaError as error:
            self._note(f"{error}\n/new starts another chat")
            return
        self._console.print()
        self._note(_figures(reply))
        self._history = [*asked, Message("assistant", reply.text)]

    def _note(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)


def printable(text: str) -> str:
    """What a model says, without control characters that a terminal would obey."""
    return "".join("\N{REPLACEMENT CHARACTER}" if _obeyed(c) else c for c in text.expandtabs(4))


def _obeyed(character: str) -> bool:
    """Whether a terminal acts on it: control characters but for the line's end, and those that turn writing about."""
    turns_about = "\u200e" <= character <= "\u200f" or "\u202a" <= character <= "\u202e"
    return (
        turns_about or "\u2066" <= character <= "\u2069" or (category(character) in ("Cc", "Cs") and character != "\n")
    )


def _figures(reply: Reply) -> str:
    ended = {"length": ", cut at max_new_tokens", "context": ", cut: the context is full", None: ", left off"}
    speed = f", {len(reply.tokens) / reply.seconds:.0f} tokens/s" if reply.seconds else ""
    rate = f"{reply.tokens_per_step:.2f} tokens per step"
    return f"{len(reply.tokens)} tokens, {rate}{speed}{ended.get(reply.finish, '')}"
