"""The output file of self-distillation: append-only JSON Lines that a run can resume.

Next to `NAME.jsonl` there are two files. `NAME.settings.json` contains the settings that the
conversations were generated with. `NAME.dropped.jsonl` contains the ids of conversations without
any kept answer, which a resumed run does not try again. Prompts that a server failed to answer are
in neither file, so a resumed run tries them again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from medusa_train.data.record_files import settings_path
from medusa_train.data.records import TEMPLATE_KWARGS
from medusa_train.data.tool_calls import TOOLS
from medusa_train.errors import ConfigError, DataError
from medusa_train.hide_secrets import excerpt, mask_keys
from medusa_train.io import parse_json, replace_text
from medusa_train.json_lines import JsonLinesFile, differing_keys, read_records
from medusa_train.selfdistill.prompts import Prompt
from medusa_train.selfdistill.replay import GeneratedChat, is_asked_again

FSYNC_EVERY = 16  # a crash of the machine (not of the process) loses at most this many lines


class OutputWriter:
    """Appends conversations to an output file. Knows which conversations earlier runs with the same
    `settings` finished.

    Attributes:
        done: ids of the finished conversations, including dropped ones.
        kept: number of conversations in the output file.
        drop_reasons: reasons of dropped conversations by id, including conversations that the next
            run asks again.
        lines: the output file, locked against other processes.
        dropped: the file of dropped ids, locked against other processes.
    """

    def __init__(self, output: Path, settings: Mapping[str, Any]) -> None:
        self.output = output
        self._from_server = settings.get("engine") == "openai"
        _check_settings(output, settings)  # before opening, which truncates an incomplete last line
        with ExitStack() as opened:
            self.lines = opened.enter_context(_open(output))
            self.dropped = opened.enter_context(_open(dropped_path(output)))
            if not _check_settings(output, settings):  # again, since the file is locked only now
                self.dropped.path.write_bytes(b"")
            if not has_conversations(output):
                text = json.dumps(dict(settings), indent=2, ensure_ascii=False)
                replace_text(settings_path(output), f"{text}\n")
            self._asked = {name: question for name, question, _ in _read(output)}
            self.kept = len(self._asked)
            self.drop_reasons: dict[str, str] = {}
            for name, _, reason in _read(self.dropped.path):
                # files of earlier versions also list prompts that a server failed to answer
                asked_again = is_asked_again(reason, from_server=self._from_server)
                if name not in self._asked and not asked_again:
                    self.drop_reasons[name] = reason
            self.done = {*self._asked, *self.drop_reasons}
            opened.pop_all()

    def check_prompts(self, prompts: Iterable[Prompt]) -> None:
        """Raise ConfigError if a conversation in the file has the id of one of `prompts`, but
        another first question.
        """
        for prompt in prompts:
            question = mask_keys("".join(prompt.turns[:1]))  # the file contains masked text
            answered = self._asked.get(prompt.id, question)
            if question != answered:
                raise ConfigError(
                    f"output {self.output}: it answers other prompts with the same ids; {prompt.id}"
                    f" asks {excerpt(answered, 60)!r}, and now {excerpt(question, 60)!r}. Choose"
                    " another output=FILE.jsonl"
                )

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a conversation, whose id must be new."""
        self.done.add(str(record["id"]))
        self.kept += 1
        self.lines.append(record)

    def drop(self, record: Mapping[str, Any]) -> None:
        """Append the id of a conversation without any kept answer, unless the next run should ask
        it again.
        """
        name = str(record["id"])
        reason = record["dropped"]["reason"]
        self.drop_reasons[name] = reason
        if not is_asked_again(reason, from_server=self._from_server):
            self.done.add(name)
            self.dropped.append(record)

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
    """Return the path of the file that lists conversations without any kept answer."""
    return output.with_suffix(".dropped.jsonl")


