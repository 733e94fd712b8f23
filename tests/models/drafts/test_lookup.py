"""Prompt lookup: the estimated probability of copies, and which of them are verified."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from medusa_train.models.drafts.lookup import CopyAccuracy, LookupState, PromptLookupDraft
from medusa_train.trees.row_trees import TokenTree


def tree_of(*continuations: list[int]) -> TokenTree:
    tree = TokenTree([9])
    for continuation in continuations:
        tree.add(continuation)
    return tree


def test_siblings_share_the_probability_that_one_of_them_is_right() -> None:
    tree = tree_of([1, 2], [1, 3], [1, 2], [5])
    assert tree.tokens == [9, 1, 2, 3, 5]
    before = CopyAccuracy().probabilities(2, tree)
    first, second = before[1] + before[4], (before[2] + before[3]) / before[1]
    assert before[0] == 1
    assert 0 < first < 1
    assert 0 < second < 1
    assert before[1] == pytest.approx(first * 3 / 4)
    assert before[2] == pytest.approx(before[1] * second * 2 / 3)


def estimates(accuracy: CopyAccuracy, ngram: int, depth: int) -> list[float]:
    """The estimated probability at each depth that a single continuation goes on to be right."""
    chain = accuracy.probabilities(ngram, tree_of(list(range(depth))))
    return [after / before for before, after in pairwise(chain)]


def test_the_estimate_is_the_share_of_copies_that_were_right() -> None:
    accuracy, tree = CopyAccuracy(), tree_of([1, 2, 3], [1, 4, 5])
    for tokens in ([1, 2, 3], [1, 4, 6], [1, 2, 7], [8, 2, 3]) * 200:
        accuracy.count(2, tree, tokens)
    assert estimates(accuracy, 2, 3) == pytest.approx([3 / 4, 1, 1 / 3], abs=0.01)
    assert estimates(accuracy, 1, 3) == estimates(CopyAccuracy(), 1, 3)  # n-grams of another length


def test_what_the_text_or_the_copy_does_not_decide_is_not_counted() -> None:
    accuracy, before = CopyAccuracy(), estimates(CopyAccuracy(), 3, 3)
    for _ in range(50):
        accuracy.count(3, tree_of([1, 2, 3]), [1])  # the text ends
        accuracy.count(3, tree_of([1]), [1, 2, 3])  # the copy ends
        accuracy.count(3, tree_of(), [1, 2, 3])
    after = estimates(accuracy, 3, 3)
    assert after[0] > 0.9
    assert after[1:] == before[1:]


def sizes(draft: PromptLookupDraft, prompt: list[int], answer: list[int]) -> list[int]:
    """The sizes of the trees that are proposed until `answer` is complete."""
    state = LookupState([draft.text(prompt)])
    out, position = [], 0
    while position < len(answer):
        (tree,) = draft.guess(state, [answer[position]])
        out.append(tree.size)
        accepted, node = [answer[position]], tree.find(0, *answer[position + 1 : position + 2] or [-1])
        while node is not None:
            accepted.append(tree.tokens[node])
            node = tree.find(node, *answer[position + len(accepted) :][:1] or [-1])
        state.texts[0].extend(accepted)
        position += len(accepted)
    return out


def test_copies_that_are_always_right_get_longer_and_others_end() -> None:
    draft = PromptLookupDraft(max_ngram=2, max_tokens=8, nodes=8)
    loop = list(range(10, 40))
    right = sizes(draft, loop * 3, loop * 6)
    assert right[0] < 8
    assert right[-1] == 8
    draw = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 40, (600,), generator=draw).tolist()
    wrong = sizes(draft, noise[:200], noise[200:])
    assert sum(wrong[-100:]) < sum(wrong[:100]) / 2


def test_no_copy_is_left_out_without_a_minimum() -> None:
    loop = list(range(10, 40))
    assert set(sizes(PromptLookupDraft(2, 8, 8, min_probability=0), loop * 3, loop)) == {8}


def test_the_most_probable_nodes_are_kept_with_their_parents() -> None:
    draft = PromptLookupDraft(max_ngram=1, max_tokens=3, nodes=4, min_probability=0)
    state = LookupState([draft.text([1, 2, 3, 4, 1, 2, 3, 5, 1, 6, 7, 8])])
    (tree,) = draft.guess(state, [1])
    # 1 is followed by 6 7 8, 2 3 5 and 2 3 4: the most probable nodes are 2, then 6 and 3, then 7
    assert (tree.tokens, tree.parents) == ([1, 6, 7, 2, 3], [-1, 0, 1, 0, 3])
