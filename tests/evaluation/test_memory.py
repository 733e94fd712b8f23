import pytest
import torch
from torch import nn

from medusa_train.evaluation import memory
from medusa_train.evaluation.memory import Weights, free_memory, is_out_of_memory

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
            True,
        ),
        (RuntimeError("[enforce fail] data. DefaultCPUAllocator: not enough memory: you tried to allocate 9"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("not enough memory"), False),
    ],
)
def test_only_missing_memory_is_taken_for_it(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_what_this_machines_allocator_says_is_understood() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 62, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_weights_take_what_their_dtype_does_and_packed_ones_always_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(10, 10, bias=False)
    model.packed = nn.Parameter(torch.zeros(30, dtype=torch.uint8), requires_grad=False)
    weights = Weights.of(model, CPU)
    assert (weights.numbers, weights.packed) == (100, 30)
    monkeypatch.setattr(memory, "free_memory", lambda device: 429)
    assert weights.fit("bfloat16")
    assert not weights.fit("float32")
    monkeypatch.setattr(memory, "free_memory", lambda device: None)
    assert weights.fit("float32")


def test_a_cpu_says_how_much_is_free_or_nothing() -> None:
    free = free_memory(CPU)
    assert free is None or free > 1 << 20
