"""Waiting for the pod that hosts the rendezvous: its name first, then its port.

Pods start in any order, and a name is known only when its pod has an address. torchrun gives up on
either after a minute with an error that names neither; here the wait has its own bound and says every
half minute what is missing.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable

from trainer.launch.plan import LaunchPlan
from trainer.telemetry.logs import get_logger

_TRY_SECONDS = 3.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
_SAY_SECONDS = 30.0


def host_to_wait_for(plan: LaunchPlan) -> tuple[str, int] | None:
    """Name and port of the pod that hosts the rendezvous; None: this one, or there is none."""
    if plan.mode == "static":
        return (plan.master_addr, plan.master_port) if plan.node_rank > 0 else None
    if plan.mode == "elastic" and plan.rdzv_backend == "c10d" and plan.rdzv_conf.get("is_host") != "true":
        host, _, port = plan.rdzv_endpoint.rpartition(":")
        return (host.strip("[]"), int(port)) if host and port.isdecimal() else None
    return None


def wait_for_host(host: str, port: int, seconds: float, *, stop: Callable[[], bool] = lambda: False) -> str:
    """Wait until somebody listens there, with growing, jittered pauses.

    Args:
        seconds: how long at most.
        stop: asked between two tries.

    Returns:
        Empty, or what was missing when the time was over.
    """
    began = said = time.monotonic()
    pause, missing = _FIRST_PAUSE, ""
    while not stop():
        missing = _missing(host, port)
        now = time.monotonic()
        if not missing:
            if said > began:
                get_logger().info("the rendezvous host is there", host=f"{host}:{port}", waited=round(now - began, 1))
            return ""
        if now - began > seconds:
            break
        if now - said >= _SAY_SECONDS or said == began:
            said = now
            get_logger().info("waiting for the rendezvous host", host=f"{host}:{port}", missing=missing,
                              waited=round(now - began, 1), limit=seconds)
        time.sleep(pause * random.uniform(0.5, 1.0))  # so that pods do not ask in step
        pause = min(2 * pause, _LONGEST_PAUSE)
    return missing


def _missing(host: str, port: int) -> str:
    """What is not there yet; empty when all is."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        return f"the name {host} does not resolve ({error.strerror})"
    if any(_is_ours(address[4]) for address in addresses):
        return ""  # torchrun will see that too, and be the host
    reason = ""
    for family, kind, protocol, _, address in addresses:
        try:
            with socket.socket(family, kind, protocol) as connection:
                connection.settimeout(_TRY_SECONDS)
                connection.connect(address)
                return ""
        except OSError as error:
            reason = error.strerror or str(error)
    return f"nobody listens at {host}:{port} ({reason})"


def _is_ours(address: tuple[str | int, ...] | tuple[int, bytes]) -> bool:
    """Whether the address belongs to this pod: only then a socket can be bound to it."""
    host = str(address[0])
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
            return True
    except OSError:
        return False
