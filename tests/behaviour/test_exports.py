"""Exports as the programs that read them expect: names, shapes, values, configurations; and heads
that other programs wrote.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi, RepoUrl
from huggingface_hub.utils import filter_repo_objects
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tests.behaviour.conftest import RunOf
from tests.behaviour.scripted import write_scripted_model
from tests.behaviour.seams import forget_network
from tests.behaviour.test_joint_training import LORA
from tests.behaviour.world import (
    EOS,
    NARROW,
    QUICK,
    evaluate,
    export,
    greedy,
    read_json,
    read_lines,
    render,
    tensors,
    train,
    training_keys,
    write_tree,
)
from tests.checkpoint.vllm_rules import loader_problems


@pytest.fixture
def copied(skilled: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    """Return a copy of a skilled run, which a test may change."""

    def copy(kind: str, tree: Any = NARROW) -> Path:
        run = tmp_path / kind
        shutil.copytree(skilled(kind), run, dirs_exist_ok=True)
        if tree is not None:
            write_tree(run / "tree.json", tree)
        return run

    return copy


def accepted_of(words: list[Any], bench: Path, out: Path) -> list[list[int]]:
    settings = QUICK | {"generate": False, "prompt_lookup": False, "output_dir": out}
    evaluate("--bench", bench, *words, **settings).ok()
    return [line["accepted"] for line in read_lines(out / "answers.jsonl")]


@pytest.fixture(scope="session")
def bench(own: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.behaviour.world import write_lines

    texts = [record["messages"][0]["content"] for record in read_lines(own)][:2]
    questions = [{"question_id": n, "turns": [text]} for n, text in enumerate(texts)]
    return write_lines(tmp_path_factory.mktemp("bench") / "two.jsonl", questions)


# Medusa heads


def own_weights(run: Path) -> dict[str, Tensor]:
    return tensors(run / "heads" / "medusa_lm_head.safetensors")


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the names that vLLM reads: blocks.I.layers.J, and lm_heads.I."""
    names = {}
    for name, tensor in weights.items():
        head, block, *rest = name.split(".")
        if rest[0] == "linear":
            names[f"blocks.{head}.layers.{block}.{rest[1]}"] = tensor
        else:
            names[f"lm_heads.{head}.weight"] = tensor
    return names


def test_heads_for_the_public_code_and_tgi(copied: Callable[..., Path], model: Path) -> None:
    run = copied("medusa")
    shown = export(run, "--to", "reference").ok()
    shown.says("5 heads")  # which the public code always builds
    target = run / "export" / "reference"
    same(torch.load(target / "medusa_lm_head.pt", weights_only=True), own_weights(run))
    same(tensors(target / "medusa_lm_head.safetensors"), own_weights(run))
    config = read_json(target / "config.json")
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (3, 2)
    assert config["base_model_name_or_path"] == str(model)
    export(run, "--to", "tgi").ok()
    same(tensors(run / "export" / "tgi" / "medusa_lm_head.safetensors"), own_weights(run))


