"""The settings of a backbone with their record in tree.json, and the decoding that the keys
describe.
"""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from medusa_train.config.schema import EvalConfig
from medusa_train.errors import CheckpointError
from medusa_train.inference.accept import Rule, Typical
from medusa_train.inference.decoding_settings import (
    DecodingMode,
    DecodingSettings,
    describe_mode,
    mode_of,
)
from medusa_train.inference.sampling import Sampling
from medusa_train.models.loading import quantization_of
from medusa_train.models.lora import Adapter, LoraSpec
from medusa_train.trees.tree import Tree
from tests.families import random_backbone


def test_the_form_of_a_backbone_on_this_machine() -> None:
    form = DecodingSettings.of(random_backbone("llama", dtype=torch.bfloat16))
    assert (form.dtype, form.quantization, form.merged, form.compiled) == (
        "bfloat16",
        None,
        True,
        False,
    )
    assert form.device == "cpu"
    assert form.device_name
    assert form.threads == torch.get_num_threads()


def test_an_adapter_beside_the_weights_is_another_form_until_it_is_merged() -> None:
    backbone = random_backbone("llama", dtype=torch.float32)
    plain = DecodingSettings.of(backbone)
    adapter = Adapter.attach(backbone, LoraSpec(r=2))
    assert DecodingSettings.of(backbone) == replace(plain, merged=False)
    adapter.merge()
    assert DecodingSettings.of(backbone) == plain


def test_kernels_for_gpus_are_part_of_the_form(tmp_path: Path) -> None:
    backbone = random_backbone("llama", dtype=torch.float32)
    plain = DecodingSettings.of(backbone)
    backbone.gpu_kernels = ("split_attention",)
    form = DecodingSettings.of(backbone)
    assert form.differences(plain) == ["gpu kernels none, now split_attention"]
    record = plain.record()
    tree = tmp_path / "tree.json"
    tree.write_text(json.dumps(record))
    assert DecodingSettings.load(tree) == plain
    del record["form"]["gpu_kernels"]  # as an earlier version wrote it
    tree.write_text(json.dumps(record))
    assert DecodingSettings.load(tree) == plain


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "nf4"),
        ({"load_in_8bit": True}, "int8"),
        ({"quant_method": "awq"}, "awq"),
    ],
)
def test_names_of_quantizations(config: dict[str, object], name: str) -> None:
    model = SimpleNamespace(
        is_quantized=True, config=SimpleNamespace(quantization_config=SimpleNamespace(**config))
    )
    assert quantization_of(model) == name
    model.is_quantized = False
    assert quantization_of(model) is None


def test_tree_json_records_the_form(tmp_path: Path) -> None:
    path = tmp_path / "tree.json"
    form = DecodingSettings("float32", None, True, False, "cpu", "A CPU", 4)
    Tree.chain(2).save(path, **form.record())
    assert Tree.load(path) == Tree.chain(2)
    assert DecodingSettings.load(path) == form
    other = DecodingSettings("bfloat16", "nf4", False, False, "cuda", "A GPU", None)
    assert form.differences(form) == []
    assert other.differences(form) == [
        "dtype float32, now bfloat16",
        "quantization none, now nf4",
        "merged yes, now no",
        "device cpu, now cuda",
        "device name A CPU, now A GPU",
        "threads 4, now none",
    ]


def test_older_trees_on_a_gpu_were_fitted_to_graphs_where_they_say_compiled(tmp_path: Path) -> None:
    path, settings = (
        tmp_path / "tree.json",
        DecodingSettings("float16", None, True, True, "cuda", "A GPU", None),
    )
    record = settings.record()
    del record["form"]["graphs"]
    Tree.chain(2).save(path, **record)
    assert DecodingSettings.load(path) == replace(settings, graphs=True)


@pytest.mark.parametrize(
    "content", [[[0]], {"medusa_choices": [[0]]}, {"medusa_choices": [[0]], "form": {"dtype": "x"}}]
)
def test_a_tree_without_a_whole_record_has_no_known_form(tmp_path: Path, content: object) -> None:
    path = tmp_path / "tree.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    assert DecodingSettings.load(path) is None


def test_a_damaged_tree_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tree.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"tree\.json: not a tree file"):
        DecodingSettings.load(tmp_path / "tree.json")


@pytest.mark.parametrize(
    ("keys", "rule", "baseline", "description", "directory"),
    [
        ({}, None, None, "greedy decoding", "b"),
        ({"batch_size": 4}, None, None, "greedy decoding, in batches of 4", "b-batch4"),
        (
            {"acceptance": "sampling", "top_p": 0.9, "top_k": 50},
            Sampling(0.7, 50, 0.9),
            Sampling(0.7, 50, 0.9),
            "sampling at temperature 0.7, top-p 0.9, top-k 50",
            "b-sampling-t0.7-top_p0.9-top_k50",
        ),
        (
            {
                "acceptance": "typical",
                "temperature": 1,
                "delta": 0.2,
                "top_p": 0.9,
                "batch_size": 2,
            },
            Typical(1.0, 0.09, 0.2),
            Sampling(1.0),
            "typical acceptance at temperature 1 (epsilon 0.09, delta 0.2), in batches of 2",
            "b-typical-t1-delta0.2-batch2",
        ),
    ],
)
def test_what_the_keys_mean(
    keys: dict[str, object], rule: Rule, baseline: Rule, description: str, directory: str
) -> None:
    mode = DecodingMode.from_config(EvalConfig(**keys))
    assert mode.rule == rule
    assert mode.baseline_rule == baseline
    assert describe_mode(mode.as_json) == description
    assert mode.directory_name("b") == directory
    assert mode.generate_options["do_sample"] is (baseline is not None)


def test_reports_in_different_modes_never_share_a_directory() -> None:
    modes = [
        {"acceptance": rule, "temperature": t}
        for rule in ("sampling", "typical")
        for t in (0.7, 1.0)
    ]
    modes += [{"acceptance": "typical", name: 0.05} for name in ("epsilon", "delta")]
    modes += [{}, {"acceptance": "sampling", "seed": 7}, {"acceptance": "sampling", "top_k": 5}]
    names = [DecodingMode.from_config(EvalConfig(**keys)).directory_name("b") for keys in modes]
    assert len(set(names)) == len(names)
    assert (
        DecodingMode().directory_name("b", "prompt_lookup", "dynamic") == "b-prompt_lookup-dynamic"
    )


def test_older_reports_are_of_greedy_decoding() -> None:
    assert mode_of({}) == {"acceptance": "greedy", "batch_size": 1} == mode_of({"decoding": None})


def test_random_numbers_depend_on_seed_and_prompt_alone() -> None:
    mode = DecodingMode("sampling", 0.7)
    prompts = [[1, 2], [3]]
    first, second = (one.initial_seed() for one in mode.generators(prompts, mode.rule) or ())
    assert first != second
    assert mode.seed_of([3]) == second
    assert DecodingMode("sampling", 0.7, seed=1).seed_of([3]) != second
    assert mode.generators(prompts, Typical()) is None
