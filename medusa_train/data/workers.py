"""Tokenization of conversations in several processes, in order and with the result of one process."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Generator, Iterable, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch

from medusa_train.data.conversation import Conversation
from medusa_train.data.encoded import EncodedExamples
from medusa_train.data.examples import encode_examples
from medusa_train.data.sources import OnProgress
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.errors import DataError

#: A worker imports torch and transformers, which takes as long as tokenizing about this many conversations.
CONVERSATIONS_PER_WORKER = 2000
#: Conversations that are tokenized between two updates of the progress.
CHUNK = 128
#: More workers by default would wait for the one process that reads and collects.
MAX_WORKERS = 16
#: Name of the progress of tokenizing, in conversations of a data set.
TOKENIZING = "tokenizing"


def default_workers() -> int:
    """Return the number of CPU cores that this process may use, at most `MAX_WORKERS`."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS, Windows
        cores = os.cpu_count() or 1
    return min(cores, MAX_WORKERS)


def encode_conversations(
    conversations: Sequence[Conversation],
    encoder: ChatEncoder,
    max_length: int,
    max_workers: int | None = None,
    on_progress: OnProgress | None = None,
) -> EncodedExamples:
    """Tokenize the conversations of a data set; see `encode_examples` for long ones.

    Args:
        conversations: any number of them; few are tokenized in this process.
        encoder: the same for all.
        max_length: maximum tokens of an example.
        max_workers: maximum number of processes; default: `default_workers`.
        on_progress: called every `CHUNK` conversations.

    Returns:
        The examples in order, with `origins` 0. `skipped` of the report holds the conversations that the template does
        not support. The number of processes changes nothing.

    Raises:
        DataError: a worker process was killed, or failed.
    """
    encoded, total = EncodedExamples.empty(max_length), len(conversations)
    chunks = [conversations[start : start + CHUNK] for start in range(0, total, CHUNK)]

    def collect(parts: Iterable[EncodedExamples]) -> None:
        for number, part in enumerate(parts, start=1):
            encoded.extend(part)
            if on_progress is not None:
                on_progress(TOKENIZING, min(number * CHUNK, total), total)

    workers = min(max_workers or default_workers(), total // CONVERSATIONS_PER_WORKER)
    if workers < 2:
        collect(_encode(chunk, encoder, max_length) for chunk in chunks)
        return encoded
    with contextlib.closing(_encode_in_workers(chunks, encoder, max_length, workers)) as parts:
        collect(parts)
    return encoded


def _encode(conversations: Sequence[Conversation], encoder: ChatEncoder, max_length: int) -> EncodedExamples:
    encoded = EncodedExamples.empty(max_length)
    report = encoded.report
    for conversation in conversations:
        try:
            examples, outcome = encode_examples(conversation, encoder, max_length)
        except DataError as error:
            report.skipped.append(str(error))
            continue
        report.outcomes[outcome] += 1
        if examples:
            report.count_answers(conversation)
        if len(examples) > 1:
            report.split = (report.split[0] + 1, report.split[1] + len(examples))
        encoded.examples += examples
        encoded.origins += [0] * len(examples)
    return encoded


# Processes


def _encode_in_workers(
    chunks: Sequence[Sequence[Conversation]], encoder: ChatEncoder, max_length: int, workers: int
) -> Generator[EncodedExamples, None, None]:
    """Yield the examples of every chunk, in order. A worker gets the next chunk when it has returned its last one."""
    waiting = iter(enumerate(chunks))
    numbers: dict[Connection, int] = {}  # of the chunks in progress
    finished: dict[int, bytes] = {}
    following = 0
    try:
        with _open_workers(workers) as connections:
            while following < len(chunks):
                for connection in wait(connections):
                    assert isinstance(connection, Connection)
                    result = connection.recv_bytes()
                    if connection in numbers:
                        finished[numbers.pop(connection)] = result
                    else:  # it has started
                        connection.send((encoder, max_length))
                    if (task := next(waiting, None)) is not None:
                        numbers[connection] = task[0]
                        connection.send(task[1])
                while following in finished:
                    yield EncodedExamples.from_bytes(finished.pop(following), max_length)
                    following += 1
    except (EOFError, ConnectionError):
        raise DataError(
            f"one of {workers} tokenization processes ended, killed for lack of memory or by an error above; "
            "set dataset_processes to a smaller number, or to 1 to tokenize in the main process"
        ) from None


@contextlib.contextmanager
def _open_workers(count: int) -> Iterator[list[Connection]]:
    """Start processes that run `_work`, and kill them at the end, whatever they are doing.

    They are spawned, not forked: this process has threads by now (progress, gloo, NCCL), whose locks a fork would copy.
    """
    context = multiprocessing.get_context("spawn")
    resource_tracker.ensure_running()  # it would unblock Ctrl-C if it were started with the first worker
    workers: list[tuple[BaseProcess, Connection]] = []
    try:
        for _ in range(count):
            connection, other = context.Pipe()
            process = context.Process(target=_work, args=(other,), daemon=True)
            workers.append((process, connection))
            with other, _ctrl_c_blocked():
                process.start()
        yield [connection for _, connection in workers]
    finally:
        for worker, connection in workers:
            if worker.pid is not None:
                worker.kill()
                worker.join()
            connection.close()


@contextlib.contextmanager
def _ctrl_c_blocked() -> Iterator[None]:
    """Block Ctrl-C, also in processes that are started here; this process receives it afterwards.

    A terminal sends it to all processes, and each would print a traceback.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(connection: Connection) -> None:
    """Report the start, then receive the settings and chunks, and return the examples of each.

    They are returned as bytes, since torch passes each tensor between processes through a file descriptor of its own.
    Reading fails once the parent has ended, and so does this process.
    """
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, ConnectionError):  # the parent was killed
        connection.send_bytes(b"")
        encoder, max_length = connection.recv()
        while True:
            connection.send_bytes(_encode(connection.recv(), encoder, max_length).to_bytes())
