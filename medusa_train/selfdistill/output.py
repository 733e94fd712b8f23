"""The output file: one JSON line per conversation, appended whole, and resumed after any kind of end.

Knows nothing of models or seeds. Beside `NAME.jsonl` stand `NAME.settings.json`, how it was made, and
`NAME.dropped.jsonl`, the conversations of which nothing was left, so that they are not tried again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from medusa_train.errors import ConfigError, DataError
from medusa_train.io import JsonLinesFile, complete_lines, replace_bytes, replace_text
from medusa_train.selfdistill.select_prompts import Shard

FSYNC_EVERY = 16  # lines; a crash of the machine, not of the process, can lose that many


class IndexedLines(JsonLinesFile):
    """An append-only JSONL file with an index of the lines that it held when it was opened.

    Attributes:
        index: `id` of a line -> (offset, length) in bytes.

    Raises:
        DataError: a line is not a JSON object with an `id`, or another process has the file open.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, exclusive=True, fsync_every=FSYNC_EVERY)
        try:
            self.index = _index(path)
        except BaseException:
            self.close()
            raise


def _index(path: Path) -> dict[str, tuple[int, int]]:
    index: dict[str, tuple[int, int]] = {}
    for number, (offset, line) in enumerate(complete_lines(path), start=1):
        try:
            index[str(json.loads(line)["id"])] = (offset, len(line))
        except (ValueError, TypeError, KeyError):
            raise DataError(
                f"{path}:{number}: not a conversation (a JSON object with an id); "
                "fix or delete the file, or select_prompts another output"
            ) from None
    return index


class OutputWriter:
    """Appends conversations to `output`; knows which ones an earlier run has finished.

    Args:
        output: the JSONL file. settings: everything that the conversations depend on.

    Attributes:
        done: ids of the finished conversations, dropped ones included.
        lines, dropped: the two files.

    Raises:
        ConfigError: `output` was made with other settings, or holds lines and no settings stand beside it.
        DataError: it holds lines that are not ours, or another process writes to it.
    """

    def __init__(self, output: Path, settings: Mapping[str, Any]) -> None:
        self.output = output
        _are_stored(output, settings)  # before a file that may be somebody else's is opened and mended
        self.lines = IndexedLines(output)
        try:
            # again, and stored, while no other process can begin or go on with other ones
            if not _are_stored(output, settings):
                write_settings(output, settings)
            self.dropped = IndexedLines(dropped_path(output))
        except BaseException:
            self.lines.close()
            raise
        self.done = {*self.lines.index, *self.dropped.index}

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a conversation; `record["id"]` must be new."""
        self._mark(record)
        self.lines.append(record)

    def drop(self, record: Mapping[str, Any]) -> None:
        """Note a conversation of which nothing is left."""
        self._mark(record)
        self.dropped.append(record)

    def _mark(self, record: Mapping[str, Any]) -> None:
        name = str(record["id"])
        if name in self.done:
            raise ValueError(f"conversation {name} is written already")
        self.done.add(name)

    def __enter__(self) -> OutputWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.lines.close()
        self.dropped.close()
        if not self.done:  # nothing was made, so nothing is worth keeping settings for
            settings_path(self.output).unlink(missing_ok=True)
        for file in (self.lines, self.dropped):
            if file.path.stat().st_size == 0:
                file.path.unlink()


def settings_path(output: Path) -> Path:
    """The file beside `output` that says how it was made."""
    return output.with_suffix(".settings.json")


def dropped_path(output: Path) -> Path:
    """The file beside `output` that names the conversations of which nothing was left."""
    return output.with_suffix(".dropped.jsonl")


def has_conversations(output: Path) -> bool:
    """Whether any conversation is finished in `output`, written or dropped."""
    return any(file.exists() and file.stat().st_size for file in (output, dropped_path(output)))


def write_settings(output: Path, settings: Mapping[str, Any]) -> None:
    """Store the settings beside `output`, whole or not at all."""
    replace_text(settings_path(output), json.dumps(dict(settings), indent=2, ensure_ascii=False) + "\n")


def _are_stored(output: Path, settings: Mapping[str, Any]) -> bool:
    """Whether `settings` stand beside `output`, as they have to before its first line is written.

    Raises:
        ConfigError: `output` was made with others, or nobody knows how, or it has not the name of a JSONL file.
    """
    if output.suffix != ".jsonl":
        raise ConfigError(f"output {output}: its name has to end with .jsonl")
    path = settings_path(output)
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        stored = None
    except ValueError:
        raise ConfigError(f"{path}: not valid JSON; mend it, or name another output") from None
    made = has_conversations(output)
    if made and stored is None:
        raise ConfigError(f"output {output}: it exists, and no {path.name} says how it was made; name another output")
    if stored is not None and (differing := _differing(stored, settings)):
        if made:
            raise ConfigError(_differences(output, differing, stored, settings))
        return False  # nothing was made with them
    return stored is not None


def _differing(stored: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """Names of the settings that are not the same; one that is not there says no more than None."""
    return [name for name in {**stored, **settings} if stored.get(name) != settings.get(name)]


def _differences(output: Path, differing: Sequence[str], stored: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    lines = [f"  {name}: {stored.get(name)!r} there, {settings.get(name)!r} now" for name in differing]
    return "\n".join(
        [
            f"output {output}: it holds conversations made with other settings",
            *lines,
            "Name another output=FILE.jsonl, or delete this one and the files beside it.",
        ]
    )


@dataclass(frozen=True)
class MergeResult:
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


def merge(output: Path, settings: Mapping[str, Any], seed_ids: Sequence[str]) -> MergeResult:
    """Write the conversations of all shards beside `output`, and those in it, to `output`, in the order of the seeds.

    A conversation that several files hold is taken once. The shards stay, and merging again after they went on is
    fine. A later run without a shard goes on with what is missing.

    Raises:
        DataError: there is nothing to merge, or a process still writes to a part.
        ConfigError: a part was made with other settings.
    """
    parts = [*_shards_of(output), *([output] if has_conversations(output) else [])]
    if not parts:
        raise DataError(f"{output}: nothing to merge, there is no {shard_output(output, Shard(1, 2)).name} or the like")
    with ExitStack() as stack:
        writers = [stack.enter_context(OutputWriter(part, settings)) for part in parts]
        written = _first_places(writer.lines for writer in writers)
        dropped = _first_places(writer.dropped for writer in writers)
        lines = [written[name] for name in _ordered(written, seed_ids)]
        notes = [dropped[name] for name in _ordered(dropped, seed_ids) if name not in written]
        write_settings(output, settings)
        if notes or dropped_path(output).exists():
            replace_bytes(dropped_path(output), _read(notes))
        replace_bytes(output, _read(lines))
    missing = sum(name not in written and name not in dropped for name in seed_ids)
    return MergeResult(len(parts), len(lines), len(notes), missing)


def _shards_of(output: Path) -> list[Path]:
    """The outputs of shards beside `output`, known by their settings: one may hold dropped conversations alone."""
    pattern = re.compile(re.escape(output.stem) + r"\.shard-\d+-of-\d+\.settings\.json")
    found = [path for path in sorted(output.parent.glob("*.settings.json")) if pattern.fullmatch(path.name)]
    return [path.with_name(path.name.removesuffix(".settings.json") + output.suffix) for path in found]


_Place = tuple[Path, int, int]


def _first_places(files: Iterable[IndexedLines]) -> dict[str, _Place]:
    """(file, offset, length) of each line by its id; where several files hold it, the first."""
    places: dict[str, _Place] = {}
    for file in files:
        for name, (offset, length) in file.index.items():
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
