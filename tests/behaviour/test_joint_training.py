"""Training of a model together with its Medusa heads, against plain torch: the language model's
losses, the schedule of lambda0, adapters, and layers that are trained themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.behaviour import plain
from tests.behaviour.conftest import RunOf, whole_batches
from tests.behaviour.world import (
    as_yaml,
    metrics,
    read_json,
    tensors,
    train,
    training_keys,
    write_model,
)

Documents = tuple[list[plain.Document], list[plain.Document]]
STEPS = 3
RATE = 5e-3
COEFFICIENT = 0.4
DECAY = 0.8
LORA = {
    "recipe": "medusa2",
    "adapter": "lora",
    "lora_target_linear": True,
    "lora_r": 2,
    "lora_alpha": 6,
    "lora_dropout": 0.0,
    "learning_rate": RATE,
    "medusa_lr_multiplier": 2.0,
    "medusa_heads_coefficient": COEFFICIENT,
    "medusa_num_heads": 2,
    "max_grad_norm": 0.5,
    "weight_decay": 0.1,
}
#: Settings, the part of the teacher in the target of the language model, of the heads, and lambda0
#: relative to the coefficient in each step. Where the part is None the loss is the divergence.
RECIPES: dict[str, tuple[dict[str, Any], float | None, float, list[float]]] = {
    "ce": ({}, 0.0, 0.0, [1, 1, 1]),
    "kl": ({"medusa_self_distillation": True}, None, 0.0, [1, 1, 1]),
    "rho": ({"medusa_distillation_regularization": 0.3}, 0.3, 0.0, [1, 1, 1]),
    "soft heads, linear": (
        {"medusa_soft_targets": 0.6, "medusa_scheduler": "linear"},
        0.0,
        0.6,
        [0, 1 / 3, 2 / 3],
    ),
    "sine": ({"medusa_scheduler": "sine"}, 0.0, 0.0, [0, 0.5, math.sqrt(0.75)]),
    "sine over half": (
        {"medusa_scheduler": "sine_0.5"},
        0.0,
        0.0,
        [0, math.sin(math.pi / 3), 1],
    ),
}


class PlainJoint:
    """Trains heads and model of a run's first weights in float64, all documents in each step.

    Attributes:
        heads: the draft. trained: the model's trained weights, by their names in the run's file.
        whole: returns the weights that the model computes with.
    """

    def __init__(
        self,
        draft: plain.PlainDraft,
        trained: plain.Weights,
        whole: Callable[[plain.Weights], plain.Weights],
        documents: list[plain.Document],
    ) -> None:
        self.draft, self.trained, self.whole, self.documents = draft, trained, whole, documents
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.lm: list[tuple[float, float]] = []

    def loss(self, part: float | None, soft: float, weight: float) -> Tensor:
        """Return `L_LM + weight * sum_k c^k L_k`, and keep cross-entropy and divergence."""
        model = self.draft.model
        weights = self.whole(self.trained)
        original = {tuple(d.tokens): plain.run_model(model, d.tokens) for d in self.documents}
        states = {
            tuple(d.tokens): plain.run_model(model, d.tokens, weights) for d in self.documents
        }
        terms, ces, kls = [], [], []
        for document in self.documents:
            ours = states[tuple(document.tokens)].logits.log_softmax(-1)
            theirs = original[tuple(document.tokens)].logits.log_softmax(-1)
            for t, token in plain.targets_of(document, 0):
                ce = -ours[t, token]
                kl = (theirs[t].exp() * (theirs[t] - ours[t])).sum()
                soft_ce = -(theirs[t].exp() * ours[t]).sum()
                terms.append(kl if part is None else (1 - part) * ce + part * soft_ce)
                ces.append(ce)
                kls.append(kl)
        self.lm.append(tuple(float(torch.stack(x).mean().detach()) for x in (ces, kls)))  # type: ignore[arg-type]
        heads = plain.head_terms(
            self.draft,
            self.documents,
            plain.HeadsLoss(DECAY, soft),
            lambda tokens: states[tuple(tokens)],
            lambda tokens: original[tuple(tokens)],
        )
        total = torch.stack(terms).mean()
        for k, head in enumerate(heads, start=1):
            total = total + weight * DECAY**k * head.mean()
        return total

    def train(self, part: float | None, soft: float, lambdas: list[float], limit: float) -> None:
        weights = {**self.draft.weights, **self.trained}
        moments: dict[str, tuple[Tensor, Tensor]] = {}
        for step in range(STEPS):
            for weight in weights.values():
                weight.requires_grad_(True)
            value = self.loss(part, soft, COEFFICIENT * lambdas[step])
            found = torch.autograd.grad(value, list(weights.values()), allow_unused=True)
            gradients = {
                name: torch.zeros_like(weight) if grad is None else grad
                for (name, weight), grad in zip(weights.items(), found, strict=True)
            }
            self.losses.append(float(value.detach()))
            self.norms.append(plain.clip(gradients, limit))
            for weight in weights.values():
                weight.requires_grad_(False)
            rate = RATE * plain.cosine(step, STEPS)
            rates = {name: rate * (2 if name in self.draft.weights else 1) for name in weights}
            plain.adamw(weights, gradients, moments, step + 1, rates, decay=0.1)


def merged(model: Any, scale: float) -> Callable[[plain.Weights], plain.Weights]:
    """Return a function from an adapter's weights to the model's: W + scale B A."""
    original = dict(model.named_parameters())

    def whole(adapter: plain.Weights) -> plain.Weights:
        weights = {}
        for name, a in adapter.items():
            if not name.endswith(".lora_A.weight"):
                continue
            target = name.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
            b = adapter[name.replace("lora_A", "lora_B")]
            weights[target] = original[target] + scale * b @ a
        return weights

    return whole


@pytest.fixture(scope="module")
def joint_run(
    model: Path, chats: Path, held_out: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """Return a run of joint training with these keys."""
    runs: dict[str, Path] = {}

    def run(**keys: Any) -> Path:
        name = str(sorted(keys.items(), key=str))
        if name not in runs:
            out = tmp_path_factory.mktemp("joint") / "run"
            written = {
                **training_keys(model, chats, out, **whole_batches(held_out)),
                **LORA,
                **keys,
            }
            train(**written).ok()
            runs[name] = out
        return runs[name]

    return run


@pytest.mark.parametrize("name", RECIPES)
def test_steps_of_an_adapter_are_those_of_plain_torch(
    name: str, joint_run: Callable[..., Path], exact_model: Any, documents: Documents
) -> None:
    keys, part, soft, lambdas = RECIPES[name]
    first = joint_run(**keys, learning_rate=1e-30, max_steps=1)
    adapter = plain.read_weights(first / "adapter" / "adapter_model.safetensors")
    assert read_json(first / "adapter" / "adapter_config.json")["lora_alpha"] == 6
    assert len(adapter) == 2 * (3 * 7 + 1)  # every linear layer, lm_head included
    reference = PlainJoint(
        plain.PlainDraft.read(first / "heads", exact_model),
        adapter,
        merged(exact_model, 6 / 2),
        documents[0],
    )
    reference.train(part, soft, lambdas, 0.5)
    run = joint_run(**keys)
    for step, record in enumerate(metrics(run)):
        assert record["loss"] == pytest.approx(reference.losses[step], rel=1e-4, abs=1e-7)
        assert record["grad_norm"] == pytest.approx(reference.norms[step], rel=1e-3)
        ce, kl = reference.lm[step]
        assert record["lm_loss"] == pytest.approx(ce, rel=1e-4)
        if part != 0.0:
            assert record["lm_kl"] == pytest.approx(kl, rel=1e-3, abs=1e-7)
        assert record["lr"] == pytest.approx(2 * RATE * plain.cosine(step, STEPS))
    assert_same(run / "adapter" / "adapter_model.safetensors", reference.trained)
    assert_same(run / "heads" / "medusa_lm_head.safetensors", reference.draft.weights)


def assert_same(path: Path, weights: plain.Weights) -> None:
    trained = plain.read_weights(path)
    assert set(trained) == set(weights)
    for name, weight in weights.items():
        torch.testing.assert_close(trained[name], weight, rtol=0, atol=3e-5, msg=name)


def test_a_fresh_adapter_is_the_model_itself_and_kl_does_not_move_it(
    joint_run: Callable[..., Path],
) -> None:
    """To the bit: the divergence of equal distributions is 0, and so is its gradient."""
    run = joint_run(
        medusa_self_distillation=True, medusa_heads_coefficient=0, max_steps=1, weight_decay=0
    )
    record = metrics(run)[0]
    assert (record["loss"], record["lm_kl"], record["grad_norm"]) == (0.0, 0.0, 0.0)
    adapter = tensors(run / "adapter" / "adapter_model.safetensors")
    assert not any(tensor.any() for name, tensor in adapter.items() if "lora_B" in name)


def test_validation_of_joint_training(
    joint_run: Callable[..., Path], exact_model: Any, documents: Documents
) -> None:
    run = joint_run(medusa_distillation_regularization=0.3)
    record = metrics(run, "eval")[-1]
    adapter = plain.read_weights(run / "adapter" / "adapter_model.safetensors")
    reference = PlainJoint(
        plain.PlainDraft.read(run / "heads", exact_model),
        adapter,
        merged(exact_model, 3.0),
        documents[1],
    )
    heads = float(reference.loss(1.0, 0.0, 1.0)) - float(reference.loss(1.0, 0.0, 0.0))
    ce, kl = reference.lm[0]
    assert record["lm_loss"] == pytest.approx(ce, rel=1e-4)
    assert record["lm_kl"] == pytest.approx(kl, rel=1e-3)
    assert record["loss"] == pytest.approx(heads, rel=1e-4)
    assert record["objective"] == pytest.approx(0.7 * ce + 0.3 * kl + COEFFICIENT * heads, rel=1e-4)


@pytest.mark.parametrize("layers", [1, 0])
def test_steps_of_unfrozen_layers_are_those_of_plain_torch(
    layers: int, joint_run: Callable[..., Path], exact_model: Any, documents: Documents
) -> None:
    """The last layer, the final norm and lm_head; 0: everything."""
    keys = {
        "adapter": None,
        **dict.fromkeys([key for key in LORA if key.startswith("lora")]),
        "medusa_num_unfreeze_layers": layers,
    }
    first = joint_run(**keys, learning_rate=1e-30, max_steps=1)
    names = ("model.layers.2.", "model.norm.", "lm_head.")
    trained = {
        name: weight.detach().clone()
        for name, weight in exact_model.named_parameters()
        if not layers or name.startswith(names)
    }
    reference = PlainJoint(
        plain.PlainDraft.read(first / "heads", exact_model),
        trained,
        lambda weights: weights,
        documents[0],
    )
    reference.train(0.0, 0.0, [1, 1, 1], 0.5)
    run = joint_run(**keys)
    assert [record["loss"] for record in metrics(run)] == pytest.approx(reference.losses, rel=1e-4)
    saved = plain.load_model(run / "model")
    for name, weight in saved.named_parameters():
        expected = reference.trained.get(name, dict(exact_model.named_parameters())[name])
        torch.testing.assert_close(weight.data, expected, rtol=0, atol=3e-5, msg=name)


def test_dropout_and_chosen_layers_of_an_adapter(joint_run: Callable[..., Path]) -> None:
    keys = {
        "lora_target_linear": False,
        "lora_target_modules": ["q_proj", "down_proj"],
        "lora_modules_to_save": ["norm"],
    }
    run = joint_run(**keys)
    names = set(tensors(run / "adapter" / "adapter_model.safetensors"))
    lora = {name for name in names if "lora_" in name}
    assert {name.rsplit(".", 3)[1] for name in lora} == {"q_proj", "down_proj"}
    assert len(lora) == 2 * 3 * 2
    assert {name.rsplit(".", 2)[1] for name in names - lora} == {
        *("norm", "input_layernorm", "post_attention_layernorm")  # the names that end so
    }
    with_dropout = joint_run(**keys, lora_dropout=0.5)
    first, second = metrics(run), metrics(with_dropout)
    assert first[0]["loss"] == second[0]["loss"]  # B = 0: there is nothing to drop
    assert first[2]["loss"] != second[2]["loss"]


def test_layers_that_an_adapter_cannot_have(chats: Path, tmp_path: Path) -> None:
    tied = write_model(tmp_path / "tied", "llama-bias-tied")
    keys = {**LORA, "lora_target_linear": False, "lora_target_modules": ["q_proj", "lm_head"]}
    written = training_keys(tied, chats, tmp_path / "run", **keys)
    train(**written).fails(1, "lora_target_modules", "tied")
    train(**written | {"lora_target_modules": ["q_proj", "qq_proj"]}).fails(1, "qq_proj")
    written["lora_target_modules"] = ["q_proj"]
    train(**written, lora_modules_to_save=["normal"]).fails(1, "normal")
    train(**written | {"lora_target_modules": None, "lora_target_linear": True}).ok()
    names = tensors(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    assert not any("lm_head" in name for name in names)


def test_gradient_checkpointing_changes_nothing(joint_run: Callable[..., Path]) -> None:
    ours, theirs = (metrics(joint_run(**keys)) for keys in ({"gradient_checkpointing": True}, {}))
    for one, other in zip(ours, theirs, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("bits", [4, 8])
def test_heads_learn_from_a_quantized_model(
    bits: int, model: Path, run_of: RunOf, documents: Documents
) -> None:
    """The losses are those of the weights that bitsandbytes stores."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    pytest.importorskip("bitsandbytes")
    options: dict[str, Any] = {"load_in_8bit": True}
    if bits == 4:
        options = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_compute_dtype": torch.float32,
            "bnb_4bit_use_double_quant": True,
        }
    quantized = AutoModelForCausalLM.from_pretrained(
        model, quantization_config=BitsAndBytesConfig(**options), dtype=torch.float32
    )
    if bits == 4:
        quantized = quantized.dequantize()
    quantized = quantized.eval()
    run = run_of("medusa", **{f"load_in_{bits}bit": True}, max_steps=1)
    whole = run_of("medusa", max_steps=1)
    draft = plain.PlainDraft.read(
        run_of("medusa", learning_rate=1e-30, max_steps=1) / "heads", plain.load_model(model)
    )

    def states(tokens: Any) -> plain.States:
        with torch.no_grad():
            out = quantized(
                torch.tensor([list(tokens)]), use_cache=False, output_hidden_states=True
            )
        return plain.States(out.hidden_states[-1][0].double(), [], out.logits[0].double())

    heads = plain.head_terms(draft, documents[0], plain.HeadsLoss(0.7), states)
    expected = sum(float(0.7**k * head.mean().detach()) for k, head in enumerate(heads, start=1))
    assert metrics(run)[0]["loss"] == pytest.approx(expected, rel=2e-3)
    assert abs(metrics(run)[0]["loss"] - metrics(whole)[0]["loss"]) > 1e-3


def test_an_adapter_on_a_4_bit_model_trains(joint_run: Callable[..., Path]) -> None:
    pytest.importorskip("bitsandbytes")
    run = joint_run(adapter="qlora", load_in_4bit=True, medusa_self_distillation=True)
    losses = [record["loss"] for record in metrics(run)]
    assert all(math.isfinite(loss) for loss in losses)
    assert metrics(run)[0]["lm_kl"] == pytest.approx(0.0, abs=1e-6)
    assert as_yaml(read_json(run / "adapter" / "adapter_config.json")["r"]) == "2"
