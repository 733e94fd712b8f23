"""Data sets by path, Hugging Face hub name or short public name, opened for reading."""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from medusa_train.config.paths import expand_user, looks_like_path, resolve_path
from medusa_train.config.schema import DatasetConfig
from medusa_train.data.record_files import (
    PARQUET,
    RawRecord,
    number_records,
    read_file,
    settings_path,
    shown_name,
)
from medusa_train.errors import ConfigError, DataError
from medusa_train.hub import (
    FETCHING,
    FetchError,
    describe_hub_error,
    fetch_dataset_file,
    hub_is_unreachable,
    offline_advice,
)
from medusa_train.io import parse_json
from medusa_train.network import check_network

#: Environment variable of a directory with files such as `sharegpt.json`. It is searched before
#: `data/seeds/`.
SEED_DIR_VARIABLE = "MEDUSA_SEED_DIR"
#: Suffixes of the files that are read.
SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", PARQUET)
#: At most this many names of unread files in a message.
MAX_NAMED = 8
_SELF_DISTILLATION_FILES = (
    ".settings.json",
    ".dropped.jsonl",
)  # written next to the data by self-distillation
#: Metadata that `datasets`, hub repositories and others write next to the data. A file of this name
#: is metadata, not records, if it holds one JSON object.
_METADATA = (
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "state.json",
    "metadata.json",
)
#: Files that `save_to_disk` of `datasets` writes next to files of rows (`.arrow`).
_SAVED = ("dataset_dict.json", "state.json")
#: Format names that `datasets` and Axolotl take as `path`, with `data_files` next to it.
BUILDERS = ("json", "parquet", "csv", "text", "arrow", "pandas", "xml", "webdataset")
#: Words in a file's name that tell its split. Held-out splits come first.
_SPLIT_WORDS = {
    "test": ("test", "testing", "eval", "evaluation"),
    "validation": ("validation", "valid", "val", "dev"),
    "train": ("train", "training"),
}
_UNSUPPORTED_SUFFIXES = (
    ".csv",
    ".tsv",
    ".txt",
    ".xlsx",
    ".arrow",
    ".feather",
    ".pkl",
    ".gz",
    ".bz2",
    ".xz",
    ".zst",
    ".zip",
    ".tar",
)

#: Called with the name of the work, the amount that is done and the total. Both are 0 if the total
#: is unknown.
OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class LocalFiles:
    """JSON, JSON Lines and parquet files, read one after the other.

    Attributes:
        notes: sentences on what is next to the files and not read.
        is_public: the files are from a public data set. Their invalid records are skipped and
            counted, since users cannot correct them.
    """

    paths: tuple[Path, ...]
    notes: tuple[str, ...] = ()
    is_public: bool = False

    @property
    def name(self) -> str:
        """The paths."""
        return ", ".join(map(str, self.paths))

    def parts(self) -> list[tuple[str, Iterator[RawRecord]]]:
        """Return the path of each file and its records."""
        return [(str(path), read_file(path)) for path in self.paths]

    def fingerprint(self) -> str:
        """Return a digest of paths, sizes and contents. An edit that keeps size and modification
        time changes it too.
        """
        digest = hashlib.sha256()
        for path in self.paths:
            try:
                digest.update(os.fsencode(path.resolve()) + f"\0{path.stat().st_size}\0".encode())
                with path.open("rb") as file:
                    while block := file.read(1 << 20):  # data may be larger than memory
                        digest.update(block)
            except OSError as error:
                raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
        return digest.hexdigest()


@dataclass(frozen=True)
class HubSplit:
    """One split of a data set of the hub, or of what `save_to_disk` wrote, loaded by `datasets`;
    `notes` and `is_public` as in `LocalFiles`.
    """

    name: str
    records: Any
    notes: tuple[str, ...] = ()
    is_public: bool = False

    def parts(self) -> list[tuple[str, Iterator[RawRecord]]]:
        """Return the split's name and its records."""
        return [(self.name, number_records(self.records, self.name))]

    def fingerprint(self) -> str:
        """Return a digest of the split's name and the fingerprint that `datasets` gives its
        content.
        """
        return hashlib.sha256(f"{self.name}\0{self.records._fingerprint}".encode()).hexdigest()


