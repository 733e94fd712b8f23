"""Published drafts by their true shapes: they load, and guess what a server computes from the same
files.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from medusa_train.checkpoint.heads import load_draft, read_heads
from medusa_train.checkpoint.resolve import names_no_target_model, resolve_model
from medusa_train.errors import CheckpointError
from medusa_train.models.drafts.eagle3 import Eagle3Draft
from medusa_train.models.target_model import TargetModel
from medusa_train.models.target_states import Rows
from tests.checkpoint.others import D, V, reference_tensors, vllm_tensors, write
from tests.checkpoint.published import EAGLE3, Sizes, write_eagle3
from tests.families import random_target_model

TOKENS = torch.tensor([[3, 14, 15, 9, 26, 5, 35]])
LAYERS = 8
SIZES = Sizes(vocab_size=61, hidden_size=32, draft_vocab_size=20)


@pytest.fixture(scope="module")
def target_model() -> TargetModel:
    return random_target_model("llama", dtype=torch.float32, num_hidden_layers=LAYERS)


def load_eagle3(directory: Path, target_model: TargetModel) -> Eagle3Draft:
    draft = load_draft(directory, target_model)
    assert isinstance(draft, Eagle3Draft)
    return draft


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()


def served_logits(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], model: Any, tokens: Tensor
) -> Tensor:
    """The logits [V] of the first draft token behind `tokens` [1, T], as vLLM computes them from
    the files of a draft, in float32: minus infinity for tokens that it does not have.
    """
    layer = config.get("transformer_layer_config", config)
    eps = layer["rms_norm_eps"]
    w = {}
    for name, tensor in tensors.items():
        plain = name.removeprefix("layers.0.").removeprefix("midlayer.")
        w[plain] = tensor.float() if tensor.is_floating_point() else tensor
    embeddings = w.get("embed_tokens.weight", model.get_input_embeddings().weight)
    lm_head = w.get("lm_head.weight", model.get_output_embeddings().weight)
    # 1. the states after these layers: those of eagle_config are counted from 0
    layers = config.get("eagle_aux_hidden_state_layer_ids") or [2, LAYERS // 2, LAYERS - 3]
    if "eagle_config" in config:
        layers = [i + 1 for i in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
    states = model(tokens, output_hidden_states=True).hidden_states
    parts = [states[i][0, :-1] for i in sorted(layers)]  # 3 times [T - 1, d]
    if config.get("fc_norm"):
        parts = [rms(part, w[f"fc_norm.{i}.weight"], eps) for i, part in enumerate(parts)]
    x = torch.cat(parts, dim=-1) @ w["fc.weight"].T
    # 2. attention over the token after each position, and its state
    normed = rms(x, w["hidden_norm.weight"], eps)
    residual = normed if config.get("norm_before_residual") else x
    embedded = rms(embeddings[tokens[0, 1:]], w["input_layernorm.weight"], eps)
    both = torch.cat([embedded, normed], dim=-1)  # [T - 1, 2 d]
    heads = {}
    for letter in "qkv":
        split = (both @ w[f"self_attn.{letter}_proj.weight"].T).unflatten(-1, (-1, SIZES.head_dim))
        if f"self_attn.{letter}_norm.weight" in w:
            split = rms(split, w[f"self_attn.{letter}_norm.weight"], eps)
        heads[letter] = split.transpose(0, 1)[None]  # [1, heads, T - 1, head_dim]
    cos, sin = angles(layer, both)
    query, key = apply_rotary_pos_emb(heads["q"], heads["k"], cos, sin)
    attended = scaled_dot_product_attention(query, key, heads["v"], is_causal=True, enable_gqa=True)
    x = residual + attended[0].transpose(0, 1).flatten(1) @ w["self_attn.o_proj.weight"].T
    # 3. MLP and logits
    normed = rms(x, w["post_attention_layernorm.weight"], eps)
    gated = silu(normed @ w["mlp.gate_proj.weight"].T) * (normed @ w["mlp.up_proj.weight"].T)
    x = x + gated @ w["mlp.down_proj.weight"].T
    logits = rms(x[-1], w["norm.weight"], eps) @ lm_head.T  # [N]
    if "d2t" not in w:
        return logits
    scattered = torch.full((SIZES.vocab_size,), -torch.inf)
    scattered[w["d2t"] + torch.arange(len(logits))] = logits
    return scattered


def angles(layer: Mapping[str, Any], x: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the positions of x, [1, T - 1, head_dim]; theta is 10,000 unless
    named.
    """
    rope = dict(layer.get("rope_parameters") or layer.get("rope_scaling") or {})
    rope.setdefault("rope_type", "default")
    rope.setdefault("rope_theta", layer.get("rope_theta", 10000.0))
    config = LlamaConfig(
        head_dim=SIZES.head_dim,
        max_position_embeddings=layer["max_position_embeddings"],
        rope_parameters=rope,
    )
    positions = torch.arange(len(x))[None]
    cos, sin = LlamaRotaryEmbedding(config)(x, positions)
    return cos, sin


