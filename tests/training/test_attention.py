"""Which attention a run trains with, and that it says so."""

from __future__ import annotations

import pytest

from medusa_train.training import attention
from medusa_train.training.attention import choose_attention
from tests.families import random_backbone
from tests.varlen import APART, LEAKING


def test_on_a_cpu_a_mask_is_used_whatever_is_asked_for() -> None:
    for wanted, reason in (("auto", "no kernels for a cpu"), (True, "no kernels for a cpu"), (False, "false")):
        backbone = random_backbone("llama")
        line = choose_attention(backbone, wanted, packed=True)
        assert line.startswith("attention: torch's sdpa with a block-diagonal mask")
        assert reason in line
        assert not backbone.varlen


def test_rows_of_one_conversation_need_neither() -> None:
    assert "causal" in choose_attention(random_backbone("llama"), True, packed=False)


def test_where_nothing_stands_in_the_way_the_kernel_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "flash_obstacle", lambda *args, **facts: None)
    monkeypatch.setattr(attention, "FLASH", APART)
    backbone = random_backbone("llama")
    assert "varlen kernel" in choose_attention(backbone, "auto", packed=True)
    assert backbone.varlen
    assert "flash_attention: false" in choose_attention(random_backbone("llama"), False, packed=True)


@pytest.mark.parametrize("kernel", [LEAKING, "flash_attention_2"])
def test_a_kernel_that_leaks_or_cannot_be_loaded_leaves_the_mask(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "flash_obstacle", lambda *args, **facts: None)
    monkeypatch.setattr(attention, "FLASH", kernel)
    backbone = random_backbone("llama")
    line = choose_attention(backbone, "auto", packed=True)
    assert line.startswith("attention: torch's sdpa with a block-diagonal mask for packed rows (")
    assert not backbone.varlen
    assert backbone.config._attn_implementation == "sdpa"
