"""A resumed run trains on the weights that it was trained on, wherever they lie."""

import shutil
from pathlib import Path

import pytest

from medusa_train.checkpoint.digest import digest_target_model
from medusa_train.checkpoint.store import CheckpointStore
from medusa_train.errors import CheckpointError
from medusa_train.training import setup
from tests.training.conftest import train

KEYS = {"max_steps": 2, "save_steps": 1, "calibration_tokens": 0}


@pytest.fixture
def base(target_model_dir, tmp_path) -> Path:
    return Path(shutil.copytree(target_model_dir, tmp_path / "base"))


def change(base: Path) -> None:
    """Flip a bit within the weights, behind the header."""
    (path,) = base.glob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[-2000] ^= 1
    path.write_bytes(content)


def test_replaced_weights_under_the_same_path_are_refused(make_config, console, base):
    train(make_config(base_model=str(base), **KEYS), console)
    change(base)
    again = {**KEYS, "max_steps": 3, "resume_from_checkpoint": "auto"}
    with pytest.raises(CheckpointError, match="was trained on other weights than those of base_mo"):
        train(make_config(base_model=str(base), **again), console)


def test_a_target_model_that_moved_resumes(make_config, console, base, tmp_path):
    train(make_config(base_model=str(base), **KEYS), console)
    moved = base.rename(tmp_path / "moved")
    again = {**KEYS, "max_steps": 3, "resume_from_checkpoint": "auto"}
    assert train(make_config(base_model=str(moved), **again), console) == 0
    assert "resuming after step 2" in console.file.getvalue()


def test_a_checkpoint_without_a_digest_is_named(make_config, console, base, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(setup, "digest_target_model", lambda name: None)
        train(make_config(base_model=str(base), **KEYS), console)
    again = {**KEYS, "max_steps": 3, "resume_from_checkpoint": "auto"}
    assert train(make_config(base_model=str(base), **again), console) == 0
    assert console.file.getvalue().count("was written by an earlier version") == 1


def test_a_target_model_whose_files_are_not_found_is_named(make_config, console, base, monkeypatch):
    train(make_config(base_model=str(base), **KEYS), console)
    again = {**KEYS, "max_steps": 3, "resume_from_checkpoint": "auto"}
    with monkeypatch.context() as patched:
        patched.setattr(setup, "digest_target_model", lambda name: None)
        assert train(make_config(base_model=str(base), **again), console) == 0
    assert console.file.getvalue().count(f"no weight files of {base} were found to compare") == 1
    # the checkpoint of that run still knows the weights
    change(base)
    with pytest.raises(CheckpointError, match="was trained on other weights"):
        train(make_config(base_model=str(base), **{**again, "max_steps": 4}), console)


def test_another_quantization_is_named(make_config, console, base, monkeypatch):
    train(make_config(base_model=str(base), **KEYS), console)
    again = {**KEYS, "max_steps": 3, "resume_from_checkpoint": "auto", "load_in_4bit": True}
    train(make_config(base_model=str(base), **again), console)
    shown = console.file.getvalue()
    assert "changed since that checkpoint: load_in_4bit: was false, now true" in shown


def test_a_checkpoint_before_0_3_0_resumes_with_a_note(make_config, console, base, tmp_path):
    """Its state has the digest of other parts of the weights, under another name."""
    out = tmp_path / "run"
    train(make_config(base_model=str(base), output_dir=str(out), **KEYS), console)
    store = CheckpointStore(out)
    path = store.latest()
    state = store.load(path)
    state["run"]["backbone"] = state["run"].pop("base_model_digest")[::-1]
    store.save(2, state)
    again = {**KEYS, "max_steps": 3, "resume_from_checkpoint": "auto", "output_dir": str(out)}
    assert train(make_config(base_model=str(base), **again), console) == 0
    assert console.file.getvalue().count("was written by an earlier version") == 1


def test_the_digest_is_of_the_content_and_does_not_depend_on_the_directory(
    base: Path, tmp_path: Path
) -> None:
    first = digest_target_model(str(base))
    assert first is not None
    moved = base.rename(tmp_path / "moved")
    assert digest_target_model(str(moved)) == first
    change(moved)
    assert digest_target_model(str(moved)) != first


def test_a_model_without_files_has_no_digest(tmp_path: Path) -> None:
    assert digest_target_model(str(tmp_path)) is None
    assert digest_target_model("nobody/nothing") is None
