import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx
import pyarrow
import pyarrow.parquet
import pytest

from medusa_train.config.paths import PROJECT_ROOT
from medusa_train.config.schema import DatasetConfig, TrainConfig
from medusa_train.data import sources
from medusa_train.data.conversation import REASONING_TAGS
from medusa_train.data.read_chats import ReadResult
from medusa_train.data.record_files import parquet_records
from medusa_train.data.sources import HubSplit, LocalFiles, open_prompts, open_source
from medusa_train.data.tokenize_datasets import DatasetReader, open_datasets
from medusa_train.errors import ConfigError, DataError
from medusa_train.hub import FetchError

RECORD = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
LINE = json.dumps(RECORD) + "\n"
SHAREGPT_REPO, SHAREGPT_FILE = (
    "Aeala/ShareGPT_Vicuna_unfiltered",
    "ShareGPT_V4.3_unfiltered_cleaned_split.json",
)


def read_source(source: DatasetConfig, *, skip_bad: bool = False) -> ReadResult:
    encoder: Any = SimpleNamespace(
        template=SimpleNamespace(reasoning_tags=REASONING_TAGS, variables=())
    )
    return DatasetReader(source, open_source(source), encoder, skip_bad).read()


def test_a_file_and_a_directory_of_files(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text(LINE * 2)
    (tmp_path / "a.json").write_text(json.dumps([RECORD]))
    for name in ("notes.md", "b.settings.json", "b.dropped.jsonl", "._b.jsonl"):
        (tmp_path / name).write_text("not read")
    one = read_source(DatasetConfig(path=str(tmp_path / "b.jsonl")))
    assert [c.source for c in one.conversations] == [
        f"{tmp_path}/b.jsonl:1",
        f"{tmp_path}/b.jsonl:2",
    ]
    assert [
        c.source.rpartition("/")[2]
        for c in read_source(DatasetConfig(path=str(tmp_path))).conversations
    ] == [
        "a.json:record 1",
        "b.jsonl:1",
        "b.jsonl:2",
    ]
    (tmp_path / "a.json").write_text("x\n" + LINE)
    (tmp_path / "b.jsonl").write_text(LINE + "y\n")
    result = read_source(DatasetConfig(path=str(tmp_path)), skip_bad=True)
    assert (len(result.conversations), len(result.report.skipped)) == (2, 2)
    (tmp_path / "dataset_info.json").write_text('{"a": 1}')
    (tmp_path / "c.jsonl").write_text(LINE)
    result = read_source(DatasetConfig(path=str(tmp_path)), skip_bad=True)
    assert (len(result.conversations), len(result.report.skipped)) == (3, 2)
    (tmp_path / "empty.jsonl").write_text("")
    result = read_source(DatasetConfig(path=str(tmp_path)), skip_bad=True)
    assert (len(result.conversations), len(result.report.skipped)) == (3, 2)
    assert result.report.notes == [f"{tmp_path}/empty.jsonl: no records"]
    with pytest.raises(DataError, match=r"/empty\.jsonl: no conversation to read"):
        read_source(DatasetConfig(path=str(tmp_path / "empty.jsonl")), skip_bad=True)
    for path in (tmp_path, tmp_path / "b.jsonl"):
        with pytest.raises(ConfigError, match="name cannot be used with"):
            open_source(DatasetConfig(path=str(path), split="test", name="main"))
        # train is all of a file, as `datasets` has it and as YAMLs of Axolotl say
        assert open_source(DatasetConfig(path=str(path), split="train")) == open_source(
            DatasetConfig(path=str(path))
        )


@pytest.mark.parametrize(
    "name", ["data/seeds/none.jsonl", "none.json", "./none", "/none", "~/none", "a.parquet"]
)
def test_a_mistyped_path_is_not_looked_for_on_the_hub(name: str) -> None:
    with pytest.raises(DataError, match="no such file or directory"):
        read_source(DatasetConfig(path=name))


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no \.jsonl, .* or \.parquet file in this directory"):
        read_source(DatasetConfig(path=str(tmp_path)))
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(DataError, match="only JSON and JSONL"):
        read_source(DatasetConfig(path=str(tmp_path / "a.csv")))
    (tmp_path / "a.parquet").write_text("x")
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read as parquet: "):
        read_source(DatasetConfig(path=str(tmp_path / "a.parquet")))


def test_parquet_files_are_read_row_by_row(tmp_path: Path) -> None:
    bad = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}]}
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([RECORD, bad, RECORD]), tmp_path / "a.parquet"
    )
    source = DatasetConfig(path=str(tmp_path / "a.parquet"))
    with pytest.raises(DataError, match=r"a\.parquet:2: turn 2 \(assistant\) is empty"):
        read_source(source)
    result = read_source(source, skip_bad=True)
    assert [c.source for c in result.conversations] == [
        f"{tmp_path}/a.parquet:1",
        f"{tmp_path}/a.parquet:3",
    ]
    assert [m.as_dict() for m in result.conversations[1].messages] == RECORD["messages"]


