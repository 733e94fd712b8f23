"""Data sets by path, Hugging Face hub name or short public name, opened for reading."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from medusa_train.config.paths import looks_like_path, resolve_path
from medusa_train.config.schema import DatasetConfig
from medusa_train.data.conversation import REASONING_TAGS, ReasoningTags
from medusa_train.data.record_files import PARQUET, RawRecord, number_rows, read_file
from medusa_train.data.records import ReadResult, parse_records
from medusa_train.errors import ConfigError, DataError
from medusa_train.hub import fetch_dataset_file, hub_is_unreachable

_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", PARQUET)
_UNSUPPORTED_SUFFIXES = (".csv", ".tsv", ".txt", ".arrow", ".gz", ".zip", ".zst")


class RecordSource(Protocol):
    """An opened data set."""

    @property
    def name(self) -> str:
        """Name for messages."""

    def records(self, *, skip_blank_lines: bool = False) -> Iterator[RawRecord]:
        """Yield all records unparsed; see `read_file`."""

    def read(self, type: str, *, skip_bad: bool, reasoning_tags: ReasoningTags = REASONING_TAGS) -> ReadResult:
        """Read all conversations; arguments and DataError as in `read_conversations`."""

    def fingerprint(self) -> str:
        """Return a digest that changes with the content."""


@dataclass(frozen=True)
class LocalFiles:
    """JSON, JSON Lines and parquet files, read one after the other."""

    paths: tuple[Path, ...]

    @property
    def name(self) -> str:
        """The paths."""
        return ", ".join(map(str, self.paths))

    def records(self, *, skip_blank_lines: bool = False) -> Iterator[RawRecord]:
        """Yield the records of all files."""
        for path in self.paths:
            yield from read_file(path, skip_blank_lines=skip_blank_lines)

    def read(self, type: str, *, skip_bad: bool, reasoning_tags: ReasoningTags = REASONING_TAGS) -> ReadResult:
        """Read all conversations; every file must hold at least one."""
        results = [
            parse_records(read_file(path), type, name=str(path), skip_bad=skip_bad, reasoning_tags=reasoning_tags)
            for path in self.paths
        ]
        return ReadResult(
            [conversation for result in results for conversation in result.conversations],
            [skipped for result in results for skipped in result.skipped],
        )

    def fingerprint(self) -> str:
        """Digest paths, sizes and contents, so that an edit within the same size and second changes it."""
        digest = hashlib.sha256()
        for path in self.paths:
            try:
                digest.update(f"{path}\0{path.stat().st_size}\0".encode())
                with path.open("rb") as file:
                    while block := file.read(1 << 20):
                        digest.update(block)
            except OSError as error:
                raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
        return digest.hexdigest()


@dataclass(frozen=True)
class HubSplit:
    """One split of a data set of the hub, loaded by `datasets`."""

    name: str
    rows: Any

    def records(self, *, skip_blank_lines: bool = False) -> Iterator[RawRecord]:
        """Yield the rows in order."""
        return number_rows(self.rows, self.name)

    def read(self, type: str, *, skip_bad: bool, reasoning_tags: ReasoningTags = REASONING_TAGS) -> ReadResult:
        """Read all conversations in order."""
        return parse_records(self.records(), type, name=self.name, skip_bad=skip_bad, reasoning_tags=reasoning_tags)

    def fingerprint(self) -> str:
        """Digest the split's name and the fingerprint that `datasets` gives its content."""
        return hashlib.sha256(f"{self.name}\0{self.rows._fingerprint}".encode()).hexdigest()


def open_source(source: DatasetConfig) -> LocalFiles | HubSplit:
    """Open a file, a directory of files, or a data set of the hub if no local path has that name.

    Raises:
        DataError: it does not exist, or has no supported file.
        ConfigError: `name`, or a `split` other than train, is set for a local path, which is read whole.
    """
    path = resolve_path(source.path)
    if path is None:
        return _open_hub(source)
    hub_keys = {"split": None if source.split == "train" else source.split, "name": source.name}
    if unused := [key for key, value in hub_keys.items() if value is not None]:
        raise ConfigError(
            f"datasets: {' and '.join(unused)} cannot be used with {source.path}, a local path that is read whole. "
            "Remove it, or set path to the file to read"
        )
    if path.is_dir():
        paths = tuple(sorted(file for file in path.iterdir() if file.name.endswith(_SUFFIXES) and file.is_file()))
        if not paths:
            raise DataError(f"{path}: no {', '.join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]} file in this directory")
        return LocalFiles(paths)
    if path.suffix in _UNSUPPORTED_SUFFIXES and not path.name.endswith(_SUFFIXES):
        raise DataError(
            f"{path}: unsupported file format, only JSON and JSONL (also gzipped) and parquet are; convert it first"
        )
    return LocalFiles((path,))


def read_source(source: DatasetConfig, *, skip_bad: bool = False) -> ReadResult:
    """Open and read a source.

    Raises:
        DataError: it does not exist, or has invalid records (see `read_conversations`).
    """
    return open_source(source).read(source.type, skip_bad=skip_bad)