@pytest.mark.parametrize("name", EAGLE3)
def test_a_published_draft_guesses_what_servers_compute(
    name: str, target_model: TargetModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    published = EAGLE3[name]
    sizes = SIZES
    if "lm_head.weight" in published.without:
        sizes = Sizes(vocab_size=61, hidden_size=32, draft_vocab_size=61)
    tensors = write_eagle3(tmp_path, published, sizes)
    (tmp_path / "eagle3.py").write_text("raise SystemExit")  # no code of a repository runs
    draft = load_draft(tmp_path, target_model)
    assert isinstance(draft, Eagle3Draft)
    assert caplog.messages == []
    with torch.no_grad():
        hidden_states = target_model.run(TOKENS, aux_layers=draft.aux_layers)
        first = next(draft.teacher_forced_states(hidden_states, Rows.from_tokens(TOKENS)))
        logits = draft.lm_head(1).logits(first[0, -2])
        config = json.loads((tmp_path / "config.json").read_text())
        expected = served_logits(tensors, config, target_model.model, TOKENS)
    found = torch.full_like(expected, -torch.inf)
    tokens = torch.arange(SIZES.vocab_size) if draft.token_map is None else draft.token_map
    found[tokens] = logits
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)


def test_the_verifier_of_speculators_is_the_target_model(tmp_path: Path) -> None:
    write_eagle3(tmp_path, EAGLE3["speculators-0.2"], SIZES)
    assert resolve_model(str(tmp_path), None, None).target_model == "some/verifier"
    assert resolve_model(str(tmp_path), "other/model", None).target_model == "other/model"
    assert names_no_target_model(
        str(tmp_path)
    )  # so that an export takes the one that the user names


def test_norms_of_queries_and_keys_need_the_layer_of_qwen3(
    target_model: TargetModel, tmp_path: Path
) -> None:
    write_eagle3(tmp_path, EAGLE3["speculators-qwen3"], SIZES)
    config = json.loads((tmp_path / "config.json").read_text())
    config["transformer_layer_config"]["model_type"] = "llama"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="only where model_type is qwen3"):
        load_draft(tmp_path, target_model)


def test_the_layer_of_qwen3_needs_its_norms(target_model: TargetModel, tmp_path: Path) -> None:
    tensors = write_eagle3(tmp_path, EAGLE3["speculators-qwen3"], SIZES)
    without = {
        name: t for name, t in tensors.items() if ".self_attn." not in name or "_proj" in name
    }
    save_file(without, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"k_norm\.weight, .*q_norm\.weight missing"):
        load_draft(tmp_path, target_model)


def test_vllm_s_name_of_the_layer_of_llama_wins_over_model_type(
    target_model: TargetModel, tmp_path: Path
) -> None:
    published = EAGLE3["specforge"]
    layer = {**published.layer, "model_type": "qwen3"}
    write_eagle3(tmp_path, replace(published, layer=layer), SIZES)
    assert "qk_norm" not in load_draft(tmp_path, target_model).settings


def test_layers_that_the_target_model_does_not_have_are_refused(
    target_model: TargetModel, tmp_path: Path
) -> None:
    write_eagle3(tmp_path, EAGLE3["specforge"], SIZES)
    config = json.loads((tmp_path / "config.json").read_text())
    eagle = config["eagle_config"]
    eagle["eagle_aux_hidden_state_layer_ids"] = [1, 3, 7]  # the last one
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_eagle3(tmp_path, target_model).aux_layers == (2, 4, 8)
    eagle["eagle_aux_hidden_state_layer_ids"] = [1, 3, 8]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=r"after 9 layers, the target model has 8\)\. Name the"
    ):
        load_draft(tmp_path, target_model)


