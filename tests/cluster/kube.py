"""The cluster as the tests see it: kubectl, namespaces that come and go, and waiting with a deadline."""

from __future__ import annotations

import json
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

ROOT = Path(__file__).resolve().parents[2]
ARTIFACTS = ROOT / ".ratchet" / "cluster-artifacts"
METRICS_PORT = 9464

_T = TypeVar("_T")


class CommandFailed(Exception):
    """A command of ours did not end with 0; the message holds what it printed."""


def wait_until(what: str, condition: Callable[[], _T | None], *, seconds: float, every: float = 1.0) -> _T:
    """Ask until the answer is true; return it.

    A command that fails is an answer, too: a pod that is not there yet, a port that is not open.

    Raises:
        AssertionError: after so many seconds, with the last answer.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            answer: object = condition()
            if answer:
                return answer  # type: ignore[return-value]  # what is true is not None
        except CommandFailed as error:
            answer = error
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}; last: {answer}"
        time.sleep(every)


def command(*words: object, stdin: str | None = None, timeout: float = 60, cwd: Path = ROOT,
            env: Mapping[str, str] | None = None) -> str:
    """Run a program of this machine and return what it printed."""
    line = [str(word) for word in words]
    try:
        done = subprocess.run(line, input=stdin, capture_output=True, text=True, check=False, timeout=timeout,
                              cwd=cwd, env=env)
    except FileNotFoundError:
        raise CommandFailed(f"{line[0]} is not on PATH: install it") from None
    except subprocess.TimeoutExpired:
        raise CommandFailed(f"{shlex.join(line)}: no end after {timeout:.0f} s") from None
    if done.returncode:
        raise CommandFailed(f"{shlex.join(line)}: {done.returncode}: {done.stderr.strip()[-2000:]}"
                            f" {done.stdout.strip()[-2000:]}")
    return done.stdout


@dataclass(frozen=True)
class Namespace:
    """kubectl in one namespace. Tests that share a cluster do not meet."""

    name: str

    def kubectl(self, *words: object, stdin: str | None = None, timeout: float = 60) -> str:
        return command("kubectl", "--namespace", self.name, *words, stdin=stdin, timeout=timeout)

    def get(self, *words: object) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.kubectl("get", *words, "--output", "json"))
        return found

    def apply(self, objects: list[dict[str, Any]], *options: str) -> None:
        self.kubectl("apply", "--filename", "-", *options, stdin=yaml.safe_dump_all(objects))

    def job(self, name: str = "ratchet") -> Job:
        return Job(self, name)


@dataclass(frozen=True)
class Job:
    """A PyTorchJob and its pods."""

    namespace: Namespace
    name: str

    def conditions(self) -> dict[str, dict[str, str]]:
        """Those that hold, by type."""
        status = self.namespace.get("pytorchjob", self.name).get("status", {})
        return {c["type"]: c for c in status.get("conditions", []) if c["status"] == "True"}

    def pods(self) -> dict[str, dict[str, Any]]:
        """By name; those on their way out included."""
        items = self.namespace.get("pods", "--selector", f"training.kubeflow.org/job-name={self.name}")["items"]
        return {pod["metadata"]["name"]: pod for pod in items}

    def running(self) -> dict[str, dict[str, Any]]:
        """Those of `pods` that run and are to stay."""
        return {name: pod for name, pod in self.pods().items()
                if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]}

    def stopped(self) -> bool:
        """Whether it is suspended and no pod works for it.

        A pod that ended by itself, because another one's SIGTERM reached it through the ranks first,
        may stay: with cleanPodPolicy Running the operator deletes only what runs. It is replaced on resume.
        """
        return "Suspended" in self.conditions() and all(
            pod["status"]["phase"] in ("Failed", "Succeeded") for pod in self.pods().values())

    def worker(self, index: int) -> str:
        return f"{self.name}-worker-{index}"

    def node(self, index: int) -> str | None:
        """Where a worker runs; None while it does not. One question, for between two pods come and go."""
        pod = self.running().get(self.worker(index))
        return str(pod["spec"]["nodeName"]) if pod else None

    def uid(self, index: int) -> str | None:
        """Tells a running worker from another of the same name."""
        pod = self.running().get(self.worker(index))
        return str(pod["metadata"]["uid"]) if pod else None

    def log(self, index: int, *words: object) -> list[dict[str, Any]]:
        """The lines that a worker's container has written as JSON."""
        text = self.namespace.kubectl("logs", self.worker(index), *words)
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    def status(self, index: int) -> dict[str, Any]:
        """What a worker's /status says, by way of the API server."""
        answer: dict[str, Any] = json.loads(self.http(index, "/status"))
        return answer

    def http(self, index: int, path: str) -> str:
        return command("kubectl", "get", "--raw", f"/api/v1/namespaces/{self.namespace.name}/pods/"
                                                  f"{self.worker(index)}:{METRICS_PORT}/proxy{path}", timeout=20)

    def wait_for_step(self, step: int, *, world_size: int | None = None, index: int = 0,
                      seconds: float = 360) -> dict[str, Any]:
        """Wait until a worker says that the run has come so far, with so many ranks."""
        def reached() -> dict[str, Any] | None:
            self.must_not_have_failed()
            status = self.status(index)
            there = (status["step"] or 0) >= step and status["world_size"] == (world_size or status["world_size"])
            last.update(status)
            return status if there else None

        last: dict[str, Any] = {}
        try:
            return wait_until(f"{self.worker(index)} at step {step}, world size {world_size or 'any'}", reached,
                              seconds=seconds, every=0.5)
        except AssertionError as error:
            raise AssertionError(f"{error}; its last status: {last or 'none'}") from None

    def hurry(self) -> None:
        """Let a run of `slow_digits` come to its end."""
        for name in self.running():
            self.namespace.kubectl("exec", name, "--", "touch", "/tmp/hurry")

    def wait_to_succeed(self, *, seconds: float = 480) -> None:
        def succeeded() -> bool:
            self.must_not_have_failed()
            return "Succeeded" in self.conditions()

        wait_until(f"job {self.name} to succeed", succeeded, seconds=seconds)

    def must_not_have_failed(self) -> None:
        failed = self.conditions().get("Failed")
        assert not failed, f"job {self.name} is Failed: {failed}"


