"""Load a causal language model from a directory or the Hugging Face hub as a `TargetModel`,
optionally quantized.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal
from zipfile import is_zipfile

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import AddedToken, AutoConfig, AutoTokenizer
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.utils import is_flash_attn_2_available

from medusa_train.config.paths import resolve_path
from medusa_train.config.types import SPECIAL_TOKENS, Quantization
from medusa_train.errors import ConfigError, TargetModelError
from medusa_train.hub import describe_hub_error, hub_is_unreachable
from medusa_train.io import describe_size, parse_json
from medusa_train.models.architecture import (
    attention_of,
    auto_class,
    check_architecture,
    check_decodes,
)
from medusa_train.models.compatibility import check_model
from medusa_train.models.document_attention import (
    FLASH,
    flash_unsupported_reason,
    register_document_attention,
)
from medusa_train.models.model_files import find_target_model, missing_from_hub, model_directory
from medusa_train.models.partitioned import gathering_modules
from medusa_train.models.precision import WeightMemory, auto_dtype, default_device, parse_dtype
from medusa_train.models.stop_tokens import GENERATION_CONFIG
from medusa_train.models.target_model import TargetModel
from medusa_train.network import check_network

#: Special tokens that no model reads, so the vocabulary may lack them: padding is masked, and no
#: text contains an unknown token.
_NOT_READ = ("pad_token", "unk_token")
#: Errors that transformers and tokenizers raise for files with unexpected content.
UNREADABLE = (
    OSError,
    ValueError,
    ImportError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RecursionError,
    StrictDataclassError,
)
#: Finds the repository of the code in transformers' message, if it is not the model's repository.
#: For the code of a config, transformers 5.16 writes the bare name instead of the sentence.
_CODE_OF_ANOTHER = re.compile(r"(?:custom code contained in|\A) ?(\S+) (?:which|You can inspect)")


def load_target_model(
    name: str,
    *,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device | None = None,
    quantization: Quantization | None = None,
    trust_remote_code: bool = False,
    special_tokens: Mapping[str, str] | None = None,
    only_trains: bool = False,
) -> TargetModel:
    """Load a model and its tokenizer, frozen and in eval mode, and check what it computes.

    Args:
        name: a directory, or the name of a model on the hub.
        dtype: dtype of the weights, or "auto"; with `quantization`, of the matrix products.
        device: device to load to; by default the GPU if there is one.
        quantization: quantize the weights while loading.
        trust_remote_code: allow Python code of the model's repository to run.
        special_tokens: special tokens of the tokenizer, see `load_tokenizer`.
        only_trains: accept a model whose token trees cannot be verified.

    Raises:
        TargetModelError: the model cannot be found or read, or its architecture is not supported.
    """
    # 1. its files, device and dtype
    source, config = resolve_target_model(name, trust_remote_code=trust_remote_code)
    if not only_trains:
        check_decodes(config, name)
    device = default_device() if device is None else torch.device(device)
    dtype = parse_dtype(dtype, device)

    # 2. tokenizer and weights
    try:
        tokenizer = load_tokenizer(
            source, trust_remote_code=trust_remote_code, special_tokens=special_tokens
        )
        model: Any = auto_class(config).from_pretrained(
            source,
            dtype=dtype,
            attn_implementation=attention_of(config),
            trust_remote_code=trust_remote_code,
            local_files_only=hub_is_unreachable(),
            **loading_options(quantization, dtype, device),
        )
    except UNREADABLE as error:
        _refuse_remote_code(error, source)
        reason = (
            describe_hub_error(error, name, "model")
            or _describe_index(source)
            or describe_unreadable(error)
        )
        raise TargetModelError(f"base_model {name}: loading failed: {reason}") from error
    except (SafetensorError, UnpicklingError, EOFError, RuntimeError) as error:
        damaged = _damaged_file(source)
        if damaged is None:
            if isinstance(error, torch.OutOfMemoryError) or "memory" in str(error):
                raise
            raise TargetModelError(
                f"base_model {name}: loading failed: {describe_unreadable(error)}"
            ) from error
        reason = str(error).partition(". ")[0] or type(error).__name__
        raise TargetModelError(
            f"base_model {name}: {damaged}: incomplete or damaged ({reason}); copy or download it"
            " again"
        ) from error
    if quantization is None:
        model = model.to(device)

    # 3. check what it can be used for
    if loaded_quantization(model) in ("nf4", "fp4"):  # the checkpoint may be stored in 4 bits
        keep_trainable_kernels(model)
    model.eval().requires_grad_(False)  # until a recipe trains it
    target_model = TargetModel(model, tokenizer, name)
    with gathering_modules(model):  # in training it may be partitioned
        check_model(target_model)
    return target_model


def model_without_weights(config: Any, *, trust_remote_code: bool = False) -> Any:
    """Build a model of this config on the meta device: parameters with shapes but no values."""
    with torch.device("meta"):
        return auto_class(config).from_config(config, trust_remote_code=trust_remote_code)


def load_tokenizer(
    resolved: str,
    *,
    trust_remote_code: bool,
    special_tokens: Mapping[str, str] | None = None,
) -> Any:
    """Load the target model's tokenizer.

    Args:
        resolved: the path or hub name returned by `resolve_target_model`.
        trust_remote_code: allow Python code of the model's repository to run.
        special_tokens: tokens of its vocabulary to use as its `eos_token`, `bos_token` and so on.

    Raises:
        TargetModelError: it cannot be read.
        ConfigError: it has no such token.
    """
    # with `mistral_format`, transformers prefers a tekken.json to tokenizer.json, and that
    # tokenizer has no offsets
    options = {"local_files_only": hub_is_unreachable(), "mistral_format": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            resolved, trust_remote_code=trust_remote_code, **options
        )
    except UNREADABLE as error:
        _refuse_remote_code(error, resolved)
        raise TargetModelError(
            f"base_model {resolved}: cannot load its tokenizer: {describe_unreadable(error)}"
        ) from error
    if not isinstance(tokenizer.model_max_length, (int, float)):
        raise TargetModelError(
            f"base_model {resolved}: tokenizer_config.json: model_max_length must be a number, it"
            f" is {tokenizer.model_max_length!r}"
        )
    _set_special_tokens(tokenizer, special_tokens or {}, resolved)
    return tokenizer


def describe_unreadable(error: Exception) -> str:
    """Return the message of a library's error. The type comes first if the message alone may be
    unclear, such as a bare name.
    """
    text = str(error).strip()
    if isinstance(error, RecursionError):
        return "JSON that is nested too deeply"
    if isinstance(error, (OSError, ValueError, ImportError)) and text:
        return text
    return f"{type(error).__name__}: {text}"


def _set_special_tokens(tokenizer: Any, special_tokens: Mapping[str, str], name: str) -> None:
    """Give tokens the roles in `special_tokens`. They must be in the vocabulary: others have no
    embedding.
    """
    if not special_tokens:
        return
    vocabulary = tokenizer.get_vocab()
    for role, text in special_tokens.items():
        if role not in SPECIAL_TOKENS:
            raise ConfigError(
                f"special_tokens: {role}: unknown; choose {', '.join(SPECIAL_TOKENS)}"
            )
        if text in vocabulary:
            token = AddedToken(text, lstrip=False, rstrip=False, normalized=False, special=True)
            tokenizer.add_special_tokens({role: token})
        elif role not in _NOT_READ:
            raise ConfigError(
                f"special_tokens: {role}: {text} is not a token of {name}, and tokens cannot be"
                " added here: name one of its own, or a base_model whose embeddings include it"
            )


def unneeded_special_tokens(tokenizer: Any, special_tokens: Mapping[str, str] | None) -> str | None:
    """Describe the configured special tokens that are not in the vocabulary but not needed either;
    None if there are none.
    """
    vocabulary = tokenizer.get_vocab()
    unneeded = []
    for role, text in (special_tokens or {}).items():
        if role in _NOT_READ and text not in vocabulary:
            unneeded.append(f"{role}: {text}")
    if not unneeded:
        return None
    return (
        f"special_tokens: not in the tokenizer's vocabulary, and not needed: {', '.join(unneeded)}"
        " (padding is masked, and no text has an unknown token)"
    )


def _describe_index(source: str) -> str | None:
    """Describe a damaged index of weight files; None if there is none."""
    for path in sorted(model_directory(source).glob("*.index.json")):
        try:
            index = parse_json(path.read_text(encoding="utf-8"))
            files = index["weight_map"].values()
            is_valid = isinstance(index["metadata"], dict)
            is_valid = is_valid and all((path.parent / str(file)).is_file() for file in files)
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            is_valid = False
        if not is_valid:
            return (
                f"{path} is damaged, or names files that are not there; copy or download the model"
                " again"
            )
    return None


def _damaged_file(source: str) -> Path | None:
    """Return the first weight file that cannot be opened. The messages of safetensors and torch do
    not name it.
    """
    directory = model_directory(source)
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(str(path), framework="pt"):
                pass
        except SafetensorError:
            return path
    for path in sorted(directory.glob("pytorch_model*.bin")):
        if not is_zipfile(path):
            return path
    return None


def resolve_target_model(name: str, *, trust_remote_code: bool = False) -> tuple[str, Any]:
    """Find a model by directory or hub name and read its config, without loading weights.

    Returns:
        The argument for `from_pretrained`, and the transformers config.

    Raises:
        TargetModelError: the directory does not exist, the hub has no such model or cannot be
            reached, or the architecture is not supported.
    """
    source, _ = find_target_model(name)
    if resolve_path(name) is None and not hub_is_unreachable():
        check_network()
    try:
        config = AutoConfig.from_pretrained(
            source, trust_remote_code=trust_remote_code, local_files_only=hub_is_unreachable()
        )
    except UNREADABLE as error:
        _refuse_remote_code(error, source)
        if Path(source).is_dir():
            raise TargetModelError(
                f"base_model {name}: cannot read config.json: {describe_unreadable(error)}"
            ) from error
        reason = describe_hub_error(error, name, "model") or (
            "what the Hugging Face hub answered is not a model's config.json; does a proxy answer"
            f" in its place? ({str(error).strip().partition(chr(10))[0]})"
        )
        raise missing_from_hub(name, reason) from error
    check_architecture(config, name)
    _check_generation_config(name, source)
    return source, config


def _check_generation_config(name: str, source: str) -> None:
    """Raise TargetModelError for a damaged generation_config.json. transformers would ignore it,
    and answers would end at other tokens.
    """
    path = model_directory(source) / GENERATION_CONFIG
    if not os.path.lexists(path):
        return
    try:
        is_valid = isinstance(json.loads(path.read_text(encoding="utf-8")), dict)
    except (OSError, ValueError, RecursionError):
        is_valid = False
    if not is_valid:
        raise TargetModelError(
            f"base_model {name}: {path} is not a JSON object that can be read; copy or download it"
            " again"
        )


def _refuse_remote_code(error: Exception, name: str) -> None:
    """Raise TargetModelError if `error` is transformers' refusal to run a repository's Python code;
    otherwise do nothing.
    """
    if "`trust_remote_code=True`" not in str(error):
        return
    elsewhere = _CODE_OF_ANOTHER.search(str(error))
    repository = name if elsewhere is None else f"{elsewhere[1]}, which {name} names"
    raise TargetModelError(
        f"base_model {name}: needs Python code of the repository {repository}. Read that code, and"
        " allow it by trust_remote_code=true on the command line, trust_remote_code: true in your"
        " YAML, or load(..., trust_remote_code=True); a run directory's config.yaml cannot allow it"
    ) from error


def loaded_quantization(model: Any) -> str | None:
    """Return how the weights of a loaded model are quantized: "nf4", "int8" or transformers' name
    of another method.
    """
    if not getattr(model, "is_quantized", False):
        return None
    config = model.config.quantization_config
    if getattr(config, "load_in_4bit", False):
        return str(config.bnb_4bit_quant_type)
    if getattr(config, "load_in_8bit", False):
        return "int8"
    return str(getattr(config.quant_method, "value", config.quant_method))


def auto_dtype_that_fits(
    name: str,
    report: Callable[[str], None],
    *,
    float16: bool = True,
    quantization: Quantization | None = None,
    trust_remote_code: bool = False,
) -> str:
    """Return the dtype that `auto` means for a model: `auto_dtype`, or "bfloat16" if the weights
    fit into the free memory of a CPU only in bfloat16.

    Args:
        name, quantization, trust_remote_code: as in `load_target_model`.
        report: receives a line if memory made the choice.
        float16: as in `auto_dtype`.

    Raises:
        TargetModelError: the model cannot be found, or its architecture is not supported.
    """
    device = default_device()
    dtype = auto_dtype(device, float16=float16)
    if device.type != "cpu" or dtype != "float32" or quantization is not None:
        return dtype
    _, config = resolve_target_model(name, trust_remote_code=trust_remote_code)
    if getattr(config, "quantization_config", None) is not None:
        return dtype
    shape = model_without_weights(config, trust_remote_code=trust_remote_code)
    memory = WeightMemory.of(shape, device)
    if memory.fit("float32") or not memory.fit("bfloat16"):
        return dtype
    report(
        f"dtype: bfloat16, since the weights need {describe_size(4 * memory.numbers)} in float32,"
        " more than is free; this CPU is slow in bfloat16"
    )
    return "bfloat16"


def loading_options(
    quantization: Quantization | None, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that load weights directly to a GPU, and quantize
    them.

    NF4 uses double quantization (QLoRA, "QLoRA Finetuning"); `dtype` is the dtype of the matrix
    products. lm_head is not quantized.

    Raises:
        TargetModelError: bitsandbytes cannot be used.
    """
    # otherwise every process would hold a copy of the model in host memory
    on_device = {"device_map": {"": device}}
    if quantization is None:
        if device.type == "cpu" or is_deepspeed_zero3_enabled():
            return {}
        return on_device
    if (unsupported_reason := bitsandbytes_unsupported_reason(device)) is not None:
        raise TargetModelError(
            f"load_in_4bit and load_in_8bit need bitsandbytes: {unsupported_reason}"
        )
    from transformers import BitsAndBytesConfig

    if quantization == "nf4":
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=dtype,
            bnb_4bit_use_double_quant=True,
        )
    else:
        config = BitsAndBytesConfig(load_in_8bit=True)
    return {"quantization_config": config, **on_device}


