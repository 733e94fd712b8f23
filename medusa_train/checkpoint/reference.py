"""The layout of Medusa heads that the public code and TGI read, as a pure map of names. Knows no files and no model.

{i}.{j}.linear.weight|bias   residual block j of head i (0-based), d x d
{i}.{n}.weight               the head's own unembedding, V x d; n = number of blocks
{i}.{n}.bias                 only where the backbone's lm_head has one; our extension, others skip it

"Version 2" has no {i}.{n}.weight: its heads share the backbone's lm_head.
token_map, [N], stands in our own files alone: of heads over a reduced vocabulary, whose matrices are N x d.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from medusa_train.errors import CheckpointError

TOKEN_MAP = "token_map"
"""Which token each of the N rows of a reduced vocabulary stands for: the name in our files and in vLLM's."""

_PREFIX = re.compile(r"^medusa_heads?\.")
_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
_HEAD = re.compile(r"(\d+)\.(\d+)\.(weight|bias)")
_OURS = re.compile(r"blocks\.(\d+)\.(\d+)\.linear\.(weight|bias)|lm_heads\.(\d+)\.(weight|bias)")


@dataclass(frozen=True)
class HeadTensors:
    """The weights of a Medusa draft without a model.

    Attributes:
        num_heads: K. num_layers: residual blocks per head.
        state: `MedusaDraft`'s own state dict: `blocks.{i}.{j}.linear.weight|bias`, `lm_heads.{i}.weight[|bias]`, and
            `token_map` where the vocabulary is reduced.
        base_model: the backbone that they were trained on, as config.json names it.
        backbone_tokens: V as config.json says, for a reduced vocabulary, of which the tensors know only N.
    """

    num_heads: int
    num_layers: int
    state: dict[str, Tensor]
    base_model: str | None = None
    backbone_tokens: int | None = None

    @property
    def token_map(self) -> Tensor | None:
        """Long [N], the tokens that the heads know; None: all."""
        return self.state.get(TOKEN_MAP)

    @property
    def shared(self) -> bool:
        """Whether the heads use the backbone's lm_head ("version 2")."""
        return "lm_heads.0.weight" not in self.state

    @property
    def hidden_size(self) -> int:
        """d."""
        return self.state["blocks.0.0.linear.weight" if self.shared else "lm_heads.0.weight"].shape[1]

    @property
    def vocab_size(self) -> int | None:
        """V of the backbone; None where nothing says it, since its lm_head is shared."""
        if self.token_map is not None:
            return self.backbone_tokens
        return None if self.shared else self.state["lm_heads.0.weight"].shape[0]

    def with_base_model(self, name: str | None) -> HeadTensors:
        """The same heads for the backbone `name`."""
        return replace(self, base_model=name)


