import json
import socket
import urllib.error
import urllib.request

import pytest

from trainer.config import ConfigError
from trainer.config.tree import Metrics
from trainer.launch.server import Server
from trainer.telemetry.pod import PodMetrics


@pytest.fixture
def serve():
    servers = []

    def start(*, status=dict, ailing=lambda: "", environ=None, **settings):
        settings = {"port": 0, **settings}
        server = Server(Metrics(**settings), registry=PodMetrics(run="test", nproc=1).registry, status=status,
                        ailing=ailing, environ=environ or {})
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.close()


def get(url, **headers):
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def test_metrics_come_in_the_form_that_was_asked_for(serve):
    server = serve()
    code, kind, body = get(f"{server.url}/metrics")
    assert (code, kind.split(";")[0]) == (200, "text/plain")
    assert '# TYPE ratchet_worker_up gauge\nratchet_worker_up{local_rank="0"} 0.0\n' in body
    code, kind, body = get(f"{server.url}/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert (code, kind.split(";")[0]) == (200, "application/openmetrics-text")
    assert body.endswith("# EOF\n")


def test_it_is_ready_when_it_answers(serve):
    assert get(f"{serve().url}/readyz")[::2] == (200, "ok\n")


def test_health_gives_the_reason(serve):
    assert get(f"{serve().url}/healthz")[::2] == (200, "ok\n")
    assert get(f"{serve(ailing=lambda: 'the loop stands').url}/healthz")[::2] == (503, "the loop stands\n")


def test_status_is_json_also_with_numbers_that_json_does_not_know(serve):
    server = serve(status=lambda: {"loss": float("nan"), "ranks": [{"step": 3}], "values": {"x": float("inf")}})
    code, kind, body = get(f"{server.url}/status")
    assert (code, kind) == (200, "application/json")
    assert json.loads(body) == {"loss": "nan", "ranks": [{"step": 3}], "values": {"x": "inf"}}


def test_other_paths_say_what_there_is(serve):
    code, _, body = get(f"{serve().url}/")
    assert code == 404
    assert "/metrics" in body


def test_a_failing_answer_leaves_the_server_up(serve):
    server = serve(status=lambda: 1 / 0)
    with pytest.raises(OSError):  # noqa: PT011 - the connection just ends
        get(f"{server.url}/status")
    assert get(f"{server.url}/readyz")[0] == 200


def test_a_client_that_says_nothing_holds_up_nobody(serve):
    server = serve()
    with socket.create_connection(("127.0.0.1", server.port)):
        assert get(f"{server.url}/readyz")[0] == 200


def test_a_busy_port_is_replaced_by_a_free_one_with_a_warning(serve, capsys):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        server = serve(port=port)
        assert server.port != port
        assert get(f"{server.url}/readyz")[0] == 200
    assert "port busy" in capsys.readouterr().out


def test_an_address_that_is_not_ours_is_a_setting_to_correct(serve):
    with pytest.raises(ConfigError, match=r"metrics\.host = '192\.0\.2\.1'"):
        serve(host="192.0.2.1")


@pytest.mark.parametrize(("environ", "reach"), [({}, False), ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, True)])
def test_only_in_kubernetes_all_addresses_are_served(serve, environ, reach):
    server = serve(environ=environ)
    try:  # 127.0.0.2 is this machine by another address
        reached = get(f"http://127.0.0.2:{server.port}/readyz")[0] == 200
    except OSError:
        reached = False
    assert reached == reach
