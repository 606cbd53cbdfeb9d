import pytest

from trainer.launch import resources
from trainer.launch.resources import find_resources


@pytest.fixture(autouse=True)
def gpu_build_of_torch(monkeypatch):
    monkeypatch.setattr(resources, "_torch_version", lambda: "2.13.0+cu130")


@pytest.fixture
def machine(tmp_path):
    def write(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


V2 = {"proc/self/cgroup": "0::/\n"}


@pytest.mark.parametrize(("files", "affinity", "cpus", "text"), [
    ({}, 8, 8, "8 CPUs (affinity)"),
    ({**V2, "sys/fs/cgroup/cpu.max": "max 100000\n"}, 8, 8, "8 CPUs (affinity)"),
    ({**V2, "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 8, 2, "2 CPUs (cgroup quota 2.5, affinity 8)"),
    ({**V2, "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 8, 1, "1 CPU (cgroup quota 0.5, affinity 8)"),
    ({**V2, "sys/fs/cgroup/cpu.max": "400000 100000\n"}, 2, 2, "2 CPUs (affinity)"),
    # Without a cgroup namespace each folder on the way up may limit.
    ({"proc/self/cgroup": "0::/pods/pod1\n", "sys/fs/cgroup/pods/pod1/cpu.max": "max 100000\n",
      "sys/fs/cgroup/pods/cpu.max": "300000 100000\n"}, 8, 3, "3 CPUs (cgroup quota 3, affinity 8)"),
    # A container on cgroup v1: the path is the host's, only the mount can be seen.
    ({"proc/self/cgroup": "4:cpu,cpuacct:/kubepods/x\n2:memory:/kubepods/x\n",
      "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"},
     8, 2, "2 CPUs (cgroup quota 2, affinity 8)"),
    ({"proc/self/cgroup": "4:cpu,cpuacct:/\n", "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
      "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n"}, 8, 8, "8 CPUs (affinity)"),
])
def test_cpus_are_the_least_of_affinity_and_quota(machine, files, affinity, cpus, text):
    found = find_resources(machine(files), {}, affinity)
    assert (found.cpus, found.found[0]) == (cpus, text)


@pytest.mark.parametrize(("files", "limit", "text"), [
    ({}, None, "no memory limit"),
    ({**V2, "sys/fs/cgroup/memory.max": "max\n"}, None, "no memory limit"),
    ({**V2, "sys/fs/cgroup/memory.max": f"{3 * 2**30}\n"}, 3 * 2**30, "memory limit 3.0 GiB (cgroup)"),
    ({"proc/self/cgroup": "4:memory:/a\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
      "sys/fs/cgroup/memory/a/memory.limit_in_bytes": f"{2**30}\n"}, 2**30, "memory limit 1.0 GiB (cgroup)"),
    ({"proc/self/cgroup": "4:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"},
     None, "no memory limit"),
])
def test_the_memory_limit_is_the_least_on_the_way_up(machine, files, limit, text):
    found = find_resources(machine(files), {}, 1)
    assert (found.memory_bytes, found.found[1]) == (limit, text)


GPUS = {"dev/nvidia0": "", "dev/nvidia1": "", "dev/nvidiactl": "", "dev/nvidia-uvm": ""}


@pytest.mark.parametrize(("files", "environ", "gpus", "text"), [
    ({}, {}, 0, "no GPU"),
    ({}, {"CUDA_VISIBLE_DEVICES": "0"}, 0, "no GPU"),
    (GPUS, {}, 2, "2 GPUs (/dev/nvidia*)"),
    (GPUS, {"CUDA_VISIBLE_DEVICES": "1"}, 1, "1 GPU (CUDA_VISIBLE_DEVICES=1, /dev/nvidia* has 2)"),
    (GPUS, {"CUDA_VISIBLE_DEVICES": ""}, 0, "0 GPUs (CUDA_VISIBLE_DEVICES=, /dev/nvidia* has 2)"),
    (GPUS, {"CUDA_VISIBLE_DEVICES": "0,-1,1"}, 1, "1 GPU (CUDA_VISIBLE_DEVICES=0,-1,1, /dev/nvidia* has 2)"),
])
def test_gpus_are_the_visible_ones(machine, files, environ, gpus, text):
    found = find_resources(machine(files), environ, 1)
    assert (found.gpus, found.found[2]) == (gpus, text)


def test_a_cpu_build_of_torch_uses_no_gpu(machine, monkeypatch):
    monkeypatch.setattr(resources, "_torch_version", lambda: "2.13.0+cpu")
    found = find_resources(machine(GPUS), {}, 1)
    assert found.gpus == 0
    assert found.found[2] == "2 GPUs (/dev/nvidia*), not used: the installed torch is a CPU build"


def test_this_machine_has_at_least_one_cpu():
    assert find_resources().cpus >= 1