def to_reference(state: Mapping[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    """A `MedusaDraft`'s state dict under the reference's names, the very same tensors.

    Raises:
        CheckpointError: a name that is none of a Medusa draft's.
    """
    renamed = {}
    for name, tensor in state.items():
        if name == TOKEN_MAP:
            renamed[name] = tensor
            continue
        match = _OURS.fullmatch(name)
        if match is None:
            raise CheckpointError(f"{name}: no such weight in Medusa heads")
        head, block, block_kind, own, own_kind = match.groups()
        key = f"{own}.{num_layers}.{own_kind}" if own is not None else f"{head}.{block}.linear.{block_kind}"
        renamed[key] = tensor
    return renamed


def from_reference(tensors: Mapping[str, Tensor], source: str = "the heads file") -> HeadTensors:
    """Read the reference's names; the numbers of heads and blocks are those of the tensors.

    A prefix `medusa_head.` or `medusa_heads.`, which some writers leave before them, is taken off.

    Raises:
        CheckpointError: unknown, missing or misshapen tensors; `source` is named in the message.
    """
    state: dict[str, Tensor] = {}
    tops: dict[str, int] = {}
    for full_name, tensor in tensors.items():
        name = _PREFIX.sub("", full_name)
        if match := _BLOCK.fullmatch(name):
            state[f"blocks.{match[1]}.{match[2]}.linear.{match[3]}"] = tensor
        elif name == TOKEN_MAP:
            state[name] = tensor
        elif match := _HEAD.fullmatch(name):
            if tops.setdefault(match[1], int(match[2])) != int(match[2]):
                raise CheckpointError(f"{source}: {full_name}: a head has its unembedding in two places")
            state[f"lm_heads.{match[1]}.{match[3]}"] = tensor
        else:
            raise CheckpointError(f"{source}: {full_name} is no weight of Medusa heads in the reference's layout")
    if len(set(tops.values())) > 1:
        raise CheckpointError(f"{source}: the heads have different numbers of blocks: {sorted(set(tops.values()))}")
    return complete_heads(state, source, next(iter(tops.values()), None))


def complete_heads(state: dict[str, Tensor], source: str, num_layers: int | None = None) -> HeadTensors:
    """Heads from a state dict of ours, whose numbers of heads and blocks are counted.

    Args:
        state: see `HeadTensors`. source: where it is from, for messages.
        num_layers: blocks per head where the file says so itself; by default as many as some head has.

    Raises:
        CheckpointError: a weight is missing, belongs to no head, or has another shape than its like.
    """
    blocks = [match for name in state if (match := _OURS.fullmatch(name)) and match[1] is not None]
    numbers = {match[1] for match in blocks} | {name.split(".")[1] for name in state if name.startswith("lm_heads.")}
    if not numbers:
        raise CheckpointError(f"{source}: holds no heads")
    if num_layers is None:
        num_layers = len({match[2] for match in blocks})
    if TOKEN_MAP in state:
        state[TOKEN_MAP] = _checked_tokens(state, source)
    heads = HeadTensors(len(numbers), num_layers, state)
    _check_complete(heads, source)
    _check_shapes(heads, source)
    return heads


def shared_block_warning(heads: HeadTensors) -> str | None:
    """What is lost when the public Medusa loader reads these heads; None when nothing is.

    It builds one block object per head and repeats it, so of several distinct blocks only the last one counts.
    """
    distinct = any(
        not torch.equal(heads.state[f"blocks.{i}.0.linear.{kind}"], heads.state[f"blocks.{i}.{j}.linear.{kind}"])
        for i in range(heads.num_heads)
        for j in range(1, heads.num_layers)
        for kind in ("weight", "bias")
    )
    if not distinct:
        return None
    return (
        f"these heads have {heads.num_layers} distinct blocks each; the public Medusa loader shares one block among "
        "all layers of a head and will not compute what was trained (TGI does)"
    )


def _check_complete(heads: HeadTensors, source: str) -> None:
    with_bias = any(name.startswith("lm_heads.") and name.endswith(".bias") for name in heads.state)
    own = any(name.startswith("lm_heads.") for name in heads.state)
    wanted = {f"lm_heads.{i}.weight" for i in range(heads.num_heads) if own}
    wanted |= {f"lm_heads.{i}.bias" for i in range(heads.num_heads) if with_bias}
    for i in range(heads.num_heads):
        for j in range(heads.num_layers):
            wanted |= {f"blocks.{i}.{j}.linear.weight", f"blocks.{i}.{j}.linear.bias"}
    missing = list(to_reference(dict.fromkeys(sorted(wanted - set(heads.state)), torch.empty(0)), heads.num_layers))
    if missing:
        raise CheckpointError(f"{source}: incomplete, {', '.join(missing)} missing")
    if extra := set(heads.state) - wanted - {TOKEN_MAP}:
        names = to_reference({name: heads.state[name] for name in sorted(extra)}, heads.num_layers)
        raise CheckpointError(f"{source}: weights that belong to no head: {', '.join(names)}")


def _check_shapes(heads: HeadTensors, source: str) -> None:
    name = "blocks.0.0.linear.weight" if heads.shared else "lm_heads.0.weight"
    first = heads.state[name]
    if first.dim() != 2:
        (key,) = to_reference({name: first}, heads.num_layers)
        raise CheckpointError(f"{source}: {key} is no matrix: {list(first.shape)}")
    vocab, width = first.shape
    for name, tensor in heads.state.items():
        if name == TOKEN_MAP:
            continue
        rows = vocab if name.startswith("lm_heads.") else width
        shape = (rows,) if name.endswith(".bias") else (rows, width)
        if tuple(tensor.shape) != shape:
            (key,) = to_reference({name: tensor}, heads.num_layers)
            raise CheckpointError(f"{source}: {key} is {list(tensor.shape)}, expected {list(shape)}")


def _checked_tokens(state: Mapping[str, Tensor], source: str) -> Tensor:
    """The token map as long [N], each token once, beside matrices of N rows."""
    tokens = state[TOKEN_MAP]
    if tokens.dim() != 1 or tokens.is_floating_point() or tokens.dtype == torch.bool or not len(tokens):
        raise CheckpointError(f"{source}: {TOKEN_MAP} is no list of tokens: {list(tokens.shape)} of {tokens.dtype}")
    tokens = tokens.long()
    if int(tokens.min()) < 0 or len(tokens.unique()) < len(tokens):
        raise CheckpointError(f"{source}: {TOKEN_MAP} names a token twice, or one below 0")
    own = state.get("lm_heads.0.weight")
    if own is not None and len(own) != len(tokens):
        raise CheckpointError(f"{source}: {TOKEN_MAP} has {len(tokens)} tokens for matrices of {len(own)} rows")
    return tokens
