"""What a run costs: memory against modules built for it, arithmetic and bytes per step by hand for
a small model.
"""

import json
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
)

from medusa_train.config.paths import PROJECT_ROOT
from medusa_train.config.schema import TrainConfig
from medusa_train.data.batch import Batch
from medusa_train.errors import ConfigError, TargetModelError
from medusa_train.losses.objective import Objective
from medusa_train.models.drafts import DRAFTS
from medusa_train.models.drafts.eagle3 import Eagle3Draft
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.models.lora import Adapter, LoraSpec
from medusa_train.models.target_states import Rows
from medusa_train.training.deepspeed_config import check_deepspeed, stage_of
from medusa_train.training.estimate import (
    _KEPT_DRAFT,
    _KEPT_TRAINED,
    _NF4,
    GPUS,
    RATES,
    Estimate,
    Memory,
)
from medusa_train.training.preflight import check_8bit_states
from tests.families import random_target_model

ACTIVATIONS = "activations (estimate)"


def config(**keys: Any) -> TrainConfig:
    values = {"base_model": "none", "datasets": [{"path": "none"}], "medusa_num_heads": 3}
    return TrainConfig.model_validate({**values, **keys})


def estimate(family: str = "llama", vocab: int = 61, device: str = "cpu", **keys: Any) -> Memory:
    model_config = random_target_model(family, vocab_size=vocab).config
    return Estimate(config(**keys), model_config).memory(
        rows=2, width=64, dtype=torch.bfloat16, device=device
    )


@pytest.mark.parametrize("family", ["llama-bias-tied", "gemma2"])
@pytest.mark.parametrize("layers", [0, 2])
def test_heads_are_counted_as_they_are(family: str, layers: int) -> None:
    target_model = random_target_model(family)
    heads = sum(
        p.numel() for p in MedusaDraft.from_target_model(target_model, 3, layers).parameters()
    )
    frozen = sum(p.numel() for p in target_model.model.parameters())
    memory = estimate(family, medusa_num_layers=layers)
    assert (memory.trained, memory.frozen) == (heads, frozen)
    assert memory.parts["target model, frozen"] == 2 * frozen
    assert memory.parts["heads"] == memory.parts["gradients"] == 4 * heads
    assert memory.total == sum(memory.parts.values())


def test_adamw_holds_the_states_that_are_counted() -> None:
    draft = MedusaDraft.from_target_model(random_target_model("llama"), 3, 1, dtype=torch.float32)
    optimizer = torch.optim.AdamW(draft.parameters())
    for parameter in draft.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    held = sum(
        t.nbytes for state in optimizer.state.values() for t in state.values() if t.numel() > 1
    )
    assert estimate(optimizer="adamw_torch").parts["optimizer states (adamw_torch)"] == held
    states = {
        device: estimate(device=device, optimizer="adamw_bnb_8bit").parts[
            "optimizer states (adamw_bnb_8bit)"
        ]
        for device in ("cpu", "cuda")
    }
    assert states["cuda"] < 0.26 * held < states["cpu"] == held  # there adamw_torch is taken


@pytest.mark.parametrize("family", ["llama", "llama-bias-tied"])  # a tied lm_head gets no adapter
@pytest.mark.parametrize("targets", [None, ("q_proj", "down_proj")])
def test_an_adapter_is_counted_as_it_is(family: str, targets: tuple[str, ...] | None) -> None:
    real = sum(
        p.numel()
        for p in Adapter.attach(
            random_target_model(family), LoraSpec(r=4, targets=targets)
        ).parameters()
    )
    keys: dict[str, Any] = (
        {"lora_target_modules": list(targets)} if targets else {"lora_target_linear": True}
    )
    assert estimate(family, adapter="lora", lora_r=4, **keys).parts["adapter"] == 4 * real


def test_nf4_takes_what_bitsandbytes_stores() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    matrix = torch.randn(1024, 1024)
    packed, state = functional.quantize_4bit(matrix, quant_type="nf4", compress_statistics=True)
    stored = packed.nbytes + state.absmax.nbytes + state.state2.absmax.nbytes
    assert stored / matrix.numel() == pytest.approx(_NF4, rel=1e-6)


