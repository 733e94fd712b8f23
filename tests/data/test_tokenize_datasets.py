import json
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from medusa_train.config.schema import TrainConfig
from medusa_train.data import tokenize_datasets
from medusa_train.data.conversation import Conversation, Message
from medusa_train.data.dataset import load_datasets
from medusa_train.data.examples import EncodedDataset
from medusa_train.data.report import DataReport
from medusa_train.data.tokenize import ChatEncoder, Row
from medusa_train.data.tokenize_datasets import cache_key, encode_conversations
from medusa_train.errors import DataError


@pytest.fixture(scope="module")
def encoder(tokenizer: Any) -> ChatEncoder:
    return ChatEncoder(tokenizer)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "d.jsonl"
    chats = [[("user", f"q{n}"), ("assistant", "B" * (n + 1))] for n in range(8)]
    chats.append([("user", "A"), ("assistant", "")])
    chats.append([("user", "A"), ("assistant", "B"), ("user", "A"), ("assistant", "B" * 100)])
    records = [
        {"messages": [{"role": role, "content": text} for role, text in chat]} for chat in chats
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def config(data: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    def make(path: Path = data, source: dict[str, Any] | None = None, **keys: Any) -> TrainConfig:
        values = {
            "base_model": "none",
            "datasets": [{"path": str(path), **(source or {})}],
            "skip_bad_records": True,
            "sequence_len": 60,
            "dataset_prepared_path": str(tmp_path / "prepared"),
        }
        return TrainConfig.model_validate({**values, **keys})

    return make


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Count how often something is encoded."""
    counted = Mock(side_effect=tokenize_datasets.read_and_encode)
    monkeypatch.setattr(tokenize_datasets, "read_and_encode", counted)
    return counted


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "prepared").iterdir())


def test_the_second_run_takes_exactly_what_the_first_encoded(
    config: Callable[..., TrainConfig], encoder: ChatEncoder, encoded: Mock, tmp_path: Path
) -> None:
    first, second = (load_datasets(config(), encoder) for _ in range(2))
    assert encoded.call_count == 1
    plain = load_datasets(config(dataset_prepared_path=None), encoder)
    (path,) = files(tmp_path)
    for parts in (first, second):
        for got, expected in zip(parts, plain, strict=True):
            assert got.fingerprint() == expected.fingerprint()
            assert [one.prompts() for one in got] == [one.prompts() for one in expected]
            names = [(e.key, e.source, e.tokens.dtype, e.supervised.dtype) for e in got.examples]
            assert names == [(e.key, e.source, torch.int32, torch.bool) for e in expected.examples]
    assert first[0].report.describe() == plain[0].report.describe()
    assert second[0].report.describe() == [
        *plain[0].report.describe(),
        f"loaded tokenized data from {path}",
    ]
    assert [plain[0].report.counts[name] for name in ("complete", "truncated", "too_long")] == [
        8,
        1,
        0,
    ]


def test_what_shapes_the_tokens_makes_another_key(
    config: Callable[..., TrainConfig], data: Path, make_tokenizer: Callable[..., Any]
) -> None:
    def key(encoder: ChatEncoder, **changes: Any) -> str:
        cfg = config(**changes)
        return cache_key(tokenize_datasets.open_datasets(cfg, encoder), cfg.sequence_len)

    keys = [key(ChatEncoder(make_tokenizer()))]
    assert key(ChatEncoder(make_tokenizer())) == keys[0]
    assert (
        key(ChatEncoder(make_tokenizer()), val_set_size=0.3, seed=1, sample_packing=True) == keys[0]
    )
    for change in (
        *(
            {"sequence_len": 61},
            {"train_on_inputs": True},
            {"roles_to_train": ["user"]},
            {"skip_bad_records": False},
        ),
        *({"source": {"conversation": "chatml"}}, {"source": {"type": "messages"}}),
    ):
        keys.append(key(ChatEncoder(make_tokenizer()), **change))
    grown = make_tokenizer()
    grown.add_tokens(["BB"])
    keys.append(key(ChatEncoder(grown)))
    keys.append(key(ChatEncoder(make_tokenizer(grown.chat_template + " "))))
    data.write_text(data.read_text().replace("q1", "q9"))
    keys.append(key(ChatEncoder(make_tokenizer())))
    assert len(set(keys)) == 10


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied", "other"])
def test_a_damaged_file_is_made_again_and_told_in_one_line(
    config: Callable[..., TrainConfig],
    encoder: ChatEncoder,
    encoded: Mock,
    tmp_path: Path,
    damage: str,
) -> None:
    whole = load_datasets(config(), encoder)[0]
    (path,) = files(tmp_path)
    good = path.read_bytes()
    flipped = bytearray(good)
    flipped[-3] ^= 1
    bad = {
        "cut": good[:-9],
        "flipped": bytes(flipped),
        "emptied": b"",
        "other": b"not tensors at all" * 9,
    }[damage]
    path.write_bytes(bad)
    again = load_datasets(config(), encoder)[0]
    assert encoded.call_count == 2
    (note,) = again.report.notes
    assert note.startswith(f"{path} is corrupt (")
    assert note.endswith("), tokenizing again")
    assert "\n" not in note
    assert again.fingerprint() == whole.fingerprint()
    assert path.read_bytes() == good
    assert files(tmp_path) == [path]


def test_a_directory_that_cannot_be_written_stops_nothing(
    config: Callable[..., TrainConfig], encoder: ChatEncoder, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    train, _ = load_datasets(
        config(dataset_prepared_path=str(tmp_path / "file" / "prepared")), encoder
    )
    assert len(train) == 8
    (note,) = train.report.notes
    assert note.startswith("dataset_prepared_path: could not write")


# Rows

HEADERS = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
LAST_ANSWER = (
    "{% for m in messages %}{% if m['role'] == 'user' or loop.last %}"
    "<{{ m['role'] }}>{{ m['content'] }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
#: The tokens of "a" in the tokenizer of `make_tokenizer`.
A_TOKENS = (64,)


def chat_of(answer: str, ids: tuple[int, ...] | None = None) -> Conversation:
    question = Message("user", "q")
    messages = (question, Message("assistant", answer, ids), question, Message("assistant", "z"))
    return Conversation("x", messages, "d.jsonl:1")


@pytest.mark.parametrize(
    ("template", "chat"),
    [
        (LAST_ANSWER, chat_of("a")),
        (HEADERS, chat_of("a", A_TOKENS)),
        (HEADERS, chat_of("B")),  # ">B" is one token
    ],
    ids=["template", "tokens of answers", "tokenizer"],
)
def test_conversations_that_become_several_rows_are_counted(
    template: str, chat: Conversation, make_tokenizer: Callable[..., Any]
) -> None:
    chats = [chat, chat_of("a")]
    encoder = ChatEncoder(make_tokenizer(template))
    split = 2 if template == LAST_ANSWER else 1  # the second stays one row
    report = encode_conversations(chats, encoder, 1000, 1).report
    conversations = "conversation" if split == 1 else "conversations"
    assert report.describe() == [
        f"{split} {conversations} became {2 * split} rows: their later prompts do not begin with the"
        " tokens of the row before"
    ]


def test_tokens_that_are_another_text_are_counted(make_tokenizer: Callable[..., Any]) -> None:
    question = Message("user", "q")
    chats = [
        Conversation("x", (question, Message("assistant", "a", tokens)), "d.jsonl:1")
        for tokens in (A_TOKENS, (3,), (9999,), None)
    ]
    report = encode_conversations(chats, ChatEncoder(make_tokenizer(HEADERS)), 1000, 1).report
    words = "answers whose token_ids were not used, since they are another text in this tokenizer"
    assert report.describe() == [f"{words}: 2"]
    # they are no reason for another row either
    report = encode_conversations(
        [chat_of("a", (3,))], ChatEncoder(make_tokenizer(HEADERS)), 1000, 1
    ).report
    assert report.describe() == [f"{words}: 1"]


# Processes

#: Rejects what it is asked to, and keeps only the last answer: a chat of two answers becomes two
# rows.
TEMPLATE = (
    "{% for m in messages %}{% if m['content'] == 'reject' %}{{ raise_exception('no') }}{% endif %}"
    "{% if m['role'] == 'user' or loop.last %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


class Killed(ChatEncoder):
    """Kills its process, as the kernel does where memory is short."""

    def encode(self, conversation: Conversation, counts: Counter[str] | None = None) -> list[Row]:
        os.kill(os.getpid(), signal.SIGKILL)
        return []


@pytest.fixture
def conversations(chat: Callable[..., Conversation]) -> list[Conversation]:
    kinds = [("q", "a" * 9), ("q", "B", "q", "BB"), ("reject", "a"), ("q",), ("q", "long" * 50)]
    return [
        chat(*(text.replace("q", f"q{n}") for text in kinds[n * 7 % 5]), source=f"d.jsonl:{n}")
        for n in range(40)
    ]


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers for 40 conversations, in chunks that differ and of which one has no example."""
    monkeypatch.setattr(tokenize_datasets, "CONVERSATIONS_PER_WORKER", 20)
    monkeypatch.setattr(tokenize_datasets, "CHUNK", 3)


@pytest.mark.usefixtures("small_steps")
def test_two_processes_return_what_one_does_to_the_byte(
    conversations: list[Conversation], make_tokenizer: Callable[..., Any]
) -> None:
    encoder = ChatEncoder(make_tokenizer(TEMPLATE))
    # one worker is still at the first chunk when the other has finished its next ones
    conversations[2] = replace(
        conversations[2], messages=(Message("user", "q"), Message("assistant", "a " * 400_000))
    )
    progress: list[tuple[int, int]] = []
    one, two = (
        encode_conversations(conversations, encoder, 60, n, lambda *now: progress.append(now))
        for n in (1, 2)
    )
    assert one.to_bytes() == two.to_bytes()
    assert one.report == two.report
    counts = {
        "complete": 16,
        "too_long": 8,
        "unsupervised": 8,
        "split": 8,
        "rows": 16,
        "answers": 24,
    }
    assert one.report.counts == Counter(counts)
    assert [line.split(": ")[0] for line in one.report.skipped] == [
        f"d.jsonl:{n}" for n in range(40) if n * 7 % 5 == 2
    ]
    assert progress == [("tokenizing", min(done, 40), 40) for done in range(3, 43, 3)] * 2
    assert not multiprocessing.active_children()


@pytest.mark.usefixtures("small_steps")
def test_few_conversations_start_no_process(
    conversations: list[Conversation],
    make_tokenizer: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenize_datasets, "CONVERSATIONS_PER_WORKER", 21)
    monkeypatch.delattr(tokenize_datasets, "ProcessPoolExecutor")
    assert (
        len(
            encode_conversations(
                conversations, ChatEncoder(make_tokenizer(TEMPLATE)), 60, 8
            ).examples
        )
        == 24
    )
    assert encode_conversations([], ChatEncoder(make_tokenizer(TEMPLATE)), 60) == EncodedDataset(
        [], DataReport(60)
    )


@pytest.mark.usefixtures("small_steps")
@pytest.mark.slow
def test_a_killed_worker_is_an_error(
    conversations: list[Conversation], make_tokenizer: Callable[..., Any]
) -> None:
    with pytest.raises(
        DataError, match=r"one of 2 tokenization processes ended.*dataset_processes"
    ):
        encode_conversations(conversations, Killed(make_tokenizer(TEMPLATE)), 60, 2)
    assert not multiprocessing.active_children()


@pytest.mark.usefixtures("small_steps")
@pytest.mark.slow
def test_ctrl_c_ends_the_workers(
    conversations: list[Conversation], make_tokenizer: Callable[..., Any]
) -> None:
    def interrupt(name: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with pytest.raises(KeyboardInterrupt):
        encode_conversations(conversations, ChatEncoder(make_tokenizer(TEMPLATE)), 60, 2, interrupt)
    assert not multiprocessing.active_children()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
