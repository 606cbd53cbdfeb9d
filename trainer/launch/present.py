"""A plan for people and for programs: what `ratchet plan` prints."""

from __future__ import annotations

import dataclasses
import json
import shlex

from trainer.launch.plan import LaunchPlan
from trainer.launch.resources import Resources


def plan_as_text(plan: LaunchPlan, resources: Resources) -> str:
    """A few aligned lines."""
    rows = [("mode", f"{plan.mode} ({plan.why})"), ("here", ", ".join(resources.found)), ("nodes", plan.nodes),
            ("ranks", f"{plan.nproc} per node"), ("restarts", f"{plan.max_restarts} in place")]
    if plan.mode == "elastic":
        conf = ",".join(f"{key}={value}" for key, value in plan.rdzv_conf.items())
        rows.append(("rendezvous", f"{plan.rdzv_backend} at {plan.rdzv_endpoint}, id {plan.rdzv_id}"
                     + (f", {conf}" if conf else "")))
    if plan.mode == "static":
        rows.append(("master", f"{plan.master_addr}:{plan.master_port}, this is node {plan.node_rank}"))
    rows.append(("torchrun", shlex.join(plan.torchrun_arguments)))
    rows += [("sets", f"{name}={value}") for name, value in plan.environment.items()]
    if plan.removed:
        rows.append(("takes over", " ".join(plan.removed)))
    rows += [("note", note) for note in plan.notes]
    rows += [("warning", warning) for warning in plan.warnings]
    lines = []
    for index, (name, value) in enumerate(rows):
        repeated = index > 0 and rows[index - 1][0] == name
        lines.append(f"{'' if repeated else name:<11} {value}")
    return "\n".join(lines)


def plan_as_json(plan: LaunchPlan, resources: Resources) -> str:
    """All of it, for programs."""
    return json.dumps({**dataclasses.asdict(plan), "torchrun_arguments": plan.torchrun_arguments,
                       "resources": dataclasses.asdict(resources)}, indent=2)
