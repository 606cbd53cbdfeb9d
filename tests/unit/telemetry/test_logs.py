import json
import logging
import subprocess
import sys
import warnings

import pytest
import structlog

from trainer.config.tree import Log
from trainer.telemetry.logs import configure, get_logger


@pytest.fixture(autouse=True)
def restored_logging():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers = []
    yield
    root.handlers, root.level = handlers, level
    logging.captureWarnings(False)
    structlog.reset_defaults()


@pytest.fixture
def lines(capsys):
    return lambda: [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_line_is_json_with_time_level_and_event_first(lines):
    configure(Log(), run="digits", rank=0, local_rank=0, world_size=2, pod="")
    get_logger().info("saved", step=120)
    (line,) = lines()
    assert list(line)[:3] == ["timestamp", "level", "event"]
    assert line.pop("timestamp").endswith("Z")
    assert line == {"level": "info", "event": "saved", "step": 120, "run": "digits", "rank": 0, "local_rank": 0,
                    "world_size": 2}


def test_a_logger_made_before_the_set_up_follows_it(lines):
    log = get_logger()
    configure(Log(level="warning"))
    log.info("quiet")
    log.warning("loud")
    assert [line["event"] for line in lines()] == ["loud"]


def test_other_libraries_go_through_the_same_renderer(lines):
    configure(Log(), rank=1)
    logging.getLogger("botocore.session").warning("retry %d", 3)
    logging.getLogger("torch.distributed.elastic").info("not interesting")
    (line,) = lines()
    assert (line["event"], line["level"], line["logger"], line["rank"]) == (
        "retry 3", "warning", "botocore.session", 1)


def test_a_handler_of_torch_is_replaced(lines, capsys):
    torch_logger = logging.getLogger("torch.some.part")
    torch_logger.addHandler(logging.StreamHandler())
    torch_logger.propagate = False
    configure(Log())
    torch_logger.error("oh")
    assert [line["event"] for line in lines()] == ["oh"]
    assert capsys.readouterr().err == ""


def test_python_warnings_are_log_lines(lines):
    configure(Log())
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        logging.captureWarnings(True)
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    (line,) = lines()
    assert line["level"] == "warning"
    assert "DeprecationWarning: old" in line["event"]


def test_an_exception_is_structured_and_holds_no_locals(lines):
    configure(Log())

    def fail():
        hidden = "a local value"
        raise ValueError("bad " + hidden[:1])

    try:
        fail()
    except ValueError:
        get_logger().exception("failed")
    (line,) = lines()
    (exception,) = line["exception"]
    assert (exception["exc_type"], exception["exc_value"]) == ("ValueError", "bad a")
    assert "a local value" not in json.dumps(line)
    assert exception["frames"][-1]["name"] == "fail"


def test_numbers_that_json_does_not_know_are_text(lines):
    configure(Log())
    get_logger().info("step", loss=float("nan"))
    assert lines()[0]["loss"] == "nan"


@pytest.mark.parametrize("say", [
    lambda: get_logger().info("connect", endpoint="http://user:hunter22@minio:9000"),
    lambda: get_logger().info("connect to http://user:hunter22@minio:9000"),
    lambda: get_logger().info("connect", aws_secret_access_key="hunter22"),
    lambda: get_logger().info("connect", headers={"x": "/abc+def=="}),
    lambda: get_logger().error("refused with /abc+def=="),
    lambda: logging.getLogger("botocore").warning("signed with %s", "/abc+def=="),
])
@pytest.mark.parametrize("form", ["json", "console"])
def test_secrets_are_never_logged(capsys, monkeypatch, say, form):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "/abc+def==")
    configure(Log(format=form))
    say()
    out = capsys.readouterr().out
    assert "***" in out
    assert "hunter22" not in out
    assert "/abc+def==" not in out


def test_debug_never_reaches_the_libraries_that_print_signed_requests(lines):
    configure(Log(level="debug"))
    logging.getLogger("botocore.auth").debug("Authorization: AWS4 ...")
    get_logger().debug("ours")
    assert [line["event"] for line in lines()] == ["ours"]


def test_the_console_is_short(capsys):
    configure(Log(format="console"), run="digits", pod="worker-0", rank=0, world_size=2)
    get_logger().info("step", step=50, loss=0.123456789)
    assert capsys.readouterr().out.split(" ", 1)[1] == "[info] step step=50 loss=0.1235 rank=0\n"


def test_one_line_is_one_write(monkeypatch):
    written = []

    class Stream:
        def write(self, text):
            written.append(text)
            return len(text)

        def flush(self):
            pass

        def isatty(self):
            return False

    monkeypatch.setattr("sys.stdout", Stream())
    configure(Log(format="json"))
    get_logger().info("one")
    logging.getLogger("other").warning("two")
    assert len(written) == 2
    assert all(text.endswith("\n") for text in written)


def test_a_reader_that_went_away_changes_no_exit_code():
    code = ("import sys\nfrom trainer.config.tree import Log\n"
            "from trainer.telemetry.logs import configure, get_logger\n"
            "configure(Log(format='json'))\nsys.stdin.readline()\n"
            "for _ in range(3): get_logger().info('a line')\nsys.exit(7)")
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.close()
    process.stdin.write(b"go\n")
    process.stdin.close()
    assert process.wait(60) == 7
