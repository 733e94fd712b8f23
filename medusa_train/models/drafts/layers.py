"""A decoder layer of the backbone's own class that belongs to a draft, and its cache. Knows no draft and no loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from medusa_train.errors import BackboneError
from medusa_train.models.backbone import Backbone
from medusa_train.models.features import capture_inputs
from medusa_train.models.quantization import plain_weight
from medusa_train.trees.kv_cache import BatchCache, TreeCache
from medusa_train.trees.masks import apply_sliding_window, document_mask, mask_with_prefix


class DraftLayer(nn.Module):
    """One causal decoder layer as the backbone's are, randomly started: Hydra's prefix layer, Amphista's stages.

    It is a stock body of one layer, run on states in place of embeddings, so that each family's rotary angles, masks
    and norms are its own forward's business. Where layers differ in their attention, it is one that sees everything.

    Args:
        backbone: whose kind of layer it is; nothing of it is kept.
        final_norm: whether a norm of its own, of the kind of the backbone's final one, follows.
        mlp_size: width of the MLP; None: as wide as the backbone's. 0: leave it out, and the norms that serve it
            alone: norm, attention, residual (Kangaroo).
        dtype: of the parameters; by default the backbone's.

    Raises:
        BackboneError: a body of this architecture can't be had with one layer, or does more to its input.
    """

    def __init__(
        self,
        backbone: Backbone,
        *,
        final_norm: bool = True,
        mlp_size: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        backbone.layer(0)  # says it better where there is none
        config, self.window = _one_layer(backbone)
        try:
            if mlp_size:
                _ = config.intermediate_size  # or it would be set for nothing
                config.intermediate_size = mlp_size
            body: Any = type(backbone.body)(config)
            del body.embed_tokens
            if not final_norm:
                body.norm = nn.Identity()
            if mlp_size == 0:
                _leave_mlp_out(body, backbone.hidden_size)
            with torch.no_grad(), capture_inputs(body.layers[0]) as seen:
                probe = torch.randn(1, 2, backbone.hidden_size)
                body(inputs_embeds=probe, use_cache=False)
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise BackboneError(
                f"a draft can't have a layer of {type(backbone.body).__name__}'s kind: {error}"
            ) from error
        if not torch.equal(seen[0], probe):
            raise BackboneError(f"{type(backbone.body).__name__} changes states on their way to its first layer")
        self.body = body
        self.to(device=backbone.device, dtype=dtype or backbone.dtype)

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> DraftLayer:
        """Keep the angles' frequencies as they are through `.to(dtype)`: in bfloat16 they would be wrong by radians."""
        exact = dict(self.body.named_buffers(remove_duplicate=False))  # one tensor may have two names
        super()._apply(fn, recurse)
        for name, moved in list(self.body.named_buffers(remove_duplicate=False)):
            owner, _, leaf = name.rpartition(".")
            self.body.get_submodule(owner)._buffers[leaf] = exact[name].to(moved.device)
        return self

    def forward(self, states: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
        """Training: [B, T, d] -> [B, T, d], each document as in a row of its own.

        Args:
            positions, segments: [B, T], see `models.features.TokenRows`.
        """
        mask = document_mask(segments, _product_dtype(states))
        if mask is not None:
            mask = apply_sliding_window(mask, positions, 0, self.window)
        return self._run(states, positions, mask, None)

    @torch.no_grad()
    def match_rms(self, states: Tensor) -> None:
        """Let the final norm begin at the size of `states` [..., d], where it would begin at 1."""
        weight = getattr(self.body.norm, "weight", None)
        if weight is None:
            return
        probe = torch.randn_like(states, dtype=weight.dtype)
        weight.zero_()  # some families' norms multiply by 1 + weight
        offset = self.body.norm(probe).square().mean().sqrt()
        weight.fill_(float(states.float().square().mean().sqrt() - offset))

    def extend(self, states: Tensor, positions: Tensor, cache: TreeCache, mask: Tensor | None = None) -> Tensor:
        """Decoding: q more positions [B, q, d] behind the committed ones of `cache`, where they stay pending.

        Args:
            positions: [B, q] position ids. cache: of one layer.
            mask: additive [1 or B, 1, q, length + q], windows not yet laid over it; None: causal.
        """
        if mask is not None:
            mask = apply_sliding_window(mask, positions, cache.length, self.window)
        return self._run(states, positions, mask, cache)

    def _run(self, states: Tensor, positions: Tensor, mask: Tensor | None, cache: TreeCache | None) -> Tensor:
        out = self.body(
            inputs_embeds=states,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=cache is not None,
        )
        return out.last_hidden_state


class LayerCache:
    """The cache of a `DraftLayer` over B rows, which holds exactly the committed positions of each (SPEC 3).

    Prefill is the first `append`, of the whole prompts; after a verification pass the accepted nodes follow.

    Args:
        rows: B. capacity: positions to allocate; the capacity of the backbone's own cache is enough.
    """

    def __init__(self, rows: int, capacity: int) -> None:
        self._many = BatchCache(1, capacity) if rows > 1 else None
        self._cache: TreeCache = self._many or TreeCache(1, capacity)
        if self._many is not None:
            self._many.lengths = [0] * rows

    def append(self, layer: DraftLayer, states: Tensor, counts: Sequence[int]) -> Tensor:
        """Run `layer` over q more positions of each row, [B, q, d] -> [B, q, d], and keep the first `counts[b]`.

        Args:
            counts: 1 .. q for each row; what stands behind is padding, and so is what is returned for it.
        """
        cache, q = self._cache, states.shape[1]
        places = torch.arange(q, device=states.device)
        if self._many is None:
            out = layer.extend(states, (places + cache.length)[None], cache)
            cache.commit(counts[0])
            return out
        positions = places + torch.tensor(self._many.lengths, device=states.device)[:, None]
        if not cache.length:
            out = layer.extend(states, positions, cache)
            self._many.commit_rows(counts)
            return out
        out = layer.extend(states, positions, cache, self._mask(self._many, states))
        self._many.keep_rows([range(count) for count in counts])
        return out

    def select_rows(self, rows: Sequence[int]) -> LayerCache:
        """Go on with `rows` alone, see `BatchCache.select_rows`."""
        if self._many is not None:
            self._many.select_rows(rows)
        return self

    @staticmethod
    def _mask(cache: BatchCache, states: Tensor) -> Tensor:
        """Each row's own committed positions, and among the new ones the earlier: [B, 1, q, length + q]."""
        q = states.shape[1]
        causal = states.new_full((q, q), float("-inf")).triu(1)
        return mask_with_prefix(cache, causal)


def gather_paths(states: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
    """The states [B, q, d] at each row's own nodes, of [B, n + 1, d]; shorter paths are padded behind."""
    longest = max(len(path) for path in paths)
    if len(paths) == 1 and paths[0][-1] == longest - 1:
        return states[:, :longest]
    places = torch.tensor([[*path, *[path[-1]] * (longest - len(path))] for path in paths], device=states.device)
    return states[torch.arange(len(paths), device=states.device)[:, None], places]


class _NoMLP(nn.Module):
    """Stands where a layer's MLP would: adds nothing to the residual."""

    def forward(self, states: Tensor) -> Tensor:
        return torch.zeros_like(states)


def _leave_mlp_out(body: Any, hidden_size: int) -> None:
    """Take the MLP out, and the norms before and behind it: what a probe's gradient no longer reaches."""
    layer = body.layers[0]
    if not isinstance(getattr(layer, "mlp", None), nn.Module):
        raise AttributeError("its layers have no mlp to leave out")
    layer.mlp = _NoMLP()
    probe = torch.randn(2, 1, 3, hidden_size)
    with torch.enable_grad():
        (body(inputs_embeds=probe[0], use_cache=False).last_hidden_state * probe[1]).sum().backward()
    for name, part in list(layer.named_children()):
        if not any(p.grad is not None and bool(p.grad.any()) for p in part.parameters()):
            setattr(layer, name, part if name == "mlp" else nn.Identity())
    body.zero_grad()


def _one_layer(backbone: Backbone) -> tuple[Any, int | None]:
    """The backbone's config for a body of one layer that feeds its input on as it is, and that layer's window."""
    config = copy.deepcopy(backbone.config)
    kinds = backbone.layer_types
    kind = "full_attention" if "full_attention" in kinds else "sliding_attention"
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = [kind]
    if getattr(config, "no_rope_layers", None):  # SmolLM3: 1 where a layer has angles
        config.no_rope_layers = [1]
    config.vocab_size, config.pad_token_id = 1, None
    if hasattr(config, "embedding_multiplier"):
        config.embedding_multiplier = 1.0
    config._attn_implementation = backbone.attention
    return config, backbone.window if kind == "sliding_attention" else None


def _product_dtype(states: Tensor) -> torch.dtype:
    kind = states.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype


#: A parameter to begin anew, and the weight of the same name.
Pair = tuple[nn.Parameter, Tensor]


@torch.no_grad()
def init_from_layer(layer: nn.Module, like: nn.Module) -> None:
    """Copy the weights of `like` into `layer`, a decoder layer of its kind whose MLP may be narrower or left out.

    A narrower MLP keeps the units whose weights, coming in and going out, are largest; a wider one, or one of experts,
    stays as it was, and so does what `like` has not under the same name. Quantised weights are dequantised.
    """
    theirs = dict(like.named_modules())
    pairs: list[Pair] = []
    for path, module in layer.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            weight = plain_weight(theirs[path], name) if path in theirs else None
            if weight is not None:
                pairs.append((parameter, weight))
    same = [(parameter, weight) for parameter, weight in pairs if parameter.shape == weight.shape]
    narrower = [(parameter, weight) for parameter, weight in pairs if parameter.shape != weight.shape]
    for parameter, weight in (*same, *_narrowed(narrower)):
        parameter.copy_(weight)


def _narrowed(pairs: Sequence[Pair]) -> Iterator[Pair]:
    """The same parameters with the strongest units of an MLP's weights.

    Coming in [n * units, d] (n matrices in one, gate and up for instance) or a bias [n * units]; going out [d, units].
    """
    out = [(parameter, weight) for parameter, weight in pairs if weight.dim() == 2 and len(parameter) == len(weight)]
    if len(out) != 1 or any(weight.dim() > 2 for _, weight in pairs):
        return
    kept, units = out[0][0].shape[1], out[0][1].shape[1]
    if kept > units:
        return
    strength = out[0][1].float().norm(dim=0)
    coming = [(parameter, weight) for parameter, weight in pairs if parameter is not out[0][0]]
    for _, weight in coming:
        if weight.dim() == 2:
            strength = strength * weight.float().view(-1, units, weight.shape[1]).norm(dim=2).prod(dim=0)
    best = strength.topk(kept).indices.sort().values
    yield out[0][0], out[0][1][:, best]
    for parameter, weight in coming:
        yield parameter, weight.unflatten(0, (-1, units))[:, best].flatten(0, 1)
