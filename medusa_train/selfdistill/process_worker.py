"""The worker process of `ProcessEngine`: load the model, then answer requests until the parent ends it.

Parent and worker exchange the messages below; requests are lists of (request id, request).
"""

from __future__ import annotations

import logging
import os
import threading
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from medusa_train.errors import MedusaError
from medusa_train.selfdistill.engines import Answer, Request
from medusa_train.selfdistill.local_model import LocalModel
from medusa_train.selfdistill.processes import Share, private_memory
from medusa_train.worker_processes import end_worker

if TYPE_CHECKING:
    from medusa_train.selfdistill.hf_engine import Counts


@dataclass(frozen=True)
class Loaded:
    """The model is loaded; see `limit_processes` for the two sizes."""

    weight_bytes: int
    private_bytes: int | None


@dataclass(frozen=True)
class Start:
    """To the worker: its share, whether to compile (None: decide it for all processes), and the tokens to generate."""

    share: Share
    compiled: bool | None
    tokens: int


@dataclass(frozen=True)
class CompileDecision:
    """Whether all processes compile, with a line that says why."""

    wanted: bool
    line: str | None


@dataclass(frozen=True)
class Note:
    """A line for the user."""

    line: str


@dataclass(frozen=True)
class Ready:
    """The worker takes requests from now on."""


@dataclass(frozen=True)
class Finished:
    """Answers with their request ids, and the counts of this worker so far."""

    answers: list[tuple[int, Answer]]
    counts: Counts


@dataclass(frozen=True)
class Failed:
    """The worker ends, with an error for the user or the trace of a bug, which the parent raises as RuntimeError."""

    error: MedusaError | None
    trace: str


def run_worker(connection: Connection, model: LocalModel, share: Share) -> None:
    """Run the worker until an error occurs or the parent has ended."""
    share.apply()
    _be_quiet()
    inbox: SimpleQueue[Any] = SimpleQueue()
    # a thread, so that the parent never waits for this process to read, and the parent's end is noticed at once
    threading.Thread(target=_receive, args=(connection, inbox), daemon=True).start()
    try:
        _serve(connection, inbox, model)
    except MedusaError as error:
        connection.send(Failed(error, ""))
    except Exception:
        connection.send(Failed(None, traceback.format_exc()))


def _receive(connection: Connection, inbox: SimpleQueue[Any]) -> None:
    try:
        while True:
            inbox.put(connection.recv())
    except (EOFError, OSError):
        end_worker()


def _serve(connection: Connection, inbox: SimpleQueue[Any], model: LocalModel) -> None:
    loaded = model.load()
    weights = sum(weight.numel() * weight.element_size() for weight in loaded.backbone.model.parameters())
    connection.send(Loaded(weights, private_memory()))
    start: Start = inbox.get()
    start.share.apply()
    compiled, rows = start.compiled, start.share.rows
    if compiled is None:
        compiled, line = model.decide_compile(loaded, rows, start.tokens)
        connection.send(CompileDecision(compiled, line))
    if compiled:
        model.compile(loaded, rows, lambda line: connection.send(Note(line)))
    engine = model.engine(loaded, rows)
    connection.send(Ready())
    unanswered = 0
    while True:
        while not unanswered or not inbox.empty():
            requests: list[tuple[int, Request]] = inbox.get()
            for request_id, request in requests:
                engine.submit(request_id, request)
            unanswered += len(requests)
        if answers := engine.advance():
            unanswered -= len(answers)
            connection.send(Finished(answers, engine.counts))


def _be_quiet() -> None:
    """Show no warnings and progress bars: the same ones would appear for every process."""
    if os.environ.get("MEDUSA_DEBUG", "") not in ("", "0"):
        return
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
