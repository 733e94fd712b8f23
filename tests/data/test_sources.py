import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from medusa_train.config.schema import DatasetConfig
from medusa_train.data.sources import open_source, read_source
from medusa_train.errors import ConfigError, DataError

RECORD = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
LINE = json.dumps(RECORD) + "\n"


def test_a_file_and_a_directory_of_files(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text(LINE * 2)
    (tmp_path / "a.json").write_text(json.dumps([RECORD]))
    (tmp_path / "notes.md").write_text("not read")
    one = read_source(DatasetConfig(path=str(tmp_path / "b.jsonl")))
    assert [c.source for c in one.conversations] == [f"{tmp_path}/b.jsonl:1", f"{tmp_path}/b.jsonl:2"]
    all_of_them = read_source(DatasetConfig(path=str(tmp_path)))
    assert [c.source.rpartition("/")[2] for c in all_of_them.conversations] == ["a.json:1", "b.jsonl:1", "b.jsonl:2"]


def test_bad_records_of_a_directory_are_gathered(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(LINE + "x\n")
    (tmp_path / "b.jsonl").write_text("y\n" + LINE)
    result = read_source(DatasetConfig(path=str(tmp_path)), skip_bad=True)
    assert len(result.conversations) == 2
    assert len(result.skipped) == 2


@pytest.mark.parametrize("name", ["data/seeds/none.jsonl", "none.json", "./none", "/none", "~/none", "a.parquet"])
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
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([RECORD, bad, RECORD]), tmp_path / "a.parquet")
    source = DatasetConfig(path=str(tmp_path / "a.parquet"))
    with pytest.raises(DataError, match=r"a\.parquet:2: turn 2 \(assistant\) is empty"):
        read_source(source)
    result = read_source(source, skip_bad=True)
    assert [c.source for c in result.conversations] == [f"{tmp_path}/a.parquet:1", f"{tmp_path}/a.parquet:3"]
    assert [m.as_dict() for m in result.conversations[1].messages] == RECORD["messages"]


def test_a_fingerprint_follows_the_contents(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(LINE)
    before = os.stat(path)
    first = open_source(DatasetConfig(path=str(path))).fingerprint()
    assert open_source(DatasetConfig(path=str(path))).fingerprint() == first
    path.write_text(LINE.replace('"q"', '"r"'))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert open_source(DatasetConfig(path=str(path))).fingerprint() != first


@pytest.mark.parametrize("keys", [{"split": "test"}, {"name": "main"}, {"split": "test", "name": "main"}])
def test_a_split_of_a_file_is_refused(tmp_path: Path, keys: dict[str, str]) -> None:
    (tmp_path / "a.jsonl").write_text(LINE)
    for path in (tmp_path, tmp_path / "a.jsonl"):
        with pytest.raises(ConfigError, match=f"{' and '.join(keys)} cannot be used with .* a local path"):
            open_source(DatasetConfig(path=str(path), **keys))


def test_the_split_train_of_a_file_is_all_of_it(tmp_path: Path) -> None:
    """As `datasets` has it, and as YAMLs of Axolotl say it beside files."""
    (tmp_path / "a.jsonl").write_text(LINE)
    source = open_source(DatasetConfig(path=str(tmp_path / "a.jsonl"), split="train"))
    assert source.fingerprint() == open_source(DatasetConfig(path=str(tmp_path / "a.jsonl"))).fingerprint()


@pytest.mark.parametrize("offline", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "https://nowhere.invalid"}])
def test_a_hub_that_cannot_be_reached_is_told_clearly(tmp_path: Path, offline: dict[str, str]) -> None:
    """At once, with no attempt on the network; in a process of its own, as libraries read their settings once."""
    program = (
        "from medusa_train.config.schema import DatasetConfig\n"
        "from medusa_train.data.sources import read_source\n"
        "from medusa_train.errors import DataError\n"
        "try:\n"
        "    read_source(DatasetConfig(path='nobody/nothing'))\n"
        "except DataError as error:\n"
        "    print(error)\n"
    )
    proxies = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HF_HUB_OFFLINE")
    environment = {name: value for name, value in os.environ.items() if name not in proxies}
    environment |= {"HF_HOME": str(tmp_path), **offline}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert "nobody/nothing: no such file or directory, and the hub has no data set of that name" in done.stdout
    assert "Couldn't reach 'nobody/nothing' on the Hub (OfflineModeIsEnabled)" in done.stdout
    assert "set it to the path of a JSONL file" in done.stdout
