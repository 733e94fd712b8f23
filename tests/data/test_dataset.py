import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_train.config.schema import TrainConfig
from medusa_train.data.batch import Batch
from medusa_train.data.dataset import BatchLoader, load_datasets
from medusa_train.data.examples import EncodedDataset
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.errors import DataError


def record(*contents: str, **more: Any) -> dict[str, Any]:
    names = ("user", "assistant")
    return {
        "messages": [
            {"role": names[i % 2], "content": content} for i, content in enumerate(contents)
        ],
        **more,
    }


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
    return write(
        tmp_path / "corpus.jsonl", *[record(f"q{n}", "B" * (1 + n * 7 % 53)) for n in range(60)]
    )


@pytest.fixture
def dataset(corpus: str, encoder: ChatEncoder) -> EncodedDataset:
    return load_datasets(config(corpus, val_set_size=0), encoder)[0]


def same(left: Batch, right: Batch) -> bool:
    names = ("tokens", "labels", "positions", "segments")
    return left.records == right.records and all(
        torch.equal(getattr(left, n), getattr(right, n)) for n in names
    )


# -- loading
# --------------------------------------------------------------------------------------------------


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
    train, held_out = load_datasets(
        config(path, sequence_len=60, val_set_size=0, skip_bad_records=True), encoder
    )
    assert [e.source for e in train.examples] == [f"{path}:1", f"{path}:2", f"{path}:6"]
    assert len(held_out) == 0
    assert train.report.counts == Counter(
        complete=2, truncated=1, too_long=1, unsupervised=1, answers=4
    )
    assert train.report.describe() == [
        f"1 invalid records skipped, the first: {path}:5: turn 2 (assistant) is empty",
        "1 truncated at the end of a turn to fit sequence_len 60",
        "1 skipped: their first answer ends beyond sequence_len 60",
        "1 skipped: no answer to train on",
        "1 of 3 conversations equal an earlier one; all of them are used",  # once it is truncated
    ]
    with pytest.raises(DataError, match=r"d\.jsonl:5: turn 2 \(assistant\) is empty"):
        load_datasets(config(path), encoder)


def test_a_template_that_refuses_a_record_names_it(
    tmp_path: Path, make_tokenizer: Callable[..., Any]
) -> None:
    strict = (
        "{% for m in messages %}{% if 'bad' in m['content'] %}{{ raise_exception('no') }}{%"
        " endif %}"
    )
    strict += "{{ m['content'] }}{% endfor %}"
    encoder = ChatEncoder(make_tokenizer(strict))
    path = write(tmp_path / "d.jsonl", record("A", "B"), record("bad", "B"))
    with pytest.raises(
        DataError, match=r"1 invalid record\n.*d\.jsonl:2: the chat template rejects the chat: no"
    ):
        load_datasets(config(path), encoder)
    train, _ = load_datasets(config(path, skip_bad_records=True), encoder)
    assert len(train) == 1
    assert train.report.skipped == [f"{path}:2: the chat template rejects the chat: no"]


def test_nothing_left_is_an_error(tmp_path: Path, encoder: ChatEncoder) -> None:
    path = write(tmp_path / "d.jsonl", record("A", "B" * 100), record("A"))
    with pytest.raises(
        DataError, match=r"d\.jsonl: no conversation left: 1 skipped: their first answer"
    ):
        load_datasets(config(path, sequence_len=20), encoder)
    one = write(tmp_path / "one.jsonl", record("A", "B"))
    with pytest.raises(
        DataError, match="early_stopping_patience: no conversation is left for validation"
    ):
        load_datasets(config(one, val_set_size=0.5, early_stopping_patience=1), encoder)
    with pytest.raises(DataError, match="to train on: test_datasets have all of their prompts"):
        load_datasets(config(one, test_datasets=[{"path": str(one)}]), encoder)


def test_an_earlier_validation_set_with_all_prompts_is_an_error_that_does_not_blame_test_datasets(
    tmp_path: Path, encoder: ChatEncoder
) -> None:
    one = write(tmp_path / "one.jsonl", record("A", "B"))
    (example,) = load_datasets(config(one, val_set_size=0), encoder)[0]
    with pytest.raises(DataError, match="train on: the validation set has all of their prompts"):
        load_datasets(config(one), encoder, held_out={example.prompt})


