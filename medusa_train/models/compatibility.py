"""Check a loaded model: can its logits be reproduced, and token trees verified in one pass?"""

from __future__ import annotations

import copy
import inspect

import torch

from medusa_train.errors import MedusaError, TargetModelError
from medusa_train.models.architecture import describe_exception, not_supported
from medusa_train.models.finite import describe_not_finite
from medusa_train.models.hf_config import has_experts
from medusa_train.models.precision import is_out_of_memory
from medusa_train.models.target_model import TargetModel
from medusa_train.models.target_states import Rows
from medusa_train.trees.tree import Tree

#: Sizes by config key. A mixture of experts is probed with a small copy of these sizes.
_SMALL = {
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "first_k_dense_replace": 1,
}
_SMALL |= dict.fromkeys(("num_experts_per_tok", "top_k_experts", "n_group", "topk_group"), 1)
_SMALL |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4)
_SMALL |= dict.fromkeys(
    ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 32
)
_FORWARD_ARGUMENTS = ("attention_mask", "position_ids", "past_key_values")


def check_model(target_model: TargetModel) -> None:
    """Probe a loaded model; raise TargetModelError if its logits, tree passes or padded rows would
    be wrong, or its weights are not finite.
    """
    try:
        reason = (
            _forward_problem(target_model)
            or _logits_problem(target_model)
            or _tree_problem(target_model)
        )
    except Exception as error:  # an untested model family can fail anywhere
        if isinstance(error, MedusaError) or is_out_of_memory(error):
            raise
        architecture = type(target_model.model).__name__
        raise not_supported(target_model.name, architecture, [describe_exception(error)]) from error
    if reason is not None:
        raise not_supported(target_model.name, type(target_model.model).__name__, [reason])


def _forward_problem(target_model: TargetModel) -> str | None:
    """Describe the arguments that a model's forward lacks; None if it has all."""
    parameters = inspect.signature(type(target_model.body).forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    missing = [name for name in _FORWARD_ARGUMENTS if name not in parameters]
    if target_model.tree_unsupported_reason is not None:
        return None  # these models get only tokens
    return f"its forward takes no {', '.join(missing)}" if missing else None


def _tree_problem(target_model: TargetModel) -> str | None:
    """Describe what a model computes differently from what trees need, or packed rows if its trees
    cannot be verified; None: nothing.
    """
    if target_model.tree_unsupported_reason is not None:
        return _padding_problem(target_model)
    # in half precision, rounding may route a token to another expert, so compare a small float32
    # copy instead
    probed = (
        target_model
        if target_model.is_exact or not has_experts(target_model.config)
        else _small_copy(target_model)
    )
    if not _verifies_trees(probed):
        return (
            "its output for a token depends on siblings of its ancestors in the same pass: the 4-D"
            " attention mask or the position ids are ignored"
        )
    return None


@torch.no_grad()
def _logits_problem(target_model: TargetModel) -> str | None:
    """Describe how a model's logits differ from those that drafts compute; None: they do not.

    Raises:
        TargetModelError: they are not finite.
    """
    probe = torch.arange(min(4, target_model.vocab_size), device=target_model.device)[None]
    logits = target_model.logits(target_model.run(probe).final)
    if not bool(torch.isfinite(logits).all()):
        raise TargetModelError(f"base_model {target_model.name}: {_why_not_finite(target_model)}")
    expected = target_model.model(input_ids=probe, use_cache=False).logits.float()
    tolerance = 1e-3 * float(expected.abs().max().clamp(min=1.0))
    if torch.allclose(logits.float(), expected, rtol=1e-3, atol=tolerance):
        return None
    return (
        "its logits are not lm_head(hidden), with or without soft cap and scale; trained heads"
        " would be wrong"
    )


def _why_not_finite(target_model: TargetModel) -> str:
    """Describe why a model's logits are NaN or infinite."""
    problem = describe_not_finite(target_model.model.named_parameters())
    if problem is not None:
        return f"{problem}: the file is damaged; fetch or copy it again"
    return (
        f"its logits are not finite in {str(target_model.dtype).removeprefix('torch.')}, though its"
        " weights are: load it in bfloat16 or float32"
    )


@torch.no_grad()
def _padding_problem(target_model: TargetModel) -> str | None:
    """Describe the problem if right-padding a document changes its states; None: it does not.

    Models whose trees cannot be verified train on right-padded rows, without a mask.
    """
    tokens = torch.arange(10, device=target_model.device).view(2, 5) % target_model.vocab_size
    rows = Rows.from_tokens(tokens)
    padded = target_model.run(rows.tokens, positions=rows.positions, segments=rows.segments).final
    alone = target_model.run(tokens[:1, :3]).final
    if target_model.agrees(padded[0, :3], alone[0]):
        return None
    return "its output for a token depends on later tokens of the row, or on other rows"


def _small_copy(target_model: TargetModel) -> TargetModel:
    """Return a small random model of the same class and attention, with two layers and few experts,
    in float32 on the CPU.
    """
    config = copy.deepcopy(target_model.model.config)
    text = config.get_text_config()
    for key in _SMALL.keys() & set(text.to_dict()):
        setattr(text, key, _SMALL[key])
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:2]
    config.eos_token_id = config.pad_token_id = config.bos_token_id = None
    config.quantization_config = None
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        model = type(target_model.model)(config).float()
        for parameter in model.parameters():
            # as large as trained weights, so that a token depends on the others
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return TargetModel(
        model.eval().requires_grad_(False), target_model.tokenizer, target_model.name
    )


@torch.no_grad()
def _verifies_trees(target_model: TargetModel) -> bool:
    """Return whether a tree node gets the same hidden state as in a row of only its ancestors.

    prefix 0 1 2 | root 3 | siblings 4, 5 | 6, a child of 5       row: 0 1 2 3 5 6
    """
    if target_model.max_context < 8:
        return True
    tokens = target_model.spread_tokens(7)
    expected = target_model.run(tokens[:, [0, 1, 2, 3, 5, 6]]).final[0, -1]
    nodes = target_model.place_tree(tokens[:, :3], Tree.from_paths([(0,), (1,), (1, 0)]))
    hidden = target_model.run_nodes(tokens[:, 3:], nodes)[0].final[0, -1]
    return target_model.agrees(hidden, expected)
