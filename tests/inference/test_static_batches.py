"""Batches on fixed memory give the tokens and accepted paths of each row alone; replayed as well as
run.
"""

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from medusa_train.errors import MedusaError
from medusa_train.inference.accept import AcceptanceRule, Greedy, Typical
from medusa_train.inference.batch_decoder import BatchDecoder, PendingRequest
from medusa_train.inference.cuda_graphs import FixedShapeRunner, Replayable, Step
from medusa_train.inference.generate import Decoder, Generation
from medusa_train.inference.sampling import Sampling
from medusa_train.inference.step import Steps
from medusa_train.models.drafts.base import Proposer
from medusa_train.models.target_model import TargetModel
from medusa_train.models.target_states import HiddenStates
from medusa_train.trees.transformers_adapters import NodeCache
from medusa_train.trees.tree import Tree
from tests.families import random_target_model
from tests.inference.equality import plain_answers
from tests.inference.steps import small_blocks
from tests.inference.tape import TapeRunner
from tests.inference.test_batch_decoder import streamed
from tests.inference.test_drafts import PROMPTS, REPLAYED_KINDS, TREE, random_draft
from tests.inference.test_refill import (
    OTHERS,
    QUEUE,
    SCHEDULES,
    answers_alone,
    ends,
    generator,
    make_draft,
    results,
)

BLOCK = 16  # of the cache: batches cross several of its borders
ALL_KINDS = ["plain", *REPLAYED_KINDS]
# without sliding windows, with them in all layers, and in some
FAMILIES = ["llama", "mistral-window", "gemma3"]
RULES = {"sample": Sampling(1.5), "top-p": Sampling(0.8, top_p=0.9), "typical": Typical(1.0)}


class CountingRunner(FixedShapeRunner):
    """Notes the shapes of steps: rows, columns that attention reads, columns of the caches."""

    def __init__(self) -> None:
        self.keys: list[tuple[int, ...]] = []

    def run(self, graphs: dict[Hashable, Replayable], key: Hashable, step: Step) -> None:
        assert isinstance(key, tuple)
        self.keys.append(key)
        step()


@pytest.fixture(autouse=True)
def _blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch, BLOCK)


def draft_of(kind: str, target_model: TargetModel) -> tuple[Proposer | None, Tree | None]:
    return (None, None) if kind == "plain" else (make_draft(kind, target_model), TREE)


def alone(
    target_model: TargetModel,
    draft: Proposer | None,
    tree: Tree | None,
    length: int,
    eos: list[int],
    rule: AcceptanceRule = Greedy(),
) -> list[Generation]:
    """Answers to the queue, one by one, without fixed memory; trees are always whole, as on fixed
    memory.
    """
    assert target_model.step_runner is None
    with nullcontext() if draft is None else draft.no_early_exit():
        return answers_alone(Decoder(target_model, draft, tree), length, eos, rule)


def details(answers: list[Generation]) -> list[tuple[list[int], str, int, list[int]]]:
    return [(out.tokens, out.finish, out.steps, out.accepted) for out in answers]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", [*ALL_KINDS, *OTHERS])
def test_rows_that_end_and_join_get_what_they_get_alone(kind: str, family: str) -> None:
    target_model = random_target_model(family)
    draft, tree = draft_of(kind, target_model)
    eos = ends(target_model, 14)
    plain = plain_answers(target_model, QUEUE, 14, eos)
    expected = alone(target_model, draft, tree, 14, eos)
    assert results(expected) == results(plain)
    assert draft is None or sum(sum(out.accepted) for out in expected) > 3  # paths were compacted
    runner = target_model.step_runner = CountingRunner()
    decoder = BatchDecoder(target_model, draft, tree)
    for schedule in SCHEDULES:
        runner.keys.clear()
        answers, sizes = streamed(decoder, 14, eos, **schedule, queue=QUEUE)
        assert details(answers) == details(expected)
        # every step is one on fixed memory
        assert len(runner.keys) == sum(size > 0 for size in sizes)
        assert max(sizes) == 3
    assert details(decoder.generate_batch(QUEUE, 14, eos)) == details(expected)


@pytest.mark.parametrize(
    ("kind", "family"), [("plain", "gemma3"), *((kind, "llama") for kind in REPLAYED_KINDS)]
)
def test_replayed_steps_give_the_same(kind: str, family: str) -> None:
    """What is replayed repeats the operations of the first step with its shapes, addresses and
    numbers.
    """
    target_model = random_target_model(family)
    draft, tree = draft_of(kind, target_model)
    eos = ends(target_model, 14)
    expected = alone(target_model, draft, tree, 14, eos)
    runner = target_model.step_runner = TapeRunner()
    decoder = BatchDecoder(target_model, draft, tree)
    captures = []
    schedules: list[dict[str, int]] = [
        {"wanted": 2},
        {"first": 1, "rows": 5},
        {"rows": 5},
        {"rows": 5},
    ]
    for schedule in schedules:
        answers, _ = streamed(decoder, 14, eos, **schedule, queue=QUEUE)
        assert details(answers) == details(expected)
        captures.append(runner.captures)
    assert captures[-1] == captures[-2]  # all steps of an equal batch are replayed


