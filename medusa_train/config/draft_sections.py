"""Define the keys of each kind of draft and the loss of its heads: one section per kind.

Medusa's keys are flat (`medusa_*`), as in Axolotl's Medusa fork; `MedusaConfig` collects them.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, model_validator

from medusa_train.config.keys import HEADS, Section, key, keys_marked
from medusa_train.config.paths import public_name
from medusa_train.config.types import (
    Bool,
    ExportTarget,
    Fraction,
    Int,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    PositiveShare,
    Share,
    Text,
    VocabSize,
    format_value,
    problem,
)


class HeadsLoss(NamedTuple):
    """The heads' loss on a frozen target model: `weight * sum_k decay**k * L_k`.

    Attributes:
        soft_targets: weight of the target model's distribution in the target of L_k. The data's
            token has the rest of the weight.
    """

    decay: float
    soft_targets: float
    weight: float = 1.0

    def describe(self) -> str:
        """Describe the loss in one phrase."""
        soft = self.soft_targets
        if soft == 0.0:
            text = "cross-entropy against the tokens of the data"
        elif soft == 1.0:
            text = "cross-entropy against the distribution of the target model"
        else:
            text = (
                f"{soft:.0%} cross-entropy against the distribution of the target model, rest"
                " cross-entropy against the data"
            )
        if self.decay != 1.0:
            text += f"; head k weighted by {self.decay:g}^k"
        return text


class DraftCost(NamedTuple):
    """What a training step of a draft computes, for estimates of time and memory.

    Attributes:
        output_matrices: number of matrices that compute logits; 1 if all depths use the same one.
        shared_lm_heads: how many of these matrices are the target model's lm_head.
        blocks_per_head: number of blocks in each head.
        layer_passes: number of passes through the draft's own decoder layers. Their activations are
            kept.
        repeats: how often a step runs all weights, except those that join states.
        joined_states: number of hidden states that a matrix joins into one, once in a step.
        anchors: number of blocks that are trained in each row, each after a supervised position.
            They are recomputed in the backward pass. 0: the draft runs at all positions.
        slots: number of tokens in each block, the known first one included.
    """

    output_matrices: int
    shared_lm_heads: int = 0
    blocks_per_head: int = 1
    layer_passes: int = 0
    repeats: int = 1
    joined_states: int = 0
    anchors: int = 0
    slots: int = 1


class DraftConfig(Section):
    """Base class of a draft's section. Keys marked HEADS are arguments of the draft's class. The
    other keys affect only its training.

    Attributes:
        prefix: prefix of the keys in a configuration.
        title: name of the draft in messages.
        trains_jointly: whether it can be trained together with the target model.
        exports: layouts in which other programs read the draft.
        merges: whether guesses of drafts without training can be added to its own guesses.
        dynamic_trees: whether it can choose a new tree in every step.
        layers_key: key that sets `aux_layers`; '' if there is none.
        lr_multiplier: default of `medusa_lr_multiplier`; only Medusa's paper has one.
    """

    prefix: ClassVar[str]
    title: ClassVar[str]
    trains_jointly: ClassVar[bool] = False
    exports: ClassVar[tuple[ExportTarget, ...]] = ()
    merges: ClassVar[bool] = True
    dynamic_trees: ClassVar[bool] = False
    layers_key: ClassVar[str] = ""  # see `aux_layers`
    lr_multiplier: ClassVar[float] = 1.0

    if TYPE_CHECKING:

        @property
        def num_heads(self) -> int:
            """Depth of the deepest tree that the draft can fill."""

    @property
    def settings(self) -> dict[str, Any]:
        """Keyword arguments of the draft's class."""
        return self.model_dump(mode="json", include=set(keys_marked(type(self), HEADS)))

    @property
    def vocab_size_key(self) -> str:
        """The name of the key for a reduced vocabulary."""
        return f"{self.prefix}vocab_size"

    def aux_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return after how many of the target model's layers the draft reads hidden states, in
        addition to the final ones.
        """
        return ()

    @property
    def heads_loss(self) -> HeadsLoss:
        """Loss of the heads: soft cross-entropies `sum_k c^k CE_k`. Without a key `soft_targets`,
        the target is the target model's distribution alone.
        """
        return HeadsLoss(
            getattr(self, "decay_coefficient", 1.0), getattr(self, "soft_targets", 1.0)
        )

    @property
    def cost(self) -> DraftCost:
        """What a training step of the draft computes."""
        return DraftCost(self.num_heads)

    def describe(self) -> str:
        """Describe the draft in one phrase, for the first line of the output."""
        return f"{self.num_heads} {self.title} heads"


# Keys of several drafts.
_VOCAB_SIZE = key(
    None,
    "N: predict only the N most frequent tokens of the training data; default: all tokens",
    HEADS,
)
_NORMALIZE_EMBEDDINGS = key(
    True,
    "scale the tokens' embeddings to a root mean square of 1 for the heads; false: as published",
    HEADS,
)
_DECAY = key(1.0, "c: weight of head k's loss is c**k; 1: all heads have the same weight")


class MedusaConfig(DraftConfig):
    """Keys of Medusa heads (Medusa); in a configuration they are flat: `medusa_num_heads`."""

    prefix = "medusa_"
    title = "Medusa"
    trains_jointly = True
    exports = ("reference", "reference-v2", "tgi", "vllm", "trtllm", "transformers", "merged")
    lr_multiplier = 4.0  # Medusa, Shared Settings

    num_heads: PositiveInt = key(
        5, "K: number of heads; head k predicts the k-th token after the next one", HEADS, le=32
    )
    num_layers: NonNegativeInt = key(
        1, "residual blocks per head; 0: a linear head without blocks", HEADS, le=32
    )
    share_lm_head: Bool = key(
        False, "heads share the target model's lm_head instead of training one each", HEADS
    )
    vocab_size: VocabSize | None = _VOCAB_SIZE
    markov_rank: NonNegativeInt = key(
        0,
        "r: rank of a bias on the heads' logits that depends on the token before the predicted one;"
        " 0: none",
        HEADS,
        le=1024,
    )
    decay_coefficient: PositiveShare = key(0.8, "c: weight of head k's loss is c**k")
    soft_targets: Share = key(
        0.0, "weight of the target model's distribution in the heads' targets"
    )

    @property
    def cost(self) -> DraftCost:
        """Heads of blocks, which may share the target model's lm_head."""
        shared = self.num_heads if self.share_lm_head else 0
        return DraftCost(self.num_heads, shared, blocks_per_head=self.num_layers)

    def describe(self) -> str:
        """Describe the draft by its heads, layers, reduced vocabulary and Markov bias."""
        heads = f"{self.num_heads} Medusa heads x {_layers(self.num_layers)}"
        text = heads + _vocabulary(self.vocab_size)
        if self.markov_rank:
            text += f" with a Markov bias of rank {self.markov_rank}"
        return text


