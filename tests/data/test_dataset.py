import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_train.config.schema import TrainConfig
from medusa_train.data.chat import ChatEncoder
from medusa_train.data.dataset import Batch, BatchLoader, EncodedDataset, collate, load_datasets
from medusa_train.data.targets import IGNORE
from medusa_train.errors import ConfigError, DataError


def record(*contents: str, **more: Any) -> dict[str, Any]:
    names = ("user", "assistant")
    turns = [{"role": names[i % 2], "content": content} for i, content in enumerate(contents)]
    return {"messages": turns, **more}


def write(path: Path, *records: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return str(path)


def config(*paths: Any, **keys: Any) -> TrainConfig:
    sources = [path if isinstance(path, dict) else {"path": path} for path in paths]
    return TrainConfig.model_validate({"base_model": "none", "datasets": sources, **keys})


@pytest.fixture(scope="module")
def encoder(tokenizer: Any) -> ChatEncoder:
    return ChatEncoder(tokenizer)


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """60 conversations of very different lengths."""
    records = [record(f"q{n}", "B" * (1 + n * 7 % 53)) for n in range(60)]
    return write(tmp_path / "corpus.jsonl", *records)


@pytest.fixture
def dataset(corpus: str, encoder: ChatEncoder) -> EncodedDataset:
    return load_datasets(config(corpus, val_set_size=0), encoder)[0]


def same(left: Batch, right: Batch) -> bool:
    names = ("tokens", "labels", "positions", "segments")
    return left.records == right.records and all(
        torch.equal(getattr(left, name), getattr(right, name)) for name in names
    )


# -- batches --------------------------------------------------------------------------------------------------


def test_a_batch_by_hand(tmp_path: Path, encoder: ChatEncoder) -> None:
    path = write(tmp_path / "d.jsonl", record("A", "B"), record("A", "B 1.", "C"))
    rows = load_datasets(config(path, val_set_size=0), encoder)[0]
    batch = collate(rows.examples, pad_id=777)
    tok = encoder.tokenizer
    short = tok("<s><user>A</s><|assistant|>B</s>")["input_ids"]
    long = tok("<s><user>A</s><|assistant|>B 1.</s>")["input_ids"]
    gap = len(long) - len(short)
    assert batch.tokens.tolist() == [short + [777] * gap, long]
    assert batch.labels[0].tolist() == [IGNORE] * (len(short) - 2) + short[-2:] + [IGNORE] * gap
    assert batch.labels[1].tolist() == [IGNORE] * (len(long) - 5) + long[-5:]
    assert batch.segments.tolist() == [[0] * len(short) + [-1] * gap, [0] * len(long)]
    assert batch.positions.tolist() == [list(range(len(long)))] * 2
    assert batch.records == [f"{path}:1", f"{path}:2"]
    assert {t.dtype for t in (batch.tokens, batch.labels, batch.positions, batch.segments)} == {torch.int64}
    moved = batch.to("meta")
    assert moved.labels.device.type == "meta"
    assert moved.records == batch.records


def test_figures_of_a_data_set(tmp_path: Path, encoder: ChatEncoder) -> None:
    path = write(tmp_path / "d.jsonl", record("A", "B", "C", "B"), record("A", "B"))
    rows = load_datasets(config(path, val_set_size=0), encoder)[0]
    assert rows.supervised_tokens == 6
    assert rows.tokens == sum(int((row.segments == 0).sum()) for row in map(rows.batch, ([0], [1])))
    assert len(rows.prompts()) == 3


# -- loading --------------------------------------------------------------------------------------------------


def test_everything_left_out_is_counted(tmp_path: Path, encoder: ChatEncoder) -> None:
    path = write(
        tmp_path / "d.jsonl",
        record("A", "B"),
        record("A", "B", "C", "D" * 200),
        record("A", "D" * 200),
        record("A"),
        record("A", ""),
        record("B", "A"),
    )
    train, held_out = load_datasets(config(path, sequence_len=60, val_set_size=0, skip_bad_records=True), encoder)
    assert [e.source for e in train.examples] == [f"{path}:1", f"{path}:2", f"{path}:6"]
    assert len(held_out) == 0
    assert train.report.outcomes == {"whole": 2, "cut": 1, "too_long": 1, "unsupervised": 1}
    assert train.report.lines() == [
        f"1 bad records left out, the first: {path}:5: turn 2 (assistant) is empty",
        "1 cut at the end of a turn to fit sequence_len 60",
        "1 left out: their first answer ends beyond sequence_len 60",
        "1 left out: no answer in them to learn from",
    ]
    with pytest.raises(DataError, match=r"d\.jsonl:5: turn 2 \(assistant\) is empty"):
        load_datasets(config(path), encoder)


def test_a_template_that_refuses_a_record_names_it(tmp_path: Path, make_tokenizer: Callable[..., Any]) -> None:
    strict = "{% for m in messages %}{% if 'bad' in m['content'] %}{{ raise_exception('no') }}{% endif %}"
    strict += "{{ m['content'] }}{% endfor %}"
    encoder = ChatEncoder(make_tokenizer(strict))
    path = write(tmp_path / "d.jsonl", record("A", "B"), record("bad", "B"))
    with pytest.raises(DataError, match=r"1 bad record\n.*d\.jsonl:2: the chat template refuses it: no"):
        load_datasets(config(path), encoder)
    train, _ = load_datasets(config(path, skip_bad_records=True), encoder)
    assert len(train) == 1
    assert train.report.skipped == [f"{path}:2: the chat template refuses it: no"]


def test_nothing_left_is_an_error(tmp_path: Path, encoder: ChatEncoder) -> None:
    path = write(tmp_path / "d.jsonl", record("A", "B" * 100), record("A"))
    with pytest.raises(DataError, match="no conversation is left to train on: 1 left out: their first answer"):
        load_datasets(config(path, sequence_len=20), encoder)


def test_the_split_depends_on_seed_and_contents_only(tmp_path: Path, encoder: ChatEncoder) -> None:
    records = [record(f"q{n}", "B") for n in range(30)]
    one = write(tmp_path / "one.jsonl", *records)
    two = [write(tmp_path / f"{name}.jsonl", *part) for name, part in (("b", records[20:]), ("a", records[:20]))]

    def parts(*paths: str, seed: int = 1) -> tuple[set[tuple[int, ...]], set[tuple[int, ...]]]:
        train, held_out = load_datasets(config(*paths, val_set_size=0.2, seed=seed), encoder)
        left, right = ({tuple(e.tokens.tolist()) for e in part.examples} for part in (train, held_out))
        return left, right

    train, held_out = parts(one)
    assert (len(train), len(held_out)) == (24, 6)
    assert not train & held_out
    assert parts(*two) == (train, held_out)
    assert parts(one, seed=2) != (train, held_out)


def test_each_data_set_may_have_its_own_template(tmp_path: Path, encoder: ChatEncoder) -> None:
    path = write(tmp_path / "d.jsonl", record("A", "B"))
    train, _ = load_datasets(config(path, {"path": path, "conversation": "chatml"}, val_set_size=0), encoder)
    texts = [encoder.tokenizer.decode(e.tokens.tolist()) for e in train.examples]
    chatml = "<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\nB<|im_end|>"
    assert texts == ["<s><user>A</s><|assistant|>B</s>", chatml]
    with pytest.raises(ConfigError, match="'chatlm' is unknown; did you mean 'chatml'"):
        load_datasets(config({"path": path, "conversation": "chatlm"}), encoder)


def test_whose_words_are_learnt_follows_the_configuration(tmp_path: Path, encoder: ChatEncoder) -> None:
    path = write(tmp_path / "d.jsonl", record("A", "B"))

    def learnt(**keys: Any) -> str:
        example = load_datasets(config(path, val_set_size=0, **keys), encoder)[0].examples[0]
        return encoder.tokenizer.decode(example.tokens[example.supervised].tolist())

    assert learnt() == "B</s>"
    assert learnt(roles_to_train=["user"]) == "A"
    assert learnt(train_on_inputs=True) == "<s><user>A</s><|assistant|>B</s>"


# -- the loader -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_takes_everything_once(dataset: EncodedDataset, shuffle: bool) -> None:
    loader = BatchLoader(dataset, 7, seed=3, shuffle=shuffle)
    assert loader.steps_per_epoch == 9
    epochs = []
    for number in range(2):
        assert loader.epoch == number
        batches = [next(loader) for _ in range(9)]
        assert sorted(r for b in batches for r in b.records) == sorted(e.source for e in dataset.examples)
        assert sorted(len(b.records) for b in batches) == [4] + [7] * 8
        epochs.append([b.records for b in batches])
    assert (epochs[0] != epochs[1]) == shuffle


def test_the_order_follows_from_the_seed(dataset: EncodedDataset) -> None:
    def order(seed: int) -> list[list[str]]:
        loader = BatchLoader(dataset, 4, seed=seed)
        return [next(loader).records for _ in range(loader.steps_per_epoch)]

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_conversations_of_like_length_stand_together(dataset: EncodedDataset) -> None:
    loader = BatchLoader(dataset, 6, seed=0)
    shapes = [next(loader).tokens.numel() for _ in range(loader.steps_per_epoch)]
    assert dataset.tokens / sum(shapes) > 0.9
    assert shapes != sorted(shapes, reverse=True)
    unshuffled = BatchLoader(dataset, 6, seed=0, shuffle=False)
    widths = [next(unshuffled).tokens.shape[1] for _ in range(unshuffled.steps_per_epoch)]
    assert widths == sorted(widths, reverse=True)


@pytest.mark.parametrize("before", [0, 3, 8, 9, 13, 27])
def test_a_saved_place_gives_exactly_the_same_batches(dataset: EncodedDataset, before: int) -> None:
    loader = BatchLoader(dataset, 7, seed=3)
    for _ in range(before):
        next(loader)
    state = json.loads(json.dumps(loader.state_dict()))
    expected = [next(loader) for _ in range(20)]

    fresh = BatchLoader(dataset, 7, seed=3)
    next(fresh)
    fresh.load_state_dict(state)
    assert all(same(left, next(fresh)) for left in expected)
    assert fresh.epoch == loader.epoch


def test_a_place_in_other_data_is_refused(dataset: EncodedDataset, tmp_path: Path, encoder: ChatEncoder) -> None:
    state = BatchLoader(dataset, 7, seed=3).state_dict()
    with pytest.raises(DataError, match="seed, micro_batch_size changed since"):
        BatchLoader(dataset, 6, seed=4).load_state_dict(state)
    path = write(tmp_path / "other.jsonl", *[record(f"q{n}", "C") for n in range(60)])
    other = load_datasets(config(path, val_set_size=0), encoder)[0]
    with pytest.raises(DataError, match="does not fit: data changed since"):
        BatchLoader(other, 7, seed=3).load_state_dict(state)


def test_no_batches_of_nothing(dataset: EncodedDataset) -> None:
    with pytest.raises(DataError, match="no conversation to make batches of"):
        BatchLoader(EncodedDataset([], 0, dataset.report), 2, seed=0)