@pytest.mark.parametrize("kind", ["plain", "medusa", "amphista", "kangaroo"])
def test_steps_have_few_shapes(kind: str) -> None:
    """Rows of a step are a power of two or all; columns depend on the longest row."""
    target_model = random_target_model("llama")
    draft, tree = draft_of(kind, target_model)
    runner = target_model.step_runner = CountingRunner()
    BatchDecoder(target_model, draft, tree).generate_batch(
        [[5] * n for n in (3, 4, 5, 6, 7, 8)], 20, ()
    )
    assert {key[0] for key in runner.keys} <= {2, 4, 6}
    assert runner.keys[0][0] == 6
    assert {key[1] for key in runner.keys} <= {16, 32, 48}
    # one bucket from the start, which holds the longest prompt and answer
    assert {key[2] for key in runner.keys} == {49 if draft else 33}


@pytest.mark.parametrize("kind", ["plain", "medusa", "hydra++", "amphista", "kangaroo"])
def test_memory_grows_with_rows_and_with_lengths(kind: str) -> None:
    """Rows join one by one, each with a longer prompt than the last, while the first ones go on."""
    target_model = random_target_model("llama")
    draft, tree = draft_of(kind, target_model)
    prompts = [list(range(3, 3 + n)) for n in (2, 9, 17, 30, 44, 52, 1)]
    with nullcontext() if draft is None else draft.no_early_exit():
        expected = [
            Decoder(target_model, draft, tree).generate(prompt, 40, ()) for prompt in prompts
        ]
    for runner in (CountingRunner(), TapeRunner()):
        target_model.step_runner = runner
        decoder = BatchDecoder(target_model, draft, tree)
        batch = decoder.begin(40, ())
        answers: dict[int, Generation] = {}
        for n, prompt in enumerate(prompts):
            batch.add_requests([PendingRequest(n, prompt)])
            answers.update(batch.step())
        while batch.active:
            answers.update(batch.step())
        assert details([answers[n] for n in range(len(prompts))]) == details(expected)
        if isinstance(runner, CountingRunner):
            assert {key[0] for key in runner.keys} == {1, 2, 4, 8}
            assert len({key[2] for key in runner.keys}) > 1
        assert decoder._idle_steps is not None
        assert len(decoder._idle_steps.kv_cache._buffers) == 1  # what the batch outgrew is freed


@pytest.mark.parametrize(
    ("kind", "name"),
    [*((kind, "sample") for kind in ALL_KINDS), ("plain", "top-p"), ("medusa", "typical")],
)
def test_samples_do_not_depend_on_other_rows(kind: str, name: str) -> None:
    target_model, rule = random_target_model("mistral-window"), RULES[name]
    draft, tree = draft_of(kind, target_model)
    expected = alone(target_model, draft, tree, 12, [7, 9], rule)
    target_model.step_runner = TapeRunner()
    decoder = BatchDecoder(target_model, draft, tree)
    for schedule in SCHEDULES[1:]:
        answers, _ = streamed(decoder, 12, (7, 9), rule, **schedule, queue=QUEUE)
        assert details(answers) == details(expected)
    generators = [generator(n) for n in range(len(QUEUE))]
    assert details(decoder.generate_batch(QUEUE, 12, (7, 9), rule, generators)) == details(expected)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_the_contexts_end(kind: str) -> None:
    target_model = random_target_model("gemma3")
    target_model.max_context = 24
    draft, tree = draft_of(kind, target_model)
    plain = plain_answers(target_model, QUEUE, 17, ())
    assert {out.finish for out in plain} == {"length", "context"}
    target_model.step_runner = FixedShapeRunner()
    for rows in (2, 5):
        answers, sizes = streamed(
            BatchDecoder(target_model, draft, tree), 17, rows=rows, queue=QUEUE
        )
        assert results(answers) == results(plain)
        assert max(sizes) == rows