def flat(name: str) -> Any:
    """Return the key `medusa_NAME` of a configuration, which `MedusaConfig` declares."""
    return copy(MedusaConfig.model_fields[name])


class HydraConfig(DraftConfig):
    """Keys of `hydra`: sequentially dependent heads (Hydra, and Hydra++ with a prefix layer)."""

    prefix = "hydra."
    title = "Hydra"

    num_heads: PositiveInt = key(
        4,
        "number of heads; head k predicts the k-th token after the next one, given the tokens"
        " between them",
        HEADS,
        le=32,
    )
    num_layers: PositiveInt = key(
        4,
        "MLP blocks per head; the first one reads the hidden state and the embeddings of the path's"
        " tokens",
        HEADS,
        le=32,
    )
    prefix_layer: Bool = key(
        True, "add a decoder layer with its own KV cache before the heads (Hydra++)", HEADS
    )
    normalize_embeddings: Bool = _NORMALIZE_EMBEDDINGS
    dropout: Fraction = key(
        0.2, "dropout on the residual branch of each block during training", HEADS
    )
    vocab_size: VocabSize | None = _VOCAB_SIZE
    decay_coefficient: PositiveShare = _DECAY
    soft_targets: Share = key(
        1.0,
        "weight of the target model's distribution in the heads' targets; the data's token has the"
        " rest",
    )

    @property
    def cost(self) -> DraftCost:
        """Heads of blocks, after the prefix layer if there is one."""
        passes = int(self.prefix_layer)
        return DraftCost(self.num_heads, blocks_per_head=self.num_layers, layer_passes=passes)

    def describe(self) -> str:
        """Describe the draft by its heads, layers and reduced vocabulary; Hydra++ has a prefix
        layer.
        """
        heads = f"{self.num_heads} Hydra{'++' if self.prefix_layer else ''} heads"
        return f"{heads} x {_layers(self.num_layers)}{_vocabulary(self.vocab_size)}"