def test_test_datasets_are_the_validation_set_and_not_trained_on(
    tmp_path: Path, encoder: ChatEncoder
) -> None:
    train_path = write(tmp_path / "train.jsonl", *(record(f"q{n}", "B") for n in range(9)))
    test_path = tmp_path / "test.jsonl.gz"
    test_path.write_bytes(
        gzip.compress("".join(json.dumps(record(f"q{n}", "B")) + "\n" for n in (8, 9)).encode())
    )
    keys = {
        "test_datasets": [{"path": str(test_path)}],
        "sample_packing": True,
        "early_stopping_patience": 1,
    }
    train, held_out = load_datasets(config(train_path, **keys), encoder)
    assert [example.source for example in held_out] == [f"{test_path}:1", f"{test_path}:2"]
    assert held_out.row_len == train.row_len
    assert [example.source for example in train] == [f"{train_path}:{n}" for n in range(1, 9)]
    assert train.report.describe() == [
        "1 conversations not trained on, since test_datasets have their prompts"
    ]


def test_other_answers_to_prompts_of_the_test_data_are_not_trained_on(
    tmp_path: Path, encoder: ChatEncoder
) -> None:
    train_path = write(tmp_path / "train.jsonl", *(record(f"q{n}", f"B{n}") for n in range(4)))
    test_path = write(tmp_path / "test.jsonl", record("q1", "other"), record("q2", "C", "D", "E"))
    cfg = config(train_path, test_datasets=[{"path": test_path}])
    train, held_out = load_datasets(cfg, encoder)
    assert [example.source for example in train] == [f"{train_path}:1", f"{train_path}:4"]
    assert len(held_out) == 2
    assert train.report.describe()[0].startswith("2 conversations not trained on")


@pytest.mark.parametrize("cached", [False, True])
def test_all_answers_to_a_prompt_are_on_the_same_side_of_the_split(
    tmp_path: Path, encoder: ChatEncoder, cached: bool
) -> None:
    """With other words before the prompt it is another prompt."""
    records = []
    for answer in range(5):
        for question in range(12):
            records.append(record(f"q{question}", f"B{answer}", f"more {answer}", "C"))
    for question in range(12):
        system = {"role": "system", "content": f"S{question}"}
        records.append({"messages": [system, *record("q", "B")["messages"]]})
    path = write(tmp_path / "d.jsonl", *records)
    keys = {"dataset_prepared_path": str(tmp_path / "cache")} if cached else {}
    for _ in range(1 + cached):
        train, held_out = load_datasets(config(path, val_set_size=0.2, **keys), encoder)
        of_train, of_held_out = (
            {tuple(example.prompts()[0]) for example in part} for part in (train, held_out)
        )
        assert of_train.isdisjoint(of_held_out)
        assert len(of_train) + len(of_held_out) == 24
        assert abs(len(held_out) - 0.2 * 72) < 5


def test_data_of_one_prompt_are_not_split_and_that_is_noted(
    tmp_path: Path, encoder: ChatEncoder
) -> None:
    path = write(tmp_path / "d.jsonl", *(record("q", f"B{n}") for n in range(4)))
    train, held_out = load_datasets(config(path), encoder)
    assert (len(train), len(held_out)) == (4, 0)
    note = "no conversation is held out: all 4 begin with the same prompt; set test_datasets"
    assert train.report.describe() == [note]


def test_repeated_conversations_are_named_and_used(tmp_path: Path, encoder: ChatEncoder) -> None:
    records = [record("A", "B"), record("A", "C"), record("A", "B"), record("A", "B")]
    path = write(tmp_path / "d.jsonl", *records)
    train, _ = load_datasets(config(path, val_set_size=0), encoder)
    assert len(train) == 4
    assert train.report.describe() == [
        "2 of 4 conversations equal an earlier one; all of them are used"
    ]
    distinct = write(tmp_path / "distinct.jsonl", *records[:2])
    train, _ = load_datasets(config(distinct, val_set_size=0), encoder)
    assert train.report.describe() == []


