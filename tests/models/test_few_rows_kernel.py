"""The built kernel is attention by the book, and where it can't be built torch's own does the work."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from medusa_train.inference.generate import Decoder
from medusa_train.models import few_rows, few_rows_kernel
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.models.few_rows import few_rows_forward
from medusa_train.trees.tree import Tree
from tests.families import random_backbone
from tests.models.test_few_rows import Attends, by_the_book

HIDDEN = float("-inf")


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def made(rows: int, heads: int, kv_heads: int, q: int, keys: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """As decoding has them: queries beside each other, keys and values a part of a larger cache."""
    generator = torch.Generator().manual_seed(heads + q + keys)
    query = torch.randn(rows, q, heads, size, generator=generator).bfloat16().transpose(1, 2)
    stored = torch.randn(2, rows, kv_heads, keys + 3, size, generator=generator).bfloat16()
    key, value = stored.narrow(3, 0, keys)
    return query, key, value


def tree_mask(rows: int, q: int, keys: int) -> Tensor:
    """Some keys hidden from each row, a whole block from all, the first block from some; the last key from none.

    A part of a larger one, as decoding has it.
    """
    generator = torch.Generator().manual_seed(q)
    mask = torch.randn(rows, 1, q, keys + 5, generator=generator).bfloat16()[..., :keys]
    mask[torch.rand(mask.shape, generator=generator) < 0.4] = HIDDEN
    mask[..., 64:128] = HIDDEN
    mask[..., : min(keys, 64) // 3] = 0
    mask[:, :, ::3, :64] = HIDDEN
    mask[..., -1] = 0
    return mask


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(6, 2, 64), (4, 4, 32), (1, 1, 96), (8, 1, 128), (2, 1, 256)])
@pytest.mark.parametrize("q", [1, 2, 7, 17, 33, 70])
@pytest.mark.parametrize("keys", [1, 11, 65, 129, 200])
@pytest.mark.parametrize("masks", [0, 1, 2])
def test_it_is_attention_by_the_book(heads: int, kv_heads: int, size: int, q: int, keys: int, masks: int) -> None:
    query, key, value = made(2, heads, kv_heads, q, keys, size)
    mask = tree_mask(masks, q, keys) if masks else None
    assert few_rows_kernel.takes(query, key, value, mask)
    with one_thread():  # or many threads would take few rows each
        found = few_rows_kernel.attend(query, key, value, mask, 0.2)
    expected = by_the_book(*(x.double() for x in (query, key, value)), None if mask is None else mask.double(), 0.2)
    # weights and the result are rounded to 8 bits
    torch.testing.assert_close(found.double(), expected.transpose(1, 2), rtol=8e-3, atol=8e-3)


@pytest.mark.usefixtures("kernel")
def test_its_errors_are_those_of_bfloat16_alone() -> None:
    """Over many keys the mean error is that of torch's own kernel, which rounds at the same places."""
    query, key, value = made(1, 6, 2, 17, 1000, 64)
    exact = by_the_book(query.double(), key.double(), value.double(), None, 0.125)
    ours = few_rows_kernel.attend(query, key, value, None, 0.125).transpose(1, 2)
    stock = torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    ours_off, stock_off = ((found.double() - exact).abs().mean() for found in (ours, stock))
    assert ours_off < 1.1 * stock_off


@pytest.mark.usefixtures("kernel")
def test_large_scores_neither_overflow_nor_vanish() -> None:
    query, key, value = made(1, 2, 2, 5, 150, 64)
    found = few_rows_kernel.attend(query * 100, key, value, None, 1.0)
    expected = by_the_book(query.double() * 100, key.double(), value.double(), None, 1.0)
    torch.testing.assert_close(found.double(), expected.transpose(1, 2), rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("kernel")
def test_a_row_that_sees_nothing_is_zero_and_the_others_are_not_touched() -> None:
    query, key, value = made(1, 2, 1, 4, 100, 32)
    mask = torch.zeros(1, 1, 4, 100, dtype=torch.bfloat16)
    whole = few_rows_kernel.attend(query, key, value, mask, 0.2)
    mask[:, :, 2] = HIDDEN
    found = few_rows_kernel.attend(query, key, value, mask, 0.2)
    assert not found[:, 2].any()
    assert torch.equal(found[:, [0, 1, 3]], whole[:, [0, 1, 3]])


@pytest.mark.usefixtures("kernel")
def test_what_is_hidden_from_all_is_not_read() -> None:
    query, key, value = made(1, 2, 1, 4, 200, 32)
    mask = torch.zeros(1, 1, 4, 200, dtype=torch.bfloat16)
    mask[..., 64:] = HIDDEN
    expected = few_rows_kernel.attend(query, key[:, :, :64], value[:, :, :64], None, 0.2)
    key[:, :, 64:], value[:, :, 64:] = torch.nan, torch.nan
    assert torch.equal(few_rows_kernel.attend(query, key, value, mask, 0.2), expected)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("where", [0, 1, 2])
def test_nan_is_not_swallowed(where: int) -> None:
    given = made(1, 2, 1, 4, 100, 32)
    given[where][:, :, 3, 5] = torch.nan
    assert few_rows_kernel.attend(*given, None, 0.2)[:, 3].isnan().any()


@pytest.mark.usefixtures("kernel")
def test_the_number_of_threads_changes_nothing() -> None:
    given = made(2, 8, 1, 17, 5000, 64)
    mask = tree_mask(1, 17, 5000)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 16):
            torch.set_num_threads(threads)
            found.append(few_rows_kernel.attend(*given, mask, 0.125))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("case", ["size", "values", "float32", "mask", "one mask for all rows"])
