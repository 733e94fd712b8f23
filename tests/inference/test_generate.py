"""Tree decoding equals plain decoding: in float64 exactly, for every family, tree shape and edge
case.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from medusa_train.errors import MedusaError
from medusa_train.inference import answer_lock
from medusa_train.inference.accept import AcceptanceRule, Greedy, Typical
from medusa_train.inference.generate import Decoder
from medusa_train.inference.sampling import Sampling
from medusa_train.models.drafts.base import Draft, DraftStep, Proposal
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.models.target_model import TargetModel
from medusa_train.models.target_states import HiddenStates, TokenRows
from medusa_train.trees.tree import Tree
from tests.families import FAMILIES, random_target_model

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

    max_depth = 4

    def __init__(
        self, prompt: list[int], answer: list[int], vocab: int, *, wrong_every: int = 0
    ) -> None:
        super().__init__()
        self.text = prompt + answer
        self.vocab = vocab
        self.wrong_every = wrong_every
        self.unused = nn.Parameter(torch.zeros(()))

    def head_states(self, hidden_states: HiddenStates, batch: TokenRows):  # type: ignore[no-untyped-def]
        yield hidden_states.final

    def lm_head(self, k: int):  # type: ignore[no-untyped-def]
        raise AssertionError("not for training")

    def propose(self, step: DraftStep, states: None) -> Proposal:
        (root,) = step.last_token_list
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


def _trained_like(target_model: TargetModel, seed: int = 1) -> MedusaDraft:
    """Heads with random blocks: their guesses differ from the target model's and are sometimes right."""
    draft = MedusaDraft.from_target_model(target_model, num_heads=4)
    torch.manual_seed(seed)
    with torch.no_grad():
        for block in draft.blocks.parameters():
            block.normal_(0, 0.05)
    return draft


