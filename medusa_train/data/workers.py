"""Tokenization of conversations in several processes, in order and with the result of one process."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import resource_tracker

import torch

from medusa_train.data.conversation import Conversation
from medusa_train.data.examples import EncodedExamples, encode_examples
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

    Few are tokenized in this process, others in up to `max_workers` (default: `default_workers`), with the same result:
    the examples in order, with `origins` 0, and in `skipped` of the report those that the template does not support.

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

_settings: tuple[ChatEncoder, int]  # of this worker


def _encode_in_workers(
    chunks: Sequence[Sequence[Conversation]], encoder: ChatEncoder, max_length: int, workers: int
) -> Generator[EncodedExamples, None, None]:
    """Yield the examples of every chunk, in order.

    Workers are spawned, not forked: this process has threads by now (progress, gloo, NCCL), whose locks a fork would
    copy. They return bytes, since torch passes each tensor between processes through a file descriptor of its own.
    """
    resource_tracker.ensure_running()  # it would unblock Ctrl-C if it were started with the first worker
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start, (encoder, max_length))
    try:
        with _ctrl_c_blocked():
            parts = pool.map(_work, chunks)
        yield from (EncodedExamples.from_bytes(part, max_length) for part in parts)
    except BrokenProcessPool:
        raise DataError(
            f"one of {workers} tokenization processes ended, killed for lack of memory or by an error above; "
            "set dataset_processes to a smaller number, or to 1 to tokenize in the main process"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


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


def _start(encoder: ChatEncoder, max_length: int) -> None:
    """Prepare a worker, which ends with its parent, also if that is killed."""
    global _settings
    _settings = encoder, max_length
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(conversations: Sequence[Conversation]) -> bytes:
    return _encode(conversations, *_settings).to_bytes()
