"""Rows that join a running batch with a draft: the tokens and guesses that they get alone, in fewer
passes.
"""

from collections.abc import Collection, Sequence

import pytest
import torch

from medusa_train.data.datastore import Datastore
from medusa_train.inference.accept import AcceptanceRule, Greedy, Typical
from medusa_train.inference.batch_decoder import BatchDecoder, PendingRequest
from medusa_train.inference.generate import Decoder, Generation
from medusa_train.inference.sampling import Sampling
from medusa_train.models.drafts.amphista import AmphistaDraft
from medusa_train.models.drafts.base import Draft, Proposer
from medusa_train.models.drafts.combined import MergedDraft
from medusa_train.models.drafts.eagle3 import Eagle3Draft
from medusa_train.models.drafts.lookahead import LookaheadDraft
from medusa_train.models.drafts.lookup import LookupDraft, PromptLookupDraft, RestDraft
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.models.target_model import TargetModel
from medusa_train.trees.tree import Tree
from tests.families import random_target_model
from tests.inference.chi_square import check_lossless, five_token_target_model
from tests.inference.equality import plain_answers
from tests.inference.steps import small_blocks
from tests.inference.test_batch_decoder import QUEUE as SHORT_QUEUE
from tests.inference.test_batch_decoder import streamed
from tests.inference.test_drafts import KINDS, TREE, random_draft
from tests.inference.test_dynamic_decoding import SIZE
from tests.inference.test_lookup_decoding import BRANCHES, LOOP

#: Also texts with repeated n-grams, which lookups copy.
QUEUE = [BRANCHES, *SHORT_QUEUE[:6], LOOP, *SHORT_QUEUE[6:10]]
LOOKUPS = ["prompt_lookup", "rest", "lookahead"]
MERGED = ["medusa+prompt_lookup", "hydra+++rest", "amphista+lookahead"]
DYNAMIC = ["dynamic eagle3", "dynamic eagle3+prompt_lookup"]
OTHERS = ["medusa-reduced", "amphista-without-layers"]
#: When rows join: at once as rows end, two at a time, or one before each step, the first one to a
#: single row.
SCHEDULES: tuple[dict[str, int], ...] = ({"wanted": 1}, {"wanted": 2}, {"first": 1})


def make_draft(name: str, target_model: TargetModel) -> Proposer:
    """A draft, or several joined by +; after "dynamic " with trees of its own."""
    heads, plus, lookup = name.removeprefix("dynamic ").rpartition("+")
    if not plus and lookup in LOOKUPS:
        return make_lookup(lookup, target_model)
    draft: Proposer = make_heads(
        heads if plus and lookup else name.removeprefix("dynamic "), target_model
    )
    if name.startswith("dynamic "):
        assert isinstance(draft, Eagle3Draft)
        draft = draft.with_dynamic_trees(SIZE)
    return MergedDraft(draft, make_lookup(lookup, target_model)) if plus and lookup else draft


def make_lookup(name: str, target_model: TargetModel) -> LookupDraft:
    if name == "prompt_lookup":
        return PromptLookupDraft(max_ngram=2, max_tokens=6, nodes=9)
    if name == "lookahead":
        return LookaheadDraft(window=4, ngram=4, guesses=3)
    answers = [out.tokens for out in plain_answers(target_model, QUEUE[::2], 20)]
    return RestDraft(Datastore(answers, 12), max_ngram=4, max_tokens=6, nodes=8)


def make_heads(name: str, target_model: TargetModel) -> Draft:
    if name == "medusa-reduced":
        tokens = torch.arange(1, 61, 2)
        return MedusaDraft.from_target_model(
            target_model, 3, vocab_size=len(tokens), token_map=tokens
        )
    if name == "amphista-without-layers":
        return AmphistaDraft.from_target_model(
            target_model, num_heads=4, adaptation_layers=0, sampled_token=True
        )
    return random_draft(name, target_model)