def is_data_file_name(name: str) -> bool:
    """Return whether `name` can only be a local path, not a hub name; detects misspelt paths."""
    return looks_like_path(name) or Path(name).suffix in (*_SUFFIXES, *_UNSUPPORTED_SUFFIXES)


def _open_hub(source: DatasetConfig) -> HubSplit:
    if is_data_file_name(source.path):
        raise DataError(f"{source.path}: no such file or directory")
    import datasets  # takes a second to import, and most configurations name files

    if hub_is_unreachable():
        datasets.config.HF_HUB_OFFLINE = True  # use the local cache without retries
    split = source.split or "train"
    try:
        rows: Any = datasets.load_dataset(source.path, source.name, split=split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise DataError(
            f"{source.path}: no such file or directory, and the hub has no data set of that name: {reason}\n"
            "Check the name and the connection, or set it to the path of a JSONL file."
        ) from None
    return HubSplit(f"{source.path}[{split}]", rows)


@dataclass(frozen=True)
class PublicDataset:
    """A data set that has a short name: prompts of self-distillation, or a bench of `evaluation/questions.py`.

    Attributes:
        local_paths: where to look for it first, relative to the project or working directory; a downloaded JSON Lines
            file belongs at the first, the original format at the last.
        hub_repo: its repository on the hub; with neither that nor `url`, it ships with the project.
        hub_file: the file of `hub_repo` to read; None reads `split`.
        split: the split of `hub_repo` to read.
        url: where its file is downloaded from if it is not on the hub.
    """

    local_paths: tuple[str, ...]
    hub_repo: str | None = None
    hub_file: str | None = None
    split: str | None = None
    url: str | None = None

    @property
    def origin(self) -> str | None:
        """Its public source, for messages; None if it ships with the project."""
        if self.hub_repo is None:
            return self.url
        what = self.hub_file or f"the split {self.split}"
        return f"https://huggingface.co/datasets/{self.hub_repo} ({what})"


SEED_DATASETS = {
    "tiny": PublicDataset(("data/seeds/tiny.jsonl",)),
    "sharegpt": PublicDataset(
        ("data/seeds/sharegpt.jsonl", "data/seeds/sharegpt.json"),
        "anon8231489123/ShareGPT_Vicuna_unfiltered",
        hub_file="ShareGPT_V3_unfiltered_cleaned_split.json",
    ),
    "ultrachat": PublicDataset(
        ("data/seeds/ultrachat.jsonl", "data/seeds/ultrachat"),
        "HuggingFaceH4/ultrachat_200k",
        split="train_sft",
    ),
}


def open_seed_dataset(
    name: str, note: Callable[[str], None] = lambda line: None, *, split: str | None = None
) -> LocalFiles | HubSplit:
    """Open the prompts of self-distillation (`seed_dataset`).

    Args:
        name: one of `SEED_DATASETS`, a file, a directory of files, or a data set of the hub.
        note: receives a line before the hub is asked, which may take a while.
        split: of a data set of the hub.

    Raises:
        DataError: it does not exist; for a public data set the message says which file to download to which path.
        ConfigError: `split` is set for a local path.
    """
    public = SEED_DATASETS.get(name)
    candidates = (name,) if public is None else public.local_paths
    path = next((path for path in map(resolve_path, candidates) if path is not None), None)
    if path is not None:
        if split is not None:
            raise ConfigError(f"split: cannot be used with {path}, a local path that is read whole; leave split out")
        return open_source(DatasetConfig(path=str(path)))
    if public is not None:
        return _download(name, public, note, split)
    if name.count("/") == 1 and not is_data_file_name(name):
        return _open_hub_split(name, split, note)
    raise DataError(f"seed_dataset {name}: no such file, and no seed set of that name ({', '.join(SEED_DATASETS)})")


def _download(
    name: str, public: PublicDataset, note: Callable[[str], None], split: str | None
) -> LocalFiles | HubSplit:
    if public.hub_repo is None:
        raise DataError(f"seed_dataset {name}: {public.local_paths[0]} is missing from this installation")
    if public.hub_file is not None:
        _note_download(f"{name} ({public.hub_repo})", note)
        file = fetch_dataset_file(public.hub_repo, public.hub_file)
        if file is not None:
            return LocalFiles((file,))
        what, where = public.hub_file, f"put it at {public.local_paths[-1]} (one JSON array"
    else:
        try:
            return _open_hub_split(public.hub_repo, split or public.split, note)
        except DataError:
            what = f"the parquet files of the split {public.split}"
            where = f"put them into the directory {public.local_paths[-1]}/ ("
    where += f"{'; ' if public.hub_file else ''}JSON Lines: {public.local_paths[0]})"
    raise DataError(
        f"seed_dataset {name}: not found locally, and could not be fetched from the Hugging Face hub.\n"
        f"Download {what} of the data set {public.hub_repo} and {where},\n"
        "or set seed_dataset to another file of conversations."
    )


def _open_hub_split(repo: str, split: str | None, note: Callable[[str], None]) -> LocalFiles | HubSplit:
    _note_download(repo, note)
    return open_source(DatasetConfig(path=repo, split=split))


def _note_download(what: str, note: Callable[[str], None]) -> None:
    if not hub_is_unreachable():
        note(f"seed_dataset {what}: not found locally, asking the Hugging Face hub ...")