def test_looping_and_cut_answers_are_counted_also_from_the_cache(
    tmp_path: Path, encoder: ChatEncoder
) -> None:
    loop = record("q", "a b c d e f g h " * 3, "q", "B") | {"finish_reasons": ["stop", "length"]}
    path = write(
        tmp_path / "d.jsonl",
        loop,
        *(record(f"q{n}", "B") for n in range(8)),
        record("q", "B" * 999),
    )
    cfg = config(
        path, val_set_size=0, sequence_len=300, dataset_prepared_path=str(tmp_path / "cache")
    )
    for _ in range(2):
        report = load_datasets(cfg, encoder)[0].report
        counts = [report.counts[name] for name in ("answers", "looping", "cut")]
        assert counts == [10, 1, 1]  # not of the last, which is too long
        assert report.describe_looping().startswith("1 of 10 answers (10%) loop")
    assert "loaded tokenized data" in report.notes[0]


def test_examples_have_the_number_of_their_data_set(tmp_path: Path, encoder: ChatEncoder) -> None:
    first = write(tmp_path / "a.jsonl", record("A", "B"), record("C", "D"))
    second = write(tmp_path / "b.jsonl", record("E", "F"))
    train, _ = load_datasets(config(first, second, val_set_size=0), encoder)
    assert [example.dataset for example in train] == [0, 0, 1]


def test_each_data_set_may_have_its_own_template(tmp_path: Path, encoder: ChatEncoder) -> None:
    path = write(tmp_path / "d.jsonl", record("A", "B"))
    train, _ = load_datasets(
        config(path, {"path": path, "conversation": "chatml"}, val_set_size=0), encoder
    )
    texts = [encoder.tokenizer.decode(e.tokens.tolist()) for e in train.examples]
    chatml = "<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\nB<|im_end|>"
    assert texts == ["<s><user>A</s><|assistant|>B</s>", chatml]
    with pytest.raises(ValueError, match="'chatlm' is unknown; did you mean chatml"):
        config({"path": path, "conversation": "chatlm"})


def test_reasoning_next_to_an_answer_is_joined_by_the_tags_of_the_configuration(
    tmp_path: Path, encoder: ChatEncoder
) -> None:
    chat = record("A", "B")
    chat["messages"][1]["reasoning_content"] = "T"
    path = write(tmp_path / "d.jsonl", chat)
    (example,), _ = load_datasets(config(path, reasoning_tags=["<r>", "</r>"]), encoder)
    text = encoder.tokenizer.decode(example.tokens.tolist())
    assert text == "<s><user>A</s><|assistant|><r>\nT\n</r>\n\nB</s>"


# -- the loader
# -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_takes_everything_once(dataset: EncodedDataset, shuffle: bool) -> None:
    loader = BatchLoader(dataset, 7, seed=3, shuffle=shuffle)
    assert loader.batches_per_epoch == 9
    epochs = []
    for number in range(2):
        assert loader.epoch == number
        batches = [next(loader) for _ in range(9)]
        assert sorted(r for b in batches for r in b.records) == sorted(
            e.source for e in dataset.examples
        )
        assert sorted(len(b.records) for b in batches) == [4] + [7] * 8
        epochs.append([b.records for b in batches])
    assert (epochs[0] != epochs[1]) == shuffle
    assert (
        next(BatchLoader(dataset, 7, seed=4, shuffle=shuffle)).records != epochs[0][0]
    ) == shuffle


def test_draws_of_a_batch_do_not_depend_on_the_number_of_processes(
    dataset: EncodedDataset,
) -> None:
    """They differ between batches and epochs, and a resumed run draws them again."""
    loader = BatchLoader(dataset, 7, seed=3)
    batches = [next(loader) for _ in range(18)]
    draws = [batch.draw for batch in batches]
    assert len(set(draws)) == 18
    ranks = [BatchLoader(dataset, 7, seed=3, rank=rank, size=2) for rank in range(2)]
    of_ranks = [next(ranks[number % 2]) for number in range(18)]
    assert [batch.draw for batch in of_ranks] == draws
    assert [batch.records for batch in of_ranks] == [batch.records for batch in batches]
    resumed = BatchLoader(dataset, 7, seed=3)
    resumed.load_state_dict(ranks[0].state_dict())
    assert next(resumed).draw not in draws


