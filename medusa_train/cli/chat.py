"""`medusa-eval --interactive`: a chat in the terminal that shows accepted draft tokens in green."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from medusa_train.errors import MedusaError

if TYPE_CHECKING:
    from medusa_train.data.conversation import Message
    from medusa_train.inference.model import Model, Reply


DRAFTED = "green"
_HELP = "/new starts a new chat, /temperature 0.7 samples (0: greedy), /exit or Ctrl-D quits"


class Chat:
    """A chat with a model: reads a line, streams the answer, marks its accepted draft tokens."""

    def __init__(self, model: Model, console: Console, max_new_tokens: int, **options: Any) -> None:
        """`options` are passed to `Model.reply`."""
        self._model = model
        self._console = console
        self._max_new_tokens = max_new_tokens
        self._options = options
        self._history: list[Message] = []

    def run(self) -> None:
        """Chat until the input ends, the user types `/exit`, or Ctrl-C at the prompt. Ctrl-C within
        an answer stops only that answer.
        """
        self._console.print(
            Text.assemble("accepted drafts are ", (DRAFTED, DRAFTED), f". {_HELP}"), soft_wrap=True
        )
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
            with suppress(ValueError):
                self._options["temperature"] = max(0.0, float(value))
                return
        self._note(_HELP)

    def _answer(self, line: str) -> None:
        from medusa_train.data.conversation import Message

        messages = [*self._history, Message("user", line)]
        try:
            reply = self._model.reply(messages, self._max_new_tokens, **self._options)
            with suppress(KeyboardInterrupt):  # stops the answer; its part so far stays in the chat
                for piece in reply:
                    shown = Text(printable(piece.text), style=DRAFTED if piece.drafted else "")
                    self._console.print(shown, end="", soft_wrap=True)
        except MedusaError as error:
            self._note(f"{error}\n/new starts a new chat")
            return
        self._console.print()
        self._note(_metrics_line(reply))
        self._history = [*messages, Message("assistant", reply.text)]

    def _note(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)


#: Characters that a terminal acts on: control characters except newline, surrogates, and marks of
#: the writing direction.
_CONTROLS = re.compile(
    r"[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)


def printable(text: str) -> str:
    """Replace the characters in a model's output that a terminal would act on."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text.expandtabs(4))


def _metrics_line(reply: Reply) -> str:
    """Describe an answer: tokens, tokens per step, speed, and the reason if it ended early."""
    endings = {
        "length": ", stopped at max_new_tokens",
        "context": ", stopped: the context is full",
        None: ", interrupted",
    }
    count = len(reply.tokens)
    speed = f"{count} tokens, {reply.tokens_per_step:.2f} tokens per step"
    if reply.seconds:
        speed += f", {count / reply.seconds:.0f} tokens/s"
    return speed + endings.get(reply.finish, "")
