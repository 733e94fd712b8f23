"""Data sets by path, Hugging Face hub name or short public name, opened for reading."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from medusa_train.config.paths import expand_user, looks_like_path, resolve_path
from medusa_train.config.schema import DatasetConfig
from medusa_train.data.record_files import PARQUET, RawRecord, number_rows, read_file
from medusa_train.errors import ConfigError, DataError
from medusa_train.hub import (
    FETCHING,
    FetchError,
    describe_hub_error,
    fetch_dataset_file,
    hub_is_unreachable,
)

#: Names a directory with `sharegpt.json`, for instance, that is searched before `data/seeds/`.
SEED_DIR_VARIABLE = "MEDUSA_SEED_DIR"
_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", PARQUET)
_BESIDE = (".settings.json", ".dropped.jsonl")  # written beside the data by self-distillation
_UNSUPPORTED_SUFFIXES = (".csv", ".tsv", ".txt", ".arrow", ".gz", ".zip", ".zst")

#: Receives the name of what is being done, and how much of it is done of how much; 0 of 0 where
# that is unknown.
OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class LocalFiles:
    """JSON, JSON Lines and parquet files, read one after the other."""

    paths: tuple[Path, ...]

    @property
    def name(self) -> str:
        """The paths."""
        return ", ".join(map(str, self.paths))

    def parts(self) -> list[tuple[str, Iterator[RawRecord]]]:
        """Return the path of each file and its records."""
        return [(str(path), read_file(path)) for path in self.paths]

    def fingerprint(self) -> str:
        """Digest paths, sizes and contents, so that an edit within the same size and second changes
        it.
        """
        digest = hashlib.sha256()
        for path in self.paths:
            try:
                digest.update(os.fsencode(path.resolve()) + f"\0{path.stat().st_size}\0".encode())
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

    def parts(self) -> list[tuple[str, Iterator[RawRecord]]]:
        """Return the split's name and its rows."""
        return [(self.name, number_rows(self.rows, self.name))]

    def fingerprint(self) -> str:
        """Digest the split's name and the fingerprint that `datasets` gives its content."""
        return hashlib.sha256(f"{self.name}\0{self.rows._fingerprint}".encode()).hexdigest()


def open_source(
    source: DatasetConfig, on_progress: OnProgress | None = None
) -> LocalFiles | HubSplit:
    """Open a file, a directory of files, a public data set, or a data set of the hub: the first
    that has this name.
    """
    path = resolve_path(source.path)
    if path is None:
        if source.path in PUBLIC_DATASETS:
            return open_public(source, on_progress)
        return _open_hub(source, on_progress)
    hub_keys = {"split": None if source.split == "train" else source.split, "name": source.name}
    if unused := [key for key, value in hub_keys.items() if value is not None]:
        raise ConfigError(
            f"{' and '.join(unused)} cannot be used with {source.path}, a local path that is read"
            f" whole; leave {' and '.join(unused)} out, or name the file to read"
        )
    if path.is_dir():
        paths = tuple(
            sorted(
                file for file in path.iterdir() if file.name.endswith(_SUFFIXES) and file.is_file()
            )
        )
        # macOS writes ._NAME beside NAME
        paths = tuple(file for file in paths if not file.name.startswith("."))
        # shards whose merged file is there hold the same conversations
        names = {file.name for file in paths}
        whole = {name: re.sub(r"\.shard-\d+-of-\d+", "", name) for name in names}
        paths = tuple(
            f
            for f in paths
            if not f.name.endswith(_BESIDE) and whole[f.name] not in names - {f.name}
        )
        if not paths:
            raise DataError(
                f"{path}: no {', '.join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]} file in this directory"
            )
        return LocalFiles(paths)
    if path.suffix in _UNSUPPORTED_SUFFIXES and not path.name.endswith(_SUFFIXES):
        raise DataError(
            f"{path}: only JSON and JSONL (also gzipped) and parquet are supported; convert it"
            " first"
        )
    return LocalFiles((path,))


def open_prompts(
    name: str, split: str | None, on_progress: OnProgress | None = None
) -> LocalFiles | HubSplit:
    """Open the prompts of self-distillation (`seed_dataset`): a public data set, a local path, or
    one of the hub.
    """
    source = DatasetConfig(path=name, split=split)
    if name in PUBLIC_DATASETS:
        return open_public(source, on_progress)
    if resolve_path(name) is None and (name.count("/") != 1 or is_data_file_name(name)):
        names = ", ".join(PUBLIC_DATASETS)
        raise DataError(
            f"seed_dataset {name}: no such file, and no public data set of that name ({names})"
        )
    return open_source(source, on_progress)


