from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from medusa_train.data import sources as module
from medusa_train.data.sources import HubSplit, LocalFiles, open_seed_dataset
from medusa_train.errors import ConfigError, DataError
from medusa_train.selfdistill.prompts import read_prompts, short_name


def jsonl(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_tiny_is_the_shipped_file_and_a_path_is_itself(tmp_path: Path) -> None:
    tiny = open_seed_dataset("tiny")
    assert isinstance(tiny, LocalFiles)
    assert [path.name for path in tiny.paths] == ["tiny.jsonl"]
    assert len(read_prompts(tiny)) == 3000
    path = jsonl(tmp_path / "mine.jsonl", {"turns": ["a"]})
    assert open_seed_dataset(str(path)) == LocalFiles((path,))
    assert (short_name("sharegpt"), short_name(str(path))) == ("sharegpt", "mine")
    with pytest.raises(DataError, match="no such file, and no seed set of that name"):
        open_seed_dataset("nowhere")


def test_sharegpt_is_taken_from_its_place_then_from_the_hub_else_the_message_says_where_to_put_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "fetch_dataset_file", lambda repo, filename: None)
    monkeypatch.setattr(module, "hub_is_unreachable", lambda: False)
    notes: list[str] = []
    with pytest.raises(DataError, match=r"put it at data/seeds/sharegpt\.json"):
        open_seed_dataset("sharegpt", notes.append)
    assert "asking the Hugging Face hub" in notes[0]

    downloaded = jsonl(tmp_path / "cached.json", {"turns": ["a"]})
    monkeypatch.setattr(module, "fetch_dataset_file", lambda repo, filename: downloaded)
    assert open_seed_dataset("sharegpt") == LocalFiles((downloaded,))

    (tmp_path / "data" / "seeds").mkdir(parents=True)
    own = jsonl(tmp_path / "data" / "seeds" / "sharegpt.json", {"turns": ["a"]})
    assert open_seed_dataset("sharegpt") == LocalFiles((own.relative_to(tmp_path),))


@pytest.mark.parametrize("out_of_reach", [True, False])
def test_where_the_hub_is_out_of_reach_only_its_cache_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out_of_reach: bool
) -> None:
    asked: list[bool] = []

    def download(repo: str, filename: str, *, repo_type: str, local_files_only: bool) -> str:
        asked.append(local_files_only)
        raise OSError("nowhere")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "hub_is_unreachable", lambda: out_of_reach)
    monkeypatch.setattr("medusa_train.hub.hub_is_unreachable", lambda: out_of_reach)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    told: list[str] = []
    with pytest.raises(DataError, match="could not be fetched"):
        open_seed_dataset("sharegpt", told.append)
    assert asked == [out_of_reach]
    assert bool(told) is not out_of_reach


def test_ultrachat_names_its_split_and_where_to_put_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[tuple[str, str | None]] = []
    rows = HubSplit("ultra", [{"messages": [{"role": "user", "content": "hi"}]}])

    def hub(entry: SimpleNamespace) -> HubSplit:
        asked.append((entry.path, entry.split))
        if len(asked) > 1:
            raise DataError("nobody there")
        return rows

    monkeypatch.setattr(module, "hub_is_unreachable", lambda: True)
    monkeypatch.setattr(module, "open_source", hub)
    assert open_seed_dataset("ultrachat") == rows
    with pytest.raises(DataError, match=r"parquet files of the split train_sft .* put them into the directory data/"):
        open_seed_dataset("ultrachat")
    assert asked == [("HuggingFaceH4/ultrachat_200k", "train_sft")] * 2


def test_a_hub_name_is_asked_for_with_its_split_and_a_file_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "hub_is_unreachable", lambda: True)
    monkeypatch.setattr(module, "open_source", lambda entry: (entry.path, entry.split))
    assert open_seed_dataset("somebody/chats", split="test") == ("somebody/chats", "test")
    assert short_name("somebody/chats") == "chats"
    with pytest.raises(ConfigError, match="leave split out"):
        open_seed_dataset(str(jsonl(tmp_path / "mine.jsonl", {"turns": ["a"]})), split="test")


def test_a_directory_of_parquet_and_json_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    jsonl(tmp_path / "b.jsonl", {"id": "b", "turns": ["two"]})
    rows = [{"prompt_id": "x", "messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "1"}]}]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "a.parquet"))
    assert [seed.turns for seed in read_prompts(open_seed_dataset(str(tmp_path)))] == [("one",), ("two",)]
