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
_FIRST_BLOCK = "blocks.0.0.linear.weight"
_STATE_NAME = re.compile(
    r"blocks\.(\d+)\.(\d+)\.linear\.(weight|bias)|lm_heads\.(\d+)\.(weight|bias)"
)


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
        first = _FIRST_BLOCK if self.shared else LM_HEAD_0
        return self.state[first].shape[1]

    @property
    def vocab_size(self) -> int | None:
        """Vocabulary size V of the backbone; None if unknown because its lm_head is shared."""
        if self.markov_rank:
            return self.state[_EMBEDDING].shape[0]
        if self.token_map is not None:
            return self.backbone_tokens
        if self.shared:
            return None
        return self.state[LM_HEAD_0].shape[0]

    @property
    def markov_rank(self) -> int:
        """Rank of the Markov bias, 0 without one."""
        if _EMBEDDING not in self.state:
            return 0
        return self.state[_EMBEDDING].shape[-1]


def to_reference(state: Mapping[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    """Rename the tensors of a `MedusaDraft`'s state dict to the public code's names."""
    return {_reference_name(name, num_layers): tensor for name, tensor in state.items()}


def _reference_name(name: str, num_layers: int) -> str:
    match = _STATE_NAME.fullmatch(name)
    if match is None:
        return name  # of the token map or a Markov bias
    head, block, kind, lm_head, lm_head_kind = match.groups()
    if lm_head is None:
        return f"{head}.{block}.linear.{kind}"
    return f"{lm_head}.{num_layers}.{lm_head_kind}"


def from_reference(tensors: Mapping[str, Tensor], source: str = "the heads file") -> HeadTensors:
    """Rename tensors with the public code's names to a `MedusaDraft`'s; heads and blocks are
    counted from the names.

    A prefix `medusa_head.` or `medusa_heads.`, which some writers add, is removed.
    """
    state: dict[str, Tensor] = {}
    lm_head_index: dict[str, int] = {}  # of each head: its number of blocks
    for full_name, tensor in tensors.items():
        name = _PREFIX.sub("", full_name)
        if name == TOKEN_MAP or name in _MARKOV:  # the same in the file and in the state dict
            state[name] = tensor
        elif (match := _BLOCK.fullmatch(name)) is not None:
            head, block, kind = match.groups()
            state[f"blocks.{head}.{block}.linear.{kind}"] = tensor
        elif (match := _HEAD.fullmatch(name)) is not None:
            head, index, kind = match.groups()
            if lm_head_index.setdefault(head, int(index)) != int(index):
                raise CheckpointError(f"{source}: {full_name}: a head has two lm_head matrices")
            state[f"lm_heads.{head}.{kind}"] = tensor
        else:
            raise CheckpointError(
                f"{source}: {full_name} is not a weight of Medusa heads in the public code's layout"
            )
    counts = sorted(set(lm_head_index.values()))
    if len(counts) > 1:
        raise CheckpointError(f"{source}: the heads have different numbers of blocks: {counts}")
    num_layers = None
    if counts:
        num_layers = counts[0]
    return checked_heads(state, source, num_layers)


def checked_heads(
    state: dict[str, Tensor], source: str, num_layers: int | None = None
) -> HeadTensors:
    """Build `HeadTensors` from a state dict, with heads and blocks counted and all weights checked.

    Args:
        num_layers: blocks per head, if the file states it; defaults to the largest number that a
            head has.
    """
    head_numbers = set()
    block_numbers = set()
    for name in state:
        if name.startswith("lm_heads."):
            head_numbers.add(name.split(".")[1])
        match = _STATE_NAME.fullmatch(name)
        if match is not None and match[1] is not None:
            head_numbers.add(match[1])
            block_numbers.add(match[2])
    if not head_numbers:
        raise CheckpointError(f"{source}: holds no heads")
    if num_layers is None:
        num_layers = len(block_numbers)
    if TOKEN_MAP in state:
        state[TOKEN_MAP] = checked_token_map(state, source)
    heads = HeadTensors(len(head_numbers), num_layers, state)
    _check_tensors(heads, source)
    return heads


def shared_block_warning(heads: HeadTensors) -> str | None:
    """Warn that the public Medusa loader computes something else with these heads; None if it
    doesn't.

    It builds one block per head and repeats it, so of several distinct blocks only the last one is
    used.
    """
    if not _has_distinct_blocks(heads):
        return None
    return (
        f"these heads have {heads.num_layers} distinct blocks each; the public Medusa loader shares"
        " one block among all layers of a head, so it does not compute what was trained (TGI does)"
    )


def _has_distinct_blocks(heads: HeadTensors) -> bool:
    for i in range(heads.num_heads):
        for j in range(1, heads.num_layers):
            for kind in ("weight", "bias"):
                first = heads.state[f"blocks.{i}.0.linear.{kind}"]
                if not torch.equal(first, heads.state[f"blocks.{i}.{j}.linear.{kind}"]):
                    return True
    return False


def _expected_names(heads: HeadTensors) -> set[str]:
    """Return the names of all tensors of heads with these numbers, but for the token map."""
    names = heads.state.keys()
    lm_head_kinds = {name.rpartition(".")[2] for name in names if name.startswith("lm_heads.")}
    if lm_head_kinds:
        lm_head_kinds.add("weight")
    expected = set()
    for i in range(heads.num_heads):
        for j in range(heads.num_layers):
            expected.add(f"blocks.{i}.{j}.linear.weight")
            expected.add(f"blocks.{i}.{j}.linear.bias")
        expected |= {f"lm_heads.{i}.{kind}" for kind in lm_head_kinds}
    if _MARKOV & names:
        expected |= _MARKOV
    return expected


def _check_tensors(heads: HeadTensors, source: str) -> None:
    """Check that the heads have all their tensors and no others, and that shapes agree."""

    def listed(names: set[str]) -> str:
        return ", ".join(_reference_name(name, heads.num_layers) for name in sorted(names))

    # 1. The names.
    state = heads.state
    expected = _expected_names(heads)
    missing = expected - state.keys()
    if missing:
        raise CheckpointError(f"{source}: incomplete, {listed(missing)} missing")
    extra = state.keys() - expected - {TOKEN_MAP}
    if extra:
        raise CheckpointError(f"{source}: weights that belong to no head: {listed(extra)}")
    # 2. The sizes, of which the first matrix says two.
    first = _FIRST_BLOCK if heads.shared else LM_HEAD_0
    if state[first].dim() != 2:
        raise CheckpointError(
            f"{source}: {listed({first})} is not a matrix: shape {list(state[first].shape)}"
        )
    lm_head_rows, width = state[first].shape
    tokens = heads.vocab_size
    if heads.token_map is None and not heads.shared:
        tokens = lm_head_rows
    predicted = tokens
    if heads.token_map is not None:
        predicted = len(heads.token_map)
    # 3. The shapes.
    for name in sorted(expected):
        size = lm_head_rows if name.startswith("lm_heads.") else width
        shape: tuple[int | None, ...] = (size, width)
        if name.endswith(".bias"):
            shape = (size,)
        elif name == _EMBEDDING:
            shape = (tokens, heads.markov_rank)
        elif name == _OUTPUT:
            shape = (predicted, heads.markov_rank)
        if tuple(state[name].shape) != shape:
            found = list(state[name].shape)
            raise CheckpointError(f"{source}: {listed({name})} is {found}, expected {list(shape)}")


def checked_token_map(state: Mapping[str, Tensor], source: str) -> Tensor:
    """Return the token map in `state` as int64 [N]: unique token ids, as many as the matrices have
    rows.
    """
    tokens = state[TOKEN_MAP]
    are_integers = not tokens.is_floating_point() and tokens.dtype != torch.bool
    if tokens.dim() != 1 or not are_integers or not len(tokens):
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
