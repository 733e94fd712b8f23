"""How many processes generate, and what each one gets."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from medusa_train.errors import ConfigError
from medusa_train.selfdistill import processes
from medusa_train.selfdistill.processes import (
    SMALL_MODEL_BYTES,
    choose_processes,
    divide,
    limit_processes,
    physical_cores,
    private_memory,
)

PAIRS = [frozenset({0, 4}), frozenset({1, 5}), frozenset({2, 6}), frozenset({3, 7})]


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four cores of two logical CPUs each, all of which may be used."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(processes, "physical_cores", lambda: PAIRS)
    monkeypatch.setattr(processes, "_cpu_quota", lambda: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)


@pytest.mark.parametrize(
    ("setting", "batch_size", "expected"), [("auto", 1, 1), ("auto", 7, 1), ("auto", 8, 2), ("auto", 64, 4), (3, 4, 3)]
)
@pytest.mark.usefixtures("four_cores")
def test_each_process_has_a_core_and_some_rows(setting: int, batch_size: int, expected: int) -> None:
    assert choose_processes(setting, batch_size) == expected  # type: ignore[arg-type]


@pytest.mark.usefixtures("four_cores")
def test_fewer_where_less_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # OMP_NUM_THREADS=2
    assert choose_processes("auto", 64) == 2
    monkeypatch.setattr(processes, "_cpu_quota", lambda: 1.0)
    assert choose_processes("auto", 64) == 1
    assert [share.cpus for share in divide(2, 8)] == [None, None]  # others with a quota see the same cores
    monkeypatch.undo()
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert choose_processes("auto", 64) == 1


def test_a_gpu_runs_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_processes("auto", 64) == choose_processes(1, 64) == 1
    with pytest.raises(ConfigError, match="a GPU runs one"):
        choose_processes(2, 64)


@pytest.mark.usefixtures("four_cores")
def test_cores_and_rows_are_divided() -> None:
    two = divide(2, 9)
    assert [(share.rows, share.threads) for share in two] == [(4, 2), (5, 2)]
    assert [share.cpus for share in two] == [PAIRS[0] | PAIRS[1], PAIRS[2] | PAIRS[3]]
    assert [(share.rows, share.threads, share.cpus) for share in divide(1, 9)] == [(9, 4, frozenset(range(8)))]
    six = divide(6, 16)  # more than cores
    assert sum(share.rows for share in six) == 16
    assert {(share.threads, share.cpus) for share in six} == {(1, None)}


def test_large_models_and_little_memory_mean_fewer() -> None:
    assert limit_processes(4, SMALL_MODEL_BYTES, 10, 1000) == 4
    assert limit_processes(4, SMALL_MODEL_BYTES + 1, 10, 1000) == 1
    assert limit_processes(4, 100, 300, 1000) == 3  # two more in 600 of the 1000 bytes
    assert limit_processes(4, 100, 3000, 1000) == 1
    assert limit_processes(4, 100, None, 1000) == limit_processes(4, 100, 3000, None) == 4


def test_cores_are_read_from_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cpu, siblings in {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3", 4: "4-5", 5: "4-5"}.items():
        (tmp_path / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(f"{siblings}\n")
    monkeypatch.setattr(processes, "_CPUS", tmp_path)
    monkeypatch.setattr(processes.os, "sched_getaffinity", lambda pid: {0, 1, 2, 4, 5, 9})
    assert physical_cores() == [frozenset({0, 2}), frozenset({1}), frozenset({4, 5}), frozenset({9})]
    monkeypatch.setattr(processes, "_QUOTA", tmp_path / "cpu.max")
    for text, quota in (("250000 100000\n", 2.5), ("max 100000\n", None)):
        (tmp_path / "cpu.max").write_text(text)
        assert processes._cpu_quota() == quota


def test_private_memory_grows_with_what_is_allocated() -> None:
    before = private_memory()
    # pages of its own: a tensor may get memory that an earlier test gave back to the allocator
    with mmap.mmap(-1, 20_000_000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        block.write(b"x" * len(block))
        after = private_memory()
    assert before is not None
    assert after is not None
    assert after - before > 15_000_000