def test_quantisation_leaves_lm_head_and_embeddings_alone() -> None:
    model = random_target_model("llama").model
    plain = sum(p.numel() for n, p in model.named_parameters() if "proj" not in n)
    linear = sum(p.numel() for n, p in model.named_parameters() if "proj" in n)
    assert estimate(load_in_8bit=True).parts["target model, frozen"] == 2 * plain + linear
    assert estimate(load_in_4bit=True, adapter="qlora").parts["target model, frozen"] == round(
        2 * plain + _NF4 * linear
    )


def test_what_joint_training_trains() -> None:
    model = random_target_model("llama").model
    everything = sum(p.numel() for p in model.parameters())
    last = sum(
        p.numel()
        for n, p in model.named_parameters()
        if n.startswith(("model.layers.2.", "model.norm.", "lm_head."))
    )
    heads = estimate().trained
    whole = estimate(recipe="medusa2")
    assert (whole.trained, whole.frozen) == (heads + everything, 0)
    part = estimate(recipe="medusa2", medusa_num_unfreeze_layers=1)
    assert (part.trained, part.frozen) == (heads + last, everything - last)
    assert part.parts["target model, trained"] == 4 * last
    assert part.parts["target model, frozen"] == 2 * (everything - last)
    assert heads - estimate(medusa_share_lm_head=True).trained == 3 * model.lm_head.weight.numel()


def test_activations_follow_the_settings() -> None:
    def size(**keys: Any) -> int:
        return estimate(vocab=500, **keys).parts[ACTIVATIONS]

    joint = {"recipe": "medusa2", "gradient_accumulation_steps": 2}
    frozen = size()
    assert frozen < size(**joint, gradient_checkpointing=True) < size(**joint)
    assert size(sample_packing=True) == frozen
    assert size(gradient_accumulation_steps=2) == size(medusa_num_heads=5) == frozen
    # the teacher's logits in bfloat16, and two more float32 blocks
    assert size(medusa_soft_targets=0.5) == frozen + 2 * 64 * 500 * (2 + 2 * 4)


def test_layers_that_are_recomputed_keep_their_inputs() -> None:
    def size(layers: int) -> int:
        joint = {"recipe": "medusa2", "medusa_num_unfreeze_layers": layers}
        return estimate(**joint, gradient_checkpointing=True).parts[ACTIVATIONS]

    inputs = 2 * 64 * random_target_model("llama").hidden_size * 2  # 2 x 64 tokens in bfloat16
    assert size(3) - size(2) == size(2) - size(1) == inputs


@pytest.mark.parametrize("steps", [1, 4])
def test_steps_of_eagle3_keep_what_is_estimated(steps: int) -> None:
    target_model = random_target_model(
        "llama", dtype=torch.bfloat16, hidden_size=64, intermediate_size=224
    )
    draft = Eagle3Draft.from_target_model(target_model, train_steps=steps, dtype=torch.float32)
    tokens = torch.zeros(1, 512, dtype=torch.long)
    hidden_states = target_model.run(tokens, aux_layers=draft.aux_layers)
    known = {
        one.untyped_storage().data_ptr()
        for one in [*draft.parameters(), *target_model.model.parameters()]
    }
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage
        return tensor

    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one),
    ):
        states = list(draft.head_states(hidden_states, Rows.from_tokens(tokens)))
    copies = 2 * sum(
        one.numel()
        for one in draft.parameters()
        if one.dim() == 2 and one is not draft.lm_head(1).weight
    )
    measured = sum(one.nbytes() for one in kept.values()) - copies
    estimated = Estimate(config(draft="eagle3", eagle3={"train_steps": steps}), target_model.config)
    layer = estimated._layer_bytes(_KEPT_DRAFT, 2) * tokens.numel() * estimated._cost.layer_passes
    assert states
    assert 0.8 * measured < layer < 1.2 * measured


def test_layers_with_an_adapter_keep_what_is_estimated() -> None:
    """Without dropout, whose mask takes a byte on a GPU and four on a CPU."""
    sizes = {"hidden_size": 64, "intermediate_size": 224}
    target_model = random_target_model("llama", dtype=torch.bfloat16, **sizes)
    target_model.model.requires_grad_(False)
    Adapter.attach(target_model, LoraSpec(r=2, dropout=0.0)).peft.train()
    tokens = torch.zeros(1, 512, dtype=torch.long)
    known = {one.untyped_storage().data_ptr() for one in target_model.model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage
        return tensor

    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one),
    ):
        states = target_model.run(tokens)
    measured = sum(one.nbytes() for one in kept.values())
    estimated = Estimate(config(adapter="lora"), target_model.config)
    layers = estimated._layer_bytes(_KEPT_TRAINED, 2) * tokens.numel() * target_model.num_layers
    assert states
    assert 0.8 * measured < layers < 1.25 * measured