def test_heads_for_vllm(copied: Callable[..., Path], model: Path) -> None:
    run = copied("medusa")
    export(run, "--to", "vllm").ok().says("num_speculative_tokens", str(model))
    target = run / "export" / "vllm"
    assert '"method": "medusa"' in (target / "README.md").read_text(encoding="utf-8")
    found = tensors(target / "model.safetensors")
    same(found, renamed(own_weights(run)))
    config = read_json(target / "config.json")
    assert loader_problems(found, config) == []
    assert (config["num_heads"], config["num_hidden_layers"], config["vocab_size"]) == (3, 2, 300)
    assert config["medusa_fc_bias"] is True
    with safe_open(target / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"


@pytest.mark.parametrize("to", ["reference", "tgi", "vllm", "transformers"])
def test_the_tree_goes_along(to: str, copied: Callable[..., Path], tmp_path: Path) -> None:
    run = copied("medusa")
    export(run, "--to", to).ok()
    assert read_json(run / "export" / to / "tree.json") == read_json(run / "tree.json")


@pytest.fixture
def reachable_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The name of the hub's host is known."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://localhost:9")
    forget_network()
    yield
    forget_network()


@pytest.mark.usefixtures("reachable_hub")
@pytest.mark.parametrize(("keys", "private"), [({}, True), ({"private": False}, False)])
def test_an_upload_is_private_unless_it_is_to_be_public(
    keys: dict[str, Any],
    private: bool,
    copied: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Evaluations, which name places of this machine, stay here."""
    run = copied("medusa")
    uploaded: list[tuple[Any, ...]] = []

    def create_repo(_: Any, repo: str, *, private: bool, **options: Any) -> RepoUrl:
        uploaded.append((repo, private))
        return RepoUrl(f"https://huggingface.co/{repo}")

    def upload_folder(_: Any, *, repo_id: str, folder_path: str, **options: Any) -> None:
        names = [path.relative_to(folder_path).as_posix() for path in Path(folder_path).rglob("*")]
        sent = filter_repo_objects(names, ignore_patterns=options["ignore_patterns"])
        uploaded.append((repo_id, folder_path, set(sent)))

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    target = run / "export" / "tgi"
    (target / "eval").mkdir(parents=True)
    (target / "eval" / "report.json").write_text("{}")
    shown = export(run, "--to", "tgi", push_to_hub="me/heads", **keys).ok()
    shown.says("uploaded: https://huggingface.co/me/heads")
    created, (repo, folder, files) = uploaded
    assert created == ("me/heads", private)
    assert (repo, Path(folder)) == ("me/heads", target)
    assert {"README.md", "config.json", "medusa_lm_head.safetensors", "tree.json"} <= files
    assert "eval/report.json" not in files


def test_a_reduced_vocabulary_has_a_row_for_every_token_in_vllm(
    copied: Callable[..., Path], bench: Path, tmp_path: Path
) -> None:
    run = copied("medusa-reduced", NARROW)
    export(run, "--to", "vllm").ok()
    found = tensors(run / "export" / "vllm" / "model.safetensors")
    assert loader_problems(found, read_json(run / "export" / "vllm" / "config.json")) == []
    weights = own_weights(run)
    kept = weights["token_map"]
    for k in range(2):
        rows = weights[f"{k}.1.weight"]
        whole = found[f"lm_heads.{k}.weight"]
        assert whole.shape == (300, 32)
        assert torch.equal(whole[kept], rows)
        others = sorted(set(range(300)) - set(kept.tolist()))
        torch.testing.assert_close(whole[others], rows.mean(0).expand(len(others), -1))
    ours = accepted_of(["--model", run], bench, tmp_path / "a")
    assert ours == accepted_of(
        ["--model", run / "export" / "vllm", "--tree", run / "tree.json"], bench, tmp_path / "b"
    )
    export(run, "--to", "tgi").fails(1, "vllm")


def test_heads_that_share_the_models_matrix(run_of: RunOf, model: Path, tmp_path: Path) -> None:
    run = run_of("medusa", medusa_share_lm_head=True, max_steps=1)
    matrix = tensors(model / "model.safetensors")["lm_head.weight"]
    for to, shared in (("reference", False), ("reference-v2", True), ("tgi", True)):
        export(run, "--to", to, "--output-dir", tmp_path / to).ok()
        found = tensors(tmp_path / to / "medusa_lm_head.safetensors")
        assert any(name.endswith("2.weight") for name in found) is not shared
        if not shared:
            assert all(torch.equal(found[f"{k}.2.weight"], matrix) for k in range(3))
    export(run, "--to", "vllm", "--output-dir", tmp_path / "vllm").ok()
    found = tensors(tmp_path / "vllm" / "model.safetensors")
    assert read_json(tmp_path / "vllm" / "config.json")["original_lm_head"] is True
    assert [name for name in found if name.startswith("lm_heads")] == ["lm_heads.0.weight"]
    assert torch.equal(found["lm_heads.0.weight"], matrix)


def test_heads_for_tensorrt(copied: Callable[..., Path], model: Path) -> None:
    run = copied("medusa")
    export(run, "--to", "trtllm").ok()
    target = run / "export" / "trtllm"
    config, base = read_json(target / "config.json"), read_json(model / "config.json")
    assert {key: config[key] for key in base} == base
    assert (config["num_medusa_heads"], config["medusa_num_layers"]) == (3, 2)
    assert read_json(target / "medusa_choices.json") == [list(path) for path in NARROW]


def test_heads_for_generate_of_transformers(
    copied: Callable[..., Path], model: Path, exact_model: Any, tokenizer: Any, own: Path
) -> None:
    from transformers import AutoModelForCausalLM

    run = copied("medusa")
    export(run, "--to", "transformers").ok()
    target = run / "export" / "transformers"
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    passes = 0
    forward = base.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal passes
        passes += 1
        return forward(*args, **kwargs)

    base.forward = counted
    asked = read_lines(own)[0]["messages"][0]["content"]
    inputs = tokenizer(render([{"role": "user", "content": asked}]), return_tensors="pt")
    prompt = inputs["input_ids"][0].tolist()
    expected = greedy(exact_model, prompt, 24)
    options = {"custom_generate": str(target), "trust_remote_code": True, "max_new_tokens": 24}
    out = base.generate(**inputs, **options)
    assert out[0].tolist() == [*prompt, *expected]
    assert passes < len(expected)
    torch.manual_seed(0)
    sampled = base.generate(**inputs, **options, do_sample=True, temperature=0.8)
    assert sampled.shape[1] > len(prompt)
    with pytest.raises(ValueError, match="beam"):
        base.generate(**inputs, **options, num_beams=2)
    run2 = copied("medusa-soft", [])
    export(run2, "--to", "transformers").fails(1, "empty")


def test_generate_ends_where_the_template_ends_an_answer(chats: Path, tmp_path: Path) -> None:
    """At the tokenizer's end of a turn, which generation_config.json does not name."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = write_scripted_model(tmp_path / "base", " one", " two", " red")
    config = read_json(base / "generation_config.json")
    (base / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": 9}))
    train(**training_keys(base, chats, tmp_path / "run", max_steps=1)).ok()
    write_tree(tmp_path / "run" / "tree.json", NARROW)
    export(tmp_path / "run", "--to", "transformers").ok()
    target = tmp_path / "run" / "export" / "transformers"
    tokenizer = AutoTokenizer.from_pretrained(base)
    inputs = tokenizer(render([{"role": "user", "content": "two"}]), return_tensors="pt")
    out = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).generate(
        **inputs, custom_generate=str(target), trust_remote_code=True, max_new_tokens=12
    )
    answer = out[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == " one two red</s>"


def test_which_draft_goes_where(copied: Callable[..., Path]) -> None:
    for kind, to, words in (
        ("medusa", "sglang", "sglang"),
        ("medusa-markov", "vllm", "medusa_markov_rank"),
        ("hydra", "vllm", "hydra"),
        ("amphista", "reference", "amphista"),
        ("kangaroo", "tgi", "kangaroo"),
        ("eagle3", "tgi", "speculators"),
        ("medusa", "merged", "merge"),
    ):
        found = export(copied(kind), "--to", to)
        assert found.code in (1, 2), (kind, to)
        assert words.lower() in found.text.lower()


# EAGLE-3


def eagle_names(run: Path) -> dict[str, Tensor]:
    """Return the weights of a run under the names that vLLM and SGLang read."""
    weights = tensors(run / "heads" / "draft.safetensors")
    kept = weights.pop("token_map", None)
    weights["lm_head.weight"] = weights.pop("lm_heads.0.weight")
    if kept is not None:
        order = kept.argsort()
        weights["lm_head.weight"] = weights["lm_head.weight"][order]
        kept = kept[order]
        weights["d2t"] = kept - torch.arange(len(kept))
        weights["t2d"] = torch.zeros(300, dtype=torch.bool)
        weights["t2d"][kept] = True
    return weights


@pytest.mark.parametrize("kind", ["eagle3", "eagle3-reduced"])
@pytest.mark.parametrize("to", ["vllm", "sglang", "speculators"])
def test_eagle3_for_servers(
    to: str, kind: str, copied: Callable[..., Path], bench: Path, tmp_path: Path
) -> None:
    run = copied(kind)
    shown = export(run, "--to", to).ok()
    target = run / "export" / to
    expected = eagle_names(run)
    config = read_json(target / "config.json")
    layers = read_json(run / "heads" / "config.json")["layers"]
    layer = config
    if to == "speculators":
        expected = {name.replace("midlayer.", "layers.0."): t for name, t in expected.items()}
        layer = config["transformer_layer_config"]
        assert config["speculators_model_type"] == "eagle3"
        assert config["eagle_aux_hidden_state_layer_ids"] == layers
        shown.says(f"vllm serve {target}")
    elif to == "vllm":
        assert config["architectures"] == ["LlamaForCausalLMEagle3"]
        assert config["eagle_aux_hidden_state_layer_ids"] == layers
        shown.says('"method": "eagle3"')
    else:
        ids = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        assert ids == [layer_id - 1 for layer_id in layers]
        shown.says("EAGLE3")
    found = tensors(target / "model.safetensors")
    same({name: tensor.to(expected[name].dtype) for name, tensor in found.items()}, expected)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "num_hidden_layers": 1}
    assert {name: layer[name] for name in sizes} == sizes
    assert config["draft_vocab_size"] == (300 if kind == "eagle3" else 40)
    ours = accepted_of(["--model", run], bench, tmp_path / "ours")
    words = ["--model", target, "--tree", run / "tree.json"]
    assert accepted_of(words, bench, tmp_path / "theirs") == ours
    assert sum(map(sum, ours)) > 5


def test_a_draft_that_another_program_wrote(
    copied: Callable[..., Path],
    model: Path,
    bench: Path,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    """SpecForge counts the outputs of layers from 0, and stores no target model; unknown entries are
    named; what would change the draft is refused.
    """
    run = copied("eagle3-reduced")
    weights = eagle_names(run)
    layers = read_json(run / "heads" / "config.json")["layers"]
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [n - 1 for n in layers]},
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "head_dim": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 256,
        "vocab_size": 300,
        "draft_vocab_size": 40,
        "torch_dtype": "float32",
        "something_new": 7,
    }

    def write(name: str, **changes: Any) -> Path:
        where = tmp_path / name
        where.mkdir()
        written = {**weights, **changes.pop("tensors", {})}
        save_file(
            {n: t.contiguous() for n, t in written.items() if t is not None},
            where / "model.safetensors",
        )
        (where / "config.json").write_text(json.dumps({**config, **changes}))
        return where

    words = ["--base-model", model, "--tree", run / "tree.json"]
    ours = accepted_of(["--model", run], bench, tmp_path / "ours")
    theirs = write("theirs")
    settings = QUICK | {"generate": False, "prompt_lookup": False, "output_dir": tmp_path / "out"}
    evaluate("--bench", bench, "--model", theirs, *words, **settings).ok()
    assert "something_new" in caplog.text
    assert [line["accepted"] for line in read_lines(tmp_path / "out" / "answers.jsonl")] == ours
    extra = torch.zeros(32)
    for number, changes in enumerate(
        (
            {"tensors": {"midlayer.self_attn.q_proj.bias": extra}},
            {"tensors": {"layers.1.norm.weight": extra}},
            {"tensors": {"fc.weight": None}},
            {"architectures": ["LlamaForCausalLMEagle"], "eagle_config": None, "tensors": {}},
            {"tensors": {"norm.weight": torch.full((32,), torch.nan)}},
        )
    ):
        bad = write(f"bad{number}", **changes)
        if number == 3:
            (bad / "model.safetensors").unlink()
            save_file({"fc.weight": torch.zeros(32, 64)}, bad / "model.safetensors")
        evaluate("--bench", bench, "--model", bad, *words, **QUICK).fails(1, f"bad{number}")


# Heads of other programs


def test_heads_in_the_layouts_of_other_programs(
    copied: Callable[..., Path], model: Path, bench: Path, tmp_path: Path
) -> None:
    run = copied("medusa")
    ours = accepted_of(["--model", run], bench, tmp_path / "ours")
    weights = own_weights(run)
    config = {"medusa_num_heads": 5, "medusa_num_layers": 2, "base_model_name_or_path": "x/y"}

    def check(name: str, write: Callable[[Path], None], *words: str) -> None:
        where = tmp_path / name
        where.mkdir()
        (where / "config.json").write_text(json.dumps(config))
        write(where)
        settings = QUICK | {"generate": False, "prompt_lookup": False}
        shown = evaluate(
            "--bench", bench, "--model", where, "--base-model", model, "--tree", run / "tree.json",
            **settings, output_dir=tmp_path / f"{name}-out",
        ).ok()  # fmt: skip
        shown.says(*words)
        lines = read_lines(tmp_path / f"{name}-out" / "answers.jsonl")
        assert [line["accepted"] for line in lines] == ours

    check("pt", lambda where: torch.save(weights, where / "medusa_lm_head.pt"))
    prefixed = {f"medusa_head.{name}": tensor for name, tensor in weights.items()}
    check("prefixed", lambda where: torch.save(prefixed, where / "medusa_lm_head.pt"))
    check("tgi", lambda where: save_file(weights, where / "medusa_lm_head.safetensors"))

    def vllm(where: Path) -> None:
        save_file(renamed(weights), where / "model.safetensors")
        vllm_config = {"model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": 32}
        vllm_config |= {"vocab_size": 300, "truncated_vocab_size": 300, "num_heads": 3}
        vllm_config |= {"num_hidden_layers": 2, "medusa_fc_bias": True}
        (where / "config.json").write_text(json.dumps(vllm_config))

    check("vllm", vllm)


class Code:
    """Runs when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (importlib.import_module, ("this",))


def test_heads_that_are_refused(
    copied: Callable[..., Path], model: Path, bench: Path, tmp_path: Path
) -> None:
    weights = own_weights(copied("medusa"))
    nan = weights["1.0.linear.bias"].clone()
    nan[3] = torch.nan
    cases: list[tuple[dict[str, Any], str]] = [
        ({"9.7.other": torch.ones(2)}, "9.7.other"),
        ({"0.0.linear.bias": torch.ones(32, dtype=torch.int32)}, "0.0.linear.bias"),
        ({"1.0.linear.bias": nan}, "1.0.linear.bias"),
        ({"0.0.linear.weight": torch.ones(32, 31)}, "0.0.linear.weight"),
        ({"2.1.linear.weight": None}, "2.1.linear.weight"),
    ]
    for number, (changes, words) in enumerate(cases):
        where = tmp_path / str(number)
        where.mkdir()
        given = {n: t for n, t in {**weights, **changes}.items() if t is not None}
        save_file(given, where / "medusa_lm_head.safetensors")
        (where / "config.json").write_text('{"medusa_num_heads": 3, "medusa_num_layers": 2}')
        found = evaluate("--bench", bench, "--model", where, "--base-model", model, **QUICK)
        assert found.code == 1, (changes.keys(), found.text)
        assert words in found.text or "2.1" in words
    where = tmp_path / "code"
    where.mkdir()
    torch.save({"0.0.linear.weight": Code()}, where / "medusa_lm_head.pt")
    (where / "config.json").write_text('{"medusa_num_heads": 3, "medusa_num_layers": 2}')
    evaluate("--bench", bench, "--model", where, "--base-model", model, **QUICK).fails(
        1, "medusa_lm_head.pt"
    )


def test_a_checksum_of_heads_is_compared(
    copied: Callable[..., Path], bench: Path, tmp_path: Path
) -> None:
    run = copied("medusa")
    path = run / "heads" / "medusa_lm_head.safetensors"
    content = bytearray(path.read_bytes())
    content[-7] ^= 1
    path.write_bytes(content)
    evaluate("--bench", bench, "--model", run, **QUICK).fails(1, "medusa_lm_head.safetensors")
    weights = {"0.0.linear.weight": torch.eye(32), "0.0.linear.bias": torch.zeros(32)}
    save_file({**weights, "0.1.weight": torch.ones(300, 32)}, path)
    (run / "heads" / "config.json").write_text('{"medusa_num_heads": 1, "medusa_num_layers": 1}')
    write_tree(run / "tree.json", [(0,)])
    evaluate("--bench", bench, "--model", run, **QUICK, output_dir=tmp_path / "out").ok().says(
        "checksum"
    )


# Trained models


def test_a_merged_model_and_its_heads(
    model: Path, chats: Path, exact_model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    keys = training_keys(model, chats, tmp_path / "run", max_steps=4, **LORA)
    train(**keys).ok()
    export(tmp_path / "run", "--to", "merged").ok()
    target = tmp_path / "run" / "export" / "merged"
    found = tensors(target / "model.safetensors")
    base = tensors(model / "model.safetensors")
    adapter = tensors(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    changed = 0
    for name, weight in base.items():
        a = adapter.get(f"base_model.model.{name.removesuffix('.weight')}.lora_A.weight")
        b = adapter.get(f"base_model.model.{name.removesuffix('.weight')}.lora_B.weight")
        expected = weight if a is None or b is None else weight + 3.0 * b @ a
        changed += a is not None
        torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-6)
    assert changed == 22
    assert (target / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    export(tmp_path / "run", "--to", "vllm").ok().says(str(target))
    config = read_json(tmp_path / "run" / "export" / "vllm" / "config.json")
    assert config["base_model_name_or_path"] == str(target)


def test_answers_end_in_a_merged_model_where_the_template_ends_them(
    model: Path, chats: Path, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(model, base)
    config = read_json(base / "generation_config.json")
    (base / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": 9}))
    keys = training_keys(base, chats, tmp_path / "run", max_steps=1, **LORA)
    train(**keys).ok()
    export(tmp_path / "run", "--to", "merged").ok()
    merged = read_json(tmp_path / "run" / "export" / "merged" / "generation_config.json")
    assert sorted(merged["eos_token_id"]) == [EOS, 9]
    export(tmp_path / "run", "--to", "vllm", base_model=base).ok()


def test_a_merged_model_has_the_template_of_training(
    model: Path, chats: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    template = tmp_path / "mine.jinja"
    template.write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
        "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    keys = training_keys(model, chats, tmp_path / "run", max_steps=1, **LORA)
    train(**keys, chat_template=template).ok()
    export(tmp_path / "run", "--to", "merged").ok()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "export" / "merged")
    asked = [{"role": "user", "content": "two"}]
    prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert prompt == "[user]two[assistant]"


# Cards and directories


def test_a_card_says_what_was_trained_and_measured(
    copied: Callable[..., Path], bench: Path, chats: Path, own: Path
) -> None:
    run = copied("medusa")
    settings = {**QUICK, "exactness": True}
    evaluate("--bench", bench, "--model", run, **settings).ok()
    report = read_json(run / "eval" / "two" / "report.json")["overall"]
    export(run, "--to", "vllm", license="mit").ok()
    card = (run / "export" / "vllm" / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\n")
    assert "license: mit" in card
    assert own.name in card
    assert f"{report['acceleration_rate']:.2f}" in card
    assert "`learning_rate` | 0.01" in card
    assert "vllm serve" in card


def test_only_an_earlier_export_is_written_over(
    copied: Callable[..., Path], tmp_path: Path
) -> None:
    run = copied("medusa")
    for _ in range(2):
        export(run, "--to", "tgi", "--output-dir", tmp_path / "out").ok()
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    export(run, "--to", "vllm", "--output-dir", tmp_path / "out").fails(1, str(tmp_path / "out"))
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    export(run, "--to", "tgi", "--output-dir", run).fails(1)
    export(run, "--to", "no_such").fails(2, "no_such")
    export(tmp_path / "none", "--to", "tgi").fails(1, "none")


def test_another_name_of_the_target_model(copied: Callable[..., Path]) -> None:
    run = copied("medusa")
    export(run, "--to", "tgi", base_model="owner/model").ok()
    config = read_json(run / "export" / "tgi" / "config.json")
    assert config["base_model_name_or_path"] == "owner/model"


def test_without_a_name_the_run_with_the_newest_heads_is_exported(
    copied: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copied("medusa")
    runs = tmp_path / "runs"
    for name, age in (("b", 2), ("a", 1), ("c", 3)):
        shutil.copytree(run, runs / name)
        for file in (runs / name / "heads").iterdir():
            os.utime(file, (2_000_000_000 - age,) * 2)
    monkeypatch.chdir(tmp_path)
    export("--to", "tgi").ok()
    assert [path.parent.name for path in runs.glob("*/export")] == ["a"]
