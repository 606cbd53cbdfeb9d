"""Waiting for the pod that hosts the rendezvous; real names and real ports of this machine."""

import json
import socket
import threading

import pytest

from tests.servers import free_ports
from trainer.config.tree import Config, Log
from trainer.launch import waiting
from trainer.launch.plan import make_plan
from trainer.launch.resources import Resources
from trainer.launch.waiting import host_to_wait_for, wait_for_host
from trainer.telemetry.logs import configure

HERE = Resources(cpus=4, memory_bytes=None, gpus=0, found=("4 CPUs", "no memory limit", "no GPU"))
ELASTIC = {"PET_NNODES": "2:3", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "job-worker-0:23456"}
STATIC = {"PET_NNODES": "2", "PET_MASTER_ADDR": "job-master-0", "PET_MASTER_PORT": "23456"}


@pytest.mark.parametrize(("environ", "host"), [
    ({}, None),
    ({**ELASTIC, "HOSTNAME": "job-worker-1"}, ("job-worker-0", 23456)),
    ({**ELASTIC, "HOSTNAME": "job-worker-0"}, None),
    ({**ELASTIC, "HOSTNAME": "job-worker-1", "PET_RDZV_BACKEND": "etcd-v2"}, None),
    ({**STATIC, "PET_NODE_RANK": "1"}, ("job-master-0", 23456)),
    ({**STATIC, "PET_NODE_RANK": "0"}, None),
])
def test_who_waits_for_whom(environ, host):
    assert host_to_wait_for(make_plan(Config(), HERE, environ)) == host


@pytest.fixture
def elsewhere(monkeypatch):
    """Loopback counts as another pod's address."""
    monkeypatch.setattr(waiting, "_is_ours", lambda address: False)


def test_a_pod_whose_own_address_the_name_has_does_not_wait_for_itself():
    (port,) = free_ports(1)
    assert wait_for_host("127.0.0.1", port, 30) == ""


def test_it_goes_on_as_soon_as_somebody_listens(elsewhere, monkeypatch, capsys):
    configure(Log(format="json"))
    (port,) = free_ports(1)
    asked = threading.Event()
    real = waiting._missing

    def asking(host, number):
        answer = real(host, number)
        asked.set()
        return answer

    with socket.socket() as listener:
        def come():
            asked.wait(10)
            listener.bind(("127.0.0.1", port))
            listener.listen()

        thread = threading.Thread(target=come)
        thread.start()
        monkeypatch.setattr(waiting, "_missing", asking)
        assert wait_for_host("127.0.0.1", port, 30) == ""
        thread.join()
    first, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert first["missing"] == f"nobody listens at 127.0.0.1:{port} (Connection refused)"
    assert last["event"] == "the rendezvous host is there"


def test_a_name_that_is_not_known_yet_is_waited_for_too(elsewhere, monkeypatch):
    real, asked = socket.getaddrinfo, []

    def late(host, port, **options):
        asked.append(host)
        if len(asked) < 4:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real("127.0.0.1", port, **options)

    monkeypatch.setattr(waiting.socket, "getaddrinfo", late)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert wait_for_host("job-worker-0", listener.getsockname()[1], 30) == ""
    assert len(asked) == 4


def test_what_is_missing_at_the_end_is_said(elsewhere):
    (port,) = free_ports(1)
    assert wait_for_host("127.0.0.1", port, 0.2) == f"nobody listens at 127.0.0.1:{port} (Connection refused)"
    assert wait_for_host("no-such-pod.invalid", 1, 0.2).startswith("the name no-such-pod.invalid does not resolve")


def test_a_stop_ends_the_wait(elsewhere):
    assert wait_for_host("no-such-pod.invalid", 1, 600, stop=lambda: True) == ""