def test_a_teacher_takes_logits_of_its_own() -> None:
    keys = {"adapter": "lora", "lora_r": 4}
    alone = estimate(vocab=500, **keys).parts[ACTIVATIONS]
    taught = estimate(vocab=500, medusa_self_distillation=True, **keys).parts[ACTIVATIONS]
    assert taught - alone == 2 * 64 * 500 * (2 + 2 * 4)


def test_a_reduced_vocabulary_needs_less() -> None:
    whole, part = estimate(vocab=1000), estimate(vocab=1000, medusa_vocab_size=500)
    assert whole.trained - part.trained == 3 * 500 * 32
    assert part.total < whole.total
    taught = estimate(vocab=1000, medusa_vocab_size=500, medusa_soft_targets=0.5).parts[ACTIVATIONS]
    assert taught - part.parts[ACTIVATIONS] == 2 * 64 * 500 * (2 + 2 * 4)
    # the target model's own loss is over all tokens
    keys = {
        "adapter": "lora",
        "gradient_accumulation_steps": 2,
        "medusa_distillation_regularization": 0.1,
    }
    joint, joint_part = (
        estimate(vocab=1000, **keys, **more) for more in ({}, {"medusa_vocab_size": 500})
    )
    assert joint.parts[ACTIVATIONS] == joint_part.parts[ACTIVATIONS]


ZERO2 = {"zero_optimization": {"stage": 2}}


@pytest.mark.parametrize(
    ("deepspeed", "processes", "stage"),
    [(None, 2, "stage 1 (the default of several processes)"), (ZERO2, 1, "stage 2")],
)
def test_8bit_states_that_would_be_partitioned_are_refused(
    deepspeed: dict[str, Any] | None, processes: int, stage: str
) -> None:
    cfg = config(optimizer="adamw_bnb_8bit", deepspeed=deepspeed)
    with pytest.raises(ConfigError) as caught:
        check_8bit_states(cfg, stage_of(check_deepspeed(cfg, processes)), processes)
    message = str(caught.value)
    assert stage in message
    assert "Set optimizer: adamw_torch" in message
    assert "zero_optimization.stage: 0 in deepspeed" in message


@pytest.mark.parametrize(
    ("keys", "processes"),
    [
        ({"optimizer": "adamw_bnb_8bit"}, 1),
        ({"optimizer": "adamw_bnb_8bit", "deepspeed": {"zero_optimization": {"stage": 0}}}, 2),
        ({"optimizer": "adamw_torch"}, 2),
    ],
)
def test_states_that_are_whole_or_float32_are_not_refused(
    keys: dict[str, Any], processes: int
) -> None:
    cfg = config(**keys)
    check_8bit_states(cfg, stage_of(check_deepspeed(cfg, processes)), processes)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"draft": "hydra"}, "FalconModel has no list .* which .* all drafts but medusa need"),
        ({"draft": "kangaroo"}, "FalconModel"),
        ({"medusa_num_unfreeze_layers": 1}, "FalconModel has no `layers` and `norm` to unfreeze"),
    ],
)
def test_what_the_architecture_lacks_is_named_as_in_training(
    keys: dict[str, Any], words: str
) -> None:
    falcon = FalconConfig(
        alibi=False, num_hidden_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=64
    )
    with pytest.raises(TargetModelError, match=words):
        Estimate(config(**keys), falcon).memory(rows=2, width=8, dtype=torch.bfloat16, device="cpu")


# Arithmetic of a run, and bytes of a decoding step

HIDDEN, INNER, LAYERS, VOCAB, WIDTH = 16, 32, 3, 100, 64
PROJECTIONS = HIDDEN * HIDDEN * 2 + 2 * HIDDEN * 8 + 3 * HIDDEN * INNER  # q, o; k, v; MLP
LAYER = PROJECTIONS + 2 * HIDDEN  # and norms
BODY = LAYERS * LAYER + HIDDEN
BLOCK = HIDDEN * HIDDEN + HIDDEN
# blocks run on all tokens, lm_heads on supervised ones
HEADS = 6 * 2 * (BLOCK * 1000 + VOCAB * HIDDEN * 600)
PASS = 1000 * LAYERS * (2 * LAYER + 4 * HIDDEN * WIDTH / 2)
LM_HEAD = 2 * VOCAB * HIDDEN * 600