def test_a_path_with_brackets_is_no_pattern(tmp_path: Path) -> None:
    for name, text in (("a[1]", "mine"), ("a1", "other")):
        (tmp_path / name).mkdir()
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist([{"prompt": text}] * 2000), tmp_path / name / "x.parquet"
        )
    assert list(parquet_records(tmp_path / "a[1]" / "x.parquet")) == [{"prompt": "mine"}] * 2000


def test_a_fingerprint_follows_the_contents(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(LINE)
    before = os.stat(path)
    first = open_source(DatasetConfig(path=str(path))).fingerprint()
    assert open_source(DatasetConfig(path=str(path))).fingerprint() == first
    path.write_text(LINE.replace('"q"', '"r"'))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert open_source(DatasetConfig(path=str(path))).fingerprint() != first


def test_a_fingerprint_follows_the_end_of_a_large_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    digests = set()
    for end in ("a", "b"):
        path.write_text("\n" * (1 << 22) + end)
        digests.add(open_source(DatasetConfig(path=str(path))).fingerprint())
    assert len(digests) == 2


def opened(path: str, **keys: str) -> LocalFiles | HubSplit:
    return open_source(DatasetConfig(path=path, **keys))


def test_sharegpt_is_found_locally_before_the_hub_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[tuple[str, str]] = []

    def fetch(repo: str, filename: str, on_fetch: object) -> Path:
        asked.append((repo, filename))
        return tmp_path / "cached.json"

    monkeypatch.setattr(sources, "fetch_dataset_file", fetch)
    (tmp_path / "cached.json").write_text(LINE)
    assert opened("sharegpt") == LocalFiles((tmp_path / "cached.json",), is_public=True)
    assert asked == [(SHAREGPT_REPO, SHAREGPT_FILE)]
    for place in (
        "data/sharegpt/" + SHAREGPT_FILE,
        "data/seeds/sharegpt.json",
        "data/seeds/sharegpt.jsonl",
    ):
        path = Path(place)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(LINE)
        assert opened("sharegpt") == LocalFiles((path,), is_public=True)
    (tmp_path / "sharegpt").mkdir()
    (tmp_path / "sharegpt" / "a.jsonl").write_text(LINE)
    assert opened("sharegpt") == LocalFiles((Path("sharegpt/a.jsonl"),))  # any local path
    (tmp_path / "sharegpt" / "a.jsonl").unlink()
    (tmp_path / "sharegpt").rmdir()
    (tmp_path / "sharegpt.json").write_text(LINE)
    monkeypatch.setenv(sources.SEED_DIR_VARIABLE, str(tmp_path))
    assert opened("sharegpt") == LocalFiles((tmp_path / "sharegpt.json",), is_public=True)
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("sharegpt", f"{SHAREGPT_REPO} ({SHAREGPT_FILE}) to data/seeds/sharegpt.json "),
        (
            "ultrachat",
            "HuggingFaceH4/ultrachat_200k (the split train_sft) to data/seeds/ultrachat ",
        ),
    ],
)
def test_the_message_says_where_to_put_what_cannot_be_fetched(
    name: str, advice: str, monkeypatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise FetchError("no network")

    monkeypatch.setattr(sources, "fetch_dataset_file", refuse)
    monkeypatch.setattr(sources, "_load_split", refuse)
    with pytest.raises(
        DataError, match="could not be fetched from the Hugging Face hub: no network"
    ) as error:
        opened(name)
    assert f"Download https://huggingface.co/datasets/{advice}" in str(error.value)


def test_hub_names_are_loaded_with_their_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str | None, str]] = []
    rows = [RECORD]

    def load(path: str, name: str | None, split: str, data_files: None) -> list[object]:
        asked.append((path, name, split))
        return rows

    monkeypatch.setattr("datasets.load_dataset", load)
    split = HubSplit("HuggingFaceH4/ultrachat_200k[train_sft]", rows, is_public=True)
    assert opened("ultrachat") == split
    opened("somebody/chats", split="test")
    opened("somebody/chats", name="main")
    assert asked[1:] == [("somebody/chats", None, "test"), ("somebody/chats", "main", "train")]
    monkeypatch.chdir(tmp_path)
    tiny = LocalFiles((PROJECT_ROOT / "data/seeds/tiny.jsonl",), is_public=True)
    assert opened("tiny") == tiny


