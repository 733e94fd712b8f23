"""The engine that runs the backbone in several processes on a CPU, each with a part of the cores and of the batch."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

import torch

from medusa_train.errors import BackboneError
from medusa_train.inference.batch import REFILL_FRACTION
from medusa_train.models.precision import free_memory
from medusa_train.selfdistill.engines import Answer, Request, pick_similar
from medusa_train.selfdistill.hf_engine import COMPARED_ANSWERS, POOL_BATCHES, Counts
from medusa_train.selfdistill.local_model import LocalModel
from medusa_train.selfdistill.process_worker import (
    CompileDecision,
    Failed,
    Finished,
    Loaded,
    Note,
    Ready,
    Start,
    run_worker,
)
from medusa_train.selfdistill.processes import SMALL_MODEL_BYTES, Share, divide, limit_processes
from medusa_train.worker_processes import Worker, kill_workers, start_worker


@dataclass
class _Process:
    """A worker process as its parent sees it.

    Attributes:
        lengths: characters of its unanswered requests, by request id.
        counts: as of its last answers.
    """

    worker: Worker
    share: Share
    loaded: bool = False
    ready: bool = False
    lengths: dict[int, int] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)

    @property
    def load(self) -> tuple[int, int]:
        """Number of unanswered requests, and their characters."""
        return len(self.lengths), sum(self.lengths.values())


class ProcessEngine:
    """Generates answers in several processes; each loads the model and runs an `HFEngine`.

    The first process loads the model alone, which shows how many processes are suitable (`limit_processes`) and whether
    compilation saves time (`compiled="auto"`). It starts to answer while the others load. Requests wait here until a
    process has free rows, so that no process is idle while another one has requests waiting.

    An answer depends on its request only, as with `HFEngine`.

    Args:
        model: what each process loads.
        batch_size: conversations at a time, of all processes together.
        processes: their number.
        adjustable: start fewer processes if the model is large or memory is short.
        note: receives lines for the user: the number of processes, and the decision on compilation.

    Raises:
        MedusaError: the model cannot be loaded.
        BackboneError: a process was killed.
    """

    def __init__(
        self, model: LocalModel, batch_size: int, processes: int, *, adjustable: bool, note: Callable[[str], None]
    ) -> None:
        self.batch_size = batch_size
        self._model = model
        self._planned = processes
        self._adjustable = adjustable
        self._note = note
        self._noted: set[str] = set()
        self._compiled = None if model.compiled == "auto" else model.compiled
        self._waiting: list[tuple[int, Request]] = []
        self._finished: deque[tuple[int, Answer]] = deque()
        self._processes: list[_Process] = []
        try:
            self._start(divide(processes, batch_size)[0])
            while self._compiled is None or not self._processes[0].loaded:
                self._receive()
        except BaseException:
            self.close()
            raise

    @property
    def capacity(self) -> int:
        """A few batches of requests, from which prompts of similar length are batched."""
        return POOL_BATCHES * self.batch_size

    def submit(self, request_id: int, request: Request) -> None:
        """Queue a request; `next` hands it to a process."""
        self._waiting.append((request_id, request))

    def next(self) -> tuple[int, Answer]:
        """Wait for the next answer of any process.

        Raises:
            BackboneError: a process was killed.
        """
        while not self._finished:
            self._hand_out()
            self._receive()
        return self._finished.popleft()

    def stats(self) -> Mapping[str, str]:
        """Return the figures of all processes together."""
        return sum((process.counts for process in self._processes), Counts()).figures()

    def close(self) -> None:
        """End all processes at once."""
        kill_workers(process.worker for process in self._processes)

    def wait_until_ready(self) -> int:
        """Wait until all processes have loaded the model, and compiled it where wanted; return their number."""
        while not all(process.ready for process in self._processes):
            self._receive()
        return len(self._processes)

    # Requests

    def _hand_out(self) -> None:
        """Hand waiting requests to the processes with room for them, evenly, the fewest unanswered first."""
        while self._waiting:
            takers = [process for process in self._processes if self._room(process) > 0]
            able = [process for process in takers if process.ready]
            if not able:
                return
            process = min(able, key=lambda process: process.load)
            # leave a part for processes that are still loading: they are ready before this one has finished
            count = min(self._room(process), -(-len(self._waiting) // len(takers)))
            requests = pick_similar(self._waiting, count, lambda asked: _length(asked[1]))
            process.lengths.update((request_id, _length(request)) for request_id, request in requests)
            self._send(process, requests)

    def _room(self, process: _Process) -> int:
        """Return how many more requests a process gets: its rows, and those that will join when rows become free."""
        rows = process.share.rows
        # the first batches with heads are whole ones, see `HFEngine`
        whole = self._model.paths.has_draft and process.counts.compared < COMPARED_ANSWERS
        ahead = rows if whole else -(-rows // REFILL_FRACTION)
        return rows + ahead - len(process.lengths)

    # Messages

    def _receive(self) -> None:
        """Wait for messages of any process, and act on them."""
        by_connection = {process.worker.connection: process for process in self._processes}
        for connection in wait(list(by_connection)):
            process = by_connection[connection]  # type: ignore[index]
            try:
                message = process.worker.connection.recv()
            except (EOFError, ConnectionError):
                raise self._death(process) from None
            self._act(process, message)

    def _act(self, process: _Process, message: object) -> None:
        if isinstance(message, Finished):
            process.counts = message.counts
            for request_id, _ in message.answers:
                del process.lengths[request_id]
            self._finished.extend(message.answers)
        elif isinstance(message, Loaded):
            process.loaded = True
            if process is self._processes[0]:
                self._start_others(message)
                self._begin(process)
            elif self._compiled is not None:
                self._begin(process)
        elif isinstance(message, CompileDecision):
            self._compiled = message.wanted
            self._tell(message.line)
            for other in self._processes[1:]:
                if other.loaded:
                    self._begin(other)
        elif isinstance(message, Note):
            self._tell(message.line)
        elif isinstance(message, Ready):
            process.ready = True
        elif isinstance(message, Failed):
            raise message.error or RuntimeError(f"a generation process failed:\n{message.trace}")

    def _send(self, process: _Process, message: Any) -> None:
        try:
            process.worker.connection.send(message)
        except ConnectionError:
            # its last message may be the reason
            while process.worker.connection.poll():
                self._receive()
            raise self._death(process) from None

    def _tell(self, line: str | None) -> None:
        """Print a line once, however many processes report it."""
        if line is not None and line not in self._noted:
            self._noted.add(line)
            self._note(line)

    # Processes

    def _start(self, share: Share) -> None:
        self._processes.append(_Process(start_worker(run_worker, self._model, share), share))

    def _start_others(self, first: Loaded) -> None:
        """Start as many other processes as suit the model, each with its share."""
        count = self._planned
        if self._adjustable:
            free = free_memory(torch.device("cpu"))
            count = limit_processes(self._planned, first.weight_bytes, first.private_bytes, free)
            if count < self._planned:
                self._tell(_why_fewer(count, self._planned, first, free))
        shares = divide(count, self.batch_size)
        self._processes[0].share = shares[0]
        for share in shares[1:]:
            self._start(share)
        if count > 1:
            rows, threads = shares[-1].rows, shares[-1].threads
            self._tell(f"processes: {count}, each with {_count(rows, 'conversation')} and {_count(threads, 'thread')}")

    def _begin(self, process: _Process) -> None:
        """Let a process that has loaded the model continue; the first one decides whether all compile."""
        self._send(process, Start(process.share, self._compiled, self._model.tokens // len(self._processes)))

    def _death(self, process: _Process) -> BackboneError:
        process.worker.process.join(timeout=5)
        code = process.worker.process.exitcode
        how = f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"
        return BackboneError(
            f"one of {_count(len(self._processes), 'generation process', 'es')} ended {how}, perhaps for lack of "
            "memory; finished conversations are kept, and the same command continues. Set processes to a smaller "
            "number, or to 1 to generate in the main process"
        )


def _length(request: Request) -> int:
    return sum(len(message.content) for message in request.messages)


def _count(number: int, name: str, plural: str = "s") -> str:
    return f"{number} {name if number == 1 else name + plural}"


def _why_fewer(count: int, planned: int, first: Loaded, free: int | None) -> str:
    if first.weight_bytes > SMALL_MODEL_BYTES:
        size = first.weight_bytes / 1e9
        return f"processes: {count}, since weights of {size:.1f} GB are better read once for all conversations"
    needed, have = (first.private_bytes or 0) / 1e9, (free or 0) / 1e9
    return f"processes: {count} of {planned}, since each takes {needed:.1f} GB, and {have:.1f} GB are free"
