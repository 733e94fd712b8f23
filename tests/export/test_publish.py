"""The directory of an export: what it replaces, and what a failure leaves."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from medusa_train import io
from medusa_train.checkpoint.resolve import resolve_model
from medusa_train.checkpoint.run_directory import TREE
from medusa_train.config.types import ExportTarget
from medusa_train.errors import CheckpointError
from medusa_train.export.publish import CHOICES, UNFINISHED
from medusa_train.export.write import export_run
from tests.full_disk import full_disk

TARGETS = ["reference", "reference-v2", "tgi", "vllm", "trtllm", "transformers", "merged"]


@pytest.mark.parametrize(
    ("to", "held"),
    [("merged", "thesis.txt"), ("tgi", "config.json"), ("tgi", ".env"), ("merged", None)],
)
def test_only_an_earlier_export_is_written_over(to, held, make_run, tmp_path):
    run = make_run()
    target = run if held is None else tmp_path
    before = sorted(run.rglob("*"))
    if held is not None:
        (tmp_path / held).write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(CheckpointError, match="holds other files that would be overwritten"):
        export_run(resolve_model(str(run), None, None), to, target)
    assert sorted(run.rglob("*")) == before
    assert held is None or "Llama" in (tmp_path / held).read_text()
    for _ in range(2):
        export_run(resolve_model(str(run), None, None), "tgi", tmp_path / "again")
    with pytest.raises(CheckpointError, match="holds other files"):  # another run's
        export_run(resolve_model(str(tmp_path / "again"), None, None), "tgi", run / "heads")


@pytest.mark.parametrize("to", TARGETS)
def test_a_full_disk_gives_a_message_and_a_repeat_works(
    make_run: Callable[..., Path], to: ExportTarget, tmp_path: Path
) -> None:
    run = make_run(shared=True, adapter=to == "merged")
    target = tmp_path / "disk" / "mine"
    paths = resolve_model(str(run), None, None)
    with full_disk(60_000), pytest.raises(CheckpointError) as caught:
        export_run(paths, to, target)
    assert str(caught.value).startswith(f"could not write the {'merged' if to == 'merged' else ''}")
    assert "File too large" in str(caught.value)
    assert not target.parent.exists()
    export_run(paths, to, target)
    assert not [path for path in target.iterdir() if path.name.startswith(".")]
    export_run(paths, to, target)


@pytest.mark.parametrize("to", TARGETS)
def test_an_export_that_was_killed_is_repeated(
    make_run: Callable[..., Path],
    to: ExportTarget,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After its first file was written."""
    run = make_run(shared=True, adapter=to == "merged")
    paths = resolve_model(str(run), None, None)
    target = tmp_path / "mine"
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda directory, **keys: None)  # as after a kill
        sync, synced = io.sync, []

        def killed(path: Path) -> None:
            if synced:
                raise KeyboardInterrupt
            synced.append(path)
            sync(path)

        patched.setattr(io, "sync", killed)
        with pytest.raises(KeyboardInterrupt):
            export_run(paths, to, target)
    assert [path.name for path in target.iterdir()] == [UNFINISHED]
    (target / UNFINISHED / ".weights.abcd.tmp").touch()
    export_run(paths, to, target)
    assert not [path for path in target.iterdir() if path.name.startswith(".")]


def test_an_export_that_fails_leaves_the_earlier_one(
    make_run: Callable[..., Path], tmp_path: Path
) -> None:
    paths = resolve_model(str(make_run()), None, None)
    target = export_run(paths, "tgi", tmp_path / "mine").target
    before = {path: path.read_bytes() for path in target.iterdir()}
    with full_disk(60_000), pytest.raises(CheckpointError):
        export_run(paths, "tgi", target, target_model_name="owner/other")
    assert {path: path.read_bytes() for path in target.iterdir()} == before


def test_a_tree_and_an_index_of_an_earlier_export_are_deleted(
    make_run: Callable[..., Path], tmp_path: Path
) -> None:
    run = make_run()
    for to in ("tgi", "trtllm"):
        export_run(resolve_model(str(run), None, None), to, tmp_path / to)
        (tmp_path / to / "model.safetensors.index.json").touch()
    (run / TREE).unlink()
    for to in ("tgi", "trtllm"):
        export_run(resolve_model(str(run), None, None), to, tmp_path / to)
        assert not list((tmp_path / to).glob("*.index.json"))
        assert not (tmp_path / to / TREE).exists()
    assert not (tmp_path / "trtllm" / CHOICES).exists()


@pytest.mark.parametrize("to", ["vllm", "trtllm", "transformers", "merged"])
def test_what_the_card_shows_is_read_before_weights_are_written(
    to: ExportTarget, make_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(adapter=to == "merged")

    def unreadable(*_: object) -> str:
        raise CheckpointError("report.json cannot be read")

    def write(*_: object, **__: object) -> None:
        pytest.fail("written")

    for name in ("medusa_heads", "merged_model"):
        monkeypatch.setattr(f"medusa_train.export.{name}.model_card", unreadable)
    for name in ("medusa_heads.write_heads", "merged_model.write_merged"):
        monkeypatch.setattr(f"medusa_train.export.{name}", write)
    with pytest.raises(CheckpointError, match="report"):
        export_run(resolve_model(str(run), None, None), to)


def test_a_damaged_tree_is_found_before_weights_are_written(
    make_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    (run / TREE).write_text("{")
    monkeypatch.setattr(
        "medusa_train.export.medusa_heads.write_heads", lambda *_, **__: pytest.fail("written")
    )
    with pytest.raises(CheckpointError, match=r"tree\.json"):
        export_run(resolve_model(str(run), None, None), "trtllm")
