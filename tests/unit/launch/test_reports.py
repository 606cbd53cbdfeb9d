import dataclasses
import json

import pytest

from trainer.checkpoint.done import Done
from trainer.config.tree import Config, Train
from trainer.launch.exits import Report
from trainer.launch.outcome import Outcome
from trainer.launch.reports import (
    completion,
    completion_text,
    how_to_continue,
    termination_message,
    write_termination_message,
)

DONE = Done(run="digits", epochs=10, max_steps=0, step=230, samples=14370, checkpoint="digits/step-000000230/a",
            evaluation={"loss": 0.0712345, "accuracy": 0.98125}, config={})


def failure(message="boom", exception=""):
    report = Report(code=1, rank=3, local_rank=1, pid=9, step=40, message=message, exception=exception, time=1.0)
    return Outcome(1, message, report)


def test_the_termination_message_tells_the_root_cause():
    text = termination_message(failure(exception="ValueError: boom"), last_checkpoint="s3://b/x")
    assert json.loads(text) == {
        "exit_code": 1, "reason": "boom", "do": failure().do, "last_checkpoint": "s3://b/x", "rank": 3, "step": 40,
        "exception": "ValueError: boom"}


@pytest.mark.parametrize("letter", ["x", "ä", '"', "\n"])
def test_a_long_termination_message_is_cut_to_what_kubernetes_keeps(letter):
    text = termination_message(failure(letter * 9000, "begin" + letter * 9000 + "the end"), last_checkpoint=None)
    assert len(text.encode()) <= 4096
    read = json.loads(text)
    assert read["exception"].endswith("the end")
    assert read["reason"].startswith(letter)
    assert read["exit_code"] == 1


def test_secrets_of_the_environment_and_passwords_of_urls_are_blanked(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "abcdefgh")
    text = termination_message(failure("refused abcdefgh at http://me:pass@host/x", "abcdefgh"), last_checkpoint=None)
    assert json.loads(text)["reason"] == "refused *** at http://***@host/x"
    assert "abcdefgh" not in text


def test_it_is_written_only_where_the_kubelet_looks(tmp_path):
    path = tmp_path / "termination-log"
    write_termination_message(failure(), last_checkpoint=None, path=path)
    assert not path.exists()
    path.touch()
    write_termination_message(failure(), last_checkpoint=None, path=path)
    assert json.loads(path.read_text())["reason"] == "boom"


def test_a_place_that_can_not_be_written_is_left_alone(tmp_path):
    write_termination_message(failure(), last_checkpoint=None, path=tmp_path)


@pytest.mark.parametrize(("words", "train", "command"), [
    ([], Train(epochs=10), "ratchet run --train.epochs 20"),
    (["digits"], Train(epochs=10), "ratchet run digits --train.epochs 20"),
    (["digits", "--train.epochs", "10", "--run.name=a b"], Train(epochs=10),
     "ratchet run digits --run.name 'a b' --train.epochs 20"),
    (["my.toml"], Train(epochs=10, max_steps=50), "ratchet run my.toml --train.max_steps 100"),
])
def test_the_command_that_continues_is_the_users_own_with_twice_the_length(words, train, command):
    assert how_to_continue(words, dataclasses.replace(Config(), train=train)) == command


def test_in_a_cluster_the_setting_that_continues_is_told_for_nobody_types_a_command_there(monkeypatch):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    config = dataclasses.replace(Config(), train=Train(epochs=10))
    assert how_to_continue(["/etc/ratchet/config.toml"], config).startswith("train.epochs = 20 in the configuration")


def test_a_complete_run_tells_accuracy_place_and_how_to_go_on():
    facts = completion(DONE, "file:///s/digits/step-000000230/a", "ratchet run --train.epochs 20")
    assert facts["held_out_accuracy"] == 0.9812
    assert facts["checkpoint"] == "file:///s/digits/step-000000230/a"
    text = completion_text(DONE, "file:///s/digits/step-000000230/a", "ratchet run --train.epochs 20")
    assert "accuracy 0.9812, loss 0.07123" in text
    assert "ratchet run --train.epochs 20" in text


def test_a_run_without_a_validation_split_says_so():
    assert "no validation split" in completion_text(dataclasses.replace(DONE, evaluation={}), "x", "y")


def test_a_run_that_its_steps_ended_names_no_epochs_that_it_did_not_do():
    cut = dataclasses.replace(DONE, max_steps=230)
    assert "epochs" not in completion(cut, "x", "y")
    assert "is complete: 230 steps," in completion_text(cut, "x", "y")
    assert completion(dataclasses.replace(DONE, max_steps=231), "x", "y")["epochs"] == 10
    assert "is complete: 10 epochs, 230 steps," in completion_text(DONE, "x", "y")
