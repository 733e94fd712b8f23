"""The steps that decode.py times: a target model's steps in its runner, heads, and the decoding
loop.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

from medusa_train.inference.cuda_graphs import GraphRunner, Replayable
from medusa_train.inference.fixed_steps import new_steps
from medusa_train.inference.generate import Decoder
from medusa_train.inference.step import Steps
from medusa_train.models.drafts.base import AcceptedPath, DraftStep, Proposal, Proposer
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.models.target_model import TargetModel
from medusa_train.models.target_states import HiddenStates
from medusa_train.trees.kv_cache import KVCache
from medusa_train.trees.transformers_adapters import PromptCache
from medusa_train.trees.tree import Tree

LOOP_TOKENS = 96  # the loop restarts after this many tokens, so that its context hardly grows
# how the steps of a target model run
PASSES, STATIC, GRAPHS = "passes", "static buffers", "CUDA graphs"


class GivenTokens(Proposer):
    """Proposes the same draft tokens in every step without computing anything."""

    def __init__(self, target_model: TargetModel, max_depth: int) -> None:
        self.max_depth = max_depth
        self._vocab_size = target_model.vocab_size

    def propose(self, step: DraftStep, states: Any) -> Proposal:
        """Return the last token of each row, followed by the same draft tokens."""
        guesses = (
            torch.arange(1, step.tree.size + 1, device=step.last_tokens.device) % self._vocab_size
        )
        tokens = [step.last_tokens[:, None], guesses.expand(len(step.last_tokens), -1)]
        return Proposal(torch.cat(tokens, dim=1), step.tree)


class Context:
    """A KV cache with `length` positions of random keys and values, and steps that run repeatedly
    after them.

    A step is everything that `Decoder` runs per step except the heads: compaction, target model,
    logits, acceptance and its transfer to the host. Tensors are created in inference mode, because
    compiled passes specialize on it.
    """

    @torch.inference_mode()
    def __init__(
        self, target_model: TargetModel, length: int, max_nodes: int, rows: int = 1
    ) -> None:
        self.target_model = target_model
        self.length = length
        self._kv_cache = target_model.new_kv_cache(length + max_nodes + 1)
        if target_model.step_runner is None or rows > 1:
            self._kv_cache.make_room(rows, length + max_nodes + 33)
        write_random(target_model, self._kv_cache, length, rows)

    @torch.inference_mode()
    def step(self, tree: Tree) -> TargetModelStep:
        """Return a step over the root and the nodes of `tree`."""
        tree = tree.to(self.target_model.device)
        draft = GivenTokens(self.target_model, tree.max_depth) if tree.size else None
        steps = new_steps(self.target_model, draft, tree, self._kv_cache)
        return TargetModelStep(steps, self.target_model, self.length)


class TargetModelStep:
    """A step of all rows after `length` positions. `prepare` restores the state before it."""

    def __init__(self, steps: Steps, target_model: TargetModel, length: int) -> None:
        self.steps = steps
        device = target_model.device
        rows = steps.kv_cache.rows
        hidden = torch.zeros(
            rows, 1, target_model.hidden_size, dtype=target_model.dtype, device=device
        )
        self._feats = HiddenStates(hidden.expand(-1, length, -1))  # [B, length, d]
        self._tokens = torch.zeros(rows, length, dtype=torch.long, device=device)
        self._prompts = [[0] * length] * rows

    @torch.inference_mode()
    def prepare(self) -> None:
        """Start at the end of the context."""
        self.steps.select_rows([])
        self.steps.add_rows(self._feats, self._tokens, self._prompts)

    @torch.inference_mode()
    def __call__(self) -> None:
        """Run the step, with the transfers of its inputs and of its result."""
        self.steps.step([0] * len(self._prompts))


def write_random(target_model: TargetModel, kv_cache: KVCache, length: int, rows: int) -> None:
    """Fill `length` positions of a KV cache with random keys and values, in place of a prefill."""
    config = target_model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    states = torch.randn(
        1,
        config.num_key_value_heads,
        length,
        size,
        device=target_model.device,
        dtype=target_model.dtype,
    )
    states = states.expand(rows, -1, -1, -1)  # [B, kv_heads, length, head_dim]
    cache = PromptCache(kv_cache, 0, rows)
    for layer in range(target_model.num_layers):
        cache.update(states, states, layer)


def proposal(target_model: TargetModel, draft: MedusaDraft, tree: Tree) -> Callable[[], object]:
    """Return a call of `draft.propose` for one state. It is replayed as a graph if the target
    model's steps are.
    """
    device = target_model.device
    tree = tree.to(device)
    hidden = torch.randn(1, target_model.hidden_size, device=device, dtype=target_model.dtype)
    zero = torch.zeros(1, dtype=torch.long, device=device)
    accepted = AcceptedPath(HiddenStates(hidden[None]), zero[None], zero[None], zero + 1, zero)
    step = DraftStep(accepted, zero, [0], [], [], tree, None, may_stop=False)
    runner = target_model.step_runner
    if runner is None:
        return torch.inference_mode()(lambda: draft.propose(step, hidden))
    tokens = torch.zeros(1, tree.size + 1, dtype=torch.long, device=device)
    graphs: dict[Hashable, Replayable] = {}

    def guess() -> None:
        tokens.copy_(draft.propose(step, hidden).tokens)

    return torch.inference_mode()(lambda: runner.run(graphs, "heads", guess))


def how_steps_run(target_model: TargetModel) -> str:
    """Return `PASSES`, `STATIC` or `GRAPHS`. Call it after the steps have run, because a capture
    may fail.
    """
    runner = target_model.step_runner
    if runner is None:
        return PASSES
    return GRAPHS if isinstance(runner, GraphRunner) and runner.works else STATIC


class Loop:
    """Steps of `Decoder.stream` for one answer, restarted after `LOOP_TOKENS` tokens."""

    def __init__(
        self, target_model: TargetModel, draft: MedusaDraft, tree: Tree, context: int
    ) -> None:
        self._decoder = Decoder(target_model, draft, tree)
        self._prompt = [(7 * i) % target_model.vocab_size for i in range(context)]
        self._longest_step = tree.max_depth + 1
        self._left = 0
        self._steps: Iterator[Any] = iter(())

    def prepare(self) -> None:
        """Restart with a prefill if no further step fits."""
        if self._left < self._longest_step:
            self._steps = self._decoder.stream(self._prompt, LOOP_TOKENS, eos_ids=())
            next(self._steps)  # the prefill's token
            self._left = LOOP_TOKENS - 1

    def __call__(self) -> None:
        """Run one step."""
        self._left -= len(next(self._steps).tokens)
