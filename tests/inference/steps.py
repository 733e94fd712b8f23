"""What a draft proposes after some prompts, as the decoding step asks for it."""

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch

from medusa_train.inference.fixed_steps import new_steps
from medusa_train.inference.step import Steps
from medusa_train.models.drafts.base import DraftStep, Proposal, Proposer
from medusa_train.models.target_model import TargetModel
from medusa_train.trees.kv_cache import KVCache
from medusa_train.trees.tree import Tree


def small_blocks(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """Let a KV cache grow by few columns, so that answers cross several borders."""

    def new_kv_cache(target_model: TargetModel, capacity: int = 0) -> KVCache:
        return KVCache(target_model.num_layers, max(capacity, 120), block)

    monkeypatch.setattr(TargetModel, "new_kv_cache", new_kv_cache)


@torch.inference_mode()
def begun(
    target_model: TargetModel, draft: Proposer | None, tree: Tree, prompts: Sequence[list[int]]
) -> Steps:
    """Return the steps of rows with these prompts."""
    steps = new_steps(
        target_model, draft, tree.to(target_model.device), target_model.new_kv_cache()
    )
    steps.make_room(len(prompts), max(map(len, prompts)) + 64)
    steps.prefill(prompts)
    return steps


@torch.inference_mode()
def proposal_after(
    target_model: TargetModel,
    draft: Proposer,
    tree: Tree,
    prompts: Sequence[list[int]],
    last_tokens: Sequence[int],
) -> Proposal:
    """Return what the draft proposes below `last_tokens`, the next tokens after the prompts."""
    steps = begun(target_model, draft, tree, prompts)
    proposals: list[Proposal] = []
    propose = draft.propose

    def noted(step: DraftStep, states: Any) -> Proposal:
        proposals.append(propose(step, states))
        return proposals[-1]

    with patch.object(draft, "propose", noted):
        steps.step(last_tokens)
    return proposals[0]
