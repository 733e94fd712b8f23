"""The attention kernel of a run, and heads to start from in every supported layout."""

from pathlib import Path
from typing import cast

import pytest
import torch

from medusa_train.checkpoint.heads import VLLM_WEIGHTS, save_draft, write_weights
from medusa_train.checkpoint.medusa_layouts import HeadTensors, to_vllm
from medusa_train.checkpoint.resolve import find_initial_adapter, find_initial_heads
from medusa_train.models import loading as attention
from medusa_train.models.document_attention import DOCUMENTS
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.models.loading import choose_attention, load_target_model
from medusa_train.training.load_data import TrainingData
from medusa_train.training.setup import build_heads
from tests.families import random_target_model
from tests.varlen import APART, LEAKING

DOCUMENTS_APART = "torch sdpa, one call per document, for packed rows ("
MASKED = "torch eager with a mask for packed rows ("
WINDOWS = "one call per document, for rows with sliding windows"


@pytest.mark.parametrize(
    ("family", "wanted", "packed", "words", "varlen"),
    [
        ("llama", "auto", True, [DOCUMENTS_APART, "needs a GPU"], True),
        ("llama", True, True, [DOCUMENTS_APART, "needs a GPU"], True),
        ("llama", False, True, [DOCUMENTS_APART, "flash_attention: false"], True),
        ("gemma2", "auto", True, [MASKED, "soft-capped scores or sinks"], False),
        ("llama", True, False, ["causal"], False),
        ("mistral-window", "auto", False, [WINDOWS], True),
    ],
)
def test_on_a_cpu_documents_are_kept_apart_whatever_is_asked_for(
    family: str, wanted: bool | str, packed: bool, words: list[str], varlen: bool
) -> None:
    target_model = random_target_model(family)
    assert all(map(choose_attention(target_model, wanted, packed=packed).__contains__, words))
    assert target_model.varlen == varlen


def test_where_nothing_stands_in_the_way_the_kernel_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "flash_unsupported_reason", lambda *args, **facts: None)
    monkeypatch.setattr(attention, "FLASH", APART)
    target_model = random_target_model("llama")
    assert (
        choose_attention(target_model, "auto", packed=True)
        == "attention: flash-attn varlen kernel for packed rows"
    )
    assert target_model.config._attn_implementation == APART


@pytest.mark.parametrize("kernel", [LEAKING, "flash_attention_2"])
def test_a_kernel_that_leaks_or_cannot_be_loaded_is_not_used(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "flash_unsupported_reason", lambda *args, **facts: None)
    monkeypatch.setattr(attention, "FLASH", kernel)
    target_model = random_target_model("llama")
    line = choose_attention(target_model, "auto", packed=True)
    assert line.startswith("attention: torch sdpa, one call per document, for packed rows (")
    assert target_model.config._attn_implementation == DOCUMENTS


def test_where_every_kernel_leaks_a_mask_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "register_document_attention", lambda: LEAKING)
    target_model = random_target_model("llama")
    line = choose_attention(target_model, "auto", packed=True)
    assert line.startswith("attention: torch sdpa_folded_heads with a mask for packed rows (")
    assert "mixes packed documents" in line
    assert not target_model.varlen
    assert target_model.config._attn_implementation == target_model.attention


@pytest.mark.parametrize("form", ["run", "safetensors", "pt", "vllm"])
def test_heads_are_taken_over_from_whoever_wrote_them(  # type: ignore[no-untyped-def]
    make_config, console, tmp_path: Path, target_model_dir: Path, form: str
) -> None:
    target_model = load_target_model(str(target_model_dir))
    draft = MedusaDraft.from_target_model(target_model, 3)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += torch.randn_like(parameter)
    earlier = tmp_path / "earlier"
    heads = HeadTensors(3, 1, dict(draft.state_dict()), "m")
    if form == "vllm":
        write_weights(earlier, VLLM_WEIGHTS, *to_vllm(heads))
    else:
        where = save_draft(draft, earlier / "heads" if form == "run" else earlier, "m")
        if form == "pt":
            from safetensors.torch import load_file

            torch.save(load_file(where / "medusa_lm_head.safetensors"), where / "medusa_lm_head.pt")
            (where / "medusa_lm_head.safetensors").unlink()
    cfg = make_config(lora_model_dir=str(earlier))
    assert find_initial_heads(cfg.initial_run) == (earlier / "heads" if form == "run" else earlier)
    assert find_initial_adapter(cfg.initial_run) is None
    # data are read for new heads only
    taken = build_heads(cfg, cast(TrainingData, None), target_model, console)
    ours, theirs = draft.state_dict(), taken.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert find_initial_heads(make_config().initial_run) is None