@pytest.mark.parametrize("kind", ["plain", "amphista", "kangaroo"])
def test_no_memory_is_allocated_for_further_batches(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target_model = random_target_model("llama")
    target_model.step_runner = FixedShapeRunner()
    decoder = BatchDecoder(target_model, *draft_of(kind, target_model))
    expected = decoder.generate_batch(PROMPTS, 30, ())
    with monkeypatch.context() as patch:
        patch.setattr(
            Tensor, "new_zeros", lambda *args, **kwargs: pytest.fail("memory was allocated")
        )
        patch.setattr(Steps, "_allocate", lambda *args: pytest.fail("memory was allocated"))
        decoder.generate_batch(PROMPTS[1:], 20, ())
        assert details(decoder.generate_batch(PROMPTS, 30, ())) == details(expected)


def test_batches_at_the_same_time_have_their_own_buffers() -> None:
    target_model = random_target_model("llama")
    draft = random_draft("amphista", target_model)
    expected = [Decoder(target_model, draft, TREE).generate(prompt, 16, ()) for prompt in PROMPTS]
    target_model.step_runner = TapeRunner()
    decoder = BatchDecoder(target_model, draft, TREE)
    batches = [decoder.begin(16, ()) for _ in range(3)]  # the third one is abandoned
    answers: dict[int, Generation] = {}
    for batch, numbers in zip(batches, ((0, 1), (2, 3), (1, 2)), strict=True):
        batch.add_requests([PendingRequest(n, PROMPTS[n]) for n in numbers])
    while batches[0].active or batches[1].active:
        for batch in batches[:2]:
            answers.update(batch.step())
    assert details([answers[n] for n in range(4)]) == details(expected)
    assert details(decoder.generate_batch(PROMPTS, 16, ())) == details(expected)


def test_prompts_of_similar_length_share_a_prefill_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    target_model = random_target_model("llama")
    draft = random_draft("hydra++", target_model)
    expected = [Decoder(target_model, draft, TREE).generate(prompt, 16, ()) for prompt in QUEUE]
    target_model.step_runner = FixedShapeRunner()
    monkeypatch.setattr("medusa_train.inference.batch_decoder.PREFILL_PADDING", 3)
    assert details(
        BatchDecoder(target_model, draft, TREE).generate_batch(QUEUE, 16, ())
    ) == details(expected)


@pytest.mark.parametrize("name", ["prompt_lookup", "medusa+prompt_lookup", "dynamic eagle3"])
def test_drafts_that_choose_their_trees_decode_without(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    target_model = random_target_model("llama")
    draft = make_draft(name, target_model)
    plain = plain_answers(target_model, QUEUE, 14, ())
    target_model.step_runner = TapeRunner()
    decoder = BatchDecoder(target_model, draft, TREE)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert results(streamed(decoder, 14, (), queue=QUEUE)[0]) == results(plain)
    assert caplog.text.count("chooses the shape of its trees") == 1
    assert target_model.step_runner.captures == 0


def test_answers_without_a_step_leave_the_buffers_to_the_next() -> None:
    target_model = random_target_model("llama")
    expected = [Decoder(target_model).generate(prompt, 1).tokens for prompt in PROMPTS]
    target_model.step_runner = runner = CountingRunner()
    decoder = BatchDecoder(target_model)
    for _ in range(2):
        assert [out.tokens for out in decoder.generate_batch(PROMPTS, 1)] == expected
    assert not runner.keys
    assert decoder.acquire_steps() is not decoder.acquire_steps()


class Passes:
    """Stands for passes compiled for several rows; notes what it is given, and computes the same."""

    def __init__(self, target_model: TargetModel) -> None:
        self.calls: list[tuple[torch.Size, torch.Size, torch.Size, bool]] = []
        self._target_model = target_model

    def covers(self, rows: int, count: int) -> bool:
        return rows > 1

    def __call__(
        self, tokens: Tensor, positions: Tensor, mask: Tensor, columns: Tensor, storage: Tensor
    ) -> tuple[HiddenStates, Tensor]:
        contiguous = all(
            tensor.is_contiguous() for tensor in (tokens, positions, mask, columns, storage)
        )
        self.calls.append((tokens.shape, columns.shape, storage.shape, contiguous))
        cache = NodeCache(storage.unbind(), columns, mask.shape[3])
        out = self._target_model.body(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        return HiddenStates(out.last_hidden_state), self._target_model.logits(out.last_hidden_state)


@pytest.mark.parametrize("tree", [Tree.empty(), TREE], ids=["plain", "tree"])
def test_compiled_passes_get_contiguous_inputs_and_the_memory_of_all_rows(tree: Tree) -> None:
    target_model = random_target_model("llama")
    draft = random_draft("medusa", target_model)
    expected = alone(target_model, draft, tree, 14, [7])
    target_model.step_runner, passes = FixedShapeRunner(), Passes(target_model)
    target_model.compiled = passes  # type: ignore[assignment]
    answers, sizes = streamed(BatchDecoder(target_model, draft, tree), 14, [7], queue=QUEUE, rows=4)
    assert details(answers) == details(expected)
    assert len(passes.calls) == len(sizes)
    for tokens, columns, storage, contiguous in passes.calls:
        assert tokens == columns
        assert (tokens[0] in (2, 4), storage[2], contiguous) == (True, 4, True)


def test_an_answer_started_before_the_other_ones_first_step_ends_it() -> None:
    target_model = random_target_model("llama")
    draft = random_draft("amphista", target_model)
    expected = Decoder(target_model, draft, TREE).generate(PROMPTS[2], 20).tokens
    target_model.step_runner = FixedShapeRunner()
    decoder = Decoder(target_model, draft, TREE)

    def tokens(steps: Iterator[tuple[list[int], int]], rest: Callable[[], None]) -> list[int]:
        out = list(next(steps)[0])
        rest()
        return out + [token for step in steps for token in step[0]]

    first = decoder.stream(PROMPTS[0], 20)
    next(first)

    def go_on() -> None:
        with pytest.raises(MedusaError, match="another answer was started"):
            next(first)

    assert tokens(decoder.stream(PROMPTS[2], 20), go_on) == expected
