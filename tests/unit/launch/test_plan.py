import dataclasses
import json

import pytest

from tests.environments import elastic_worker, static_replica
from trainer.config.tree import Config, ConfigError, Launch, Run
from trainer.launch.plan import make_plan
from trainer.launch.present import plan_as_json, plan_as_text
from trainer.launch.resources import Resources

CPUS = Resources(cpus=4, memory_bytes=None, gpus=0, found=("4 CPUs", "no memory limit", "no GPU"))
GPUS = Resources(cpus=16, memory_bytes=None, gpus=8, found=("16 CPUs", "no memory limit", "8 GPUs"))

ELASTIC = {**elastic_worker("job"), "PET_MAX_RESTARTS": "7", "HOSTNAME": "job-worker-1"}
STATIC = {**static_replica("job", rank=2, replicas=3), "PET_NPROC_PER_NODE": "2", "WORLD_SIZE": "6"}
TRAINJOB = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "1",
            "PET_MASTER_ADDR": "job-node-0-0.job", "PET_MASTER_PORT": "29500"}
CONF = "--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=10,join_timeout=600"
"""What every c10d rendezvous gets unless PET_RDZV_CONF says otherwise."""
VOLCANO = {"MASTER_ADDR": "job-master-0.job", "MASTER_PORT": "23456", "WORLD_SIZE": "3", "RANK": "1"}

INDEXED = {"MASTER_ADDR": "job-0.job", "WORLD_SIZE": "3", "JOB_COMPLETION_INDEX": "2"}
"""An Indexed Job of three pods with a headless Service, whose manifest names the first pod."""


def config(**launch):
    return dataclasses.replace(Config(), run=Run(name="myrun"), launch=Launch(**launch))


def plan(environ, resources=CPUS, **launch):
    return make_plan(config(**launch), resources, environ)


@pytest.mark.parametrize(("environ", "mode", "arguments"), [
    ({}, "single", ["--standalone", "--nnodes=1", "--nproc-per-node=1", "--max-restarts=100"]),
    ({"PET_NPROC_PER_NODE": "2"}, "single", ["--standalone", "--nnodes=1", "--nproc-per-node=2", "--max-restarts=100"]),
    ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto"}, "single",
     ["--standalone", "--nnodes=1", "--nproc-per-node=1", "--max-restarts=100"]),
    # `standalone: true` of the v1 operator comes beside all the rest.
    ({**ELASTIC, "PET_STANDALONE": ""}, "single",
     ["--standalone", "--nnodes=1", "--nproc-per-node=1", "--max-restarts=7"]),
    ({**ELASTIC, "PET_STANDALONE": "1"}, "single",
     ["--standalone", "--nnodes=1", "--nproc-per-node=1", "--max-restarts=7"]),
    ({**ELASTIC, "PET_STANDALONE": "0"}, "elastic",
     ["--nnodes=1:3", "--rdzv-backend=c10d", "--rdzv-endpoint=job-worker-0:23456", "--rdzv-id=myrun",
      CONF, "--nproc-per-node=1", "--max-restarts=7"]),
    (ELASTIC, "elastic",
     ["--nnodes=1:3", "--rdzv-backend=c10d", "--rdzv-endpoint=job-worker-0:23456", "--rdzv-id=myrun",
      CONF, "--nproc-per-node=1", "--max-restarts=7"]),
    ({**ELASTIC, "PET_RDZV_ID": "x", "PET_RDZV_CONF": "join_timeout=60,read_timeout=5"}, "elastic",
     ["--nnodes=1:3", "--rdzv-backend=c10d", "--rdzv-endpoint=job-worker-0:23456", "--rdzv-id=x",
      f"{CONF.replace('=600', '=60')},read_timeout=5", "--nproc-per-node=1", "--max-restarts=7"]),
    ({**ELASTIC, "PET_RDZV_BACKEND": "etcd-v2", "HOSTNAME": "job-worker-0"}, "elastic",
     ["--nnodes=1:3", "--rdzv-backend=etcd-v2", "--rdzv-endpoint=job-worker-0:23456", "--rdzv-id=myrun",
      "--nproc-per-node=1", "--max-restarts=7"]),
    # A TrainJob whose user asks for c10d keeps its master's variables.
    ({**TRAINJOB, "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "job-node-0-0.job:29500",
      "HOSTNAME": "job-node-0-0"}, "elastic",
     ["--nnodes=2:2", "--rdzv-backend=c10d", "--rdzv-endpoint=job-node-0-0.job:29500", "--rdzv-id=myrun",
      f"{CONF},is_host=true", "--nproc-per-node=1", "--max-restarts=100"]),
    (STATIC, "static",
     ["--nnodes=3", "--node-rank=2", "--rdzv-backend=static", "--master-addr=job-master-0", "--master-port=23456",
      "--nproc-per-node=2", "--max-restarts=0"]),
    ({**STATIC, "PET_MAX_RESTARTS": "4", "PET_RDZV_BACKEND": "static"}, "static",
     ["--nnodes=3", "--node-rank=2", "--rdzv-backend=static", "--master-addr=job-master-0", "--master-port=23456",
      "--nproc-per-node=2", "--max-restarts=4"]),
    (TRAINJOB, "static",
     ["--nnodes=2", "--node-rank=1", "--rdzv-backend=static", "--master-addr=job-node-0-0.job", "--master-port=29500",
      "--nproc-per-node=1", "--max-restarts=0"]),
    ({**TRAINJOB, "PET_NNODES": "1", "PET_NODE_RANK": "0"}, "static",
     ["--nnodes=1", "--node-rank=0", "--rdzv-backend=static", "--master-addr=job-node-0-0.job", "--master-port=29500",
      "--nproc-per-node=1", "--max-restarts=100"]),
    (VOLCANO, "static",
     ["--nnodes=3", "--node-rank=1", "--rdzv-backend=static", "--master-addr=job-master-0.job", "--master-port=23456",
      "--nproc-per-node=1", "--max-restarts=0"]),
    (INDEXED, "static",
     ["--nnodes=3", "--node-rank=2", "--rdzv-backend=static", "--master-addr=job-0.job", "--master-port=29500",
      "--nproc-per-node=1", "--max-restarts=0"]),
    ({"JOB_COMPLETION_INDEX": "0"}, "single",
     ["--standalone", "--nnodes=1", "--nproc-per-node=1", "--max-restarts=100"]),
    ({**VOLCANO, "MASTER_PORT": ""}, "static",
     ["--nnodes=3", "--node-rank=1", "--rdzv-backend=static", "--master-addr=job-master-0.job", "--master-port=29500",
      "--nproc-per-node=1", "--max-restarts=0"]),
])
def test_the_environment_decides_the_mode(environ, mode, arguments):
    made = plan(environ)
    assert (made.mode, made.torchrun_arguments) == (mode, arguments)


