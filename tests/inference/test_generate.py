"""Tree decoding equals plain decoding: in float64 exactly, for every family, tree shape and edge
case.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from medusa_train.errors import MedusaError
from medusa_train.inference.accept import Rule, Typical
from medusa_train.inference.generate import Decoder
from medusa_train.inference.sampling import Sampling
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.base import Draft, DraftStep, Proposal
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.models.features import Features, TokenRows
from medusa_train.trees.tree import Tree
from tests.families import FAMILIES, random_backbone

TREES = {
    "cartesian": Tree.cartesian([3, 2, 2]),
    "sparse": Tree.from_paths(
        [(0,), (1,), (2,), (5,), (0, 0), (0, 3), (1, 0), (0, 0, 0), (0, 0, 0, 1), (1, 0, 2)]
    ),
    "chain": Tree.chain(4),
}


class OracleDraft(Draft):
    """Proposes the true continuation at one rank path among wrong guesses, so that paths are
    accepted.
    """

    num_heads = 4

    def __init__(
        self, prompt: list[int], answer: list[int], vocab: int, *, wrong_every: int = 0
    ) -> None:
        super().__init__()
        self.text = prompt + answer
        self.vocab = vocab
        self.wrong_every = wrong_every
        self.unused = nn.Parameter(torch.zeros(()))

    def head_states(self, feats: Features, batch: TokenRows):  # type: ignore[no-untyped-def]
        yield feats.hidden

    def lm_head(self, k: int):  # type: ignore[no-untyped-def]
        raise AssertionError("not for training")

    def guess(self, step: DraftStep, states: None) -> Proposal:
        (root,) = step.root_list
        length = int(step.accepted.lengths)
        tree = step.tree
        tokens = [root]
        for i, path in enumerate(tree.paths):
            position = length + len(path)
            truth = self.text[position] if position < len(self.text) else 0
            last = [p for p in tree.paths if p[:-1] == path[:-1]][-1]
            right = path == last and not (self.wrong_every and (length + i) % self.wrong_every == 0)
            tokens.append(truth if right else (truth + 1 + path[-1]) % self.vocab)
        return Proposal(torch.tensor([tokens]), tree)


def _trained_like(backbone: Backbone, seed: int = 1) -> MedusaDraft:
    """Heads with random blocks: their guesses differ from the backbone's and are sometimes right."""
    draft = MedusaDraft.from_backbone(backbone, num_heads=4)
    torch.manual_seed(seed)
    with torch.no_grad():
        for block in draft.blocks.parameters():
            block.normal_(0, 0.05)
    return draft


