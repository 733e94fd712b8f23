"""Map the weights of Medusa heads to and from the names that the public code and TGI use.

{i}.{j}.linear.weight|bias   residual block j of head i (0-based), [d, d] and [d]
{i}.{n}.weight               lm_head of head i, [V, d]; n = number of blocks
{i}.{n}.bias                 [V], only if the backbone's lm_head has a bias; other readers ignore it

Heads that share the backbone's lm_head ("version 2") have no {i}.{n}.weight. Heads with a reduced
vocabulary have matrices [N, d] and `token_map` [N], which only this program reads. So it is with a
Markov bias: `markov.embedding.weight` [V, r] and `markov.output.weight` [V, r] or [N, r].
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_train.errors import CheckpointError

TOKEN_MAP = "token_map"
"""Name of the tensor [N] with the token id of each row of a reduced vocabulary, in our files and in vLLM's."""

_EMBEDDING, _OUTPUT = "markov.embedding.weight", "markov.output.weight"
_MARKOV = {_EMBEDDING, _OUTPUT}

_PREFIX = re.compile(r"^medusa_heads?\.")
_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
_HEAD = re.compile(r"(\d+)\.(\d+)\.(weight|bias)")
#: The first head's own lm_head; absent where all share the backbone's.
LM_HEAD_0 = "lm_heads.0.weight"
_OURS = re.compile(r"blocks\.(\d+)\.(\d+)\.linear\.(weight|bias)|lm_heads\.(\d+)\.(weight|bias)")


@dataclass(frozen=True)
class HeadTensors:
    """The weights of Medusa heads, without a backbone.

    Attributes:
        num_heads, num_layers: number of heads, K, and of residual blocks per head.
        state: `MedusaDraft`'s state dict: `blocks.{i}.{j}.linear.weight|bias`,
            `lm_heads.{i}.weight[|bias]`, `token_map` if the vocabulary is reduced, and `markov.*`
            if there is a Markov bias.
        base_model: the backbone that they were trained on, as named in config.json.
        backbone_tokens: V from config.json; for a reduced vocabulary, whose tensors have N rows
            only.
    """

    num_heads: int
    num_layers: int
    state: dict[str, Tensor]
    base_model: str | None = None
    backbone_tokens: int | None = None

    @property
    def token_map(self) -> Tensor | None:
        """Token ids [N] of the reduced vocabulary, int64; None for the full vocabulary."""
        return self.state.get(TOKEN_MAP)

    @property
    def shared(self) -> bool:
        """Whether the heads share the backbone's lm_head ("version 2")."""
        return LM_HEAD_0 not in self.state

    @property
    def hidden_size(self) -> int:
        """Hidden size, d."""
        return self.state["blocks.0.0.linear.weight" if self.shared else LM_HEAD_0].shape[1]

    @property
    def vocab_size(self) -> int | None:
        """Vocabulary size V of the backbone; None if unknown because its lm_head is shared."""
        if self.markov_rank:
            return self.state[_EMBEDDING].shape[0]
        if self.token_map is not None:
            return self.backbone_tokens
        return None if self.shared else self.state[LM_HEAD_0].shape[0]

    @property
    def markov_rank(self) -> int:
        """Rank of the Markov bias, 0 without one."""
        return self.state[_EMBEDDING].shape[-1] if _EMBEDDING in self.state else 0


