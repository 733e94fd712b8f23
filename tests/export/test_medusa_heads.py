"""Medusa heads in each layout: files, reading them back, warnings."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from medusa_train.checkpoint.heads import load_draft, read_heads
from medusa_train.checkpoint.load_model import load_for_decoding
from medusa_train.checkpoint.medusa_layouts import HeadTensors
from medusa_train.checkpoint.resolve import resolve_model
from medusa_train.checkpoint.run_directory import other_files
from medusa_train.config.types import ExportTarget
from medusa_train.errors import CheckpointError
from medusa_train.export import medusa_heads
from medusa_train.export.medusa_heads import check_vllm_config, warnings_for
from medusa_train.export.write import export_run
from medusa_train.inference.generate import Decoder
from medusa_train.models.loading import load_target_model
from medusa_train.trees.tree import Tree
from tests.checkpoint.vllm_rules import loader_problems

HEADS_TARGETS: list[ExportTarget] = ["reference", "tgi", "vllm", "trtllm", "transformers"]


PROMPT = [1, 40, 50, 60, 70]


@pytest.mark.parametrize("to", HEADS_TARGETS)
def test_what_was_exported_is_read_back_to_the_bit_and_decodes_the_same(
    make_run: Callable[..., Path], to: ExportTarget, target_model_dir: Path
) -> None:
    run = make_run()
    done = export_run(resolve_model(str(run), None, None), to)
    assert done.target == run / "export" / to
    assert done.warnings == []
    assert list(other_files(done.target)) == []
    ours, again = read_heads(run / "heads"), read_heads(done.target)
    assert set(ours.state) == set(again.state)
    assert all(torch.equal(ours.state[name], again.state[name]) for name in ours.state)
    assert again.target_model_name == str(target_model_dir.resolve())
    # heads, tree and target model from there
    subject = load_for_decoding(resolve_model(str(done.target), None, None), "float32")
    assert subject.tree == Tree.cartesian([2, 2])
    plain = Decoder(subject.target_model).generate(PROMPT, 20)
    assert (
        Decoder(subject.target_model, subject.draft, subject.tree).generate(PROMPT, 20).tokens
        == plain.tokens
    )


@pytest.mark.parametrize("to", [*HEADS_TARGETS, "reference-v2"])
def test_heads_on_a_shared_lm_head(
    make_run: Callable[..., Path], to: ExportTarget, target_model_dir: Path
) -> None:
    """Readers that know sharing get it, the others a copy of the target model's matrix for each head."""
    run = make_run(shared=True)
    done = export_run(resolve_model(str(run), None, None), to)
    again = read_heads(done.target)
    assert again.shared == (to in ("tgi", "vllm", "transformers", "reference-v2"))
    assert any("a copy of that lm_head" in fact for fact in done.facts) != again.shared
    target_model = load_target_model(str(target_model_dir))
    states = torch.randn(4, target_model.hidden_size)
    ours, theirs = load_draft(run / "heads", target_model), load_draft(done.target, target_model)
    logits = [draft.lm_head(2).logits(draft.head_state(states, 2)) for draft in (ours, theirs)]
    assert torch.equal(*logits)


@pytest.mark.parametrize("to", ["reference", "vllm", "trtllm"])
def test_a_bias_of_the_shared_lm_head_is_warned_of(
    make_run: Callable[..., Path],
    to: ExportTarget,
    target_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target_model = load_target_model(str(target_model_dir))
    target_model.output_embeddings.bias = torch.nn.Parameter(torch.randn(target_model.vocab_size))
    monkeypatch.setattr(
        "medusa_train.export.medusa_heads.load_for_export", lambda paths: target_model
    )
    (warning,) = export_run(resolve_model(str(make_run(shared=True)), None, None), to).warnings
    assert "have a bias" in warning


def test_vllm_s_directory_keeps_to_the_rules_of_its_loader(
    make_run: Callable[..., Path], tmp_path: Path
) -> None:
    done = export_run(resolve_model(str(make_run()), None, None), "vllm", tmp_path / "eagle-heads")
    config = json.loads((done.target / "config.json").read_text())
    assert loader_problems(load_file(done.target / "model.safetensors"), config) == []
    (warning,) = done.warnings
    assert "as eagle, whatever the method" in warning  # by the path


def test_what_the_target_would_not_load_is_refused(
    make_run: Callable[..., Path], tmp_path: Path
) -> None:
    """A second file of weights, which vLLM would read, another vocabulary, heads with matrices of
    their own.
    """
    paths = resolve_model(str(make_run()), None, None)
    for first, second in (("tgi", "vllm"), ("vllm", "tgi")):
        before = {
            path: path.read_bytes()
            for path in export_run(paths, first, tmp_path / first).target.iterdir()
        }
        with pytest.raises(CheckpointError, match="holds other files that would be overwritten"):
            export_run(paths, second, tmp_path / first)
        assert {path: path.read_bytes() for path in (tmp_path / first).iterdir()} == before
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"vocab_size": 7}')
    with pytest.raises(CheckpointError, match=r"their vocab_size is 300, that of .*config.json 7"):
        export_run(paths, "vllm", tmp_path / "mine", target_model_name=str(other))
    assert not (tmp_path / "mine").exists()
    with pytest.raises(CheckpointError, match="medusa_share_lm_head"):
        export_run(paths, "reference-v2")


