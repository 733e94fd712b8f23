"""Which heads a directory holds, and Medusa-2 full models in whatever files they come."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from medusa_train.checkpoint.heads import read_heads
from medusa_train.checkpoint.heads_files import heads_files, heads_layout
from medusa_train.checkpoint.reference import to_reference
from medusa_train.errors import CheckpointError
from tests.checkpoint.others import D, V, reference_tensors, vllm_config, vllm_tensors, write
from tests.checkpoint.test_heads import Hostile
from tests.checkpoint.test_vllm import same

BACKBONE = {"model.embed_tokens.weight": torch.ones(V, D), "lm_head.weight": torch.ones(V, D)}
CONFIG: dict[str, object] = {"model_type": "llama", "medusa_num_heads": 2, "medusa_num_layers": 1}


def full_model(directory: Path, form: str, prefix: str = "medusa_head.") -> Path:
    """A Medusa-2 full model: one file or shards, safetensors or pickled."""
    heads = {prefix + name: tensor for name, tensor in reference_tensors(5).items()}
    everything = {**BACKBONE, **heads}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    if form == "safetensors":
        save_file(everything, str(directory / "model.safetensors"))
    elif form == "bin":
        torch.save(everything, directory / "pytorch_model.bin")
    else:
        stem, suffix = ("model", "safetensors") if form == "safetensors shards" else ("pytorch_model", "bin")
        names = list(everything)
        parts = [names[:1], names[1:7], names[7:]]  # the first holds no head at all
        where = {}
        for number, part in enumerate(parts, start=1):
            file = f"{stem}-{number:05}-of-00003.{suffix}"
            chosen = {name: everything[name] for name in part}
            save_file(chosen, str(directory / file)) if suffix != "bin" else torch.save(chosen, directory / file)
            where |= dict.fromkeys(part, file)
        (directory / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": where}))
        (directory / f"{stem}-00001-of-00003.{suffix}").write_bytes(b"is not read")
    return directory


FORMS = ["safetensors", "bin", "safetensors shards", "bin shards"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("prefix", ["medusa_head.", "medusa_heads."])
def test_a_medusa_2_full_model_gives_its_heads(
    tmp_path: Path, form: str, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = full_model(tmp_path / "model", form, prefix)
    assert heads_layout(model) == "model"
    heads = read_heads(model)
    assert same(to_reference(heads.state, heads.num_layers), reference_tensors(5))
    assert heads.base_model == str(model)  # the backbone is the one beside them
    assert "medusa_num_heads: 2, but the weights hold 5; using 5" in caplog.text


def test_a_hostile_full_model_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    torch.save({"medusa_head.0.0.linear.weight": Hostile(trap)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="refused"):
        read_heads(tmp_path)
    assert not trap.exists()


def test_layouts_are_told_apart(tmp_path: Path) -> None:
    vllm = write(tmp_path / "vllm", vllm_tensors(), vllm_config(), "model.safetensors")
    assert (heads_layout(vllm), heads_files(vllm)) == ("vllm", [vllm / "model.safetensors"])
    ours = write(tmp_path / "ours", reference_tensors(), {}, "medusa_lm_head.safetensors")
    (ours / "medusa_lm_head.pt").touch()
    assert (heads_layout(ours), heads_files(ours)) == ("reference", [ours / "medusa_lm_head.safetensors"])
    (ours / "medusa_lm_head.safetensors").unlink()
    assert heads_files(ours) == [ours / "medusa_lm_head.pt"]


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 16, b"\x02" + b"\0" * 7 + b"[]"])
def test_no_heads_are_no_layout(tmp_path: Path, content: bytes) -> None:
    assert heads_layout(tmp_path) is None
    assert heads_layout(tmp_path / "absent") is None
    backbone = write(tmp_path / "model", dict(BACKBONE), {"model_type": "llama"}, "model.safetensors")
    assert heads_layout(backbone) is None
    with pytest.raises(CheckpointError, match="no Medusa heads here"):
        read_heads(backbone)
    (backbone / "model.safetensors").write_bytes(content)  # damaged: not for this module to say
    assert heads_layout(backbone) is None
    (backbone / "config.json").write_text("{")
    assert heads_layout(backbone) is None


def test_looking_needs_no_torch() -> None:
    import subprocess

    code = "import sys, medusa_train.checkpoint.heads_files; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