def bitsandbytes_unsupported_reason(device: torch.device) -> str | None:
    """Return why bitsandbytes cannot be used on a device; None if it can. Its own error would come
    only at the first call.
    """
    try:
        import bitsandbytes
    except ImportError:
        return "pip install bitsandbytes"
    except (OSError, RuntimeError) as error:
        return str(error)
    if device.type == "cuda" and not bitsandbytes.functional.lib.compiled_with_cuda:
        return (
            f"{bitsandbytes.__version__} has no library for CUDA {torch.version.cuda}; install"
            " another version"
        )
    return None


def keep_trainable_kernels(model: Any) -> None:
    """Prevent 4-bit layers from switching to the inference-only kernel for CPUs with AVX512-bf16.

    A forward pass in eval mode repacks the weights in place for that kernel. It has no autograd, so
    adapters trained afterwards would get wrong gradients, with only a warning.
    """
    from bitsandbytes.nn import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False


def choose_attention(
    target_model: TargetModel, wanted: bool | Literal["auto"], *, packed: bool
) -> str:
    """Choose the fastest attention that keeps packed conversations separate.

    Rows with one conversation need no mask, so torch's sdpa can use its flash kernel. In packed
    rows, each conversation is computed separately, from its bounds: with flash-attn's varlen
    kernel, or with one sdpa call per conversation. The alternative is a block-diagonal mask. It
    takes T x T positions and prevents sdpa's flash kernel; only soft-capped scores and sinks need
    it. Sliding windows are handled in the same way, even in rows with one conversation.

    Args:
        target_model: as loaded, before any part of it is converted for training. It is switched to
            varlen attention if possible.
        wanted: the key `flash_attention`.
        packed: whether rows hold several conversations (`sample_packing`).

    Returns:
        One line with the kernel, and the reason if it is not flash-attn's.
    """
    if target_model.tree_unsupported_reason is not None or (
        not packed and "sliding_attention" not in target_model.layer_types
    ):
        return (
            f"attention: torch {target_model.attention}, causal (one conversation per row needs no"
            " mask)"
        )
    which = "packed rows" if packed else "rows with sliding windows"
    # 1. the kernels to try, the fastest first, and why others are left out
    kernels: list[tuple[str, str]] = []
    reasons: list[str] = []
    capped = target_model.attention == "eager"
    unsupported_reason: str | None = "flash_attention: false"
    if wanted:
        unsupported_reason = flash_unsupported_reason(
            target_model.device.type,
            target_model.dtype,
            capped=capped,
            supported=bool(getattr(target_model.model, "_supports_flash_attn", False)),
            installed=is_flash_attn_2_available(),
        )
    if unsupported_reason is None:
        kernels.append((FLASH, "flash-attn varlen kernel"))
    else:
        reasons.append(unsupported_reason)
    if capped:
        reasons.append("soft-capped scores or sinks need a mask")
    else:
        kernels.append((register_document_attention(), "torch sdpa, one call per document,"))
    # 2. the first that keeps conversations separate
    for implementation, kernel in kernels:
        try:
            target_model.use_varlen(implementation)
        except (TargetModelError, ImportError, RuntimeError, TypeError, ValueError) as error:
            reasons.append(str(error).partition("\n")[0])
            continue
        line = f"attention: {kernel} for {which}"
        if reasons:
            line += f" ({reasons[0]})"
        return line
    return (
        f"attention: torch {target_model.attention} with a mask for {which} ({'; '.join(reasons)})"
    )
