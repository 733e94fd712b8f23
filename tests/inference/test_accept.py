"""The acceptance rules: small trees by hand, and a test that sampling with any tree is lossless.

The target model of this test is a table: the logits of the first, second and third token given those
before. Its joint distribution of three tokens is known exactly, and 20,000 rows at a time are
decoded by the rule under test.
"""

import itertools
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from medusa_train.errors import ConfigError
from medusa_train.inference.accept import (
    AcceptanceRule,
    Accepted,
    Greedy,
    Typical,
    accept,
    accept_greedy,
    accept_sampling,
    accept_typical,
    sample_next,
)
from medusa_train.inference.sampling import Sampling
from medusa_train.trees.tree import Tree
from tests.inference.chi_square import p_value

VOCAB, RUNS, TOKENS = 5, 20_000, 3
TREES = {
    "chain": Tree.chain(3),
    "wide": Tree.cartesian([3, 2]),
    "sparse": Tree.from_paths([(0,), (1,), (3,), (0, 0), (0, 2), (1, 1), (0, 0, 0), (0, 0, 1)]),
    "every token": Tree.cartesian([5, 5]),
    "empty": Tree.empty(),
}
AcceptRejection = Callable[
    [Tensor, Tensor, Tree, Sampling, Sequence[torch.Generator]], list[Accepted]
]


def test_greedy_by_hand() -> None:
    tree = Tree.from_paths([(0,), (1,), (0, 0), (1, 0), (1, 1)])  # nodes 1 2 | 3 | 4 5
    tokens = torch.tensor([[7, 3, 4, 5, 5, 6]])
    # after the root 4: node 2; there 6: node 5; there 2
    wanted = torch.tensor([[4, 0, 6, 0, 0, 2]])
    logits = torch.nn.functional.one_hot(wanted, 8).double()
    assert accept_greedy(tokens, logits, tree) == [Accepted([0, 2, 5], [7, 4, 6, 2])]
    # rows are judged one by one
    both = accept_greedy(tokens.repeat(2, 1), torch.stack([logits[0], logits[0].flip(-1)]), tree)
    assert both == [Accepted([0, 2, 5], [7, 4, 6, 2]), Accepted([0, 1], [7, 3, 7])]


@pytest.mark.parametrize(
    "rule", [Greedy(), Sampling(1e-6), Typical(0.7)], ids=["greedy", "sampling", "typical"]
)
def test_the_next_token_is_the_likeliest_by_rules_that_leave_no_choice(
    rule: AcceptanceRule,
) -> None:
    logits = torch.randn(3, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    generators = [torch.Generator().manual_seed(seed) for seed in range(3)]
    assert sample_next(rule, logits, generators) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "rule",
    [Greedy(), Sampling(0.7, top_p=0.9), Typical(0.7)],
    ids=["greedy", "rejection", "typical"],
)
def test_half_precision_logits_are_accepted_like_their_float32_values(
    rule: AcceptanceRule, dtype: torch.dtype
) -> None:
    generator, tree, rows = torch.Generator().manual_seed(0), TREES["sparse"], 1000
    logits = (6 * torch.randn(rows, tree.size + 1, VOCAB, generator=generator)).to(dtype)
    tokens = torch.randint(VOCAB, (rows, tree.size + 1), generator=generator)

    def judged(logits: Tensor) -> list[Accepted]:
        return accept(
            rule, tokens, logits, tree, [torch.Generator().manual_seed(row) for row in range(rows)]
        )

    assert judged(logits) == judged(logits.float())


def _typical_case() -> tuple[Tensor, Tensor, Tree]:
    tree = Tree.from_paths([(0,), (1,), (2,), (0, 0), (1, 0)])  # nodes 1 2 3 | 4 | 5
    tokens = torch.tensor([[9, 0, 1, 2, 3, 3]])
    p = torch.full((6, 10), 1e-9, dtype=torch.float64)
    p[0, :4] = torch.tensor([0.5, 0.3, 0.05, 0.15])
    p[1, 3], p[1, 4] = 0.08, 0.92
    p[2, 3], p[2, 5] = 0.2, 0.8
    p[3:, 6] = 1.0
    return tokens, p.log()[None], tree


def test_typical_by_hand() -> None:
    tokens, logits, tree = _typical_case()
    # H at the root is 1.14, so the bar is min(.09, .3 exp(-1.14)) = .09: 0 and 1 pass, 2 does not;
    # .08 does not
    assert accept_typical(tokens, logits, tree, Typical(1.0, 0.09, 0.3)) == [
        Accepted([0, 2, 5], [9, 1, 3, 6])
    ]
    # with a lower bar both long paths pass: .5 * .08 = .04 against .3 * .2 = .06
    assert accept_typical(tokens, logits, tree, Typical(1.0, 0.06, 10))[0].path == [0, 2, 5]
    # with a bar that only .5 passes
    assert accept_typical(tokens, logits, tree, Typical(1.0, 0.4, 10)) == [
        Accepted([0, 1], [9, 0, 4])
    ]
    # nothing passes: the argmax is the next root all the same
    assert accept_typical(tokens, logits, tree, Typical(1.0, 0.95, 10)) == [Accepted([0], [9, 0])]
    # a high epsilon leaves it to the entropy: bars of .096 at the root, .18 at node 2, which .2
    # passes; then of .21
    assert accept_typical(tokens, logits, tree, Typical(1.0, 0.95, 0.3))[0].path == [0, 2, 5]
    assert accept_typical(tokens, logits, tree, Typical(1.0, 0.95, 0.35))[0].path == [0, 1]


