"""A CPU step has a thread for each core that the process may use; trees of made-up machines say which these are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from triolet.config.processors import Processors, ThreadChoice, choose_threads, memory_nodes


def write(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def topology(*cores: tuple[int, ...], name: str = "core_cpus_list") -> dict[str, str]:
    """Files that say which logical processors are of one core."""
    return {
        f"sys/devices/system/cpu/cpu{processor}/topology/{name}": ",".join(map(str, core)) + "\n"
        for core in cores
        for processor in core
    }


def num_threads(root: Path, usable: range | set[int], asked: str | None = None) -> int:
    return choose_threads(Processors.read(root, frozenset(usable)), asked).count


LAPTOP = topology((0, 4), (1, 5), (2, 6), (3, 7))
# Intel's hybrid processors: four cores with two hyper-threads, then four with one
HYBRID = topology((0, 1), (2, 3), (4, 5), (6, 7), (8,), (9,), (10,), (11,))
SERVER = topology(*((core, core + 64) for core in range(64)))


@pytest.mark.parametrize(
    ("files", "usable", "expected"),
    [
        pytest.param(LAPTOP, range(8), 4, id="laptop"),
        pytest.param(HYBRID, range(12), 8, id="hybrid"),
        pytest.param(SERVER, range(128), 64, id="two-sockets"),
        pytest.param(SERVER, {*range(32), *range(64, 96)}, 32, id="one-socket-of-two"),
        pytest.param(LAPTOP, {0, 1, 2, 3}, 4, id="one-sibling-of-each"),
        pytest.param(LAPTOP, {4, 5, 6, 7}, 4, id="the-other-siblings"),
        pytest.param(LAPTOP, {0, 4, 5}, 2, id="one-whole-core-and-half-of-one"),
        pytest.param(topology((0, 1)), range(2), 1, id="virtual-machine-of-one-core"),
        pytest.param(topology((0, 1), (2, 3), name="thread_siblings_list"), range(4), 2, id="old-linux"),
        pytest.param({}, range(8), 8, id="no-sys"),
    ],
)
def test_each_core_gets_one_thread(
    files: dict[str, str], usable: range | set[int], expected: int, tmp_path: Path
) -> None:
    write(tmp_path, files)
    assert num_threads(tmp_path, usable) == expected


def test_a_core_is_named_by_its_first_usable_processor(tmp_path: Path) -> None:
    write(tmp_path, LAPTOP)
    assert Processors.read(tmp_path, frozenset({0, 4, 5, 6, 2})).cores == {0, 2, 5}


@pytest.mark.parametrize(
    "text",
    ["", "\n", "zero", "0-", "-1", "0,,4", "0-99999999999", "9-3", "2-3", "\0", "0 4", "0x0", "٠"],
)
def test_a_list_of_siblings_that_makes_no_sense_is_ignored(text: str, tmp_path: Path) -> None:
    write(
        tmp_path, {f"sys/devices/system/cpu/cpu{number}/topology/core_cpus_list": text for number in (0, 1)}
    )
    assert num_threads(tmp_path, range(2)) == 2


def test_a_file_that_is_a_folder_or_no_text_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "sys/devices/system/cpu/cpu0/topology/core_cpus_list").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").mkdir(parents=True)
    write(tmp_path, {"sys/fs/cgroup/x": ""})
    (tmp_path / "sys/fs/cgroup/cpu.max").write_bytes(b"\xff\xfe 100000")
    assert Processors.read(tmp_path, frozenset({0})) == Processors(frozenset({0}), frozenset({0}))


V2 = "0::/kubepods/pod1/main\n"
V1 = "5:memory:/other\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc\n"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        pytest.param({"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5, id="container"),
        pytest.param({"proc/self/cgroup": V2, "sys/fs/cgroup/cpu.max": "200000 100000"}, 2.0, id="host-path"),
        pytest.param(
            {
                "proc/self/cgroup": V2,
                "sys/fs/cgroup/kubepods/cpu.max": "600000 100000",
                "sys/fs/cgroup/kubepods/pod1/cpu.max": "300000 100000",
                "sys/fs/cgroup/kubepods/pod1/main/cpu.max": "400000 100000",
                "sys/fs/cgroup/kubepods/pod2/cpu.max": "100000 100000",
            },
            3.0,
            id="least-on-the-way-up",
        ),
        pytest.param(
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "250000\n",
                "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            2.5,
            id="version-1",
        ),
        pytest.param(
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "50000",
            },
            1.0,
            id="version-1-in-a-container",
        ),
        pytest.param(
            {"proc/self/cgroup": V2, "sys/fs/cgroup/unified/kubepods/cpu.max": "700000 100000"},
            7.0,
            id="both-versions",
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/../../other\n", "other/cpu.max": "100000 100000"}, None, id="outside"
        ),
        pytest.param({"proc/self/cgroup": V2, "sys/fs/cgroup/cpu.max": "max 100000"}, None, id="no-limit"),
        pytest.param({"proc/self/cgroup": "\0::\n0\n::\n0::/\0\n:cpu:x"}, None, id="nonsense"),
        *(
            pytest.param({"sys/fs/cgroup/cpu.max": text}, None, id=f"nonsense-{text!r}")
            for text in ("100000", "1 0", "-1 100000", "a b", "1 2 3", "9" * 400 + " 1", "9" * 5000 + " 1")
        ),
    ],
)
def test_the_least_quota_on_the_way_to_the_root_holds(
    files: dict[str, str], quota: float | None, tmp_path: Path
) -> None:
    write(tmp_path, files)
    assert Processors.read(tmp_path, frozenset(range(8))).quota == quota


@pytest.mark.parametrize(
    ("quota", "expected"), [("150000", 1), ("50000", 1), ("200000", 2), ("390000", 3), ("800000", 4)]
)
def test_a_quota_is_rounded_down_to_whole_threads(quota: str, expected: int, tmp_path: Path) -> None:
    write(tmp_path, LAPTOP | {"sys/fs/cgroup/cpu.max": f"{quota} 100000"})
    assert num_threads(tmp_path, range(8)) == expected


LIMITED = Processors(frozenset(range(8)), frozenset(range(4)), 2.5)
FREE = Processors(frozenset(range(8)), frozenset(range(4)))


@pytest.mark.parametrize(
    ("processors", "asked", "choice"),
    [
        (FREE, None, ThreadChoice(4, "one for each core, of whose hyper-threads 8 are usable")),
        (FREE, " ", ThreadChoice(4, "one for each core, of whose hyper-threads 8 are usable")),
        (FREE, "3", ThreadChoice(3, "OMP_NUM_THREADS is 3")),
        (FREE, "8", ThreadChoice(8, "OMP_NUM_THREADS is 8")),
        (FREE, " 6,2", ThreadChoice(6, "OMP_NUM_THREADS is 6")),
        (
            FREE,
            "9",
            ThreadChoice(
                8,
                "OMP_NUM_THREADS is 9",
                "OMP_NUM_THREADS must be at most the number of usable processors (8), and is taken as that; got 9",
            ),
        ),
        (LIMITED, None, ThreadChoice(2, "the container may use 2.5 processors")),
        (LIMITED, "2", ThreadChoice(2, "OMP_NUM_THREADS is 2")),
        (
            LIMITED,
            "4",
            ThreadChoice(
                4,
                "OMP_NUM_THREADS is 4",
                "the 4 threads of OMP_NUM_THREADS share the time of the 2.5 processors that the container may use, "
                "and wait when they are used up",
            ),
        ),
        *(
            (
                FREE,
                asked,
                ThreadChoice(
                    4,
                    "one for each core, of whose hyper-threads 8 are usable",
                    f"OMP_NUM_THREADS must be a number of threads, at least 1, and is ignored; got {asked!r}",
                ),
            )
            for asked in ("0", "-2", "two", "2.5", ",4", "9" * 30)
        ),
    ],
)
def test_a_number_that_is_asked_for_is_honoured_up_to_the_usable_processors(
    processors: Processors, asked: str | None, choice: ThreadChoice
) -> None:
    assert choose_threads(processors, asked) == choice


def test_fewer_threads_of_torch_stay_and_more_do_not() -> None:
    choice = ThreadChoice(4, "because")
    assert [choice.within(number).count for number in (1, 4, 64)] == [1, 4, 4]


def test_nodes_of_memory_without_processors_are_left_out(tmp_path: Path) -> None:
    assert memory_nodes(tmp_path) == ()
    lists = {0: "0-1,4-5\n", 1: "2-3,6-7\n", 2: "\n", 3: "many"}  # the third is memory alone, as of CXL
    write(tmp_path, {f"sys/devices/system/node/node{node}/cpulist": text for node, text in lists.items()})
    assert list(memory_nodes(tmp_path)) == [frozenset({0, 1, 4, 5}), frozenset({2, 3, 6, 7})]


def test_a_system_without_affinities_has_all_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert Processors.read(tmp_path).usable == {0, 1, 2}