def small(*, tied: bool = False, **keys: Any) -> Estimate:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
    }
    shape = LlamaConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied
    )
    return Estimate(config(**{"medusa_num_heads": 2, **keys}), shape)


def operations(epochs: float = 1.0, **keys: Any) -> float:
    return small(**keys).operations(tokens=1000, supervised=600, width=WIDTH, epochs=epochs)


def test_a_frozen_target_model_runs_forward_and_heads_both_ways() -> None:
    assert operations() == pytest.approx(PASS + HEADS)
    assert operations(epochs=2.5) == pytest.approx(2.5 * operations())


def test_states_on_disk_save_the_target_model_after_the_first_epoch() -> None:
    assert operations(
        epochs=3, cache_hidden_states=True, dataset_prepared_path="prepared"
    ) == pytest.approx(PASS + 3 * HEADS)


def test_joint_training_adds_the_teacher_the_recomputation_and_the_backward_pass() -> None:
    adapter = {"recipe": "medusa2", "adapter": "lora", "medusa_self_distillation": True}
    assert operations(**adapter) == pytest.approx(3 * PASS + 3 * LM_HEAD + HEADS)
    assert operations(**adapter, gradient_checkpointing=True) == pytest.approx(
        4 * PASS + 3 * LM_HEAD + HEADS
    )
    # weights of all layers
    assert operations(recipe="medusa2") == pytest.approx(3 * PASS + 3 * LM_HEAD + HEADS)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"medusa_share_lm_head": True, "medusa_soft_targets": 0.5},
        {"medusa_markov_rank": 16, "medusa_vocab_size": 200},
        {"draft": "hydra", "hydra": {"dropout": 0.0}},
        {"draft": "amphista", "amphista": {"auto_blocks": 2}},
        {"draft": "kangaroo", "kangaroo": {}},
        {
            "draft": "kangaroo",
            "kangaroo": {"mlp_size": 96, "attention": False, "share_lm_head": False},
        },
        {"draft": "eagle3", "eagle3": {"vocab_size": 200}},
        {"draft": "dflash", "dflash": {"max_draft_tokens": 3, "num_layers": 2, "layers": [2, 4]}},
    ],
    ids=str,
)
def test_a_step_of_a_draft_multiplies_what_is_estimated(keys: dict[str, Any]) -> None:
    """Against the products that a step runs, attention apart.

    Inputs of a first layer need no gradient.
    """
    cfg = config(**keys)
    sizes = {"hidden_size": 64, "intermediate_size": 160, "vocab_size": 600, "num_hidden_layers": 6}
    target_model = random_target_model("llama", dtype=torch.float32, **sizes)
    kept = {"token_map": torch.arange(200)} if cfg.draft_config.settings.get("vocab_size") else {}
    draft = DRAFTS[cfg.draft].from_target_model(target_model, **cfg.draft_config.settings, **kept)
    tokens = torch.randint(0, 200, (8, 64), generator=torch.Generator().manual_seed(0))
    labels = tokens.clone()
    labels[:, :24] = -100  # which heads read and need not predict
    positions, segments = torch.arange(64).expand(8, 64), torch.zeros_like(tokens)
    batch = Batch(tokens, labels, positions, segments, [], draw=0)
    hidden_states = target_model.run(tokens, aux_layers=draft.aux_layers)
    objective = Objective(draft, 1.0, soft_targets=cfg.draft_config.heads_loss.soft_targets)
    counts = objective.target_counts(batch)
    teacher = (hidden_states.final, target_model.lm_head()) if objective.needs_teacher else None
    in_place = {torch.ops.aten.addmm_: lambda total, a, b, **_: 2 * a[0] * a[1] * b[1]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        objective.loss_and_gradients(hidden_states, batch, counts, teacher=teacher, grad_scale=1.0)
    estimated = Estimate(cfg, target_model.config).draft_operations(8 * 64, 8 * 40)
    assert 0.87 * estimated < counter.get_total_flops() < 1.03 * estimated


def test_dflash_computes_as_many_blocks_as_rows_have_anchors() -> None:
    """Ten rows of 100 tokens, 60 of them supervised."""
    dflash = {"max_draft_tokens": 3, "num_layers": 1, "layers": [1]}

    def draft_operations(anchors: int) -> float:
        estimate = small(draft="dflash", dflash={**dflash, "anchors": anchors})
        return estimate.draft_operations(1000, 600, width=100)

    few, twice, all_supervised, more = map(draft_operations, (20, 40, 60, 512))
    assert twice - few == pytest.approx(all_supervised - twice)
    assert all_supervised == more


def test_each_state_that_dflash_reads_adds_a_product_to_every_token() -> None:
    def draft_operations(layers: list[int]) -> float:
        dflash = {"max_draft_tokens": 3, "num_layers": 1, "layers": layers}
        return small(draft="dflash", dflash=dflash).draft_operations(1000, 600, width=100)

    one, two = draft_operations([1]), draft_operations([1, 2])
    assert two - one == pytest.approx(6 * 1000 * HIDDEN**2)


@pytest.mark.parametrize(
    "family", [FalconConfig(alibi=False), GPTNeoXConfig()], ids=lambda config: config.model_type
)
def test_layers_are_counted_under_any_name(family: PretrainedConfig) -> None:
    """Falcon's list of layers is called `h`."""
    family.update(
        {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64}
    )
    family.update({"intermediate_size": 64, "ffn_hidden_size": 64})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(family)
    layers = sum(
        p.numel() for name, p in model.named_parameters() if ".h." in name or ".layers." in name
    )
    total = Estimate(config(), family).operations(tokens=10, supervised=0, width=8, epochs=1)
    assert total == 10 * (2 * layers + 4 * 2 * 32 * 8 / 2 + (6 * 3 * (32 * 32 + 32)))


def test_experts_frozen_layers_and_quantized_checkpoints_are_counted_as_they_are_used() -> None:
    part, whole = (
        operations(recipe="medusa2", medusa_num_unfreeze_layers=layers) for layers in (1, 0)
    )
    assert whole - part == pytest.approx(PASS * 2 * 2 / 3)  # no gradients in two of three layers
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    run = {"tokens": 1000, "supervised": 600, "width": WIDTH, "epochs": 1}
    one, two = (
        MixtralConfig(**sizes, num_local_experts=8, num_experts_per_tok=count) for count in (1, 2)
    )
    more = Estimate(config(), two).operations(**run) - Estimate(config(), one).operations(**run)
    assert more == pytest.approx(1000 * 2 * 2 * 3 * 64 * 128)
    stored = LlamaConfig(**sizes, quantization_config={"quant_method": "fp8"})
    plain, fp8 = (
        Estimate(config(), each)
        .memory(rows=1, width=8, dtype=torch.bfloat16, device="cpu")
        .parts["target model, frozen"]
        for each in (LlamaConfig(**sizes), stored)
    )
    assert plain - fp8 == 2 * (4 * 64 * 64 + 3 * 64 * 128)


@pytest.mark.parametrize(
    ("recipe", "what", "keys"),
    [
        ("medusa1", "shape1", {}),
        (
            "medusa2",
            "shape2",
            {"adapter": "qlora", "load_in_4bit": True, "gradient_checkpointing": True}
            | {"lora_r": 32, "lora_target_linear": True},
        ),
    ],
)
def test_rates_are_those_of_the_committed_measurement(
    recipe: str, what: str, keys: dict[str, Any]
) -> None:
    """By the same count of operations: 2 rows of 2,048 tokens, all of them supervised, 5 heads."""
    record = json.loads((PROJECT_ROOT / "benchmarks" / "results" / "gpu.json").read_text())
    assert record["machine"]["device"].startswith("NVIDIA H100")
    cases = record["steps"]["train-7b"]["figures"]["cases"]
    (case,) = [case for case in cases if case["what"] == what]
    rate = RATES[recipe]
    assert rate.tokens == pytest.approx(case["tokens_counted"] / case["seconds"], rel=1e-3)
    seven = LlamaConfig(vocab_size=32_000, num_hidden_layers=32, intermediate_size=11_008)
    tokens = case["tokens_counted"]
    operations = Estimate(config(**keys, medusa_num_heads=5), seven).operations(
        tokens=tokens, supervised=tokens, width=2048, epochs=1
    )
    assert operations / case["seconds"] / GPUS["H100, 80 GB"] == pytest.approx(rate.share, abs=5e-3)
