"""Rows of a batch get the tokens that they get alone: in float64 exactly, for every family, length
and ending.
"""

import gc
import weakref
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from medusa_train.errors import MedusaError
from medusa_train.inference.accept import AcceptanceRule, Greedy
from medusa_train.inference.batch_decoder import BatchDecoder, PendingRequest, group_prompts
from medusa_train.inference.generate import Decoder, Generation
from medusa_train.inference.sampling import Sampling
from medusa_train.models.drafts.base import DraftStep, Proposal
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.models.target_model import TargetModel
from medusa_train.trees.kv_cache import KVCache
from medusa_train.trees.tree import Tree
from tests.families import FAMILIES, random_target_model

PROMPTS = [
    [3, 14, 15, 9, 2, 6, 5, 35, 8, 9],
    [7],
    [20, 30, 40],
    [11, 12, 13, 14, 15, 16, 17],
    [5, 17, 40, 2],
]
TREE = Tree.from_paths([(0,), (1,), (2,), (5,), (0, 0), (0, 3), (1, 0), (0, 0, 0), (1, 0, 2)])


class OracleHeads(MedusaDraft):
    """Heads that know the continuation at some steps, so that rows accept paths of different
    lengths.
    """

    truth: dict[int, list[int]]

    def propose(self, step: DraftStep, states: Tensor) -> Proposal:
        proposal = super().propose(step, states)
        for row, root in enumerate(step.last_token_list):
            known = self.truth.get(root, [])
            for node, path in enumerate(step.tree.paths, start=1):
                if path[-1] == len(path) % 2 and len(known) >= len(path) and (root + len(path)) % 3:
                    proposal.tokens[row, node] = known[len(path) - 1]
        return proposal


def _draft(target_model: TargetModel, answers: Sequence[list[int]] = ()) -> MedusaDraft:
    draft = OracleHeads.from_target_model(target_model, num_heads=4)
    assert isinstance(draft, OracleHeads)
    draft.truth = {}
    for answer in answers:
        for i, token in enumerate(answer):
            draft.truth[token] = answer[i + 1 : i + 4]
    torch.manual_seed(1)
    with torch.no_grad():
        for block in draft.blocks.parameters():
            block.normal_(0, 0.05)
    return draft


