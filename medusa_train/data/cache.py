"""Tokenization of the configured data sets, cached on disk (`dataset_prepared_path`).

A cache file is one safetensors file, named by a hash of everything that affects the tokens: data, tokenizer, chat
template, settings and the code of this package. It holds the concatenated tokens of all examples, and their metadata
as JSON. It is written atomically; a corrupt one is rebuilt.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from medusa_train.config.schema import DatasetConfig, TrainConfig
from medusa_train.data.records import describe_problems
from medusa_train.data.sources import RecordSource, open_source
from medusa_train.data.tokenize import ChatEncoder, Example, Outcome, encode_example
from medusa_train.errors import DataError
from medusa_train.io import replace_bytes, write_failure

_CODE = (
    "builtin_templates",
    "cache",
    "chat_template",
    "conversation",
    "record_files",
    "records",
    "sources",
    "tokenize",
)
_LIBRARIES = ("jinja2", "tokenizers", "transformers")


@dataclass
class DataReport:
    """Statistics on reading and tokenization, for the user.

    Attributes:
        sequence_len: the maximum length of an example.
        skipped: `file:line: reason` of invalid records.
        outcomes: number of conversations by `Outcome`.
        notes: further sentences.
    """

    sequence_len: int
    skipped: list[str] = field(default_factory=list)
    outcomes: dict[Outcome, int] = field(
        default_factory=lambda: {"complete": 0, "truncated": 0, "too_long": 0, "unsupervised": 0}
    )
    notes: list[str] = field(default_factory=list)

    def describe(self) -> list[str]:
        """Return a sentence for each kind of conversation that was skipped or truncated, and the notes."""
        truncated, too_long, unsupervised = (self.outcomes[name] for name in ("truncated", "too_long", "unsupervised"))
        counts = [
            (len(self.skipped), f"invalid records skipped, the first: {self.skipped[0] if self.skipped else ''}"),
            (truncated, f"truncated at the end of a turn to fit sequence_len {self.sequence_len}"),
            (too_long, f"skipped: their first answer ends beyond sequence_len {self.sequence_len}"),
            (unsupervised, "skipped: no answer to train on"),
        ]
        return [f"{count} {what}" for count, what in counts if count] + self.notes


@dataclass
class EncodedExamples:
    """The examples of all data sets in order; `origins` holds the index into `datasets` of each."""

    examples: list[Example]
    origins: list[int]
    report: DataReport


@dataclass(frozen=True)
class DatasetReader:
    """One entry of `datasets`, opened, with the encoder for its chats."""

    config: DatasetConfig
    source: RecordSource
    encoder: ChatEncoder


def open_datasets(cfg: TrainConfig, encoder: ChatEncoder) -> list[DatasetReader]:
    """Open every entry of `datasets` without reading it.

    Supervision follows `roles_to_train` and `train_on_inputs`; the chat template is the entry's `conversation`, by
    default that of `encoder`.

    Raises:
        DataError: a data set does not exist.
        ConfigError: unknown chat template.
    """
    return [
        DatasetReader(
            entry,
            open_source(entry),
            encoder.with_settings(
                template=entry.conversation, roles=cfg.roles_to_train, train_on_inputs=cfg.train_on_inputs
            ),
        )
        for entry in cfg.datasets
    ]


def load_or_encode(cfg: TrainConfig, readers: Sequence[DatasetReader], directory: Path) -> EncodedExamples:
    """Load the examples from the cache in `directory`, or encode them and store them there.

    The report's notes tell whether the cache was used, corrupt, or could not be written.

    Raises:
        DataError: as `encode_datasets`.
    """
    path = directory / f"{cache_key(cfg, readers)[:32]}.safetensors"
    note = None
    try:
        encoded = _from_bytes(path.read_bytes(), cfg.sequence_len)
        encoded.report.notes.append(f"loaded tokenized data from {path}")
        return encoded
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, _CorruptCacheError) as error:
        note = f"{path} is corrupt ({error}), tokenizing again"
    encoded = encode_datasets(cfg, readers)
    content = _to_bytes(encoded)  # without notes, which concern this run
    encoded.report.notes += [note] if note else []
    try:
        replace_bytes(path, [content])
    except OSError as error:
        encoded.report.notes.append(f"dataset_prepared_path: {write_failure(path.name, directory, error)}")
    return encoded


def encode_datasets(cfg: TrainConfig, readers: Sequence[DatasetReader]) -> EncodedExamples:
    """Read and tokenize every data set; see `encode_example` for long conversations.

    Raises:
        DataError: a data set cannot be read, or holds invalid records (unless `skip_bad_records`).
    """
    encoded = EncodedExamples([], [], DataReport(cfg.sequence_len))
    for index, reader in enumerate(readers):
        result = reader.source.read(reader.config.type, skip_bad=cfg.skip_bad_records)
        encoded.report.skipped += result.skipped
        problems: list[str] = []
        for conversation in result.conversations:
            try:
                example, outcome = encode_example(conversation, reader.encoder, cfg.sequence_len)
            except DataError as error:
                problems.append(str(error))
                continue
            encoded.report.outcomes[outcome] += 1
            if example is not None:
                encoded.examples.append(example)
                encoded.origins.append(index)
        if problems and not cfg.skip_bad_records:
            raise DataError(describe_problems(problems, reader.config.path))
        encoded.report.skipped += problems
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
        "code": [hashlib.sha256((package / f"{name}.py").read_bytes()).hexdigest() for name in _CODE],
        "libraries": [metadata.version(name) for name in _LIBRARIES],
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


class _CorruptCacheError(Exception):
    pass


def _to_bytes(encoded: EncodedExamples) -> bytes:
    examples = encoded.examples
    info = {
        "examples": [[example.key, example.id, example.source] for example in examples],
        "skipped": encoded.report.skipped,
        "outcomes": encoded.report.outcomes,
    }
    empty = torch.zeros(0, dtype=torch.int32)  # torch.cat needs at least one tensor
    tensors = {
        "tokens": torch.cat([empty, *(example.tokens for example in examples)]),
        "supervised": torch.cat([empty.bool(), *(example.supervised for example in examples)]),
        "lengths": torch.tensor([len(example) for example in examples], dtype=torch.int64),
        "origins": torch.tensor(encoded.origins, dtype=torch.int64),
        "about": torch.frombuffer(bytearray(json.dumps(info).encode()), dtype=torch.uint8),
    }
    return save(tensors, metadata={"crc32": str(_checksum(tensors))})


def _from_bytes(content: bytes, sequence_len: int) -> EncodedExamples:
    try:
        tensors = load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        if header["__metadata__"]["crc32"] != str(_checksum(tensors)):
            raise _CorruptCacheError("checksum mismatch")
        info = json.loads(tensors["about"].numpy().tobytes())
        lengths = tensors["lengths"].tolist()
    except (SafetensorError, KeyError, ValueError) as error:
        raise _CorruptCacheError(str(error).split("\n")[0]) from None
    parts = zip(info["examples"], tensors["tokens"].split(lengths), tensors["supervised"].split(lengths), strict=True)
    examples = [Example(tokens, supervised, *names) for names, tokens, supervised in parts]
    report = DataReport(sequence_len, info["skipped"], info["outcomes"])
    return EncodedExamples(examples, tensors["origins"].tolist(), report)


def _checksum(tensors: dict[str, Tensor]) -> int:
    value = 0
    for name in sorted(tensors):
        value = zlib.crc32(tensors[name].numpy().tobytes(), zlib.crc32(name.encode(), value))
    return value
