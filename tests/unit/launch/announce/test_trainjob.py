"""A TrainJob's progress, posted to a real HTTP server."""

import http.server
import json
import threading

import pytest

from trainer.launch.announce import trainjob
from trainer.launch.announce.trainjob import Pace, TrainJobProgress, progress
from trainer.telemetry.pod import PodView, RankView


def view(*, rank=0, step=30, total=120, pid=7, values=None, info=None):
    one = RankView(rank=rank, local_rank=0, pid=pid, up=True, state="compute", step=step, epoch=1, at=0.0, steps=step,
                   samples=0, step_seconds=0.0, times={})
    return PodView(ranks=(one,), world_size=2, restarts=0, lost_steps=0, values=values or {},
                   info={"total_steps": total, **(info or {})})


def test_percent_and_numbers_are_what_the_protocol_asks_for():
    values, info = {"loss": 0.25, "grad_norm": float("nan")}, {"evaluation": {"accuracy": 0.9}}
    told = progress(view(values=values, info=info), Pace())
    assert told == {"progressPercentage": 25, "metrics": [
        {"name": "epoch", "value": "1"}, {"name": "evaluation_accuracy", "value": "0.9"},
        {"name": "loss", "value": "0.25"}, {"name": "step", "value": "30"}]}


@pytest.mark.parametrize("silent", [view(rank=1), view(total=0), PodView((), 0, 0, 0, {}, {})])
def test_only_the_pod_with_rank_0_and_a_known_end_speaks(silent):
    assert progress(silent, Pace()) == {}


def test_the_remaining_time_comes_from_the_steps_since_the_ranks_began():
    pace = Pace()
    assert pace.remaining(7, 10, 110, now=100.0) is None
    assert pace.remaining(7, 20, 110, now=105.0) == 45
    assert pace.remaining(8, 20, 110, now=106.0) is None, "another process: its start does not count as slow steps"


@pytest.fixture
def server():
    """Takes what is posted; its answer is `server.code`."""
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.server.posts.append((self.headers["Authorization"], body))
            self.server.came.set()
            self.send_response(self.server.code)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http_server:
        http_server.posts, http_server.came, http_server.code = [], threading.Event(), 200
        threading.Thread(target=http_server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield http_server
        http_server.shutdown()


@pytest.fixture
def environ(server, tmp_path, monkeypatch):
    monkeypatch.setattr(trainjob, "_PERIOD_SECONDS", 0.02)
    (tmp_path / "token").write_text("first\n")
    return {"KUBEFLOW_TRAINER_SERVER_URL": f"http://127.0.0.1:{server.server_port}/status",
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(tmp_path / "token")}


def wait(server):
    assert server.came.wait(20)
    server.came.clear()


def test_changes_are_posted_with_the_token_of_the_moment(server, environ, tmp_path):
    now = {"step": 10}
    teller = TrainJobProgress(lambda: view(step=now["step"]), environ)
    wait(server)
    (tmp_path / "token").write_text("second\n")
    now["step"] = 120
    wait(server)
    teller.close(4.0)
    assert [(token, body["trainerStatus"]["progressPercentage"]) for token, body in server.posts] == [
        ("Bearer first", 8), ("Bearer second", 100)], "and nothing is posted while nothing changes"
    assert server.posts[0][1]["trainerStatus"]["lastUpdatedTime"].endswith("+00:00")


def test_a_server_that_refuses_is_told_once_and_asked_again(server, environ, capsys):
    server.code = 500
    steps = iter(range(10, 100))
    teller = TrainJobProgress(lambda: view(step=next(steps)), environ)
    wait(server)
    wait(server)
    teller.close(4.0)
    assert capsys.readouterr().out.count("progress was not taken") == 1


def test_without_the_variables_nothing_is_started():
    before = threading.active_count()
    TrainJobProgress(view, {}).close(4.0)
    assert threading.active_count() == before