@pytest.mark.parametrize("tree", [Tree.empty(), TREE], ids=["empty", "sparse"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_gets_the_tokens_that_it_gets_alone(family: str, tree: Tree) -> None:
    target_model = random_target_model(family)
    alone = [Decoder(target_model).generate(prompt, 24).tokens for prompt in PROMPTS]
    together = BatchDecoder(target_model, _draft(target_model, alone), tree).generate_batch(
        PROMPTS, 24
    )
    assert [out.tokens for out in together] == alone
    assert all(1 + out.steps + sum(out.accepted) >= 24 for out in together)
    if tree.size:
        # rows differ, so that the comparison can fail
        assert len({tuple(out.accepted) for out in together}) > 2
        assert sum(sum(out.accepted) for out in together) > 10
    else:
        assert [out.steps for out in together] == [23] * 5


@pytest.mark.parametrize("tree", [Tree.empty(), TREE], ids=["empty", "sparse"])
def test_rows_end_at_different_times(tree: Tree) -> None:
    target_model = random_target_model("llama")
    target_model.max_context = 26
    alone = [Decoder(target_model).generate(prompt, 18, ()) for prompt in PROMPTS]
    eos = [alone[1].tokens[0], alone[2].tokens[4], alone[3].tokens[7]]
    expected = [Decoder(target_model).generate(prompt, 18, eos) for prompt in PROMPTS]
    assert len({out.finish for out in expected}) > 1
    decoder = BatchDecoder(target_model, _draft(target_model, [out.tokens for out in alone]), tree)
    for _ in range(2):
        together = decoder.generate_batch(PROMPTS, 18, eos)
        assert [(out.tokens, out.finish) for out in together] == [
            (out.tokens, out.finish) for out in expected
        ]
    assert len({len(out.tokens) for out in together}) > 2
    for out in together:
        assert len(out.accepted) == out.steps
        assert len(out.tokens) <= 1 + out.steps + sum(out.accepted)


def test_the_end_of_the_context_and_errors() -> None:
    target_model = random_target_model("qwen3")
    target_model.max_context = 12
    out = BatchDecoder(target_model, _draft(target_model), TREE).generate_batch(
        [PROMPTS[0], [4], list(range(2, 14))], 30
    )
    assert [(len(row.tokens), row.finish) for row in out] == [
        (3, "context"),
        (12, "context"),
        (1, "context"),
    ]
    decoder = BatchDecoder(target_model)
    assert decoder.generate_batch([], 5) == []
    with pytest.raises(MedusaError, match="13 tokens, but the model's context is 12"):
        decoder.generate_batch([[1], list(range(13))], 5)
    with pytest.raises(ValueError, match="1 generators for 2 prompts"):
        decoder.generate_batch([[1], [2]], 5, generators=[torch.Generator()])
    with pytest.raises(ValueError, match="a generator for every row"):
        decoder.generate_batch([[1], [2]], 5, rule=Sampling())


QUEUE = [*PROMPTS, [9] * 12, [33, 2], [8], [41, 40, 39], list(range(1, 20)), [6, 6], [12, 30]]


def streamed(
    decoder: BatchDecoder,
    max_new_tokens: int,
    eos: Sequence[int] | None = (),
    rule: AcceptanceRule = Greedy(),
    rows: int = 3,
    wanted: int = 1,
    first: int | None = None,
    queue: Sequence[list[int]] = QUEUE,
) -> tuple[list[Generation], list[int]]:
    """Answers to `queue`, at most `rows` at a time, refilled when `wanted` rows are free; number of
    rows of each pass.

    With `first` the batch starts with that many, and one more joins before each step.
    """
    batch = decoder.begin(max_new_tokens, eos, rule)
    generator = (torch.Generator().manual_seed(seed) for seed in range(len(queue)))
    coming = [
        PendingRequest(n, prompt, next(generator) if isinstance(rule, Sampling) else None)
        for n, prompt in enumerate(queue)
    ]
    answers: dict[int, Generation] = {}
    sizes = []
    while coming or batch.active:
        if coming and rows - len(batch.active) >= wanted:
            count = rows - len(batch.active)
            if first is not None:
                count = 1 if sizes else first
            joining, coming = coming[:count], coming[count:]
            batch.add_requests(joining)
        sizes.append(len(batch.active))
        done = batch.step()
        assert not {request_id for request_id, _ in done} & set(answers)
        answers.update(done)
    assert batch.step() == []
    return [answers[n] for n in range(len(queue))], sizes


@pytest.mark.parametrize("wanted", [1, 2])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "phi3-longrope"])
def test_rows_that_join_late_get_the_tokens_that_they_get_alone(family: str, wanted: int) -> None:
    target_model = random_target_model(family)
    free = [Decoder(target_model).generate(prompt, 14, ()).tokens for prompt in QUEUE]
    eos = [free[0][2], free[3][5], free[5][9]]
    alone = [Decoder(target_model).generate(prompt, 14, eos) for prompt in QUEUE]
    # so that rows join others of different length
    assert len({len(out.tokens) for out in alone}) > 3
    answers, sizes = streamed(BatchDecoder(target_model), 14, eos, wanted=wanted)
    assert [(out.tokens, out.finish, out.steps) for out in answers] == [
        (o.tokens, o.finish, o.steps) for o in alone
    ]
    assert all(0 < out.prefill_seconds <= out.seconds for out in answers)
    assert max(sizes) == 3
    assert sum(sizes) == sum(out.steps for out in alone)


