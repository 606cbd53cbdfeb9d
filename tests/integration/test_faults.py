"""What goes wrong while ranks run, with real processes: each case ends as it should, loses little, and soon."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.integration.jobs import Ended, Job, finish, wait_for
from tests.integration.operated import Pods
from trainer.audit import audit_run
from trainer.checkpoint.survey import survey
from trainer.config import load
from trainer.launch.exits import Exit
from trainer.launch.processes import descendants, marked
from trainer.store import ObjectStore

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

MakeJob = Callable[..., Job]
EVERY = 3
"""Steps between two checkpoints of the small job."""
CALL, DONE = 12, 5
"""The forward pass in which the fault strikes (two a step), and the steps that are finished by then."""


@dataclass(frozen=True)
class Case:
    """One fault in a job of two ranks in one pod."""

    name: str
    fault: str
    code: int = 0
    reason: str = ""
    """Found in the last line's reason; for a job that recovers, in a line of the log."""
    lost: int = EVERY
    """Most steps done again."""
    seconds: float = 20.0
    """Most seconds from the last step before the fault to the first one after it. Quiet machines need a fifth."""
    settings: Mapping[str, Any] = field(default_factory=dict)


STALL = {"launch.stall_seconds": 2.0}
CASES = (
    Case("a rank is killed", f"1:{CALL}:kill", reason="a failure"),
    Case("a rank dies of a segmentation fault", f"1:{CALL}:segv", reason="killed by SIGSEGV"),
    Case("a rank raises", f"1:{CALL}:raise", Exit.USER_ERROR,
         r"ZeroDivisionError: this user code is broken on purpose \(tests/integration/small\.py:\d+, in _strike\)$"),
    Case("a rank ends itself with a code of its own", f"1:{CALL}:exit", Exit.USER_ERROR, "exit code 7"),
    Case("a rank ends itself with a code that has a meaning here", f"1:{CALL}:leave", Exit.USER_ERROR, "exit code 1"),
    Case("a rank is stopped", f"1:{CALL}:stop", reason="the process is stopped \\(SIGSTOP\\)",
         seconds=30, settings={"launch.silent_seconds": 3.0}),
    Case("a rank hangs in Python", f"1:{CALL}:spin", reason="hung: compute after step 5", seconds=30, settings=STALL),
    Case("a rank hangs in a system call", f"1:{CALL}:read", reason="small.py", seconds=30, settings=STALL),
    Case("the same step fails again and again", "1:4:kill!", Exit.NO_PROGRESS, "2 failures in a row",
         settings={"launch.max_restarts_without_progress": 2}),
    Case("a rank never comes to a collective", "1:4:pause!", Exit.NO_PROGRESS,
         "2 failures in a row.*: rank 0: a collective timed out after 5 s on rank 0",
         settings={"launch.max_restarts_without_progress": 2, "parallel.timeout_seconds": 5.0}),
)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_when(case: Case, make_file_job: MakeJob) -> None:
    job = make_file_job(name="faulty", settings={"launch.nproc_per_node": "2", **case.settings})
    ended = job.ratchet(workload__options={"faults": [case.fault]})
    assert ended.code == case.code, ended.text
    told = str(ended.lines[-1]["reason"]) if case.code else ended.text
    assert re.search(case.reason, told), ended.text
    restored = ended.events("restored")
    if case.code == 0:
        (back,) = restored
        assert DONE - case.lost <= back["step"] <= DONE, ended.text
        assert audit_run(load(str(job.config()), environ={}).config).exact
        assert _gap(ended) < case.seconds, ended.text
    if case.settings == STALL:
        stacks = [line for line in ended.events("stacks") if line["rank"] == 1]
        assert "in _strike" in stacks[0]["stacks"], "the log shows where it hung"
        assert len(ended.events("stacks")) >= 2, "the stacks of the rank that waited are there too"
    assert not marked(f"RATCHET_TEST_JOB={job.folder}\0")


