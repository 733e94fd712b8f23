"""LoRA adapters: teacher, tied lm_head, saving and merging, and 4-bit target models."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from medusa_train.errors import CheckpointError, TargetModelError
from medusa_train.models.loading import load_target_model
from medusa_train.models.lora import Adapter, LoraSpec, linear_names
from medusa_train.models.target_model import TargetModel
from tests.families import random_target_model

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def _logits(target_model: TargetModel) -> torch.Tensor:
    return target_model.lm_head().logits(target_model.run(TOKENS).final)


def _randomize(adapter: Adapter, seed: int = 0) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.normal_(0, 0.2)


def test_linear_names_lists_lm_head_last() -> None:
    assert linear_names(random_target_model("llama").model) == [
        "down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj", "lm_head",
    ]  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_the_teacher_is_exactly_the_original_target_model_with_dropout_on(family: str) -> None:
    target_model = random_target_model(family, dtype=torch.float32)
    before = _logits(target_model)
    adapter = Adapter.attach(target_model, LoraSpec(r=4, dropout=0.5))
    assert torch.equal(_logits(target_model), before)  # B = 0
    _randomize(adapter)
    target_model.model.train()
    assert not torch.allclose(_logits(target_model), before)
    frozen = adapter.parameters()[0].requires_grad_(False)
    with adapter.teacher():
        inside = _logits(target_model)
        assert not inside.requires_grad
    assert torch.equal(inside, before)
    assert target_model.model.training
    assert not frozen.requires_grad
    assert adapter.parameters()


def test_logits_of_an_adapted_lm_head_are_the_models() -> None:
    target_model = random_target_model("gemma2", dtype=torch.float32)
    with pytest.raises(TargetModelError, match="no such layer"):
        Adapter.attach(target_model, LoraSpec(targets=("q_proj", "query")))
    adapter = Adapter.attach(target_model, LoraSpec(r=4, dropout=0.0, targets=("lm_head",)))
    _randomize(adapter)
    hidden = target_model.run(TOKENS).final
    expected = target_model.model(TOKENS, use_cache=False).logits
    assert torch.allclose(target_model.lm_head().logits(hidden), expected, atol=1e-5)
    assert torch.equal(target_model.logits(hidden), expected)
    assert target_model.lm_head().low_rank is not None
    with adapter.teacher():
        assert target_model.lm_head().low_rank is None


def test_a_tied_lm_head_is_left_out_or_rejected() -> None:
    target_model = random_target_model("llama-bias-tied")
    with pytest.raises(TargetModelError, match="tied to the input embeddings"):
        Adapter.attach(target_model, LoraSpec(targets=("lm_head", "q_proj")))
    Adapter.attach(target_model, LoraSpec())
    assert target_model.lm_head().low_rank is None


@pytest.mark.parametrize("kind", [{"use_dora": True}, {"lora_bias": True}])
def test_adapters_of_lm_head_with_other_formulas_are_refused(kind: dict[str, bool]) -> None:
    """The losses read lm_head's matrices; decoding, which runs PEFT's layer, would follow another
    distribution.
    """
    target_model = random_target_model("llama", dtype=torch.float32)
    get_peft_model(target_model.model, LoraConfig(r=2, target_modules=["lm_head"], **kind))
    with pytest.raises(
        TargetModelError, match="DoRA and LoRA with a bias are not supported on lm_head"
    ):
        _logits(target_model)


def test_unknown_modules_to_save_are_refused() -> None:
    with pytest.raises(
        TargetModelError, match="lora_modules_to_save: embed_token: this target model has no module"
    ):
        Adapter.attach(
            random_target_model("llama"), LoraSpec(modules_to_save=("lm_head", "embed_token"))
        )


def test_modules_to_save_are_trained_in_float32(tmp_path: Path) -> None:
    """PEFT copies them in the target model's dtype, in which small updates would round to nothing."""
    spec = LoraSpec(r=4, targets=("q_proj",), modules_to_save=("lm_head",))
    adapter = Adapter.attach(random_target_model("llama", dtype=torch.bfloat16), spec)
    assert {parameter.dtype for parameter in adapter.parameters()} == {torch.float32}
    assert (
        sum(parameter.dim() == 2 and 61 in parameter.shape for parameter in adapter.parameters())
        == 1
    )
    adapter.save(tmp_path)
    loaded = Adapter.load(
        random_target_model("llama", dtype=torch.bfloat16), tmp_path, trainable=True
    )
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}


