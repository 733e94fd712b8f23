"""Read and select the prompts for self-distillation. A prompt is the user's messages of a chat
record, or for a chat with tools the recorded messages before an answer.

Whether and how a prompt is answered never depends on which other prompts are selected.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from medusa_train.config.schema import SelfDistillConfig
from medusa_train.data.conversation import Conversation, Message
from medusa_train.data.read_chats import describe_problems, first_problems
from medusa_train.data.records import (
    PROMPT_IDS,
    answer_points,
    parse_tool_chat,
    parse_user_turns,
    usable_id,
)
from medusa_train.data.report import Unread
from medusa_train.data.sources import PUBLIC_DATASETS, HubSplit, LocalFiles, open_prompts
from medusa_train.errors import DataError
from medusa_train.progress import LoadingProgress, RunProgress


@dataclass(frozen=True, slots=True)
class Prompt:
    """The user's side of one conversation.

    Attributes:
        id: unique within the data set.
        turns: the user's messages.
        system: the system message.
        source: where the prompt was read, as `file:line`.
        messages: only for a chat with tools: all messages before the answer to generate.
        variables: only for a chat with tools: as in `Conversation`.
    """

    id: str
    turns: tuple[str, ...]
    system: str | None = None
    source: str = ""
    messages: tuple[Message, ...] = ()
    variables: str = ""


def load_prompts(
    cfg: SelfDistillConfig, progress: RunProgress
) -> tuple[list[Prompt], Counter[str]]:
    """Return the selected prompts, and the number of skipped prompts by reason."""
    # 1. read all prompts
    invalid: list[str] = []
    with LoadingProgress(progress) as shown:
        source = open_prompts(cfg.seed_dataset, cfg.split, shown.update, cfg.name)
        unread = Unread()
        prompts = read_prompts(
            source,
            cfg.type,
            skipped=invalid if cfg.skip_bad_records or source.is_public else None,
            unread=unread,
            # in self-talk the model also writes the user's turns, and it has no tools
            turns_per_chat=cfg.turns_per_chat if cfg.mode == "replay" else 0,
        )
    for note in (*source.notes, *unread.describe(cfg.seed_dataset)):
        progress.print(note)

    # 2. select prompts, and report skipped records
    selected, skipped = select_prompts(prompts, cfg)
    if invalid:
        progress.print("\n".join(["skipped invalid records:", *first_problems(invalid)]))
        skipped["broken"] += len(invalid)
    if not selected:
        reasons = [f"{count} {reason}" for reason, count in sorted(skipped.items())]
        raise DataError(
            f"{cfg.seed_dataset}: no prompts are left ({', '.join(reasons)}); change min_chars,"
            " max_chars, limit ..."
        )
    return selected, skipped


def read_prompts(
    source: Path | LocalFiles | HubSplit,
    type: str = "auto",
    *,
    skipped: list[str] | None = None,
    unread: Unread | None = None,
    turns_per_chat: int = 0,
) -> list[Prompt]:
    """Read prompts in any format of `parse_user_turns`. Records without a user message are skipped.
    A repeated id gets a number (`id~2`).

    Args:
        skipped: a list that receives `file:line: reason` of each invalid record; None: invalid
            records are errors.
        unread: counts content of the records that is not read.
        turns_per_chat: a chat with tools becomes up to this many prompts, see `tool_prompts`. With
            0 it is read as a chat without tools.

    Raises:
        DataError: there are invalid records and no list `skipped`, or there are no prompts.
    """
    if isinstance(source, Path):
        source = LocalFiles((source,))
    prompts: list[Prompt] = []
    problems: list[str] = []
    id_counts: dict[str, int] = {}
    for record in chain.from_iterable(records for _, records in source.parts()):
        try:
            if record.error is not None:
                raise ValueError(record.error)
            chat = parse_tool_chat(record.value, type, unread) if turns_per_chat else None
            if chat is not None:
                prompts_of_record = tool_prompts(chat, record.source, turns_per_chat)
            else:
                turns, system = parse_user_turns(record.value, type, unread)
                record_id = _record_id(record.value, turns, system)
                prompts_of_record = [Prompt(record_id, tuple(turns), system, record.source)]
        except ValueError as error:
            problems.append(f"{record.source}: {error}")
            continue
        prompts += [
            _with_unique_id(prompt, id_counts) for prompt in prompts_of_record if prompt.turns
        ]
    if problems and (skipped is None or not prompts):
        raise DataError(describe_problems(problems, source.name))
    if skipped is not None:
        skipped += problems
    if not prompts:
        raise DataError(f"{source.name}: no user message in any record")
    return prompts


def tool_prompts(chat: Conversation, source: str, most: int) -> list[Prompt]:
    """Return up to `most` prompts from a chat with tools. Each consists of the messages before a
    recorded answer, and the chosen answers are spread evenly over the chat.

    The recorded messages are used because a tool's result is valid only for the recorded call.
    """
    points = answer_points(chat)
    count = min(most, len(points))
    prompts = []
    for number in (place * len(points) // count for place in range(count)):
        messages = chat.messages[: points[number]]
        questions = tuple(message.content for message in messages if message.role == "user")
        prompts.append(
            Prompt(
                f"{chat.id}/{number + 1}",
                questions,
                source=source,
                messages=messages,
                variables=chat.variables,
            )
        )
    return prompts


def short_name(seed_dataset: str) -> str:
    """Return a short name of the data set for output files: a known name such as `sharegpt`, the
    stem of a file name, or the last part of a hub name.
    """
    if seed_dataset in PUBLIC_DATASETS:
        return seed_dataset
    return Path(seed_dataset).stem


def _record_id(record: object, turns: list[str], system: str | None) -> str:
    """Return the record's id; if it has none, a digest of its text."""
    record_id = usable_id(record, *PROMPT_IDS) if isinstance(record, Mapping) else None
    if record_id is not None:
        return record_id
    return hashlib.sha256(json.dumps([system, *turns]).encode()).hexdigest()[:16]


