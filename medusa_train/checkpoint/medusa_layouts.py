"""Tensor names and config.json of Medusa heads in two file layouts: the public code's, which TGI
and TensorRT-LLM also read, and vLLM's.

                    public code           vLLM
    residual block  {i}.{j}.linear.*      blocks.{i}.layers.{j}.*     [d, d] and [d]
    lm_head         {i}.{n}.*             lm_heads.{i}.*              [V, d]

    i: head, j: block, n: number of blocks

Heads that share the target model's lm_head ("version 2") have no lm_head in the public code's
layout. vLLM's layout stores that matrix once, as lm_heads.0.weight, and sets `original_lm_head:
true`.

Only this program reads these tensors:
- the bias [V] of an lm_head
- a Markov bias: `markov.embedding.weight` [V, r] and `markov.output.weight` [V, r]
- heads over a reduced vocabulary: `token_map` [N] is the token id of each of the matrices' N rows

vLLM 0.32 has code for a reduced vocabulary (`truncated_vocab_size: N`), but its loader asserts V
rows and its check after loading reports token_map as uninitialized. So these heads are written for
vLLM with V rows, see `expand_rows`. vLLM ignores `medusa_vocab_size: N` and `token_map`; this
program uses them to restore the N rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from medusa_train.errors import CheckpointError
from medusa_train.models.drafts.medusa import MedusaDraft

TOKEN_MAP = "token_map"
#: The first head's own lm_head in a state dict; absent if all heads share the target model's.
LM_HEAD_0 = "lm_heads.0.weight"
_MARKOV = ("markov.embedding.weight", "markov.output.weight")
_FIRST_BLOCK = "blocks.0.0.linear.weight"
_REDUCED = "medusa_vocab_size"

FileLayout = Literal["reference", "vllm"]
#: Layout -> name in a `MedusaDraft`'s state dict -> name in files.
_RENAMES: dict[FileLayout, dict[str, str]] = {
    "reference": {
        "blocks.{i}.{j}.linear.{kind}": "{i}.{j}.linear.{kind}",
        "lm_heads.{i}.{kind}": "{i}.{n}.{kind}",
        TOKEN_MAP: TOKEN_MAP,
        "markov.{part}.weight": "markov.{part}.weight",
    },
    "vllm": {
        "blocks.{i}.{j}.linear.{kind}": "blocks.{i}.layers.{j}.{kind}",
        "lm_heads.{i}.{kind}": "lm_heads.{i}.{kind}",
        TOKEN_MAP: TOKEN_MAP,
    },
}
_OWNERS = {"reference": "the public code's", "vllm": "vLLM's"}
#: Field in braces -> pattern that it matches; other fields are numbers.
_FIELDS = {"kind": "weight|bias", "part": "embedding|output"}
#: A prefix that some writers add to names.
_PREFIX = re.compile(r"^medusa_heads?\.")
#: Word in the draft's path -> the method that vLLM then chooses in place of medusa.
_OTHER_METHODS = {"eagle-": "eagle", "eagle3": "eagle3", "dflash": "dflash", "dspark": "dspark"}


@dataclass(frozen=True)
class HeadTensors:
    """The weights of Medusa heads, without a target model.

    Attributes:
        num_heads, num_layers: K, the number of heads; number of residual blocks per head.
        state: `MedusaDraft`'s state dict.
        target_model_name: the target model on which the heads were trained, as named in
            config.json.
        target_model_tokens: V from config.json. Needed for a reduced vocabulary, because its
            tensors have only N rows.
    """

    num_heads: int
    num_layers: int
    state: dict[str, Tensor]
    target_model_name: str | None = None
    target_model_tokens: int | None = None

    @property
    def token_map(self) -> Tensor | None:
        """Token ids [N] of the reduced vocabulary, int64; None for the full vocabulary."""
        return self.state.get(TOKEN_MAP)

    @property
    def shared(self) -> bool:
        """Whether the heads share the target model's lm_head ("version 2")."""
        return LM_HEAD_0 not in self.state

    @property
    def hidden_size(self) -> int:
        """Hidden size, d."""
        first_name = _FIRST_BLOCK if self.shared else LM_HEAD_0
        return self.state[first_name].shape[-1]

    @property
    def vocab_size(self) -> int | None:
        """Vocabulary size V of the target model; None if unknown because its lm_head is shared."""
        if _MARKOV[0] in self.state:
            return self.state[_MARKOV[0]].shape[0]
        if self.token_map is not None:
            return self.target_model_tokens
        if self.shared:
            return None
        return self.state[LM_HEAD_0].shape[0]

    @property
    def markov_rank(self) -> int:
        """Rank of the Markov bias; 0 if there is none."""
        for name in _MARKOV:
            if name in self.state:
                return self.state[name].shape[-1]
        return 0


