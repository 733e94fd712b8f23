"""Prompt conversations: reads what the user says in records of chats. Knows no model, no answer and no hub.

Seeds are read more leniently than training data: only what the user says is taken, whoever answers or nobody
does, so that a set of bare prompts and a chat that begins with an answer both serve.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from medusa_train.config.paths import resolve_path
from medusa_train.config.schema import DatasetConfig
from medusa_train.data.sources import HubSplit, LocalFiles, open_source, parquet_rows
from medusa_train.errors import ConfigError, DataError
from medusa_train.hub import fetch_dataset_file, hub_is_unreachable

_SHOWN = 5  # broken records told one by one; the others are counted
_USER, _SYSTEM = ("human", "user"), ("system", "developer")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the user says in one conversation, turn by turn, and where it was read (`file:line`)."""

    id: str
    turns: tuple[str, ...]
    system: str | None = None
    source: str = ""


def read_prompts(
    source: Path | LocalFiles | HubSplit, type: str = "auto", *, skipped: list[str] | None = None
) -> list[Prompt]:
    """Read seeds from JSONL files, JSON arrays, parquet files or rows of the hub.

    Records are in ShareGPT, messages, alpaca or MT-Bench's question form. One without any user turn is left out; an
    id that comes again gets a number. An alpaca record's user turn is its instruction and input.

    Args:
        skipped: broken records are left out, and what is wrong with each (`file:line`) is added here.

    Raises:
        DataError: no such file, broken records (unless `skipped` is given), or no user turn in all of it.
    """
    name = source.name if isinstance(source, HubSplit) else _named(source)
    seeds: list[Prompt] = []
    problems: list[str] = []
    times: dict[str, int] = {}
    for place, record in _records(source):
        try:
            seed = _parse(record, type, place)
        except ValueError as error:
            problems.append(f"{place}: {error}")
            continue
        if seed is not None:
            seeds.append(_unlike(seed, times))
    if skipped is not None:
        skipped += problems
    elif problems:
        hint = "Mend the file, or set skip_bad_records=true to leave such records out."
        raise DataError("\n".join([f"{name}: broken records", *first_of(problems), hint]))
    if not seeds:
        raise DataError(f"{name}: no user's turn in it, so there is nothing to answer")
    return seeds


def first_of(problems: Sequence[str]) -> list[str]:
    """The first few, and how many more there are."""
    more = [f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
    return [*problems[:_SHOWN], *more]


def _named(source: Path | LocalFiles) -> str:
    return str(source) if isinstance(source, Path) else ", ".join(map(str, source.paths))


def _unlike(seed: Prompt, times: dict[str, int]) -> Prompt:
    """The seed under an id that none had before: `id`, else `id~2`, `id~3`, ...; `times` counts them."""
    name = seed.id
    while name in times:
        times[seed.id] += 1
        name = f"{seed.id}~{times[seed.id]}"
    times[name] = 1
    return replace(seed, id=name)


def _records(source: Path | LocalFiles | HubSplit) -> Iterator[tuple[str, Any]]:
    """(place, record) of each record; a broken line of a JSONL file comes as a ValueError in its place."""
    if isinstance(source, HubSplit):
        yield from _numbered(source.name, source.rows)
        return
    for path in (source,) if isinstance(source, Path) else source.paths:
        if path.suffix == ".parquet":
            yield from _numbered(str(path), parquet_rows(path))
        else:
            yield from _json_records(path)


def _numbered(name: str, rows: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"{name}: record {number}", record) for number, record in enumerate(rows, start=1))


def _json_records(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
    if text.lstrip()[:1] == "[":
        try:
            array = json.loads(text)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}:{error.lineno}: not valid JSON: {error.msg} (column {error.colno})") from None
        yield from _numbered(str(path), array)
        return
    # Not splitlines(): JSON strings may hold U+2028 and the like, which it would break lines at.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                record = ValueError(f"not valid JSON: {error.msg} (column {error.colno})")
            yield f"{path}:{number}", record


def _parse(record: Any, type: str, source: str) -> Prompt | None:
    """The seed of one record, or None where the user says nothing."""
    if isinstance(record, ValueError):
        raise record
    if not isinstance(record, Mapping):
        raise ValueError("a JSON object is expected")
    turns, system = _user_turns(record, type)
    if not turns:
        return None
    name = record.get("id", record.get("question_id"))
    if not isinstance(name, (str, int)) or name == "":
        name = hashlib.sha256(json.dumps([system, *turns]).encode()).hexdigest()[:16]
    return Prompt(str(name), tuple(turns), system, source)


def _user_turns(record: Mapping[str, Any], type: str) -> tuple[list[str], str | None]:
    if type in ("auto", "sharegpt") and "conversations" in record:
        return _spoken(record["conversations"], "from", "value")
    if type in ("auto", "messages") and "messages" in record:
        return _spoken(record["messages"], "role", "content")
    if type in ("auto", "alpaca") and "instruction" in record:
        parts = [record["instruction"], record.get("input") or ""]
        text = "\n\n".join(part for part in map(_text, parts) if part.strip())
        return [text] if text else [], None
    if type == "auto" and "turns" in record:
        return _spoken([{"role": "user", "content": text} for text in _list(record["turns"])], "role", "content")
    wanted = "conversations, messages, instruction or turns" if type == "auto" else f"the keys of type {type}"
    raise ValueError(f"none of {wanted} in it; its keys: {', '.join(sorted(map(str, record))) or 'none'}")


def _spoken(turns: Any, role_key: str, content_key: str) -> tuple[list[str], str | None]:
    """What the user says in a list of turns, and the system prompt; blank turns are left out."""
    said: list[str] = []
    system: str | None = None
    for turn in _list(turns):
        if not isinstance(turn, Mapping):
            raise ValueError("a turn must be an object")
        role = turn.get(role_key)
        if role in _USER or role in _SYSTEM:
            text = _text(turn.get(content_key))
            if role in _USER and text.strip():
                said.append(text)
            elif role in _SYSTEM and text.strip():
                system = text
    return said, system


def _list(value: Any) -> Sequence[Any]:
    if not isinstance(value, list):
        raise ValueError("the turns must be a list")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a user's turn must be text")
    # Half of a surrogate pair, which JSON can spell and UTF-8 cannot, becomes a question mark.
    return value.encode("utf-8", "replace").decode("utf-8")


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


def find_prompts(
    seed_dataset: str, note: Callable[[str], None] = lambda line: None, *, split: str | None = None
) -> LocalFiles | HubSplit:
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


def _fetch(name: str, named: _Named, note: Callable[[str], None], split: str | None) -> LocalFiles | HubSplit:
    """A named set from its public home."""
    if named.hub_repo is None:
        raise DataError(f"seed_dataset {name}: {named.places[0]} is missing from this installation")
    if named.hub_file is not None:
        if not hub_is_unreachable():
            note(f"seeds {name}: not on this machine, asking the Hugging Face hub for {named.hub_repo} ...")
        downloaded = fetch_dataset_file(named.hub_repo, named.hub_file)
        if downloaded is not None:
            return LocalFiles((downloaded,))
    else:
        try:
            return _rows(named.hub_repo, split or named.split, note)
        except DataError:
            pass  # said below, with what to do about it
    raise DataError(_missing(name, named))


def _rows(repo: str, split: str | None, note: Callable[[str], None]) -> LocalFiles | HubSplit:
    """The rows of a data set of the hub, or of its local cache."""
    if not hub_is_unreachable():
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
