"""EAGLE-3 drafts in the layouts of vLLM, SGLang and speculators: names, shapes, and reading back."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from medusa_train.checkpoint.heads import load_draft, save_draft
from medusa_train.checkpoint.resolve import resolve_model
from medusa_train.cli.export import app
from medusa_train.errors import CheckpointError
from medusa_train.export.write import export_run
from medusa_train.models.drafts.eagle3 import Eagle3Draft
from medusa_train.models.loading import load_target_model
from medusa_train.models.target_model import TargetModel
from medusa_train.models.target_states import Rows
from tests.families import random_target_model

TOKENS = torch.tensor([[3, 14, 15, 9, 26, 5]])
VOCABULARY = torch.tensor([40, 3, 14, 15, 9, 26, 5, 0, 1, 2, 35, 8, 20, 30, 33, 60])


@pytest.fixture
def target_model(target_model_dir: Path) -> TargetModel:
    return load_target_model(str(target_model_dir), dtype="float32", device="cpu")


def new_draft(target_model: TargetModel, **settings: object) -> Eagle3Draft:
    draft = Eagle3Draft.from_target_model(target_model, **settings)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return draft.eval()


def outputs(draft: Eagle3Draft, target_model: TargetModel) -> list[torch.Tensor]:
    """The tokens of the best guesses in each step, which no order of the vocabulary changes."""
    states = draft.teacher_forced_states(
        target_model.run(TOKENS, aux_layers=draft.aux_layers), Rows.from_tokens(TOKENS)
    )
    head = draft.lm_head(1)
    return [head.tokens_of(head.logits(state).topk(5).indices) for state in states]


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("to", ["vllm", "sglang", "speculators"])
def test_an_export_read_back_drafts_the_same(
    to, reduced, target_model_dir, target_model, tmp_path: Path
) -> None:
    draft = new_draft(
        target_model, **{"vocab_size": len(VOCABULARY), "token_map": VOCABULARY} if reduced else {}
    )
    heads = save_draft(draft, tmp_path / "heads", str(target_model_dir))
    exported = export_run(resolve_model(str(heads), None, None), to, tmp_path / to)
    served = next(fact for fact in exported.facts if fact.startswith("serve it"))
    # as docs/how-to/serve-with-vllm.md and README say: with 3 a CPU was no faster
    assert ('"num_speculative_tokens": 2}' in served) == (to == "vllm")
    # vLLM refuses it for all tokens
    assert ("d2t" in load_file(exported.target / "model.safetensors")) == reduced
    loaded = load_draft(exported.target, target_model)
    assert isinstance(loaded, Eagle3Draft)
    assert loaded.aux_layers == draft.aux_layers
    for mine, theirs in zip(
        outputs(draft, target_model), outputs(loaded, target_model), strict=True
    ):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("trained", "proposed"), [(1, 1), (2, 2), (3, 3), (5, 3)])
def test_speculators_propose_at_most_three_tokens_and_no_more_than_were_trained(
    trained: int, proposed: int, target_model_dir: Path, target_model: TargetModel, tmp_path: Path
) -> None:
    draft = new_draft(target_model, num_heads=trained)
    heads = save_draft(draft, tmp_path / "heads", str(target_model_dir))
    exported = export_run(resolve_model(str(heads), None, None), "speculators", tmp_path / "out")
    config = json.loads((exported.target / "config.json").read_text())["speculators_config"]
    (method,) = config["proposal_methods"]
    assert method == {"proposal_type": "greedy", "speculative_tokens": proposed}
    assert config["default_proposal_method"] == method["proposal_type"]


def test_speculators_propose_three_tokens_where_the_draft_does_not_say_how_many(
    target_model_dir: Path, target_model: TargetModel, tmp_path: Path
) -> None:
    heads = save_draft(new_draft(target_model), tmp_path / "heads", str(target_model_dir))
    served = export_run(resolve_model(str(heads), None, None), "sglang", tmp_path / "sglang").target
    config = json.loads((served / "config.json").read_text())
    assert not {"num_heads", "speculative_tokens"} & config.keys()
    paths = resolve_model(str(served), str(target_model_dir), None)
    exported = export_run(paths, "speculators", tmp_path / "out").target
    config = json.loads((exported / "config.json").read_text())["speculators_config"]
    assert config["proposal_methods"][0]["speculative_tokens"] == 3


def test_names_and_shapes_are_those_that_servers_read(
    target_model_dir, target_model, tmp_path: Path
) -> None:
    draft = new_draft(target_model, vocab_size=len(VOCABULARY), token_map=VOCABULARY)
    paths = resolve_model(
        str(save_draft(draft, tmp_path / "heads", str(target_model_dir))), None, None
    )
    (paths.home / "config.yaml").write_text("datasets: [{path: chats.jsonl}]\nlearning_rate: 0.5\n")
    export_run(paths, "vllm", tmp_path / "vllm")
    card = (tmp_path / "vllm/README.md").read_text()
    assert [
        text in card for text in ("chats.jsonl", "`learning_rate` | 0.5", str(target_model_dir))
    ] == [True, True, False]
    tensors = load_file(tmp_path / "vllm/model.safetensors")
    config = json.loads((tmp_path / "vllm/config.json").read_text())
    d, layer = target_model.hidden_size, target_model.config
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    sizes = [config[name] for name in ("num_hidden_layers", "draft_vocab_size", "vocab_size")]
    assert sizes == [1, 16, target_model.vocab_size]
    assert config["eagle_aux_hidden_state_layer_ids"] == list(draft.aux_layers)
    assert tensors["fc.weight"].shape == (d, 3 * d)
    assert tensors["midlayer.self_attn.q_proj.weight"].shape[1] == 2 * d
    assert tensors["midlayer.mlp.up_proj.weight"].shape == (layer.intermediate_size, d)
    assert tensors["lm_head.weight"].shape == (16, d)
    assert {"midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight", "norm.weight"} < set(
        tensors
    )
    tokens = tensors["d2t"] + torch.arange(16)
    assert torch.equal(tokens, VOCABULARY.sort().values)
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], tokens)
    export_run(paths, "sglang", tmp_path / "sglang")
    eagle = json.loads((tmp_path / "sglang/config.json").read_text())["eagle_config"]
    assert eagle["eagle_aux_hidden_state_layer_ids"] == [count - 1 for count in draft.aux_layers]
    export_run(paths, "speculators", tmp_path / "speculators")
    assert "layers.0.mlp.up_proj.weight" in load_file(tmp_path / "speculators/model.safetensors")
    with pytest.raises(CheckpointError, match="exported --to vllm, sglang, speculators"):
        export_run(paths, "tgi", tmp_path / "tgi")
    # published drafts may lack them
    for key in ("eagle_aux_hidden_state_layer_ids", "base_model_name_or_path"):
        del config[key]
    config["architectures"] = ["LlamaForCausalLM"]  # of the authors' own
    (tmp_path / "vllm/config.json").write_text(json.dumps(config))
    keys = [f"base_model={target_model_dir}", f"output_dir={tmp_path / 'again'}"]
    assert CliRunner().invoke(app, [str(tmp_path / "vllm"), "--to", "vllm", *keys]).exit_code == 0
    again = json.loads((tmp_path / "again/config.json").read_text())
    assert again["eagle_aux_hidden_state_layer_ids"] == list(draft.aux_layers)


def test_a_published_draft_of_another_shape_loads(tmp_path: Path) -> None:
    """Its layer is wider than the target model's, its residual normalised, and it has its own copy of
    the embeddings.
    """
    # the draft has Llama's, which its config.json omits
    angles = {"rope_type": "default", "rope_theta": 5e5}
    target_model = random_target_model("llama", dtype=torch.float32, rope_parameters=angles)
    layer = {
        "intermediate_size": 96,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    rope = {"rope_parameters": {**angles, "rope_theta": 1e4}}
    draft = new_draft(
        target_model, layer={**layer, **rope}, norm_before_residual=True, own_embeddings=True
    )
    draft.embed_tokens.weight.normal_()
    tensors = {name: tensor.contiguous() for name, tensor in draft.state_dict().items()}
    tensors["lm_head.weight"] = tensors.pop("lm_heads.0.weight")
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    sizes = {"hidden_size": 32, "max_position_embeddings": 128, "vocab_size": 61, **layer}
    config = {
        "speculators_model_type": "eagle3",
        "norm_before_residual": True,
        "transformer_layer_config": sizes,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load_draft(tmp_path, target_model)
    assert isinstance(loaded, Eagle3Draft)
    for mine, theirs in zip(
        outputs(draft, target_model), outputs(loaded, target_model), strict=True
    ):
        assert torch.equal(mine, theirs)
    assert (
        load_draft(save_draft(loaded, tmp_path / "again", "somebody/model"), target_model).settings
        == loaded.settings
    )
    del config["norm_before_residual"]  # servers take it as set in this layout
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_draft(tmp_path, target_model).settings == loaded.settings
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "transformer_layer_config": {"hidden_size": "x"}})
    )
    with pytest.raises(CheckpointError, match="not a valid configuration of a layer"):
        load_draft(tmp_path, target_model)


NARROW = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "head_dim": 8}
VARIANTS = {
    "qk_norm": True,
    "norm_before_fc": True,
    "fc_norm": True,
    "norm_output": True,
    "own_embeddings": True,
}


def variant(target_model: TargetModel) -> Eagle3Draft:
    """A draft narrower than its target model, with all norms that trainers add."""
    draft = new_draft(
        target_model, layer=NARROW, vocab_size=len(VOCABULARY), token_map=VOCABULARY, **VARIANTS
    )
    draft.embed_tokens.weight.normal_()
    return draft


def written(draft: Eagle3Draft, target_model_dir: Path, tmp_path: Path, to: str = "vllm") -> Path:
    heads = save_draft(draft, tmp_path / "heads", str(target_model_dir))
    return export_run(resolve_model(str(heads), None, None), to, tmp_path / to).target


def rewrite(directory: Path, change_tensors: dict[str, object], **entries: object) -> None:
    """Replace tensors (None: remove) and entries of config.json."""
    tensors = {**load_file(directory / "model.safetensors"), **change_tensors}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **entries}))


@pytest.mark.parametrize("to", ["vllm", "speculators"])
def test_norms_embeddings_and_width_of_other_trainers_come_back(
    to, target_model_dir, target_model, tmp_path: Path
) -> None:
    draft = variant(target_model)
    target = written(draft, target_model_dir, tmp_path, to)
    config = json.loads((target / "config.json").read_text())
    assert config["target_hidden_size"] == target_model.hidden_size
    assert {"input_norm.weight", "fc_norm.2.weight", "embed_tokens.weight"} < set(
        load_file(target / "model.safetensors")
    )
    again = load_draft(tmp_path / "heads", target_model)
    loaded = load_draft(target, target_model)
    for other in (again, loaded):
        assert {name: other.settings[name] for name in VARIANTS} == VARIANTS
        for mine, theirs in zip(
            outputs(draft, target_model), outputs(other, target_model), strict=True
        ):
            assert torch.equal(mine, theirs)
    with pytest.raises(CheckpointError, match="SGLang does not compute norm_before_fc"):
        export_run(
            resolve_model(str(target), str(target_model_dir), None), "sglang", tmp_path / "s"
        )


def test_a_norm_before_the_residual_is_an_error_for_sglang(
    target_model_dir: Path, target_model: TargetModel, tmp_path: Path
) -> None:
    draft = new_draft(target_model, norm_before_residual=True)
    with pytest.raises(CheckpointError, match="SGLang does not compute norm_before_residual"):
        written(draft, target_model_dir, tmp_path, "sglang")


def test_a_draft_with_the_layer_of_qwen3_names_it(
    target_model_dir, target_model, tmp_path: Path
) -> None:
    draft = new_draft(target_model, qk_norm=True)
    vllm = written(draft, target_model_dir, tmp_path)
    config = json.loads((vllm / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["Eagle3Qwen3ForCausalLM"], "qwen3")
    paths = resolve_model(str(tmp_path / "heads"), None, None)
    speculators = export_run(paths, "speculators", tmp_path / "speculators").target
    layer = json.loads((speculators / "config.json").read_text())["transformer_layer_config"]
    assert (layer["architectures"], layer["model_type"]) == (["Qwen3ForCausalLM"], "qwen3")
    with pytest.raises(CheckpointError, match="SGLang does not compute norms of queries and keys"):
        export_run(paths, "sglang", tmp_path / "sglang")


def test_flags_in_eagle_config_and_an_older_name_are_read(
    target_model_dir, target_model, tmp_path: Path
) -> None:
    target = written(variant(target_model), target_model_dir, tmp_path)
    flags = {"norm_before_fc": True, "norm_output": True}
    rewrite(target, {}, **dict.fromkeys(flags, False), eagle_config=flags)
    rewrite(target, {}, fc_norm=False, use_aux_norm=True)
    assert load_draft(target, target_model).settings.items() >= VARIANTS.items()


def test_tokens_follow_from_t2d_where_d2t_is_missing(
    target_model_dir, target_model, tmp_path: Path
) -> None:
    target = written(variant(target_model), target_model_dir, tmp_path)
    rewrite(target, {"d2t": None})
    assert torch.equal(load_draft(target, target_model).token_map, VOCABULARY.sort().values)


@pytest.mark.parametrize(
    ("tensors", "entries", "message"),
    [
        ({"d2t": None, "t2d": None}, {}, "d2t, which says which tokens they are, is missing"),
        ({"t2d": torch.ones(3, dtype=torch.bool), "d2t": None}, {}, "t2d has 3 tokens"),
        ({"embed_tokens.weight": None}, {}, "embed_tokens.weight is missing; a draft of"),
        ({"layers.1.mlp.up_proj.weight": torch.ones(2)}, {}, "has a second layer"),
        ({}, {"model_type": "llama"}, "norms queries and keys, which servers compute only"),
        ({"midlayer.self_attn.k_norm.weight": None}, {}, "incomplete, midlayer.self_attn.k_norm"),
        ({"midlayer.self_attn.q_proj.bias": torch.ones(2)}, {}, "a bias that config.json does not"),
        ({"something.weight": torch.ones(2)}, {}, "something.weight: not a tensor of an EAGLE-3"),
        ({"midlayer.mlp.up_proj.weight_scale": torch.ones(2)}, {}, "of quantized weights, which"),
        ({"fc_norm.1.weight": None}, {}, "incomplete, fc_norm.1.weight missing"),
        ({}, {"fc_norm": False}, "a norm that config.json does not name"),
        ({}, {"num_hidden_layers": 2}, "num_hidden_layers 2"),
        ({}, {"layer_types": ["sliding_attention"], "sliding_window": 9}, "a sliding window of 9"),
        ({}, {"logit_scale": 0.5}, "logit_scale 0.5"),
        ({}, {"draft_vocab_size": 9}, "lm_head has 16 rows, but draft_vocab_size is 9"),
        ({}, {"target_hidden_size": 20}, "three states of 20"),
        ({}, {"intermediate_size": 32}, "not those that config.json describes"),
        ({}, {"eagle_config": ["x"]}, r"eagle_config \['x'\] in config.json is not a mapping"),
    ],
)
def test_what_a_draft_lacks_or_has_too_much_is_named(
    tensors, entries, message, target_model_dir, target_model, tmp_path: Path
) -> None:
    target = written(variant(target_model), target_model_dir, tmp_path)
    rewrite(target, tensors, **entries)
    with pytest.raises(CheckpointError, match=message) as error:
        load_draft(target, target_model)
    assert "Name the target model" not in str(error.value)


@pytest.mark.parametrize("layers", ["x", 3, -2, {"a": 1}, [1, 2], [2, "4", 6], [2, 4, True]])
@pytest.mark.parametrize("first", [0, 1])
def test_layers_that_are_not_three_numbers_are_refused(
    layers, first, target_model_dir, target_model, tmp_path: Path
) -> None:
    target = written(variant(target_model), target_model_dir, tmp_path)
    layers_entry = {"eagle_aux_hidden_state_layer_ids": layers}
    if first == 0:
        layers_entry = {"eagle_config": layers_entry}
    rewrite(target, {}, **layers_entry)
    message = f"{layers!r} in config.json are not three layers, counted from {first}"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load_draft(target, target_model)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, "not three layers, counted from 1"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 0, 1]}}, "counted from 0"),
    ],
)
def test_layers_before_the_first_are_refused(
    entries, message, target_model_dir, target_model, tmp_path: Path
) -> None:
    target = written(variant(target_model), target_model_dir, tmp_path)
    rewrite(target, {}, **entries)
    with pytest.raises(CheckpointError, match=message):
        load_draft(target, target_model)


def test_a_draft_of_another_target_model_is_told_so(
    target_model_dir, target_model, tmp_path: Path
) -> None:
    target = written(variant(target_model), target_model_dir, tmp_path)
    with pytest.raises(CheckpointError, match=r"fc reads states of .* Name the target model"):
        load_draft(target, random_target_model("llama", dtype=torch.float32, hidden_size=96))


def test_entries_and_tensors_that_are_not_read_are_named_once(
    target_model_dir, target_model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = written(variant(target_model), target_model_dir, tmp_path)
    rewrite(target, {"rotary_emb.inv_freq": torch.ones(4)}, zyxw=3)
    load_draft(target, target_model)
    load_draft(target, target_model)
    assert caplog.messages == [f"{target}: not read: rotary_emb.inv_freq, zyxw"]


@pytest.mark.parametrize(
    ("to", "architecture", "warned"),
    [
        ("vllm", "Gemma3ForCausalLM", True),
        ("speculators", "Gemma3ForCausalLM", True),
        ("sglang", "Gemma3ForCausalLM", False),
        ("vllm", "LlamaForCausalLM", False),
        ("vllm", "SmolLM3ForCausalLM", False),  # vLLM runs it by its Transformers backend
        ("vllm", "MixtralForCausalLM", True),
    ],
)
def test_a_target_model_without_states_in_vllm_is_named(
    to, architecture, warned, target_model, target_model_dir, tmp_path: Path
) -> None:
    base = Path(shutil.copytree(target_model_dir, tmp_path / "base"))
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    heads = save_draft(new_draft(target_model), tmp_path / "heads", str(base))
    exported = export_run(resolve_model(str(heads), None, None), to, tmp_path / to)
    said = [w for w in exported.warnings if f"cannot draft with EAGLE-3 for {architecture}" in w]
    assert len(said) == warned
    assert all("--model-impl transformers" in warning for warning in said)
