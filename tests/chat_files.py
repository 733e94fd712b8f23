"""Chats read from a file, without an encoder."""

from pathlib import Path

from medusa_train.config.schema import DatasetConfig
from medusa_train.data.read_chats import ReadResult, read_chats
from medusa_train.data.sources import LocalFiles


def read_conversations(path: Path, *, skip_bad: bool = False) -> ReadResult:
    return read_chats(LocalFiles((path,)), DatasetConfig(path=str(path)), skip_bad=skip_bad)
