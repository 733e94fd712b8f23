"""The output file of self-distillation: append-only JSON Lines that a run can resume.

Beside `NAME.jsonl` are `NAME.settings.json`, the settings that it was generated with, and
`NAME.dropped.jsonl`, the ids of conversations without any kept answer, which a resumed run does not
try again. Prompts that a server lost are in no file, so that it does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from medusa_train.data.conversation import Message
from medusa_train.data.record_files import settings_path
from medusa_train.errors import ConfigError, DataError
from medusa_train.hide_secrets import excerpt, mask_keys
from medusa_train.io import (
    JsonLinesFile,
    complete_lines,
    parse_json,
    replace_text,
)
from medusa_train.selfdistill.prompts import Prompt
from medusa_train.selfdistill.replay import GeneratedChat, is_asked_again

FSYNC_EVERY = 16  # lines; a crash of the machine, not of the process, can lose that many


def _read_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the id and the line of every conversation of a file; raises DataError if one has no id."""
    for number, (_, line) in enumerate(complete_lines(path), start=1):
        try:
            yield str(parse_json(line)["id"]), line
        except (ValueError, TypeError, KeyError):
            raise DataError(
                f"{path}:{number}: not a conversation (a JSON object with an id); "
                "fix or delete the file, or choose another output"
            ) from None


def _read_dropped(path: Path, *, from_server: bool) -> Iterator[tuple[str, str, bytes]]:
    """Yield id, reason and line of every dropped conversation that is not asked again.

    Files of earlier versions also list those that a server lost.
    """
    for name, line in _read_lines(path):
        reason = _drop_reason(parse_json(line))
        if not is_asked_again(reason, from_server=from_server):
            yield name, reason, line


def _first_question(line: bytes) -> str | None:
    """Return the first message of the user in a line; None if it has none, or is no conversation."""
    try:
        messages = parse_json(line)["messages"]
        said = [message["content"] for message in messages if message["role"] == "user"]
    except (LookupError, TypeError):
        return None
    if not said or not isinstance(said[0], str):
        return None
    return said[0]


def _drop_reason(record: Mapping[str, Any]) -> str:
    dropped = record.get("dropped")
    return str(dropped.get("reason")) if isinstance(dropped, Mapping) else "unknown"


def _is_from_server(settings: Mapping[str, Any]) -> bool:
    return settings.get("engine") == "openai"


