"""The steps that decode.py times: passes, steps on static buffers or as CUDA graphs, heads, and the
decoding loop.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

from medusa_train.inference.accept import accept
from medusa_train.inference.generate import Decoder
from medusa_train.inference.static.cache import SlotPass, StaticCache
from medusa_train.inference.static.drafts import AcceptedNodes, FixedShapeDraft
from medusa_train.inference.static.graphs import GraphRunner, Replayable, StepRunner
from medusa_train.inference.static.steps import StaticSteps
from medusa_train.models.backbone import Backbone
from medusa_train.models.compiled import round_up_to_block
from medusa_train.models.drafts.base import Proposal
from medusa_train.models.drafts.medusa import MedusaDraft, MedusaState
from medusa_train.models.features import Features
from medusa_train.trees.kv_cache import TreeCache
from medusa_train.trees.masks import additive_mask, mask_of_slots, mask_with_prefix
from medusa_train.trees.tree import Tree

LOOP_TOKENS = 96  # after which the loop starts over, so that its context stays about the same
# how the steps of a backbone run
PASSES, STATIC, GRAPHS = ("passes", "static buffers", "CUDA graphs")


def write_random(backbone: Backbone, cache: TreeCache, length: int) -> None:
    """Write `length` positions of random keys and values to a cache, which takes no prefill."""
    config = backbone.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    states = torch.randn(
        1, config.num_key_value_heads, length, size, device=backbone.device, dtype=backbone.dtype
    )
    for layer in range(backbone.num_layers):
        cache.write(layer, states, states)
    cache.commit(length)


class Context:
    """A cache of `length` positions, and verification passes over it that leave it unchanged.

    A pass is what `Decoder` runs between two proposals: backbone, logits, acceptance with its
    transfer to the host, compaction of the cache. Tensors are created in inference mode, since
    compiled passes specialize on it.
    """

    @torch.inference_mode()
    def __init__(self, backbone: Backbone, length: int, max_nodes: int) -> None:
        self.backbone, self.length = backbone, length
        self.cache = backbone.new_cache(length + max_nodes + 1)
        write_random(backbone, self.cache, length)

    @torch.inference_mode()
    def step(self, tree: Tree) -> Callable[[], None]:
        """Return a pass over the root and the nodes of `tree`."""
        backbone, cache = self.backbone, self.cache
        tree = tree.to(backbone.device)
        tokens = torch.arange(tree.size + 1, device=backbone.device)[None] % backbone.vocab_size
        depths = tree.depths[None]
        block = additive_mask(tree.ancestors, backbone.dtype)
        compiled = backbone.compiled

        @torch.inference_mode()
        def run() -> None:
            positions = depths + cache.length
            if compiled is None:
                mask = mask_with_prefix(cache, block) if tree.size else None
                hidden = backbone.run(tokens, positions=positions, mask=mask, cache=cache).hidden
                logits = backbone.logits(hidden)
            else:
                storage = cache.reserve(tree.size + 1)
                mask = mask_of_slots(cache, block, round_up_to_block(cache.length + tree.size + 1))
                _, logits = compiled(
                    tokens, positions, mask, cache.pending_columns(backbone.device), storage
                )
            (accepted,) = accept(None, tokens, logits, tree)
            cache.keep_rows([accepted.path])
            cache.length = self.length

        return run


class GivenTokens(FixedShapeDraft):
    """Proposes the same guesses in every step and computes nothing."""

    def __init__(self, backbone: Backbone, tree: Tree, cache: StaticCache) -> None:
        super().__init__(None, backbone, tree, cache)
        self._guesses = (
            torch.arange(1, tree.size + 1, device=backbone.device)[None] % backbone.vocab_size
        )

    def propose(self, accepted: AcceptedNodes, roots: torch.Tensor, nodes: SlotPass) -> Proposal:
        """Return the root with the guesses below it."""
        return Proposal(torch.cat([roots[:, None], self._guesses], dim=1), self.tree)


class StaticContext:
    """The same for steps on static buffers: `StaticSteps` without heads, run or replayed by the
    backbone's runner.
    """

    @torch.inference_mode()
    def __init__(self, backbone: Backbone, runner: StepRunner, length: int, max_nodes: int) -> None:
        self.backbone, self.length = backbone, length
        self._runner = runner
        self.cache = StaticCache.for_backbone(backbone, length + max_nodes + 1)
        write_random(backbone, self.cache.prompt_cache(0, 1), length)

    @torch.inference_mode()
    def step(self, tree: Tree) -> StaticStep:
        """Return a step over the root and the nodes of `tree`."""
        tree = tree.to(self.backbone.device)
        draft = GivenTokens(self.backbone, tree, self.cache) if tree.size else None
        return StaticStep(
            StaticSteps(self.backbone, self._runner, draft, tree, self.cache),
            self.backbone,
            self.length,
        )


class StaticStep:
    """A step of `StaticSteps` after `length` positions, and the way back to the state before it."""

    def __init__(self, steps: StaticSteps, backbone: Backbone, length: int) -> None:
        self.steps = steps
        self._prompt = torch.zeros(1, length, dtype=torch.long, device=backbone.device)
        hidden = torch.zeros(
            1, 1, backbone.hidden_size, dtype=backbone.dtype, device=backbone.device
        )
        self._feats, self._lengths = Features(hidden.expand(-1, length, -1)), [length]

    @torch.inference_mode()
    def prepare(self) -> None:
        """Start at the end of the context."""
        self.steps.select_rows([])
        self.steps.append_rows(self._feats, self._prompt, self._lengths)

    @torch.inference_mode()
    def __call__(self) -> None:
        """Run the step, with the transfers of its inputs and of its result."""
        self.steps.step([0], None, None)


def proposal(backbone: Backbone, draft: MedusaDraft, tree: Tree) -> Callable[[], object]:
    """Return `draft.propose` for one state, replayed where steps are."""
    tree = tree.to(backbone.device)
    hidden = torch.randn(1, backbone.hidden_size, device=backbone.device, dtype=backbone.dtype)
    state, roots = (
        MedusaState(hidden, draft.stacked()),
        torch.zeros(1, dtype=torch.long, device=backbone.device),
    )
    runner = backbone.step_runner
    if runner is None:
        return torch.inference_mode()(lambda: draft.propose(state, roots, tree))
    tokens = torch.zeros(1, tree.size + 1, dtype=torch.long, device=backbone.device)
    graphs: dict[Hashable, Replayable] = {}

    def propose() -> None:
        tokens.copy_(draft.propose(state, roots, tree).tokens)

    return torch.inference_mode()(lambda: runner.run(graphs, "heads", propose))


def how_steps_run(backbone: Backbone) -> str:
    """Return `PASSES`, `STATIC` or `GRAPHS`; to be asked after the steps have run, for a capture
    may fail.
    """
    runner = backbone.step_runner
    if runner is None:
        return PASSES
    return GRAPHS if isinstance(runner, GraphRunner) and runner.works else STATIC


class Loop:
    """Steps of `Decoder.stream` for one answer, restarted after `LOOP_TOKENS` tokens."""

    def __init__(self, backbone: Backbone, draft: MedusaDraft, tree: Tree, context: int) -> None:
        self._decoder = Decoder(backbone, draft, tree)
        self._prompt = [(7 * i) % backbone.vocab_size for i in range(context)]
        self._longest_step = tree.max_depth + 1
        self._left = 0
        self._steps: Iterator[Any] = iter(())

    def prepare(self) -> None:
        """Run the prefill where no further step fits."""
        if self._left < self._longest_step:
            self._steps = self._decoder.stream(self._prompt, LOOP_TOKENS, eos_ids=())
            next(self._steps)  # the prefill's token
            self._left = LOOP_TOKENS - 1

    def __call__(self) -> None:
        """Run one step."""
        self._left -= len(next(self._steps).tokens)
