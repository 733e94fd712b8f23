import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from medusa_train.data import encode
from medusa_train.data.conversation import Conversation, Message
from medusa_train.data.encode import encode_conversations
from medusa_train.data.examples import EncodedExamples
from medusa_train.data.tokenize import ChatEncoder, EncodedRow
from medusa_train.errors import DataError

#: Rejects what it is asked to, and keeps only the last answer: a chat of two answers becomes two rows.
TEMPLATE = (
    "{% for m in messages %}{% if m['content'] == 'reject' %}{{ raise_exception('no') }}{% endif %}"
    "{% if m['role'] == 'user' or loop.last %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


class Killed(ChatEncoder):
    """Kills its process, as the kernel does where memory is short."""

    def encode(self, conversation: Conversation) -> list[EncodedRow]:
        os.kill(os.getpid(), signal.SIGKILL)
        return []


@pytest.fixture
def conversations(chat: Callable[..., Conversation]) -> list[Conversation]:
    kinds = [("q", "a" * 9), ("q", "B", "q", "BB"), ("reject", "a"), ("q",), ("q", "long" * 50)]
    return [chat(*(text.replace("q", f"q{n}") for text in kinds[n * 7 % 5]), source=f"d.jsonl:{n}") for n in range(40)]


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers for 40 conversations, in chunks that differ and of which one has no example."""
    monkeypatch.setattr(encode, "CONVERSATIONS_PER_WORKER", 20)
    monkeypatch.setattr(encode, "CHUNK", 3)


def test_two_processes_return_what_one_does_to_the_byte(
    conversations: list[Conversation], make_tokenizer: Callable[..., Any]
) -> None:
    encoder = ChatEncoder(make_tokenizer(TEMPLATE))
    # one worker is still at the first chunk when the other has finished its next ones
    conversations[2] = replace(conversations[2], messages=(Message("user", "q"), Message("assistant", "a " * 400_000)))
    progress: list[tuple[int, int]] = []
    one, two = (
        encode_conversations(conversations, encoder, 60, count, lambda *now: progress.append(now)) for count in (1, 2)
    )
    assert one.to_bytes() == two.to_bytes()
    assert one.report == two.report
    assert one.report.outcomes == {"complete": 16, "truncated": 0, "too_long": 8, "unsupervised": 8}
    assert one.report.split == (8, 16)
    assert [line.split(": ")[0] for line in one.report.skipped] == [f"d.jsonl:{n}" for n in range(40) if n * 7 % 5 == 2]
    assert progress == [("tokenizing", min(done, 40), 40) for done in range(3, 43, 3)] * 2
    assert not multiprocessing.active_children()


def test_few_conversations_start_no_process(
    conversations: list[Conversation], make_tokenizer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode, "CONVERSATIONS_PER_WORKER", 21)
    monkeypatch.delattr(encode, "ProcessPoolExecutor")
    assert len(encode_conversations(conversations, ChatEncoder(make_tokenizer(TEMPLATE)), 60, 8).examples) == 24
    assert encode_conversations([], ChatEncoder(make_tokenizer(TEMPLATE)), 60) == EncodedExamples.empty(60)


@pytest.mark.slow
def test_a_killed_worker_is_an_error(conversations: list[Conversation], make_tokenizer: Callable[..., Any]) -> None:
    with pytest.raises(DataError, match=r"one of 2 tokenization processes ended.*dataset_processes"):
        encode_conversations(conversations, Killed(make_tokenizer(TEMPLATE)), 60, 2)
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_ctrl_c_ends_the_workers(conversations: list[Conversation], make_tokenizer: Callable[..., Any]) -> None:
    def interrupt(name: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with pytest.raises(KeyboardInterrupt):
        encode_conversations(conversations, ChatEncoder(make_tokenizer(TEMPLATE)), 60, 2, interrupt)
    assert not multiprocessing.active_children()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
