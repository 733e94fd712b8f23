"""Where seed sets are: by name, as files of this machine, or on the hub. Knows no record and no model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from medusa_train.config.hub import file_from_hub, hub_is_out_of_reach
from medusa_train.config.paths import resolve_path
from medusa_train.config.schema import DatasetConfig
from medusa_train.data.sources import Files, HubRows, open_source
from medusa_train.errors import ConfigError, DataError


@dataclass(frozen=True)
class _Named:
    """A seed set with a name: its places below the project, and its public home, if it has one.

    `hub_file` is one file of `hub_repo`; without it the whole `split` is read.
    """

    places: tuple[str, ...]
    hub_repo: str | None = None
    hub_file: str | None = None
    split: str | None = None


KNOWN = {
    "tiny": _Named(("data/seeds/tiny.jsonl",)),
    "sharegpt": _Named(
        ("data/seeds/sharegpt.jsonl", "data/seeds/sharegpt.json"),
        "anon8231489123/ShareGPT_Vicuna_unfiltered",
        hub_file="ShareGPT_V3_unfiltered_cleaned_split.json",
    ),
    "ultrachat": _Named(
        ("data/seeds/ultrachat.jsonl", "data/seeds/ultrachat"),
        "HuggingFaceH4/ultrachat_200k",
        split="train_sft",
    ),
}


def short_name(seed_dataset: str) -> str:
    """The name that outputs are called by: `sharegpt`, the stem of a file, the last part of a hub name."""
    return seed_dataset if seed_dataset in KNOWN else Path(seed_dataset).stem


def find_seeds(
    seed_dataset: str, note: Callable[[str], None] = lambda line: None, *, split: str | None = None
) -> Files | HubRows:
    """Find a seed set given by name, path (a file or a directory of files) or hub name.

    Args:
        note: told when the hub is asked, which may take a while.
        split: of a data set of the hub.

    Raises:
        DataError: it is nowhere, and the message says which file to put where; or it is no file that is read here.
        ConfigError: `split` beside files of this machine, which have none.
    """
    named = KNOWN.get(seed_dataset)
    candidates = (seed_dataset,) if named is None else named.places
    found = next((path for path in map(resolve_path, candidates) if path is not None), None)
    if found is not None:
        if split is not None:
            raise ConfigError(f"split {split}: {found} is on this machine and is read whole; leave split out")
        return open_source(DatasetConfig(path=str(found)))
    if named is not None:
        return _fetch(seed_dataset, named, note, split)
    if seed_dataset.count("/") == 1 and not seed_dataset.startswith((".", "/", "~")) and not Path(seed_dataset).suffix:
        return _rows(seed_dataset, split, note)
    names = ", ".join(KNOWN)
    raise DataError(f"seed_dataset {seed_dataset}: no such file, and no seed set of that name ({names})")


def _fetch(name: str, named: _Named, note: Callable[[str], None], split: str | None) -> Files | HubRows:
    """A named set from its public home."""
    if named.hub_repo is None:
        raise DataError(f"seed_dataset {name}: {named.places[0]} is missing from this installation")
    if named.hub_file is not None:
        if not hub_is_out_of_reach():
            note(f"seeds {name}: not on this machine, asking the Hugging Face hub for {named.hub_repo} ...")
        downloaded = file_from_hub(named.hub_repo, named.hub_file)
        if downloaded is not None:
            return Files((downloaded,))
    else:
        try:
            return _rows(named.hub_repo, split or named.split, note)
        except DataError:
            pass  # said below, with what to do about it
    raise DataError(_missing(name, named))


def _rows(repo: str, split: str | None, note: Callable[[str], None]) -> Files | HubRows:
    """The rows of a data set of the hub, or of its local cache."""
    if not hub_is_out_of_reach():
        note(f"seeds {repo}: not on this machine, asking the Hugging Face hub ...")
    return open_source(DatasetConfig(path=repo, split=split))


def _missing(name: str, named: _Named) -> str:
    nowhere = f"seed_dataset {name}: not on this machine, and it could not be fetched from the Hugging Face hub.\n"
    if named.hub_file is None:
        return nowhere + (
            f"Get the parquet files of the split {named.split} of the data set {named.hub_repo} and put them into the "
            f"directory {named.places[-1]}/\n"
            f"(JSONL goes to {named.places[0]}), or set seed_dataset to another file of conversations."
        )
    return nowhere + (
        f"Get {named.hub_file} from the data set {named.hub_repo} of the hub and put it at {named.places[-1]}\n"
        f"(one JSON array; JSONL goes to {named.places[0]}), or set seed_dataset to another file of conversations."
    )