def open_source(
    entry: DatasetConfig, on_progress: OnProgress | None = None
) -> LocalFiles | HubSplit:
    """Open the data of `entry`. Its path is tried as a file or directory, as a public data set,
    and as a data set of the hub, in this order.
    """
    if entry.data_files is not None and entry.path in BUILDERS:
        if entry.path not in ("json", "parquet"):
            raise ConfigError(
                f"path: {entry.path} is not supported; convert the data to JSON Lines"
            )
        _reject_hub_keys(entry)
        return _open_named_files(entry)
    path = resolve_path(entry.path)
    if path is None:
        if entry.path in PUBLIC_DATASETS:
            return open_public(entry, on_progress)
        if entry.path in BUILDERS:
            raise ConfigError(
                f"path: {entry.path} names a format, not data; set `data_files` to the files to"
                " read, or `path` to a file or directory"
            )
        return _open_hub(entry, on_progress)
    if path.is_dir():
        return _open_directory(entry, path)
    if entry.data_files is not None:
        raise ConfigError(f"data_files cannot be used with {entry.path}, which is a file itself")
    _reject_hub_keys(entry)
    return _local_files([path], entry.ds_type)


def _reject_hub_keys(entry: DatasetConfig) -> None:
    """Raise ConfigError if a local path has settings that only data sets of the hub have."""
    unused = []
    if entry.split not in (None, "train"):
        unused.append("split")
    if entry.name is not None:
        unused.append("name")
    if unused:
        names = " and ".join(unused)
        raise ConfigError(
            f"{names} cannot be used with {entry.path}, a local path that is read whole; leave"
            f" {names} out, or name the file to read"
        )


def _open_named_files(entry: DatasetConfig, root: Path | None = None) -> LocalFiles:
    """Open the `data_files`, names or glob patterns, of the directory `root`; without `root`, those
    of `path: json` or `path: parquet`.
    """
    chosen: list[Path] = []
    for name in entry.data_files or ():
        path = resolve_path(name) if root is None else root / name
        if path is not None and path.exists():
            files = [path]
        else:
            files = _matching_files((root or Path()) / expand_user(name))
        if not files:
            place = "" if root is None else f" in {root}"
            raise DataError(f"data_files: {name}: no such file{place}")
        chosen += files
    for path in chosen:
        if path.is_dir():
            raise ConfigError(f"data_files: {path} is a directory; set it as `path`")
    return _local_files(dict.fromkeys(chosen), entry.path if root is None else entry.ds_type)


def _matching_files(pattern: Path) -> list[Path]:
    """Return the files that match a pattern such as `*.jsonl`, sorted.

    Brackets may be part of names: directories that exist are not read as patterns, and if a pattern
    finds no file, its `[` is taken literally.
    """
    root, *parts = Path(), *pattern.parts
    while len(parts) > 1 and os.path.isdir(root / parts[0]):
        root /= parts.pop(0)
    rest = os.path.join(*parts)
    for inner in (rest, rest.replace("[", "[[]")):
        matches = sorted(glob.glob(inner, root_dir=root, recursive=True))
        if matches:
            return [root / match for match in matches if (root / match).is_file()]
    return []


def _local_files(
    paths: Iterable[Path], ds_type: str | None, notes: Iterable[str] = ()
) -> LocalFiles:
    """Return files after checking their formats. A file is read by the suffix of its name, which
    `ds_type` must not contradict.
    """
    for path in paths:
        name = path.name.lower()
        if path.suffix.lower() in _UNSUPPORTED_SUFFIXES and not name.endswith(SUFFIXES):
            raise DataError(
                f"{path}: only JSON and JSONL (also gzipped) and parquet are supported; convert it"
                " first"
            )
        if ds_type is not None and name.endswith(PARQUET) != (ds_type == "parquet"):
            raise ConfigError(f"{path} is not of the format {ds_type}; remove ds_type")
    return LocalFiles(tuple(paths), tuple(notes))


