"""EAGLE-3: one decoder layer drafts token by token, first from states of three layers of the target
model and then from its own outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from medusa_train.config.draft_sections import default_layers
from medusa_train.data.batch import shift_labels
from medusa_train.models.document_attention import document_mask
from medusa_train.models.drafts.base import DraftStep, Proposal, TreeSize, read_prompts
from medusa_train.models.drafts.dynamic_trees import drafted_limits, grow_trees
from medusa_train.models.drafts.eagle3_attention import TrainingAttention
from medusa_train.models.drafts.eagle3_layer import Eagle3Layer, copy_norm, layer_config
from medusa_train.models.drafts.lm_heads import LMHeadsDraft
from medusa_train.models.hf_config import final_norm
from medusa_train.models.lm_head import LMHead
from medusa_train.models.partitioned import gathered
from medusa_train.models.precision import autocast_dtype
from medusa_train.models.target_model import TargetModel
from medusa_train.models.target_states import HiddenStates, TokenRows
from medusa_train.trees.levels import levels_of
from medusa_train.trees.masks import NodeMasks
from medusa_train.trees.transformers_adapters import PromptCache
from medusa_train.trees.tree import Tree

#: Number of layers of the target model whose states are read.
NUM_STATES = 3
#: Factor on the initial weight of the norm before lm_head. A fresh draft sees the state that
#: predicts x_{t+1} but must predict x_{t+2}. The factor flattens its logits as temperature 4 does,
#: so training starts near the loss of a uniform distribution instead of confidently wrong.
CONFIDENCE_AT_START = 0.25


class Eagle3Draft(LMHeadsDraft):
    """A decoder layer that drafts one token after the other (EAGLE-3, arXiv 2503.01840).

    For the first token, it reads the states g of a low, a middle and a high layer of the target
    model. For each further token, it reads its own last output a and the last draft token:

        a_1 = Layer(E(x_{t+1}), fc[g_low ; g_middle ; g_high]_t)
        a_k = Layer(E(x_{t+k}), a_{k-1})                             for k = 2, 3, ..
        softmax(W norm(a_k)) predicts x_{t+k+1}

    x_{t+1} is the last token, the root of the tree, and x_{t+2} .. is a path of draft tokens below
    it. E is the target model's embedding. In step k, the layer attends to the keys that step 1
    computed at all positions up to t, and to the keys that steps 2 .. k computed on its own path.
    In the code, Layer is `midlayer` and W is `lm_heads[0]`.

    *Decoding* (EAGLE-3, Inference Pipeline): `extend` computes a_1 for the tokens that the last
    step accepted, `propose` a_2, a_3, ... level by level for the nodes of the tree.

    *Training* (EAGLE-3, Draft Model Training) does the same for all positions t at once, with the
    data's tokens instead of draft tokens: `train_steps` steps, each on the outputs of the step
    before ("training-time test"). So the layer is trained on the inputs that it reads when it
    drafts.

    Layer, norm and fc are those of vLLM's and SGLang's `eagle3`. The layer is Llama's for any
    target model, except that its attention reads embedding and state, each after its own norm.
    Initially fc passes g_high on, the layer is a copy of the target model's last layer where shapes
    fit, and W is a copy of lm_head. The norm before W is a copy of the target model's, times
    `CONFIDENCE_AT_START`. The paper does not specify the initialization.

    Shapes:
        d: width of the layer.
        d': width of the target model; equal to d unless `layer` changes it.
        N: number of tokens that can be drafted.
        B, T: rows and positions.
        m: nodes of a tree.

    Args:
        target_model: the model whose lm_head is copied. The draft refers to its embeddings, and
            neither saves nor trains them.
        num_heads: K, the depth of the deepest tree. The name is Medusa's; here one head drafts K
            tokens in a row.
        train_steps: steps of the training-time test.
        layers: the three layers of the target model whose outputs are read (`aux_layers`), numbered
            from 1; by default `default_layers`.
        vocab_size: N, size of a reduced vocabulary; by default all tokens.
        token_map: token ids of the reduced vocabulary, long [N].
        norm_before_residual: the layer's residual is its normalized state, as in some published
            drafts.
        norm_before_fc: one norm over the three concatenated states, before fc; the module is
            `input_norm`.
        fc_norm: a norm for each of the three states, before fc; the module has the same name.
        qk_norm: the layer's attention norms queries and keys, as Qwen3's does.
        norm_output: the next step reads norm(a_k), as lm_head does, instead of a_k.
        own_embeddings: the draft has its own embeddings, which are not trained. A layer that is
            narrower or wider than the target model (`hidden_size` in `layer`) needs them.
        layer: entries of config.json in which the layer differs from the target model's, for drafts
            of other trainers.
        dtype: dtype of the parameters; by default the target model's.

    """

    embedding: Callable[[Tensor], Tensor]

    # Construction

    def __init__(
        self,
        target_model: TargetModel,
        num_heads: int = 7,
        *,
        train_steps: int = 4,
        layers: Sequence[int] | None = None,
        vocab_size: int | None = None,
        token_map: Tensor | None = None,
        norm_before_residual: bool = False,
        qk_norm: bool = False,
        norm_before_fc: bool = False,
        fc_norm: bool = False,
        norm_output: bool = False,
        own_embeddings: bool = False,
        layer: Mapping[str, Any] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dtype = dtype or target_model.dtype
        self.max_depth = num_heads
        self.train_steps = train_steps
        self.aux_layers = tuple(layers or default_layers(target_model.num_layers))
        self.norm_output = norm_output
        self._layer_overrides = dict(layer or {})

        # 1. the layer's configuration, and the widths d and d'
        config = layer_config(target_model.config, layer)
        implementation = target_model.attention
        # target models with soft-capped scores need eager; this layer has no soft cap, so it uses
        # sdpa
        if implementation == "eager":
            implementation = "sdpa"
        config._attn_implementation = implementation
        size = config.hidden_size  # d
        target_model_size = target_model.hidden_size  # d'
        if size != target_model_size and not own_embeddings:
            raise ValueError(
                f"hidden_size {size} is not the target model's, {target_model_size}: such a draft"
                " needs embeddings of its own"
            )

        # 2. E
        self.embed_tokens: OwnEmbedding | None = None
        if own_embeddings:
            self.embed_tokens = OwnEmbedding(target_model.vocab_size, size)
            self.embedding = self.embed_tokens.look_up
        else:
            # a callable, not a module, so that the target model's table is not registered here
            self.embedding = target_model.embedding()

        # 3. fc, and the norms before it that published variants have
        eps = config.rms_norm_eps
        self.input_norm: LlamaRMSNorm | None = None
        if norm_before_fc:
            self.input_norm = LlamaRMSNorm(NUM_STATES * target_model_size, eps=eps)
        self.fc_norm: nn.ModuleList | None = None
        if fc_norm:
            norms = [LlamaRMSNorm(target_model_size, eps=eps) for _ in range(NUM_STATES)]
            self.fc_norm = nn.ModuleList(norms)
        self.fc = nn.Linear(NUM_STATES * target_model_size, size, bias=False)

        # 4. the layer, the norm after it, and W
        self.midlayer = Eagle3Layer(config, norm_before_residual, qk_norm)
        self.norm = LlamaRMSNorm(size, eps=eps)
        # `new_lm_heads` also sets token_map, softcap and scale
        self.lm_heads = self.new_lm_heads(target_model, 1, vocab_size, token_map, dtype)
        if size == target_model_size:
            if target_model.device.type != "meta":
                self._init_from(target_model)
        else:
            # no weight of the target model has the layer's width. Such a draft gets its weights from
            # a published file; it is not trained from scratch
            num_tokens = vocab_size or target_model.vocab_size  # N
            self.lm_heads = nn.ModuleList([nn.Linear(size, num_tokens, bias=False)])
        self.to(device=target_model.device, dtype=dtype)

    @torch.no_grad()
    def _init_from(self, target_model: TargetModel) -> None:
        """Initialize fc to pass g_high on, and copy the target model's last layer and norm."""
        nn.init.zeros_(self.fc.weight)
        nn.init.eye_(self.fc.weight[:, -target_model.hidden_size :])  # [0, 0, I]
        last_layer = target_model.layer(target_model.num_layers - 1)
        norm = final_norm(target_model.body)
        copied = [*last_layer.parameters()]
        if norm is not None:
            copied += norm.parameters()
        with gathered(copied):
            self.midlayer.init_from(last_layer)
            copy_norm(self.norm, norm)
        self.norm.weight.mul_(CONFIDENCE_AT_START)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings. Settings of published variants are included only if they are used."""
        settings = super().settings
        settings["num_heads"] = self.max_depth
        settings["train_steps"] = self.train_steps
        settings["layers"] = list(self.aux_layers)
        settings["norm_before_residual"] = self.midlayer.norm_before_residual
        settings["fc_norm"] = self.fc_norm is not None
        settings["norm_output"] = self.norm_output
        variants = {
            "qk_norm": hasattr(self.midlayer.self_attn, "q_norm"),
            "norm_before_fc": self.input_norm is not None,
            "own_embeddings": self.embed_tokens is not None,
        }
        for name, is_used in variants.items():
            if is_used:
                settings[name] = True
        if self._layer_overrides:
            settings["layer"] = self._layer_overrides
        return settings

    # Training

    @property
    def trained_heads(self) -> int:
        """Number of steps of the training-time test, at most K: deeper tokens are never drafted."""
        return min(self.train_steps, self.max_depth)

    def lm_head(self, k: int) -> LMHead:
        """Return W, which is the same for all steps."""
        return super().lm_head(1)

    def head_states(self, hidden_states: HiddenStates, batch: TokenRows) -> Iterator[Tensor]:
        """Yield norm(a_k) [B, T, d] for k = 1..trained_heads, given the data's tokens."""
        return self._run_steps(hidden_states, batch, self.trained_heads)

    def teacher_forced_states(
        self, hidden_states: HiddenStates, batch: TokenRows
    ) -> Iterator[Tensor]:
        """Yield norm(a_k) [B, T, d] for k = 1..max_depth, more than are trained."""
        return self._run_steps(hidden_states, batch, self.max_depth)

    def _run_steps(
        self, hidden_states: HiddenStates, batch: TokenRows, steps: int
    ) -> Iterator[Tensor]:
        """Yield norm(a_k) of all positions, [B, T, d], for k = 1..steps.

        `losses.objective` compares W norm(a_k) with x_{t+k+1}, or with the target model's
        distribution there. Gradients flow through all steps.
        """
        assert hidden_states.aux is not None
        # 1. step 1 reads the target model's states; later steps read the outputs of the step before
        states = self.combine(hidden_states.aux)  # [B, T, d]
        # the mask must have the dtype of the queries, which autocast changes
        mask_dtype = autocast_dtype(states.device.type) or states.dtype
        attend = TrainingAttention(document_mask(batch.segments, mask_dtype))
        for k in range(1, steps + 1):
            # 2. E of the data's token x_{t+k} at each t. Past the end of a document there is no
            # target, so any token will do. shift_labels(tokens, j) is x_{t+1+j}
            tokens = shift_labels(batch.tokens, k - 1, batch.segments).clamp(min=0)  # [B, T]
            e = self.embedding(tokens).to(states.dtype)  # [B, T, d]
            # 3. the layer over all positions. As in decoding, x_{t+k} gets position t + k - 1
            positions = batch.positions + (k - 1)  # [B, T]
            outputs = self.midlayer(e, states, positions, attend=attend)  # [B, T, d] a_k
            normed: Tensor = self.norm(outputs)  # [B, T, d]
            yield normed
            states = self._next_states(outputs, normed)

    def combine(self, layer_states: Tensor) -> Tensor:
        """Compute fc[g_low ; g_middle ; g_high], [B, q, 3 d'] -> [B, q, d]."""
        states = layer_states.to(self.fc.weight.dtype)
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm is not None:
            parts = states.chunk(NUM_STATES, dim=-1)  # low, middle, high: [B, q, d'] each
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            states = torch.cat(normed, dim=-1)
        combined: Tensor = self.fc(states)
        return combined

    def _next_states(self, outputs: Tensor, normed: Tensor) -> Tensor:
        """Return the state that the next step reads: a_k or norm(a_k), [B, q, d]."""
        return normed if self.norm_output else outputs

    # Decoding. The layer reads x_{t+1} together with the state at t, so the last accepted position
    # waits until the last token is known:
    #
    #     column of the cache    0         ..   t - 1        t                t + 1          ..
    #     reads                  x_1       ..   x_t          x_{t+1}, root    tokens of the tree
    #     and                    fc[g]_0   ..   fc[g]_{t-1}  fc[g]_t          a of the parent
    #                            prefill, extend                               propose
    #
    # So the root is in column t here, and in column t + 1 in the target model's KV cache. When
    # `propose` begins, the columns up to the root's are committed (`lengths` = t + 1 columns), so
    # masks of the tree have no node for the root. The layer runs at the nodes below the root that
    # have children. They are in columns t + 1, t + 2, .., and have position t + depth, where the
    # children of the root have depth 1.

    @property
    def num_caches(self) -> int:
        """One cache, for the layer."""
        return 1

    def prefill(
        self, hidden_states: HiddenStates, tokens: Tensor, caches: Sequence[PromptCache]
    ) -> None:
        """Run the layer over the new positions of the prompts, each with its next token.

        The next token of a row's last position is not known yet, so the keys and values there are
        wrong. The first `extend` writes them again: its path is this position. The padding of
        shorter rows is masked.
        """
        assert hidden_states.aux is not None
        following = tokens.roll(-1, dims=1)  # [B, T]; any token after the last position of a row
        states = self.combine(hidden_states.aux)  # [B, T, d]
        layer_inputs = self._join(following, states)  # [B, T, 2 d]
        # only keys and values are needed, so the attention may run without a mask
        read_prompts(self.midlayer, layer_inputs, caches[0])

    def extend(self, step: DraftStep) -> Tensor:
        """Compute a_1 along the accepted path, whose last next token is the last token; return a_1
        of the last accepted nodes, [B, d].

        The path is the last tree's root and the nodes accepted below it; after a prefill, it is the
        last position of the prompt. Shorter paths are right-padded to P. The next `extend`
        overwrites the keys and values of the padding and of the draft tokens.
        """
        accepted = step.accepted
        assert accepted.hidden_states.aux is not None
        layer_states = accepted.along_path(accepted.hidden_states.aux)  # [B, P, 3 d'] g of the path
        following = accepted.following(step.last_tokens)  # [B, P] the next token of each node
        states = self.combine(layer_states)  # [B, P, d]
        layer_inputs = self._join(following, states)  # [B, P, 2 d]
        cache = step.caches[0]
        outputs = cache.read_path(self.midlayer, layer_inputs, accepted.starts)  # [B, P, d]
        return accepted.last(outputs)

    def propose(self, step: DraftStep, states: Tensor) -> Proposal:
        """Fill the tree level by level; one run of the layer covers all nodes of a level that have
        children.

        Args:
            step: inputs of the step.
            states: a_1 for the last tokens, [B, d].
        """
        if self.dynamic is not None:
            return self._propose_dynamic(step, states, limits=self.dynamic)
        cache = step.caches[0]
        levels = levels_of(step.tree)
        head = self.lm_head(1)  # `lm_heads[0]` with its token map

        # 1. columns, positions and masks of `inner_nodes`: the position before the root, and the
        # nodes that have children. Each has its own column; siblings share a position
        inner_nodes = levels.inner_nodes
        starts = step.accepted.lengths - 2  # [B], t - 1; -1 after a prompt of one token
        places = torch.arange(inner_nodes.size + 1, device=starts.device)
        columns = starts[:, None] + places  # [B, 1 + inner], t - 1, t, t + 1, ..
        positions = starts[:, None] + inner_nodes.depths  # [B, 1 + inner], t + depth
        masks = levels.inner_masks(None, states.dtype)
        mask = masks.at(starts, cache.key_length)  # [B, 1, 1 + inner, key_length]

        # for each level: the tokens of its nodes, and the layer's outputs at its m inner nodes
        level_tokens = step.last_tokens[:, None]  # [B, 1]
        outputs = states[:, None]  # [B, m, d], here m = 1
        tokens = [level_tokens]
        # each level predicts the tokens of the next one. The last level predicts nothing, so the
        # layer does not run there
        for level, next_level in pairwise(levels.levels):
            # 2. the best children of each node; the head's logit transform would not change their
            # order
            normed = self.norm(outputs)  # [B, m, d]
            logits = self.lm_heads[0](normed)  # [B, m, N]
            best = logits.topk(level.width).indices  # [B, m, width]
            # 3. those that the tree has nodes for: the next level
            level_tokens = head.tokens_of(level.at_next(best))  # [B, next]
            tokens.append(level_tokens)
            if next_level is levels.levels[-1]:
                break
            # 4. the layer's input: each node's token, and the output at its parent
            next_states = self._next_states(outputs, normed)  # [B, m, d]
            parent_states = next_states[:, level.parents]  # [B, next, d]; indices into these m
            layer_inputs = self._join(
                next_level.at_inner(level_tokens), next_level.at_inner(parent_states)
            )  # [B, m, 2 d], m of the next level
            # 5. run it
            inner = slice(next_level.inner_first, next_level.inner_last)  # its m nodes
            outputs = cache.run(
                self.midlayer,
                layer_inputs,
                columns[:, inner],
                positions[:, inner],
                mask[:, :, inner],
            )  # [B, m, d]
        return Proposal(torch.cat(tokens, dim=1), step.tree)

    def _join(self, tokens: Tensor, states: Tensor) -> Tensor:
        """Return the layer's input [E ; states], [B, q] and [B, q, d] -> [B, q, 2 d]."""
        e = self.embedding(tokens).to(states.dtype)  # [B, q, d]
        return torch.cat([e, states], dim=-1)

    # Dynamic trees

    def limits(self, tree: Tree) -> TreeSize:
        """Return the limits of proposals. A dynamic tree needs room for all nodes that the layer
        runs over.
        """
        if self.dynamic is None:
            return super().limits(tree)
        return drafted_limits(self.dynamic)

    def _propose_dynamic(self, step: DraftStep, states: Tensor, limits: TreeSize) -> Proposal:
        """Propose one tree per row, see `grow_trees`, which calls the two functions below.

        Args:
            step: inputs of the step.
            states: a_1 for the last tokens, [B, d].
            limits: size and depth of the trees.
        """
        cache = step.caches[0]
        head = self.lm_head(1)  # `lm_heads[0]` with its token map and logit transform
        lengths = step.accepted.lengths  # [B], t + 1

        def guess_children(outputs: Tensor) -> tuple[Tensor, Tensor]:
            """Return the logits of the children of m nodes, [B, m, N], and the states of these
            nodes that the layer reads when it runs over the children, [B, m, d].
            """
            normed = self.norm(outputs)  # [B, m, d]
            # with the logit transform, because trees grow by probabilities multiplied along a path
            raw_logits = self.lm_heads[0](normed)  # [B, m, N]
            logits = head.transform(raw_logits)
            return logits, self._next_states(outputs, normed)

        def run_nodes(tokens: Tensor, parent_states: Tensor, depth: int, visible: Tensor) -> Tensor:
            """Run the layer over m nodes: tokens [B, m], parent_states [B, m, d] -> [B, m, d].

            Args:
                tokens, parent_states: the layer's inputs.
                depth: depth of the nodes; 1: children of the root.
                visible: which of all nodes run so far each node attends to, [B, m, num_run]; the
                    last m are these nodes themselves.
            """
            # their columns are after the columns of the nodes that were run before
            num_nodes = tokens.shape[1]
            num_run = visible.shape[2]
            places = torch.arange(num_run - num_nodes, num_run, device=lengths.device)
            columns = lengths[:, None] + places  # [B, m]
            positions = lengths[:, None].expand(-1, num_nodes) + (depth - 1)  # [B, m], t + depth
            masks = NodeMasks(visible, depths=None, window=None, dtype=parent_states.dtype)
            mask = masks.at(lengths, cache.key_length)  # [B, 1, m, key_length]
            layer_inputs = self._join(tokens, parent_states)  # [B, m, 2 d]
            return cache.run(self.midlayer, layer_inputs, columns, positions, mask)  # [B, m, d]

        return grow_trees(step.last_tokens, states, limits, head, guess_children, run_nodes)


class OwnEmbedding(nn.Module):
    """A draft's own embeddings [V, d]: frozen, saved with the draft, and without the target model's
    scale. They are zeros until the weights of a published draft are loaded.
    """

    weight: Tensor

    def __init__(self, vocab_size: int, size: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(vocab_size, size))

    def look_up(self, tokens: Tensor) -> Tensor:
        """Return the vectors of token ids, long [...] -> [..., d]."""
        return nn.functional.embedding(tokens, self.weight)
