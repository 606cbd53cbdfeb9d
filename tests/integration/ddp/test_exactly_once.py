"""Invariants 1 and 2: resumed equals uninterrupted, and every sample is trained on exactly once."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable

import pytest

from tests.integration.jobs import Job, contents, finish, newest, random_states, wait_for
from tests.integration.small import SAMPLES
from trainer.audit import audit_run
from trainer.checkpoint.survey import read_manifest, survey
from trainer.config import load
from trainer.launch.exits import Exit
from trainer.store import ObjectStore

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

MakeJob = Callable[..., Job]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_killed_and_resumed_run_ends_in_the_same_bits_as_one_that_was_not(
        world_size: int, make_job: MakeJob, object_store: ObjectStore) -> None:
    straight = make_job(name="straight").torchrun(world_size)
    victim = world_size - 1
    # Step 8 is the second of epoch 1 and not a multiple of the save interval; each step is one or two forward passes.
    broken = make_job(name="broken").torchrun(
        world_size, restarts=1, workload__options={"faults": [f"{victim}:{_forwards(world_size, 8)}:kill"]})

    assert (straight.code, broken.code) == (0, 0), straight.text + broken.text
    restored = [line["step"] for line in broken.events("restored")]
    assert restored == [6], "it resumed from the last save, not from the start"
    last = {name: newest(object_store, name) for name in ("straight", "broken")}
    expected, found = contents(object_store, last["straight"]), contents(object_store, last["broken"])
    assert [name for name in expected if found[name] != expected[name]] == []
    states = [random_states(object_store, read_manifest(object_store, place)) for place in last.values()]
    assert states[0] == states[1], "the random generators of every rank"
    first = survey(object_store, "straight").committed[-1]
    assert contents(object_store, first)["model.body.0.weight"] != expected["model.body.0.weight"], "it trained"


def test_any_sequence_of_world_sizes_and_kills_sees_every_sample_once(
        make_job: MakeJob, object_store: ObjectStore) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    job = make_job(name="elastic", settings={"train.epochs": 4})
    # No restart by torchrun: each start ends by its fault, the next one has another number of ranks.
    for start, world_size in enumerate((2, 3, 1)):
        victim, step = rng.randrange(world_size), rng.randint(3, 8)
        fault = rng.choice(["kill", "term", "exit"])
        ended = job.torchrun(world_size, workload__options={"faults": [f"{victim}:{step}:{fault}"],
                                                            "memory": str(_folder(job, start))})
        assert ended.code != 0, ended.text
    ended = job.torchrun(2)
    assert ended.code == 0, ended.text

    result = audit_run(load(str(job.config()), environ={}).config)
    assert [(e.seen, e.repeated, e.missing) for e in result.epochs] == [(SAMPLES, 0, 0)] * 4
    assert result.exact
    assert result.steps == 4 * 7


def test_sigterm_on_one_rank_stops_all_ranks_at_one_step_after_a_checkpoint(
        make_job: MakeJob, object_store: ObjectStore) -> None:
    ended = make_job(name="stopped").torchrun(
        2, checkpoint__every_steps=0, workload__options={"faults": ["1:5:term"]})

    assert ended.code == 1, "torchrun's own code; the supervisor knows better"
    saved = [line["step"] for line in ended.events("checkpoint committed")]
    assert len(saved) == 1
    assert 0 < saved[0] < 14
    assert "Traceback" not in "".join(str(line) for line in ended.lines)
    resumed = make_job(name="stopped").torchrun(2)
    assert resumed.code == 0
    assert [line["step"] for line in resumed.events("restored")] == saved
    assert audit_run(load(str(make_job(name="stopped").config()), environ={}).config).exact


def test_sigterm_with_loader_processes_saves_too(make_file_job: MakeJob, file_store: ObjectStore) -> None:
    job = make_file_job(name="loaders", settings={"train.epochs": 400, "data.workers": 2})
    running = job.start_ratchet(launch__nproc_per_node=1)
    wait_for(running, lambda: survey(file_store, "loaders").committed)
    running.send_signal(signal.SIGTERM)
    ended = finish(running)
    assert ended.code == Exit.PREEMPTED, ended.text
    stopped = ended.lines[-1]
    assert stopped["reason"] == f"SIGTERM: stopped at step {stopped['step']}, which is saved"
    assert newest(file_store, "loaders").step == stopped["step"]


def _forwards(world_size: int, step: int) -> int:
    """Forward passes of a rank until it is in `step` (from 1): 16 samples a step, 6 in every 7th, 5 at most a pass."""
    share, tail = -(-16 // world_size), -(-6 // world_size)
    passes = sum(-(-(tail if n % 7 == 0 else share) // 5) for n in range(1, step)) + 1
    return passes + (-(-share // 5) if world_size > 2 else 0)  # the pass that settles the buckets


def _folder(job: Job, start: int) -> str:
    folder = job.folder / f"faults-{start}"
    folder.mkdir()
    return str(folder)
