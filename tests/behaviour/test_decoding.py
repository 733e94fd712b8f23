"""Decoding in float64: every draft gives plain greedy decoding's tokens, samples follow the model's
distribution, and what each step accepts follows from the draft's formula.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from tests.behaviour import plain, plain_trees
from tests.behaviour.conftest import KINDS, answered, train_long
from tests.behaviour.seams import Answer, Greedy, Sampling, Typical, decode, new_draft
from tests.behaviour.world import BOS, NARROW, greedy, random_model, read_lines, write_model

#: Wide at its root, so that lower ranks are accepted, too.
TREE = [
    *((r,) for r in range(6)),
    *((r, s) for r in range(3) for s in range(3)),
    *((r, s, t) for r in range(2) for s in range(2) for t in range(2)),
]
CHAIN = [(0,), (0, 0), (0, 0, 0)]
TOKENS = 28


@pytest.fixture(scope="session")
def prompts(own: Path, tokenizer: Any) -> list[list[int]]:
    """The prompts of the chats whose answers the drafts were trained on, of several lengths."""
    texts = [record["messages"][0]["content"] for record in read_lines(own)]
    found = [tokenizer(f"<s><|user|>{text}<|assistant|>")["input_ids"] for text in texts]
    return [*found[:5], [BOS], found[5][:-1]]


@pytest.fixture(scope="session")
def answers(exact_model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Their greedy answers, by whole passes of the model."""
    return [greedy(exact_model, prompt, TOKENS, ()) for prompt in prompts]


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model with sliding windows, and its answers."""
    where = tmp_path_factory.mktemp("windowed")
    directory = write_model(where / "model", "mistral-window")
    return directory, answered(directory, where)


def expected_steps(
    draft: plain.PlainDraft, prompt: Sequence[int], answer: Sequence[int], tree: Any
) -> list[int]:
    """Return how many draft tokens each step accepts, by the draft's formula along the answer."""
    ranks = ranks_along(draft, prompt, answer)
    return plain_trees.steps_of(ranks, tree)


