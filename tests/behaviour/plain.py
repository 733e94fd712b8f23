"""Drafts, losses and training as their papers write them: one document at a time, whole rows of
logits, torch's autograd. Nothing of the package is imported; weights come from the files of a run.

`head_logits` is all that training, validation and decoding need of a draft: the logits [T, V] of
head k at each position t of a text, which guess the token t + k + 1, given the text's own tokens up
to t + k.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import embedding, linear, silu
from transformers import AutoModelForCausalLM

from tests.behaviour.world import read_json

Weights = dict[str, Tensor]


def load_model(directory: Path) -> Any:
    """Load a model of transformers in float64."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    return model.eval().requires_grad_(False)


@dataclass
class States:
    """What a model computes of a text: its last states [T, d], and those after each layer."""

    last: Tensor
    after: Sequence[Tensor]
    logits: Tensor


def run_model(
    model: Any, tokens: Sequence[int], weights: Mapping[str, Tensor] | None = None
) -> States:
    """Run a model over one text; `weights` replace its own."""
    inputs = torch.tensor([list(tokens)])
    options = {"use_cache": False, "output_hidden_states": True}
    if weights is None:
        out = model(inputs, **options)
    else:
        out = functional_call(model, dict(weights), (inputs,), options)
    hidden = [states[0] for states in out.hidden_states]
    return States(hidden[-1], hidden, out.logits[0])


def read_weights(path: Path) -> Weights:
    return {
        name: tensor.double() if tensor.is_floating_point() else tensor.long()
        for name, tensor in load_file(path).items()
    }


