"""Kernels of a step by class: names, sums, and the whole command without a GPU."""

import json
from pathlib import Path
from types import SimpleNamespace

import gpu_profile
import pytest
from torch.autograd import DeviceType


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT", "products"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16>", "products"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64>", "products"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", "attention"),
        ("_attend", "attention"),
        ("_merge", "attention"),
        ("void (anonymous namespace)::softmax_warp_forward<float, float>", "softmax"),
        ("void at::native::vectorized_elementwise_kernel<4, MulFunctor<float>>", "elementwise"),
        ("triton_poi_fused_add_mul_silu_3", "elementwise"),
        ("void at::native::reduce_kernel<512, 1, MeanOps<float>>", "reductions"),
        ("void kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 2>", "quantization"),
        ("void multi_tensor_apply_kernel<FusedAdamMathFunctor<float>>", "optimizer"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("void at::native::index_elementwise_kernel<128, 4>", "indexing"),
        ("something new", "other"),
    ],
)
def test_names_of_kernels(name: str, kind: str) -> None:
    assert gpu_profile.class_of(name) == kind


def test_a_step_is_summed_up_by_class() -> None:
    def event(key: str, microseconds: float, count: int, device: DeviceType) -> SimpleNamespace:
        return SimpleNamespace(
            key=key,
            count=count,
            device_type=device,
            self_device_time_total=microseconds,
            self_cpu_time_total=7.0,
        )

    events = [
        event("nvjet_a", 4000, 20, DeviceType.CUDA),
        event("nvjet_b", 2000, 10, DeviceType.CUDA),
        event("_attend", 1000, 10, DeviceType.CUDA),
        event("aten::mm", 6000, 30, DeviceType.CPU),  # whose kernels are counted above
    ]
    found = gpu_profile.summary(events, 2, cuda=True)
    assert found["kernel_ms"] == pytest.approx(3.5)
    assert found["kernels"] == 20
    assert found["classes"] == {"products": [3.0, 15.0], "attention": [0.5, 5.0]}
    assert found["largest"][0] == ["nvjet_a", 2.0, 10.0]


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        (["decode", "--contexts", "40", "--nodes", "0", "3"], ["plain", "tree 3"]),
        (["train", "--parts", "medusa1_7b"], ["medusa1_7b", "medusa1_7b"]),
    ],
)
def test_the_whole_command(words: list[str], steps: list[str], tmp_path: Path) -> None:
    assert gpu_profile.main([*words, "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "gpu_profile.json").read_text())
    assert [one["what"] for one in record["profiles"]] == steps
    for one in record["profiles"]:
        parts = [milliseconds for milliseconds, _ in one["classes"].values()]
        assert sum(parts) == pytest.approx(one["kernel_ms"], abs=1e-2)
    assert record["profiles"][0]["classes"]["products"][0] > 0
    assert "a small stand-in ran" in (tmp_path / "gpu_profile.md").read_text()


def test_a_step_that_fails_is_named_and_the_others_are_profiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = gpu_profile.likely_tree

    def failing(nodes: int) -> object:
        if nodes == 3:
            raise RuntimeError("no such kernel")
        return tree(nodes)

    monkeypatch.setattr(gpu_profile, "likely_tree", failing)
    words = ["decode", "--contexts", "40", "--nodes", "0", "3", "4", "--out", str(tmp_path)]
    assert gpu_profile.main(words) == 1
    record = json.loads((tmp_path / "gpu_profile.json").read_text())
    assert [one["what"] for one in record["profiles"]] == ["plain", "tree 4"]
    assert "tree 3 static 40: failed: RuntimeError: no such kernel" in capsys.readouterr().err


def test_a_setting_that_cannot_run_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object, **keys: object) -> None:
        raise gpu_profile.Unsupported("no CUDA graphs")

    monkeypatch.setattr(gpu_profile.Shape, "load", refuse)
    words = ["decode", "--settings", "static", "--out", str(tmp_path)]
    assert gpu_profile.main(words) == 1
    assert "static: no CUDA graphs" in capsys.readouterr().out