def test_out_of_memory_is_called_by_its_name(make_file_job: MakeJob, memory_limit: Path) -> None:
    job = make_file_job(name="hungry", settings={"launch.nproc_per_node": "1", "launch.max_restarts": 0})
    config = str(job.config(workload__options={"faults": [f"0:{CALL}:eat"], "pace": 0.2}))
    enter = f"import os; open({str(memory_limit / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
    run = f"from trainer.cli import main; import sys; sys.exit(main(['run', {config!r}]))"
    ended = finish(job.start([sys.executable, "-c", enter + run]))
    assert ended.code == Exit.KILLED, ended.text
    assert re.match(r"out of memory: limit 1\.50 GiB, peak 1\.\d\d GiB", ended.lines[-1]["reason"]), ended.text
    assert ended.lines[-1]["step"] >= 1, "how far it was is told although it could not say so itself"


@pytest.fixture
def memory_limit() -> Iterator[Path]:
    """A cgroup of 1.5 GiB below our own."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = next((Path("/sys/fs/cgroup/memory" + path) for _, names, path in lines if names == "memory"), None)
    own = own or Path("/sys/fs/cgroup" + next(path for number, _, path in lines if number == "0"))
    folder = own / f"ratchet-test-{os.getpid()}"
    try:
        folder.mkdir()
        limit = folder / ("memory.limit_in_bytes" if own.is_relative_to("/sys/fs/cgroup/memory") else "memory.max")
        limit.write_text(str(3 << 29))
    except OSError as error:
        pytest.skip(f"no right to limit memory with a cgroup here: {error}")
    yield folder
    folder.rmdir()


def test_a_check_that_does_not_end_is_ended_with_its_stacks(make_file_job: MakeJob) -> None:
    job = make_file_job(name="endless", settings={"launch.nproc_per_node": "1", "launch.start_seconds": 8.0})
    ended = job.ratchet(workload__options={"building": 3600})
    assert ended.code == Exit.STALLED, ended.text
    assert "has not ended in 8 s (launch.start_seconds)" in ended.lines[-1]["reason"]
    assert "in build_model" in ended.text, "where it stood"
    assert not marked(f"RATCHET_TEST_JOB={job.folder}\0")


def test_the_process_that_forks_ranks_is_killed(make_file_job: MakeJob, file_store: ObjectStore) -> None:
    job = make_file_job(name="orphans", settings={"launch.nproc_per_node": "2",
                                                  "workload.options": {"pace": 0.05}, "train.epochs": 6})
    running = job.start_ratchet()
    wait_for(running, lambda: survey(file_store, "orphans").committed)
    (nursery,) = {pid for pid in descendants(running.pid) if b"multiprocessing.forkserver" in _command(pid)
                  and b"rank-" not in Path(f"/proc/{pid}/comm").read_bytes()}
    os.kill(nursery, signal.SIGKILL)
    ended = finish(running)
    assert ended.code == 0, ended.text
    assert "the process that forks ranks was killed" in ended.text
    assert audit_run(load(str(job.config()), environ={}).config).exact


def test_the_agent_is_killed(make_file_job: MakeJob, file_store: ObjectStore) -> None:
    job = make_file_job(name="headless", settings={"launch.nproc_per_node": "2", "train.epochs": 4000})
    running = job.start_ratchet()
    wait_for(running, lambda: survey(file_store, "headless").committed)
    (agent,) = {pid for pid in descendants(running.pid) if b"trainer.elastic\0" in _command(pid)}
    os.kill(agent, signal.SIGKILL)
    ended = finish(running)
    assert ended.code == Exit.KILLED, ended.text
    assert "torchrun was killed by SIGKILL" in ended.lines[-1]["reason"]
    assert not marked(f"RATCHET_TEST_JOB={job.folder}\0")


@pytest.fixture
def pods(make_file_job: MakeJob) -> Iterator[Callable[..., Pods]]:
    """Jobs of several pods; none is left at the end."""
    made: list[Pods] = []

    def make(nodes: str, **settings: Any) -> Pods:
        job = make_file_job(name="pods", settings={"train.epochs": 4000, "workload.options": {"pace": 0.02}})
        made.append(Pods(job, nodes, settings=settings).__enter__())
        return made[-1]

    yield make
    for one in made:
        one.__exit__()


def test_the_pod_that_hosts_the_rendezvous_is_replaced(pods: Callable[..., Pods], file_store: ObjectStore) -> None:
    job = pods("2:2")
    job.start(0)
    job.start(1)
    job.wait_for(lambda: survey(file_store, "pods").committed, "a checkpoint")
    job.kill(0)
    assert job.end(1) == Exit.PEER_LOST, job.text()
    saved = survey(file_store, "pods").committed[0].step
    job.start(1)
    job.start(0)
    job.wait_for(lambda: job.lines(0, "restored") + job.lines(1, "restored"), "the restore")
    job.wait_for(lambda: survey(file_store, "pods").committed[0].step > saved, "a new checkpoint")


@pytest.mark.parametrize("when", ["at once", "late"])
def test_another_pod_is_replaced_and_the_survivor_waits_in_place(
        when: str, pods: Callable[..., Pods], file_store: ObjectStore) -> None:
    job = pods("2:2")
    job.start(0)
    job.start(1)
    job.wait_for(lambda: survey(file_store, "pods").committed, "a checkpoint")
    job.kill(1)
    if when == "late":  # the rendezvous has given the pod up by then, and the wait is told
        job.wait_for(lambda: job.lines(0, "waiting for other pods"), "the survivor to say that it waits")
        (waiting,) = job.lines(0, "waiting for other pods")[:1]
        assert (len(waiting["present"]), waiting["least"]) == (1, 2)
    job.start(1)
    # Rank 0, which tells, may be in either.
    job.wait_for(lambda: len(job.lines(0, "restored") + job.lines(1, "restored")) == 1, "the restore")
    (again,) = job.lines(0, "ranks start again")
    assert (again["why"], len(again["joined"]), len(again["left"])) == ("pods went away", 1, 1)
    assert len(job.lines(0, "plan")) == 1, "its pod was not started again"
    saved = survey(file_store, "pods").committed[0].step
    job.wait_for(lambda: survey(file_store, "pods").committed[0].step > saved, "a new checkpoint")


def test_ranks_of_several_pods_that_are_killed_together_are_one_failure(
        pods: Callable[..., Pods], file_store: ObjectStore) -> None:
    job = pods("2:2", launch__max_restarts_without_progress=3, workload__options={"faults": ["*:4:kill!"]})
    job.start(0)
    job.start(1)
    codes = {job.end(0), job.end(1)}
    told = [json.loads(bytes(file_store.get(key))) for key, _ in file_store.list("pods/failures/")]
    rounds = [name for name, _ in itertools.groupby(failure["round"] for failure in told)]
    assert len(rounds) == len(set(rounds)) == 3, told
    assert len(told) > len(rounds), "both pods told of a round"
    for number in (0, 1):
        for line in job.lines(number, "ranks start again"):
            assert re.fullmatch(r"rank \d of pod job-worker-\d: killed by SIGKILL", line["why"]), line
    assert Exit.NO_PROGRESS in codes, job.text()
    assert not list(file_store.list("pods/pods/")), "no mark is left by a pod that ended in order"


def test_a_pod_whose_ranks_are_well_says_which_rank_of_which_pod_failed(
        pods: Callable[..., Pods], file_store: ObjectStore) -> None:
    job = pods("2:2", workload__options={"faults": [f"1:{CALL}:kill"]})
    job.start(0)
    job.wait_for(lambda: job.lines(0, "serving"), "the first pod")
    job.start(1)
    job.wait_for(lambda: job.lines(0, "restored") + job.lines(1, "restored"), "the restart")
    for number in (0, 1):
        (line,) = job.lines(number, "ranks start again")
        assert re.fullmatch(r"rank 1 of pod job-worker-\d: killed by SIGKILL", line["why"]), job.text()


def test_pods_without_a_rendezvous_of_their_own_that_fail_together_are_one_failure_too(
        pods: Callable[..., Pods], file_store: ObjectStore) -> None:
    job = pods("2", launch__max_restarts_without_progress=3, workload__options={"faults": ["*:4:kill!"]})
    for number in (0, 1):
        job.environ = {"PET_RDZV_BACKEND": "static", "PET_RDZV_ENDPOINT": "", "PET_RDZV_CONF": "",
                       "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(job.port), "PET_NODE_RANK": str(number),
                       "PET_MAX_RESTARTS": "0"}
        job.start(number)
    assert {job.end(0), job.end(1)} == {Exit.KILLED}, job.text()
    told = [json.loads(bytes(file_store.get(key))) for key, _ in file_store.list("pods/failures/")]
    rounds = [failure["round"] for failure in told]
    assert (len(set(rounds)), len(rounds)) == (1, 2), told


def test_pods_come_and_go_within_the_limits(pods: Callable[..., Pods], file_store: ObjectStore) -> None:
    job = pods("1:2")
    worlds = lambda: [line["world_size"] for line in job.lines(0, "starting ranks")]  # noqa: E731
    job.start(0)
    job.wait_for(lambda: survey(file_store, "pods").committed, "a checkpoint of one pod")
    job.start(1)
    job.wait_for(lambda: worlds() == [1, 2], "the second pod to be taken in")
    assert [line["why"] for line in job.lines(0, "ranks start again")] == ["pods joined"]
    job.wait_for(lambda: len(job.lines(0, "restored")) == 1, "the training of two")
    job.terminate(1)
    assert job.end(1) == Exit.PREEMPTED, job.text()
    job.wait_for(lambda: worlds() == [1, 2, 1], "the first pod to go on alone")
    job.wait_for(lambda: len(job.lines(0, "restored")) == 2, "the training of one")
    steps = job.steps()
    assert all(later - earlier in (0, 1) for earlier, later in itertools.pairwise(steps)), (
        "nothing was done again when the world grew or shrank", steps)


def test_a_pod_beyond_the_limit_says_so_and_takes_the_place_of_one_that_goes(
        pods: Callable[..., Pods], file_store: ObjectStore) -> None:
    job = pods("1:2")
    job.start(0)
    job.start(1)
    job.wait_for(lambda: survey(file_store, "pods").committed, "a checkpoint")
    job.start(2)
    job.wait_for(lambda: job.lines(2, "standing by"), "the third pod to say that it stands by")
    line = job.lines(2, "standing by")[0]
    assert (line["most"], bool(line["present"])) == (2, True)
    assert not job.lines(2, "starting ranks")
    job.terminate(1)
    assert job.end(1) == Exit.PREEMPTED, job.text()
    job.wait_for(lambda: job.lines(2, "starting ranks") and job.lines(0, "restored"), "the training with the third pod")


def test_a_doctor_in_the_pod_of_a_running_job_does_not_join_it(
        pods: Callable[..., Pods], file_store: ObjectStore, tmp_path: Path) -> None:
    job = pods("1:2")
    job.start(0)
    job.wait_for(lambda: survey(file_store, "pods").committed, "a checkpoint")
    words = ["doctor", "digits", "--store.url", f"file://{tmp_path}/other", "--launch.rendezvous_timeout_seconds", "60"]
    asked = subprocess.run([sys.executable, "-m", "trainer", *words], env={**os.environ, **job.variables(0)}, text=True,
                           capture_output=True, check=False, timeout=200)
    assert "ok      collective   gloo, 1 ranks" in asked.stdout, asked.stdout + asked.stderr
    saved = survey(file_store, "pods").committed[0].step
    job.wait_for(lambda: survey(file_store, "pods").committed[0].step > saved, "the job to go on")
    assert [line["world_size"] for line in job.lines(0, "starting ranks")] == [1]


def test_sigterm_while_waiting_for_other_pods(pods: Callable[..., Pods]) -> None:
    job = pods("2:2")
    job.start(0)
    job.wait_for(lambda: job.lines(0, "waiting for other pods"), "the wait")
    job.terminate(0)
    assert job.end(0) == Exit.PREEMPTED, job.text()
    assert "without a new checkpoint" in job.lines(0)[-1]["reason"]


def test_sigterm_while_the_host_of_the_rendezvous_is_not_there(pods: Callable[..., Pods]) -> None:
    job = pods("2:2")
    job.environ = {"PET_RDZV_ENDPOINT": "no-such-pod.invalid:23456"}
    job.start(1)
    job.wait_for(lambda: job.lines(1, "waiting for the rendezvous host"), "the wait")
    assert "does not resolve" in job.lines(1, "waiting for the rendezvous host")[0]["missing"]
    job.terminate(1)
    assert job.end(1) == Exit.PREEMPTED, job.text()


@pytest.fixture
def namespaced() -> Callable[..., list[str]]:
    """Makes a command that runs another one with file systems of its own, after a shell line."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("only root may mount: no own file systems for a process here")
    return lambda line, *more: ["unshare", "--mount", *more, "sh", "-ec", f'{line}; exec "$@"', "sh"]