# Names


@cache
def _pattern(template: str) -> re.Pattern[str]:
    """Return the pattern for a name in `_RENAMES`, with a group for each field in braces."""
    parts = re.split(r"\{(\w+)\}", template)
    for position in range(1, len(parts), 2):
        field = parts[position]
        parts[position] = f"(?P<{field}>{_FIELDS.get(field, '[0-9]+')})"
    return re.compile("".join(parts))


def _rename(name: str, renames: Mapping[str, str], **fields: Any) -> tuple[str | None, str | None]:
    """Return the new name, and n if the old name contains it; (None, None) for an unknown name."""
    for old, new in renames.items():
        match = _pattern(old).fullmatch(name)
        if match is not None:
            groups = match.groupdict()
            return new.format(**fields, **groups), groups.get("n")
    return None, None


def names_in_files(
    state: Mapping[str, Tensor], num_layers: int, layout: FileLayout = "reference"
) -> dict[str, Tensor]:
    """Rename the tensors of a `MedusaDraft`'s state dict for files of `layout`."""
    renamed = {}
    for name, tensor in state.items():
        new, _ = _rename(name, _RENAMES[layout], n=num_layers)
        assert new is not None, name
        renamed[new] = tensor
    return renamed


def from_files(
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any] | None = None,
    layout: FileLayout = "reference",
) -> HeadTensors:
    """Return the heads whose tensors have the names of `layout`. Heads and blocks are counted from
    the names, because published configs state too few.

    vLLM's files are read as vLLM reads them. Blocks without a bias (`medusa_fc_bias: false`) get a
    zero bias. A token_map is used only if `medusa_vocab_size` or `truncated_vocab_size` is less
    than `vocab_size`; its rows are then selected from full matrices.

    Raises:
        CheckpointError: tensors are missing, have another shape, or belong to no head.
    """
    # 1. Rename the tensors.
    renames = {new: old for old, new in _RENAMES[layout].items()}
    state: dict[str, Tensor] = {}
    depths = set()
    for full_name, tensor in tensors.items():
        name, depth = _rename(_PREFIX.sub("", full_name), renames)
        if name is None:
            raise CheckpointError(
                f"{full_name} is not a weight of Medusa heads in {_OWNERS[layout]} layout"
            )
        state[name] = tensor
        if depth is not None:
            depths.add(int(depth))
    # 2. Apply vLLM's config.json.
    if layout == "vllm":
        _apply_vllm_config(state, config or {})
    # 3. Count the heads and the blocks.
    blocks = [name.split(".") for name in state if name.startswith("blocks.")]
    heads = {name[1] for name in blocks}
    heads |= {name.split(".")[1] for name in state if name.startswith("lm_heads.")}
    if not heads:
        raise CheckpointError("holds no heads")
    depths = depths or {len({name[2] for name in blocks})}
    if len(depths) > 1:
        raise CheckpointError(f"the heads have different numbers of blocks: {sorted(depths)}")
    if TOKEN_MAP in state:
        state[TOKEN_MAP] = checked_token_map(state)
    head_tensors = HeadTensors(len(heads), depths.pop(), state)
    _check_state(head_tensors, layout)
    return head_tensors


