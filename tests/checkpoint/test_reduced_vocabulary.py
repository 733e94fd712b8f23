"""Heads over a reduced vocabulary on disk: ours, vLLM's, and what is no such thing."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from medusa_train.checkpoint.heads import (
    VLLM_WEIGHTS,
    load_draft,
    read_heads,
    read_token_map,
    save_draft,
    write_heads,
    write_weights,
)
from medusa_train.checkpoint.medusa_layouts import expand_rows, from_files, to_vllm
from medusa_train.checkpoint.resolve import DRAFT
from medusa_train.errors import CheckpointError
from medusa_train.models.drafts import DRAFTS
from medusa_train.models.drafts.medusa import MedusaDraft
from tests.checkpoint.others import D, V, vllm_config, vllm_tensors
from tests.checkpoint.published import EAGLE3, Sizes, write_eagle3
from tests.checkpoint.test_vllm_layout import same
from tests.checkpoint.vllm_rules import loader_problems
from tests.families import random_target_model

KEPT = torch.tensor([40, 3, 9, 21, 60, 5, 33, 0])


def draft(*, share: bool, dtype: torch.dtype = torch.float32) -> MedusaDraft:
    target_model = random_target_model("llama", dtype=dtype)
    original = MedusaDraft.from_target_model(
        target_model, 3, 2, share_lm_head=share, vocab_size=8, token_map=KEPT
    )
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.normal_(0, 0.1)
    return original


def reduced(**more: Tensor | None) -> dict[str, Tensor]:
    """vLLM's tensors with the first four rows of each matrix, for tokens of some numbers."""
    tensors = {
        name: t[:4] if name.startswith("lm_heads") else t for name, t in vllm_tensors().items()
    }
    tensors["token_map"] = torch.tensor([10, 2, 0, 7])
    return {name: t for name, t in {**tensors, **more}.items() if t is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["hydra", "amphista"])
def test_other_drafts_are_the_same_once_saved_and_loaded(
    tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    target_model = random_target_model("llama", dtype=dtype)
    original = DRAFTS[kind].from_target_model(
        target_model, num_heads=2, vocab_size=8, token_map=KEPT
    )
    save_draft(original, tmp_path, "m")
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == 8
    again = load_draft(tmp_path, target_model)
    assert again.settings == original.settings
    assert same(again.state_dict(), original.state_dict())
    assert again.lm_head(2).tokens_of(torch.tensor([4])).tolist() == [60]


@pytest.mark.parametrize(
    ("token_map", "words"),
    [
        (None, "token_map is missing, but .*config.json has vocab_size"),
        (
            torch.arange(54, 62),
            r"token_map has the token 61, the target model 61 tokens.*\(some/model\)",
        ),
        (torch.tensor([0, 1, 2, 3, 4, 5, 6, 6]), "duplicate or negative token ids"),
        (torch.tensor([0, 1, 2, 3, 4, 5, 6, -1]), "duplicate or negative token ids"),
        (torch.arange(8).view(2, 4), "not a list of token ids"),
        (torch.arange(7), "7 tokens for matrices of 8 rows"),
    ],
)
def test_a_broken_token_map_of_other_drafts_is_named(
    tmp_path: Path, token_map: Tensor | None, words: str
) -> None:
    target_model, settings = (
        random_target_model("llama", dtype=torch.float32),
        {"vocab_size": 8, "token_map": KEPT},
    )
    save_draft(
        DRAFTS["hydra"].from_target_model(target_model, num_heads=1, **settings),
        tmp_path,
        "some/model",
    )
    tensors = {
        name: tensor for name, tensor in load_file(tmp_path / DRAFT).items() if name != "token_map"
    }
    save_file(
        tensors if token_map is None else {**tensors, "token_map": token_map}, tmp_path / DRAFT
    )
    with pytest.raises(CheckpointError, match=words) as caught:
        load_draft(tmp_path, target_model)
    assert DRAFT in str(caught.value)


def test_a_vocabulary_of_another_size_than_the_config_says_is_named(tmp_path: Path) -> None:
    target_model = random_target_model("llama", dtype=torch.float32)
    save_draft(
        DRAFTS["hydra"].from_target_model(target_model, num_heads=1, vocab_size=8, token_map=KEPT),
        tmp_path,
        "m",
    )
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 9}))
    with pytest.raises(
        CheckpointError, match="heads over 9 tokens need a token_map of that length"
    ):
        load_draft(tmp_path, target_model)


def test_the_vocabulary_is_read_alone_from_every_layout(tmp_path: Path) -> None:
    """Ours, vLLM's and that of EAGLE-3 drafts, whose map has offsets; none without one."""
    ours = save_draft(draft(share=False), tmp_path / "ours", "m")
    tensors, config = to_vllm(read_heads(ours), None)
    write_weights(tmp_path / "vllm", VLLM_WEIGHTS, tensors, config)
    target_model = random_target_model("llama", dtype=torch.float32)
    hydra = DRAFTS["hydra"].from_target_model(
        target_model, num_heads=2, vocab_size=8, token_map=KEPT
    )
    save_draft(hydra, tmp_path / "hydra", "m")
    for name in ("ours", "vllm", "hydra"):
        found = read_token_map(tmp_path / name)
        assert found is not None
        assert found.tolist() == KEPT.tolist()
    sizes = Sizes(vocab_size=61, hidden_size=32, draft_vocab_size=20)
    eagle3 = write_eagle3(tmp_path / "eagle3", EAGLE3["authors"], sizes)
    found = read_token_map(tmp_path / "eagle3")
    assert found is not None
    assert found.tolist() == (eagle3["d2t"] + torch.arange(20)).tolist()
    save_draft(MedusaDraft.from_target_model(target_model, 2), tmp_path / "whole", "m")
    assert read_token_map(tmp_path / "whole") is None


