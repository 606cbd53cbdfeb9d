"""The child that writes Events: what it needs, and that its trouble stays its own. tests/cluster has the real thing."""

import os
import time

from trainer.launch.announce.events import Announcer
from trainer.launch.announce.transitions import Transition

STARTED = Transition("Started", "training begins")
POD = {"JOB_NAME": "job", "POD_NAMESPACE": "here", "POD_NAME": "job-worker-0"}


def test_without_the_setting_nothing_is_started():
    announcer = Announcer(wanted=False, environ=POD)
    announcer.tell(STARTED)
    announcer.close(3.0)
    assert announcer._child is None


def test_missing_variables_are_named_and_nothing_is_started(capsys):
    announcer = Announcer(wanted=True, environ={"JOB_NAME": "job"})
    announcer.tell(STARTED)
    announcer.close(3.0)
    assert "POD_NAMESPACE" in capsys.readouterr().out


def test_a_cluster_that_can_not_be_reached_costs_the_events_and_nothing_else(tmp_path, capfd):
    config = tmp_path / "config"
    config.write_text("""
apiVersion: v1
kind: Config
current-context: x
contexts: [{name: x, context: {cluster: x, user: x}}]
clusters: [{name: x, cluster: {server: "http://127.0.0.1:9"}}]
users: [{name: x, user: {token: t}}]
""")
    announcer = Announcer(wanted=True, environ={**os.environ, **POD, "KUBECONFIG": str(config)})
    announcer.tell(STARTED)
    deadline = time.monotonic() + 60
    while announcer._child.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    announcer.tell(STARTED)
    announcer.close(3.0)
    assert announcer._child.returncode == 1
    out = capfd.readouterr().out
    assert "no Kubernetes events from here on; training goes on" in out
    assert "Traceback" not in out