def test_typical_scores_equal_lengths_by_probability() -> None:
    tree = Tree.from_paths([(0,), (1,)])
    logits = torch.tensor([0.3, 0.6, 0.1]).log().expand(1, 3, 3)
    assert accept_typical(torch.tensor([[2, 0, 1]]), logits, tree, Typical(1.0, 0.09, 0.3))[
        0
    ].path == [0, 2]


def test_impossible_tokens_do_not_change_the_order_of_others() -> None:
    """Their log probability is -inf, and 0 * -inf would make the sums of all other nodes NaN."""
    tree = Tree.from_paths([(0,), (1,), (2,)])
    logits = torch.tensor([0.3, 0.6, 0.1, 0.0]).log().expand(1, 4, 4)
    assert accept_typical(torch.tensor([[2, 3, 0, 1]]), logits, tree, Typical(1.0, 0.09, 0.3))[
        0
    ].path == [0, 3]


def test_mistakes_are_named() -> None:
    with pytest.raises(
        ConfigError, match=r"temperature must be above 0.*got 0(.|\n)*delta must be above 0.*got -1"
    ):
        Typical(0, 0.1, -1)
    with pytest.raises(ValueError, match="a generator for every row"):
        accept(Sampling(), torch.tensor([[0]]), torch.zeros(1, 1, 4), Tree.empty(), None)


class Table:
    """A target model as a table: `logits[i]` of token i given the i before it, [VOCAB] * (i + 1)."""

    def __init__(self, seed: int, spread: float = 1.5) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.logits = [
            torch.randn([VOCAB] * (i + 1), generator=draw, dtype=torch.float64) * spread
            for i in range(3)
        ]

    def joint(self, sampling: Sampling) -> Tensor:
        """The exact probability of every three tokens, [VOCAB, VOCAB, VOCAB]."""
        p = [sampling.warp(logits).softmax(-1) for logits in self.logits]
        return p[0][:, None, None] * p[1][:, :, None] * p[2]

    def after(self, written: Tensor, counts: Tensor) -> Tensor:
        """Logits [N, VOCAB] of the token after the first counts[i] of written[i]; zeros from the
        fourth on.
        """
        out = torch.zeros(len(written), VOCAB, dtype=torch.float64)
        for i, table in enumerate(self.logits):
            here = counts == i
            out[here] = table[tuple(written[here, j] for j in range(i))]
        return out


def _guesses(
    kind: str, table: Table, texts: Tensor, counts: Tensor, tree: Tree
) -> tuple[Tensor, Tensor]:
    """Node tokens [RUNS, n + 1], the root first and siblings all different, and the table's logits
    at every node.
    """
    tokens = torch.zeros(len(texts), tree.size + 1, dtype=torch.long)
    logits = []
    for node in range(tree.size + 1):
        text = texts.clone()
        path = tree.path_nodes(node)[1:]
        for depth, above in enumerate(path):
            text.scatter_(1, (counts + depth)[:, None], tokens[:, above, None])
        logits.append(table.after(text, counts + len(path)))
        draw = torch.Generator().manual_seed(node)
        orders = {
            "good": logits[-1].argsort(
                -1, descending=True
            ),  # the target model's most probable tokens
            "adversarial": logits[-1].argsort(-1),  # its least probable tokens
            "bad": torch.rand(VOCAB, generator=draw).argsort().expand(len(text), -1),
            "random": torch.rand(len(text), VOCAB, generator=draw).argsort(-1),
        }
        for child in tree.children[node]:
            tokens[:, child] = orders[kind][:, int(tree.ranks[child])]
    return tokens, torch.stack(logits, dim=1)


def _decode(rule: AcceptRejection, kind: str, tree: Tree, sampling: Sampling, seed: int) -> float:
    """Decode RUNS rows of three tokens by `rule`; the chi-square test's p-value against the exact
    joint.
    """
    table = Table(seed)
    generators = [torch.Generator().manual_seed(seed)] * RUNS
    written: list[list[int]] = [[] for _ in range(RUNS)]
    width = TOKENS + tree.max_depth + 1
    while min(len(row) for row in written) < TOKENS:
        texts = torch.tensor([row + [0] * (width - len(row)) for row in written])
        tokens, logits = _guesses(
            kind, table, texts, torch.tensor([len(row) for row in written]), tree
        )
        for row, accepted in zip(
            written, rule(tokens, logits, tree, sampling, generators), strict=True
        ):
            row += accepted.tokens[1:]
            del row[TOKENS:]
    cells = torch.tensor([row[0] * VOCAB**2 + row[1] * VOCAB + row[2] for row in written])
    return p_value(torch.bincount(cells, minlength=VOCAB**3), table.joint(sampling))


