import signal

import pytest

from trainer.launch.exits import TABLE, Exit, Report
from trainer.launch.outcome import decide

TERM, INT, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGKILL


def report(code, *, time=10.0, rank=0, step=7, message="", name="b"):
    return Report(code=code, rank=rank, local_rank=rank, pid=1, step=step, message=message or f"code {code}", time=time,
                  round=name)


@pytest.mark.parametrize(("returncode", "received", "reports", "done", "code", "reason"), [
    # It ended by itself.
    (0, None, [], True, 0, "the run is complete"),
    (0, None, [], None, 0, "the run is complete"),
    # Whatever torchrun says, the store knows better.
    (0, None, [], False, 1, "the ranks ended with 0 and the run is not complete"),
    # It was told to stop.
    (1, TERM, [report(143)], False, 143, "SIGTERM: code 143"),
    (1, INT, [report(143)], False, 130, "SIGINT: code 143"),
    (1, TERM, [], False, 143, "SIGTERM: stopped without a new checkpoint"),
    (0, TERM, [report(143)], False, 143, "SIGTERM: code 143"),
    (0, TERM, [], False, 143, "SIGTERM: stopped without a new checkpoint"),
    (-KILL, TERM, [], False, 143, "SIGTERM: stopped without a new checkpoint"),
    (1, TERM, [report(161)], False, 143, "SIGTERM: stopped without a new checkpoint"),
    # Never 0 on preemption, but complete is complete.
    (0, TERM, [], True, 0, "the run is complete"),
    (1, TERM, [], True, 0, "the run is complete"),
    # Another pod was told to stop, and all stopped at the agreed step.
    (1, None, [report(143)], False, 143, "code 143"),
    (0, None, [report(143)], False, 143, "code 143"),
    # A permanent failure is never hidden by what follows from it.
    (1, None, [report(161, time=1), report(1, time=2), report(2, time=3)], False, 1, "code 1"),
    (1, TERM, [report(143, time=1), report(1, time=2)], False, 1, "code 1"),
    (0, None, [report(3)], True, 3, "code 3"),
    (1, None, [report(1, time=1, name="a")], False, 1, "code 1"),
    # Otherwise the first of the last round: what came before, a restart has answered.
    (1, None, [report(160, time=1, name="a"), report(137, time=6), report(160, time=7)], False, 137, "code 137"),
    (-KILL, None, [report(160, time=1, name="a")], False, 137, "torchrun was killed by SIGKILL"),
    (1, TERM, [report(143, time=1, name="a")], False, 143, "SIGTERM: stopped without a new checkpoint"),
    (0, None, [report(143, time=1, name="a")], None, 0, "the run is complete"),
    # Who lost a peer is never the cause.
    (1, None, [report(161, time=6), report(137, time=7)], False, 137, "code 137"),
    (1, None, [report(161, time=6), report(161, time=7)], False, 161, "code 161"),
    # Also when a pod that was not needed found the rendezvous closed.
    (161, None, [report(161, time=7)], True, 0, "the run is complete"),
    # A survivor that waits for others in vain.
    (162, None, [report(162, time=7)], False, 162, "code 162"),
    (162, None, [report(137, time=6), report(162, time=7)], False, 162, "code 162"),
    (162, None, [report(143, time=6), report(162, time=7)], False, 162, "code 162"),
    # Nobody said why.
    (-KILL, None, [], False, 137, "torchrun was killed by SIGKILL"),
    (-signal.SIGSEGV, None, [], False, 139, "torchrun was killed by SIGSEGV"),
    (1, None, [], False, 1, "torchrun failed and no rank said why"),
    (162, None, [], False, 162, "not enough pods came together in time"),
    (77, None, [], False, 77, "torchrun ended with 77"),
])
def test_the_exit_code_is_decided(returncode, received, reports, done, code, reason):
    outcome = decide(returncode, received, reports, done=done, newest="b")
    assert outcome.code == code
    assert outcome.reason.startswith(reason)


def test_the_earliest_report_of_its_kind_is_the_root():
    first, second = report(1, time=1, rank=3), report(1, time=2, rank=0)
    assert decide(1, None, [first, second], done=False, newest="b").root is first


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.code.name)
def test_every_failure_says_what_to_do(row):
    outcome = decide(1, None, [report(int(row.code))], done=False, newest="b")
    if row.code != Exit.DONE:
        assert outcome.code == row.code
        assert outcome.do == row.do


@pytest.mark.parametrize("code", [5, 139, 200])
def test_a_code_outside_the_table_says_what_to_do_as_well(code):
    assert decide(code, None, [], done=False).do
