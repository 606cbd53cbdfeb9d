"""Events and one annotation of the PyTorchJob, so that `kubectl describe pytorchjob` tells how the run goes.

A child process (`python -m trainer.launch.announce.events`) talks to the API server: the client
library takes more memory than the whole supervisor, and a server that hangs is this child's trouble
alone. It needs the Role of k8s/components/events; without it, it says so once and ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from trainer.config.tree import Log
from trainer.launch.announce.transitions import Transition
from trainer.telemetry.logs import configure, get_logger

ANNOTATION = "ratchet/state"
_ANSWER_SECONDS = 10
_GROUP, _VERSION, _KIND, _PLURAL = "kubeflow.org", "v1", "PyTorchJob", "pytorchjobs"


class Announcer:
    """The supervisor's end: hands transitions to the child, never waits for it.

    Args:
        wanted: the setting `launch.kubernetes_events`.
        environ: with JOB_NAME, POD_NAMESPACE and POD_NAME of the downward API.
    """

    def __init__(self, *, wanted: bool, environ: Mapping[str, str]) -> None:
        self._child: subprocess.Popen[str] | None = None
        if not wanted:
            return
        missing = [name for name in ("JOB_NAME", "POD_NAMESPACE", "POD_NAME") if not environ.get(name)]
        if missing:
            get_logger().warning("no Kubernetes events", missing=missing, do="set them from the downward API")
            return
        self._child = subprocess.Popen([sys.executable, "-m", __name__], stdin=subprocess.PIPE, text=True,
                                       env=dict(environ), start_new_session=True)

    def tell(self, transition: Transition) -> None:
        """Hand one over; a child that is gone or does not read gets nothing."""
        if self._child is None or self._child.stdin is None or self._child.poll() is not None:
            return
        with contextlib.suppress(OSError, ValueError):  # a pipe holds more than a run has transitions
            self._child.stdin.write(json.dumps(asdict(transition)) + "\n")
            self._child.stdin.flush()

    def close(self, seconds: float) -> None:
        """Give the child so long for the last one."""
        if self._child is None:
            return
        with contextlib.suppress(OSError, ValueError):
            assert self._child.stdin is not None
            self._child.stdin.close()
        try:
            self._child.wait(max(seconds, 0))
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


class Teller:
    """The child's end: one PyTorchJob, through the API server.

    Args:
        client: of the package `kubernetes`, configured.
        environ: as above.
    """

    def __init__(self, client: Any, environ: Mapping[str, str]) -> None:
        from kubernetes.client import CoreV1Api, CustomObjectsApi

        self._core: Any = CoreV1Api(client)
        self._jobs: Any = CustomObjectsApi(client)
        self._namespace, self._name, self._pod = environ["POD_NAMESPACE"], environ["JOB_NAME"], environ["POD_NAME"]
        job: Any = self._jobs.get_namespaced_custom_object(_GROUP, _VERSION, self._namespace, _PLURAL, self._name,
                                                      _request_timeout=_ANSWER_SECONDS)
        # `kubectl describe` finds the events of an object by this number.
        self._uid = job["metadata"]["uid"]

    def tell(self, transition: Mapping[str, str]) -> None:
        """Create the event and replace the annotation."""
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        self._core.create_namespaced_event(self._namespace, {
            "metadata": {"generateName": f"{self._name}-", "namespace": self._namespace},
            "involvedObject": {"apiVersion": f"{_GROUP}/{_VERSION}", "kind": _KIND, "name": self._name,
                               "namespace": self._namespace, "uid": self._uid},
            "reason": transition["reason"], "message": transition["message"][:1000], "type": transition["kind"],
            "eventTime": now, "action": transition["reason"], "reportingComponent": "ratchet",
            "reportingInstance": self._pod,
        }, _request_timeout=_ANSWER_SECONDS)
        state = {"state": transition["reason"], "message": transition["message"][:1000], "pod": self._pod, "time": now}
        self._jobs.patch_namespaced_custom_object(
            _GROUP, _VERSION, self._namespace, _PLURAL, self._name,
            {"metadata": {"annotations": {ANNOTATION: json.dumps(state)}}}, _request_timeout=_ANSWER_SECONDS)


def main() -> int:
    """Tell what comes on standard input, line by line, to its end."""
    configure(Log(), pod=os.environ["POD_NAME"])
    log = get_logger()
    from kubernetes import config
    from kubernetes.client import ApiClient
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    try:
        if os.environ.get("KUBERNETES_SERVICE_HOST"):
            config.load_incluster_config()  # type: ignore[no-untyped-call]
        else:
            config.load_kube_config()  # type: ignore[no-untyped-call]
        teller = Teller(ApiClient(), os.environ)
        for line in sys.stdin:
            teller.tell(json.loads(line))
    except (ApiException, HTTPError, config.ConfigException, OSError) as error:
        reason = f"{error.status} {error.reason}" if isinstance(error, ApiException) else str(error)
        log.warning("no Kubernetes events from here on; training goes on", reason=" ".join(reason.split()),
                    do="see k8s/components/events for the Role and the token that they need")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