SAMPLINGS = [Sampling(), Sampling(0.7), Sampling(1.3, top_k=3), Sampling(0.9, top_p=0.8)]


KINDS = ["good", "bad", "adversarial", "random"]


# the empty tree has no guesses of any kind
@pytest.mark.parametrize(
    ("tree", "kind"),
    [*itertools.product((name for name in TREES if name != "empty"), KINDS), ("empty", "good")],
)
def test_three_tokens_follow_the_target_models_joint_distribution(tree: str, kind: str) -> None:
    """The p-values of right rules are spread over [0, 1]; one below 1e-4 happens once in ten
    thousand tests.
    """
    sampling = SAMPLINGS[(list(TREES).index(tree) + len(kind)) % len(SAMPLINGS)]
    assert _decode(accept_sampling, kind, TREES[tree], sampling, seed=len(tree) + len(kind)) > 1e-4


def _by_child(
    passes: Callable[[list[float], int], bool], left: Callable[[list[float], int], list[float]]
) -> AcceptRejection:
    """A rule that tries the children one by one, and draws from the residual of p if all are
    rejected.
    """

    def rule(
        tokens: Tensor,
        logits: Tensor,
        tree: Tree,
        sampling: Sampling,
        generators: Sequence[torch.Generator],
    ) -> list[Accepted]:
        decided = []
        for guessed, at in zip(
            tokens.tolist(), sampling.warp(logits).softmax(-1).tolist(), strict=True
        ):
            path, p = [0], at[0]
            children = list(tree.children[0])
            while children:
                child = children.pop(0)
                if passes(p, guessed[child]):
                    path.append(child)
                    p, children = at[child], list(tree.children[child])
                else:
                    p = left(p, guessed[child])
            decided.append(
                Accepted(path, [*(guessed[i] for i in path), DICE.choices(range(VOCAB), p)[0]])
            )
        return decided

    return rule


def _residual(p: list[float], token: int) -> list[float]:
    rest = [max(mass - 1 / VOCAB, 0.0) for mass in p]
    return [mass / sum(rest) for mass in rest]


DICE = random.Random(0)
WRONG = {
    "keeps the rejected child": _by_child(lambda p, x: DICE.random() < p[x], lambda p, x: p),
    "takes top-k children for draws from a flat head": _by_child(
        lambda p, x: DICE.random() < p[x] * VOCAB, _residual
    ),
    "greedy": lambda tokens, logits, tree, sampling, generators: accept_greedy(
        tokens, logits, tree
    ),
    "forgets the temperature": lambda tokens, logits, tree, sampling, generators: accept_sampling(
        tokens, logits, tree, Sampling(), generators
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_rules_fail_the_same_test(wrong: str) -> None:
    assert _decode(WRONG[wrong], "good", TREES["wide"], Sampling(0.7), seed=3) < 1e-12


def _plain_typical(
    tokens: list[int], logits: Tensor, tree: Tree, rule: Typical
) -> tuple[list[int], int]:
    """The accepted path and the next root of one row, node by node as the paper writes it."""
    best: list[int] = [0]
    best_score = 0.0
    for node in range(1, tree.size + 1):
        path = tree.path_nodes(node)
        score = 0.0
        for parent, child in itertools.pairwise(path):
            p = (logits[parent] / rule.temperature).softmax(-1)
            entropy = -(p * p.log()).sum()
            bar = min(rule.epsilon, rule.delta * float((-entropy).exp()))
            if p[tokens[child]] <= bar:
                break
            score += float(p[tokens[child]].log())
        else:
            if (len(path), score) > (len(best), best_score) or best == [0]:
                best = path
                best_score = score
    return best, int(logits[best[-1]].argmax())


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 2.0])
def test_typical_is_the_rule_of_a_plain_loop(temperature: float) -> None:
    """At each temperature of the distribution, whose paths differ."""
    generator, tree, rows = torch.Generator().manual_seed(5), TREES["sparse"], 200
    logits = 2 * torch.randn(rows, tree.size + 1, VOCAB, generator=generator, dtype=torch.float64)
    tokens = torch.zeros(rows, tree.size + 1, dtype=torch.long)
    for row in range(rows):
        for children in tree.children:  # siblings have different tokens
            order = torch.randperm(VOCAB, generator=generator)
            tokens[row, list(children)] = order[: len(children)]
    rule = Typical(temperature, epsilon=0.2, delta=0.5)
    accepted = accept_typical(tokens, logits, tree, rule)
    for row, found in enumerate(accepted):
        nodes, following = _plain_typical(tokens[row].tolist(), logits[row], tree, rule)
        assert found.path == nodes
        assert found.tokens[-1] == following
    colder = accept_typical(tokens, logits, tree, Typical(temperature / 2, 0.2, 0.5))
    assert [found.path for found in colder] != [found.path for found in accepted]