def rms_norm(x: Tensor, weight: Tensor | float = 1.0, eps: float = 1e-6) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def rotate(x: Tensor, positions: Tensor, theta: float = 10000.0) -> Tensor:
    """Rotate x [T, heads, D] by its positions [T], in Llama's layout of halves."""
    half = x.shape[-1] // 2
    angles = positions[:, None].double() * theta ** (-torch.arange(half).double() / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def attention(x: Tensor, w: Weights, heads: int, groups: int, window: int | None = None) -> Tensor:
    """Causal attention over one text [T, d], with the output projection; with a window over as many
    positions, the own one included.
    """
    q, k, v = (
        linear(x, w[f"{name}_proj.weight"]).unflatten(-1, (count, -1))
        for name, count in (("q", heads), ("k", groups), ("v", groups))
    )
    places = torch.arange(len(x))
    q, k = rotate(q, places), rotate(k, places)
    k, v = (z.repeat_interleave(heads // groups, dim=1) for z in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    hidden = places[:, None] < places
    if window is not None:
        hidden |= places[:, None] - places >= window
    seen = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return linear(torch.einsum("hqk,khd->qhd", seen, v).flatten(1), w["o_proj.weight"])


def gated_mlp(x: Tensor, w: Weights) -> Tensor:
    gate, up = linear(x, w["gate_proj.weight"]), linear(x, w["up_proj.weight"])
    return linear(silu(gate) * up, w["down_proj.weight"])


def part(weights: Weights, prefix: str) -> Weights:
    """Return the weights below a name."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in weights.items()
        if name.startswith(prefix)
    }


def decoder_layer(
    x: Tensor, w: Weights, heads: int, groups: int, window: int | None = None
) -> Tensor:
    """Run Llama's decoder layer over one text; parts without weights are left out."""
    if "input_layernorm.weight" in w:
        read = rms_norm(x, w["input_layernorm.weight"])
        x = x + attention(read, part(w, "self_attn."), heads, groups, window)
    if "post_attention_layernorm.weight" in w:
        read = rms_norm(x, w["post_attention_layernorm.weight"])
        x = x + gated_mlp(read, part(w, "mlp."))
    return x


# Drafts


@dataclass
class PlainDraft:
    """A draft from the files that a run writes, on a Llama.

    Attributes:
        settings: its config.json. weights: by their names in the file.
        model: the model that it drafts for.
        token_map: long [N], the tokens that its logits stand for; None for all.
    """

    model: Any
    settings: dict[str, Any]
    weights: Weights
    token_map: Tensor | None = None

    @classmethod
    def read(cls, heads: Path, model: Any) -> PlainDraft:
        """Read a run's directory `heads`."""
        (path,) = heads.glob("*.safetensors")
        weights = read_weights(path)
        token_map = weights.pop("token_map", None)
        return cls(model, read_json(heads / "config.json"), weights, token_map)

    @property
    def kind(self) -> str:
        return str(self.settings.get("draft", "medusa"))

    @property
    def num_heads(self) -> int:
        names = ("medusa_num_heads", "num_heads", "max_draft_tokens")
        return next(int(self.settings[name]) for name in names if name in self.settings)

    @property
    def trained_heads(self) -> int:
        """How many of the heads have a loss."""
        if self.kind == "kangaroo":
            return 1
        if self.kind == "eagle3":
            return int(self.settings["train_steps"])
        return self.num_heads

    def head_logits(self, tokens: Sequence[int], states: States) -> list[Tensor]:
        """Return the logits [T, V] of each head over one text."""
        text = torch.tensor(list(tokens))
        return list(_HEADS[self.kind](self, text, states))

    def matrix(self, name: str) -> Tensor:
        """Return an output matrix of its own, or the model's."""
        if name in self.weights:
            return self.weights[name]
        shared: Tensor = self.model.get_output_embeddings().weight
        return shared if self.token_map is None else shared[self.token_map]

    def embed(self, tokens: Tensor, normalized: bool) -> Tensor:
        vectors: Tensor = self.model.get_input_embeddings().weight[tokens]
        return rms_norm(vectors, eps=1e-12) if normalized else vectors

    @property
    def shape(self) -> tuple[int, int]:
        """Return the numbers of heads of attention: of queries, and of keys."""
        config = self.model.config
        return config.num_attention_heads, config.num_key_value_heads

    @property
    def window(self) -> int | None:
        """Return the sliding window of a layer that is like the model's."""
        window: int | None = getattr(self.model.config, "sliding_window", None)
        return window


def ahead(tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the tokens `count` positions later, [T], and where there is none."""
    later = tokens.roll(-count)
    missing = torch.arange(len(tokens)) >= len(tokens) - count
    return later, missing


def transform(logits: Tensor, config: Any) -> Tensor:
    """Apply what a family does to its logits: Granite divides them, Gemma 2 caps them softly."""
    logits = logits / getattr(config, "logits_scaling", 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


def _medusa(draft: PlainDraft, text: Tensor, states: States) -> Iterator[Tensor]:
    w = draft.weights
    layers = int(draft.settings.get("medusa_num_layers", 1))
    for k in range(1, draft.num_heads + 1):
        x = states.last
        for j in range(layers):
            name = f"{k - 1}.{j}.linear"
            x = x + silu(linear(x, w[f"{name}.weight"], w[f"{name}.bias"]))
        logits = linear(x, draft.matrix(f"{k - 1}.{layers}.weight"))
        logits = transform(logits, draft.model.config)
        if "markov.embedding.weight" in w:
            before, _ = ahead(text, k)
            logits = logits + linear(
                embedding(before, w["markov.embedding.weight"]), w["markov.output.weight"]
            )
        yield logits


def _hydra(draft: PlainDraft, text: Tensor, states: States) -> Iterator[Tensor]:
    w, settings = draft.weights, draft.settings
    x = states.last
    d = x.shape[-1]
    if settings["prefix_layer"]:
        x = decoder_layer(x, part(w, "prefix.body.layers.0."), *draft.shape, draft.window)
        x = rms_norm(x, w["prefix.body.norm.weight"])
    for k in range(1, draft.num_heads + 1):
        later, missing = ahead(text, k)
        vectors = draft.embed(later, settings["normalize_embeddings"])
        x = torch.cat([x, vectors.masked_fill(missing[:, None], 0.0)], dim=-1)
        matrix, bias = w[f"blocks.{k - 1}.0.linear.weight"], w[f"blocks.{k - 1}.0.linear.bias"]
        y = linear(x, matrix[:d], bias[:d]) + silu(linear(x, matrix[d:], bias[d:]))
        for j in range(1, settings["num_layers"]):
            name = f"blocks.{k - 1}.{j}.linear"
            y = y + silu(linear(y, w[f"{name}.weight"], w[f"{name}.bias"]))
        yield linear(y, w[f"lm_heads.{k - 1}.weight"])


def _amphista(draft: PlainDraft, text: Tensor, states: States) -> Iterator[Tensor]:
    w, settings = draft.weights, draft.settings
    later, _ = ahead(text, 1)
    e = draft.embed(later, settings["normalize_embeddings"])
    x, stages = states.last, []
    for i in range(max(settings["adaptation_layers"], int(settings["sampled_token"]))):
        if settings["sampled_token"]:
            x = linear(torch.cat([x, e], dim=-1), w[f"fc.{i}.weight"])
        if settings["adaptation_layers"]:
            x = decoder_layer(x, part(w, f"layers.{i}.body.layers.0."), *draft.shape, draft.window)
        stages.append(x)
    stages = stages or [x]
    count = draft.num_heads
    vectors = []
    for k in range(count):
        read = stages[0] if k < count // 2 else stages[-1]
        vectors.append(read + silu(linear(read, w[f"mlps.{k}.weight"], w[f"mlps.{k}.bias"])))
    u = torch.stack(vectors, dim=1)  # [T, K, d]
    if "auto.positions" in w:
        u = u + w["auto.positions"]
    for j in range(settings["auto_blocks"]):
        block = part(w, f"auto.blocks.{j}.")
        q, k_, v = (
            z.unflatten(-1, (draft.shape[0], -1))
            for z in linear(rms_norm(u, block["norm.weight"]), block["qkv.weight"]).chunk(3, -1)
        )
        scores = torch.einsum("tqhd,tkhd->thqk", q, k_) / math.sqrt(q.shape[-1])
        mixed = torch.einsum("thqk,tkhd->tqhd", scores.softmax(-1), v).flatten(2)
        u = u + linear(mixed, block["out.weight"])
    for k in range(count):
        yield linear(u[:, k], w[f"lm_heads.{k}.weight"])


def _kangaroo(draft: PlainDraft, text: Tensor, states: States) -> Iterator[Tensor]:
    """One predictor of the next token; head k is what it says k positions later."""
    w = part(draft.weights, "adapter.body.")
    x = decoder_layer(
        states.after[draft.settings["exit_layer"]],
        part(w, "layers.0."),
        *draft.shape,
        draft.window,
    )
    logits = linear(rms_norm(x, w["norm.weight"]), draft.matrix("own_lm_head.weight"))
    for k in range(1, draft.num_heads + 1):
        yield logits.roll(-k, dims=0)


def _eagle3(draft: PlainDraft, text: Tensor, states: States) -> Iterator[Tensor]:
    """Step by step, each on its own output; a step sees the keys of the first one up to t, and
    those of later ones at t alone.
    """
    w = draft.weights
    layer, self_attention = part(w, "midlayer."), part(w, "midlayer.self_attn.")
    heads, groups = draft.shape
    length = len(text)
    places = torch.arange(length)
    read = [states.after[i] for i in draft.settings["layers"]]
    x = linear(torch.cat(read, dim=-1), w["fc.weight"])
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for k in range(1, draft.num_heads + 1):
        later, missing = ahead(text, k)
        e = draft.embed(later, False).masked_fill(missing[:, None], 0.0)
        both = torch.cat(
            [
                rms_norm(e, layer["input_layernorm.weight"]),
                rms_norm(x, layer["hidden_norm.weight"]),
            ],
            dim=-1,
        )
        q, key, value = (
            linear(both, self_attention[f"{name}_proj.weight"]).unflatten(-1, (count, -1))
            for name, count in (("q", heads), ("k", groups), ("v", groups))
        )
        q, key = rotate(q, places + k - 1), rotate(key, places + k - 1)
        keys.append(key.repeat_interleave(heads // groups, dim=1))
        values.append(value.repeat_interleave(heads // groups, dim=1))
        scale = math.sqrt(q.shape[-1])
        first = torch.einsum("qhd,khd->qhk", q, keys[0]) / scale  # [T, heads, T]
        first = first.masked_fill((places[:, None] < places)[:, None], -math.inf)
        own = [(q * later_keys).sum(-1, keepdim=True) / scale for later_keys in keys[1:]]
        seen = torch.cat([first, *own], dim=-1).softmax(-1)
        mixed = torch.einsum("qhk,khd->qhd", seen[..., :length], values[0])
        for j, later_values in enumerate(values[1:]):
            mixed = mixed + seen[..., length + j, None] * later_values
        x = x + linear(mixed.flatten(1), self_attention["o_proj.weight"])
        x = x + gated_mlp(
            rms_norm(x, layer["post_attention_layernorm.weight"]), part(layer, "mlp.")
        )
        yield linear(rms_norm(x, w["norm.weight"]), draft.matrix("lm_heads.0.weight"))


def _dflash(draft: PlainDraft, text: Tensor, states: States) -> Iterator[Tensor]:
    """A block behind each position t: the token at t + 1, then masks. Each slot sees the states up
    to t and the slots before it, within its window.
    """
    w, settings = draft.weights, draft.settings
    heads, groups = draft.shape
    read = [states.after[i] for i in settings["layers"]]
    context = rms_norm(linear(torch.cat(read, dim=-1), w["fc.weight"]), w["hidden_norm.weight"])
    later, _ = ahead(text, 1)
    masks = torch.full((draft.num_heads,), settings["mask_token_id"])
    blocks = []
    for t in range(len(text)):
        x = draft.embed(torch.cat([later[t : t + 1], masks]), False)  # [K + 1, d]
        slots = t + 1 + torch.arange(len(x))
        places = torch.cat([torch.arange(t + 1), slots])
        hidden = (places > slots[:, None]) | (places <= slots[:, None] - settings["window"])
        for i in range(settings["num_layers"]):
            layer = part(w, f"layers.{i}.")
            own = part(layer, "self_attn.")
            normed = rms_norm(x, layer["input_layernorm.weight"])
            seen = torch.cat([context[: t + 1], normed])
            q = linear(normed, own["q_proj.weight"]).unflatten(-1, (heads, -1))
            k = linear(seen, own["k_proj.weight"]).unflatten(-1, (groups, -1))
            v = linear(seen, own["v_proj.weight"]).unflatten(-1, (groups, -1))
            q = rotate(rms_norm(q, own["q_norm.weight"]), slots)
            k = rotate(rms_norm(k, own["k_norm.weight"]), places)
            k, v = (z.repeat_interleave(heads // groups, dim=1) for z in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
            weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
            mixed = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
            x = x + linear(mixed, own["o_proj.weight"])
            x = x + gated_mlp(
                rms_norm(x, layer["post_attention_layernorm.weight"]), part(layer, "mlp.")
            )
        blocks.append(rms_norm(x, w["norm.weight"])[1:])
    for slot in torch.stack(blocks).unbind(1):
        yield linear(slot, draft.matrix("lm_head.weight"))


_HEADS: dict[str, Callable[[PlainDraft, Tensor, States], Iterator[Tensor]]] = {
    "medusa": _medusa,
    "hydra": _hydra,
    "amphista": _amphista,
    "kangaroo": _kangaroo,
    "eagle3": _eagle3,
    "dflash": _dflash,
}


# Losses


@dataclass(frozen=True)
class Document:
    """A tokenized chat, and which of its tokens are supervised."""

    tokens: list[int]
    supervised: list[bool]


@dataclass(frozen=True)
class HeadsLoss:
    """`weight * sum_k decay**k * L_k`; the teacher's distribution has the part `soft` of a target."""

    decay: float
    soft: float = 0.0
    weight: float = 1.0


def targets_of(document: Document, k: int) -> list[tuple[int, int]]:
    """Return (position, token) of each target of head k; k = 0 is the language model."""
    found = []
    for t in range(len(document.tokens) - k - 1):
        if document.supervised[t + k + 1]:
            found.append((t, document.tokens[t + k + 1]))
    return found


@dataclass
class Sums:
    """Sums of a term over its targets."""

    losses: list[Tensor] = field(default_factory=list)
    correct: int = 0
    count: int = 0

    def mean(self) -> Tensor:
        return (
            torch.stack(self.losses).mean() if self.losses else torch.zeros((), dtype=torch.float64)
        )


def soft_cross_entropy(logits: Tensor, index: int, soft: float, teacher: Tensor | None) -> Tensor:
    """Cross-entropy of one position against a mixture of its token and the teacher's distribution."""
    log_p = logits.log_softmax(-1)
    loss = -(1.0 - soft) * log_p[index]
    if soft and teacher is not None:
        loss = loss - soft * (teacher.softmax(-1) * log_p).sum()
    return loss


def head_terms(
    draft: PlainDraft,
    documents: Sequence[Document],
    loss: HeadsLoss,
    run: Callable[[Sequence[int]], States],
    run_teacher: Callable[[Sequence[int]], States] | None = None,
) -> list[Sums]:
    """Return the sums of each trained head over all documents."""
    heads = [Sums() for _ in range(draft.trained_heads)]
    kept = None if draft.token_map is None else draft.token_map.tolist()
    for document in documents:
        states = run(document.tokens)
        teacher = (run_teacher or run)(document.tokens).logits.detach()
        if draft.token_map is not None:
            teacher = teacher[:, draft.token_map]
        logits = draft.head_logits(document.tokens, states)
        for k, sums in enumerate(heads, start=1):
            for t, token in targets_of(document, k):
                if draft.kind == "dflash" and not document.supervised[t + 2]:
                    continue  # blocks begin where their first guess has a target
                sums.count += 1
                if kept is not None and token not in kept:
                    continue
                index = token if kept is None else kept.index(token)
                own = logits[k - 1][t]
                sums.correct += int(own.argmax()) == index
                sums.losses.append(soft_cross_entropy(own, index, loss.soft, teacher[t + k]))
    return heads


# Training


def adamw(
    weights: Weights,
    gradients: Mapping[str, Tensor],
    moments: dict[str, tuple[Tensor, Tensor]],
    step: int,
    lr: Mapping[str, float],
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-3,
    decay: float = 0.0,
) -> None:
    """Step AdamW in place; weight decay acts on matrices only."""
    for name, weight in weights.items():
        gradient = gradients[name]
        mean, square = moments.get(name, (torch.zeros_like(weight), torch.zeros_like(weight)))
        mean = betas[0] * mean + (1 - betas[0]) * gradient
        square = betas[1] * square + (1 - betas[1]) * gradient**2
        moments[name] = (mean, square)
        corrected = mean / (1 - betas[0] ** step)
        root = (square / (1 - betas[1] ** step)).sqrt() + eps
        with torch.no_grad():
            if weight.dim() > 1:
                weight *= 1 - lr[name] * decay
            weight -= lr[name] * corrected / root


def clip(gradients: dict[str, Tensor], limit: float) -> float:
    """Scale gradients to a norm of at most `limit`; return the norm before."""
    norm = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
    if limit and norm > limit:
        for name in gradients:
            gradients[name] = gradients[name] * (limit / norm)
    return norm


def cosine(step: int, total: int, warmup: int = 0, lowest: float = 0.0) -> float:
    """Return the factor on the learning rate in `step`, counted from 0."""
    if step < warmup:
        return step / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return lowest + (1 - lowest) * 0.5 * (1 + math.cos(math.pi * progress))