class AmphistaConfig(DraftConfig):
    """Keys of `amphista`: heads that attend to each other, after staged adaptation layers
    (Amphista).
    """

    prefix = "amphista."
    title = "Amphista"

    num_heads: PositiveInt = key(
        4, "heads; head k predicts the k-th token after the next one, all in one pass", HEADS, le=32
    )
    auto_blocks: NonNegativeInt = key(
        1, "self-attention blocks over the heads; 2: the alpha variant, 0: none", HEADS, le=8
    )
    position_encoding: Bool = key(True, "learned position of every head before these blocks", HEADS)
    adaptation_layers: NonNegativeInt = key(
        2,
        "decoder layers before the heads; 2: the later heads read the second one, 1: one for all"
        " heads, 0: none",
        HEADS,
        le=2,
    )
    sampled_token: Bool = key(
        True, "also read the embedding of the token that the target model has just chosen", HEADS
    )
    normalize_embeddings: Bool = _NORMALIZE_EMBEDDINGS
    vocab_size: VocabSize | None = _VOCAB_SIZE
    alignment_weight: NonNegativeFloat = key(
        0.5,
        "lambda_1: weight of the cross-entropy against the target model's distribution (default:"
        " ours)",
    )
    label_weight: NonNegativeFloat = key(
        0.5, "lambda_2: weight of the loss against the data's tokens (default: ours)"
    )
    decay_coefficient: PositiveShare = _DECAY

    @model_validator(mode="after")
    def _check_combinations(self) -> AmphistaConfig:
        if not self.alignment_weight and not self.label_weight:
            raise problem(
                "alignment_weight and label_weight are both 0, so there is no loss; set at least"
                " one of them"
            )
        if not self.auto_blocks and not self.position_encoding:
            raise problem(
                "auto_blocks: 0 also omits the positions; remove position_encoding: false"
            )
        return self

    @property
    def heads_loss(self) -> HeadsLoss:
        """`lambda_1 * alignment + lambda_2 * CE`, as one weighted soft target (Amphista, Training
        Objective).
        """
        weight = self.alignment_weight + self.label_weight
        return HeadsLoss(self.decay_coefficient, self.alignment_weight / weight, weight)

    @property
    def cost(self) -> DraftCost:
        """Heads after the adaptation layers."""
        return DraftCost(self.num_heads, layer_passes=self.adaptation_layers)

    def describe(self) -> str:
        """Describe the draft by its heads and reduced vocabulary."""
        return f"{super().describe()}{_vocabulary(self.vocab_size)}"