@contextmanager
def namespace(name: str, labels: Mapping[str, str]) -> Iterator[Namespace]:
    """A fresh namespace, gone afterwards with all that is in it."""
    command("kubectl", "delete", "namespace", name, "--ignore-not-found", timeout=120)
    command("kubectl", "create", "-f", "-", stdin=yaml.safe_dump(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": dict(labels)}}))
    # A pod is refused until the namespace has its account.
    here = Namespace(name)
    wait_until("the namespace's account", lambda: here.kubectl("get", "serviceaccount", "default"), seconds=30,
               every=0.2)
    try:
        yield here
    finally:
        # The job first: else the operator makes its pods anew while the namespace deletes them.
        here.kubectl("delete", "pytorchjob,job", "--all", "--wait=false", timeout=60)
        here.kubectl("delete", "pod", "--all", "--grace-period=0", "--force", "--wait=false", timeout=60)
        command("kubectl", "delete", "namespace", name, "--wait=false")


class Witness:
    """Follows the logs and events of a namespace, for pods that are gone when a test fails."""

    def __init__(self, here: Namespace, folder: Path) -> None:
        self._here, self._folder = here, folder

    def save(self) -> None:
        """Everything that says what happened, into files."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for file, words in {
            "jobs.yaml": ("get", "pytorchjob,job", "--output", "yaml"),
            "pods.yaml": ("get", "pods", "--output", "yaml"),
            "pods.txt": ("get", "pods", "--output", "wide"),
            "events.txt": ("get", "events", "--sort-by", ".lastTimestamp"),
            "describe-jobs.txt": ("describe", "pytorchjob"),
            "describe-pods.txt": ("describe", "pods"),
        }.items():
            self._write(file, *words)
        for pod in self._here.get("pods")["items"]:
            name = pod["metadata"]["name"]
            self._write(f"{name}.log", "logs", name, "--all-containers", "--timestamps")
            if any(status["restartCount"] for status in pod["status"].get("containerStatuses", [])):
                self._write(f"{name}.previous.log", "logs", name, "--previous", "--timestamps")

    def _write(self, file: str, *words: str) -> None:
        try:
            text = self._here.kubectl(*words)
        except CommandFailed as error:
            text = str(error)
        (self._folder / file).write_text(text)
