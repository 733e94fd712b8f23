"""Seed conversations: finds the set that a user named and reads the user's turns. Knows no model and no answer.

Seeds are read more leniently than training data: only what the user says is taken, whoever answers or nobody
does, so that a set of bare prompts and a chat that begins with an answer both serve.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_train.config.hub import file_from_hub, hub_is_out_of_reach
from medusa_train.config.paths import resolve_path
from medusa_train.errors import DataError

_SHOWN = 5  # broken records told one by one; the others are counted
_USER, _SYSTEM = ("human", "user"), ("system", "developer")


@dataclass(frozen=True, slots=True)
class Seed:
    """What the user says in one conversation, turn by turn, and where it was read (`file:line`)."""

    id: str
    turns: tuple[str, ...]
    system: str | None = None
    source: str = ""


@dataclass(frozen=True)
class _Named:
    """A seed set with a name: its files below the project, and its public home, if it has one."""

    files: tuple[str, ...]
    hub_repo: str | None = None
    hub_file: str | None = None


KNOWN = {
    "tiny": _Named(("data/seeds/tiny.jsonl",)),
    "sharegpt": _Named(
        ("data/seeds/sharegpt.jsonl", "data/seeds/sharegpt.json"),
        "anon8231489123/ShareGPT_Vicuna_unfiltered",
        "ShareGPT_V3_unfiltered_cleaned_split.json",
    ),
}


def short_name(seed_dataset: str) -> str:
    """The name that outputs are called by: `sharegpt`, or the stem of a file."""
    return seed_dataset if seed_dataset in KNOWN else Path(seed_dataset).stem


def find_seeds(seed_dataset: str, note: Callable[[str], None] = lambda line: None) -> Path:
    """The file of a seed set given by name or path.

    `note` is told when the hub is asked, which may take a while.

    Raises:
        DataError: it is nowhere; the message says which file to put where.
    """
    named = KNOWN.get(seed_dataset)
    if named is None:
        path = resolve_path(seed_dataset)
        if path is None or not path.is_file():
            names = ", ".join(KNOWN)
            raise DataError(f"seed_dataset {seed_dataset}: no such file, and no seed set of that name ({names})")
        return path
    for file in named.files:
        path = resolve_path(file)
        if path is not None:
            return path
    if named.hub_repo is not None and named.hub_file is not None:
        if not hub_is_out_of_reach():
            note(f"seeds {seed_dataset}: not on this machine, asking the Hugging Face hub for {named.hub_repo} ...")
        downloaded = file_from_hub(named.hub_repo, named.hub_file)
        if downloaded is not None:
            return downloaded
    raise DataError(_missing(seed_dataset, named))


def _missing(name: str, named: _Named) -> str:
    if named.hub_repo is None:
        return f"seed_dataset {name}: {named.files[0]} is missing from this installation"
    return (
        f"seed_dataset {name}: not on this machine, and it could not be fetched from the Hugging Face hub.\n"
        f"Get {named.hub_file} from the data set {named.hub_repo} of the hub and put it at {named.files[-1]}\n"
        f"(one JSON array; JSONL goes to {named.files[0]}), or set seed_dataset to another file of conversations."
    )


def read_seeds(path: Path, type: str = "auto") -> list[Seed]:
    """Read the seeds of a JSONL file or a JSON array, in ShareGPT, messages, alpaca or MT-Bench's question form.

    A record without any user turn is left out; an id that comes again gets a number. An alpaca record's user turn
    is its instruction and input.

    Raises:
        DataError: no such file, broken records (`file:line`), or no user turn in all of it.
    """
    seeds: list[Seed] = []
    problems: list[str] = []
    times: dict[str, int] = {}
    for source, record in _records(path):
        try:
            seed = _parse(record, type, source)
        except ValueError as error:
            problems.append(f"{source}: {error}")
            continue
        if seed is not None:
            times[seed.id] = times.get(seed.id, 0) + 1
            again = times[seed.id]
            seeds.append(seed if again == 1 else Seed(f"{seed.id}~{again}", seed.turns, seed.system, source))
    if problems:
        more = [f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise DataError("\n".join([f"{path}: broken records", *problems[:_SHOWN], *more]))
    if not seeds:
        raise DataError(f"{path}: no user's turn in it, so there is nothing to answer")
    return seeds


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    """(source, record) of each record; a broken line of a JSONL file comes as a ValueError in its place."""
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
        yield from ((f"{path}: record {number}", record) for number, record in enumerate(array, start=1))
        return
    # Not splitlines(): JSON strings may hold U+2028 and the like, which it would break lines at.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                record = ValueError(f"not valid JSON: {error.msg} (column {error.colno})")
            yield f"{path}:{number}", record


def _parse(record: Any, type: str, source: str) -> Seed | None:
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
    return Seed(str(name), tuple(turns), system, source)


def _user_turns(record: Mapping[str, Any], type: str) -> tuple[list[str], str | None]:
    if type in ("auto", "sharegpt") and "conversations" in record:
        return _spoken(record["conversations"], "from", "value")
    if type in ("auto", "messages") and "messages" in record:
        return _spoken(record["messages"], "role", "content")
    if type in ("auto", "alpaca") and "instruction" in record:
        parts = [record["instruction"], record.get("input") or ""]
        return ["\n\n".join(text for text in map(_text, parts) if text.strip())], None
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
