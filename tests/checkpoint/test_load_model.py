import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

from medusa_train.api import load
from medusa_train.checkpoint.load_model import compile_cache_dir, load_tree, load_with_draft
from medusa_train.checkpoint.resolve import resolve_model
from medusa_train.errors import CheckpointError
from medusa_train.models.drafts.combined import DynamicDraft
from medusa_train.trees.dynamic import DynamicTrees, StepSize
from medusa_train.trees.tree import Tree
from tests.checkpoint.others import fake_run


def test_heads_over_four_bits_are_loaded_over_four_bits(run_dir: Path) -> None:
    pytest.importorskip("bitsandbytes")
    subject = load_with_draft(replace(resolve_model(str(run_dir), None, None), quantization="nf4"), "float32")
    assert subject.backbone.model.is_quantized
    assert subject.draft is not None
    assert subject.draft.num_heads == 3


def test_a_run_without_a_tree_decodes_a_chain(tmp_path: Path) -> None:
    paths = resolve_model(str(fake_run(tmp_path / "run", tree=False)), None, None)
    assert load_tree(paths, num_heads=4) == Tree.chain(4)


def test_a_tree_deeper_than_the_heads_is_refused(tmp_path: Path) -> None:
    paths = resolve_model(str(fake_run(tmp_path / "run")), None, None)
    assert load_tree(paths, num_heads=2) == Tree.chain(2)
    with pytest.raises(CheckpointError, match="2 deep, but there are only 1 heads"):
        load_tree(paths, num_heads=1)


def test_loads_backbone_heads_and_tree(run_dir: Path) -> None:
    subject = load_with_draft(resolve_model(str(run_dir), None, None), "bfloat16")
    assert subject.draft is not None
    assert subject.draft.num_heads == 3
    assert subject.tree == Tree.cartesian([2, 2])
    assert str(subject.backbone.dtype) == "torch.bfloat16"


def test_the_compile_cache_is_in_the_run_or_in_the_users_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert compile_cache_dir(tmp_path) == tmp_path.resolve() / "compiled"
    cache_dir()  # torch names its own default in the environment as soon as it is asked
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == default_cache_dir()
    assert compile_cache_dir(tmp_path) == tmp_path.resolve() / "compiled"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert compile_cache_dir(tmp_path) == tmp_path / "elsewhere"


def test_dynamic_trees_take_the_place_of_the_fixed_one(run_dir: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(run_dir, run)
    with pytest.raises(CheckpointError, match=r"tree dynamic: .*tree.json holds no confidences of these heads"):
        load(run, tree="dynamic", dtype="float32")
    dynamic = DynamicTrees((1.0, 0.5), (StepSize(0, 10.0, 1.0), StepSize(8, 10.5, 2.0)))
    Tree.chain(2).save(run / "tree.json", dynamic=dynamic.record())
    loaded = load_with_draft(resolve_model(str(run), None, "dynamic"), "float32")
    assert isinstance(loaded.proposer, DynamicDraft)
    assert (loaded.dynamic, loaded.tree, loaded.fixed_proposer) == (dynamic, Tree.chain(2), loaded.draft)
    prompts = ("Say ay.", "Say oh.")
    fixed, chosen = load(run, dtype="float32"), load(run, tree="dynamic", dtype="float32")
    assert [chosen.generate(one, 24, raw=True) for one in prompts] == [
        fixed.generate(one, 24, raw=True) for one in prompts
    ]
