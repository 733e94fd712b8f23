"""Ranks of guesses along an answer, and simulated decoding."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from medusa_train.data.batch import Example
from medusa_train.data.examples import EncodedDataset
from medusa_train.data.report import DataReport
from medusa_train.inference.batch_decoder import RunningBatch
from medusa_train.inference.generate import Decoder
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.models.lm_head import LMHead
from medusa_train.models.target_model import TargetModel
from medusa_train.tree_search import traces as traces_module
from medusa_train.tree_search.fit import MAX_RANK, Trace, head_accuracy, tokens_per_step
from medusa_train.tree_search.traces import (
    TracedAnswers,
    greedy_answers,
    prompts_by_conversation,
    rank_of,
    trace_answer,
)
from medusa_train.trees.kv_cache import COLUMNS
from medusa_train.trees.transformers_adapters import PromptCache
from medusa_train.trees.tree import Tree
from tests.families import random_target_model

# an answer of six tokens, three heads
TRACE = Trace([[0, 1, -1], [0, 0, 2], [-1, 0, 0], [1, 0, -1], [0, -1, -1], [-1, -1, -1]])


def test_paths_end_at_the_first_miss() -> None:
    assert [TRACE.path(i) for i in range(6)] == [(0, 1), (0, 0, 2), (), (1, 0), (0,), ()]


def test_simulated_decoding() -> None:
    tree = Tree.from_paths([(0,), (1,), (0, 0), (1, 0)])
    # from 0 only (0,) is in the tree: one accepted and the new root is 2; from 2 nothing; from 3
    # both nodes
    assert TRACE.simulate(tree) == [0, 2, 3]
    assert tokens_per_step([TRACE], tree) == 5 / 3
    assert TRACE.simulate(Tree.empty()) == [0, 1, 2, 3, 4]
    assert tokens_per_step([TRACE], Tree.empty()) == 1.0


def test_accuracy_counts_only_positions_with_a_target() -> None:
    accuracy = head_accuracy([TRACE])
    assert accuracy[0][:2] == [3 / 5, 4 / 5]
    assert accuracy[1][:2] == [3 / 4, 4 / 4]
    assert accuracy[2][:3] == [1 / 3, 1 / 3, 2 / 3]


def answers_one_by_one(
    target_model: TargetModel, prompts: Sequence[list[int]], max_new_tokens: int, token_budget: int
) -> dict[int, list[int]]:
    """What `greedy_answers` gives in batches."""
    answers: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        if len(prompt) <= target_model.max_context:
            answers[index] = Decoder(target_model).generate(prompt, max_new_tokens).tokens
        if sum(map(len, answers.values())) >= token_budget:
            break
    return answers


@pytest.mark.parametrize("rows", [2, 16])
@pytest.mark.parametrize("family", ["llama", "mistral-window", "phi3-longrope"])
def test_batches_give_the_answers_of_single_rows(
    family: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces_module, "MAX_ROWS", rows)
    target_model = random_target_model(family)
    target_model.max_context = 30
    prompts = [
        [3, 1, 4, 1, 5],
        [9],
        list(range(2, 33)),
        [2, 6],
        *([i, i + 1, 2 * i + 1] for i in range(2, 14)),
    ]
    target_model.eos_ids = tuple(
        Decoder(target_model).generate(prompt, 20).tokens[at] for prompt, at in ((prompts[1], 6),)
    )
    for budget in (1, 20, 21, 100, 10_000):
        expected = answers_one_by_one(target_model, prompts, 20, budget)
        lengths: list[int] = []
        answers = greedy_answers(target_model, prompts, 20, budget, lengths.append)
        assert list(answers.items()) == list(expected.items())
        assert sorted(lengths) == sorted(map(len, expected.values()))
    assert len({len(answer) for answer in answers.values()}) > 2
    assert greedy_answers(target_model, prompts[2:3], 20, 100) == {}


def test_answers_share_passes_as_far_as_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []
    step = RunningBatch.step
    monkeypatch.setattr(
        RunningBatch, "step", lambda batch: (passes.append(len(batch.active)), step(batch))[1]
    )
    target_model = random_target_model("llama")
    target_model.eos_ids = ()
    prompts = [[i, i + 1] for i in range(2, 34)]
    greedy_answers(target_model, prompts, 11, 20 * 11)
    assert passes == [16] * 10 + [4] * 10  # the prefill gives each answer's first token
    config = target_model.config
    row = 13 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 8
    monkeypatch.setattr(traces_module, "MAX_CACHE_BYTES", 3 * row)
    passes.clear()
    greedy_answers(target_model, prompts, 11, 3 * 11)
    assert passes == [3] * 10
    monkeypatch.setattr(traces_module, "MAX_CACHE_BYTES", 3 * row - 1)
    passes.clear()
    greedy_answers(target_model, prompts, 11, 3 * 11)
    assert passes == [2] * 10 + [1] * 10


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek-v3"])
def test_rows_that_fit_are_counted_by_what_a_pass_stores(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Latent attention stores less than keys and values."""
    target_model = random_target_model(family)
    kv_cache = target_model.new_kv_cache()
    target_model.run(torch.tensor([[3, 14, 15]]), cache=PromptCache(kv_cache, 0, 1))
    storage = kv_cache.storage(3)
    position_bytes = storage.nbytes // storage.shape[COLUMNS]
    monkeypatch.setattr(traces_module, "MAX_CACHE_BYTES", 5 * 20 * position_bytes)
    assert traces_module._rows_in_memory(target_model, 20) == 5
    assert traces_module._rows_in_memory(target_model, 21) == 4