def is_data_file_name(name: str) -> bool:
    """Return whether `name` can only be a local path, not a hub name; detects misspelt paths."""
    return looks_like_path(name) or Path(name).suffix in (*_SUFFIXES, *_UNSUPPORTED_SUFFIXES)


def _open_hub(source: DatasetConfig, on_progress: OnProgress | None) -> HubSplit:
    if is_data_file_name(source.path):
        raise DataError(f"{source.path}: no such file or directory")
    try:
        return _load_split(source, on_progress)
    except FetchError as error:
        raise DataError(
            f"{source.path}: no such file or directory, and it cannot be loaded from the hub:"
            f" {error}\nCheck its name, its `name` and `split` on the hub, and the connection, or"
            " set the path of a JSONL file."
        ) from None


def _load_split(source: DatasetConfig, on_progress: OnProgress | None) -> HubSplit:
    import datasets  # takes a second to import, and most configurations name files

    if hub_is_unreachable():
        datasets.config.HF_HUB_OFFLINE = True  # use the local cache without retries
    elif on_progress is not None:
        on_progress(f"{FETCHING} {source.path}", 0, 0)
    split = source.split or "train"
    try:
        rows: Any = datasets.load_dataset(source.path, source.name, split=split)
    except Exception as error:  # those of HTTP clients have no common base
        known = isinstance(
            error, (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError)
        )
        if not known and describe_hub_error(error, source.path, "dataset") is None:
            raise
        raise FetchError(
            " ".join(str(error).split("\n")[:2]).strip() or type(error).__name__
        ) from None
    return HubSplit(f"{source.path}[{split}]", rows)


@dataclass(frozen=True)
class PublicDataset:
    """A data set that has a short name: conversations, or a bench of `evaluation/questions.py`.

    Attributes:
        local_paths: where to look for it first, relative to the project or working directory; a
            downloaded JSON Lines file belongs at the first, the original format at the second.
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


PUBLIC_DATASETS = {
    "tiny": PublicDataset(("data/seeds/tiny.jsonl",)),
    # the file that Medusa's authors train on and take prompts from; the last path is that of
    # Axolotl's fork
    "sharegpt": PublicDataset(
        (
            "data/seeds/sharegpt.jsonl",
            "data/seeds/sharegpt.json",
            "data/sharegpt/ShareGPT_V4.3_unfiltered_cleaned_split.json",
        ),
        "Aeala/ShareGPT_Vicuna_unfiltered",
        hub_file="ShareGPT_V4.3_unfiltered_cleaned_split.json",
    ),
    "ultrachat": PublicDataset(
        ("data/seeds/ultrachat.jsonl", "data/seeds/ultrachat"),
        "HuggingFaceH4/ultrachat_200k",
        split="train_sft",
    ),
}


def open_public(
    source: DatasetConfig, on_progress: OnProgress | None = None
) -> LocalFiles | HubSplit:
    """Open a data set of `PUBLIC_DATASETS`: a local copy, else that in the hub's cache, else
    fetched from the hub.
    """
    public = PUBLIC_DATASETS[source.path]
    local_paths = list(map(str, public.local_paths))
    if directory := os.environ.get(SEED_DIR_VARIABLE):
        local_paths = [
            str(expand_user(directory) / Path(path).name) for path in local_paths
        ] + local_paths
    for path in local_paths:
        if resolve_path(path) is not None:
            return open_source(source.model_copy(update={"path": path}))
    if public.hub_repo is None:
        raise DataError(f"{source.path}: {public.local_paths[0]} is missing from this installation")
    try:
        if public.hub_file is None:
            split = source.split or public.split
            return _load_split(
                source.model_copy(update={"path": public.hub_repo, "split": split}), on_progress
            )
        on_bytes = on_progress and partial(
            on_progress, f"{FETCHING} {source.path} from {public.hub_repo}"
        )
        file = str(fetch_dataset_file(public.hub_repo, public.hub_file, on_bytes))
    except FetchError as error:
        reason = str(error)
    else:
        return open_source(source.model_copy(update={"path": file}))
    jsonl, original = public.local_paths[:2]
    what, where = public.hub_file, f"put it at {original} (one JSON array; JSON Lines: {jsonl})"
    if public.hub_file is None:
        what = f"the parquet files of the split {public.split}"
        where = f"put them into the directory {original}/ (JSON Lines: {jsonl})"
    raise DataError(
        f"{source.path}: not found locally, and could not be fetched from the Hugging Face hub:"
        f" {reason}\nDownload {what} of the data set {public.hub_repo} and {where},\nor name"
        " another file of conversations."
    )