def test_a_copy_of_ultrachats_whole_repository_is_read_for_its_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files have a digest behind the number; a directory of files without a split is read
    whole.
    """
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "data" / "seeds" / "ultrachat"
    (directory / "data").mkdir(parents=True)
    files = {}
    for split in ("train_sft", "train_gen", "test_sft", "test_gen"):
        files[split] = directory / "data" / f"{split}-00000-of-00003-a3ecf927.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([RECORD]), files[split])

    def read_paths(**keys: str) -> list[str]:
        source = opened("ultrachat", **keys)
        assert isinstance(source, LocalFiles)
        return [path.name for path in source.paths]

    assert read_paths() == [files["train_sft"].name]
    missing = "2 of 3 files train_sft-N-of-3.parquet are missing"
    assert missing in " ".join(opened("ultrachat").notes)
    assert read_paths(split="test_gen") == [files["test_gen"].name]
    (directory / "mine.jsonl").write_text(LINE)  # files come before those in data/
    assert read_paths() == ["mine.jsonl"]
    shutil.rmtree(directory / "data")
    assert read_paths() == ["mine.jsonl"]


def test_an_odd_record_stops_no_public_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Users cannot mend it; their own files are refused."""
    odd = {"conversations": [{"from": "human", "value": None}]}
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([odd, RECORD]))
    monkeypatch.setenv(sources.SEED_DIR_VARIABLE, str(tmp_path))
    rows = [odd, RECORD]
    monkeypatch.setattr("datasets.load_dataset", lambda *names, **keys: rows)

    def read(path: str) -> ReadResult:
        entry = DatasetConfig(path=path)
        cfg = TrainConfig(base_model="m", datasets=[entry])
        template = SimpleNamespace(reasoning_tags=REASONING_TAGS, variables=())
        encoder = Mock(**{"with_settings.return_value.template": template})
        (reader,) = open_datasets(cfg, encoder)
        return reader.read()

    for name in ("sharegpt", "somebody/chats"):
        result = read(name)
        assert len(result.conversations) == 1
        (skipped,) = result.report.skipped
        assert "turn 1: 'value' must be a string" in skipped
    with pytest.raises(DataError, match="1 invalid record"):
        read(str(path))