def _check_state(heads: HeadTensors, layout: FileLayout) -> None:
    """Check that heads have exactly the tensors of a `MedusaDraft` of their size."""

    def listed(names: Mapping[str, Tensor]) -> str:
        return ", ".join(names_in_files(dict(sorted(names.items())), heads.num_layers, layout))

    # 1. Build a draft of this size, without memory for its weights.
    state = heads.state
    first_name = _FIRST_BLOCK if heads.shared else LM_HEAD_0
    if first_name not in state or heads.num_layers > len(state):
        raise CheckpointError(f"incomplete, {first_name} missing")
    if state[first_name].dim() != 2:
        raise CheckpointError(
            f"{listed({first_name: state[first_name]})} is not a matrix: shape"
            f" {list(state[first_name].shape)}"
        )
    vocab_size = heads.vocab_size
    if not heads.shared and heads.token_map is None:
        vocab_size = len(state[first_name])
    with torch.device("meta"):
        draft = MedusaDraft(
            heads.hidden_size,
            vocab_size or 1,
            heads.num_heads,
            heads.num_layers,
            bias=any(re.fullmatch(r"lm_heads\.\d+\.bias", name) for name in state),
            token_map=heads.token_map,
            markov_rank=heads.markov_rank,
        )
    # 2. Compare the tensors.
    expected = draft.state_dict()
    if heads.shared:
        expected = {name: t for name, t in expected.items() if not name.startswith("lm_heads.")}
    missing = {name: t for name, t in expected.items() if name not in state}
    if missing:
        raise CheckpointError(f"incomplete, {listed(missing)} missing")
    extra = {name: t for name, t in state.items() if name not in expected}
    if extra:
        raise CheckpointError(f"weights that belong to no head: {listed(extra)}")
    for name, tensor in sorted(expected.items()):
        if state[name].shape != tensor.shape:
            raise CheckpointError(
                f"{listed({name: tensor})} is {list(state[name].shape)}, expected"
                f" {list(tensor.shape)}"
            )


def checked_token_map(state: Mapping[str, Tensor]) -> Tensor:
    """Return the token map in `state` as int64 [N]. Check that its token ids are unique, and that
    the matrices have N rows.
    """
    tokens = state[TOKEN_MAP]
    are_integers = not tokens.is_floating_point() and tokens.dtype != torch.bool
    if tokens.dim() != 1 or not are_integers or not len(tokens):
        raise CheckpointError(
            f"{TOKEN_MAP} is not a list of token ids ({list(tokens.shape)} {tokens.dtype})"
        )
    tokens = tokens.long()
    if int(tokens.min()) < 0 or len(tokens.unique()) < len(tokens):
        raise CheckpointError(f"{TOKEN_MAP} has duplicate or negative token ids")
    lm_head = state.get(LM_HEAD_0)
    if lm_head is not None and len(lm_head) != len(tokens):
        raise CheckpointError(
            f"{TOKEN_MAP} has {len(tokens)} tokens for matrices of {len(lm_head)} rows"
        )
    return tokens


# vLLM


