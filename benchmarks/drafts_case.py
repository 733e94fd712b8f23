"""A trained draft of `drafts.py`: what it is, what its training took, its trees; and drafts loaded side by side.

Knows no bench and times nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from m2_case import training

from medusa_train.checkpoint.heads import load_draft
from medusa_train.checkpoint.load import LoadedModel, load_tree, load_with_draft
from medusa_train.checkpoint.resolve import ModelPaths, resolve_model
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.errors import CheckpointError
from medusa_train.evaluation.calibrate import collect, talks_of_run
from medusa_train.inference.tree_fit import joint_trees
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts import draft_name
from medusa_train.models.drafts.base import Draft
from medusa_train.trees.tree import Tree

ANSWER = 256  # longest answer that a tree is fitted to
SEED = 20  # in which order held-out conversations are answered, the same for all drafts

OWN, EQUAL, CHAIN, WHOLE = "own", "equal", "chain", "whole chain"
#: What every draft decodes with: the tree that its run calibrated on this machine; one of as many nodes as all others
#: have, which no clock has a say in; the first guesses alone. Kangaroo's chain ends early; `WHOLE` is that it does not.
TREES = (OWN, EQUAL, CHAIN)
FILLED = (EQUAL, WHOLE)  # without an early stop, which would leave nodes of a tree out


def describe(runs: Sequence[Path], nodes: int, budget: int) -> dict[str, Any]:
    """What a trained draft is; `runs` are its stages, the last one holds it.

    Raises:
        CheckpointError: the run has no draft, or its data are not to be had any more.
    """
    paths = resolve_model(str(runs[-1]), None, None)
    subject = load_with_draft(paths, "float32", pack=False)
    backbone, draft = subject.backbone, subject.draft
    assert draft is not None
    assert subject.tree is not None
    tree = _equal_tree(paths, subject, nodes, budget)
    return {
        "kind": draft_name(draft),
        "draft": draft.settings,
        "depth": draft.num_heads,
        "parameters": sum(parameter.numel() for parameter in draft.parameters()),
        "backbone_parameters": sum(parameter.numel() for parameter in backbone.model.parameters()),
        "backbone_layers": backbone.num_layers,
        "training": [training(run) for run in runs],
        OWN: [list(path) for path in subject.tree.paths],
        EQUAL: [list(path) for path in tree.paths],
    }


def _equal_tree(paths: ModelPaths, subject: LoadedModel, nodes: int, budget: int) -> Tree:
    """The best tree of `nodes` nodes on greedy answers to what the run held out, in float32 throughout."""
    chat = ChatEncoder(subject.backbone.tokenizer, paths.chat_template)
    talks = talks_of_run(paths, chat, SEED)
    if not talks:
        raise CheckpointError(f"{paths.home}: its data are gone, and a tree is fitted to what it held out of them")
    traced = collect(subject, talks, budget, ANSWER, lambda tokens: None)
    return joint_trees([trace for talk in traced for trace in talk], [nodes])[nodes]


@dataclass(frozen=True)
class Contender:
    """A draft ready to decode, on the backbone that it was trained for; `own`: which is not the common one."""

    name: str
    kind: str
    backbone: Backbone
    own: bool
    draft: Draft
    trees: Mapping[str, Tree]


@dataclass(frozen=True)
class Field:
    """All that take turns on a prompt: the common backbone, how chats are written for it, and the drafts."""

    backbone: Backbone
    chat: ChatEncoder
    contenders: Sequence[Contender]


def common_backbone(run: Path) -> ModelPaths:
    """Where the backbone lies that all drafts began with: of a run without what it made of it."""
    return replace(resolve_model(str(run), None, None), heads=None, tree=None, adapter=None)


def load_field(runs: Path, cases: Sequence[Mapping[str, Any]], dtype: str, *, pack: bool) -> Field:
    """Load one backbone for all drafts that keep it, and one more for each that has changed it.

    Args:
        pack: lay weights out for this CPU where that is measured to be faster; without, no clock has a say in how
            sums are rounded.
    """
    common = common_backbone(runs / cases[0]["name"])
    backbone = load_with_draft(common, dtype, pack=pack).backbone
    contenders = []
    for case in cases:
        paths = resolve_model(str(runs / case["name"]), None, None)
        own = paths.adapter is not None
        subject = load_with_draft(paths, dtype, pack=pack) if own else _beside(paths, backbone, pack)
        assert subject.draft is not None
        assert subject.tree is not None
        chain = Tree.chain(subject.draft.num_heads)
        trees = {OWN: subject.tree, EQUAL: Tree.from_paths(case[EQUAL]), CHAIN: chain}
        if case["kind"] == "kangaroo":
            trees[WHOLE] = chain
        contenders.append(Contender(case["name"], case["kind"], subject.backbone, own, subject.draft, trees))
    return Field(backbone, ChatEncoder(backbone.tokenizer, common.chat_template), contenders)


def _beside(paths: ModelPaths, backbone: Backbone, pack: bool) -> LoadedModel:
    """A draft on a backbone that is loaded already."""
    assert paths.heads is not None
    draft = load_draft(paths.heads, backbone, backbone.dtype)
    if pack:
        draft.prepack()
    return LoadedModel(backbone, draft, load_tree(paths, draft.num_heads))