@pytest.mark.parametrize(("environ", "words"), [
    ({**ELASTIC, "PET_MASTER_ADDR": "job-master-0"}, ["elasticPolicy", "Master replica", "job-master-0", "1:3"]),
    ({**ELASTIC, "PET_NNODES": "3:3", "PET_MASTER_ADDR": "job-master-0"}, ["elasticPolicy", "Master replica"]),
    ({"PET_RDZV_BACKEND": "c10d", "PET_NNODES": "1:3"}, ["PET_RDZV_ENDPOINT", "HOST:PORT"]),
    ({"PET_NNODES": "1:3"}, ["PET_NNODES=1:3", "range", "PET_RDZV_BACKEND"]),
    ({"PET_NNODES": "3"}, ["PET_NNODES=3", "PET_MASTER_ADDR", "PET_NODE_RANK"]),
    ({"PET_NNODES": "3:1", "PET_RDZV_BACKEND": "c10d"}, ["PET_NNODES=3:1"]),
    ({"PET_NNODES": "many"}, ["PET_NNODES=many"]),
    ({"PET_NNODES": "0"}, ["PET_NNODES=0"]),
    ({**STATIC, "PET_NODE_RANK": "3"}, ["PET_NODE_RANK=3", "less than 3"]),
    ({**STATIC, "PET_NODE_RANK": "last"}, ["PET_NODE_RANK=last", "whole number"]),
    ({**STATIC, "PET_MAX_RESTARTS": "-1"}, ["PET_MAX_RESTARTS=-1"]),
    ({"JOB_COMPLETION_INDEX": "1"}, ["JOB_COMPLETION_INDEX=1", "MASTER_ADDR", "WORLD_SIZE"]),
    ({"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "2"}, ["MASTER_ADDR"]),
    ({**ELASTIC, "PET_RDZV_CONF": "timeout"}, ["PET_RDZV_CONF=timeout", "KEY=VALUE"]),
    ({"PET_NPROC_PER_NODE": "two"}, ["PET_NPROC_PER_NODE = 'two'", "auto, cpu or gpu"]),
    ({"PET_NPROC_PER_NODE": "gpu"}, ["PET_NPROC_PER_NODE = 'gpu'", "no GPU"]),
    ({"RANK": "0", "WORLD_SIZE": "2"}, ["RANK and WORLD_SIZE set", "MASTER_ADDR not"]),
    ({"WORLD_SIZE": "2", "MASTER_ADDR": "x"}, ["RANK not"]),
    ({**VOLCANO, "RANK": "3"}, ["RANK=3", "less than 3"]),
    # Kubernetes writes this for a Service called `master`.
    ({**VOLCANO, "MASTER_PORT": "tcp://10.0.0.1:80"}, ["MASTER_PORT=tcp://10.0.0.1:80"]),
    ({"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "1"}, ["TORCHELASTIC_RUN_ID", "torchrun"]),
])
def test_a_contradiction_is_one_line_that_names_the_variable(environ, words):
    with pytest.raises(ConfigError) as caught:
        plan(environ)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize(("pet", "setting", "resources", "nproc", "omp"), [
    (None, "auto", CPUS, 1, "4"),
    (None, "auto", GPUS, 8, "2"),
    ("auto", "auto", CPUS, 1, "4"),
    ("auto", "3", CPUS, 3, "1"),  # the operator's default leaves the choice to the setting
    ("2", "3", CPUS, 2, "2"),
    ("cpu", "auto", CPUS, 4, "1"),
    ("cpu", "auto", GPUS, 16, "1"),
    (None, "cpu", CPUS, 4, "1"),
    ("gpu", "auto", GPUS, 8, "2"),
    ("8", "auto", CPUS, 8, "1"),
])
def test_ranks_and_threads_come_from_the_cgroup(pet, setting, resources, nproc, omp):
    made = plan({} if pet is None else {"PET_NPROC_PER_NODE": pet}, resources, nproc_per_node=setting)
    assert (made.nproc, made.environment["OMP_NUM_THREADS"]) == (nproc, omp)


def test_threads_that_the_user_chose_stay():
    made = plan({"OMP_NUM_THREADS": "3"})
    assert made.child_environment({"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(("number", "warning"), [("6", "2 of 8 GPUs stay idle"), ("12", "12 ranks share 8 GPU(s)")])
def test_ranks_that_do_not_match_the_gpus_are_warned_about(number, warning):
    made = plan({"PET_NPROC_PER_NODE": number}, GPUS)
    assert warning in made.warnings[0]


@pytest.mark.parametrize(("environ", "expected"), [
    ({"HOSTNAME": "job-worker-0"}, "true"),
    ({"HOSTNAME": "node-7", "POD_NAME": "job-worker-0"}, "true"),  # hostNetwork
    ({"HOSTNAME": "job-worker-1"}, None),
    ({"HOSTNAME": "job-worker-00"}, None),
    ({"HOSTNAME": "job-worker-0", "PET_RDZV_CONF": "is_host=false"}, "false"),
    ({"HOSTNAME": "job-worker-0", "PET_RDZV_ENDPOINT": "job-worker-0.job.ns.svc:1"}, "true"),
])
def test_the_pod_that_the_endpoint_names_hosts_the_rendezvous(environ, expected):
    assert plan({**ELASTIC, **environ}).rdzv_conf.get("is_host") == expected


@pytest.mark.parametrize(("environ", "shared"), [({}, "1"), (ELASTIC, "1"), (STATIC, None), (VOLCANO, None)])
def test_elastic_rounds_never_share_the_store(environ, shared):
    assert plan(environ).environment.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == shared


@pytest.mark.parametrize(("budget", "timeout"), [(30, "25"), (300, "295"), (8, "4"), (1, "1"), (0.5, "1")])
def test_torchrun_gives_up_before_the_pod_is_killed(budget, timeout):
    assert plan({}, stop_budget_seconds=budget).environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == timeout


def test_arguments_take_the_place_of_the_variables_they_say():
    environ = {**ELASTIC, "PET_STANDALONE": "0", "PET_LOCAL_ADDR": "10.0.0.7", "PATH": "/bin"}
    child = plan(environ).child_environment(environ)
    assert {name for name in child if name.startswith("PET_")} == {"PET_LOCAL_ADDR"}
    assert child["PATH"] == "/bin"


def test_a_plan_is_a_pure_function():
    environ = dict(ELASTIC)
    assert plan(environ) == plan(environ)
    assert environ == ELASTIC


@pytest.mark.parametrize("environ", [{}, ELASTIC, {**ELASTIC, "HOSTNAME": "job-worker-0"}, STATIC, VOLCANO])
def test_a_plan_can_be_read_by_people_and_programs(environ):
    made = plan(environ)
    text = plan_as_text(made, CPUS)
    assert f"{made.mode} ({made.why})" in text
    assert all(argument in text for argument in made.torchrun_arguments)
    read = json.loads(plan_as_json(made, CPUS))
    assert read["mode"] == made.mode
    assert read["torchrun_arguments"] == made.torchrun_arguments
    assert read["environment"] == made.environment