def noisy_heads(target_model: TargetModel) -> MedusaDraft:
    draft = MedusaDraft.from_target_model(target_model, num_heads=3)
    torch.manual_seed(5)
    with torch.no_grad():
        for block in draft.blocks.parameters():
            block.normal_(0, 0.05)
    return draft


def test_ranks_against_a_plain_computation() -> None:
    target_model = random_target_model("llama")
    draft = noisy_heads(target_model)
    prompt = [3, 1, 4, 1]
    answer = Decoder(target_model).generate(prompt, 12).tokens
    trace = trace_answer(target_model, draft, prompt, answer)
    text = prompt + answer
    for position in range(len(answer)):
        hidden = target_model.run(torch.tensor([text[: len(prompt) + position]])).final[0, -1]
        for k in (1, 2, 3):
            if position + k >= len(answer):
                assert trace.ranks[position][k - 1] == -1
                continue
            rank = (
                draft.lm_head(k)
                .logits(draft.head_state(hidden, k))
                .argsort(descending=True)
                .tolist()
                .index(answer[position + k])
            )
            assert trace.ranks[position][k - 1] == (rank if rank < 10 else -1)


@pytest.mark.parametrize(
    "tree", [Tree.cartesian([3, 2]), Tree.chain(3), Tree.from_paths([(0,), (4,), (0, 3)])]
)
def test_simulated_decoding_is_what_the_loop_does(tree: Tree) -> None:
    target_model = random_target_model("qwen3")
    draft = noisy_heads(target_model)
    for prompt in ([3, 1, 4], [9], [20, 30, 40, 50]):
        plain = Decoder(target_model).generate(prompt, 40).tokens
        real = Decoder(target_model, draft, tree).generate(prompt, 40)
        assert len(trace_answer(target_model, draft, prompt, plain).simulate(tree)) == real.steps


def test_tied_logits_have_the_places_that_proposals_give_them() -> None:
    logits = torch.tensor([[2.0, 5.0, 5.0, 5.0, 1.0] + [0.0] * 19 + [-1.0]])
    order = logits.topk(5).indices[0].tolist()
    guesses = LMHead(torch.eye(25)).guesses(logits, logits, MAX_RANK)
    for position, token in enumerate(order):
        assert int(rank_of(guesses, torch.tensor([token]))) == position
    assert int(rank_of(guesses, torch.tensor([24]))) == -1


def test_prompts_suffice_if_answers_are_a_quarter_as_long_as_the_datas() -> None:
    examples = [
        Example(
            torch.tensor([i, i + 1, 5, 6, 7, 8, 9, 10, 11, 12], dtype=torch.int32),
            torch.arange(10) >= 2,  # an answer of eight tokens
            *("key", "source"),
            prompt=str(i),
        )
        for i in range(20)
    ]
    conversations = prompts_by_conversation(EncodedDataset(examples, DataReport()), 16, seed=0)
    assert len(conversations) == 4 * 16 // 8
    assert all(len(prompts) == 1 for prompts in conversations)


def test_traces_are_saved_by_answer_and_conversation(tmp_path: Path) -> None:
    short = Trace([[2, 0, 1], [-1, -1, -1]])
    TracedAnswers([[TRACE, short], [short]], [1, 2]).save(tmp_path / "tree_traces.npz")
    with np.load(tmp_path / "tree_traces.npz") as arrays:
        saved = {name: arrays[name].tolist() for name in arrays}
    assert saved == {
        "ranks": TRACE.ranks + short.ranks + short.ranks,
        "tokens": [6, 2, 2],
        "answers": [2, 1],
        "prompt": [1, 2],
    }
