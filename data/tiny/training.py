"""Training the tiny backbone: two optimizers, one schedule, and checkpoints that a later run goes on from.

Knows nothing of where the text comes from: an epoch is a function from its number to encoded chats.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import torch
from batches import Epoch, stream, to_tensors
from lookahead import Lookahead
from losses import held_out_losses, hidden_states, token_losses
from recipe import Recipe
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaForCausalLM
from vocabulary import BOS, EOS, PAD_ID, SPECIAL, Encoded


def build_model(recipe: Recipe) -> LlamaForCausalLM:
    """A freshly initialised model; what writes into the residual stream starts at zero."""
    torch.manual_seed(recipe.seed)
    model = LlamaForCausalLM(recipe.config())
    for layer in model.model.layers:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def build_optimizers(model: LlamaForCausalLM, lookahead: Lookahead, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings, unembedding, norms and lookahead blocks."""
    matrices, norms, tables = [], [], []
    for name, parameter in model.named_parameters():
        group = tables if "embed" in name or "lm_head" in name else matrices if parameter.ndim == 2 else norms
        group.append(parameter)
    assert len(matrices) == 7 * recipe.layers, "every matrix inside a layer goes to Muon"
    return [
        torch.optim.Muon(matrices, lr=recipe.muon_lr, weight_decay=recipe.muon_decay, momentum=0.95),
        torch.optim.AdamW(
            [
                {"params": tables, "weight_decay": 0.01},
                {"params": norms, "weight_decay": 0.0},
                {"params": list(lookahead.parameters()), "weight_decay": 0.01},
            ],
            lr=recipe.adam_lr,
            betas=(0.9, 0.95),
        ),
    ]


