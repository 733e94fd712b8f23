"""Tokenize the configured data sets in one process or several, cached on disk
(`dataset_prepared_path`).

A cache file is named by a hash of everything that affects the tokens: data, tokenizer, chat
template, settings and the code of this package. It holds the concatenated tokens of all examples,
and their metadata as JSON. It is written atomically; a corrupt one is rebuilt.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from importlib import metadata
from multiprocessing import resource_tracker
from pathlib import Path

import torch

from medusa_train.config.schema import DatasetConfig, TrainConfig
from medusa_train.data.conversation import Conversation
from medusa_train.data.examples import EncodedDataset, encode_examples
from medusa_train.data.read_chats import ReadResult, describe_problems, read_chats
from medusa_train.data.report import DataReport
from medusa_train.data.sources import HubSplit, LocalFiles, OnProgress, open_source
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.errors import DataError
from medusa_train.io import replace_bytes, write_failure

#: Keys that the cache key leaves out: the fingerprints of the data set's source and encoder cover
#: them.
_PLACES = {"path", "split", "name", "data_files", "ds_type", "conversation"}
_LIBRARIES = ("jinja2", "tokenizers", "transformers")
#: A worker imports torch and transformers, which takes as long as tokenizing about this many
#: conversations.
CONVERSATIONS_PER_WORKER = 2000
#: Number of conversations that are tokenized between two updates of the progress.
CHUNK = 128
#: Default limit. More workers would wait for the one process that reads and collects.
MAX_WORKERS = 16


def encode_datasets(
    cfg: TrainConfig, encoder: ChatEncoder, on_progress: OnProgress | None = None
) -> EncodedDataset:
    """Read and tokenize the `datasets` of a configuration, or take their tokens from the cache."""
    readers = open_datasets(cfg, encoder, on_progress)

    def encode() -> EncodedDataset:
        return read_and_encode(readers, cfg.sequence_len, cfg.dataset_processes, on_progress)

    if cfg.prepared_dir is None:
        encoded = encode()
    else:
        key = cache_key(readers, cfg.sequence_len)
        encoded = load_or_encode(cfg.prepared_dir / f"{key[:32]}.bin", encode)
    encoded.row_len = cfg.sequence_len if cfg.sample_packing else None
    report = encoded.report
    for reader in readers:
        report.notes += reader.source.notes
    if not encoded.examples:
        names = ", ".join(entry.path for entry in cfg.datasets)
        raise DataError(f"{names}: no conversation left: " + "; ".join(report.describe()))
    keys = [example.key for example in encoded.examples if example.row == 0]
    num_repeated = len(keys) - len(set(keys))
    if num_repeated:
        report.notes.append(
            f"{num_repeated:,} of {len(keys):,} conversations equal an earlier one; all of them are"
            " used"
        )
    return encoded


def open_datasets(
    cfg: TrainConfig, encoder: ChatEncoder, on_progress: OnProgress | None = None
) -> list[DatasetReader]:
    """Open every entry of `datasets` without reading it; see `open_source`.

    Supervision follows `roles_to_train` and `train_on_inputs`; the chat template is the entry's
    `conversation`, by default that of `encoder`.
    """
    readers = []
    for entry in cfg.datasets:
        source = open_source(entry, on_progress)
        entry_encoder = encoder.with_settings(
            template=entry.conversation,
            roles=cfg.roles_to_train,
            train_on_inputs=cfg.train_on_inputs,
            reasoning_tags=cfg.reasoning_tags,
        )
        skip_bad = cfg.skip_bad_records or source.is_public
        readers.append(DatasetReader(entry, source, entry_encoder, skip_bad))
    return readers


@dataclass(frozen=True)
class DatasetReader:
    """One entry of `datasets`, opened, with the encoder for its chats; `skip_bad` as in
    `read_chats`.
    """

    entry: DatasetConfig
    source: LocalFiles | HubSplit
    encoder: ChatEncoder
    skip_bad: bool

    def read(self) -> ReadResult:
        """Read all conversations; raise DataError if there are none. Files without records are
        noted.
        """
        template = self.encoder.template
        result = read_chats(
            self.source,
            self.entry,
            skip_bad=self.skip_bad,
            tags=template.reasoning_tags,
            variables=template.variables,
        )
        result.report.notes += result.report.unread.describe(self.entry.path)
        return result


def load_or_encode(path: Path, encode: Callable[[], EncodedDataset]) -> EncodedDataset:
    """Load the examples from the cache file `path`, or `encode` them and store them there. A note
    in the report tells which.
    """
    notes = []
    try:
        encoded = EncodedDataset.from_bytes(path.read_bytes())
        encoded.report.notes.append(f"loaded tokenized data from {path}")
        return encoded
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        notes.append(f"{path} is corrupt ({error}), tokenizing again")
    encoded = encode()
    try:
        replace_bytes(path, [encoded.to_bytes()])
    except OSError as error:
        notes.append(f"dataset_prepared_path: {write_failure(path.name, path.parent, error)}")
    encoded.report.notes += notes  # they concern only this run, so they are not stored
    return encoded


def cache_key(readers: Sequence[DatasetReader], max_length: int) -> str:
    """Hash everything that affects the tokens: data, tokenizer, templates, settings, code and
    library versions.

    The source text of this package is part of the key, so that a changed tokenization never uses an
    old cache.
    """
    sources = [
        [
            reader.entry.model_dump(mode="json", exclude=_PLACES),
            reader.skip_bad,
            reader.source.fingerprint(),
            reader.encoder.fingerprint(),
        ]
        for reader in readers
    ]
    code = sorted(Path(__file__).parent.glob("*.py"))
    inputs = {
        "sequence_len": max_length,
        "sources": sources,
        "code": [hashlib.sha256(path.read_bytes()).hexdigest() for path in code],
        "libraries": [metadata.version(name) for name in _LIBRARIES],
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def read_and_encode(
    readers: Sequence[DatasetReader],
    max_length: int,
    max_workers: int | None = None,
    on_progress: OnProgress | None = None,
) -> EncodedDataset:
    """Read and tokenize every data set; see `encode_conversations`."""
    encoded = EncodedDataset([], DataReport(max_length))
    for number, reader in enumerate(readers):
        result = reader.read()
        encoded.report.add(result.report)
        part = encode_conversations(
            result.conversations, reader.encoder, max_length, max_workers, on_progress
        )
        if part.report.skipped and not reader.skip_bad:
            raise DataError(describe_problems(part.report.skipped, reader.entry.path))
        part.examples = [replace(example, dataset=number) for example in part.examples]
        encoded.extend(part)
    return encoded


# Conversations of one data set


def encode_conversations(
    conversations: Sequence[Conversation],
    encoder: ChatEncoder,
    max_length: int,
    max_workers: int | None = None,
    on_progress: OnProgress | None = None,
) -> EncodedDataset:
    """Tokenize the conversations of a data set; see `encode_examples` for long ones.

    A small data set is tokenized in this process, a larger one in up to `max_workers` processes
    (default: `default_workers`). The result is the same: the examples in order. `skipped` of the
    report lists the conversations that the template does not support.
    """
    encoded = EncodedDataset([], DataReport(max_length))
    total = len(conversations)
    chunks = [conversations[start : start + CHUNK] for start in range(0, total, CHUNK)]

    workers = min(max_workers or default_workers(), total // CONVERSATIONS_PER_WORKER)
    parts = (_encode_chunk(chunk, encoder, max_length) for chunk in chunks)
    if workers > 1:
        parts = _encode_in_workers(chunks, encoder, max_length, workers)
    with contextlib.closing(parts):
        for number, part in enumerate(parts, start=1):
            encoded.extend(part)
            if on_progress is not None:
                on_progress("tokenizing", min(number * CHUNK, total), total)
    return encoded


def _encode_chunk(
    conversations: Sequence[Conversation], encoder: ChatEncoder, max_length: int
) -> EncodedDataset:
    encoded = EncodedDataset([], DataReport(max_length))
    for conversation in conversations:
        try:
            encoded.examples += encode_examples(conversation, encoder, encoded.report)
        except DataError as error:
            encoded.report.skipped.append(str(error))
    return encoded


def default_workers() -> int:
    """Return the number of CPU cores that this process may use, at most `MAX_WORKERS`."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS, Windows
        cores = os.cpu_count() or 1
    return min(cores, MAX_WORKERS)


