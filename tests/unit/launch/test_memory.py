"""What the kernel says of kills for lack of memory, in both versions of cgroups."""

from trainer.launch.memory import MemoryEvents


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


V2 = {"proc/self/cgroup": "0::/pod/box\n", "sys/fs/cgroup/pod/box/memory.max": "2147483648\n",
      "sys/fs/cgroup/pod/box/memory.peak": "2146435072\n",
      "sys/fs/cgroup/pod/box/memory.events": "low 0\nhigh 0\nmax 12\noom 1\noom_kill 0\n"}
V1 = {"proc/self/cgroup": "4:memory:/pod\n", "sys/fs/cgroup/memory/pod/memory.limit_in_bytes": "1073741824\n",
      "sys/fs/cgroup/memory/pod/memory.max_usage_in_bytes": "1073741824\n",
      "sys/fs/cgroup/memory/pod/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"}


def test_a_kill_since_the_start_is_told_with_limit_and_peak(tmp_path):
    write(tmp_path, V2)
    before = MemoryEvents.read(tmp_path)
    assert MemoryEvents.read(tmp_path).since(before) == ""
    write(tmp_path, {"sys/fs/cgroup/pod/box/memory.events": "oom 2\noom_kill 1\n"})
    assert MemoryEvents.read(tmp_path).since(before) == "out of memory: limit 2.00 GiB, peak 2.00 GiB"


def test_version_1_is_read_too(tmp_path):
    write(tmp_path, V1)
    assert MemoryEvents.read(tmp_path) == MemoryEvents(kills=3, limit=1 << 30, peak=1 << 30)


def test_without_a_cgroup_nothing_is_claimed(tmp_path):
    nothing = MemoryEvents.read(tmp_path)
    assert nothing.since(nothing) == ""
    assert MemoryEvents(1, None, None).since(nothing) == "out of memory: no limit of its own"