def _with_unique_id(prompt: Prompt, counts: dict[str, int]) -> Prompt:
    """Return the prompt with an id that no earlier prompt has: `id`, else `id~2`, `id~3`, ...
    `counts` is updated.
    """
    unique = prompt.id
    while unique in counts:
        counts[prompt.id] += 1
        unique = f"{prompt.id}~{counts[prompt.id]}"
    counts[unique] = 1
    return replace(prompt, id=unique)


def select_prompts(
    prompts: Sequence[Prompt], cfg: SelfDistillConfig
) -> tuple[list[Prompt], Counter[str]]:
    """Return the selected prompts in order, and the number of skipped prompts by reason
    ("repeated", "after max_turns", "short" or "long").

    Of several prompts with the same messages, the first is kept. A larger sample contains every
    smaller sample.
    """
    skipped: Counter[str] = Counter()
    chosen: list[Prompt] = []
    seen: set[Prompt] = set()
    for prompt in prompts:
        if not prompt.messages:
            prompt = replace(prompt, turns=prompt.turns[: cfg.max_turns])
        length = sum(map(len, prompt.turns))
        content = replace(prompt, id="", source="")
        if content in seen:
            skipped["repeated"] += 1
        elif cfg.max_turns is not None and len(prompt.turns) > cfg.max_turns:
            skipped["after max_turns"] += 1
        elif cfg.min_chars is not None and length < cfg.min_chars:
            skipped["short"] += 1
        elif cfg.max_chars is not None and length > cfg.max_chars:
            skipped["long"] += 1
        else:
            seen.add(content)
            chosen.append(prompt)
    if cfg.sample is not None:
        ranked = sorted(chosen, key=lambda prompt: stable_hash(cfg.sample_seed, prompt.id))
        names = {prompt.id for prompt in ranked[: cfg.sample]}
        chosen = [prompt for prompt in chosen if prompt.id in names]
    return chosen[: cfg.limit], skipped


def stable_hash(*parts: int | str) -> int:
    """Return 64 bits of a hash that is the same on every machine."""
    text = "\x00".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
