"""Products of few rows by the built kernel are those of the book; packed heads use them where they are loaded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from medusa_train.models import few_rows_kernel, packed
from medusa_train.models.drafts import packed_heads
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.models.features import Features
from medusa_train.models.few_rows_kernel import Products
from medusa_train.models.packed import Layout
from medusa_train.trees.kv_cache import TreeCache
from medusa_train.trees.tree import Tree

pytestmark = pytest.mark.usefixtures("kernel")


def made(groups: int, rows: int, inputs: int, columns: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Rows [groups, rows, inputs], a matrix and a bias for each group."""
    generator = torch.Generator().manual_seed(groups + rows + inputs + columns)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    weights = [drawn(columns, inputs) / 4 for _ in range(groups)]
    return drawn(groups, rows, inputs), weights, [drawn(columns) for _ in range(groups)]


def by_the_book(x: Tensor, weights: list[Tensor], biases: list[Tensor] | None) -> Tensor:
    each = [row.double() @ weight.double().T for row, weight in zip(x, weights, strict=False)]
    return torch.stack([out if biases is None else out + biases[g].double() for g, out in enumerate(each)])


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 13])
@pytest.mark.parametrize("columns", [1, 15, 16, 64, 100, 161])
@pytest.mark.parametrize(("groups", "inputs"), [(1, 2), (3, 24), (5, 96)])
@pytest.mark.parametrize("bias", [False, True])
def test_they_are_products_by_the_book(rows: int, columns: int, groups: int, inputs: int, bias: bool) -> None:
    x, weights, offsets = made(groups, rows, inputs, columns)
    biases = offsets if bias else None
    found = Products(weights, biases)(x)
    assert found.shape == (groups, rows, columns)
    torch.testing.assert_close(found.double(), by_the_book(x, weights, biases), rtol=4e-3, atol=1e-5)  # one rounding


def test_their_errors_are_those_of_bfloat16_alone() -> None:
    x, weights, _ = made(2, 3, 2048, 320)
    exact = by_the_book(x, weights, None)
    stock = torch.stack([torch.nn.functional.linear(row, weight) for row, weight in zip(x, weights, strict=True)])
    ours_off, stock_off = ((found.double() - exact).abs().mean() for found in (Products(weights)(x), stock))
    assert ours_off < 1.05 * stock_off


def test_fewer_groups_and_rows_that_lie_apart() -> None:
    """Only the first maps; one row for all of them; every other row of a larger tensor: as alone, to the bit."""
    x, weights, biases = made(4, 16, 32, 70)  # every other one: more than are multiplied together
    maps = Products(weights, biases)
    whole = maps(x)
    assert torch.equal(maps(x[:2]), whole[:2])
    assert torch.equal(maps(x[:, ::2]), whole[:, ::2])
    shared = x[1].expand(4, -1, -1)
    assert torch.equal(maps(shared), maps(shared.contiguous()))


def test_the_number_of_threads_changes_nothing() -> None:
    x, weights, biases = made(3, 2, 64, 500)
    maps = Products(weights, biases)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 16):
            torch.set_num_threads(threads)
            found.append(maps(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("where", ["row", "weight", "bias"])
def test_nan_stays_where_it_belongs(where: str) -> None:
    x, weights, biases = made(2, 3, 32, 40)
    {"row": x[1, 2], "weight": weights[1][7], "bias": biases[1][7:8]}[where][:1] = torch.nan
    found = Products(weights, biases)(x)
    wrong = torch.zeros(2, 3, 40, dtype=torch.bool)
    wrong[1, 2 if where == "row" else slice(None), slice(None) if where == "row" else 7] = True
    assert torch.equal(found.isnan(), wrong)


@pytest.mark.parametrize("wrong", ["groups", "inputs", "dtype", "strides"])
def test_rows_that_do_not_fit_are_refused(wrong: str) -> None:
    x, weights, _ = made(2, 3, 32, 40)
    given = {
        "groups": x.repeat(2, 1, 1),
        "inputs": x[..., :30],
        "dtype": x.float(),
        "strides": x.transpose(1, 2).contiguous().transpose(1, 2),
    }[wrong]
    with pytest.raises(RuntimeError, match="few_rows_product"):
        Products(weights)(given)


@pytest.mark.parametrize(("layers", "bias"), [(0, False), (1, False), (2, True)])
def test_packed_heads_propose_with_them(layers: int, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same states and logits as by oneDNN's layouts, but for rounding; and none of these is used."""
    monkeypatch.setattr(packed, "_faster", lambda weights: True)
    torch.manual_seed(1)
    draft = MedusaDraft(32, 50, 4, layers, bias=bias).bfloat16()
    for parameter in draft.parameters():
        nn.init.normal_(parameter, std=0.3)
    hidden = torch.randn(2, 32).bfloat16()

    def made_by(kernel: bool) -> tuple[Tensor, Tensor]:
        monkeypatch.setattr(few_rows_kernel, "is_loaded", lambda: kernel)
        monkeypatch.setattr(packed_heads, "Layout", forbidden if kernel else Layout)
        assert draft.pack()
        assert draft._packed is not None
        states = draft._packed.states(hidden, 3)
        return states, draft._packed.logits(states)

    with torch.inference_mode():
        for ours, onednn in zip(made_by(True), made_by(False), strict=True):
            assert len(ours) == 3
            torch.testing.assert_close(ours, onednn, rtol=2e-2, atol=5e-2)
        logits = made_by(True)[1]
        feats, roots = Features(hidden[:, None]), torch.tensor([7, 9])
        state = draft.start(feats, torch.zeros(2, 1, dtype=torch.long), [1, 1], TreeCache(1, 8))
        guesses = draft.propose(state, roots, Tree.chain(2)).tokens
        assert torch.equal(guesses, torch.stack([roots, *logits[:2].argmax(-1)], dim=1))


def forbidden(weight: Tensor) -> Layout:
    raise AssertionError("oneDNN's layout beside the kernel")
