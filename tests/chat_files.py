"""Chats read from a file, without an encoder."""

from pathlib import Path

from medusa_train.config.schema import DatasetConfig
from medusa_train.data.read_chats import ReadResult, parse_records, with_some
from medusa_train.data.sources import LocalFiles


def read_conversations(path: Path, *, skip_bad: bool = False) -> ReadResult:
    source = LocalFiles((path,))
    entry = DatasetConfig(path=source.name)
    return with_some(parse_records(source.parts(), entry, skip_bad=skip_bad), source.name)
