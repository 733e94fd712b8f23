"""Checkpoints are whole or not there: interrupted, failing and damaged writes, retention."""

import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from medusa_train.checkpoint.store import CheckpointStore
from medusa_train.errors import CheckpointError
from tests.full_disk import full_disk


def state(step: int) -> dict[str, Any]:
    shared = torch.full((2, 3), float(step))
    return {
        "draft": {
            "blocks.0.weight": torch.arange(40_000, dtype=torch.float32) + step,
            "alias": shared,
        },
        "engine": {
            "optimizer": {
                "state": {0: {"step": torch.tensor(float(step)), "m": shared.t()}},
                "tied": shared,
            }
        },
        "run": {"step": step, "losses": [0.1, 0.2], "betas": (0.9, 0.95)},
    }


def assert_is(loaded: dict[str, Any], step: int) -> None:
    wanted = state(step)
    assert loaded["run"] == wanted["run"]
    for name, tensor in wanted["draft"].items():
        assert torch.equal(loaded["draft"][name], tensor)
    inner = loaded["engine"]["optimizer"]
    assert torch.equal(inner["state"][0]["m"], wanted["engine"]["optimizer"]["state"][0]["m"])
    assert inner["state"][0]["step"].shape == ()
    assert torch.equal(inner["tied"], wanted["engine"]["optimizer"]["tied"])


def test_round_trip(tmp_path: Path) -> None:
    path = CheckpointStore(tmp_path).save(7, state(7))
    assert path == tmp_path / "checkpoints" / "step-7"
    assert sorted(p.name for p in path.iterdir()) == [
        "draft.safetensors",
        "engine.safetensors",
        "manifest.json",
        "state.json",
    ]
    assert_is(CheckpointStore(tmp_path).load(path), 7)


@pytest.mark.parametrize(
    ("limit", "kept"), [(None, [9, 80, 100, 200]), (2, [100, 200]), (1, [200])]
)
def test_retention_keeps_the_newest(tmp_path: Path, limit: int | None, kept: list[int]) -> None:
    store = CheckpointStore(tmp_path, limit)
    assert store.latest() is None
    for step in (9, 80, 100, 200):
        store.save(step, {"run": {"step": step}})
    assert store.steps() == kept
    assert len(list(store.root.iterdir())) == len(kept)
    assert store.latest() == store.root / "step-200"  # the highest step, not the last name


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.root.iterdir())


@pytest.mark.parametrize("links", [True, False])
def test_the_best_weights_outlive_their_checkpoint_and_take_no_space_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    if not links:  # the file system has none
        monkeypatch.setattr(os, "link", Mock(side_effect=OSError))
    store = CheckpointStore(tmp_path, save_total_limit=1)
    store.save(1, state(1), best=1)
    files = [store.root / name / "draft.safetensors" for name in ("step-1", "best-1")]
    assert (files[0].stat().st_ino == files[1].stat().st_ino) == links
    store.save(2, state(2), best=1)
    store.save(3, state(3), best=1)
    assert names(store) == ["best-1", "step-3"]
    best = store.best(1)
    assert best is not None
    loaded = store.load(best)
    assert set(loaded) == {"draft"}
    assert torch.equal(loaded["draft"]["alias"], state(1)["draft"]["alias"])
    store.save(4, state(4), best=4)
    assert names(store) == ["best-4", "step-4"]


def test_best_weights_of_the_checkpoint_to_resume_from_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    weights = {"draft": state(1)["draft"]}
    store.save_best(1, weights)
    store.save(2, state(2), best=1)
    store.save_best(3, weights, keep={1})
    store.save_best(4, weights, keep={1})
    assert names(store) == ["best-1", "best-4", "step-2"]
    store.save(5, state(5), best=4)
    assert names(store) == ["best-4", "step-2", "step-5"]


def test_best_weights_that_only_a_checkpoint_holds_are_kept(tmp_path: Path) -> None:
    """The run was killed between the checkpoint and a copy of its best weights."""
    store = CheckpointStore(tmp_path, save_total_limit=1)
    store.save(1, state(1))
    for step in (2, 3):
        store.save(step, state(step), best=1)
    assert store.steps() == [1, 3]
    assert store.best(1) == store.root / "step-1"
    assert store.best(2) is None


def test_a_future_format_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = store.save(1, state(1))
    (path / "manifest.json").write_text(
        (path / "manifest.json").read_text().replace('"format": 1', '"format": 2')
    )
    with pytest.raises(CheckpointError, match="format 2"):
        store.load(path)


def test_retention_keeps_the_checkpoint_just_written(tmp_path: Path) -> None:
    """A run that went back to an earlier checkpoint must not lose the one it saves now."""
    store = CheckpointStore(tmp_path)
    store.save(10, {"run": {}})
    store.save(20, {"run": {}})
    assert store.load(CheckpointStore(tmp_path, 1).save(5, {"run": {"step": 5}}))["run"] == {
        "step": 5
    }


@pytest.mark.parametrize("after", [0, 100, 4096])
def test_a_full_disk_leaves_the_previous_checkpoint_usable(tmp_path: Path, after: int) -> None:
    """0 fails in state.json, 4096 in the tensors, 100 in either."""
    store = CheckpointStore(tmp_path, 1)
    good = store.save(1, state(1))
    with (
        full_disk(after),
        pytest.raises(CheckpointError, match=r"could not write the checkpoint of step 2") as caught,
    ):
        store.save(2, state(2))
    assert str(good) in str(caught.value)
    assert re.search(r"KiB needed, [\d,.]+ \wiB free", str(caught.value))
    with full_disk(after), pytest.raises(CheckpointError):
        store.save(1, state(9))  # in place of itself
    assert [p.name for p in store.root.iterdir()] == ["step-1"]
    assert store.latest() == good
    assert_is(store.load(good), 1)
    assert_is(store.load(store.save(2, state(2))), 2)  # and with room again the run goes on