def to_reference(state: Mapping[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    """Rename the tensors of a `MedusaDraft`'s state dict to the public code's names."""
    return {_reference_name(name, num_layers): tensor for name, tensor in state.items()}


def _reference_name(name: str, num_layers: int) -> str:
    match = _OURS.fullmatch(name)
    if match is None:
        return name  # of the token map or a Markov bias
    head, block, kind, lm_head, lm_head_kind = match.groups()
    return (
        f"{head}.{block}.linear.{kind}"
        if lm_head is None
        else f"{lm_head}.{num_layers}.{lm_head_kind}"
    )


def from_reference(tensors: Mapping[str, Tensor], source: str = "the heads file") -> HeadTensors:
    """Rename tensors with the public code's names to a `MedusaDraft`'s; heads and blocks are
    counted from the names.

    A prefix `medusa_head.` or `medusa_heads.`, which some writers add, is removed.
    """
    state: dict[str, Tensor] = {}
    lm_head_index: dict[str, int] = {}  # of each head: its number of blocks
    for full_name, tensor in tensors.items():
        name = _PREFIX.sub("", full_name)
        if match := _BLOCK.fullmatch(name):
            state[f"blocks.{match[1]}.{match[2]}.linear.{match[3]}"] = tensor
        elif name == TOKEN_MAP or name in _MARKOV:  # the same in the file and in the state dict
            state[name] = tensor
        elif match := _HEAD.fullmatch(name):
            if lm_head_index.setdefault(match[1], int(match[2])) != int(match[2]):
                raise CheckpointError(f"{source}: {full_name}: a head has two lm_head matrices")
            state[f"lm_heads.{match[1]}.{match[3]}"] = tensor
        else:
            raise CheckpointError(
                f"{source}: {full_name} is not a weight of Medusa heads in the public code's layout"
            )
    if len(counts := sorted(set(lm_head_index.values()))) > 1:
        raise CheckpointError(f"{source}: the heads have different numbers of blocks: {counts}")
    return checked_heads(state, source, counts[0] if counts else None)


def checked_heads(
    state: dict[str, Tensor], source: str, num_layers: int | None = None
) -> HeadTensors:
    """Build `HeadTensors` from a state dict, with heads and blocks counted and all weights checked.

    Args:
        num_layers: blocks per head, if the file states it; defaults to the largest number that a
            head has.
    """
    blocks = [match for name in state if (match := _OURS.fullmatch(name)) and match[1] is not None]
    numbers = {match[1] for match in blocks} | {
        name.split(".")[1] for name in state if name.startswith("lm_heads.")
    }
    if not numbers:
        raise CheckpointError(f"{source}: holds no heads")
    if num_layers is None:
        num_layers = len({match[2] for match in blocks})
    if TOKEN_MAP in state:
        state[TOKEN_MAP] = checked_token_map(state, source)
    heads = HeadTensors(len(numbers), num_layers, state)
    _check_tensors(heads, source)
    return heads


def shared_block_warning(heads: HeadTensors) -> str | None:
    """Warn that the public Medusa loader computes something else with these heads; None if it
    doesn't.

    It builds one block per head and repeats it, so of several distinct blocks only the last one is
    used.
    """
    distinct = any(
        not torch.equal(
            heads.state[f"blocks.{i}.0.linear.{kind}"], heads.state[f"blocks.{i}.{j}.linear.{kind}"]
        )
        for i in range(heads.num_heads)
        for j in range(1, heads.num_layers)
        for kind in ("weight", "bias")
    )
    if not distinct:
        return None
    return (
        f"these heads have {heads.num_layers} distinct blocks each; the public Medusa loader shares"
        " one block among all layers of a head, so it does not compute what was trained (TGI does)"
    )


def _check_tensors(heads: HeadTensors, source: str) -> None:
    """Check that the heads have all their tensors and no others, and that shapes agree."""

    def listed(names: set[str]) -> str:
        return ", ".join(_reference_name(name, heads.num_layers) for name in sorted(names))

    state = heads.state
    lm_head_kinds = {name.rpartition(".")[2] for name in state if name.startswith("lm_heads.")}
    lm_head_kinds |= {"weight"} if lm_head_kinds else set()
    blocks = [
        f"blocks.{i}.{j}.linear" for i in range(heads.num_heads) for j in range(heads.num_layers)
    ]
    expected = {f"{block}.{kind}" for block in blocks for kind in ("weight", "bias")}
    expected |= {f"lm_heads.{i}.{kind}" for i in range(heads.num_heads) for kind in lm_head_kinds}
    expected |= _MARKOV if _MARKOV & state.keys() else set()
    if missing := expected - state.keys():
        raise CheckpointError(f"{source}: incomplete, {listed(missing)} missing")
    if extra := state.keys() - expected - {TOKEN_MAP}:
        raise CheckpointError(f"{source}: weights that belong to no head: {listed(extra)}")
    first = "blocks.0.0.linear.weight" if heads.shared else LM_HEAD_0
    if state[first].dim() != 2:
        raise CheckpointError(
            f"{source}: {listed({first})} is not a matrix: shape {list(state[first].shape)}"
        )
    rows, width = state[first].shape
    tokens = rows if heads.token_map is None and not heads.shared else heads.vocab_size
    predicted = tokens if heads.token_map is None else len(heads.token_map)
    shapes = {_EMBEDDING: (tokens, heads.markov_rank), _OUTPUT: (predicted, heads.markov_rank)}
    for name in sorted(expected):
        size = rows if name.startswith("lm_heads.") else width
        shape = shapes.get(name, (size,) if name.endswith(".bias") else (size, width))
        if tuple(state[name].shape) != shape:
            found = list(state[name].shape)
            raise CheckpointError(f"{source}: {listed({name})} is {found}, expected {list(shape)}")


def checked_token_map(state: Mapping[str, Tensor], source: str) -> Tensor:
    """Return the token map in `state` as int64 [N]: unique token ids, as many as the matrices have
    rows.
    """
    tokens = state[TOKEN_MAP]
    if (
        tokens.dim() != 1
        or tokens.is_floating_point()
        or tokens.dtype == torch.bool
        or not len(tokens)
    ):
        raise CheckpointError(
            f"{source}: {TOKEN_MAP} is not a list of token ids ({list(tokens.shape)}"
            f" {tokens.dtype})"
        )
    tokens = tokens.long()
    if int(tokens.min()) < 0 or len(tokens.unique()) < len(tokens):
        raise CheckpointError(f"{source}: {TOKEN_MAP} has duplicate or negative token ids")
    lm_head = state.get(LM_HEAD_0)
    if lm_head is not None and len(lm_head) != len(tokens):
        raise CheckpointError(
            f"{source}: {TOKEN_MAP} has {len(tokens)} tokens for matrices of {len(lm_head)} rows"
        )
    return tokens
