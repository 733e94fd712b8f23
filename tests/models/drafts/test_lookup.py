"""Prompt lookup: the estimated probability of copies, and which of them are verified."""

from itertools import pairwise

import pytest

from medusa_train.models.drafts.lookup import MAX_CANDIDATES, CopyAccuracy, PromptLookupDraft
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
    return [
        after / before
        for before, after in pairwise(accuracy.probabilities(ngram, tree_of(list(range(depth)))))
    ]


def test_the_estimate_is_the_share_of_copies_that_were_right() -> None:
    accuracy, tree = CopyAccuracy(), tree_of([1, 2, 3], [1, 4, 5])
    for tokens in ([1, 2, 3], [1, 4, 6], [1, 2, 7], [8, 2, 3]) * 200:
        accuracy.record(2, tree, tokens)
    assert estimates(accuracy, 2, 3) == pytest.approx([3 / 4, 1, 1 / 3], abs=0.01)
    assert estimates(accuracy, 1, 3) == estimates(CopyAccuracy(), 1, 3)  # n-grams of another length


def test_what_the_text_or_the_copy_does_not_decide_is_not_counted() -> None:
    accuracy, before = CopyAccuracy(), estimates(CopyAccuracy(), 3, 3)
    for _ in range(50):
        accuracy.record(3, tree_of([1, 2, 3]), [1])  # the text ends
        accuracy.record(3, tree_of([1]), [1, 2, 3])  # the copy ends
        accuracy.record(3, tree_of(), [1, 2, 3])
    after = estimates(accuracy, 3, 3)
    assert after[0] > 0.9
    assert after[1:] == before[1:]


def test_great_depths_are_recorded_together() -> None:
    accuracy = CopyAccuracy()
    for _ in range(50):
        accuracy.record(2, tree_of([1, 2, 3, 4]), [1, 2, 3, 4])
        accuracy.record(2, tree_of([1, 2, 3]), [1, 2, 5])
    second, third, fourth, fifth, sixth = estimates(accuracy, 2, 6)[1:]
    assert second > 0.9
    assert third == pytest.approx(0.5, abs=0.01)
    assert 0.9 < fourth == fifth == sixth


def sizes(draft: PromptLookupDraft, prompt: list[int], answer: list[int]) -> list[int]:
    """The sizes of the trees that are proposed until `answer` is complete."""
    text = draft.new_request_state(prompt)
    out, position = [], 0
    while position < len(answer):
        tree = text.draft_tree(answer[position], draft.max_depth, draft.nodes)
        out.append(tree.size)
        accepted, node = (
            1,
            tree.find(0, answer[position + 1]) if position + 1 < len(answer) else None,
        )
        while node is not None:
            accepted += 1
            node = (
                tree.find(node, answer[position + accepted])
                if position + accepted < len(answer)
                else None
            )
        draft.extend_request_state(text, answer[position : position + accepted])
        position += accepted
    return out


def test_copies_that_are_right_get_longer() -> None:
    loop = list(range(10, 40))
    right = sizes(PromptLookupDraft(max_ngram=2, max_tokens=8, nodes=8), loop * 3, loop * 6)
    assert 0 < right[0] < 8
    assert right[-1] == 8


def test_copies_that_are_wrong_end() -> None:
    """Each question recurs once, and another answer follows."""
    prompt = [token for i in range(60) for token in (i, 100 + i)]
    answer = [token for i in range(60) for token in (i, 200 + i)]
    questions, answers = [sizes(PromptLookupDraft(), prompt, answer)[i::2] for i in range(2)]
    assert questions[0] > 0
    assert questions[30:] == [0] * 30
    assert answers == [0] * 60


def test_no_copy_is_left_out_without_a_minimum() -> None:
    loop = list(range(10, 40))
    assert set(sizes(PromptLookupDraft(2, 8, 8, min_probability=0), loop * 3, loop)) == {8}


def test_the_most_probable_nodes_are_proposed() -> None:
    draft = PromptLookupDraft(max_ngram=1, max_tokens=3, nodes=2, min_probability=0)
    text = draft.new_request_state([1, 2, 3, 4, 1, 2, 3, 5, 1, 6, 7, 8])
    tree = text.draft_tree(1, draft.max_depth, draft.nodes)
    # 1 is followed by 2 3 twice and by 6 once: 6 is less frequent than 3, but more probable
    assert (tree.tokens, tree.parents) == ([1, 6, 2], [-1, 0, 0])


def test_the_most_recent_copies_are_compared() -> None:
    draft = PromptLookupDraft(max_ngram=1, max_tokens=1, nodes=5, min_probability=0)
    text = draft.new_request_state([1, 2] * 40 + [1, 3] * MAX_CANDIDATES)
    assert text.draft_tree(1, draft.max_depth, draft.nodes).tokens == [1, 3]