@pytest.mark.parametrize("rule", [Sampling(0.8, top_p=0.9), Sampling(1.2, top_k=20)])
def test_samples_do_not_depend_on_when_a_row_joined(rule: AcceptanceRule) -> None:
    target_model = random_target_model("mistral-window")
    one = Decoder(target_model)
    alone = [
        one.generate(prompt, 12, (7, 9), rule, torch.Generator().manual_seed(seed)).tokens
        for seed, prompt in enumerate(QUEUE)
    ]
    for rows, wanted in ((3, 1), (4, 2)):
        answers, _ = streamed(BatchDecoder(target_model), 12, (7, 9), rule, rows, wanted)
        assert [out.tokens for out in answers] == alone


def test_requests_that_cannot_be_added() -> None:
    target_model = random_target_model("qwen3")
    target_model.max_context = 12
    batch = BatchDecoder(target_model).begin(4, ())
    batch.add_requests([PendingRequest(0, [1, 2])])
    with pytest.raises(MedusaError, match="13 tokens, but the model's context is 12"):
        batch.add_requests([PendingRequest(1, [3]), PendingRequest(2, list(range(13)))])
    assert len(batch.active) == 1
    batch.add_requests([PendingRequest(3, [3])])
    assert [
        (request_id, out.tokens)
        for request_id, out in [step for _ in range(3) for step in batch.step()]
    ] == [
        (request_id, Decoder(target_model).generate(prompt, 4, ()).tokens)
        for request_id, prompt in ((0, [1, 2]), (3, [3]))
    ]
    longrope = BatchDecoder(random_target_model("phi3-longrope")).begin(4)
    longrope.add_requests([PendingRequest(0, [1, 2])])
    with pytest.raises(ValueError, match="can't decode in batches"):
        longrope.add_requests([PendingRequest(1, [3])])


def test_prompts_of_similar_length_are_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medusa_train.inference.batch_decoder.PREFILL_TOKENS", 24)
    monkeypatch.setattr("medusa_train.inference.batch_decoder.PREFILL_PADDING", 3)
    assert group_prompts([5, 40, 8, 7, 6, 1]) == [[1], [2, 3, 4], [0], [5]]
    assert group_prompts([8, 8, 8, 8]) == [[0, 1, 2], [3]]
    assert group_prompts([]) == []


class SingleRowPass:
    """Stands for passes compiled for a single row; with the memory of a batch they would be
    compiled again.
    """

    calls = 0

    def covers(self, rows: int, count: int) -> bool:
        return rows == 1

    def __call__(self, *inputs: object) -> None:
        self.calls += 1


def test_the_last_row_of_a_batch_does_not_use_passes_compiled_for_a_single_row() -> None:
    target_model = random_target_model("llama")
    alone = [Decoder(target_model).generate(prompt, 12, ()).tokens for prompt in PROMPTS[:2]]
    # the first row ends before the second
    eos = [next(token for token in alone[0] if token not in alone[1])]
    expected = [Decoder(target_model).generate(prompt, 12, eos).tokens for prompt in PROMPTS[:2]]
    assert len(expected[0]) < len(expected[1])
    compiled = SingleRowPass()
    target_model.compiled = compiled  # type: ignore[assignment]
    assert [
        out.tokens for out in BatchDecoder(target_model).generate_batch(PROMPTS[:2], 12, eos)
    ] == expected
    assert compiled.calls == 0


def test_memory_goes_with_its_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Python's search for circles, which the allocator of a GPU does not start."""
    alive, init = [], KVCache.__init__

    def noted(self: KVCache, *args: int) -> None:
        alive.append(weakref.ref(self))
        init(self, *args)

    monkeypatch.setattr(KVCache, "__init__", noted)
    target_model = random_target_model("llama")
    draft = _draft(target_model)
    gc.disable()
    try:
        BatchDecoder(target_model, draft, TREE).generate_batch([[1, 2], [3, 4, 5]], 4)
        Decoder(target_model, draft, TREE).generate([1, 2], 4)
        assert [kv_cache() for kv_cache in alive] == [None] * len(alive) != []
    finally:
        gc.enable()