def _plain(target_model: TargetModel, prompt: list[int], count: int) -> list[int]:
    """Greedy decoding by whole forward passes of the stock model, without a cache."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(
                int(target_model.model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
            )
    return ids[len(prompt) :]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_empty_tree_is_the_stock_models_greedy_decoding(family: str) -> None:
    target_model = random_target_model(family)
    prompt = [3, 14, 15, 9, 2, 6, 5, 35]
    out = Decoder(target_model).generate(prompt, 24)
    assert out.tokens == _plain(target_model, prompt, 24)
    assert (out.steps, out.finish) == (23, "length")
    assert len(set(out.tokens)) > 4  # the text varies, so that the comparison can fail


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("family", FAMILIES)
def test_tree_decoding_equals_plain_decoding(family: str, tree: str) -> None:
    target_model = random_target_model(family)
    prompt = [3, 14, 15, 9, 2, 6, 5, 35, 8, 9]
    plain = Decoder(target_model).generate(prompt, 40)
    assert (
        Decoder(target_model, _trained_like(target_model), TREES[tree]).generate(prompt, 40).tokens
        == plain.tokens
    )
    oracle = OracleDraft(prompt, plain.tokens, target_model.vocab_size, wrong_every=5)
    guided = Decoder(target_model, oracle, TREES[tree]).generate(prompt, 40)
    assert guided.tokens == plain.tokens
    assert guided.steps < plain.steps  # accepted nodes were moved in the cache
    assert 1 + guided.steps + sum(guided.accepted) >= 40


def test_a_right_draft_is_accepted_to_the_full_depth() -> None:
    target_model = random_target_model("llama")
    prompt = [7, 7, 30]
    plain = Decoder(target_model).generate(prompt, 33)
    out = Decoder(
        target_model, OracleDraft(prompt, plain.tokens, target_model.vocab_size), Tree.chain(4)
    ).generate(prompt, 31)
    assert out.tokens == plain.tokens[:31]
    assert out.accepted == [4] * 6


def test_nothing_leaks_past_an_eos_inside_an_accepted_path() -> None:
    target_model = random_target_model("llama")
    prompt = [5, 17, 40]
    plain = Decoder(target_model).generate(prompt, 30)
    oracle = OracleDraft(prompt, plain.tokens, target_model.vocab_size)
    for stop in range(1, 12):
        eos = plain.tokens[stop]
        expected = plain.tokens[: plain.tokens.index(eos) + 1]
        out = Decoder(target_model, oracle, Tree.chain(4)).generate(prompt, 30, [eos])
        assert (out.tokens, out.finish) == (expected, "eos")
        assert Decoder(target_model).generate(prompt, 30, [eos]).tokens == expected


@pytest.mark.parametrize("count", range(1, 12))
def test_max_new_tokens_inside_an_accepted_path(count: int) -> None:
    target_model = random_target_model("qwen3")
    prompt = [5, 17, 40]
    plain = Decoder(target_model).generate(prompt, 16)
    oracle = OracleDraft(prompt, plain.tokens, target_model.vocab_size)
    out = Decoder(target_model, oracle, Tree.chain(4)).generate(prompt, count)
    assert (out.tokens, out.finish) == (plain.tokens[:count], "length")


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_contexts_end(family: str) -> None:
    target_model = random_target_model(family)
    target_model.max_context = 24
    prompt = list(range(2, 17))
    plain = Decoder(target_model).generate(prompt, 50)
    assert (len(plain.tokens), plain.finish) == (10, "context")
    assert plain.tokens == _plain(target_model, prompt, 10)
    oracle = OracleDraft(prompt, plain.tokens, target_model.vocab_size)
    for tree in TREES.values():
        out = Decoder(target_model, oracle, tree).generate(prompt, 50)
        assert (out.tokens, out.finish) == (plain.tokens, "context")
    full = Decoder(target_model).generate(list(range(2, 26)), 5)
    assert (len(full.tokens), full.finish) == (1, "context")
    with pytest.raises(MedusaError, match="25 tokens"):
        Decoder(target_model).generate(list(range(2, 27)), 5)


def test_the_cache_is_reused_between_answers_without_effect() -> None:
    target_model = random_target_model("llama")
    decoder = Decoder(target_model, _trained_like(target_model), TREES["cartesian"])
    first = decoder.generate([1, 2, 3, 4, 5], 30).tokens
    second = decoder.generate([9, 8, 7], 12).tokens
    assert decoder.generate([1, 2, 3, 4, 5], 30).tokens == first
    assert Decoder(target_model).generate([9, 8, 7], 12).tokens == second


def test_the_empty_tree_computes_no_heads() -> None:
    target_model = random_target_model("llama")

    class Untouchable(MedusaDraft):
        def read(self, *args: object):  # type: ignore[no-untyped-def]
            raise AssertionError("a head was computed")

    draft = Untouchable(target_model.hidden_size, target_model.vocab_size)
    assert Decoder(target_model, draft, Tree.empty()).generate([4, 5], 8).tokens == _plain(
        target_model, [4, 5], 8
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
        (Greedy(), 1),
        (Sampling(0.8, top_k=9), 1),
        (Sampling(0.8, top_k=9, top_p=0.9), 2),
        (Typical(), 1),
    ],
    ids=["greedy", "sampling", "nucleus", "typical"],
)
@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma2"])
def test_a_step_waits_for_the_device_once(
    family: str, rule: AcceptanceRule, reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Top-p reads once more: whether the nucleus needs more than the largest logits."""
    target_model = random_target_model(family)
    lists: list[Tensor] = []
    to_list = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda tensor: lists.append(tensor) or to_list(tensor))
    decoder = Decoder(target_model, _trained_like(target_model), TREES["sparse"])
    steps = decoder.stream([3, 14, 15], 20, (), rule, torch.Generator().manual_seed(0))
    next(steps)
    for _ in range(3):
        lists.clear()
        with _Scalars() as scalars:
            next(steps)
        assert (len(lists), scalars.count) == (reads, 0)


def test_an_answer_that_this_thread_has_left_is_hardly_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answer_lock, "ABANDONED_SECONDS", 1.0)
    monkeypatch.setattr(answer_lock, "ABANDONED_HERE_SECONDS", 0.05)
    decoder = Decoder(random_target_model("llama"))
    left = decoder.stream([3, 14, 15], 20, ())
    next(left)
    waits: list[float] = []
    monkeypatch.setattr(decoder._lock._turn, "wait", waits.append)
    next(decoder.stream([3, 14, 15], 20, ()))
    assert max(waits, default=0.0) <= 0.05


def test_usage_errors() -> None:
    target_model = random_target_model("llama")
    with pytest.raises(MedusaError, match="empty"):
        Decoder(target_model).generate([], 5)
    with pytest.raises(MedusaError, match="max_new_tokens must be at least 1, got 0"):
        Decoder(target_model).generate([1], 0)
    with pytest.raises(MedusaError, match="6 deep"):
        Decoder(target_model, MedusaDraft.from_target_model(target_model), Tree.chain(6))