def ranks_along(
    draft: plain.PlainDraft, prompt: Sequence[int], answer: Sequence[int]
) -> plain_trees.Ranks:
    text = [*prompt, *answer]
    logits = draft.head_logits(text, plain.run_model(draft.model, text))
    kept = None if draft.token_map is None else draft.token_map.tolist()
    ranks = []
    for p in range(len(answer)):
        row = []
        for k in range(1, draft.num_heads + 1):
            if p + k >= len(answer):
                row.append(-1)
                continue
            token = answer[p + k]
            index = token if kept is None else (kept.index(token) if token in kept else -1)
            row.append(plain_trees.rank(logits[k - 1][len(prompt) + p - 1], index))
        ranks.append(row)
    return ranks


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_and_what_each_step_accepts(
    kind: str,
    skilled: Callable[[str], Path],
    exact_model: Any,
    prompts: list[list[int]],
    answers: list[list[int]],
) -> None:
    """Alone, in batches that rows join and leave, in steps of fixed shape, and replayed."""
    heads = skilled(kind) / "heads"
    draft = plain.PlainDraft.read(heads, exact_model)
    tree = [path for path in TREE if len(path) <= draft.num_heads]
    whole = {"threshold": 0.0} if kind.startswith("kangaroo") else {}
    expected = [
        expected_steps(draft, prompt, answer, tree)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    # steps accept something, also of lower ranks than the first
    assert sum(map(sum, expected)) > 15
    chain = [expected_steps(draft, p, a, CHAIN) for p, a in zip(prompts, answers, strict=True)]
    assert chain != expected
    ways: list[dict[str, Any]] = [
        {},
        {"rows": 3, "joins": 1},
        {"rows": 4},
        {"steps": "fixed"},
        {"steps": "replayed"},
        {"steps": "replayed", "rows": 3, "joins": 1},
    ]
    for way in ways:
        outs = decode(exact_model, prompts, heads, tree=tree, max_new_tokens=TOKENS, **whole, **way)
        assert [out.tokens for out in outs] == answers, way
        assert [out.accepted for out in outs] == expected, way
        assert {out.finish for out in outs} == {"length"}


@pytest.mark.parametrize("kind", ["kangaroo", "kangaroo-mlp"])
def test_kangaroo_stops_after_a_token_of_too_little_confidence(
    kind: str,
    skilled: Callable[[str], Path],
    exact_model: Any,
    prompts: list[list[int]],
    answers: list[list[int]],
) -> None:
    heads = skilled(kind) / "heads"
    draft = plain.PlainDraft.read(heads, exact_model)
    stopped = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        text = [*prompt, *answer]
        logits = draft.head_logits(text, plain.run_model(exact_model, text))
        expected, position = [], 0
        while position < len(answer) - 1:
            accepted = 0
            for k in range(1, 4):
                if position + k >= len(answer):
                    break
                p = logits[k - 1][len(prompt) + position - 1].softmax(-1)
                if int(p.argmax()) != answer[position + k]:
                    break
                accepted = k
                if float(p.max()) <= 0.5:
                    stopped += 1
                    break
            expected.append(accepted)
            position += accepted + 1
        (out,) = decode(
            exact_model, [prompt], heads, tree=CHAIN, max_new_tokens=TOKENS, threshold=0.5
        )
        assert (out.tokens, out.accepted) == (answer, expected)
    assert stopped


@pytest.mark.parametrize("kind", ["medusa", "hydra++", "amphista", "kangaroo", "eagle3"])
def test_answers_end_at_end_tokens_and_with_the_context(
    kind: str,
    skilled: Callable[[str], Path],
    exact_model: Any,
    prompts: list[list[int]],
    answers: list[list[int]],
) -> None:
    """Also within what a step accepts; nothing after the end counts as accepted."""
    heads = skilled(kind) / "heads"
    ends = [answers[0][7], answers[1][12]]
    expected = []
    for answer in answers:
        stops = [n for n, token in enumerate(answer) if token in ends]
        expected.append((answer[: stops[0] + 1], "eos") if stops else (answer, "length"))
    for way in ({}, {"rows": 3, "joins": 1}, {"steps": "fixed", "rows": 3, "joins": 2}):
        outs = decode(
            exact_model, prompts, heads, tree=TREE, ends=ends, max_new_tokens=TOKENS, **way
        )
        assert [(out.tokens, out.finish) for out in outs] == expected
        for out in outs:
            assert sum(out.accepted) + len(out.accepted) + 1 in (
                len(out.tokens),
                len(out.tokens) + 1,  # where the end was itself a draft token
            )
    context = len(prompts[0]) + 9
    fitting = [prompt for prompt in prompts if len(prompt) <= context]
    plain_answers = [greedy(exact_model, p, context - len(p) + 1, ()) for p in fitting]
    for way in ({}, {"rows": 2, "joins": 1}):
        outs = decode(
            exact_model, fitting, heads, tree=TREE, max_new_tokens=99, context=context, **way
        )
        assert [out.tokens for out in outs] == plain_answers
        assert {out.finish for out in outs} == {"context"}


SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "medusa": ("medusa", {"num_heads": 2}),
    "hydra++": ("hydra", {"num_heads": 2, "num_layers": 1, "prefix_layer": True}),
    "amphista": ("amphista", {"num_heads": 2}),
    "kangaroo": ("kangaroo", {"num_heads": 2, "exit_layer": 1, "threshold": 0.0}),
    "eagle3": ("eagle3", {"num_heads": 2, "train_steps": 2, "layers": [1, 1, 2]}),
}
SHORT_PROMPTS = [[3, 14, 15, 9, 2, 6, 5, 35, 8, 9], [7], [20, 30, 40], list(range(60, 77))]


