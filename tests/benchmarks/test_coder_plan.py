"""A coder on a GPU: its pieces come back as the model they were cut from, and every step can run."""

import json
import sys
from pathlib import Path

import coder_pieces
import gguf
import gpu
import numpy as np
import pytest
from coder_plan import CODERS, PROMPTS, coder_plan
from gpu_plan import Step, plan, problems_of


def write_gguf(path: Path, tensors: dict[str, np.ndarray]) -> None:
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_uint32("qwen2.block_count", 2)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "c"])
    writer.add_string("general.name", "small")
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_the_output_matrix_becomes_the_embeddings(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    names = ("token_embd.weight", "blk.0.attn_q.weight", "output.weight")
    tensors = {name: rng.normal(size=(4, 8)).astype(np.float32) for name in names}
    write_gguf(tmp_path / "two.gguf", tensors)
    coder_pieces.write_tied(tmp_path / "two.gguf", tmp_path / "one.gguf")
    reader = gguf.GGUFReader(tmp_path / "one.gguf")
    found = {tensor.name: tensor.data for tensor in reader.tensors}
    assert set(found) == {"token_embd.weight", "blk.0.attn_q.weight"}
    assert np.array_equal(found["token_embd.weight"], tensors["output.weight"])
    assert np.array_equal(found["blk.0.attn_q.weight"], tensors["blk.0.attn_q.weight"])
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b", "c"]
    assert reader.fields["qwen2.block_count"].contents() == 2
    assert reader.fields["general.architecture"].contents() == "qwen2"


def test_pieces_are_joined_when_all_of_them_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "whole.gguf"
    whole.write_bytes(bytes(range(256)) * 10)
    folder = tmp_path / "pieces"
    pieces = coder_pieces.cut(whole, folder, "qwen2.5-coder-0.5b", 1000)
    assert [piece.stat().st_size for piece in pieces] == [1000, 1000, 560]
    kept = pieces[1].read_bytes()
    pieces[1].write_bytes(kept[::-1])
    pieces[2].rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"2 pieces .*piece-001.bin \(damaged\), piece-002.bin"):
        coder_pieces.join(folder, tmp_path / "models")
    pieces[1].write_bytes(kept)
    (tmp_path / "elsewhere").rename(pieces[2])

    converted: list[bytes] = []

    def convert(gguf_file: Path, model: object, out: Path) -> None:
        converted.append(gguf_file.read_bytes())
        assert not model.tied_to_output  # type: ignore[attr-defined]
        assert out == tmp_path / "models/qwen2.5-coder-0.5b-instruct"

    monkeypatch.setattr(coder_pieces, "convert", convert)
    coder_pieces.join(folder, tmp_path / "models")
    assert converted == [whole.read_bytes()]
    assert sorted(path.name for path in folder.iterdir()) == [
        "piece-000.bin",
        "piece-001.bin",
        "piece-002.bin",
        "pieces.json",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "has no pieces.json; name the directory that pack wrote"),
        ("x", "pieces.json is damaged"),
        ('{"model": "other", "pieces": []}', "pieces.json is damaged"),
        ('{"model": "qwen2.5-coder-0.5b"}', "pieces.json is damaged"),
    ],
)
def test_a_directory_that_pack_did_not_write_is_named(
    tmp_path: Path, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / "pieces.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        coder_pieces.join(tmp_path, tmp_path / "models")
    assert not (tmp_path / "models").exists()


def test_pieces_of_no_size_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        coder_pieces.parse_arguments(["pack", "qwen2.5-coder-0.5b", "--out", "x", "--mib", "0"])
    assert ended.value.code == 2
    assert "give 1 or more" in capsys.readouterr().err


def test_a_failed_packing_leaves_no_tied_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "models" / "packages" / "whole.gguf"
    whole.parent.mkdir(parents=True)
    names = ("token_embd.weight", "output.weight")
    write_gguf(whole, {name: np.zeros((4, 8), np.float32) for name in names})
    (tmp_path / "file").touch()
    monkeypatch.setattr(coder_pieces, "fetch_gguf", lambda *_: whole)
    monkeypatch.setattr(coder_pieces, "check_disk", lambda *_: None)
    command = [
        "coder_pieces.py",
        "pack",
        "qwen2.5-coder-0.5b",
        "--models",
        str(tmp_path / "models"),
    ]
    monkeypatch.setattr(sys, "argv", [*command, "--out", str(tmp_path / "file")])
    with pytest.raises(SystemExit, match="error: "):
        coder_pieces.main()
    assert list(whole.parent.iterdir()) == [whole]


@pytest.mark.parametrize("name", CODERS)
def test_a_plan_fits_its_time_and_names_only_what_has_to_be_brought(name: str) -> None:
    steps = coder_plan(name)
    assert sum(step.expected for step in steps) <= 12 * 60
    brought = ("coder_pieces.py pack", "bench 'humaneval'")
    for step in steps:
        problems = [p for p in problems_of(step, steps) if not any(word in p for word in brought)]
        assert problems == []


@pytest.mark.parametrize("steps", [plan(), *map(coder_plan, CODERS)], ids=["plan", *CODERS])
def test_a_step_that_is_missed_is_named_as_the_plan_names_it(steps: list[Step]) -> None:
    named = set()
    for one in steps:
        for how in one.needs.values():
            if how.startswith("step "):
                named.add(how.removeprefix("step "))
    assert named
    assert named <= {one.name for one in steps}


@pytest.mark.slow
def test_the_tiny_plan_runs_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = tmp_path / "prompts.jsonl"
    things = ("a sum", "the weather", "two lists", "a river", "a tree", "time", "fish", "a word")
    lines = []
    for number, thing in enumerate(things):
        turn = {"from": "human", "value": f"Tell me about {thing}, please."}
        lines.append(json.dumps({"id": f"p-{number}", "conversations": [turn]}))
    prompts.write_text("\n".join(lines))
    monkeypatch.setattr("coder_plan.PROMPTS", str(prompts))
    assert str(prompts) != PROMPTS
    out = ["--out", str(tmp_path), "--work", str(tmp_path / "work")]
    assert gpu.main(["--coder", "tiny", *out]) == 0
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert {step["status"] for step in record["steps"].values()} == {"done"}
    for recipe in ("tiny_m1", "tiny_eagle3"):
        overall = record["steps"][f"coder-{recipe}-eval"]["figures"]["overall"]
        assert overall["answers"] == 2
        assert overall["baseline_tokens_per_s"] > 0  # an untrained draft may get no tree