def test_what_it_is_not_made_for_it_leaves_alone(case: str) -> None:
    query, key, value = made(1, 4, 2, 3, 20, 40 if case == "size" else 64)
    mask = torch.zeros(1, 1, 3, 20, dtype=torch.float32 if case == "mask" else torch.bfloat16)
    if case == "one mask for all rows":
        mask = mask[:, :, :1]
    if case == "values":
        value = value[..., :32]
    if case == "float32":
        query, key, value = query.float(), key.float(), value.float()
    assert not few_rows_kernel.takes(query, key, value, mask)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("wrong", ["heads", "keys", "mask"])
def test_shapes_that_do_not_fit_are_refused(wrong: str) -> None:
    query, key, value = made(1, 4, 2, 3, 20, 64)
    mask = torch.zeros(1, 1, 3, 19 if wrong == "mask" else 20, dtype=torch.bfloat16)
    if wrong == "heads":
        query = query[:, :3]
    if wrong == "keys":
        value = value[:, :, :19]
    with pytest.raises(RuntimeError, match="few_rows"):
        few_rows_kernel.attend(query, key, value, mask, 0.2)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("q", [1, 5])
def test_transformers_interface_hands_over_to_it(q: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object) -> Tensor:
        raise AssertionError("torch's kernel")

    query, key, value = made(1, 4, 2, q, 90, 64)
    mask = torch.zeros(1, 1, q, 90, dtype=torch.bfloat16)
    stock = few_rows.few_rows_attention(query, key, value, mask).transpose(1, 2)
    monkeypatch.setattr(few_rows, "few_rows_attention", never)
    monkeypatch.setattr(few_rows, "sdpa_attention_forward", never)
    with torch.no_grad():
        found, _ = few_rows_forward(Attends(2), query, key, value, mask)
    torch.testing.assert_close(found, stock, rtol=1e-2, atol=1e-2)


@pytest.mark.slow
@pytest.mark.usefixtures("kernel")
def test_a_compiled_model_decodes_with_it(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "_faster", lambda *shape: True)
    seen = []
    attend = few_rows_kernel.attend
    monkeypatch.setattr(few_rows_kernel, "attend", lambda *given: (seen.append(1), attend(*given))[1])
    backbone = random_backbone("llama", dtype=torch.bfloat16, head_dim=32, max_position_embeddings=256)
    draft = MedusaDraft.from_backbone(backbone, 3)
    tree = Tree.cartesian([3, 2])
    plain = Decoder(backbone, draft, None).generate([5, 9, 11], 40).tokens
    backbone.compile_passes(kernels)
    assert seen  # looked through twice by torch.compile: for plain steps, and for trees
    answers = [Decoder(backbone, draft, one).generate([5, 9, 11], 40).tokens for one in (None, tree)]
    same = sum(a == b for a, b in zip(answers[0], plain, strict=True))
    assert answers[0][:4] == plain[:4], same  # further on bfloat16 may part at a tie
    assert len(answers[1]) == len(plain)


def test_without_the_instructions_nothing_is_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(few_rows_kernel, "is_loaded", lambda: False)
    monkeypatch.setattr(few_rows_kernel, "can_run", lambda: False)
    assert not few_rows_kernel.load(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_a_compiler_that_fails_costs_speed_and_nothing_else(
    compiler: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(few_rows_kernel, "is_loaded", lambda: False)
    monkeypatch.setattr(few_rows_kernel, "can_run", lambda: True)
    with caplog.at_level(logging.INFO):
        assert not few_rows_kernel.load(tmp_path, {"CXX": compiler})
    assert "ours could not be built" in caplog.text
    assert not list(tmp_path.iterdir())  # nothing half made is left


@pytest.mark.usefixtures("kernel")
def test_it_is_built_once(tmp_path: Path) -> None:
    library = few_rows_kernel.build(tmp_path)
    at = library.stat().st_mtime_ns
    assert few_rows_kernel.build(tmp_path) == library
    assert library.stat().st_mtime_ns == at
    assert [path.name for path in tmp_path.iterdir()] == [library.name]


@pytest.mark.usefixtures("kernel")
def test_a_broken_library_is_built_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = few_rows_kernel.build(tmp_path)
    whole = library.read_bytes()
    library.write_bytes(whole[:5000])
    tried = []

    def load_library(path: str) -> None:
        tried.append(Path(path).read_bytes() == whole)
        if not tried[-1]:
            raise OSError("file too short")

    monkeypatch.setattr(few_rows_kernel, "is_loaded", lambda: False)
    monkeypatch.setattr(torch.ops, "load_library", load_library)
    monkeypatch.setattr(torch.library, "register_fake", lambda *given: None)
    assert few_rows_kernel.load(tmp_path)
    assert tried == [False, True]


def test_headers_that_torch_cannot_name_are_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(few_rows_kernel, "is_loaded", lambda: False)
    monkeypatch.setattr(few_rows_kernel, "can_run", lambda: True)
    monkeypatch.setitem(sys.modules, "torch.utils.cpp_extension", None)
    assert not few_rows_kernel.load(tmp_path)
