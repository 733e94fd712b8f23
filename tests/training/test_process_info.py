"""What launchers announce to a process."""

import pytest

from medusa_train.errors import ConfigError, MedusaError
from medusa_train.training.distributed import (
    DistributedContext,
    PeerError,
    _without_paths,
    check_distinct_gpus,
    check_same_config,
    gpu_index,
)
from medusa_train.training.process_info import ProcessInfo, first_host, process_info_from_env

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "1234",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "gpu[003-004,007],login",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
}


@pytest.mark.parametrize(
    ("environ", "info"),
    [
        ({}, None),
        (TORCHRUN, ProcessInfo(3, 4, 1, "node7", 1234)),
        ({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}, None),  # one process of one is alone
        (
            {**SRUN, **TORCHRUN},
            ProcessInfo(3, 4, 1, "node7", 1234),
        ),  # a launcher inside SLURM comes first
        # in a batch script SLURM_PROCID is 0 and SLURM_NTASKS what was asked for, but srun has
        # started nothing
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "gpu1"}, None),
    ],
)
def test_what_launchers_announce(environ, info):
    assert process_info_from_env(environ) == info


def test_srun():
    place = process_info_from_env(SRUN)
    assert place is not None
    assert (place.rank, place.size, place.local_rank, place.address) == (5, 8, 1, "gpu003")
    other = process_info_from_env({**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    assert other is not None
    assert other.port == place.port  # all tasks arrive at the same one
    assert process_info_from_env({**SRUN, "SLURM_JOB_ID": "4712"}) != place


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("n1", "n1"), ("n1,n2", "n1"), ("a[12-14]", "a12"), ("a[7,9],b1", "a7"), ("", "127.0.0.1")],
)
def test_the_first_host_of_a_node_list(nodes, host):
    assert first_host(nodes) == host


@pytest.mark.parametrize("wrong", [{"RANK": "4"}, {"RANK": "x"}, {"MASTER_PORT": "http"}])
def test_what_can_not_be_is_refused(wrong):
    with pytest.raises(ConfigError, match=r"rank 4 of 4|'x'|MASTER_PORT"):
        process_info_from_env({**TORCHRUN, **wrong})


@pytest.mark.parametrize(("local_rank", "visible", "index"), [(3, 8, 3), (0, 1, 0), (3, 1, 0)])
def test_the_gpu_of_a_process(local_rank, visible, index):
    """srun --gpus-per-task=1 shows each process its own GPU only."""
    assert gpu_index(ProcessInfo(3, 4, local_rank, "127.0.0.1", 1), visible) == index


@pytest.mark.parametrize("local_rank", [2, 3])
def test_more_processes_than_gpus_are_refused(local_rank):
    with pytest.raises(MedusaError, match="process 3 of 4 has no GPU: it sees 2"):
        gpu_index(ProcessInfo(3, 4, local_rank, "127.0.0.1", 1), 2)


def test_a_block_fails_in_all_processes(monkeypatch):
    distributed = DistributedContext(1, 2)
    for code, visible, words in (
        (None, 2, "has no GPU"),
        (2, 2, "another process"),
        (2, 8, "another process"),
    ):
        # code: how rank 0 ends
        monkeypatch.setattr(distributed, "gather", lambda value, code=code: [code, value])
        with pytest.raises(MedusaError, match=words), distributed.failing_together():
            gpu_index(ProcessInfo(3, 4, 3, "127.0.0.1", 1), visible)


@pytest.mark.parametrize(("rank", "error"), [(0, MedusaError), (1, PeerError)])
def test_processes_that_share_a_gpu_are_refused(rank, error, monkeypatch):
    distributed = DistributedContext(rank, 2)
    monkeypatch.setattr(distributed, "gather", lambda value: [value, "GPU-2"])
    check_distinct_gpus(distributed, "GPU-1")
    with pytest.raises(error, match=r"2 processes share 1 GPU|another process"):
        check_distinct_gpus(distributed, "GPU-2")


@pytest.mark.parametrize("rank", [0, 1])
def test_processes_with_other_values_are_named_by_their_keys(rank, monkeypatch):
    distributed = DistributedContext(rank, 2)
    values = {"rate": 0.1, "datasets": [{"path": "/a/b", "split": "x"}], "kwargs": {"x": "a"}}
    for of_other, words in (
        ({**values, "rate": 0.2}, "process 1 on two has other values than process 0 of: rate. The"),
        ({**values, "kwargs": {}}, "has other values than process 0 of: kwargs. The"),
        ({**values, "datasets": [{"path": "/c/d"}]}, "of: datasets. The"),
        (None, "process 1 on two cannot read its configuration"),
    ):
        of_rank = [values, of_other]
        hosts = ("one", "two")

        def gather(_, of_rank=of_rank, hosts=hosts):
            return list(zip(hosts, map(_without_paths, of_rank), strict=True))

        monkeypatch.setattr(distributed, "gather", gather)
        with pytest.raises(PeerError if rank else ConfigError, match=None if rank else words):
            check_same_config(distributed, of_rank[rank])


def test_only_paths_may_differ_between_machines(monkeypatch):
    distributed = DistributedContext(0, 2)
    monkeypatch.setattr(
        distributed,
        "gather",
        lambda own: [own, ("two", _without_paths({"base_model": "/scratch/b"}))],
    )
    check_same_config(distributed, {"base_model": "/local/a"})
    with pytest.raises(ConfigError, match="base_model"):
        check_same_config(distributed, {"base_model": "gpt2"})