class OutputWriter:
    """Appends conversations to an output file, and tracks those of earlier runs with the same
    `settings`.

    Attributes:
        done: ids of the finished conversations, dropped ones included.
        kept: number of conversations in the file.
        drop_reasons: why the others of `done`, and those that `drop` left to the next run, were
            dropped; by id.
        lines, dropped: the two files, locked against other processes.
    """

    def __init__(self, output: Path, settings: Mapping[str, Any]) -> None:
        self.output = output
        self.kept = 0
        self.drop_reasons: dict[str, str] = {}
        self._from_server = _is_from_server(settings)
        _check_settings(output, settings)  # before opening, which truncates an incomplete last line
        with ExitStack() as opened:
            self.lines = self._open(output, opened)
            # check again under the lock
            if not _check_settings(output, settings):
                write_settings(output, settings)
            self.dropped = self._open(dropped_path(output), opened)
            self.done = self._read_done()
            opened.pop_all()

    def _open(self, path: Path, opened: ExitStack) -> JsonLinesFile:
        return opened.enter_context(JsonLinesFile(path, exclusive=True, fsync_every=FSYNC_EVERY))

    def _read_done(self) -> set[str]:
        """Read the ids of both files, and count what is in them."""
        done = {name for name, _ in _read_lines(self.lines.path)}
        self.kept = len(done)
        for name, reason, _ in _read_dropped(self.dropped.path, from_server=self._from_server):
            if name not in done:
                self.drop_reasons[name] = reason
        done.update(self.drop_reasons)
        return done

    def check_prompts(self, prompts: Iterable[Prompt]) -> None:
        """Raise ConfigError if the file has a conversation with the id of one of `prompts` and
        another question.
        """
        # keys are masked in the file
        asked = {prompt.id: mask_keys(prompt.turns[0]) for prompt in prompts if prompt.turns}
        for name, line in _read_lines(self.lines.path):
            if name not in asked:
                continue
            said = _first_question(line)
            if said is None:
                raise DataError(
                    f"{self.lines.path}: the conversation {name} has no messages with role and"
                    " content; fix or delete the file, or choose another output"
                )
            if asked[name] != said:
                raise ConfigError(
                    f"output {self.output}: it answers other prompts with the same ids; {name} asks"
                    f" {excerpt(said, 60)!r}, and now {excerpt(asked[name], 60)!r}. Choose another"
                    " output=FILE.jsonl"
                )

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a conversation; `record["id"]` must be new."""
        self._mark(record)
        self.kept += 1
        self.lines.append(record)

    def drop(self, record: Mapping[str, Any]) -> None:
        """Append the id of a conversation without any kept answer, unless the next run is to ask it
        again.
        """
        reason = _drop_reason(record)
        self.drop_reasons[str(record["id"])] = reason
        if not is_asked_again(reason, from_server=self._from_server):
            self._mark(record)
            self.dropped.append(record)

    def _mark(self, record: Mapping[str, Any]) -> None:
        name = str(record["id"])
        if name in self.done:
            raise ValueError(f"conversation {name} was already written")
        self.done.add(name)

    def __enter__(self) -> OutputWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.lines.close()
        self.dropped.close()
        for file in (self.lines, self.dropped):
            if file.path.stat().st_size == 0:
                file.path.unlink()
        if not has_conversations(self.output):
            settings_path(self.output).unlink(missing_ok=True)


def dropped_path(output: Path) -> Path:
    """Return the path of the file of conversations without any kept answer."""
    return output.with_suffix(".dropped.jsonl")


def has_conversations(output: Path) -> bool:
    """Return whether any conversation of `output` is finished, written or dropped."""
    return any(file.exists() and file.stat().st_size for file in (output, dropped_path(output)))


def write_settings(output: Path, settings: Mapping[str, Any]) -> None:
    """Write the settings of `output` atomically."""
    text = json.dumps(dict(settings), indent=2, ensure_ascii=False)
    replace_text(settings_path(output), f"{text}\n")


def _read_settings(output: Path) -> dict[str, Any] | None:
    path = settings_path(output)
    try:
        return dict(parse_json(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        raise ConfigError(f"{path}: not valid JSON; fix it, or choose another output") from None


def _check_settings(output: Path, settings: Mapping[str, Any]) -> bool:
    """Check `settings` against the stored ones; return whether these exist and are equal."""
    if output.suffix != ".jsonl":
        raise ConfigError(f"output {output}: the file name has to end with .jsonl")
    stored = _read_settings(output)
    is_used = has_conversations(output)
    # 1. none are stored
    if stored is None:
        if is_used:
            name = settings_path(output).name
            raise ConfigError(
                f"output {output}: the file exists without its settings {name}; choose another"
                " output"
            )
        return False
    # 2. those that differ; a missing setting equals None, and keys are masked in the file
    now = json.loads(mask_keys(json.dumps(dict(settings))))
    names = [name for name in {**stored, **now} if stored.get(name) != now.get(name)]
    if names and is_used:
        differences = [
            f"  {name}: {stored.get(name)!r} in the file, {now.get(name)!r} now" for name in names
        ]
        raise ConfigError(
            "\n".join(
                [
                    f"output {output}: it holds conversations generated with other settings",
                    *differences,
                    "Choose another output=FILE.jsonl, or delete this one with its settings and"
                    " dropped files.",
                ]
            )
        )
    return not names


def write_chat(chat: GeneratedChat, writer: OutputWriter, metadata: Mapping[str, Any]) -> None:
    """Append a conversation to the output, or report it as dropped if nothing in it is kept."""
    record: dict[str, Any] = {"id": chat.prompt.id, "seed_id": chat.prompt.id}
    dropped: dict[str, Any] = {}
    if chat.dropped is not None:
        dropped["dropped"] = {"reason": chat.dropped, "turns": chat.dropped_turns}
    if chat.is_empty:
        writer.drop({**record, **dropped})
        return
    record["model"] = metadata["model"]
    record["messages"] = [_message_record(message) for message in chat.messages]
    record.update((name, value) for name, value in metadata.items() if name != "model")
    record["finish_reasons"] = chat.finish_reasons
    record["token_counts"] = {
        "prompt": chat.prompt_tokens,
        "completion": chat.completion_tokens,
    }
    writer.write({**record, **dropped})


def _message_record(message: Message) -> dict[str, Any]:
    record: dict[str, Any] = dict(message.as_dict())
    if message.token_ids is not None:
        record["token_ids"] = list(message.token_ids)
    return record