def test_states_are_read_in_the_order_of_their_layers(
    target_model: TargetModel, tmp_path: Path
) -> None:
    write_eagle3(tmp_path, EAGLE3["modelopt"], SIZES)  # names [1, 5, 3]
    assert load_eagle3(tmp_path, target_model).aux_layers == (2, 4, 6)


def test_a_layer_of_qwen3_has_the_defaults_of_qwen3(
    target_model: TargetModel, tmp_path: Path
) -> None:
    sizes = replace(SIZES, head_dim=128)
    write_eagle3(tmp_path, EAGLE3["speculators-qwen3"], sizes)
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("head_dim", "rms_norm_eps", "max_position_embeddings"):
        del config["transformer_layer_config"][key]
    (tmp_path / "config.json").write_text(json.dumps(config))
    attention = load_eagle3(tmp_path, target_model).midlayer.self_attn
    # of Llama: hidden_size / num_attention_heads and 2,048
    assert (attention.head_dim, attention.config.max_position_embeddings) == (128, 32768)
    assert attention.q_norm.variance_epsilon == 1e-6


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_input_layernorm_in_first_layer", False),
        ("use_last_layernorm", False),
        ("use_mtp_layernorm", True),
        ("next_layer_regular", False),
        ("parallel_draft_step", 2),
        ("has_lm_head", False),
    ],
)
def test_an_entry_by_which_a_draft_may_compute_otherwise_is_named(
    key: str,
    value: object,
    target_model: TargetModel,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    published = EAGLE3["modelopt"]
    eagle = {**published.config["eagle_config"], key: value}
    write_eagle3(
        tmp_path, replace(published, config={**published.config, "eagle_config": eagle}), SIZES
    )
    load_draft(tmp_path, target_model)
    assert caplog.messages == [f"{tmp_path}: not read: eagle_config.{key}"]


def test_a_missing_lm_head_is_the_target_model_s_only_for_all_tokens(
    target_model: TargetModel, tmp_path: Path
) -> None:
    tensors = write_eagle3(tmp_path, EAGLE3["specforge"], SIZES)
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight missing .* draft_vocab_size is 20"):
        load_draft(tmp_path, target_model)


def test_weights_in_several_files_are_read_together(
    target_model: TargetModel, tmp_path: Path
) -> None:
    tensors = write_eagle3(tmp_path, EAGLE3["specforge"], SIZES)
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    for number, part in enumerate((names[:5], names[5:]), 1):
        shard = {name: tensors[name] for name in part}
        save_file(shard, tmp_path / f"model-0000{number}-of-00002.safetensors")
    draft = load_draft(tmp_path, target_model)
    assert torch.equal(draft.state_dict()["fc.weight"], tensors["fc.weight"].float())


def test_a_draft_without_its_weights_is_named_so(target_model: TargetModel, tmp_path: Path) -> None:
    write_eagle3(tmp_path, EAGLE3["authors"], SIZES)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match="no weights next to it"):
        load_draft(tmp_path, target_model)


def test_published_medusa_heads_load_as_they_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # 1. converted for vLLM: without biases, and null for the size of the vocabulary
    tensors = {name: t for name, t in vllm_tensors(5).items() if not name.endswith(".bias")}
    config = {
        "_name_or_path": "somebody/heads",
        "architectures": ["MedusaModel"],
        "hidden_size": D,
        "model_type": "medusa",
        "num_heads": 5,
        "num_hidden_layers": 1,
        "transformers_version": "4.41.2",
        "truncated_vocab_size": None,
        "vocab_size": V,
    }
    assert read_heads(write(tmp_path / "vllm", tensors, config, "model.safetensors")).num_heads == 5
    assert caplog.messages == []
    # 2. the authors' own: a pickle, beside the number of heads of another training
    authors = tmp_path / "authors"
    authors.mkdir()
    torch.save(reference_tensors(5, dtype=torch.bfloat16), authors / "medusa_lm_head.pt")
    config = {
        "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
        "medusa_num_heads": 2,
        "medusa_num_layers": 1,
        "transformers_version": "4.31.0",
    }
    (authors / "config.json").write_text(json.dumps(config))
    assert read_heads(authors).num_heads == 5
    (note,) = caplog.messages
    assert "config.json has medusa_num_heads: 2, the tensors are of 5: all are used" in note
