"""Tokenised data kept on disk (`dataset_prepared_path`), under a key of all that shapes it; knows no split or order.

One safetensors file per key: the tokens of all examples in one line, and about each example what is no number as
JSON. A file is written whole or not at all, and one that is damaged is made again.
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
from medusa_train.data.records import bad_records
from medusa_train.data.sources import RecordSource, open_source
from medusa_train.data.tokenize import ChatEncoder, Example, Outcome, encode_example
from medusa_train.errors import DataError
from medusa_train.io import replace_bytes, write_failure

_CODE = ("cache", "chat_template", "conversation", "records", "sources", "templates", "tokenize")
_LIBRARIES = ("jinja2", "tokenizers", "transformers")


class _DamagedError(Exception):
    """A cache file that is corrupt."""


def load_or_encode(cfg: TrainConfig, readings: Sequence[DatasetReader], directory: Path) -> EncodedExamples:
    """Take the corpus from `directory` if it was encoded before from the same data in the same way, or encode it.

    The report's notes say where it came from, what was damaged, and what could not be written.

    Raises:
        DataError: as `encode_datasets` does.
    """
    path = directory / f"{cache_key(cfg, readings)[:32]}.safetensors"
    note = None
    try:
        corpus = _from_bytes(path.read_bytes(), cfg.sequence_len)
        corpus.report.notes.append(f"tokens taken from {path}")
        return corpus
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, _DamagedError) as error:
        note = f"{path} is damaged ({error}), encoding anew"
    corpus = encode_datasets(cfg, readings)
    content = _to_bytes(corpus)  # before the notes: they speak of this run
    corpus.report.notes += [note] if note else []
    try:
        replace_bytes(path, [content])
    except OSError as error:
        corpus.report.notes.append(f"dataset_prepared_path: {write_failure(path.name, directory, error)}")
    return corpus


def cache_key(cfg: TrainConfig, readings: Sequence[DatasetReader]) -> str:
    """Digest everything that shapes the tokens: data, tokenizer, templates, settings, and the code that encodes.

    Code counts by its text, so that a cache never outlives the version that made it.
    """
    here = Path(__file__).parent
    shaping = {
        "sequence_len": cfg.sequence_len,
        "skip_bad_records": cfg.skip_bad_records,
        "sources": [
            [reading.config.type, reading.source.fingerprint(), reading.encoder.fingerprint()] for reading in readings
        ],
        "code": [hashlib.sha256((here / f"{name}.py").read_bytes()).hexdigest() for name in _CODE],
        "libraries": [metadata.version(name) for name in _LIBRARIES],
    }
    return hashlib.sha256(json.dumps(shaping, sort_keys=True).encode()).hexdigest()


def _to_bytes(corpus: EncodedExamples) -> bytes:
    examples = corpus.examples
    about = {
        "examples": [[example.key, example.id, example.source] for example in examples],
        "skipped": corpus.report.skipped,
        "outcomes": corpus.report.outcomes,
    }
    none = torch.zeros(0, dtype=torch.int32)
    tensors = {
        "tokens": torch.cat([none, *(example.tokens for example in examples)]),
        "supervised": torch.cat([none.bool(), *(example.supervised for example in examples)]),
        "lengths": torch.tensor([len(example) for example in examples], dtype=torch.int64),
        "origins": torch.tensor(corpus.origins, dtype=torch.int64),
        "about": torch.frombuffer(bytearray(json.dumps(about).encode()), dtype=torch.uint8),
    }
    return save(tensors, metadata={"crc32": str(_checksum(tensors))})


def _from_bytes(content: bytes, sequence_len: int) -> EncodedExamples:
    try:
        tensors = load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        if header["__metadata__"]["crc32"] != str(_checksum(tensors)):
            raise _DamagedError("its checksum is wrong")
        about = json.loads(tensors["about"].numpy().tobytes())
        lengths = tensors["lengths"].tolist()
    except (SafetensorError, KeyError, ValueError) as error:
        raise _DamagedError(str(error).split("\n")[0]) from None
    parts = zip(about["examples"], tensors["tokens"].split(lengths), tensors["supervised"].split(lengths), strict=True)
    examples = [Example(tokens, supervised, *names) for names, tokens, supervised in parts]
    report = DataReport(sequence_len, about["skipped"], about["outcomes"])
    return EncodedExamples(examples, tensors["origins"].tolist(), report)


def _checksum(tensors: dict[str, Tensor]) -> int:
    value = 0
    for name in sorted(tensors):
        value = zlib.crc32(tensors[name].numpy().tobytes(), zlib.crc32(name.encode(), value))
    return value


@dataclass
class DataReport:
    """What became of the records, for people. `notes` are sentences on anything else that is worth knowing."""

    sequence_len: int
    skipped: list[str] = field(default_factory=list)
    outcomes: dict[Outcome, int] = field(
        default_factory=lambda: {"whole": 0, "cut": 0, "too_long": 0, "unsupervised": 0}
    )
    notes: list[str] = field(default_factory=list)

    def describe(self) -> list[str]:
        """Return one sentence for each thing that was not taken as it stood, and the notes."""
        cut, too_long, unsupervised = (self.outcomes[name] for name in ("cut", "too_long", "unsupervised"))
        said = [
            (len(self.skipped), f"bad records left out, the first: {self.skipped[0] if self.skipped else ''}"),
            (cut, f"cut at the end of a turn to fit sequence_len {self.sequence_len}"),
            (too_long, f"left out: their first answer ends beyond sequence_len {self.sequence_len}"),
            (unsupervised, "left out: no answer in them to learn from"),
        ]
        return [f"{count} {what}" for count, what in said if count] + self.notes


@dataclass
class EncodedExamples:
    """All examples in the order of the sources; `origins` holds the number of each one's source."""

    examples: list[Example]
    origins: list[int]
    report: DataReport


@dataclass(frozen=True)
class DatasetReader:
    """One entry of `datasets`, found and ready to be read: with the encoder for its chats."""

    config: DatasetConfig
    source: RecordSource
    encoder: ChatEncoder


def open_datasets(cfg: TrainConfig, encoder: ChatEncoder) -> list[DatasetReader]:
    """Find every source; nothing is read yet.

    Whose words are learnt follows the configuration (`roles_to_train`, `train_on_inputs`); the template is the
    data set's `conversation`, else the encoder's.

    Raises:
        DataError: a source is not there.
        ConfigError: no chat template of that name.
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


def encode_datasets(cfg: TrainConfig, readings: Sequence[DatasetReader]) -> EncodedExamples:
    """Read and encode every source; see `encode_example` for long conversations.

    Raises:
        DataError: a source cannot be read, or holds records that cannot be used (unless `skip_bad_records`).
    """
    corpus = EncodedExamples([], [], DataReport(cfg.sequence_len))
    for number, reading in enumerate(readings):
        read = reading.source.read(reading.config.type, skip_bad=cfg.skip_bad_records)
        corpus.report.skipped += read.skipped
        problems: list[str] = []
        for conversation in read.conversations:
            try:
                example, outcome = encode_example(conversation, reading.encoder, cfg.sequence_len)
            except DataError as error:
                problems.append(str(error))
                continue
            corpus.report.outcomes[outcome] += 1
            if example is not None:
                corpus.examples.append(example)
                corpus.origins.append(number)
        if problems and not cfg.skip_bad_records:
            raise DataError(bad_records(problems, reading.config.path))
        corpus.report.skipped += problems
    return corpus