def test_the_name_of_the_rendezvous_host_comes_late(
        pods: Callable[..., Pods], file_store: ObjectStore, tmp_path: Path,
        namespaced: Callable[..., list[str]]) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    job = pods("2:2")
    job.environ = {"PET_RDZV_ENDPOINT": f"late-pod.invalid:{job.port}"}
    job.start(1, within=namespaced(f"mount --bind {hosts} /etc/hosts"))
    job.wait_for(lambda: job.lines(1, "waiting for the rendezvous host"), "the wait")
    assert "does not resolve" in job.lines(1, "waiting for the rendezvous host")[0]["missing"]
    job.environ = {}
    job.start(0)
    with hosts.open("a") as file:  # in place: a new file would not be the one that is mounted
        file.write("127.0.0.1 late-pod.invalid\n")
    job.wait_for(lambda: survey(file_store, "pods").committed, "a checkpoint of both")
    assert job.lines(1, "the rendezvous host is there")


def test_a_full_disk_ends_the_run_with_its_name(make_file_job: MakeJob, file_store: ObjectStore,
                                                namespaced: Callable[..., list[str]]) -> None:
    job = make_file_job(name="full", settings={"launch.nproc_per_node": "1"})
    folder = Path(file_store.url.removeprefix("file://"))
    folder.mkdir(exist_ok=True)
    ended = finish(job.start([*namespaced(f"mount -t tmpfs -o size=16k tmpfs {folder}"),
                              sys.executable, "-m", "trainer", "run", str(job.config())]))
    assert ended.code == Exit.STORE_UNAVAILABLE, ended.text
    assert "No space left on device" in str(ended.lines[-1]["reason"]), ended.text
    assert "Traceback" not in ended.text


