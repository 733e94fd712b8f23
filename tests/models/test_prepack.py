"""Prepacked weights give the same products, and are not used for gradients or after a conversion."""

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from medusa_train.models import prepack
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.models.precision import emulates
from medusa_train.models.prepack import (
    PrepackedLinear,
    PrepackedWeight,
    is_prepacked,
    prepack_linears,
    worth_prepacking,
)
from medusa_train.models.target_states import HiddenStates
from medusa_train.trees.tree import Tree
from tests.models.drafts.steps import DraftRows

needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch is built without oneDNN"
)


@pytest.fixture
def always_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepack, "_is_faster", lambda weights: True)


in_bfloat16 = pytest.mark.skipif(
    emulates(torch.device("cpu"), torch.bfloat16), reason="this CPU has no bfloat16 instructions"
)


@needs_onednn
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-5), pytest.param(torch.bfloat16, 2e-2, marks=in_bfloat16)],
)
@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("bias", [True, False])
def test_a_prepacked_weight_gives_the_same_product(
    dtype: torch.dtype, tolerance: float, rows: int, bias: bool
) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(40, 24, dtype=dtype), torch.randn(2, rows, 24, dtype=dtype)
    offset = torch.randn(40, dtype=dtype) if bias else None
    with torch.inference_mode():
        torch.testing.assert_close(
            PrepackedWeight(weight).linear(x, offset),
            linear(x, weight, offset),
            rtol=tolerance,
            atol=tolerance,
        )


@needs_onednn
def test_gradients_come_from_the_plain_weights() -> None:
    layer = nn.Linear(8, 6)
    prepacked = PrepackedLinear(layer)
    x = torch.randn(3, 8, requires_grad=True)
    prepacked(x).square().sum().backward()
    assert prepacked.weight is layer.weight
    torch.testing.assert_close(layer.weight.grad, 2 * layer(x).T @ x)


@needs_onednn
def test_a_conversion_drops_the_prepacked_weights(always_faster: None) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    assert prepack_linears(model)
    assert is_prepacked(model)
    x = torch.randn(2, 8)
    model.double()  # prepacked float32 weights would fail, or use old values
    with torch.no_grad():
        assert model(x.double()).dtype == torch.float64


@needs_onednn
def test_subclasses_of_linear_are_not_replaced(always_faster: None) -> None:
    class Special(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(8, 8), Special(8, 8))
    assert prepack_linears(model)
    assert isinstance(model[0], PrepackedLinear)
    assert type(model[1]) is Special


def test_nothing_is_prepacked_without_memory_or_kernels(
    monkeypatch: pytest.MonkeyPatch, always_faster: None
) -> None:
    weights = [nn.Parameter(torch.zeros(100, 100))]
    monkeypatch.setattr(prepack, "free_memory", lambda device: 100 * 100 * 4)
    assert not worth_prepacking(weights)
    monkeypatch.setattr(prepack, "free_memory", lambda device: None)
    assert worth_prepacking(weights) == torch.backends.mkldnn.is_available()
    assert not worth_prepacking([nn.Parameter(torch.zeros(4, 4, dtype=torch.float64))])
    assert not prepack_linears(nn.Sequential(nn.ReLU()))


@needs_onednn
@pytest.mark.parametrize(
    ("layers", "bias", "shared"),
    [(1, False, False), (2, True, False), (1, False, True), (0, True, False)],
)
def test_prepacked_heads_propose_the_same(
    always_faster: None, layers: int, bias: bool, shared: bool
) -> None:
    torch.manual_seed(1)
    draft = MedusaDraft(
        16, 50, 4, layers, bias=bias, shared=MedusaDraft(16, 50, 1).lm_head(1) if shared else None
    )
    for parameter in draft.parameters():
        nn.init.normal_(parameter, std=0.3)
    hidden_states = HiddenStates(torch.randn(2, 5, 16))
    tokens = torch.zeros(2, 5, dtype=torch.long)
    tree = Tree.cartesian([3, 2, 2])
    last_tokens = torch.tensor([7, 9])

    def propose() -> torch.Tensor:
        return DraftRows(draft, hidden_states, tokens, [5, 3]).propose(last_tokens, tree).tokens

    with torch.inference_mode():
        plain = propose()
        assert prepack_linears(draft)
        assert torch.equal(propose(), plain)
        draft.float()  # drops the prepacked weights
        assert torch.equal(propose(), plain)
