"""A resumed run trains on the weights that it was trained on, wherever they lie."""

import shutil
from pathlib import Path

import pytest

from medusa_train.checkpoint.backbone_fingerprint import SAMPLE_BYTES, fingerprint_backbone
from medusa_train.errors import CheckpointError
from medusa_train.training import setup
from tests.training.conftest import train

KEYS = {"max_steps": 2, "save_steps": 1, "calibration_tokens": 0}


@pytest.fixture
def base(backbone_dir, tmp_path) -> Path:
    return Path(shutil.copytree(backbone_dir, tmp_path / "base"))


def change(base: Path) -> None:
    """Flip a bit within the weights, behind the header."""
    (path,) = base.glob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[-SAMPLE_BYTES // 2] ^= 1
    path.write_bytes(content)


def test_replaced_weights_under_the_same_path_are_refused(make_config, console, base):
    train(make_config(base_model=str(base), **KEYS), console)
    change(base)
    again = {**KEYS, "max_steps": 3, "resume_from_checkpoint": "auto"}
    with pytest.raises(CheckpointError, match="was trained on other weights than those of base_mo"):
        train(make_config(base_model=str(base), **again), console)


def test_a_backbone_that_moved_resumes(make_config, console, base, tmp_path):
    train(make_config(base_model=str(base), **KEYS), console)
    moved = base.rename(tmp_path / "moved")
    again = {**KEYS, "max_steps": 3, "resume_from_checkpoint": "auto"}
    assert train(make_config(base_model=str(moved), **again), console) == 0
    assert "resuming after step 2" in console.file.getvalue()


def test_a_checkpoint_without_a_fingerprint_is_named(make_config, console, base, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(setup, "fingerprint_backbone", lambda name: None)
        train(make_config(base_model=str(base), **KEYS), console)
    again = {**KEYS, "max_steps": 3, "resume_from_checkpoint": "auto"}
    assert train(make_config(base_model=str(base), **again), console) == 0
    assert console.file.getvalue().count("was written by an earlier version") == 1


def test_a_backbone_whose_files_are_not_found_is_named(make_config, console, base, monkeypatch):
    train(make_config(base_model=str(base), **KEYS), console)
    again = {**KEYS, "max_steps": 3, "resume_from_checkpoint": "auto"}
    with monkeypatch.context() as patched:
        patched.setattr(setup, "fingerprint_backbone", lambda name: None)
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


def test_the_fingerprint_is_of_the_content(base: Path, tmp_path: Path) -> None:
    first = fingerprint_backbone(str(base))
    assert first is not None
    (path,) = base.glob("*.safetensors")
    path.rename(base / "model-00001-of-00001.safetensors")
    assert fingerprint_backbone(str(base)) == first
    change(base)
    assert fingerprint_backbone(str(base)) != first
    assert fingerprint_backbone(str(tmp_path)) is None
    assert fingerprint_backbone("nobody/nothing") is None