def has_conversations(output: Path) -> bool:
    """Return whether any conversation of `output` was written or dropped."""
    return any(file.exists() and file.stat().st_size for file in (output, dropped_path(output)))


def _open(path: Path) -> JsonLinesFile:
    return JsonLinesFile(path, exclusive=True, fsync_every=FSYNC_EVERY)


def _read(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yield for each conversation in a file its id, the user's first message, and the reason why it
    was dropped. Each is "" if it is missing.

    Raises:
        DataError: a line is not a conversation.
    """
    for number, record in enumerate(read_records(path), start=1):
        try:
            user_messages = [
                one["content"] for one in record.get("messages", ()) if one["role"] == "user"
            ]
            reason = record.get("dropped", {}).get("reason", "")
            entry = str(record["id"]), "".join(user_messages[:1]), str(reason)
        except (LookupError, TypeError, AttributeError):
            raise DataError(
                f"{path}:{number}: not a conversation (a JSON object with an id, and messages with"
                " role and content); fix or delete the file, or choose another output"
            ) from None
        yield entry


def _check_settings(output: Path, settings: Mapping[str, Any]) -> bool:
    """Return whether the conversations of earlier runs were generated with these settings. If not,
    all of them were dropped, and may be kept now.

    Raises:
        ConfigError: `output` contains conversations that were generated with other or unknown
            settings.
    """
    if output.suffix != ".jsonl":
        raise ConfigError(f"output {output}: the file name has to end with .jsonl")
    if not has_conversations(output):
        return True
    path = settings_path(output)
    try:
        stored_settings = dict(parse_json(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError(
            f"output {output}: the file exists without its settings {path.name}; choose another"
            " output"
        ) from None
    except (ValueError, TypeError):
        raise ConfigError(f"{path}: not valid JSON; fix it, or choose another output") from None
    # a missing setting equals None; API keys are masked in the file
    settings_now = json.loads(mask_keys(json.dumps(dict(settings))))
    lines = [
        f"  {name}: {stored_settings.get(name)!r} in the file, {settings_now.get(name)!r} now"
        for name in differing_keys(stored_settings, settings_now)
    ]
    if not lines:
        return True
    if output.exists() and output.stat().st_size:
        head = f"output {output}: it holds conversations generated with other settings"
        advice = (
            "Choose another output=FILE.jsonl, or delete this one with its settings and dropped"
            " files."
        )
        raise ConfigError("\n".join([head, *lines, advice]))
    return False


def write_chat(chat: GeneratedChat, writer: OutputWriter, metadata: Mapping[str, Any]) -> None:
    """Append a conversation to the output, or record it as dropped if no answer was kept."""
    dropped: dict[str, Any] = {}
    if chat.dropped is not None:
        dropped["dropped"] = {"reason": chat.dropped, "turns": chat.dropped_turns}
    names = {"id": chat.prompt.id, "seed_id": chat.prompt.id}
    if chat.is_empty:
        writer.drop({**names, **dropped})
        return
    # 1. the messages
    messages = []
    recorded = 0
    for message in chat.messages:
        record: dict[str, Any] = dict(message.as_dict())
        if message.is_target is False:
            record["train"] = False
            recorded += 1
        if message.token_ids is not None:
            record["token_ids"] = list(message.token_ids)
        messages.append(record)
    # 2. the tools and template variables of a chat with tools
    variables = json.loads(chat.prompt.variables or "{}")
    shared = {TOOLS: variables.pop(TOOLS)} if TOOLS in variables else {}
    if variables:
        shared[TEMPLATE_KWARGS] = variables
    # 3. the line
    answers = chat.answers
    writer.write(
        {
            **names,
            "model": metadata["model"],
            "messages": messages,
            **shared,
            **metadata,
            "finish_reasons": ["recorded"] * recorded + [one.finish_reason for one in answers],
            "token_counts": {
                "prompt": [one.prompt_tokens for one in answers],
                "completion": [one.completion_tokens for one in answers],
            },
            **dropped,
        }
    )