def _open_directory(entry: DatasetConfig, path: Path) -> LocalFiles | HubSplit:
    """Open a directory of files, or one that `save_to_disk` of `datasets` wrote.

    The files are those of the directory or, if it has none, of its `data/`; with `name` those of
    that subdirectory of either. A file with a split in its name (`train`, `test`, ...) is read for
    that split only. The others are read for `train`, the default. `notes` list everything that is
    not read.
    """
    if _is_saved(path):
        return _open_saved(entry, path)
    if entry.name is not None:
        parents = [inner for inner in (path, path / "data") if (inner / entry.name).is_dir()]
        if not parents:
            raise ConfigError(
                f"split and name cannot be used with {entry.path}, a local path: it has no"
                f" directory {entry.name}; leave name out, or name the directory to read"
            )
        path = parents[0] / entry.name
    if entry.data_files is not None:
        if entry.split not in (None, "train"):
            raise ConfigError(
                "split cannot be used together with data_files, which are read whole"
                f" ({entry.path}); leave one of the two out"
            )
        return _open_named_files(entry, path)
    # 1. The files of the directory, or of its `data/`.
    items = _visible(path)
    candidates = _data_files(items)
    if not candidates and (path / "data").is_dir():
        inner = _visible(path / "data")
        items = [item for item in items if item.name != "data"] + inner
        candidates = _data_files(inner)
    if not candidates:
        names = f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
        raise DataError(f"{path}: no {names} file in this directory{_nested(path)}")
    # 2. The files of the split.
    paths = _files_of_split(candidates, entry.split, path)
    # 3. Notes on what is not read, and on missing shards.
    read_files = {*paths, *map(settings_path, paths)}
    # hidden files, except the ._NAME that macOS writes next to NAME
    hidden = sorted(set(path.glob(".*")) - set(path.glob("._*")))
    unread = [item for item in items if item not in read_files] + hidden
    notes = _missing_shards(paths) + _same_names(paths)
    if unread:
        names_shown = [
            shown_name(item.name) + ("/" if item.is_dir() else "") for item in unread[:MAX_NAMED]
        ]
        if len(unread) > MAX_NAMED:
            names_shown[-1] += f" and {len(unread) - MAX_NAMED} more"
        notes.insert(0, f"{path}: {len(unread)} not read: {', '.join(names_shown)}")
    return _local_files(paths, entry.ds_type, notes)


def _visible(path: Path) -> list[Path]:
    return sorted(item for item in path.iterdir() if not item.name.startswith("."))


def _data_files(items: Sequence[Path]) -> list[Path]:
    """Return the files of records."""
    return [
        item
        for item in items
        if item.name.lower().endswith(SUFFIXES)
        and not item.name.endswith(_SELF_DISTILLATION_FILES)
        and not (item.name in _METADATA and _is_object(item))
        and item.is_file()
    ]


def _is_object(path: Path) -> bool:
    """Return whether a file holds one JSON object."""
    try:
        return isinstance(parse_json(path.read_bytes()), dict)
    except (OSError, ValueError):
        return False


def _is_saved(path: Path) -> bool:
    """Return whether `save_to_disk` wrote a directory. Other programs write files of the same
    names, but no rows.
    """
    has_its_files = any((path / name).is_file() for name in _SAVED)
    return has_its_files and any([*path.glob("*.arrow"), *path.glob("*/*.arrow")])


def _nested(path: Path) -> str:
    """Return a hint that lists the subdirectories with data files, for the error on a directory
    without any. '' if there are none.
    """
    nested = [
        str(item.relative_to(path))
        for place in (path, path / "data")
        if place.is_dir()
        for item in _visible(place)
        if item.is_dir() and _data_files(_visible(item))
    ]
    if not nested:
        return ""
    return f"; set `path` to one of its directories {', '.join(nested)}"


def _split_names(path: Path) -> tuple[str, str | None]:
    """Return the split in a file's name, detected as in `datasets` (default: `train`), and for
    shards the part of the name before the numbers.

        train_sft-00000-of-00003.parquet   ->   "train_sft", "train_sft"
        chats_test.jsonl                   ->   "test", None
    """
    name = path.name.lower()
    shard = re.match(r"(.+?)-\d{5}-of-\d{5}", name)
    series = shard[1] if shard else None
    words = re.split(r"[-._ \d]+", name)
    for split, names in _SPLIT_WORDS.items():
        if not set(names).isdisjoint(words):
            return (split if series in (None, *names) else str(series)), series
    return "train", series