def _plain(backbone: Backbone, prompt: list[int], count: int) -> list[int]:
    """Greedy decoding by whole forward passes of the stock model, without a cache."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(
                int(backbone.model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
            )
    return ids[len(prompt) :]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_empty_tree_is_the_stock_models_greedy_decoding(family: str) -> None:
    backbone = random_backbone(family)
    prompt = [3, 14, 15, 9, 2, 6, 5, 35]
    out = Decoder(backbone).generate(prompt, 24)
    assert out.tokens == _plain(backbone, prompt, 24)
    assert (out.steps, out.finish) == (23, "length")
    assert len(set(out.tokens)) > 4  # the text varies, so that the comparison can fail


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("family", FAMILIES)
def test_tree_decoding_equals_plain_decoding(family: str, tree: str) -> None:
    backbone = random_backbone(family)
    prompt = [3, 14, 15, 9, 2, 6, 5, 35, 8, 9]
    plain = Decoder(backbone).generate(prompt, 40)
    assert (
        Decoder(backbone, _trained_like(backbone), TREES[tree]).generate(prompt, 40).tokens
        == plain.tokens
    )
    oracle = OracleDraft(prompt, plain.tokens, backbone.vocab_size, wrong_every=5)
    guided = Decoder(backbone, oracle, TREES[tree]).generate(prompt, 40)
    assert guided.tokens == plain.tokens
    assert guided.steps < plain.steps  # accepted nodes were moved in the cache
    assert 1 + guided.steps + sum(guided.accepted) >= 40


def test_a_right_draft_is_accepted_to_the_full_depth() -> None:
    backbone = random_backbone("llama")
    prompt = [7, 7, 30]
    plain = Decoder(backbone).generate(prompt, 33)
    out = Decoder(
        backbone, OracleDraft(prompt, plain.tokens, backbone.vocab_size), Tree.chain(4)
    ).generate(prompt, 31)
    assert out.tokens == plain.tokens[:31]
    assert out.accepted == [4] * 6


def test_nothing_leaks_past_an_eos_inside_an_accepted_path() -> None:
    backbone = random_backbone("llama")
    prompt = [5, 17, 40]
    plain = Decoder(backbone).generate(prompt, 30)
    oracle = OracleDraft(prompt, plain.tokens, backbone.vocab_size)
    for stop in range(1, 12):
        eos = plain.tokens[stop]
        expected = plain.tokens[: plain.tokens.index(eos) + 1]
        out = Decoder(backbone, oracle, Tree.chain(4)).generate(prompt, 30, [eos])
        assert (out.tokens, out.finish) == (expected, "eos")
        assert Decoder(backbone).generate(prompt, 30, [eos]).tokens == expected


@pytest.mark.parametrize("count", range(1, 12))
def test_max_new_tokens_inside_an_accepted_path(count: int) -> None:
    backbone = random_backbone("qwen3")
    prompt = [5, 17, 40]
    plain = Decoder(backbone).generate(prompt, 16)
    oracle = OracleDraft(prompt, plain.tokens, backbone.vocab_size)
    out = Decoder(backbone, oracle, Tree.chain(4)).generate(prompt, count)
    assert (out.tokens, out.finish) == (plain.tokens[:count], "length")


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_contexts_end(family: str) -> None:
    backbone = random_backbone(family)
    backbone.max_context = 24
    prompt = list(range(2, 17))
    plain = Decoder(backbone).generate(prompt, 50)
    assert (len(plain.tokens), plain.finish) == (10, "context")
    assert plain.tokens == _plain(backbone, prompt, 10)
    oracle = OracleDraft(prompt, plain.tokens, backbone.vocab_size)
    for tree in TREES.values():
        out = Decoder(backbone, oracle, tree).generate(prompt, 50)
        assert (out.tokens, out.finish) == (plain.tokens, "context")
    full = Decoder(backbone).generate(list(range(2, 26)), 5)
    assert (len(full.tokens), full.finish) == (1, "context")
    with pytest.raises(MedusaError, match="25 tokens"):
        Decoder(backbone).generate(list(range(2, 27)), 5)


def test_the_cache_is_reused_between_answers_without_effect() -> None:
    backbone = random_backbone("llama")
    decoder = Decoder(backbone, _trained_like(backbone), TREES["cartesian"])
    first = decoder.generate([1, 2, 3, 4, 5], 30).tokens
    second = decoder.generate([9, 8, 7], 12).tokens
    assert decoder.generate([1, 2, 3, 4, 5], 30).tokens == first
    assert Decoder(backbone).generate([9, 8, 7], 12).tokens == second


def test_the_empty_tree_computes_no_heads() -> None:
    backbone = random_backbone("llama")

    class Untouchable(MedusaDraft):
        def read(self, *args: object):  # type: ignore[no-untyped-def]
            raise AssertionError("a head was computed")

    draft = Untouchable(backbone.hidden_size, backbone.vocab_size)
    assert Decoder(backbone, draft, Tree.empty()).generate([4, 5], 8).tokens == _plain(
        backbone, [4, 5], 8
    )


class _Scalars(TorchDispatchMode):
    """Counts synchronisations with the device by `item`, `int` and `bool`."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("rule", "reads"),
    [
        (None, 1),
        (Sampling(0.8, top_k=9), 1),
        (Sampling(0.8, top_k=9, top_p=0.9), 2),
        (Typical(), 1),
    ],
    ids=["greedy", "sampling", "nucleus", "typical"],
)
@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma2"])
def test_a_step_waits_for_the_device_once(
    family: str, rule: Rule, reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Top-p reads once more: whether the nucleus needs more than the largest logits."""
    backbone = random_backbone(family)
    lists: list[Tensor] = []
    to_list = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda tensor: lists.append(tensor) or to_list(tensor))
    decoder = Decoder(backbone, _trained_like(backbone), TREES["sparse"])
    steps = decoder.stream([3, 14, 15], 20, (), rule, torch.Generator().manual_seed(0))
    next(steps)
    for _ in range(3):
        lists.clear()
        with _Scalars() as scalars:
            next(steps)
        assert (len(lists), scalars.count) == (reads, 0)


def test_usage_errors() -> None:
    backbone = random_backbone("llama")
    with pytest.raises(MedusaError, match="empty"):
        Decoder(backbone).generate([], 5)
    with pytest.raises(MedusaError, match="max_new_tokens must be at least 1, got 0"):
        Decoder(backbone).generate([1], 0)
    with pytest.raises(MedusaError, match="6 deep"):
        Decoder(backbone, MedusaDraft.from_backbone(backbone), Tree.chain(6))
