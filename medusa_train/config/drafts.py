"""The keys of each kind of draft, and how its heads are trained: a section per kind. Knows neither files nor torch.

Medusa's keys are flat, as Axolotl's fork has them; `MedusaConfig` collects them.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict

from medusa_train.config.types import Bool, Float, Int, key


class HeadsLoss(NamedTuple):
    """How the heads' losses add up over a frozen backbone: `weight * sum_k decay**k * L_k`.

    Attributes:
        soft_targets: share of the backbone's own distribution in the targets of L_k, the data's token being the rest.
    """

    decay: float
    soft_targets: float
    weight: float = 1.0


class DraftConfig(BaseModel):
    """A section: what the draft is, and how it is trained.

    Attributes:
        training_keys: keys of training alone; all others describe the draft and are what its class is made with.
        prefix: of the keys, as the user writes them.
    """

    model_config = ConfigDict(extra="forbid")

    training_keys: ClassVar[frozenset[str]] = frozenset()
    prefix: ClassVar[str]
    title: ClassVar[str]

    num_heads: Int = 5

    @property
    def settings(self) -> dict[str, Any]:
        """The keyword arguments that the draft's class is made with."""
        return self.model_dump(exclude=set(self.training_keys))

    @property
    def blocks_per_head(self) -> int:
        """Blocks of a head, for estimates of memory."""
        return 1

    @property
    @abstractmethod
    def heads_loss(self) -> HeadsLoss:
        """How its heads are trained."""

    def describe(self) -> str:
        """One phrase for headlines: what is trained."""
        return f"{self.num_heads} {self.title} heads"


class MedusaConfig(DraftConfig):
    """The flat `medusa_*` keys of Medusa's heads."""

    prefix = "medusa_"
    title = "Medusa"
    training_keys = frozenset({"decay_coefficient", "soft_targets"})

    num_layers: Int = 1
    share_lm_head: Bool = False
    vocab_size: Int | None = None
    decay_coefficient: Float = 0.8
    soft_targets: Float = 0.0

    @property
    def blocks_per_head(self) -> int:
        """Blocks of a head."""
        return self.num_layers

    @property
    def heads_loss(self) -> HeadsLoss:
        """`sum_k c^k CE_k` (SPEC 1)."""
        return HeadsLoss(self.decay_coefficient, self.soft_targets)

    def describe(self) -> str:
        """Heads x layers."""
        known = f" over {self.vocab_size:,} tokens" if self.vocab_size else ""
        return f"{self.num_heads} Medusa heads x {self.num_layers} layer{'' if self.num_layers == 1 else 's'}{known}"


class HydraConfig(DraftConfig):
    """Keys of `hydra`: sequentially dependent heads (Hydra and Hydra++)."""

    prefix = "hydra."
    title = "Hydra"
    training_keys = frozenset({"decay_coefficient", "soft_targets"})

    num_heads: Int = key(4, "K: head k predicts k tokens beyond the next one, given the tokens between", ge=1, le=32)
    num_layers: Int = key(4, "blocks per head; the first one reads the state and the path of tokens", ge=1, le=32)
    prefix_layer: Bool = key(True, "Hydra++: a decoder layer with a cache of its own before the heads")
    dropout: Float = key(0.2, "of what each block adds, in training", ge=0, lt=1)
    decay_coefficient: Float = key(1.0, "head k's loss counts this to the power of k; 1: all alike", gt=0, le=1)
    soft_targets: Float = key(1.0, "share of the backbone's own distribution in the heads' targets", ge=0, le=1)

    @property
    def blocks_per_head(self) -> int:
        """Blocks of a head."""
        return self.num_layers

    @property
    def heads_loss(self) -> HeadsLoss:
        """Unweighted soft cross-entropies against the backbone (SPEC 3)."""
        return HeadsLoss(self.decay_coefficient, self.soft_targets)

    def describe(self) -> str:
        """Heads x layers, and the name that the paper gives it with a prefix layer."""
        layers = f"{self.num_layers} layer{'' if self.num_layers == 1 else 's'}"
        return f"{self.num_heads} Hydra{'++' if self.prefix_layer else ''} heads x {layers}"


class AmphistaConfig(DraftConfig):
    """Keys of `amphista`: heads that hear each other, over staged adaptation layers."""

    prefix = "amphista."
    title = "Amphista"
    training_keys = frozenset({"alignment_weight", "label_weight", "decay_coefficient"})

    num_heads: Int = key(4, "K: head k predicts k tokens beyond the next one, all in one pass", ge=1, le=32)
    auto_blocks: Int = key(1, "attention blocks among the heads; 2: the alpha variant, 0: none", ge=0, le=8)
    adaptation_layers: Int = key(2, "decoder layers before the heads; 1: all read the same, 0: none", ge=0, le=2)
    sampled_token: Bool = key(True, "read the embedding of the token that the backbone just chose")
    alignment_weight: Float = key(0.5, "lambda_1, ours: cross-entropy against the backbone's own distribution", ge=0)
    label_weight: Float = key(0.5, "lambda_2, ours: cross-entropy against the data's tokens", ge=0)
    decay_coefficient: Float = key(1.0, "head k's loss counts this to the power of k; 1: all alike", gt=0, le=1)

    @property
    def heads_loss(self) -> HeadsLoss:
        """`lambda_1 * alignment + lambda_2 * CE`, as one soft target and its weight (SPEC 4)."""
        weight = self.alignment_weight + self.label_weight
        return HeadsLoss(self.decay_coefficient, self.alignment_weight / weight if weight else 0.0, weight)


class KangarooConfig(DraftConfig):
    """Keys of `kangaroo`: the backbone's own first layers, an adapter and its lm_head."""

    prefix = "kangaroo."
    title = "Kangaroo"

    num_heads: Int = key(6, "gamma: how many tokens are drafted at most, one after the other", ge=1, le=32)
    exit_layer: Int = key(2, "l: the backbone's layers whose states the adapter reads", ge=1)
    threshold: Float = key(0.6, "eta: drafting stops behind a token no more probable than this; 0: never", ge=0, le=1)
    mlp_size: Int = key(
        0, "width of an MLP behind the attention, at best up to the layer's own; 0: none, as published", ge=0
    )

    @property
    def heads_loss(self) -> HeadsLoss:
        """Soft cross-entropy against the backbone at the same position (SPEC 5)."""
        return HeadsLoss(1.0, 1.0)

    def describe(self) -> str:
        """Where it leaves the backbone, and how far it drafts."""
        layers = f"{self.exit_layer} layer{'' if self.exit_layer == 1 else 's'}"
        return f"Kangaroo's exit after {layers}, drafting up to {self.num_heads} tokens"


#: Sections of the drafts that have one, by the value of the key `draft`.
SECTIONS: dict[str, type[DraftConfig]] = {"hydra": HydraConfig, "amphista": AmphistaConfig, "kangaroo": KangarooConfig}
