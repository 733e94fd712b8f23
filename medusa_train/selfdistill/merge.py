"""Shards and their union: the output of each part of a seed set, and one file of all of them. Knows no model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_train.errors import DataError
from medusa_train.selfdistill.choice import Shard
from medusa_train.selfdistill.writer import AppendOnly, Writer, dropped_file, holds_lines, put_file, put_settings


@dataclass(frozen=True)
class Merged:
    """What a union holds: `conversations`, those `dropped` whole, seeds still `missing`, from `parts` files."""

    parts: int
    conversations: int
    dropped: int
    missing: int


def shard_output(output: Path, shard: Shard | None) -> Path:
    """Where a part's conversations go: `NAME.shard-1-of-4.jsonl` beside `NAME.jsonl`."""
    if shard is None:
        return output
    return output.with_name(f"{output.stem}.shard-{shard.index}-of-{shard.count}{output.suffix}")


def merge(output: Path, settings: Mapping[str, Any], seed_ids: Sequence[str]) -> Merged:
    """Write the conversations of all shards beside `output`, and those in it, to `output`, in the order of the seeds.

    A conversation that several files hold is taken once. The shards stay, and merging again after they went on is
    fine. A later run without a shard goes on with what is missing.

    Raises:
        DataError: there is nothing to merge, or a process still writes to a part.
        ConfigError: a part was made with other settings.
    """
    parts = [*_shards_of(output), *([output] if holds_lines(output) else [])]
    if not parts:
        raise DataError(f"{output}: nothing to merge, there is no {shard_output(output, Shard(1, 2)).name} or the like")
    with ExitStack() as stack:
        writers = [stack.enter_context(Writer(part, settings)) for part in parts]
        written = _first_places(writer.lines for writer in writers)
        dropped = _first_places(writer.dropped for writer in writers)
        lines = [written[name] for name in _ordered(written, seed_ids)]
        notes = [dropped[name] for name in _ordered(dropped, seed_ids) if name not in written]
        put_settings(output, settings)
        if notes or dropped_file(output).exists():
            put_file(dropped_file(output), _read(notes))
        put_file(output, _read(lines))
    missing = sum(name not in written and name not in dropped for name in seed_ids)
    return Merged(len(parts), len(lines), len(notes), missing)


def _shards_of(output: Path) -> list[Path]:
    """The outputs of shards beside `output`, known by their settings: one may hold dropped conversations alone."""
    pattern = re.compile(re.escape(output.stem) + r"\.shard-\d+-of-\d+\.settings\.json")
    found = [path for path in sorted(output.parent.glob("*.settings.json")) if pattern.fullmatch(path.name)]
    return [path.with_name(path.name.removesuffix(".settings.json") + output.suffix) for path in found]


_Place = tuple[Path, int, int]


def _first_places(files: Iterable[AppendOnly]) -> dict[str, _Place]:
    """(file, offset, length) of each line by its id; where several files hold it, the first."""
    places: dict[str, _Place] = {}
    for file in files:
        for name, (offset, length) in file.places.items():
            places.setdefault(name, (file.path, offset, length))
    return places


def _ordered(names: Mapping[str, Any], seed_ids: Sequence[str]) -> list[str]:
    """`names` in the order of the seeds, then those that are none of the seeds (any more)."""
    known = set(seed_ids)
    return [*(name for name in seed_ids if name in names), *(name for name in names if name not in known)]


def _read(places: Iterable[_Place]) -> Iterator[bytes]:
    """The lines at `places`, one after the other."""
    with ExitStack() as stack:
        files: dict[Path, Any] = {}
        for path, offset, length in places:
            if path not in files:
                files[path] = stack.enter_context(path.open("rb"))
            files[path].seek(offset)
            yield files[path].read(length)