def test_adapters_are_saved_without_the_target_model_loaded_frozen_and_merged(
    tmp_path: Path,
) -> None:
    target_model = random_target_model("llama", dtype=torch.float32)
    adapter = Adapter.attach(target_model, LoraSpec(r=4, dropout=0.1))
    _randomize(adapter)
    target_model.model.eval()
    expected = _logits(target_model)
    adapter.save(tmp_path / "adapter")
    with safe_open(tmp_path / "adapter" / "adapter_model.safetensors", "pt") as file:
        assert all("lora_" in name for name in file.keys())  # noqa: SIM118

    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    shutil.copytree(tmp_path / "adapter", tmp_path / "part")
    save_file(
        {n: t for n, t in tensors.items() if "layers.1." not in n},
        tmp_path / "part/adapter_model.safetensors",
    )
    with pytest.raises(CheckpointError, match="missing adapter keys"):
        Adapter.load(random_target_model("llama", dtype=torch.float32), tmp_path / "part")
    for content in ("[]", "{}"):
        (tmp_path / "part" / "adapter_config.json").write_text(content)
        with pytest.raises(CheckpointError, match="not the configuration of an adapter"):
            Adapter.load(target_model, tmp_path / "part")

    again = random_target_model("llama", dtype=torch.float32)
    loaded = Adapter.load(again, tmp_path / "adapter")
    assert torch.equal(_logits(again), expected)
    assert not loaded.parameters()
    loaded.merge()
    assert torch.allclose(_logits(again), expected, atol=1e-4)
    assert again.lm_head().low_rank is None
    with pytest.raises(CheckpointError, match="not an adapter"):
        Adapter.load(again, tmp_path)


@pytest.fixture(scope="module")
def four_bit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama on disk, large enough for 4-bit blocks."""
    pytest.importorskip("bitsandbytes")
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        eos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(path)
    words = {f"w{i}": i for i in range(64)}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0"))
    ).save_pretrained(path)
    return path


def test_gradients_of_a_4_bit_target_model_are_the_same_after_an_eval_pass(four_bit: Path) -> None:
    """On CPUs with AVX512-bf16 an eval pass would switch to a kernel without autograd."""

    def gradient(evaluate_first: bool) -> torch.Tensor:
        target_model = load_target_model(
            str(four_bit), dtype="bfloat16", device="cpu", quantization="nf4"
        )
        assert target_model.model.is_loaded_in_4bit
        adapter = Adapter.attach(
            target_model, LoraSpec(r=4, dropout=0.0, targets=("q_proj", "down_proj"))
        )
        _randomize(adapter)
        if evaluate_first:
            target_model.model.eval()
            with torch.no_grad():
                target_model.run(TOKENS)
        target_model.model.train()
        target_model.run(TOKENS).final.float().square().sum().backward()
        grad = adapter.parameters()[0].grad
        assert grad is not None
        return grad

    fresh = gradient(False)
    assert float(fresh.abs().max()) > 0
    assert torch.allclose(gradient(True), fresh, rtol=1e-3, atol=1e-3 * float(fresh.abs().max()))


def test_merging_into_4_bits_dequantizes_first(four_bit: Path) -> None:
    target_model = load_target_model(
        str(four_bit), dtype="float32", device="cpu", quantization="nf4"
    )
    adapter = Adapter.attach(target_model, LoraSpec(r=4, dropout=0.0))
    _randomize(adapter)
    target_model.model.eval()
    expected = _logits(target_model)
    adapter.merge()
    assert torch.allclose(_logits(target_model), expected, atol=2e-2)
    assert not any("4bit" in type(module).__name__ for module in target_model.model.modules())


def test_damaged_and_not_finite_adapters_are_refused(tmp_path: Path) -> None:
    adapter = Adapter.attach(random_target_model("llama", dtype=torch.float32), LoraSpec(r=4))
    adapter.save(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged: its checksum is"):
        Adapter.load(random_target_model("llama", dtype=torch.float32), tmp_path)
    with torch.no_grad():
        adapter.parameters()[0][0, 0] = float("inf")
    adapter.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"lora_A.* is NaN or infinite"):
        Adapter.load(random_target_model("llama", dtype=torch.float32), tmp_path)


def test_entries_that_peft_leaves_out_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Adapter.attach(random_target_model("llama", dtype=torch.float32), LoraSpec(r=4)).save(tmp_path)
    path = tmp_path / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "lora_gamma": 2, "lora_none": None}), encoding="utf-8")
    for _ in range(2):
        Adapter.load(random_target_model("llama", dtype=torch.float32), tmp_path)
    (line,) = [record.getMessage() for record in caplog.records if "not read" in record.message]
    assert line == f"{path}: not read: lora_gamma"