@pytest.mark.parametrize("family", ["mistral-window", "qwen3", "gemma3", "granite", "phi3"])
def test_other_families_in_all_ways(family: str) -> None:
    """Sliding windows in all layers or in some, norms of queries and keys, scaled states."""
    model = random_model(family).double()
    expected = [greedy(model, prompt, 20, ()) for prompt in SHORT_PROMPTS]
    drafts: list[Any] = [None, *(new_draft(*SETTINGS[kind]) for kind in SETTINGS)]
    for draft in drafts:
        for way in ({}, {"rows": 3, "joins": 1}, {"steps": "fixed", "rows": 3, "joins": 1}):
            outs = decode(
                model, SHORT_PROMPTS, draft, tree=NARROW if draft else (), max_new_tokens=20, **way
            )
            assert [out.tokens for out in outs] == expected, way
    assert len({tuple(answer) for answer in expected}) == len(expected)


@pytest.mark.parametrize("kind", ["hydra++", "amphista", "kangaroo"])
def test_layers_of_drafts_have_the_models_window(kind: str, windowed: tuple[Path, Path]) -> None:
    """A draft with a layer like those of a model with sliding windows sees as far back."""
    directory, data = windowed
    model = plain.load_model(directory)
    heads = train_long(kind, directory, data, directory.parent / kind) / "heads"
    draft = plain.PlainDraft.read(heads, model)
    texts = [record["messages"][0]["content"] for record in read_lines(data)]
    tokens = AutoTokenizer.from_pretrained(directory)
    prompts = [tokens(f"<s><|user|>{text}<|assistant|>")["input_ids"] for text in texts[:4]]
    answers = [greedy(model, prompt, TOKENS, ()) for prompt in prompts]
    expected = [
        expected_steps(draft, prompt, answer, CHAIN)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    assert sum(map(sum, expected)) > 10
    model.config.sliding_window = None  # which the formula of the draft reads
    assert expected != [
        expected_steps(draft, prompt, answer, CHAIN)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    model.config.sliding_window = 7
    whole = {"threshold": 0.0} if kind == "kangaroo" else {}
    for way in ({}, {"rows": 3, "joins": 1}, {"steps": "fixed"}):
        outs = decode(model, prompts, heads, tree=CHAIN, max_new_tokens=TOKENS, **whole, **way)
        assert [out.tokens for out in outs] == answers
        assert [out.accepted for out in outs] == expected


def test_a_model_whose_angles_change_with_the_length() -> None:
    """longrope: from its 21st token on a text has other angles, from the beginning."""
    model = random_model("phi3-longrope").double()
    expected = [greedy(model, prompt, 24, ()) for prompt in SHORT_PROMPTS]
    for draft, lookup in (
        (None, None),
        (new_draft(*SETTINGS["medusa"]), None),
        (None, ("prompt_lookup", {"max_ngram": 2, "max_tokens": 4, "nodes": 6})),
    ):
        outs = decode(model, SHORT_PROMPTS, draft, tree=NARROW if draft else (), lookup=lookup)
        assert [out.tokens for out in outs] == expected


# Drafts without training

LOOKUP = {"max_ngram": 3, "max_tokens": 5, "nodes": 400, "min_probability": 0.0}


def looked_up(text: Sequence[int], longest: int, count: int) -> list[list[int]]:
    """Return what followed the longest n-gram that ends a text, where it occurred before."""
    for n in range(min(longest, len(text) - 1), 0, -1):
        ends = [
            i for i in range(n, len(text)) if list(text[i - n : i]) == list(text[len(text) - n :])
        ]
        if ends:
            return [list(text[end : end + count]) for end in ends[-32:]]
    return []


def common(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def steps_by_copies(
    prompt: Sequence[int], answer: Sequence[int], copies: Callable[[Sequence[int]], list[list[int]]]
) -> list[int]:
    position, accepted = 0, []
    while position < len(answer) - 1:
        left = answer[position + 1 :]
        found = copies([*prompt, *answer[: position + 1]])
        count = max((common(copy, left) for copy in found), default=0)
        accepted.append(count)
        position += count + 1
    return accepted


def test_prompt_lookup_copies_what_followed_the_longest_ngram() -> None:
    """Of a model of eight tokens, whose texts repeat themselves."""
    model = random_model("llama", vocab_size=8, std=0.4).double()
    prompts = [[1, 2, 4], [3, 5, 3, 6, 3], [7], [4, 1, 1, 4, 6, 1]]
    answers = [greedy(model, prompt, TOKENS, ()) for prompt in prompts]
    expected = [
        steps_by_copies(prompt, answer, lambda text: looked_up(text, 3, 5))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    assert sum(map(sum, expected)) > 30
    assert len({step for steps in expected for step in steps}) > 3
    for way in ({}, {"rows": 3, "joins": 1}):
        outs = decode(
            model, prompts, lookup=("prompt_lookup", LOOKUP), max_new_tokens=TOKENS, **way
        )
        assert [out.tokens for out in outs] == answers
        assert [out.accepted for out in outs] == expected


def test_rest_copies_from_a_datastore(
    exact_model: Any, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    store = [answers[0], answers[2], answers[1][3:]]

    def copies(text: Sequence[int]) -> list[list[int]]:
        for n in range(min(4, len(text)), 0, -1):
            end = list(text[len(text) - n :])
            found = [
                document[i + n : i + n + 5]
                for document in store
                for i in range(len(document) - n + 1)
                if document[i : i + n] == end
            ]
            if found:
                return [copy for copy in found if copy]
        return []

    expected = [
        steps_by_copies(prompt, answer, copies)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    assert sum(expected[0]) > 15
    settings = {"datastore": store, "max_ngram": 4, "max_tokens": 5, "nodes": 400}
    for way in ({}, {"rows": 3, "joins": 1}):
        outs = decode(exact_model, prompts, lookup=("rest", settings), max_new_tokens=TOKENS, **way)
        assert [out.tokens for out in outs] == answers
        assert [out.accepted for out in outs] == expected


def test_rest_verifies_the_most_frequent_continuations(
    exact_model: Any, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    """As many as it may, where the datastore goes on in several ways."""
    answer = answers[0]
    other = next(token for token in range(5, 300) if token not in answer)
    store = [answer] * 3 + [[*answer[i - 4 : i], other] for i in range(4, len(answer))]

    def copies(text: Sequence[int]) -> list[list[int]]:
        for n in range(min(4, len(text)), 0, -1):
            end = list(text[len(text) - n :])
            counts: Counter[tuple[int, ...]] = Counter()
            for document in store:
                for i in range(n, len(document) + 1):
                    if document[i - n : i] == end:
                        copy = document[i : i + 5]
                        counts.update(tuple(copy[:k]) for k in range(1, len(copy) + 1))
            if counts:
                most = sorted(counts, key=lambda path: (-counts[path], len(path), path))
                return [list(path) for path in most[:5]]
        return []

    expected = steps_by_copies(prompts[0], answer, copies)
    assert 5 in expected
    settings = {"datastore": store, "max_ngram": 4, "max_tokens": 5, "nodes": 5}
    (out,) = decode(exact_model, prompts[:1], lookup=("rest", settings), max_new_tokens=TOKENS)
    assert (out.tokens, out.accepted) == (answer, expected)


def test_heads_and_a_copy_share_a_tree(
    skilled: Callable[[str], Path],
    exact_model: Any,
    prompts: list[list[int]],
    answers: list[list[int]],
) -> None:
    """A step accepts the longer of what heads and copies guess, or more where one continues the
    other.
    """
    for kind in ("medusa", "hydra++", "amphista", "eagle3"):
        heads = skilled(kind) / "heads"
        draft = plain.PlainDraft.read(heads, exact_model)
        for way in ({}, {"rows": 3, "joins": 1}):
            outs = decode(
                exact_model,
                prompts,
                heads,
                tree=NARROW,
                lookup=("prompt_lookup", LOOKUP),
                max_new_tokens=TOKENS,
                **way,
            )
            assert [out.tokens for out in outs] == answers
            for prompt, answer, out in zip(prompts, answers, outs, strict=True):
                ranks = ranks_along(draft, prompt, answer)
                position = 0
                for accepted in out.accepted:
                    text = [*prompt, *answer[: position + 1]]
                    left = answer[position + 1 :]
                    by_copy = [common(copy, left) for copy in looked_up(text, 3, 5)]
                    by_heads = plain_trees.accepted_length(
                        plain_trees.path_at(ranks, position), NARROW
                    )
                    assert accepted == max([by_heads, *by_copy])
                    position += accepted + 1


def test_copies_beside_heads_are_accepted_as_they_are_alone() -> None:
    """Of a model whose texts repeat themselves, by heads that guess something else."""
    model = random_model("llama", vocab_size=8, std=0.4).double()
    prompts = [[1, 2, 4], [3, 5, 3, 6, 3], [7], [4, 1, 1, 4, 6, 1]]
    answers = [greedy(model, prompt, TOKENS, ()) for prompt in prompts]
    heads = new_draft("medusa", {"num_heads": 2, "num_layers": 1}, noise=1.0)
    longer = 0
    for way in ({}, {"rows": 3, "joins": 1}):
        outs = decode(
            model,
            prompts,
            heads,
            tree=NARROW,
            lookup=("prompt_lookup", LOOKUP),
            max_new_tokens=TOKENS,
            **way,
        )
        assert [out.tokens for out in outs] == answers
        for prompt, answer, out in zip(prompts, answers, outs, strict=True):
            position = 0
            for accepted in out.accepted:
                text = [*prompt, *answer[: position + 1]]
                left = answer[position + 1 :]
                copied = max((common(copy, left) for copy in looked_up(text, 3, 5)), default=0)
                assert accepted >= copied
                longer += copied > 2  # than what heads alone could accept
                position += accepted + 1
    assert longer > 5


@pytest.mark.parametrize("name", ["lookahead", "amphista+lookahead", "dynamic", "dynamic+lookup"])
def test_drafts_that_choose_their_trees_change_no_token(
    name: str,
    skilled: Callable[[str], Path],
    exact_model: Any,
    prompts: list[list[int]],
    answers: list[list[int]],
) -> None:
    options: dict[str, Any] = {}
    heads = None
    if "lookahead" in name:
        options["lookup"] = ("lookahead", {"window": 4, "ngram": 3, "guesses": 3})
    if name.startswith("amphista"):
        heads, options["tree"] = skilled("amphista") / "heads", NARROW
    if name.startswith("dynamic"):
        heads, options["dynamic"] = skilled("eagle3") / "heads", (12, 3)
    if name.endswith("+lookup"):
        options["lookup"] = ("prompt_lookup", LOOKUP)
    alone = decode(exact_model, prompts, heads, max_new_tokens=TOKENS, **options)
    assert [out.tokens for out in alone] == answers
    assert sum(sum(out.accepted) for out in alone) > 10
    for way in ({"rows": 3, "joins": 1}, {"rows": 7}):
        together = decode(exact_model, prompts, heads, max_new_tokens=TOKENS, **options, **way)
        assert [(out.tokens, out.accepted) for out in together] == [
            (out.tokens, out.accepted) for out in alone
        ]


def test_dynamic_trees_hold_the_most_probable_paths(
    skilled: Callable[[str], Path],
    exact_model: Any,
    prompts: list[list[int]],
    answers: list[list[int]],
) -> None:
    """Paths are grown level by level, the ten best of a level by their ten best tokens; the nodes
    with the largest products are verified.
    """
    heads = skilled("eagle3") / "heads"
    draft = plain.PlainDraft.read(heads, exact_model)
    nodes, depth = 9, 3
    for prompt, answer in list(zip(prompts, answers, strict=True))[:2]:
        expected, position = [], 0
        while position < len(answer) - 1:
            text = [*prompt, *answer[: position + 1]]
            tree = dynamic_tree(draft, text, nodes, depth)
            left = answer[position + 1 :]
            count = max(
                (d for d in range(1, depth + 1) if tuple(left[:d]) in tree and len(left) >= d),
                default=0,
            )
            expected.append(count)
            position += count + 1
        (out,) = decode(exact_model, [prompt], heads, dynamic=(nodes, depth), max_new_tokens=TOKENS)
        assert (out.tokens, out.accepted) == (answer, expected)


def dynamic_tree(
    draft: plain.PlainDraft, text: list[int], nodes: int, depth: int
) -> set[tuple[int, ...]]:
    """Return the paths of tokens of a dynamic tree below the last token of a text."""
    level: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
    found: list[tuple[float, tuple[int, ...]]] = []
    for k in range(1, depth + 1):
        grown = []
        for value, path in sorted(level, reverse=True)[:10]:
            whole = [*text, *path]
            logits = draft.head_logits(whole, plain.run_model(draft.model, whole))
            p = logits[k - 1][len(text) - 2].softmax(-1)
            best = p.topk(10)
            for q, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                grown.append((value * q, (*path, token)))
        found += grown
        level = grown
    found.sort(reverse=True)
    return {path for _, path in found[:nodes]}


# Sampling


def p_value(counts: Tensor, probabilities: Tensor) -> float:
    """Return the probability of counts at least this far from `probabilities` (Pearson's
    chi-square); 0 if an impossible event was counted. Cells with few expected counts are pooled.
    """
    counts, expected = counts.double().flatten(), probabilities.double().flatten() * counts.sum()
    if (counts[expected == 0] > 0).any():
        return 0.0
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    possible = expected > 0
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = torch.tensor(float(possible.sum() - 1), dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


@pytest.fixture(scope="module")
def five_tokens() -> Any:
    """A model with a vocabulary of five tokens, so that all texts of three can be counted."""
    shape = {"vocab_size": 5, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "eos_token_id": 2}
    return random_model("llama", std=0.6, max_position_embeddings=16, **shape, **heads)


def joint_distribution(model: Any, prompt: list[int], rule: Sampling) -> Tensor:
    """Return the probabilities of all texts of three tokens, with transformers' own warpers."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    every = torch.cartesian_prod(*[torch.arange(5)] * 3)
    whole = torch.cat([torch.tensor([prompt]).expand(125, -1), every], dim=1)
    with torch.no_grad():
        logits = model(whole, use_cache=False).logits[:, len(prompt) - 1 : -1].double()
    flat = TemperatureLogitsWarper(rule.temperature)(None, logits.reshape(-1, 5))
    if rule.top_k:
        flat = TopKLogitsWarper(rule.top_k)(None, flat)
    if rule.top_p < 1:
        flat = TopPLogitsWarper(rule.top_p)(None, flat)
    log_p = flat.view(125, 3, 5).log_softmax(-1)
    return log_p.gather(-1, every[..., None]).sum((1, 2)).exp()


SAMPLED: dict[str, dict[str, Any]] = {
    "plain": {},
    **{kind: {"draft": new_draft(*SETTINGS[kind]), "tree": NARROW} for kind in SETTINGS},
    "kangaroo that stops": {
        "draft": new_draft("kangaroo", {"num_heads": 2, "exit_layer": 1, "threshold": 0.3}),
        "tree": NARROW,
    },
    "prompt_lookup": {
        "lookup": (
            "prompt_lookup",
            {"max_ngram": 1, "max_tokens": 2, "nodes": 3, "min_probability": 0.3},
        )
    },
    "rest": {
        "lookup": (
            "rest",
            {
                "datastore": [[1, 2, 3, 4, 0, 1], [2, 2, 4]],
                "max_ngram": 2,
                "max_tokens": 2,
                "nodes": 3,
            },
        )
    },
    "lookahead": {"lookup": ("lookahead", {"window": 3, "ngram": 3, "guesses": 4})},
    "medusa+prompt_lookup": {
        "draft": new_draft(*SETTINGS["medusa"]),
        "tree": NARROW,
        "lookup": ("prompt_lookup", {"max_ngram": 1, "max_tokens": 2, "nodes": 3}),
    },
    "dynamic": {"draft": new_draft(*SETTINGS["eagle3"]), "dynamic": (4, 2)},
}


@pytest.mark.parametrize("name", SAMPLED)
def test_samples_follow_the_models_distribution(name: str, five_tokens: Any) -> None:
    prompt, rule = [1, 2], Sampling(0.8, seed=7, shared=True)
    if name == "lookahead":  # which needs n-grams
        prompt = [1, 4, 3, 2, 2, 0, 1, 3, 0, 4, 1, 2]
    outs = decode(
        five_tokens, [prompt] * 4000, rule=rule, rows=2000, max_new_tokens=3, **SAMPLED[name]
    )
    counts = torch.zeros(125)
    for out in outs:
        a, b, c = out.tokens
        counts[25 * a + 5 * b + c] += 1
    joint = joint_distribution(five_tokens, prompt, rule)
    assert p_value(counts, joint) > 1e-4
    # another temperature would be seen
    assert p_value(counts, joint_distribution(five_tokens, prompt, Sampling(0.9))) < 1e-3
    if name != "plain":
        assert sum(sum(out.accepted) for out in outs) > 300


@pytest.mark.parametrize("family", ["gemma2", "granite"])
def test_samples_of_models_that_change_their_logits(family: str) -> None:
    """A soft cap, or a factor."""
    shape = {"vocab_size": 5, "hidden_size": 8, "intermediate_size": 8, "eos_token_id": 2}
    if family == "granite":
        shape["logits_scaling"] = 2
    model = random_model(family, std=0.8, max_position_embeddings=16, **shape)
    prompt, rule = [1, 2], Sampling(0.8, seed=5, shared=True)
    counts = torch.zeros(125)
    for out in decode(model, [prompt] * 4000, rule=rule, rows=2000, max_new_tokens=3):
        a, b, c = out.tokens
        counts[25 * a + 5 * b + c] += 1
    assert p_value(counts, joint_distribution(model, prompt, rule)) > 1e-4
    assert p_value(counts, joint_distribution(model, prompt, Sampling(1.0))) < 1e-3


@pytest.mark.parametrize(
    "rule", [Sampling(1.2, top_k=2), Sampling(1.2, top_p=0.7), Sampling(0.9, top_k=3, top_p=0.8)]
)
def test_top_k_and_top_p_are_those_of_transformers(rule: Sampling, five_tokens: Any) -> None:
    prompt = [1, 2]
    given = rule._replace(seed=3, shared=True)
    outs = decode(
        five_tokens,
        [prompt] * 3000,
        SAMPLED["medusa"]["draft"],
        tree=NARROW,
        rule=given,
        rows=1500,
        max_new_tokens=3,
    )
    counts = torch.zeros(125)
    for out in outs:
        a, b, c = out.tokens
        counts[25 * a + 5 * b + c] += 1
    assert p_value(counts, joint_distribution(five_tokens, prompt, rule)) > 1e-4


@pytest.mark.parametrize("kind", ["plain", "medusa", "hydra++", "amphista", "eagle3", "lookup"])
def test_samples_of_a_row_do_not_depend_on_the_others(
    kind: str, skilled: Callable[[str], Path], exact_model: Any, prompts: list[list[int]]
) -> None:
    options: dict[str, Any] = {"rule": Sampling(0.7, top_p=0.9), "ends": [60, 70, 80]}
    if kind == "lookup":
        options["lookup"] = ("prompt_lookup", LOOKUP)
    elif kind != "plain":
        options |= {"draft": skilled(kind) / "heads", "tree": NARROW}
    alone = decode(exact_model, prompts, **options)
    for way in ({"rows": 3, "joins": 1}, {"rows": 7}):
        assert decode(exact_model, prompts, **options, **way) == alone
    other = decode(exact_model, prompts, **options | {"rule": Sampling(0.7, top_p=0.9, seed=1)})
    assert [out.tokens for out in other] != [out.tokens for out in alone]


def test_typical_acceptance_by_its_formula(
    skilled: Callable[[str], Path], exact_model: Any, prompts: list[list[int]]
) -> None:
    """p(x) > min(epsilon, delta exp(-H)) at every node; the deepest such path, of these the
    likeliest; then the most probable token.
    """
    heads = skilled("medusa") / "heads"
    draft = plain.PlainDraft.read(heads, exact_model)
    otherwise = 0
    for rule in (Typical(0.9, 0.2, 0.5), Typical(1.0, 0.9, 2.0), Typical(0.7, 0.9, 1.0)):
        accepted_of_rule = 0
        for prompt in prompts[:3]:
            text = [*prompt, int(plain.run_model(exact_model, prompt).logits[-1].argmax())]
            accepted = []
            while len(text) - len(prompt) < TOKENS:
                path, other = typical_paths(draft, text, rule)
                states = plain.run_model(exact_model, [*text, *path])
                text += [*path, int(states.logits[-1].argmax())]
                accepted.append(len(path))
                otherwise += path != other
            (out,) = decode(
                exact_model, [prompt], heads, tree=NARROW, rule=rule, max_new_tokens=TOKENS
            )
            assert out.tokens == text[len(prompt) :][:TOKENS]
            assert out.accepted[:-1] == accepted[:-1]
            accepted_of_rule += sum(accepted)
        assert accepted_of_rule > 3
    assert otherwise > 1


def typical_paths(
    draft: plain.PlainDraft, text: list[int], rule: Typical
) -> tuple[list[int], list[int]]:
    """Return the path that is accepted, and what would be with the threshold of the distribution
    after a token in place of that which it is drawn from.
    """
    logits = draft.head_logits(text, plain.run_model(draft.model, text))
    best: list[tuple[int, float, list[int]]] = [(0, 0.0, []), (0, 0.0, [])]
    for path in NARROW:
        tokens = [
            int(logits[k][len(text) - 2].topk(rank + 1).indices[-1]) for k, rank in enumerate(path)
        ]
        states = plain.run_model(draft.model, [*text, *tokens])
        log_p = (states.logits[len(text) - 1 :] / rule.temperature).log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        thresholds = (rule.delta * (-entropy).exp()).clamp(max=rule.epsilon)
        own = [float(log_p[k][token]) for k, token in enumerate(tokens)]
        for after in (0, 1):
            limits = thresholds[after:].tolist()
            passes = all(math.exp(p) > limit for p, limit in zip(own, limits, strict=False))
            if passes and (len(tokens), sum(own)) > best[after][:2]:
                best[after] = (len(tokens), sum(own), tokens)
    return best[0][2], best[1][2]


def test_combinations_that_do_not_go_together_are_refused(
    skilled: Callable[[str], Path], exact_model: Any
) -> None:
    from medusa_train.errors import MedusaError

    heads = skilled("medusa") / "heads"
    for options in (
        {"tree": [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]},
        {"tree": CHAIN, "max_new_tokens": 0},
    ):
        with pytest.raises(MedusaError):
            decode(exact_model, [[5]], heads, **options)
    for prompt in ([], [999]):
        with pytest.raises(MedusaError):
            decode(exact_model, [prompt])
    with pytest.raises(MedusaError):
        decode(
            exact_model,
            [[5]],
            skilled("kangaroo") / "heads",
            tree=CHAIN,
            lookup=("prompt_lookup", LOOKUP),
        )
    assert decode(exact_model, [[5]], rule=Greedy(), max_new_tokens=1)[0] == Answer(
        greedy(exact_model, [5], 1, ()), [], "length"
    )
    assert list(itertools.chain(*[a.accepted for a in decode(exact_model, [[5]])])) == [0] * 23