class KangarooConfig(DraftConfig):
    """Keys of `kangaroo`: the target model's first layers, an adapter and the target model's
    lm_head (Kangaroo).
    """

    prefix = "kangaroo."
    title = "Kangaroo"
    layers_key = "kangaroo.exit_layer"
    merges = False  # drafting its guesses runs the target model's first layers on them

    num_heads: PositiveInt = key(
        6,
        "gamma: maximum number of tokens that are drafted per step, one after another",
        HEADS,
        le=32,
    )
    exit_layer: PositiveInt = key(
        2,
        "l: number of target model layers before the early exit; the adapter reads their output",
        HEADS,
    )
    threshold: Share = key(
        0.6, "eta: drafting stops after a token of at most this probability; 0: never", HEADS
    )
    mlp_size: NonNegativeInt = key(
        0,
        "intermediate size of an MLP after the adapter's attention; 0: no MLP, as published",
        HEADS,
    )
    attention: Bool = key(
        True,
        "false: an MLP alone (Kangaroo, The Architecture of the Adapter Module: MLP Only)",
        HEADS,
    )
    share_lm_head: Bool = key(
        True, "false: train an lm_head of the draft's own (the same table: Kangaroo + Head)", HEADS
    )

    @model_validator(mode="after")
    def _check_combinations(self) -> KangarooConfig:
        if not self.attention and not self.mlp_size:
            raise problem(
                "an adapter without attention needs an MLP; set mlp_size, or remove attention:"
                " false"
            )
        return self

    def aux_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the exit layer."""
        return (self.exit_layer,)

    @property
    def cost(self) -> DraftCost:
        """One adapter, with the target model's lm_head or one of its own."""
        return DraftCost(1, shared_lm_heads=int(self.share_lm_head))

    def describe(self) -> str:
        """Describe the draft by its exit layer and its maximum length."""
        return (
            f"Kangaroo, early exit after {_layers(self.exit_layer)}, drafting up to"
            f" {self.num_heads} tokens"
        )


def _ascending(layers: tuple[int, ...]) -> tuple[int, ...]:
    if list(layers) != sorted(layers):
        raise problem("must be in ascending order")
    return layers


