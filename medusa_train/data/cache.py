"""Tokenization of the configured data sets, cached on disk (`dataset_prepared_path`).

A cache file is one safetensors file, named by a hash of everything that affects the tokens: data, tokenizer, chat
template, settings and the code of this package. It holds the concatenated tokens of all examples, and their metadata
as JSON. It is written atomically; a corrupt one is rebuilt.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from medusa_train.config.schema import DatasetConfig, TrainConfig
from medusa_train.data.examples import CorruptDataError, EncodedExamples
from medusa_train.data.records import describe_problems
from medusa_train.data.sources import HubSplit, LocalFiles, OnProgress, open_source
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.data.workers import encode_conversations
from medusa_train.errors import DataError
from medusa_train.io import replace_bytes, write_failure

_LIBRARIES = ("jinja2", "tokenizers", "transformers")


@dataclass(frozen=True)
class DatasetReader:
    """One entry of `datasets`, opened, with the encoder for its chats."""

    config: DatasetConfig
    source: LocalFiles | HubSplit
    encoder: ChatEncoder


def open_datasets(cfg: TrainConfig, encoder: ChatEncoder, on_progress: OnProgress | None = None) -> list[DatasetReader]:
    """Open every entry of `datasets` without reading it; see `open_source`.

    Supervision follows `roles_to_train` and `train_on_inputs`; the chat template is the entry's `conversation`, by
    default that of `encoder`.

    Raises:
        DataError: a data set does not exist.
        ConfigError: unknown chat template.
    """
    return [
        DatasetReader(
            entry,
            open_source(entry, on_progress),
            encoder.with_settings(
                template=entry.conversation,
                roles=cfg.roles_to_train,
                train_on_inputs=cfg.train_on_inputs,
                reasoning_tags=cfg.reasoning_tags,
            ),
        )
        for entry in cfg.datasets
    ]


def load_or_encode(
    cfg: TrainConfig, readers: Sequence[DatasetReader], directory: Path, on_progress: OnProgress | None = None
) -> EncodedExamples:
    """Load the examples from the cache in `directory`, or encode them and store them there, and note which."""
    path = directory / f"{cache_key(cfg, readers)[:32]}.safetensors"
    note = None
    try:
        encoded = EncodedExamples.from_bytes(path.read_bytes(), cfg.sequence_len)
        encoded.report.notes.append(f"loaded tokenized data from {path}")
        return encoded
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, CorruptDataError) as error:
        note = f"{path} is corrupt ({error}), tokenizing again"
    encoded = encode_datasets(cfg, readers, on_progress)
    content = encoded.to_bytes()  # without notes, which concern this run
    encoded.report.notes += [note] if note else []
    try:
        replace_bytes(path, [content])
    except OSError as error:
        encoded.report.notes.append(f"dataset_prepared_path: {write_failure(path.name, directory, error)}")
    return encoded


def encode_datasets(
    cfg: TrainConfig, readers: Sequence[DatasetReader], on_progress: OnProgress | None = None
) -> EncodedExamples:
    """Read and tokenize every data set; see `encode_conversations`.

    Raises:
        DataError: a data set cannot be read, or holds invalid records (unless `skip_bad_records`).
    """
    encoded = EncodedExamples.empty(cfg.sequence_len)
    for index, reader in enumerate(readers):
        result = reader.source.read(reader.config.type, skip_bad=cfg.skip_bad_records, tags=cfg.reasoning_tags)
        encoded.report.skipped += result.skipped
        part = encode_conversations(
            result.conversations, reader.encoder, cfg.sequence_len, cfg.dataset_processes, on_progress
        )
        if part.report.skipped and not cfg.skip_bad_records:
            raise DataError(describe_problems(part.report.skipped, reader.config.path))
        part.origins = [index] * len(part.examples)
        encoded.extend(part)
    return encoded


def cache_key(cfg: TrainConfig, readers: Sequence[DatasetReader]) -> str:
    """Hash everything that affects the tokens: data, tokenizer, templates, settings, code and library versions.

    The source text of this package is part of the key, so that a changed tokenization never uses an old cache.
    """
    package = Path(__file__).parent
    inputs = {
        "sequence_len": cfg.sequence_len,
        "skip_bad_records": cfg.skip_bad_records,
        "sources": [
            [reader.config.type, reader.source.fingerprint(), reader.encoder.fingerprint()] for reader in readers
        ],
        "code": [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(package.glob("*.py"))],
        "libraries": [metadata.version(name) for name in _LIBRARIES],
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