def _files_of_split(files: Sequence[Path], split: str | None, path: Path) -> list[Path]:
    """Return the files of a split; raise ConfigError if there are none, or if several splits match.

    `datasets` differs: it leaves out files without a split in their names if another file has one,
    and reads all subdirectories.
    """
    names = {file: _split_names(file) for file in files}
    wanted_split = (split or "train").lower()
    splits = {found_split for found_split, _ in names.values()}
    matching = splits & {wanted_split}
    if not matching:
        # the hub's splits may have any name, such as `chat` and `math`
        series = [file for file in files if names[file][1] == wanted_split]
        if series:
            return series
        matching = {name for name in splits if re.split(r"[-._]", name)[0] == wanted_split}
    if len(matching) != 1:
        have = ", ".join(sorted({series or found_split for found_split, series in names.values()}))
        raise ConfigError(
            f"{path} has no files of the split {split or 'train'}; set `split` to one that it"
            f" has ({have}), or name the file to read"
        )
    return [file for file in files if names[file][0] in matching]


def _missing_shards(paths: Sequence[Path]) -> list[str]:
    """Return a note for each incomplete series of shards such as `train-00000-of-00003.parquet`.
    Older files of the hub have a digest after the numbers.
    """
    shards: dict[tuple[Path, str, int, str], set[int]] = {}
    for path in paths:
        match = re.fullmatch(r"(.+?)(\d+)-of-(\d+)(?:-[0-9a-f]{8,})?(\..+)", path.name)
        if match is not None:
            series = (path.parent, match[1], int(match[3]), match[4])
            shards.setdefault(series, set()).add(int(match[2]))
    return [
        f"{directory}: {count - len(numbers)} of {count} files {stem}N-of-{count}{ending} are"
        " missing"
        for (directory, stem, count, ending), numbers in shards.items()
        if len(numbers) < count
    ]


def _same_names(paths: Sequence[Path]) -> list[str]:
    """Return a note on files such as `a.json` and `a.jsonl`, which may hold the same records."""
    names_by_stem: dict[Path, list[str]] = {}
    for path in paths:
        suffix = next(suffix for suffix in SUFFIXES if path.name.lower().endswith(suffix))
        stem = path.with_name(path.name[: -len(suffix)])
        names_by_stem.setdefault(stem, []).append(path.name)
    return [
        f"{' and '.join(names)}: all are read; name one of them in data_files if they hold the same"
        " records"
        for names in names_by_stem.values()
        if len(names) > 1
    ]


def _open_saved(entry: DatasetConfig, path: Path) -> HubSplit:
    """Open what `save_to_disk` of `datasets` wrote: a data set, or one per split."""
    import datasets  # takes a second to import

    if entry.name is not None or entry.data_files is not None or entry.ds_type is not None:
        raise ConfigError(
            f"{entry.path} was written by save_to_disk: name, data_files and ds_type cannot be"
            " used with it"
        )
    try:
        saved: Any = datasets.load_from_disk(str(path))
    except Exception as error:  # damaged files raise many unrelated exceptions
        raise DataError(f"{path}: cannot be read by load_from_disk: {error}") from None
    if not isinstance(saved, datasets.DatasetDict):
        if entry.split not in (None, "train"):
            raise ConfigError(f"{path} is one data set without splits; leave split out")
        return HubSplit(str(path), saved)
    split = entry.split or "train"
    if split not in saved:
        raise ConfigError(f"{path} has no split {split}; set `split` to one of {', '.join(saved)}")
    other_splits = [name for name in saved if name != split]
    notes = [f"{path}: splits not read: {', '.join(other_splits)}"] if other_splits else []
    return HubSplit(f"{path}[{split}]", saved[split], tuple(notes))


def open_prompts(
    name: str,
    split: str | None,
    on_progress: OnProgress | None = None,
    configuration: str | None = None,
) -> LocalFiles | HubSplit:
    """Open the prompts of self-distillation (`seed_dataset`): a public data set, a local path, or
    the `configuration` of a data set of the hub.
    """
    entry = DatasetConfig(path=name, split=split, name=configuration)
    if name in PUBLIC_DATASETS:
        return open_public(entry, on_progress)
    may_be_hub_name = name.count("/") == 1 and not is_data_file_name(name)
    if resolve_path(name) is None and not may_be_hub_name:
        names = ", ".join(PUBLIC_DATASETS)
        raise DataError(
            f"seed_dataset {name}: no such file, and no public data set of that name ({names})"
        )
    return open_source(entry, on_progress)


def is_data_file_name(name: str) -> bool:
    """Return whether `name` can only be a local path, not a hub name. This
    detects misspelt paths.
    """
    suffixes = (*SUFFIXES, *_UNSUPPORTED_SUFFIXES)
    return looks_like_path(name) or Path(name).suffix.lower() in suffixes


