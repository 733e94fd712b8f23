"""Attention with split keys: its tests in Triton's interpreter, its builds for GPUs, and where it is
refused.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from medusa_train.checkpoint.load_model import load_for_decoding
from medusa_train.checkpoint.resolve import resolve_model
from medusa_train.config.load import load_config
from medusa_train.config.schema import EvalConfig
from medusa_train.config.types import GpuKernel
from medusa_train.errors import BackboneError
from medusa_train.models.attention import FOLDED_HEADS, use_split_keys
from tests.evaluation.tiny_model import write_backbone
from tests.families import random_backbone

ROOT = Path(__file__).resolve().parents[2]
#: Folded queries and sizes of heads for which kernels are built.
TILES = [(1, 64), (7, 128), (32, 128), (260, 64), (260, 128), (7, 256), (260, 256)]
MOST_SHARED = 100 << 10  # bytes, so that two programs fit a multiprocessor of an H100
POINTERS = {"parts": "*fp32", "tops": "*fp32", "totals": "*fp32"}


@pytest.mark.slow  # half a minute
def test_in_tritons_interpreter() -> None:
    """It has to be chosen before Triton is imported."""
    pytest.importorskip("triton", reason="Triton is for Linux alone")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, "tests/models/split_attention.py"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def build(
    kernel: Any, architecture: int, constants: dict[str, int], out: Path, **options: int
) -> tuple[int, int]:
    """Compile a kernel for a GPU that need not be here; return its shared memory and the bytes that
    a thread spills.
    """
    from triton.backends import nvidia
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    signature = {}
    multiples_of_16 = {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = POINTERS.get(name, "i32")
        if name in ("query", "key", "value", "mask", "out"):
            signature[name] = "*bf16"
        if name == "scale":
            signature[name] = "fp32"
        if name not in ("scale", "rows", "queries", "splits", "kv_heads"):
            multiples_of_16[index,] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=multiples_of_16)
    built = compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    out.write_bytes(built.asm["cubin"])
    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    done = subprocess.run(
        [tool, "--dump-resource-usage", out], capture_output=True, text=True, check=True
    )
    spilled = re.findall(r"(?:LOCAL|STACK):(\d+)", done.stdout)
    assert len(spilled) == 2, done.stdout
    return built.metadata.shared, sum(map(int, spilled))


@pytest.mark.slow  # seconds for each
@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize(("rows", "dim"), TILES)
def test_builds_without_spills(rows: int, dim: int, architecture: int, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is for Linux alone")
    from medusa_train.models import split_attention as kernels

    block_rows, block_keys = kernels.block_sizes(rows, dim)
    constants = {"ROWS": block_rows, "KEYS": block_keys, "DIM": dim}
    options = {"num_warps": kernels.WARPS, "num_stages": kernels.STAGES}
    shared, spilled = build(
        kernels._attend, architecture, constants, tmp_path / "attend.cubin", **options
    )
    assert spilled == 0
    assert shared <= MOST_SHARED
    for width in (1, 32):
        warps = kernels.merge_warps(dim, width)
        merge = {"DIM": dim, "WIDTH": width}
        path = tmp_path / "merge.cubin"
        shared, spilled = build(kernels._merge, architecture, merge, path, num_warps=warps)
        assert spilled == 0
        assert shared <= MOST_SHARED


def test_it_is_refused_where_it_computes_nothing() -> None:
    pytest.importorskip("triton", reason="Triton is for Linux alone")
    heads_of_8 = random_backbone("llama", dtype=torch.bfloat16).model
    capped = random_backbone("gemma2", dtype=torch.bfloat16).model
    in_float32 = random_backbone("llama", dtype=torch.float32, head_dim=16).model
    for refused, reason in (
        (heads_of_8, "heads of 8 numbers"),
        (capped, "attention is eager"),
        (in_float32, "numbers in torch.float32"),
    ):
        before = refused.config._attn_implementation
        with pytest.raises(BackboneError, match=f"{reason}.*Leave it out"):
            use_split_keys(refused)
        assert refused.config._attn_implementation == before


@pytest.mark.parametrize("name", get_args(GpuKernel))
def test_kernels_are_refused_where_they_cannot_run(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = random_backbone("llama", dtype=torch.bfloat16, head_dim=16)
    with pytest.raises(BackboneError, match=f"{name}: need a GPU.*there is no GPU"):
        backbone.use_gpu_kernels([name])
    backbone.device = torch.device("cuda")
    with monkeypatch.context() as patch:
        patch.setattr("medusa_train.models.backbone.has_compiler", lambda device: False)
        with pytest.raises(BackboneError, match="Triton is not installed"):
            backbone.use_gpu_kernels([name])
    monkeypatch.setattr("medusa_train.models.backbone.has_compiler", lambda device: True)
    backbone.config.num_experts = 4
    with pytest.raises(BackboneError, match="has experts"):
        backbone.use_gpu_kernels([name])
    backbone.model.is_quantized = True
    with pytest.raises(BackboneError, match="is quantized"):
        backbone.use_gpu_kernels([name])
    assert backbone.gpu_kernels == ()


def test_a_model_is_not_loaded_without_it(tmp_path: Path) -> None:
    model = str(write_backbone(tmp_path / "backbone"))
    paths = resolve_model(None, model, None, gpu_kernels=["split_attention"])
    with pytest.raises(BackboneError, match="split_attention: need a GPU"):
        load_for_decoding(paths, "bfloat16", prepack=False)


def test_it_is_off_unless_asked_for() -> None:
    backbone = random_backbone("llama", dtype=torch.bfloat16, head_dim=16)
    cfg = load_config(EvalConfig, None, flags={})
    backbone.use_gpu_kernels(cfg.gpu_kernels)
    assert backbone.attention == FOLDED_HEADS
    cfg = load_config(EvalConfig, None, flags={"gpu_kernels": "split_attention"})
    assert cfg.gpu_kernels == ["split_attention"]
    with pytest.raises(BackboneError, match="there is no GPU"):
        backbone.use_gpu_kernels(cfg.gpu_kernels)