@pytest.mark.parametrize("share", [False, True])
def test_ours_vllm_ours_is_equal_to_the_bit(tmp_path: Path, share: bool) -> None:
    original, target_model = draft(share=share), random_target_model("llama", dtype=torch.float32)
    heads = read_heads(save_draft(original, tmp_path / "ours", "m"))
    tensors, config = to_vllm(heads, target_model.output_embeddings.weight if share else None)
    write_weights(tmp_path / "vllm", VLLM_WEIGHTS, tensors, config)
    assert (config["vocab_size"], config["truncated_vocab_size"], config["medusa_vocab_size"]) == (
        61,
        61,
        8,
    )
    assert torch.equal(tensors["token_map"], KEPT)
    assert loader_problems(tensors, config) == []
    if share:
        assert torch.equal(
            tensors["lm_heads.0.weight"][KEPT], target_model.output_embeddings.weight[KEPT]
        )
    again = read_heads(tmp_path / "vllm")
    assert (again.shared, again.vocab_size) == (share, 61)
    write_heads(again, tmp_path / "last")
    for name in ("medusa_lm_head.safetensors", "config.json"):
        assert (tmp_path / "last" / name).read_bytes() == (tmp_path / "ours" / name).read_bytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [-3.0, 0.0, 3.0])
def test_expanded_matrices_draft_the_same_tokens(dtype: torch.dtype, offset: float) -> None:
    """Whatever the signs of the logits: rows of zeros would win where all logits are negative."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(8, D, generator=generator).add_(offset).to(dtype)
    states = torch.randn(500, D, generator=generator).to(dtype)
    expanded = expand_rows(matrix, KEPT, 61)
    assert expanded.shape == (61, D)
    chosen = (states @ expanded.T).argmax(-1)
    assert set(chosen.tolist()) <= set(KEPT.tolist())
    best = states @ matrix.T  # two kept tokens may tie in bfloat16: then either is right
    assert bool(
        (
            best.gather(1, (chosen[:, None] == KEPT).nonzero()[:, 1:])
            == best.max(-1, keepdim=True).values
        ).all()
    )


@pytest.mark.parametrize("size", [None, 4])
def test_matrices_of_n_rows_as_older_exports_have_them_are_read(size: int | None) -> None:
    keys = {} if size is None else {"medusa_vocab_size": size}
    heads = from_files(reduced(), vllm_config(truncated_vocab_size=4, **keys), "vllm")
    assert torch.equal(heads.state["lm_heads.1.weight"], vllm_tensors()["lm_heads.1.weight"][:4])


def test_rows_of_full_matrices_are_selected_by_the_token_map_as_in_vllm() -> None:
    whole = {**vllm_tensors(), "token_map": torch.tensor([10, 2, 0, 7], dtype=torch.int32)}
    heads = from_files(whole, vllm_config(truncated_vocab_size=4), "vllm")
    assert torch.equal(heads.state["lm_heads.1.weight"], whole["lm_heads.1.weight"][[10, 2, 0, 7]])
    assert heads.token_map is not None
    assert heads.token_map.dtype == torch.int64


def test_a_token_map_that_vllm_ignores_is_ignored() -> None:
    heads = from_files({**vllm_tensors(), "token_map": torch.arange(4)}, vllm_config(), "vllm")
    assert heads.token_map is None
    assert heads.vocab_size == V


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (reduced(token_map=None), "there is no token_map"),
        (reduced(token_map=torch.arange(3)), "token_map has 3"),
        (
            reduced(**{f"lm_heads.{i}.weight": torch.zeros(3, D) for i in range(3)}),
            "4 tokens for matrices of 3 rows",
        ),
    ],
)
def test_what_does_not_fit_is_named(tensors: dict[str, Tensor], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        from_files(tensors, vllm_config(truncated_vocab_size=4), "vllm")


def test_an_unknown_vocabulary_size_is_an_error() -> None:
    heads = from_files({**{f"0.0.linear.{kind}": torch.zeros(*shape) for kind, shape in
                               (("weight", (D, D)), ("bias", (D,)))},
                            "0.1.weight": torch.zeros(4, D), "token_map": torch.arange(4)})  # fmt: skip
    with pytest.raises(CheckpointError, match="vocab_size"):
        to_vllm(heads)


def test_heads_for_more_tokens_than_the_target_model_has_are_refused(tmp_path: Path) -> None:
    original = MedusaDraft(32, 90, 2, token_map=torch.tensor([3, 80]))
    with pytest.raises(CheckpointError, match="a vocabulary of 90"):
        load_draft(save_draft(original, tmp_path, "m"), random_target_model("llama"))
