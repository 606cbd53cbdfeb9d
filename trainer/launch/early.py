"""The first fraction of a second of a pod: plan, private folder, agent.

The agent needs seconds to import torch, so it is started before this process loads anything that it
does not need for that: no logs, no metrics, no store.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.checkpoint.wire import UPLOADER_ENV
from trainer.config import Config, ConfigError
from trainer.config.load import RESOLVED_ENV, to_json
from trainer.launch.exits import GO_ENV, PARENT_ENV, REPORTS_ENV
from trainer.launch.plan import LaunchPlan, make_plan
from trainer.launch.resources import Resources, find_resources
from trainer.telemetry.channel import CHANNEL_ENV, private_folder


@dataclass(frozen=True)
class Commands:
    """The agent, as argument lists; torchrun's own options go between `agent` and `worker`."""

    agent: Sequence[str] = (sys.executable, "-m", "trainer.elastic")
    worker: Sequence[str] = ("-m", "trainer.ddp.worker")


@dataclass(frozen=True)
class Early:
    """What there is when the agent runs."""

    plan: LaunchPlan
    resources: Resources
    folder: Path
    """Of this run alone; its name is in the environment of every process of the run."""
    agent: subprocess.Popen[bytes]
    """Waits for a line on its standard input. Its output is a pipe if `on_terminal`."""
    on_terminal: bool
    environ: Mapping[str, str]
    """This process's own, as it was read."""

    @property
    def channel(self) -> Path:
        """Socket to which ranks send metrics."""
        return self.folder / "channel"

    @property
    def uploader(self) -> Path:
        """Socket on which the uploader of this pod listens."""
        return self.folder / "uploader"

    @property
    def reports(self) -> Path:
        """Folder into which ranks write why they end."""
        return self.folder / "reports"


@contextlib.contextmanager
def started(config: Config, *, commands: Commands | None = None,
            environ: Mapping[str, str] | None = None) -> Iterator[Early]:
    """Make the plan and start the agent. Whoever enters this must also end the agent.

    Args:
        config: the settings.
        commands: another agent than the real one, for tests.
        environ: None: this process's own.

    Raises:
        ConfigError: for mistakes in the environment; nothing was started then.
    """
    environ = os.environ if environ is None else environ
    commands = commands or Commands()
    resources = find_resources(environ=environ)
    plan = make_plan(config, resources, environ)
    on_terminal = config.log.format != "json" and sys.stdout.isatty()
    with contextlib.ExitStack() as stack:
        if on_terminal:  # the ranks write into a pipe and would choose JSON
            config = dataclasses.replace(config, log=dataclasses.replace(config.log, format="console"))
        try:
            folder = stack.enter_context(private_folder())
            (folder / "reports").mkdir()
            (folder / "config.json").write_text(to_json(config))
        except OSError as error:
            raise ConfigError(str(error)) from None
        agent = subprocess.Popen(
            [*commands.agent, *plan.torchrun_arguments, *commands.worker], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if on_terminal else None, stderr=subprocess.STDOUT if on_terminal else None,
            start_new_session=True, env={
                **plan.child_environment(environ),
                "PYTHONUNBUFFERED": "1",
                GO_ENV: "1",
                PARENT_ENV: str(os.getpid()),
                RESOLVED_ENV: str(folder / "config.json"),
                CHANNEL_ENV: str(folder / "channel"),
                REPORTS_ENV: str(folder / "reports"),
                UPLOADER_ENV: str(folder / "uploader"),
                **({"FORCE_COLOR": "1"} if on_terminal else {}),
            })
        yield Early(plan, resources, folder, agent, on_terminal, environ)
