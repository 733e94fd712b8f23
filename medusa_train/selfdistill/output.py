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
from medusa_train.data.records import TEMPLATE_KWARGS
from medusa_train.data.tool_calls import TOOLS
from medusa_train.errors import ConfigError, DataError
from medusa_train.hide_secrets import excerpt, mask_keys
from medusa_train.io import parse_json, replace_text
from medusa_train.json_lines import JsonLinesFile, differing_keys, read_records
from medusa_train.selfdistill.prompts import Prompt
from medusa_train.selfdistill.replay import GeneratedChat, is_asked_again

FSYNC_EVERY = 16  # lines; a crash of the machine, not of the process, can lose that many


def _read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the conversations of a file; raises DataError if a line is none."""
    for number, record in enumerate(read_records(path), start=1):
        if not isinstance(record, dict) or "id" not in record:
            raise DataError(
                f"{path}:{number}: not a conversation (a JSON object with an id); fix or delete the"
                " file, or choose another output"
            )
        yield {**record, "id": str(record["id"])}


def _first_question(record: Mapping[str, Any]) -> str | None:
    """Return the first message of the user; None if there is none, or no conversation."""
    try:
        said = [one["content"] for one in record["messages"] if one["role"] == "user"]
    except (LookupError, TypeError):
        return None
    if not said or not isinstance(said[0], str):
        return None
    return said[0]


def _drop_reason(record: Mapping[str, Any]) -> str:
    dropped = record.get("dropped")
    return str(dropped.get("reason")) if isinstance(dropped, Mapping) else "unknown"


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
        self._from_server = settings.get("engine") == "openai"
        _check_settings(output, settings)  # before opening, which truncates an incomplete last line
        with ExitStack() as opened:
            self.lines = opened.enter_context(_open(output))
            # check again under the lock
            if not _check_settings(output, settings):
                text = json.dumps(dict(settings), indent=2, ensure_ascii=False)
                replace_text(settings_path(output), f"{text}\n")
            self.dropped = opened.enter_context(_open(dropped_path(output)))
            self.done = {record["id"] for record in _read(self.lines.path)}
            self.kept = len(self.done)
            self.drop_reasons: dict[str, str] = {}
            for record in _read(self.dropped.path):
                reason = _drop_reason(record)
                # files of earlier versions also list those that a server lost
                if record["id"] not in self.done and not self._is_asked_again(reason):
                    self.drop_reasons[record["id"]] = reason
            self.done.update(self.drop_reasons)
            opened.pop_all()

    def _is_asked_again(self, reason: str) -> bool:
        return is_asked_again(reason, from_server=self._from_server)

    def check_prompts(self, prompts: Iterable[Prompt]) -> None:
        """Raise ConfigError if the file has a conversation with the id of one of `prompts` and
        another question.
        """
        # keys are masked in the file
        asked = {prompt.id: mask_keys(prompt.turns[0]) for prompt in prompts if prompt.turns}
        for record in _read(self.lines.path):
            name = record["id"]
            if name not in asked:
                continue
            said = _first_question(record)
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
        if not self._is_asked_again(reason):
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


def _open(path: Path) -> JsonLinesFile:
    return JsonLinesFile(path, exclusive=True, fsync_every=FSYNC_EVERY)


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
    names = differing_keys(stored, now)
    if names and is_used:
        lines = [f"output {output}: it holds conversations generated with other settings"]
        for name in names:
            lines.append(f"  {name}: {stored.get(name)!r} in the file, {now.get(name)!r} now")
        lines.append(
            "Choose another output=FILE.jsonl, or delete this one with its settings and dropped"
            " files."
        )
        raise ConfigError("\n".join(lines))
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
    variables = json.loads(chat.prompt.variables or "{}")
    if TOOLS in variables:
        record[TOOLS] = variables.pop(TOOLS)
    if variables:
        record[TEMPLATE_KWARGS] = variables
    record.update((name, value) for name, value in metadata.items() if name != "model")
    recorded = sum(message.is_target is False for message in chat.messages)
    record["finish_reasons"] = ["recorded"] * recorded + chat.finish_reasons
    record["token_counts"] = {
        "prompt": chat.prompt_tokens,
        "completion": chat.completion_tokens,
    }
    writer.write({**record, **dropped})


def _message_record(message: Message) -> dict[str, Any]:
    record: dict[str, Any] = dict(message.as_dict())
    if message.is_target is False:
        record["train"] = False
    if message.token_ids is not None:
        record["token_ids"] = list(message.token_ids)
    return record
