"""Amphista, its variants and other layer classes: rows that accept different lengths equal plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from medusa_train.inference.generate import Decoder
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.amphista import AmphistaDraft, AmphistaState
from medusa_train.models.drafts.base import Proposal
from medusa_train.trees.tree import Tree
from tests.families import random_backbone
from tests.inference.equality import check_equals_plain
from tests.models.drafts.test_amphista import VARIANTS, trained_like

PROMPTS = [[3, 14, 15, 9, 2, 6, 5, 35, 8, 9], [7], [20, 30, 40], [11, 12, 13, 14, 15, 16, 17]]
TREE = Tree.from_paths([(0,), (1,), (2,), (5,), (0, 0), (0, 3), (1, 0), (0, 0, 0), (1, 0, 2)])


class Whisperer(AmphistaDraft):
    """Heads that know the continuation at some steps, so that rows accept paths of different lengths."""

    truth: dict[int, list[int]]

    def whisper(self, answers: Sequence[list[int]]) -> None:
        """Record `answers`: for each token what followed it last."""
        self.truth = {token: answer[i + 1 : i + 4] for answer in answers for i, token in enumerate(answer)}

    def propose(self, state: AmphistaState, roots: Tensor, tree: Tree) -> Proposal:
        proposal = super().propose(state, roots, tree)
        for row, root in enumerate(roots.tolist()):
            known = self.truth.get(root, [])
            for node, path in enumerate(tree.paths, start=1):
                if path[-1] == len(path) % 2 and len(known) >= len(path) and (root + len(path)) % 3:
                    proposal.tokens[row, node] = known[len(path) - 1]
        return proposal


def _whisperer(backbone: Backbone, answers: Sequence[list[int]], **settings: Any) -> Whisperer:
    draft = Whisperer.from_backbone(backbone, **{"num_heads": 4, **settings})
    assert isinstance(draft, Whisperer)
    draft.load_state_dict(trained_like(backbone, **{"num_heads": 4, **settings}).state_dict())
    draft.whisper(answers)
    return draft


@pytest.mark.parametrize("variant", ["amphista", "alpha", "no-staged-adaptation", "no-sampled-token"])
@pytest.mark.parametrize("family", ["llama", "mistral", "mistral-window", "qwen3"])
def test_rows_equal_plain_decoding(family: str, variant: str) -> None:
    backbone = random_backbone(family)
    plain = [Decoder(backbone).generate(prompt, 24).tokens for prompt in PROMPTS]
    draft = _whisperer(backbone, plain, **VARIANTS[variant])
    alone, together = check_equals_plain(backbone, draft, PROMPTS, TREE)
    assert sum(sum(out.accepted) for out in alone) > 10
    assert len({tuple(out.accepted) for out in together}) > 2  # rows fell apart, so that the comparison can fail
    # a row's guesses do not depend on the others either
    assert [out.accepted for out in together] == [out.accepted for out in alone]


@pytest.mark.parametrize("family", ["phi3-longrope", "gemma3", "granite"])
def test_families_with_other_layers_or_embeddings(family: str) -> None:
    backbone = random_backbone(family)
    plain = [Decoder(backbone).generate(prompt, 24).tokens for prompt in PROMPTS]
    check_equals_plain(backbone, _whisperer(backbone, plain), PROMPTS, TREE)
