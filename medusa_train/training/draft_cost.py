"""What a training step computes in each kind of draft, for estimates of time and memory."""

from __future__ import annotations

from typing import NamedTuple

from medusa_train.config.draft_sections import (
    AmphistaConfig,
    DFlashConfig,
    DraftConfig,
    Eagle3Config,
    HydraConfig,
    KangarooConfig,
    MedusaConfig,
)


class DraftCost(NamedTuple):
    """Counts of a training step.

    Attributes:
        output_matrices: matrices that give logits; 1 if all depths are drafted by the same one.
        shared_lm_heads: how many of them are the base model's lm_head.
        blocks_per_head: blocks in each head.
        layer_passes: passes through decoder layers of the draft's own, whose activations are kept.
        repeats: how often a step runs all weights but `weights_used_once`.
        anchors: blocks that are trained in each row, behind supervised positions, and computed again
            in the backward pass; 0: the draft runs at all positions.
        slots: tokens in each block, the known one included.
        masks_packed_rows: whether packed rows take an attention mask.
    """

    output_matrices: int
    shared_lm_heads: int = 0
    blocks_per_head: int = 1
    layer_passes: int = 0
    repeats: int = 1
    weights_used_once: int = 0
    anchors: int = 0
    slots: int = 1
    masks_packed_rows: bool = False


def draft_cost(section: DraftConfig, hidden_size: int) -> DraftCost:
    """Return the counts of a draft on a base model of `hidden_size`."""
    heads = section.num_heads
    if isinstance(section, MedusaConfig):
        shared = heads if section.share_lm_head else 0
        return DraftCost(heads, shared, blocks_per_head=section.num_layers)
    if isinstance(section, HydraConfig):
        passes = int(section.prefix_layer)
        return DraftCost(heads, blocks_per_head=section.num_layers, layer_passes=passes)
    if isinstance(section, AmphistaConfig):
        return DraftCost(heads, layer_passes=section.adaptation_layers)
    if isinstance(section, KangarooConfig):
        return DraftCost(1, shared_lm_heads=int(section.share_lm_head))
    if isinstance(section, Eagle3Config):
        steps = min(section.train_steps, heads)
        return DraftCost(
            output_matrices=1,
            blocks_per_head=0,
            layer_passes=steps,
            repeats=steps,
            weights_used_once=3 * hidden_size**2,  # fc joins the states of three layers
            masks_packed_rows=True,
        )
    if isinstance(section, DFlashConfig):
        states = len(section.layers or range(section.num_layers))
        return DraftCost(
            output_matrices=1,
            shared_lm_heads=1,
            blocks_per_head=0,
            layer_passes=section.num_layers,
            weights_used_once=states * hidden_size**2,  # fc joins the states of these layers
            anchors=section.anchors,
            slots=heads + 1,
            masks_packed_rows=True,
        )
    return DraftCost(heads)