def _open_hub(entry: DatasetConfig, on_progress: OnProgress | None) -> HubSplit:
    if is_data_file_name(entry.path):
        raise DataError(f"{entry.path}: no such file or directory")
    try:
        return _load_split(entry, on_progress)
    except FetchError as error:
        reason = (
            f", and it cannot be loaded from the hub: {error}\nCheck its name, its `name` and"
            " `split` on the hub, and the connection, or set the path of a JSONL file."
        )
        if hub_is_unreachable() and isinstance(error.__cause__, ConnectionError):
            directory = f"data/{Path(entry.path).name}"
            advice = offline_advice(entry.path, "dataset", directory)
            reason = f"; {advice}, then set path: {directory}"
        raise DataError(f"{entry.path}: no such file or directory{reason}") from None


def _load_split(entry: DatasetConfig, on_progress: OnProgress | None) -> HubSplit:
    import datasets  # takes a second to import, and most configurations name files

    if hub_is_unreachable():
        datasets.config.HF_HUB_OFFLINE = True  # use the local cache without retries
    else:
        check_network()
        if on_progress is not None:
            on_progress(f"{FETCHING} {entry.path}", 0, 0)
    split = entry.split or "train"
    try:
        rows: Any = datasets.load_dataset(
            entry.path, entry.name, split=split, data_files=entry.data_files
        )
    except Exception as error:  # exceptions of HTTP clients have no common base
        known_errors = (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError)
        is_known = isinstance(error, known_errors)
        if not is_known and describe_hub_error(error, entry.path, "dataset") is None:
            raise
        first_lines = str(error).split("\n")[:2]
        raise FetchError(" ".join(first_lines).strip() or type(error).__name__) from error
    return HubSplit(f"{entry.path}[{split}]", rows, is_public=True)


@dataclass(frozen=True)
class PublicDataset:
    """A data set that has a short name: conversations, or a benchmark of `evaluation/questions.py`.

    Attributes:
        local_paths: where to look for it first, relative to the project or working directory. A
            downloaded JSON Lines file belongs at the first path, the original format at the second.
        hub_repo: its repository on the hub. If neither this nor `url` is set, it ships with the
            project.
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
    # the file that Medusa's authors train on and take prompts from; Axolotl's fork uses the last
    # path
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
    entry: DatasetConfig, on_progress: OnProgress | None = None
) -> LocalFiles | HubSplit:
    """Open a data set of `PUBLIC_DATASETS`: a local copy, else the copy in the hub's cache, else
    fetched from the hub.
    """
    return replace(_open_public(entry, on_progress), is_public=True)


def _open_public(entry: DatasetConfig, on_progress: OnProgress | None) -> LocalFiles | HubSplit:
    public = PUBLIC_DATASETS[entry.path]
    # 1. A local copy.
    local_paths = list(public.local_paths)
    directory = os.environ.get(SEED_DIR_VARIABLE)
    if directory:
        file_names = [Path(path).name for path in public.local_paths]
        local_paths = [str(expand_user(directory) / name) for name in file_names] + local_paths
    for path in local_paths:
        if resolve_path(path) is not None:
            local = entry.model_copy(update={"path": path})
            if entry.split is None and public.split is not None:
                with suppress(ConfigError):  # a copy without splits is read whole
                    return open_source(local.model_copy(update={"split": public.split}))
            return open_source(local)
    if public.hub_repo is None:
        raise DataError(f"{entry.path}: {public.local_paths[0]} is missing from this installation")
    # 2. The split or the file of the hub, in its cache or fetched.
    try:
        if public.hub_file is None:
            split = entry.split or public.split
            hub_entry = entry.model_copy(update={"path": public.hub_repo, "split": split})
            return _load_split(hub_entry, on_progress)
        on_fetch = None
        if on_progress is not None:
            on_fetch = partial(on_progress, f"{FETCHING} {entry.path} from {public.hub_repo}")
        file = fetch_dataset_file(public.hub_repo, public.hub_file, on_fetch)
    except FetchError as error:
        jsonl, original = public.local_paths[:2]
        raise DataError(
            f"{entry.path}: not found locally, and could not be fetched from the Hugging Face hub:"
            f" {error}\nDownload {public.origin} to {original} (JSON Lines: {jsonl}),\nor name"
            " another file of conversations."
        ) from None
    return open_source(entry.model_copy(update={"path": str(file)}))