def to_vllm(
    heads: HeadTensors, lm_head: Tensor | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and config.json of heads in vLLM's layout.

    Biases of the lm_heads are dropped, because vLLM's layout does not have them. A reduced
    vocabulary is expanded.

    Args:
        lm_head: [V, d], the target model's lm_head; needed for heads that share it.
    """
    # 1. Collect the matrices, with V rows each.
    state = {}
    for name, tensor in heads.state.items():
        if not re.fullmatch(r"lm_heads\.\d+\.bias", name):
            state[name] = tensor
    tokens = heads.token_map
    if heads.shared:
        if lm_head is None:
            raise CheckpointError(
                "the heads share the target model's lm_head, which vLLM's layout contains"
            )
        vocab_size: int | None = len(lm_head)
        state[LM_HEAD_0] = lm_head if tokens is None else lm_head[tokens]
    else:
        vocab_size = heads.vocab_size
    if vocab_size is None:
        raise CheckpointError(
            "the heads have a token_map, but config.json has no vocab_size (of all tokens)"
        )
    if tokens is not None:
        for name, tensor in state.items():
            if name.startswith("lm_heads."):
                state[name] = expand_rows(tensor, tokens, vocab_size)
    # 2. Build config.json. No other key may contain "num" together with "heads" or "layers",
    # because vLLM's loader would read it as num_heads or num_hidden_layers.
    config: dict[str, Any] = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": heads.hidden_size,
        "vocab_size": vocab_size,
        "truncated_vocab_size": vocab_size,
        "num_heads": heads.num_heads,
        "num_hidden_layers": heads.num_layers,
        "medusa_fc_bias": True,
        "base_model_name_or_path": heads.target_model_name,
    }
    if heads.shared:
        config["original_lm_head"] = True
    if tokens is not None:
        config[_REDUCED] = len(tokens)
    return names_in_files(state, heads.num_layers, "vllm"), config


def expand_rows(matrix: Tensor, token_map: Tensor, vocab_size: int) -> Tensor:
    """Expand an lm_head over a reduced vocabulary, [N, d], to [V, d] with the same argmax.

    The row of every other token is the mean of the N rows. So its logit is the mean of their
    logits, which is never above the greatest of them, whatever the hidden state. Rows of zeros or
    of large numbers do not guarantee this, and there is no bias to lower their logits.
    """
    mean = matrix.float().mean(0).to(matrix.dtype)  # [d]
    expanded = mean.repeat(vocab_size, 1)  # [V, d]
    expanded[token_map] = matrix
    return expanded


def _apply_vllm_config(state: dict[str, Tensor], config: Mapping[str, Any]) -> None:
    """Change the tensors of vLLM's files in place like vLLM's loader, following config.json."""
    # 1. Drop a copy of the target model's lm_head, and select the rows of a reduced vocabulary.
    if config.get("original_lm_head") is True:
        state.pop(LM_HEAD_0, None)
    tokens = state.pop(TOKEN_MAP, None)
    size = config.get(_REDUCED, config.get("truncated_vocab_size"))
    full_size = config.get("vocab_size")
    if isinstance(size, int) and isinstance(full_size, int) and size < full_size:
        expected = f"config.json says that the vocabulary has {size} tokens"
        if tokens is None:
            raise CheckpointError(f"{expected}, but there is no token_map")
        if len(tokens) != size:
            raise CheckpointError(f"{expected}, but token_map has {len(tokens)} tokens")
        for name in state:
            if name.startswith("lm_heads.") and len(state[name]) > size:
                state[name] = state[name][tokens.long()]
        state[TOKEN_MAP] = tokens
    # 2. Set the biases of the blocks to zero.
    if config.get("medusa_fc_bias", False):
        return
    for name in [name for name in state if name.startswith("blocks.") and name.endswith("weight")]:
        state[name.removesuffix("weight") + "bias"] = state[name].new_zeros(len(state[name]))


def method_in_path(path: str) -> str | None:
    """Return the method that vLLM would choose because of a word in the heads' path or name; None
    if it uses `medusa`.
    """
    return next((method for word, method in _OTHER_METHODS.items() if word in path.lower()), None)


# What other programs compute


def shared_block_warning(heads: HeadTensors) -> str | None:
    """Return a warning if the public Medusa loader computes something else with these heads.

    It builds one block per head and repeats it. So if a head has several distinct blocks, only the
    last one is used.
    """
    for name, tensor in heads.state.items():
        first = re.sub(r"(blocks\.\d+)\.\d+", r"\1.0", name)
        if not torch.equal(tensor, heads.state[first]):
            return (
                f"these heads have {heads.num_layers} distinct blocks each; the public Medusa"
                " loader shares one block among all layers of a head, so it does not compute what"
                " was trained (TGI does)"
            )
    return None


def with_own_lm_heads(heads: HeadTensors, lm_head: Tensor, bias: Tensor | None) -> HeadTensors:
    """Give each head the shared lm_head (weight [V, d], bias [V]) as its own, for formats that
    cannot share it.
    """
    state = dict(heads.state)
    for i in range(heads.num_heads):
        state[f"lm_heads.{i}.weight"] = lm_head
        if bias is not None:
            state[f"lm_heads.{i}.bias"] = bias
    return HeadTensors(heads.num_heads, heads.num_layers, state, heads.target_model_name)
