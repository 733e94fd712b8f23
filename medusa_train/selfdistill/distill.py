"""The loop of self-distillation: conversations begin, wait for answers, and are written."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from medusa_train.data.conversation import Message
from medusa_train.selfdistill.answers import Engine, Request
from medusa_train.selfdistill.modes import ChatSteps, GeneratedChat
from medusa_train.selfdistill.output import OutputWriter
from medusa_train.selfdistill.prompts import Prompt
from medusa_train.selfdistill.run_stats import RunStats


def distill(
    prompts: Sequence[Prompt],
    engine: Engine,
    writer: OutputWriter,
    *,
    mode: Callable[[Prompt], ChatSteps],
    metadata: dict[str, Any],
    on_progress: Callable[[RunStats], None] = lambda stats: None,
) -> RunStats:
    """Generate a conversation for each of `prompts` that is not in `writer.done`, and write it.

    As many conversations are in progress as the engine has capacity for. Each is written when it is
    complete; an engine of capacity 1 writes them in the order of the prompts.

    Args:
        mode: `replay` or `selftalk`, with its settings.
        metadata: fields of every output line besides the conversation, see `record_metadata`.
    """
    todo = [prompt for prompt in prompts if prompt.id not in writer.done]
    stats = RunStats(total=len(prompts), earlier=len(prompts) - len(todo))
    on_progress(stats)
    waiting = iter(todo)
    chats: dict[int, ChatSteps] = {}  # conversations in progress, by their number
    started = 0  # conversations so far
    ready: deque[tuple[int, Request]] = deque()  # next requests of conversations in progress
    pending = 0  # requests submitted to the engine and not answered
    while True:
        # 1. fill the engine: conversations in progress go first, then new ones begin
        while pending < engine.capacity:
            if not ready:
                prompt = next(waiting, None)
                if prompt is None:
                    break
                steps = mode(prompt)
                chats[started] = steps
                ready.append((started, next(steps)))
                started += 1
            engine.submit(*ready.popleft())
            pending += 1
        if not pending:
            return stats
        # 2. wait for an answer
        number, answer = engine.next()
        pending -= 1
        stats.tokens += answer.completion_tokens
        on_progress(stats)
        # 3. the conversation goes on, or is complete
        try:
            ready.append((number, chats[number].send(answer)))
        except StopIteration as end:
            del chats[number]
            chat: GeneratedChat = end.value
            write_chat(chat, writer, metadata)
            stats.count(chat)
            on_progress(stats)


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
