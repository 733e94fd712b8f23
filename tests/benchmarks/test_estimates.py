"""The table of docs/training.md is what the code estimates."""

import estimates


def test_the_page_has_the_estimates_of_the_code() -> None:
    assert (
        f"{estimates.START}\n{estimates.make_table()}\n{estimates.END}"
        in estimates.PAGE.read_text(encoding="utf-8")
    )


def test_every_configuration_fits_the_gpu_of_its_row() -> None:
    for line in estimates.make_table().splitlines()[2:]:
        gpu, memory = (cell.strip() for cell in line.split("|")[3:5])
        # a tenth is left for what is not estimated: the CUDA context, fragmentation, the kernels'
        # workspace
        assert int(memory.split()[0]) * 1.073741824 < 0.9 * int(gpu.split()[-2])