def test_tensorrt_gets_the_target_model_s_config_and_the_tree(
    make_run: Callable[..., Path], target_model_dir: Path
) -> None:
    run = make_run()
    done = export_run(resolve_model(str(run), None, None), "trtllm")
    config = json.loads((done.target / "config.json").read_text())
    config_of_target_model = json.loads((target_model_dir / "config.json").read_text())
    assert {key: config[key] for key in config_of_target_model} == config_of_target_model
    assert (
        config["num_medusa_heads"],
        config["medusa_num_heads"],
        config["medusa_num_layers"],
    ) == (5, 5, 1)
    assert json.loads((done.target / "medusa_choices.json").read_text()) == [
        [0],
        [1],
        [0, 0],
        [0, 1],
        [1, 0],
        [1, 1],
    ]
    assert any("--medusa_choices" in fact for fact in done.facts)
    Tree.cartesian([8, 8]).save(run / "tree.json")
    (warning,) = export_run(resolve_model(str(run), None, None), "trtllm").warnings
    assert "72 nodes" in warning
    assert not (done.target / "medusa_choices.json").exists()
    Tree.empty().save(run / "tree.json")
    assert "has 0 nodes" in export_run(resolve_model(str(run), None, None), "trtllm").warnings[0]
    (run / "tree.json").unlink()
    assert "no tree.json" in export_run(resolve_model(str(run), None, None), "trtllm").warnings[0]


def test_tensorrt_gets_the_config_of_a_target_model_that_is_downloaded_first(
    make_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter([{}, {"model_type": "llama"}])
    monkeypatch.setattr(medusa_heads, "find_target_model", lambda name: (name, next(found)))
    paths = replace(resolve_model(str(make_run()), None, None), target_model="owner/name")
    downloaded: list[str] = []
    monkeypatch.setattr(
        medusa_heads, "resolve_target_model", lambda name, **options: downloaded.append(name)
    )
    done = export_run(paths, "trtllm", target_model_name="owner/name")
    assert downloaded == ["owner/name"]
    assert json.loads((done.target / "config.json").read_text())["model_type"] == "llama"


def heads(
    num_heads: int = 5, num_layers: int = 1, *, bias: bool = False, shared: bool = False
) -> HeadTensors:
    state = {}
    for i in range(num_heads):
        for j in range(num_layers):
            state[f"blocks.{i}.{j}.linear.weight"] = torch.randn(4, 4)
            state[f"blocks.{i}.{j}.linear.bias"] = torch.randn(4)
        if not shared:
            state[f"lm_heads.{i}.weight"] = torch.randn(9, 4)
        if bias:
            state[f"lm_heads.{i}.bias"] = torch.randn(9)
    return HeadTensors(num_heads, num_layers, state)


@pytest.mark.parametrize(
    ("to", "exported", "words"),
    [
        ("reference", heads(5, 2), ["distinct blocks"]),
        ("tgi", heads(5, 2), []),
        ("reference", heads(3), ["always builds 5 heads"]),
        ("vllm", heads(3, 2), []),
        ("tgi", heads(bias=True), ["have a bias"]),
        ("transformers", heads(bias=True), []),
        ("tgi", heads(5, 2, shared=True), ["one block each"]),
        (
            "reference",
            heads(2, 2, bias=True),
            ["have a bias", "distinct blocks", "always builds 5 heads"],
        ),
    ],
)
def test_limits_of_the_target_are_warned_of(
    to: ExportTarget, exported: HeadTensors, words: list[str]
) -> None:
    warnings = warnings_for(to, exported)
    assert len(warnings) == len(words)
    assert all(word in warning for word, warning in zip(words, warnings, strict=True))


@pytest.mark.parametrize(
    ("to", "shared", "matrices"),
    [("vllm", True, 1), ("vllm", False, 3), ("reference", True, 3), ("tgi", True, 0)],
)
def test_lm_head_matrices_are_announced_before_they_are_written(
    to, shared, matrices, make_run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(medusa_heads, "ANNOUNCED", 1)
    paths = resolve_model(str(make_run(shared=shared, num_heads=3)), None, None)
    lines: list[str] = []
    exported = export_run(paths, to, announce=lines.append)
    assert len(lines) == bool(matrices)
    if matrices:
        amount = lines[0].removeprefix("writing ").partition(":")[0]
        number, unit = amount.split(" ")
        assert f" stores {matrices} lm_head " in lines[0]
        assert unit == "KiB"
        written = sum(path.stat().st_size for path in exported.target.iterdir())
        # the blocks of the heads come on top
        assert 0.2 * written < float(number) * 1024 < written


@pytest.mark.parametrize("sizes", [{"vocab_size": 7}, {"text_config": {"vocab_size": 7}}])
def test_vllm_s_sizes_are_those_of_the_text_model(tmp_path: Path, sizes: dict[str, object]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
    heads = {"base_model_name_or_path": str(tmp_path), "vocab_size": 300, "hidden_size": 64}
    with pytest.raises(CheckpointError, match=r"their vocab_size is 300, that of .*config.json 7"):
        check_vllm_config(heads)
    check_vllm_config({**heads, "vocab_size": 7})