def test_prompts_of_public_names_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny").mkdir()  # a model, for instance
    monkeypatch.chdir(tmp_path)
    tiny = LocalFiles((PROJECT_ROOT / "data/seeds/tiny.jsonl",), is_public=True)
    assert open_prompts("tiny", None) == tiny
    with pytest.raises(
        DataError,
        match=r"nowhere: no such file, and no public data set of that name \(tiny, sharegpt",
    ):
        open_prompts("nowhere", None)


def test_prompts_may_be_a_configuration_of_a_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SmolTalk has several; in a copy of its repository they are directories in `data/`."""
    load = Mock(return_value=[RECORD])
    monkeypatch.setattr("datasets.load_dataset", load)
    open_prompts("somebody/smoltalk", None, configuration="all")
    load.assert_called_once_with("somebody/smoltalk", "all", split="train", data_files=None)
    for name in ("all", "rewrite"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "train.jsonl").write_text(LINE)
    source = open_prompts(str(tmp_path), None, configuration="all")
    assert source == LocalFiles((tmp_path / "data" / "all" / "train.jsonl",))
    with pytest.raises(DataError, match="set `path` to one of its directories data/all, data/rew"):
        open_prompts(str(tmp_path), None)


def test_a_hub_that_cannot_be_reached_is_told_clearly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "hub_is_unreachable", lambda: True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError) as error:
        open_source(DatasetConfig(path="nobody/nothing"))
    assert str(error.value) == (
        "nobody/nothing: no such file or directory; there is no network (or HF_HUB_OFFLINE is set),"
        " and it is not in the hub's cache: where there is one, run `hf download nobody/nothing"
        " --repo-type dataset --local-dir data/nothing`, then set path: data/nothing"
    )


def test_a_broken_connection_is_told_clearly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's client passes on errors of HTTP libraries, which derive from Exception alone."""
    monkeypatch.setattr("datasets.load_dataset", Mock(side_effect=httpx.ReadError("reset")))
    with pytest.raises(DataError, match=r"cannot be loaded from the hub: reset"):
        open_source(DatasetConfig(path="nobody/nothing"))
    monkeypatch.setattr("datasets.load_dataset", Mock(side_effect=ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        open_source(DatasetConfig(path="nobody/nothing"))


def paths_of(**keys: Any) -> list[str]:
    source = open_source(DatasetConfig(**keys))
    assert isinstance(source, LocalFiles)
    return [path.name for path in source.paths]


def test_data_files_of_a_directory_are_not_those_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    for directory in (tmp_path, tmp_path / "there"):
        (directory / "a.jsonl").write_text(LINE)
    monkeypatch.chdir(tmp_path)
    source = open_source(DatasetConfig(path=str(tmp_path / "there"), data_files=["a.jsonl"]))
    assert source == LocalFiles((tmp_path / "there" / "a.jsonl",))


def test_axolotls_format_names_read_their_data_files_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.jsonl", "c.json"):
        (tmp_path / name).write_text(LINE)
    for builder in ("json", "csv", "parquet", "text"):
        with pytest.raises(ConfigError, match="names a format, not data"):
            open_source(DatasetConfig(path=builder))
    with pytest.raises(ConfigError, match="csv is not supported"):
        open_source(DatasetConfig(path="csv", data_files=["a.jsonl"]))
    assert paths_of(path="json", data_files="b.jsonl") == ["b.jsonl"]
    assert paths_of(path="json", data_files=["*.jsonl", "a.jsonl"], ds_type="json") == [
        "a.jsonl",
        "b.jsonl",
    ]
    assert paths_of(path=str(tmp_path), data_files=["c.json"]) == ["c.json"]
    with pytest.raises(DataError, match=r"none\.jsonl: no such file"):
        open_source(DatasetConfig(path="json", data_files=["none.jsonl"]))
    with pytest.raises(ConfigError, match="not of the format parquet"):
        open_source(DatasetConfig(path="a.jsonl", ds_type="parquet"))


def test_a_split_reads_its_files_and_names_the_others(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (tmp_path / "dataset_infos.json").write_text("{}")
    for name in ("train-00000-of-00002.JSONL", "train-00001-of-00002.JSONL", "test.jsonl"):
        (data / name).write_text(LINE)
    trained = ["train-00000-of-00002.JSONL", "train-00001-of-00002.JSONL"]
    assert paths_of(path=str(tmp_path)) == trained
    assert paths_of(path=str(tmp_path), split="train") == trained
    assert paths_of(path=str(tmp_path), split="test") == ["test.jsonl"]
    assert open_source(DatasetConfig(path=str(tmp_path))).notes == (
        f"{tmp_path}: 2 not read: dataset_infos.json, test.jsonl",
    )
    with pytest.raises(ConfigError, match=r"no files of the split validation.*test, train"):
        open_source(DatasetConfig(path=str(tmp_path), split="validation"))
    (tmp_path / "other.jsonl").write_text(LINE)
    (tmp_path / "dev.jsonl").write_text(LINE)
    assert paths_of(path=str(tmp_path)) == ["other.jsonl"]
    assert paths_of(path=str(tmp_path), name="data", split="test") == ["test.jsonl"]


def test_splits_of_one_kind_have_to_be_named(tmp_path: Path) -> None:
    for split in ("train_sft", "train_gen", "test_sft"):
        (tmp_path / f"{split}-00000-of-00001.jsonl").write_text(LINE)
    with pytest.raises(ConfigError, match="test_sft, train_gen, train_sft"):
        open_source(DatasetConfig(path=str(tmp_path)))
    assert paths_of(path=str(tmp_path), split="train_sft") == ["train_sft-00000-of-00001.jsonl"]


def test_splits_of_any_name_can_be_named(tmp_path: Path) -> None:
    """As those of Nemotron's post-training data."""
    for split in ("chat", "math"):
        (tmp_path / f"{split}-00000-of-00001.jsonl").write_text(LINE)
    assert paths_of(path=str(tmp_path), split="math") == ["math-00000-of-00001.jsonl"]
    assert len(paths_of(path=str(tmp_path))) == 2
    with pytest.raises(ConfigError, match=r"no files of the split code; .* \(chat, math\)"):
        open_source(DatasetConfig(path=str(tmp_path), split="code"))


def test_suffixes_in_capitals_are_read(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([RECORD]), tmp_path / "P.PARQUET")
    (tmp_path / "A.JSONL").write_text(LINE)
    assert len(read_source(DatasetConfig(path=str(tmp_path))).conversations) == 2
    assert len(read_source(DatasetConfig(path=str(tmp_path / "P.PARQUET"))).conversations) == 1


def test_what_save_to_disk_wrote_is_read(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_list([RECORD, RECORD])
    rows.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": rows, "test": rows.select([0])}).save_to_disk(
        str(tmp_path / "splits")
    )
    assert len(read_source(DatasetConfig(path=str(tmp_path / "one"))).conversations) == 2
    source = open_source(DatasetConfig(path=str(tmp_path / "splits")))
    assert source.notes == (f"{tmp_path / 'splits'}: splits not read: test",)
    test = DatasetConfig(path=str(tmp_path / "splits"), split="test")
    assert len(read_source(test).conversations) == 1
    with pytest.raises(ConfigError, match="no split dev"):
        open_source(DatasetConfig(path=str(tmp_path / "splits"), split="dev"))


def test_what_lies_beside_the_data_is_named(tmp_path: Path) -> None:
    """Hidden files, shards that are missing, and files of one name."""
    for name in (".hidden.jsonl", "._a.jsonl", "bad\nname.txt"):
        (tmp_path / name).write_text(LINE)
    for name in ("a.jsonl", "a.json", "b-00000-of-00003.jsonl"):
        (tmp_path / name).write_text(LINE)
    assert open_source(DatasetConfig(path=str(tmp_path))).notes == (
        f"{tmp_path}: 2 not read: 'bad\\nname.txt', .hidden.jsonl",
        f"{tmp_path}: 2 of 3 files b-N-of-3.jsonl are missing",
        "a.json and a.jsonl: all are read; name one of them in data_files if they hold the same"
        " records",
    )


@pytest.mark.parametrize(
    "name", ["run [v1]", "a*b", "[x", "what?", "a]b", "{1}", "~x", "a[!b]/[c]"]
)
def test_a_pattern_below_a_directory_with_signs_of_patterns_in_its_name(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "outer [1]" / name
    (directory / "deep").mkdir(parents=True)
    for file in ("a.jsonl", "b.jsonl", "c[1].jsonl", "c[2].jsonl", "deep/d.jsonl"):
        (directory / file).write_text(LINE)

    def found(path: str, pattern: str) -> list[str]:
        source = open_source(DatasetConfig(path=path, data_files=[pattern]))
        assert isinstance(source, LocalFiles)
        return [str(file.relative_to(directory)) for file in source.paths]

    here = f"{directory}/"
    everything = ["a.jsonl", "b.jsonl", "c[1].jsonl", "c[2].jsonl"]
    for path, before in (
        ("json", here),
        (str(directory), ""),
        (str(tmp_path), f"outer [1]/{name}/"),
    ):
        assert found(path, f"{before}*.jsonl") == everything
        assert found(path, f"{before}[ab].jsonl") == ["a.jsonl", "b.jsonl"]
        assert found(path, f"{before}c[1]*") == ["c[1].jsonl"]
        assert found(path, f"{before}c[2].jsonl") == ["c[2].jsonl"]
        assert found(path, f"{before}**/*.jsonl") == [*everything, "deep/d.jsonl"]
    monkeypatch.chdir(tmp_path / "outer [1]")
    source = open_source(DatasetConfig(path="json", data_files=[f"./{name}/*.jsonl"]))
    assert len(source.parts()) == 4


def test_a_split_beside_data_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(LINE)
    with pytest.raises(ConfigError, match="split cannot be used together with data_files"):
        open_source(DatasetConfig(path=str(tmp_path), split="test", data_files=["a.jsonl"]))


@pytest.mark.parametrize("name", ["state.json", "dataset_dict.json", "metadata.json"])
@pytest.mark.parametrize(
    "content",
    ['{"step": 5}', '{\n "splits": "train"\n}', '{"_data_files": null, "splits": {}}', "{}"],
)
def test_a_file_about_the_data_of_another_program_is_not_read(
    tmp_path: Path, name: str, content: str
) -> None:
    (tmp_path / "chats.jsonl").write_text(LINE)
    (tmp_path / name).write_text(content)
    source = open_source(DatasetConfig(path=str(tmp_path)))
    assert isinstance(source, LocalFiles)
    assert source.paths == (tmp_path / "chats.jsonl",)
    assert source.notes == (f"{tmp_path}: 1 not read: {name}",)


@pytest.mark.parametrize("name", ["state.json", "dataset_info.json", "metadata.json"])
@pytest.mark.parametrize("content", [LINE * 2, f"[{LINE}]"], ids=["lines", "array"])
def test_records_in_a_file_with_the_name_of_one_about_data_are_read(
    tmp_path: Path, name: str, content: str
) -> None:
    (tmp_path / name).write_text(content)
    assert len(read_source(DatasetConfig(path=str(tmp_path))).conversations) in (1, 2)


@pytest.mark.parametrize("content", ["[1]", "{", "{}", '{"splits": 5}', '{"splits": ["x"]}'])
def test_a_damaged_directory_of_save_to_disk_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "dataset_dict.json").write_text(content)
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "data-00000-of-00001.arrow").write_bytes(b"")
    with pytest.raises(DataError, match="cannot be read by load_from_disk"):
        open_source(DatasetConfig(path=str(tmp_path)))