class Run:
    """A training run: model, optimizers, step. Goes on from `checkpoint` where that exists."""

    def __init__(self, recipe: Recipe, checkpoint: Path, device: torch.device) -> None:
        self.recipe, self.checkpoint, self.device = recipe, checkpoint, device
        self.model = build_model(recipe).to(device).train()
        self.lookahead = Lookahead(recipe.hidden).to(device)
        self.optimizers = build_optimizers(self.model, self.lookahead, recipe)
        self.step = 0
        self.kept: dict[str, dict[str, Tensor]] = {}  # named copies of the weights, saved with the rest
        if checkpoint.exists():
            self._load()

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        tensors |= {f"lookahead.{name}": value for name, value in self.lookahead.state_dict().items()}
        for label, weights in self.kept.items():
            tensors |= {f"kept.{label}.{name}": value for name, value in weights.items()}
        for number, optimizer in enumerate(self.optimizers):
            for index, state in optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer.{number}.{index}.{key}": value for key, value in state.items()}
        return tensors

    def save(self) -> None:
        """Write weights, optimizer state and step, atomically."""
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        partial = self.checkpoint.with_suffix(".partial")
        save_file({k: v.contiguous() for k, v in self._tensors().items()}, partial, {"step": str(self.step)})
        os.replace(partial, self.checkpoint)

    def _load(self) -> None:
        with safe_open(self.checkpoint, "pt") as file:
            self.step = int(file.metadata()["step"])
        tensors = load_file(self.checkpoint, device=str(self.device))
        for prefix, module in (("model.", self.model), ("lookahead.", self.lookahead)):
            weights = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
            if weights:  # a checkpoint from before the lookahead began need not hold it
                module.load_state_dict(weights)
        for key, value in tensors.items():
            if key.startswith("kept."):
                _, label, name = key.split(".", 2)
                self.kept.setdefault(label, {})[name] = value
        for number, optimizer in enumerate(self.optimizers):
            state: dict[int, dict[str, Tensor]] = {}
            for key, value in tensors.items():
                if key.startswith(f"optimizer.{number}."):
                    _, _, index, name = key.split(".", 3)
                    state.setdefault(int(index), {})[name] = value
            optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})

    def update(self, batches: Sequence[Sequence[Encoded]]) -> tuple[float, int]:
        """One optimizer step over micro-batches: (next-token loss in nats per counted token, tokens read)."""
        recipe = self.recipe
        ahead = recipe.lookahead_weight if self.step >= recipe.lookahead_from * recipe.steps else 0.0
        rng = Random(f"lookahead {recipe.seed} {self.step}")
        torch.manual_seed(recipe.seed * 1_000_003 + self.step)  # dropout is the same after a resume
        weight = recipe.question_weight if self.step < recipe.answers_only_from * recipe.steps else 0.0
        loaded = [to_tensors(batch, self.device) for batch in batches]
        by_kind = torch.tensor([0.0, weight, 1.0], device=self.device)
        weights = [by_kind[kinds[:, 1:].long()] for _, kinds in loaded]
        total = sum(float(w.sum()) for w in weights)
        loss = 0.0
        for (ids, _), weighting in zip(loaded, weights, strict=True):
            with torch.autocast(self.device.type, torch.bfloat16):
                hidden = hidden_states(self.model, ids, recipe.embedding_dropout)
                part = (token_losses(self.model, hidden, ids) * weighting).sum() / total
                further = self.lookahead.losses(hidden, self.model.lm_head, ids, weighting, rng) if ahead else 0.0
            (part + ahead * further / total).backward()
            loss += float(part.detach())
        self.apply(recipe.rate(self.step))
        self.step += 1
        return loss, sum(len(chat.ids) for batch in batches for chat in batch)

    def keep(self, label: str, share: float = 1.0) -> None:
        """Move the copy of the weights called `label` towards the weights by `share`; 1, or no copy yet, makes it."""
        weights = self.model.state_dict()
        if share == 1.0 or label not in self.kept:
            self.kept[label] = {name: value.detach().clone() for name, value in weights.items()}
        else:
            for name, value in self.kept[label].items():
                value.lerp_(weights[name].detach(), share)

    def apply(self, rate: float) -> None:
        """Clip the gradients, step both optimizers at `rate` times their learning rates, clear the gradients."""
        nn.utils.clip_grad_norm_([*self.model.parameters(), *self.lookahead.parameters()], 1.0)
        peaks = (self.recipe.muon_lr, self.recipe.adam_lr)
        for optimizer, peak in zip(self.optimizers, peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def train(
        self,
        epoch: Epoch,
        brief_epoch: Epoch,
        held_out: dict[str, Sequence[Encoded]],
        log: Callable[[dict[str, object]], None],
        every: int,
        on_checkpoint: Callable[[LlamaForCausalLM], None],
    ) -> None:
        """Train to `recipe.steps`, the last of them on `brief_epoch`.

        Every `every` steps, and at the end, evaluate, save, call `on_checkpoint`.
        """
        recipe = self.recipe
        turn = max(0, recipe.steps - recipe.brief_steps)  # the step from which on brief documents are read
        ordinary, brief = stream(epoch, recipe), stream(brief_epoch, recipe)
        for _ in range(min(self.step, turn) * recipe.accumulation):
            next(ordinary)
        for _ in range(max(0, self.step - turn) * recipe.accumulation):
            next(brief)
        losses: list[float] = []
        tokens, began, first = 0, time.monotonic(), self.step
        while self.step < recipe.steps:
            batches = ordinary if self.step < turn else brief
            drawn = [next(batches) for _ in range(recipe.accumulation)]
            loss, read = self.update([batch for _, batch in drawn])
            losses.append(loss)
            tokens += read
            if not math.isfinite(loss):
                raise SystemExit(f"the loss is {loss} at step {self.step}: lower the learning rates")
            last = self.step == recipe.steps
            if self.step % 10 == 0 or self.step % every == 0 or last:
                pace = (time.monotonic() - began) / (self.step - first)
                entry: dict[str, object] = {
                    "step": self.step,
                    "epoch": drawn[0][0],
                    "loss": round(sum(losses) / len(losses), 4),
                    "lr": round(recipe.rate(self.step - 1), 4),
                    "tokens_per_s": round(tokens / (time.monotonic() - began)),
                    "eta_min": round(pace * (recipe.steps - self.step) / 60, 1),
                }
                losses = []
                if self.step % every == 0 or last:
                    entry["held_out"] = {
                        kind: held_out_losses(self.model, chats, recipe.micro_batch) for kind, chats in held_out.items()
                    }
                    self.save()
                    on_checkpoint(self.model)
                log(entry)


def save_model(model: LlamaForCausalLM, directory: Path) -> None:
    """Write the model in bf16 with its configuration and a greedy generation configuration."""
    directory.mkdir(parents=True, exist_ok=True)
    config = json.loads(model.config.to_json_string())
    config.update(architectures=["LlamaForCausalLM"], dtype="bfloat16", torch_dtype="bfloat16", use_cache=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    GenerationConfig(
        bos_token_id=SPECIAL.index(BOS),
        eos_token_id=SPECIAL.index(EOS),
        pad_token_id=PAD_ID,
        do_sample=False,
        max_new_tokens=256,
    ).save_pretrained(directory)
    weights = {k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in model.state_dict().items()}
    partial = directory / "model.safetensors.partial"
    save_file(weights, partial, {"format": "pt"})
    partial.chmod(0o644)  # safetensors writes for the owner alone
    os.replace(partial, directory / "model.safetensors")
