"""The loader: who wins, and what each mistake says."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.config import Config, ConfigError, load, load_for_worker
from trainer.config.load import RESOLVED_ENV, builtin_names, environment_name, split_arguments, to_json

TomlFile = Callable[[str], str]

TABLE = "a table of text, finite numbers, true or false, lists and tables"


@pytest.fixture
def toml(tmp_path: Path) -> TomlFile:
    """Write a TOML file called job.toml, return its path."""

    def write(text: str) -> str:
        path = tmp_path / "job.toml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def message(*args: Any, **kwargs: Any) -> str:
    """What `load` says about a mistake: one line, whatever the mistake."""
    with pytest.raises(ConfigError) as caught:
        load(*args, **kwargs)
    text = str(caught.value)
    assert len(text.splitlines()) == 1, text
    return text


def test_each_source_wins_over_the_ones_before_it(toml: TomlFile) -> None:
    path = toml("[train]\nepochs = 2\nglobal_batch_size = 20\nmax_steps = 2")
    environ = {"RATCHET_TRAIN__EPOCHS": "3", "RATCHET_TRAIN__GLOBAL_BATCH_SIZE": "30"}
    train = load(path, [("train.epochs", "4")], environ).config.train
    assert (train.epochs, train.global_batch_size, train.max_steps) == (4, 30, 2)
    assert train.log_every_steps == Config().train.log_every_steps


def test_sources_tell_where_each_setting_came_from(toml: TomlFile) -> None:
    path = toml("[train]\nepochs = 2\nmax_steps = 2")
    resolved = load(path, [("run.name", "x")], {"RATCHET_TRAIN__EPOCHS": "3"})
    assert resolved.origin == path
    assert resolved.sources == {
        "train.epochs": "by the environment variable RATCHET_TRAIN__EPOCHS",
        "train.max_steps": f"in {path}",
        "run.name": "on the command line",
    }


def test_the_file_is_the_argument_else_the_environment_else_digits(toml: TomlFile) -> None:
    path = toml("run.name = 'mine'")
    assert load(None, environ={"RATCHET_CONFIG": path}).config.run.name == "mine"
    assert load("digits", environ={"RATCHET_CONFIG": path}).origin == "built-in workload digits"
    assert load(None, environ={"RATCHET_CONFIG": ""}).origin == "built-in workload digits"


def test_the_mounted_file_is_taken_when_nothing_is_named(toml: TomlFile, monkeypatch: pytest.MonkeyPatch) -> None:
    path = toml("run.name = 'mounted'")
    monkeypatch.setattr(sys.modules[load.__module__], "DEFAULT_FILE", path)
    assert load(environ={}).config.run.name == "mounted"


@pytest.mark.parametrize("name", builtin_names())
def test_every_built_in_workload_loads(name: str) -> None:
    assert load(name, environ={}).config.workload.module == f"trainer.workloads.{name}"


@pytest.mark.parametrize(("text", "said"), [
    ("[train]\nepoch = 3", "unknown setting 'train.epoch' in {file}; did you mean train.epochs?"),
    ("[train]\nlr = 0.1", "unknown setting 'train.lr' in {file}; did you mean optimizer.lr?"),
    ("[train]\nqqqqqq = 1", "unknown setting 'train.qqqqqq' in {file}"),
    ('[train]\n"quite\\nanother" = 1', r"unknown setting 'train.quite\nanother' in {file}"),
    ("[optimiser]\nlr = 0.1", "unknown section 'optimiser' in {file}; did you mean optimizer?"),
    ("epochs = 3", "unknown setting 'epochs' in {file}, above all sections; did you mean train.epochs?"),
    ("train = 3", "train = 3 in {file}: must be a table, write [train] above its settings"),
    ("[[train]]", "train = [{{}}] in {file}: must be a table, write [train] above its settings"),
    ("[train]\nepochs = '3'", "train.epochs = '3' in {file}: must be a whole number"),
    ("[train]\nepochs = 3.0", "train.epochs = 3.0 in {file}: must be a whole number"),
    ("[train]\nepochs = true", "train.epochs = True in {file}: must be a whole number"),
    ("[train]\ndrop_last = 1", "train.drop_last = 1 in {file}: must be true or false"),
    ("[train]\nprecision = 'fp8'", "train.precision = 'fp8' in {file}: must be one of fp32, bf16, fp16"),
    ("[train]\nprecision = 32", "train.precision = 32 in {file}: must be one of fp32, bf16, fp16"),
    ("[optimizer]\nlr = 'small'", "optimizer.lr = 'small' in {file}: must be a finite number"),
    ("[optimizer]\nlr = true", "optimizer.lr = True in {file}: must be a finite number"),
    ("[optimizer]\nlr = nan", "optimizer.lr = nan in {file}: must be a finite number"),
    ("[optimizer]\nlr = -inf", "optimizer.lr = -inf in {file}: must be a finite number"),
    (f"[optimizer]\nlr = 1{'0' * 400}", "optimizer.lr = inf in {file}: must be a finite number"),
    ("[run]\nname = true", "run.name = True in {file}: must be text"),
    ("[run]\nname = 1.5", "run.name = 1.5 in {file}: must be text"),
    ("[workload]\noptions = 3", f"workload.options = 3 in {{file}}: must be {TABLE}"),
    ("[workload]\noptions.day = [{ from = 2024-01-01 }]",
     f"workload.options = {{{{'day': [{{{{'from': datetime.date(2024, 1, 1)}}}}]}}}} in {{file}}: must be {TABLE}"),
    ("[train", "{file} is not valid TOML: Expected ']' at the end of a table declaration (at end of document)"),
], ids=lambda value: value.partition(" in {")[0][:40])
def test_a_mistake_in_the_file_names_the_setting_the_file_and_the_rule(toml: TomlFile, text: str, said: str) -> None:
    path = toml(text)
    assert message(path, environ={}) == said.format(file=path)


@pytest.mark.parametrize(("key", "text", "said"), [
    ("train.epoch", "3", "unknown setting 'train.epoch' on the command line; did you mean train.epochs?"),
    ("epochs", "3", "unknown setting 'epochs' on the command line; did you mean train.epochs?"),
    ("", "3", "unknown setting '' on the command line"),
    ("train", "3", "unknown setting 'train' on the command line"),
    ("train.epochs", "many", "train.epochs = 'many' on the command line: must be a whole number"),
    ("train.epochs", "1.5", "train.epochs = '1.5' on the command line: must be a whole number"),
    ("train.epochs.x", "1", "unknown setting 'train.epochs.x' on the command line: train.epochs has no parts"),
    ("optimizer.lr", "nan", "optimizer.lr = nan on the command line: must be a finite number"),
    ("optimizer.lr", "1e999", "optimizer.lr = inf on the command line: must be a finite number"),
    ("train.drop_last", "maybe", "train.drop_last = 'maybe' on the command line: must be true or false"),
    ("log.level", "loud", "log.level = 'loud' on the command line: must be one of debug, info, warning, error"),
    ("workload.options", "{}", "workload.options on the command line: set one entry of this table, as in workload."),
    ("run.name", "caf\udce9", r"run.name = 'caf\udce9' on the command line: must be text in UTF-8"),
])
def test_a_mistake_on_the_command_line_says_so(key: str, text: str, said: str) -> None:
    assert message("digits", [(key, text)], {}).startswith(said)


def test_a_mistake_in_the_environment_names_the_variable() -> None:
    assert message("digits", environ={"RATCHET_TRAIN__EPOCHS": "x"}) == (
        "train.epochs = 'x' by the environment variable RATCHET_TRAIN__EPOCHS: must be a whole number")
    assert message("digits", environ={"RATCHET_TRAIN__EPOCH": "3"}) == (
        "unknown setting 'train.epoch' by the environment variable RATCHET_TRAIN__EPOCH; did you mean train.epochs?")


def test_one_underscore_where_two_belong_is_refused_not_ignored() -> None:
    assert message("digits", environ={"RATCHET_TRAIN_GLOBAL_BATCH_SIZE": "8"}) == (
        "environment variable RATCHET_TRAIN_GLOBAL_BATCH_SIZE: two underscores part section and field:"
        " RATCHET_TRAIN__GLOBAL_BATCH_SIZE")


def test_variables_that_kubernetes_makes_for_services_are_ignored() -> None:
    links = {
        "RATCHET_S3_SERVICE_HOST": "10.0.0.1",
        "RATCHET_S3_SERVICE_PORT": "9000",
        "RATCHET_S3_PORT": "tcp://10.0.0.1:9000",
        "RATCHET_S3_PORT_9000_TCP": "tcp://10.0.0.1:9000",
        "RATCHET_S3_PORT_9000_TCP_ADDR": "10.0.0.1",
        # A Service called ratchet-metrics meets the name of a setting.
        "RATCHET_METRICS_PORT": "tcp://10.0.0.1:9464",
        "RATCHET_METRICS_PORT_9464_TCP_PORT": "9464",
        "RATCHET_METRICS_SERVICE_HOST": "10.0.0.1",
    }
    assert load("digits", environ=links) == load("digits", environ={})
    assert "two underscores" in message("digits", environ={"RATCHET_METRICS_PORT": "9464"})


def test_a_value_that_cannot_work_names_the_source_of_it(toml: TomlFile) -> None:
    path = toml("[train]\nglobal_batch_size = 16")
    assert message(path, [("train.micro_batch_size", "32")], {}) == (
        "train.micro_batch_size = 32 on the command line: must be between 0 and train.global_batch_size = 16"
        f" in {path}")


def test_a_missing_file_lists_the_built_in_workloads() -> None:
    said = message("digit", environ={})
    assert said.startswith("no file 'digit' and no built-in workload of that name"
                           " (built-in: charlm, digits, ragged, vowels)")
    assert said.endswith("did you mean digits?")
    assert "'/no/such.toml', which RATCHET_CONFIG names" in message(environ={"RATCHET_CONFIG": "/no/such.toml"})


def test_a_file_that_is_no_readable_text_is_named(tmp_path: Path) -> None:
    assert message(str(tmp_path), environ={}) == f"can't read '{tmp_path}': Is a directory"
    latin = tmp_path / "latin.toml"
    latin.write_bytes("[run]\nname = 'caf\xe9'".encode("latin-1"))
    assert message(str(latin), environ={}).startswith(f"{latin} is not text in UTF-8: ")


def test_a_number_too_long_for_python_is_a_mistake_in_the_file(toml: TomlFile) -> None:
    path = toml(f"[train]\nepochs = {'9' * 5000}")
    assert message(path, environ={}).startswith(f"{path} is not valid TOML: ")


def test_whole_numbers_serve_as_text_and_as_fractions(toml: TomlFile) -> None:
    config = load(toml("[launch]\nnproc_per_node = 2\n[optimizer]\nlr = 1\n[run]\nname = 7"), environ={}).config
    assert (config.launch.nproc_per_node, config.run.name) == ("2", "7")
    assert isinstance(config.optimizer.lr, float)


@pytest.mark.parametrize(("text", "value"), [
    ("true", True), ("True", True), ("1", True), ("yes", True), ("on", True),
    ("false", False), ("0", False), ("NO", False), ("off", False),
])
def test_switches_take_the_usual_words(text: str, value: bool) -> None:
    assert load("digits", [("train.drop_last", text)], {}).config.train.drop_last is value


@pytest.mark.parametrize(("text", "value"), [
    ("3", 3), ("1e-3", 0.001), ("true", True), ("[1, 2]", [1, 2]), ('"3"', "3"), ("wide", "wide"), ("", ""),
    ("2024-01-01", "2024-01-01"), ("nan", "nan"), ("1\nother = 2", "1\nother = 2"),
])
def test_an_entry_of_the_free_table_is_a_toml_value_or_else_text(text: str, value: object) -> None:
    options = load("digits", [("workload.options.width", text)], {}).config.workload.options
    assert options["width"] == value
    assert type(options["width"]) is type(value)


def test_entries_of_the_free_table_merge_over_all_sources(toml: TomlFile) -> None:
    path = toml("[workload.options]\na = 1\nb = 1\nc = 1\nnet = { depth = 1, width = 1 }")
    environ = {"RATCHET_WORKLOAD__OPTIONS__B": "2", "RATCHET_WORKLOAD__OPTIONS__C": "2"}
    overrides = [("workload.options.c", "3"), ("workload.options.net.width", "3"), ("workload.options.new.x", "3")]
    assert load(path, overrides, environ).config.workload.options == {
        "a": 1, "b": 2, "c": 3, "net": {"depth": 1, "width": 3}, "new": {"x": 3}}
    assert message(path, [("workload.options.a.x", "3")], {}) == (
        "workload.options.a.x on the command line: a is a value, not a table")


def test_arguments_part_into_words_and_overrides() -> None:
    assert split_arguments(["job.toml", "--train.epochs", "3", "--run.name=a=b", "--optimizer.lr", "-1"]) == (
        ["job.toml"], [("train.epochs", "3"), ("run.name", "a=b"), ("optimizer.lr", "-1")])


@pytest.mark.parametrize("words", [["--train.epochs"], ["--train.epochs", "--run.name=x"]])
def test_an_override_without_its_value_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"^--train.epochs needs a value: --train.epochs VALUE"):
        split_arguments(words)


def test_a_rank_takes_what_ratchet_run_resolved(tmp_path: Path) -> None:
    config = dataclasses.replace(Config(), run=dataclasses.replace(Config().run, name="resolved"))
    (tmp_path / "config.json").write_text(to_json(config), encoding="utf-8")
    environ = {RESOLVED_ENV: str(tmp_path / "config.json"), "RATCHET_RUN__NAME": "late"}
    assert load_for_worker(["--run.name", "late"], environ) == config


def test_a_rank_under_plain_torchrun_reads_its_own_arguments(toml: TomlFile) -> None:
    path = toml("[train]\nepochs = 2")
    config = load_for_worker([path, "--run.name", "plain"], {"RATCHET_TRAIN__MAX_STEPS": "5"})
    assert (config.train.epochs, config.train.max_steps, config.run.name) == (2, 5, "plain")
    with pytest.raises(ConfigError, match="unexpected argument 'more'"):
        load_for_worker([path, "more"], {})


def test_the_environment_name_of_a_setting_sets_it() -> None:
    assert environment_name("train.clip_norm") == "RATCHET_TRAIN__CLIP_NORM"
    clip = load("digits", environ={environment_name("train.clip_norm"): "0.5"}).config.train.clip_norm
    assert math.isclose(clip, 0.5)
