"""Tokenised data kept on disk (`dataset_prepared_path`), under a key of all that shapes it; knows no split or order.

One safetensors file per key: the tokens of all examples in one line, and about each example what is no number as
JSON. A file is written whole or not at all, and one that is damaged is made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from medusa_train.config.schema import TrainConfig
from medusa_train.data.corpus import Corpus, DataReport, Reading, encode_sources
from medusa_train.data.examples import Example

_CODE = ("chat", "conversation", "corpus", "examples", "formats", "prepared", "sources", "spans", "templates")
_LIBRARIES = ("jinja2", "tokenizers", "transformers")


class _DamagedError(Exception):
    """A file of prepared data that is not what was written."""


def prepared(cfg: TrainConfig, readings: Sequence[Reading], directory: Path) -> Corpus:
    """Take the corpus from `directory` if it was encoded before from the same data in the same way, or encode it.

    The report's notes say where it came from, what was damaged, and what could not be written.

    Raises:
        DataError: as `encode_sources` does.
    """
    path = directory / f"{prepared_key(cfg, readings)[:32]}.safetensors"
    note = None
    try:
        corpus = _from_bytes(path.read_bytes(), cfg.sequence_len)
        corpus.report.notes.append(f"tokens taken from {path}")
        return corpus
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, _DamagedError) as error:
        note = f"{path} is damaged ({error}), encoding anew"
    corpus = encode_sources(cfg, readings)
    content = _to_bytes(corpus)  # before the notes: they speak of this run
    corpus.report.notes += [note] if note else []
    try:
        _write(path, content)
    except OSError as error:
        corpus.report.notes.append(f"dataset_prepared_path: {path} cannot be written ({error.strerror or error})")
    return corpus


def prepared_key(cfg: TrainConfig, readings: Sequence[Reading]) -> str:
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


def _to_bytes(corpus: Corpus) -> bytes:
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


def _from_bytes(content: bytes, sequence_len: int) -> Corpus:
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
    return Corpus(examples, tensors["origins"].tolist(), report)


def _checksum(tensors: dict[str, Tensor]) -> int:
    value = 0
    for name in sorted(tensors):
        value = zlib.crc32(tensors[name].numpy().tobytes(), zlib.crc32(name.encode(), value))
    return value


def _write(path: Path, content: bytes) -> None:
    """Write `content` under another name beside `path`, then rename: no reader ever sees a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".tmp-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