# Processes

_worker: tuple[ChatEncoder, int]  # encoder and max_length of this worker


def _encode_in_workers(
    chunks: Sequence[Sequence[Conversation]], encoder: ChatEncoder, max_length: int, workers: int
) -> Generator[EncodedDataset, None, None]:
    """Yield the examples of every chunk, in order.

    Workers are spawned, not forked: this process has threads by now (progress, gloo, NCCL), whose
    locks a fork would copy.
    """
    # Starting the tracker unblocks Ctrl-C, so start it before the block, not with the first worker.
    resource_tracker.ensure_running()
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), _start, (encoder, max_length)
    )
    try:
        with _ctrl_c_blocked():
            parts = pool.map(_work, chunks)
        yield from parts
    except BrokenProcessPool:
        raise DataError(
            f"one of {workers} tokenization processes ended, killed for lack of memory or by an"
            " error above; set dataset_processes to a smaller number, or to 1 to tokenize in the"
            " main process"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _ctrl_c_blocked() -> Iterator[None]:
    """Block Ctrl-C in this process, which receives it afterwards, and in processes started here.

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
    """Prepare a worker. It ends with its parent, even if the parent is killed."""
    global _worker
    _worker = encoder, max_length
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(conversations: Sequence[Conversation]) -> EncodedDataset:
    return _encode_chunk(conversations, *_worker)