def test_a_run_that_is_the_first_process_of_its_container_saves_as_any_other(
        make_file_job: MakeJob, namespaced: Callable[..., list[str]]) -> None:
    job = make_file_job(name="first", settings={"launch.nproc_per_node": "1", "train.epochs": 1})
    within = namespaced("mount -t proc proc /proc", "--pid", "--fork", "--kill-child")
    ended = finish(job.start([*within, sys.executable, "-m", "trainer", "run", str(job.config())]), timeout=120)
    assert ended.code == 0, ended.text
    assert not ended.events("the uploader is gone, starting another: what it held is lost"), ended.text
    assert not marked(f"RATCHET_TEST_JOB={job.folder}\0")


def test_a_host_of_the_rendezvous_that_never_comes_is_named(pods: Callable[..., Pods]) -> None:
    job = pods("2:2", launch__rendezvous_timeout_seconds=1.0)
    job.environ = {"PET_RDZV_ENDPOINT": "no-such-pod.invalid:23456"}
    job.start(1)
    assert job.end(1) == Exit.NO_RENDEZVOUS, job.text()
    assert "the name no-such-pod.invalid does not resolve" in job.lines(1)[-1]["reason"]


def test_the_port_of_the_rendezvous_is_taken(pods: Callable[..., Pods]) -> None:
    job = pods("2:2", launch__rendezvous_timeout_seconds=5.0)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        job.environ = {"PET_RDZV_ENDPOINT": f"127.0.0.1:{other.getsockname()[1]}"}
        job.start(0)
        assert job.end(0) == Exit.NO_RENDEZVOUS, job.text()


def _gap(ended: Ended) -> float:
    """Seconds between the last step before a restart and the first one after it."""
    restored = next(line for line in ended.lines if line.get("event") == "restored")
    place = ended.lines.index(restored)
    times = [[datetime.fromisoformat(line["timestamp"]) for line in part if line.get("event") == "step"]
             for part in (ended.lines[:place], ended.lines[place:])]
    return (times[1][0] - times[0][-1]).total_seconds()


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