def generator(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def answers_alone(
    decoder: Decoder, max_new_tokens: int, eos: Collection[int], rule: AcceptanceRule = Greedy()
) -> list[Generation]:
    return [
        decoder.generate(
            prompt, max_new_tokens, eos, rule, generator(n) if isinstance(rule, Sampling) else None
        )
        for n, prompt in enumerate(QUEUE)
    ]


def ends(target_model: TargetModel, max_new_tokens: int) -> list[int]:
    """Tokens that end answers at different moments."""
    free = plain_answers(target_model, QUEUE, max_new_tokens, ())
    return [free[n].tokens[max_new_tokens * part // 12] for n, part in ((0, 2), (3, 5), (5, 8))]


def results(answers: Sequence[Generation]) -> list[tuple[list[int], str]]:
    return [(out.tokens, out.finish) for out in answers]


@pytest.mark.parametrize("family", ["llama", "mistral-window"])
@pytest.mark.parametrize("name", [*KINDS, *OTHERS, *LOOKUPS, *MERGED, *DYNAMIC])
def test_rows_that_join_late_get_the_tokens_and_guesses_that_they_get_alone(
    name: str, family: str
) -> None:
    target_model = random_target_model(family)
    draft = make_draft(name, target_model)
    length = 40 if name in LOOKUPS else 14  # a text repeats itself after a while
    eos = ends(target_model, length)
    plain = plain_answers(target_model, QUEUE, length, eos)
    # so that rows join others of different length
    assert len({len(out.tokens) for out in plain}) > 3
    with draft.no_early_exit():
        alone = answers_alone(Decoder(target_model, draft, TREE), length, eos)
        assert results(alone) == results(plain)
        assert sum(sum(out.accepted) for out in alone) > 3
        for schedule in SCHEDULES:
            together, sizes = streamed(
                BatchDecoder(target_model, draft, TREE), length, eos, **schedule, queue=QUEUE
            )
            assert results(together) == results(plain)
            assert [out.accepted for out in together] == [out.accepted for out in alone]
            assert max(sizes) == 3


@pytest.mark.parametrize(
    "name", ["medusa", "hydra++", "amphista", "kangaroo", "lookahead", "hydra+++rest"]
)
def test_rows_join_up_to_the_end_of_the_context_and_caches_grow(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(monkeypatch, 4)
    target_model = random_target_model("llama")
    draft = make_draft(name, target_model)
    target_model.max_context = 24
    plain = plain_answers(target_model, QUEUE, 17, ())
    assert {out.finish for out in plain} == {"length", "context"}
    for rows in (2, 5):
        together, sizes = streamed(
            BatchDecoder(target_model, draft, TREE), 17, rows=rows, queue=QUEUE
        )
        assert results(together) == results(plain)
        assert max(sizes) == rows


def test_prompts_of_one_token_join_each_other() -> None:
    """No position of theirs can be read before the first root is known."""
    target_model = random_target_model("llama")
    draft = make_draft("amphista", target_model)
    prompts = [[7], [8], [9], [10, 11, 12]]
    batch = BatchDecoder(target_model, draft, TREE).begin(10, ())
    batch.add_requests([PendingRequest(0, prompts[0])])
    for n in (1, 2):
        batch.add_requests([PendingRequest(n, prompts[n])])
    answers: dict[int, Generation] = dict(batch.step())
    batch.add_requests([PendingRequest(3, prompts[3])])
    while batch.active:
        answers.update(batch.step())
    alone = [Decoder(target_model, draft, TREE).generate(prompt, 10, ()) for prompt in prompts]
    assert [answers[n].tokens for n in range(4)] == [out.tokens for out in alone]
    assert [answers[n].accepted for n in range(4)] == [out.accepted for out in alone]


@pytest.mark.parametrize("rule", [Sampling(1.5), Sampling(0.8, top_p=0.9), Typical(1.0)])
@pytest.mark.parametrize("name", [*KINDS, *OTHERS, *LOOKUPS, *MERGED, *DYNAMIC])
def test_samples_do_not_depend_on_when_a_row_joined(name: str, rule: AcceptanceRule) -> None:
    target_model = random_target_model("mistral-window")
    draft = make_draft(name, target_model)
    # in a batch drafting continues while any row is confident, which draws more numbers
    with draft.no_early_exit():
        alone = answers_alone(Decoder(target_model, draft, TREE), 12, (7, 9), rule)
        for schedule in SCHEDULES:
            together, _ = streamed(
                BatchDecoder(target_model, draft, TREE), 12, (7, 9), rule, **schedule, queue=QUEUE
            )
            assert results(together) == results(alone)
            assert [out.accepted for out in together] == [out.accepted for out in alone]
    assert sum(sum(out.accepted) for out in alone) > 0


class RefillingDecoder(BatchDecoder):
    """Answers a list of prompts in half as many rows."""

    def generate_batch(
        self,
        prompts: Sequence[list[int]],
        max_new_tokens: int,
        eos_ids: Collection[int] | None = None,
        rule: AcceptanceRule = Greedy(),
        generators: Sequence[torch.Generator] | None = None,
    ) -> list[Generation]:
        assert generators is not None
        batch = self.begin(max_new_tokens, eos_ids, rule)
        coming = [PendingRequest(n, prompt, generators[n]) for n, prompt in enumerate(prompts)]
        answers: dict[int, Generation] = {}
        refills = 0
        while coming or batch.active:
            free = len(prompts) // 2 - len(batch.active)
            if coming and free:
                refills += bool(batch.active)
                batch.add_requests(coming[:free])
                coming = coming[free:]
            answers.update(batch.step())
        assert refills
        return [answers[n] for n in range(len(prompts))]


@pytest.mark.parametrize("name", ["kangaroo", "prompt_lookup"])
def test_sampled_text_follows_the_target_models_distribution(name: str) -> None:
    """Drafts whose trees depend on the other rows."""
    target_model = five_token_target_model()
    draft: Proposer
    if name == "prompt_lookup":
        draft = PromptLookupDraft(max_ngram=1, max_tokens=2, nodes=3, min_probability=0.3)
    else:
        draft = random_draft(name, target_model)
    decoder = RefillingDecoder(target_model, draft, Tree.cartesian([2, 2]))
    assert check_lossless(decoder, rows=2500, batches=4, other_below=1e-8) > 300


@pytest.mark.parametrize("name", ["medusa", "hydra++", "amphista", "kangaroo", "prompt_lookup"])
def test_refilled_batches_take_fewer_passes(name: str) -> None:
    target_model = random_target_model("llama")
    draft = make_draft(name, target_model)
    eos = ends(target_model, 14)
    whole = BatchDecoder(target_model, draft, TREE)
    for start in range(0, len(QUEUE), 3):
        whole.generate_batch(QUEUE[start : start + 3], 14, eos)
    refilled = BatchDecoder(target_model, draft, TREE)
    _, sizes = streamed(refilled, 14, eos, queue=QUEUE)
    assert refilled.passes == len(sizes)
    assert refilled.passes < 0.8 * whole.passes
