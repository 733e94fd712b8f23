"""What launchers announce to a process."""

import pytest

from medusa_train.errors import ConfigError
from medusa_train.training.process_info import ProcessInfo, first_host, is_main_process, process_info_from_env

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node7", "MASTER_PORT": "1234"}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "gpu[003-004,007],login",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
}


def test_a_process_without_a_launcher_is_alone():
    assert process_info_from_env({}) is None
    assert is_main_process({})


def test_torchrun_and_deepspeed():
    assert process_info_from_env(TORCHRUN) == ProcessInfo(3, 4, 1, "node7", 1234)
    assert not is_main_process(TORCHRUN)
    assert is_main_process({**TORCHRUN, "RANK": "0"})


def test_one_process_of_one_is_alone():
    assert process_info_from_env({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}) is None


def test_srun():
    place = process_info_from_env(SRUN)
    assert place is not None
    assert (place.rank, place.size, place.local_rank, place.address) == (5, 8, 1, "gpu003")
    other = process_info_from_env({**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    assert other is not None
    assert other.port == place.port  # all tasks arrive at the same one
    assert process_info_from_env({**SRUN, "SLURM_JOB_ID": "4712"}) != place


def test_a_batch_script_is_no_task_of_several():
    """SLURM_PROCID is 0 there and SLURM_NTASKS what was asked for, but srun has started nothing."""
    assert process_info_from_env({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "gpu1"}) is None


def test_a_launcher_inside_slurm_comes_first():
    assert process_info_from_env({**SRUN, **TORCHRUN}) == ProcessInfo(3, 4, 1, "node7", 1234)


@pytest.mark.parametrize(
    ("nodes", "host"), [("n1", "n1"), ("n1,n2", "n1"), ("a[12-14]", "a12"), ("a[7,9],b1", "a7"), ("", "127.0.0.1")]
)
def test_the_first_host_of_a_node_list(nodes, host):
    assert first_host(nodes) == host


@pytest.mark.parametrize("wrong", [{"RANK": "4"}, {"RANK": "x"}, {"MASTER_PORT": "http"}])
def test_what_can_not_be_is_refused(wrong):
    with pytest.raises(ConfigError, match=r"rank 4 of 4|'x'|MASTER_PORT"):
        process_info_from_env({**TORCHRUN, **wrong})
