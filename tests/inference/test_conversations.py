"""The turns of a chat: what the KV cache holds of the text so far is not read again, and every step
stays the same.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any
from unittest.mock import patch

import pytest
import torch

from medusa_train.inference.cuda_graphs import FixedShapeRunner
from medusa_train.inference.generate import Decoder, Generation
from medusa_train.inference.sampling import Sampling
from medusa_train.inference.step import Steps
from medusa_train.models.drafts.base import Proposer
from medusa_train.models.drafts.lookahead import LookaheadDraft
from medusa_train.models.target_model import TargetModel
from medusa_train.trees.tree import Tree
from tests.families import FAMILIES, random_target_model
from tests.inference.steps import small_blocks
from tests.inference.tape import TapeRunner
from tests.inference.test_drafts import KINDS, TREE, random_draft

FIRST = [3, 14, 15, 9, 2, 6, 5, 35, 8, 9]
QUESTIONS = [[11, 12], [7, 33, 20, 19, 18], [4]]  # what follows an answer, up to the next one


def chat(decoder: Decoder, tokens: int = 14) -> Iterator[Generation]:
    """Answer, and continue the text of each answer with the next question."""
    prompt = FIRST
    for question in [*QUESTIONS, []]:
        answer = decoder.generate(prompt, tokens, ())
        yield answer
        prompt = prompt + answer.tokens + question


def read_tokens(decoder: Decoder, prompts: list[list[int]]) -> list[int]:
    """Return how many tokens the prefill of each prompt reads."""
    counts: list[int] = []
    prefill = Steps.prefill

    def counted(
        steps: Steps, texts: Any, rule: Any, generators: Any, num_cached: int = 0
    ) -> list[int]:
        counts.append(len(texts[0]) - num_cached)
        return prefill(steps, texts, rule, generators, num_cached)

    with patch.object(Steps, "prefill", counted):
        for prompt in prompts:
            decoder.generate(prompt, 10, ())
    return counts


def outcome(answers: Iterator[Generation]) -> list[tuple[list[int], list[int]]]:
    return [(answer.tokens, answer.accepted) for answer in answers]


def make_draft(kind: str, target_model: TargetModel) -> Proposer | None:
    if kind == "plain":
        return None
    if kind == "lookahead":
        return LookaheadDraft(window=4, ngram=4, guesses=3)
    return random_draft(kind, target_model)


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma3"])
@pytest.mark.parametrize("kind", ["plain", "lookahead", *KINDS])
def test_turns_have_the_tokens_and_paths_of_a_fresh_start(kind: str, family: str) -> None:
    target_model = random_target_model(family)
    draft = make_draft(kind, target_model)
    expected = outcome(chat(Decoder(target_model, draft, TREE)))
    assert outcome(chat(Decoder(target_model, draft, TREE, continues=True))) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_turns_of_every_family(family: str) -> None:
    target_model = random_target_model(family)
    expected = outcome(chat(Decoder(target_model)))
    assert outcome(chat(Decoder(target_model, continues=True))) == expected


@pytest.mark.parametrize("runner", [FixedShapeRunner, TapeRunner])
@pytest.mark.parametrize("kind", ["plain", *KINDS])
def test_turns_in_steps_of_fixed_shape(
    kind: str, runner: type[FixedShapeRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(monkeypatch, 16)
    target_model = random_target_model("llama")
    draft = make_draft(kind, target_model)
    target_model.step_runner = runner()
    expected = outcome(chat(Decoder(target_model, draft, TREE)))
    assert outcome(chat(Decoder(target_model, draft, TREE, continues=True))) == expected


def test_only_what_is_new_is_read() -> None:
    target_model = random_target_model("llama")
    draft = random_draft("medusa", target_model)
    answer = Decoder(target_model, draft, TREE).generate(FIRST, 10, ()).tokens
    text = FIRST + answer
    decoder = Decoder(target_model, draft, TREE, continues=True)
    first, second, again, shorter, other, fresh = read_tokens(
        decoder, [FIRST, [*text, 11, 12], [*text, 11, 12], text[:12], [*text[:4], 30], [8, 9]]
    )
    assert first == len(FIRST)
    # the question, and what the KV cache does not hold permanently: the last step's tokens
    assert 2 <= second <= 2 + 1 + (TREE.max_depth + 1)
    assert again == 1
    assert shorter == 1
    assert other == 2  # the last common token again, and the new one
    assert fresh == 2
    assert read_tokens(Decoder(target_model, draft, TREE), [FIRST, [*text, 11]]) == [10, 21]


def test_slots_that_others_used_hold_nothing_of_the_chat() -> None:
    target_model = random_target_model("llama")
    kv_cache = target_model.new_kv_cache()
    draft = random_draft("eagle3", target_model)
    decoder = Decoder(target_model, draft, TREE, kv_cache, continues=True)
    plain = Decoder(target_model, kv_cache=kv_cache, continues=True)
    expected = outcome(chat(Decoder(target_model, draft, TREE)))
    turns = chat(decoder)
    answers = []
    for answer in turns:
        answers.append((answer.tokens, answer.accepted))
        plain.generate([9, 9, 9], 5, ())
    assert answers == expected


def test_an_answer_that_was_left_is_continued_up_to_its_last_step() -> None:
    """As when a stop string ends an answer."""
    target_model = random_target_model("llama")
    decoder = Decoder(target_model, random_draft("hydra++", target_model), TREE, continues=True)
    steps = list(islice(decoder.stream(FIRST, 20, ()), 5))
    text = FIRST + [token for step in steps for token in step.tokens]
    expected = Decoder(target_model, decoder.draft, TREE).generate([*text, 11], 10, ())
    assert read_tokens(decoder, [[*text, 11]])[0] < 8
    list(islice(decoder.stream(FIRST, 20, ()), 5))
    assert decoder.generate([*text, 11], 10, ()).tokens == expected.tokens


def test_an_interrupted_step_leaves_nothing_to_continue() -> None:
    target_model = random_target_model("llama")
    decoder = Decoder(target_model, continues=True)
    stream = decoder.stream(FIRST, 20, ())
    tokens = next(stream).tokens + next(stream).tokens
    with (
        patch.object(TargetModel, "run_nodes", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        next(stream)
    assert read_tokens(decoder, [FIRST + tokens]) == [len(FIRST) + 2]


def test_angles_that_change_with_the_length_start_anew() -> None:
    target_model = random_target_model("phi3-longrope")
    decoder = Decoder(target_model, continues=True)
    assert read_tokens(decoder, [FIRST, FIRST, FIRST[:5]]) == [10, 10, 5]


def test_sampled_turns_are_the_same() -> None:
    target_model = random_target_model("llama")
    draft = random_draft("medusa", target_model)
    texts = []
    for continues in (False, True):
        decoder = Decoder(target_model, draft, Tree.chain(3), continues=continues)
        prompt = FIRST
        for question in QUESTIONS:
            generator = torch.Generator().manual_seed(3)
            answer = decoder.generate(prompt, 12, (), Sampling(0.8), generator)
            prompt = prompt + answer.tokens + question
        texts.append(prompt)
    assert texts[0] == texts[1]