class Eagle3Config(DraftConfig):
    """Keys of `eagle3`: one decoder layer over the states of three layers, trained on its own
    outputs (EAGLE-3).
    """

    prefix = "eagle3."
    title = "EAGLE-3"
    layers_key = "eagle3.layers"
    dynamic_trees = True
    exports = ("vllm", "sglang", "speculators")

    num_heads: PositiveInt = key(
        7, "maximum number of tokens that are drafted one after another", HEADS, le=32
    )
    train_steps: PositiveInt = key(
        4,
        "steps of the training-time test: how many tokens in a row are drafted in training; 7 as"
        " published",
        HEADS,
        le=16,
    )
    layers: Annotated[tuple[Int, Int, Int], AfterValidator(_ascending)] | None = key(
        None,
        "after how many of the target model's layers the draft reads states; default: 2, half, all"
        " but 3",
        HEADS,
    )
    vocab_size: VocabSize | None = _VOCAB_SIZE
    fc_norm: Bool = key(
        False, "norm each of the three states before they are joined (EAGLE 3.1)", HEADS
    )
    norm_output: Bool = key(
        False, "each drafted token reads the normed output of the one before (EAGLE 3.1)", HEADS
    )
    decay_coefficient: PositiveShare = key(0.8, "c: weight of step k's loss is c**k")
    soft_targets: Share = key(
        1.0, "weight of the target model's distribution in the targets; rest: the token"
    )

    def aux_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the three layers whose states are read."""
        return self.layers or default_layers(num_layers)

    @property
    def cost(self) -> DraftCost:
        """One layer, which every step of the training-time test runs again."""
        steps = min(self.train_steps, self.num_heads)
        return DraftCost(
            output_matrices=1,
            blocks_per_head=0,
            layer_passes=steps,
            repeats=steps,
            joined_states=3,
        )

    def describe(self) -> str:
        """Describe the draft by its depth, its trained steps and its reduced vocabulary."""
        steps = f"{self.train_steps} training step{'' if self.train_steps == 1 else 's'}"
        return (
            f"EAGLE-3, drafting up to {self.num_heads} tokens,"
            f" {steps}{_vocabulary(self.vocab_size)}"
        )


def default_layers(num_layers: int) -> tuple[int, int, int]:
    """Return the layers that vLLM reads by default: after 2, half, and all but 3 of the layers.
    With fewer than 7 layers: after 1, half, and all but 1.
    """
    if num_layers < 7:
        return 1, max(1, num_layers // 2), max(1, num_layers - 1)
    return 2, num_layers // 2, num_layers - 3


class DFlashConfig(DraftConfig):
    """Keys of `dflash`: decoder layers that guess a block of tokens in one pass (DFlash)."""

    prefix = "dflash."
    title = "DFlash"
    layers_key = "dflash.layers"
    dynamic_trees = True
    exports = ("vllm", "sglang")

    max_draft_tokens: PositiveInt = key(7, "K: tokens that one pass guesses", HEADS, le=32)
    num_layers: PositiveInt = key(5, "decoder layers", HEADS, le=16)
    layers: Annotated[tuple[PositiveInt, ...], AfterValidator(_ascending)] | None = key(
        None,
        "after how many of the target model's layers the draft reads states; default: as many as"
        " num_layers, from 2 to all but 2",
        HEADS,
    )
    anchors: PositiveInt = key(
        512, "blocks that are trained in each row and step, at random supervised positions", HEADS
    )
    window: NonNegativeInt = key(
        2048,
        "attention window in positions, causal within the block; 0: full attention, bidirectional"
        " in the block, as in most published drafts",
        HEADS,
    )
    mask_token_id: NonNegativeInt | None = key(
        None,
        "id of the token that fills the positions to be guessed; default: the last one of the"
        " target model's embeddings",
        HEADS,
    )
    markov_rank: NonNegativeInt = key(
        0, "rank of a bias on each guess by the token before it; 0: none", HEADS
    )
    vocab_size: VocabSize | None = _VOCAB_SIZE
    decay_coefficient: PositiveShare = key(
        0.7788, "c: weight of the k-th guess's loss is c**k, relative to their sum"
    )
    soft_targets: Share = key(
        0.0, "weight of the target model's distribution in the targets; rest: the token"
    )

    @property
    def num_heads(self) -> int:
        """Each token of a block counts as a head."""
        return self.max_draft_tokens

    @property
    def heads_loss(self) -> HeadsLoss:
        """Mean of the losses of a block's guesses, weighted by c**k."""
        weights = [self.decay_coefficient**k for k in range(1, self.max_draft_tokens + 1)]
        return HeadsLoss(self.decay_coefficient, self.soft_targets, 1 / sum(weights))

    @property
    def cost(self) -> DraftCost:
        """Layers, and the target model's lm_head."""
        return DraftCost(
            output_matrices=1,
            shared_lm_heads=1,
            blocks_per_head=0,
            layer_passes=self.num_layers,
            joined_states=len(self.layers or range(self.num_layers)),
            anchors=self.anchors,
            slots=self.num_heads + 1,
        )

    def aux_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers whose states are read."""
        return self.layers or spread_layers(num_layers, self.num_layers)

    def describe(self) -> str:
        """Describe the draft by its block, its layers, its window and its Markov bias."""
        window = f", window {self.window:,}" if self.window else ", bidirectional"
        text = (
            f"DFlash, blocks of {self.max_draft_tokens} guesses, {_layers(self.num_layers)}{window}"
        )
        if self.markov_rank:
            text += f", a Markov bias of rank {self.markov_rank}"
        return text + _vocabulary(self.vocab_size)


def spread_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """Return after which layers DFlash's authors read states: `count` of them, evenly spaced from 2
    to all but 2. A single one is after half of the layers plus one.
    """
    if count == 1:
        return (num_layers // 2 + 1,)
    first = min(2, num_layers)
    last = max(first, num_layers - 2)
    return tuple(round(first + i * (last - first) / (count - 1)) for i in range(count))


def _layers(count: int) -> str:
    return f"{count} layer{'' if count == 1 else 's'}"


def _vocabulary(size: int | None) -> str:
    return f" over {size:,} tokens" if size else ""


#: Section class by the value of the key `draft`; Medusa's keys are flat.
SECTIONS: dict[str, type[DraftConfig]] = {
    "hydra": HydraConfig,
    "amphista": AmphistaConfig,
    "kangaroo": KangarooConfig,
    "eagle3": Eagle3Config,
    "dflash": DFlashConfig,
}
#: `SECTIONS`, and Medusa, whose keys are flat.
DRAFT_CONFIGS: dict[str, type[DraftConfig]] = {"medusa": MedusaConfig, **SECTIONS}


# Drafts without training


class LookupConfig(Section):
    """Keys of `lookup`: prompt lookup, which copies what followed the same n-gram in the prompt and
    the answer.
    """

    max_ngram: PositiveInt = key(
        3, "longest n-gram that is looked up; shorter ones where it did not occur before", le=32
    )
    max_tokens: PositiveInt = key(10, "maximum number of tokens that are copied per step", le=128)
    nodes: PositiveInt = key(
        10, "maximum number of nodes, where several continuations are copied as a tree", le=256
    )
    min_probability: Fraction = key(
        0.05,
        "verify a node only if its probability is at least this, estimated from the earlier steps"
        " of the answer; 0: no minimum",
    )


class RestConfig(Section):
    """Keys of `rest`: REST, which copies what followed the same n-gram in a datastore."""

    datastore: Text = key(
        ..., "text to copy from: the assistant's turns of chats (JSONL, JSON, Parquet), or any file"
    )
    max_ngram: PositiveInt = key(
        16, "longest n-gram that is looked up; shorter ones where it does not occur", le=64
    )
    max_tokens: PositiveInt = key(10, "maximum number of tokens that are copied per step", le=128)
    nodes: PositiveInt = key(
        16, "maximum number of nodes, where several continuations are copied as a tree", le=256
    )


class LookaheadConfig(Section):
    """Keys of `lookahead`: n-grams that the target model guesses ahead of the text (Lookahead
    Decoding).
    """

    window: PositiveInt = key(
        5, "W: columns of the window: positions that are guessed ahead in every step", le=64
    )
    ngram: Int = key(
        4,
        "N: tokens of an n-gram; a step computes W x (N - 1) - 1 tokens of the window in addition"
        " to its guesses",
        ge=3,
        le=16,
    )
    guesses: PositiveInt = key(
        5, "G: most n-grams to verify per step, the latest that begin with the last token", le=64
    )
    pool_from_prompt: Bool = key(
        True, "also verify n-grams of the prompt and the answer; false: only of the window"
    )


#: Section class and its key by the kind of draft.
LOOKUPS: dict[str, tuple[type[Section], str]] = {
    "prompt_lookup": (LookupConfig, "lookup"),
    "lookahead": (LookaheadConfig, "lookahead"),
    "rest": (RestConfig, "rest"),
}


def _trained_draft(value: object) -> object:
    if isinstance(value, str) and value.rpartition("+")[2] in LOOKUPS:
        raise problem(
            f"{format_value(value)} has no weights to train; use it for decoding: medusa-eval"
            f" --draft {value}"
        )
    return value


# Values of the key `draft` in training and in decoding. mypy cannot read a computed Literal.
if TYPE_CHECKING:
    TrainedDraft = str
    LookupName = str
else:
    TrainedDraft = Annotated[Literal[tuple(DRAFT_CONFIGS)], BeforeValidator(_trained_draft)]
    _ADDED_TO = ("", *(f"{name}+" for name, section in DRAFT_CONFIGS.items() if section.merges))
    LookupName = Literal[tuple(f"{heads}{kind}" for kind in LOOKUPS for heads in _ADDED_TO)]


@dataclass(frozen=True)
class LookupChoice:
    """A draft without training, alone or added to the heads of a run.

    Attributes:
        heads: kind of the heads that the draft is added to; None if it is used alone.
        kind: "prompt_lookup", "lookahead" or "rest".
        settings: keyword arguments of the draft's class.
    """

    heads: str | None
    kind: str
    settings: dict[str, Any]

    @classmethod
    def from_keys(cls, draft: str, section: Section | None) -> LookupChoice:
        """Return the choice for a valid value of `draft`. `section` has its settings; None means
        their defaults.
        """
        heads, _, kind = draft.rpartition("+")
        if section is None:
            section_class, _ = LOOKUPS[kind]
            section = section_class()
        return cls(heads or None, kind, section.model_dump())

    @property
    def name(self) -> str:
        """The value of `draft`."""
        return f"{self.heads}+{self.kind}" if self.heads else self.kind

    @property
    def datastore(self) -> str | None:
        """The file that REST copies from."""
        return self.settings.get("datastore")

    def describe(self) -> str:
        """Describe the draft in one phrase, for reports."""
        settings = []
        for name, value in self.settings.items():
            shown = value
            if name == "datastore":
                shown = public_name(value)
            settings.append(f"{name.replace('_', ' ')} {shown}")
        return f"{self.name} ({', '.join(settings)})"
