"""Compiled layers of a frozen target model compute what the layers do, by few programs, and in no other
pass.
"""

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from medusa_train.errors import TargetModelError
from medusa_train.models import compiled
from medusa_train.models.compiled import compile_layers
from medusa_train.models.document_attention import register_document_attention
from medusa_train.models.target_model import TargetModel
from tests.families import random_target_model

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="torch.compile needs a C++ compiler",
)
AUX_LAYERS = (1,)
#: rows, length and whether rows are packed: one row and several, with a mask and without one
FIRST = [(1, 12, False), (3, 14, False), (1, 16, True), (2, 18, True)]
LATER = [(1, 30, False), (5, 9, False), (1, 21, True), (4, 11, True), (2, 13, False)]


Compiled = Callable[[], AbstractContextManager[None]]


def compiled_layers_of(target_model: TargetModel) -> Compiled:
    return compile_layers(target_model.layers)


def programs() -> int:
    return int(counters["stats"]["unique_graphs"])


def batch(rows: int, length: int, packed: bool) -> dict[str, Tensor]:
    """Random tokens; in packed rows a second document begins in the middle, and the first row ends
    with padding.
    """
    segments, positions = (
        torch.zeros(rows, length, dtype=torch.long),
        torch.arange(length).repeat(rows, 1),
    )
    if packed:
        half = length // 2
        segments[:, half:], positions[:, half:] = 1, torch.arange(length - half)
        segments[0, -2:] = -1
    tokens = torch.randint(
        3, 60, (rows, length), generator=torch.Generator().manual_seed(rows * length)
    )
    return {"tokens": tokens, "positions": positions, "segments": segments}


@torch.no_grad()
def check_states(
    target_model: TargetModel, compiled: Compiled, rows: int, length: int, packed: bool
) -> None:
    inputs = batch(rows, length, packed)
    expected = target_model.run(**inputs, aux_layers=AUX_LAYERS)
    with compiled():
        hidden_states = target_model.run(**inputs, aux_layers=AUX_LAYERS)
    torch.testing.assert_close(hidden_states.final, expected.final)
    torch.testing.assert_close(hidden_states.aux, expected.aux)


@pytest.mark.usefixtures("traced_layers")
@pytest.mark.parametrize(("family", "kinds"), [("llama", 1), ("gemma3", 2)])
def test_states_are_equal_and_other_shapes_need_no_other_programs(family: str, kinds: int) -> None:
    target_model = random_target_model(family, dtype=torch.float32)
    compiled = compiled_layers_of(target_model)
    before = programs()
    for shape in FIRST:
        check_states(target_model, compiled, *shape)
    assert kinds <= programs() - before <= 4 * kinds
    before = programs()
    for shape in LATER:
        check_states(target_model, compiled, *shape)
    assert programs() == before


@pytest.mark.usefixtures("traced_layers")
def test_documents_of_any_lengths_share_a_program() -> None:
    target_model = random_target_model("mistral-window", dtype=torch.float32)
    target_model.use_varlen(register_document_attention())
    compiled = compiled_layers_of(target_model)
    for shape in FIRST:
        check_states(target_model, compiled, *shape)
    before = programs()
    for shape in LATER:
        check_states(target_model, compiled, *shape)
    assert programs() == before


@pytest.mark.usefixtures("traced_layers")
def test_layers_run_as_they_are_outside() -> None:
    target_model = random_target_model("llama", dtype=torch.float32)
    compiled = compiled_layers_of(target_model)
    before = programs()
    with pytest.raises(ValueError, match="input_ids"), compiled():
        target_model.run(None)  # type: ignore[arg-type]
    target_model.run(**batch(2, 12, packed=False))
    assert programs() == before
    assert set(target_model.model.state_dict()) == set(
        random_target_model("llama").model.state_dict()
    )


def test_what_is_missing_or_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    target_model = random_target_model("llama", dtype=torch.float32)
    monkeypatch.setattr(compiled, "has_compiler", lambda device: False)
    with pytest.raises(TargetModelError, match=r"torch_compile: needs a C\+\+ compiler"):
        compiled_layers_of(target_model)
    monkeypatch.setattr(compiled, "has_compiler", lambda device: True)
    compile_ = torch.compile

    def fail(*args: object) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(torch, "compile", lambda function, **keys: compile_(function, backend=fail))
    with pytest.raises(
        TargetModelError, match=r"torch_compile: torch.compile failed: .*\nLeave the key out"
    ):
        check_states(target_model, compiled_layers_of(target_model), 2, 12, False)
    torch.compiler.reset()


@needs_compiler
@pytest.mark.slow
def test_compiled_states_are_equal_up_to_rounding() -> None:
    torch.compiler.reset()
    target_model = random_target_model("gemma3", dtype=torch.float32)
    compiled = compiled_layers_of(target_model)
    for shape in (*FIRST, *LATER):
        check_states(target_model, compiled, *shape)