def test_what_cannot_be_saved_touches_no_disk(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        CheckpointStore(tmp_path).save(1, {"run": {"f": print}})
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(CheckpointError, match="no earlier one"):
        CheckpointStore(tmp_path).save(1, state(1))


def test_half_written_directories_are_ignored_and_cleared(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    good = store.save(1, state(1))
    shutil.copytree(good, store.root / ".tmp-step-2")  # killed before the rename
    (store.root / "step-3").mkdir()  # a copy that broke off
    shutil.copy(good / "draft.safetensors", store.root / "step-3")
    assert store.latest() == good
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        store.load(store.root / "step-3")
    (store.root / ".tmp-best-2").mkdir()
    store.save(4, state(4))
    assert names(store) == ["step-1", "step-3", "step-4"]


def test_a_replaced_checkpoint_survives_a_crash_between_the_renames(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = store.save(5, state(5))
    path.rename(store.root / ".old-step-5")
    assert CheckpointStore(tmp_path).latest() == path
    assert_is(store.load(path), 5)
    best = store.save_best(5, {"draft": state(5)["draft"]})
    best.rename(store.root / ".old-best-5")
    assert store.best(5) == best


@pytest.mark.parametrize("name", ["draft.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("how", ["cut", "flip", "empty", "gone"])
def test_damage_is_named_with_the_file(tmp_path: Path, name: str, how: str) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, state(1))
    path = store.save(2, state(2))
    content = (path / name).read_bytes()
    if how == "gone":
        (path / name).unlink()
    else:
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 0x15]) + content[middle + 1 :]
        (path / name).write_bytes({"cut": content[:-3], "flip": flipped, "empty": b""}[how])
    with pytest.raises(CheckpointError) as caught:
        store.load(path)
    assert name in str(caught.value)
    assert "step-1" in str(caught.value)
    assert_is(store.load(store.root / "step-1"), 1)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="tells files by /proc")
def test_everything_is_flushed_before_it_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Order on disk: every file and the directory synced, then the rename, then the parent."""
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def seen_fsync(handle: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    def seen_rename(self: Path, target: Path) -> Path:
        events.append("rename")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(Path, "rename", seen_rename)
    CheckpointStore(tmp_path).save(1, state(1))
    at = events.index("rename")
    assert set(events[:at]) >= {
        "state.json",
        "draft.safetensors",
        "engine.safetensors",
        "manifest.json",
        ".tmp-step-1",
    }
    assert events[at + 1 :] == ["checkpoints"]


def save_until_killed(output_dir: Path, steps: int) -> None:
    """In a child process: save one checkpoint after the other, and write a byte to the pipe `steps`
    after each.
    """
    try:
        torch.set_num_threads(1)  # threads of the parent do not exist here
        store = CheckpointStore(output_dir, 2)
        for step in range(1, 255):
            store.save(
                step, {"draft": {"w": torch.full((200_000,), float(step))}, "run": {"step": step}}
            )
            os.write(steps, bytes([step]))
    finally:
        os._exit(1)


def test_sigkill_at_any_moment_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    for attempt in range(4):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            save_until_killed(tmp_path, writing)
        os.close(writing)
        for _ in range(3 + attempt):
            (last,) = os.read(reading, 1)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        store = CheckpointStore(tmp_path, 2)
        path = store.latest()
        assert path is not None
        loaded = store.load(path)
        step = loaded["run"]["step"]
        assert step >= last
        assert torch.equal(loaded["draft"]["w"], torch.full((200_000,), float(step)))
        shutil.rmtree(tmp_path / "checkpoints")


def test_the_error_for_a_damaged_checkpoint_says_what_to_do(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = store.save(1, {"draft": {"w": torch.ones(4)}})
    damaged = path / "draft.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\0")
    with pytest.raises(CheckpointError, match="copy this one again, or start a new run"):
        store.load(path)
    store.save(2, {"draft": {"w": torch.ones(4)}})
    with pytest.raises(CheckpointError, match="step-2; resume_from_checkpoint=PATH resumes"):
        store.load(path)


def test_a_process_beside_one_that_verifies_reads_only_what_it_uses(tmp_path: Path) -> None:
    def resident() -> int:
        (line,) = [
            line for line in Path("/proc/self/status").read_text().split("\n") if "VmRSS" in line
        ]
        return int(line.split()[1]) << 10

    size = 64 << 20
    store = CheckpointStore(tmp_path)
    path = store.save(1, {"engine": {"m": torch.ones(size // 4)}, "draft": {"w": torch.ones(4)}})
    before = resident()
    loaded = store.load(path, verify=False)
    assert resident() - before < size // 8
    assert loaded["engine"]["m"][-3:].sum() == 3  # a page of it
    assert resident() - before < size // 8
    assert set(store.load(path, parts={"draft", "student"})) == {"draft"}
    damaged = path / "engine.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="truncated"):
        store.load(path, verify=False)
    assert store.load(path, parts={"draft"})["draft"]["w"].sum() == 4
