"""Which moments become events."""

import dataclasses

from trainer.launch.announce.transitions import Transitions
from trainer.launch.exits import Exit
from trainer.launch.outcome import Outcome
from trainer.telemetry.pod import PodView, RankView


def view(*, rank=0, pid=7, state="compute", restored="", step=0):
    one = RankView(rank=rank, local_rank=0, pid=pid, up=True, state=state, step=step, epoch=0, at=0.0, steps=0,
                   samples=0, step_seconds=0.0, times={})
    return PodView((one,), 2, 0, 0, {}, {"restored_step": step, "restored_from": restored})


def reasons(transitions):
    return [transition.reason for transition in transitions]


def test_each_beginning_of_training_is_told_once():
    seen = Transitions()
    assert reasons(seen.seen(view(state="restore"))) == []
    (started,) = seen.seen(view())
    assert (started.reason, started.message) == ("Started", "training begins with 2 ranks")
    assert seen.seen(view()) == []
    (restored,) = seen.seen(view(pid=8, restored="s3://b/x", step=120))
    assert restored.message == "training goes on from step 120 with 2 ranks"


def test_a_pod_without_rank_0_tells_nothing_but_hangs_and_failures():
    seen = Transitions()
    assert seen.seen(view(rank=1)) == []
    assert seen.ended(Outcome(Exit.DONE, "the run is complete")) == []
    assert reasons(seen.stalled("rank 1 hung")) == ["Stalled"]
    (failed,) = seen.ended(Outcome(Exit.BAD_CONFIG, "no such module"))
    assert (failed.reason, failed.kind, failed.message) == ("Failed", "Warning", "no such module (exit code 2)")


def test_the_end_is_told_by_its_kind():
    seen = Transitions()
    seen.seen(view())
    ends = {Exit.DONE: "Finished", Exit.PREEMPTED: "Preempted", Exit.INTERRUPTED: "Preempted", Exit.KILLED: "Failed",
            Exit.USER_ERROR: "Failed"}
    assert {code: seen.ended(Outcome(code, "why"))[0].reason for code in ends} == ends
    assert dataclasses.asdict(seen.ended(Outcome(Exit.DONE, "why"))[0]) == {
        "reason": "Finished", "message": "why", "kind": "Normal"}