def test_conversations_of_like_length_stand_together(dataset: EncodedDataset) -> None:
    loader = BatchLoader(dataset, 6, seed=0)
    shapes = [next(loader).tokens.numel() for _ in range(loader.batches_per_epoch)]
    assert dataset.tokens / sum(shapes) > 0.9
    assert shapes != sorted(shapes, reverse=True)
    unshuffled = BatchLoader(dataset, 6, seed=0, shuffle=False)
    widths = [next(unshuffled).tokens.shape[1] for _ in range(unshuffled.batches_per_epoch)]
    assert widths == sorted(widths, reverse=True)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("before", [0, 3, 9, 27])
def test_a_saved_place_gives_exactly_the_same_batches(
    corpus: str, encoder: ChatEncoder, before: int, packed: bool
) -> None:
    cfg = config(corpus, val_set_size=0, sample_packing=packed, sequence_len=64)
    dataset = load_datasets(cfg, encoder)[0]
    loader = BatchLoader(dataset, 2 if packed else 7, seed=3)
    for _ in range(before):
        next(loader)
    state = json.loads(json.dumps(loader.state_dict()))
    expected = [next(loader) for _ in range(20)]
    fresh = BatchLoader(dataset, loader.micro_batch_size, seed=3)
    next(fresh)
    fresh.load_state_dict(state)
    assert all(same(left, next(fresh)) for left in expected)
    assert fresh.epoch == loader.epoch
    for changed in ({"sequence_len": 65}, {"sample_packing": False}) if packed else ():
        other = BatchLoader(load_datasets(cfg.model_copy(update=changed), encoder)[0], 2, seed=3)
        with pytest.raises(DataError, match="changed since the checkpoint: packed rows"):
            other.load_state_dict(state)


def test_a_place_in_other_data_is_refused(
    dataset: EncodedDataset, tmp_path: Path, encoder: ChatEncoder
) -> None:
    state = BatchLoader(dataset, 7, seed=3).state_dict()
    with pytest.raises(DataError, match="changed since the checkpoint: seed, micro_batch_size"):
        BatchLoader(dataset, 6, seed=4).load_state_dict(state)
    path = write(tmp_path / "other.jsonl", *[record(f"q{n}", "C") for n in range(60)])
    other = load_datasets(config(path, val_set_size=0), encoder)[0]
    with pytest.raises(DataError, match="changed since the checkpoint: data"):
        BatchLoader(other, 7, seed=3).load_state_dict(state)
    with pytest.raises(DataError, match="the data set has no conversation"):
        BatchLoader(EncodedDataset([], dataset.report), 2, seed=0)


# -- packed
# -------------------------------------------------------------------------------------------


def test_packed_rows_hold_every_conversation_once_in_every_epoch(
    corpus: str, encoder: ChatEncoder
) -> None:
    train, _ = load_datasets(
        config(corpus, sample_packing=True, sequence_len=128, val_set_size=0.1), encoder
    )
    loader = BatchLoader(train, 2, seed=3)
    assert train.tokens / (128 * loader.rows_per_epoch) > 0.9
    assert loader.rows_per_epoch < len(train) / 2
    epochs = []
    for number in range(3):
        assert loader.epoch == number
        positions = loader.positions_per_epoch
        batches = [next(loader) for _ in range(loader.batches_per_epoch)]
        assert sorted(r for b in batches for r in b.records) == sorted(
            e.source for e in train.examples
        )
        assert sum(b.tokens.shape[0] for b in batches) == loader.rows_per_epoch
        assert max(b.tokens.shape[1] for b in batches) <= 128
        assert sum(b.tokens.numel() for b in batches) == positions
        epochs.append([b.records for b in batches])
    assert epochs[0] != epochs[1] != epochs[2]


def test_loaders_side_by_side_give_out_what_one_does_and_stay_at_the_same_place(
    dataset: EncodedDataset,
) -> None:
    alone = BatchLoader(dataset, 4, seed=1)
    beside = [BatchLoader(dataset, 4, seed=1, rank=rank, size=3) for rank in range(3)]
    for _ in range(12):  # 36 batches of 15 in an epoch
        for loader in beside:
            assert same(next(loader), next(alone))
        assert all(loader.state_dict() == alone.state_dict() for loader in beside)
    beside[2].load_state_dict(alone.state_dict())  # as written by rank 0
    next(alone), next(alone)
    assert same(next(beside[2]), next(alone))
