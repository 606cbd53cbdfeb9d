"""The `ratchet` command: a table of small commands, each of which imports only what it needs."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainer.config import ConfigError, Resolved, dump_toml, load
from trainer.config.load import split_arguments
from trainer.store import StoreError

_ARGUMENTS = """\
  CONFIG                  a TOML file, or the name of a built-in workload
                          (default: $RATCHET_CONFIG, /etc/ratchet/config.toml, digits)
  --section.field VALUE   any setting; `ratchet config` prints them all"""


@dataclass(frozen=True)
class Command:
    """One command: `main(words)` gets the words after its name and returns the exit code."""

    main: Callable[[list[str]], int]
    summary: str
    help: str


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code. Mistakes of the user are one line and code 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _main(words)
    except ConfigError as error:
        print(f"ratchet: error: {error}", file=sys.stderr)
        return 2
    except StoreError as error:
        from trainer.launch.exits import Exit

        print(f"ratchet: error: {error}", file=sys.stderr)
        return Exit.STORE_UNAVAILABLE
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `ratchet config | head`; a run goes on without its reader (telemetry.logs)
        sys.stderr.close()
        return 0


def _main(words: list[str]) -> int:
    name = words[0] if words else "--help"
    if name in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if name == "--version":
        import trainer

        print(f"ratchet {trainer.__version__}")
        return 0
    command = COMMANDS.get(name)
    if command is None:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        raise ConfigError(f"unknown command {name!r}"
                          + (f"; did you mean {close[0]}?" if close else f" (there are {', '.join(COMMANDS)})"))
    if any(word in ("-h", "--help") for word in words[1:]):
        print(command.help)
        return 0
    return command.main(words[1:])


def _overview() -> str:
    lines = [f"  {name:<8}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(["usage: ratchet COMMAND [CONFIG] [--section.field VALUE ...]", "",
                      "Train a PyTorch model over any number of ranks, and never lose a committed step.", "",
                      *lines, "", "`ratchet COMMAND --help` says more. `ratchet --version` prints the version."])


def _run(words: list[str]) -> int:
    resolved = _load(words)
    from trainer.launch.early import started

    with started(resolved.config) as early:
        from trainer.launch.supervisor import supervise  # takes half a second, in which the agent starts

        return supervise(resolved, early, words)


def _plan(words: list[str]) -> int:
    as_json = _take(words, "--json")
    config = _load(words).config
    from trainer.launch.plan import make_plan
    from trainer.launch.present import plan_as_json, plan_as_text
    from trainer.launch.resources import find_resources

    resources = find_resources()
    plan = make_plan(config, resources)
    print(plan_as_json(plan, resources) if as_json else plan_as_text(plan, resources))
    return 0


def _config(words: list[str]) -> int:
    if _take(words, "--reference"):
        from trainer.config.reference import reference

        print(reference())
        return 0
    print(dump_toml(_load(words).config), end="")
    return 0


def _doctor(words: list[str]) -> int:
    as_json = _take(words, "--json")
    config = _load(words).config
    from trainer.ddp.doctor import doctor

    return doctor(config, as_json=as_json)


def _audit(words: list[str]) -> int:
    json_wanted = _take(words, "--json")
    config = _load(words).config
    from trainer.audit import as_json, as_text, audit_run

    result = audit_run(config)
    print(as_json(result) if json_wanted else as_text(result))
    return 0 if result.exact else 1


def _checkpoints(words: list[str]) -> int:
    from trainer.checkpoint.manifest import BadManifest
    from trainer.launch.exits import Exit

    try:
        if words[:1] == ["import"]:
            from trainer.ddp.importing import main  # it builds the user's model

            return main(words, _load)
        from trainer.checkpoint.tools import main as tools  # its own words first, the rest are the settings

        return tools(words, _load)
    except BadManifest as error:
        print(f"ratchet: error: the checkpoint does not verify: {error}", file=sys.stderr)
        return Exit.UNREADABLE


def _history(words: list[str]) -> int:
    import json

    from trainer.store import open_store
    from trainer.trackers.history import read_history

    config = _load(words).config
    rows = read_history(open_store(config.store), config.run.name)
    if not rows:
        raise ConfigError(f"run {config.run.name!r} has no history at {config.store.url}:"
                          " it is written with jsonl among track.to")
    for row in rows:
        print(json.dumps(row))
    return 0


def _load(words: Sequence[str]) -> Resolved:
    positional, overrides = split_arguments(words)
    if len(positional) > 1:
        raise ConfigError(f"unexpected argument {positional[1]!r}: at most one CONFIG is taken")
    return load(positional[0] if positional else None, overrides)


def _take(words: list[str], flag: str) -> bool:
    """Remove a flag that takes no value; tell whether it was there."""
    found = flag in words
    while flag in words:
        words.remove(flag)
    return found


COMMANDS = {
    "run": Command(_run, "train to the end, or go on where the run stopped", f"""\
usage: ratchet run [CONFIG] [--section.field VALUE ...]

Train to the end. The same run.name and store.url go on from the newest checkpoint; a run that is
complete says so and ends at once. In a pod the operator's variables decide how many ranks meet;
elsewhere they run on this machine.

{_ARGUMENTS}

examples:
  ratchet run                                     the built-in digits workload
  ratchet run my.toml --train.epochs 20
  ratchet run digits --launch.nproc_per_node 4 --store.url s3://bucket/experiments

The exit code tells the operator what to do: 0 complete, 1 to 127 permanent, 128 and above try again."""),
    "plan": Command(_plan, "print what `run` would start here, and why", f"""\
usage: ratchet plan [--json] [CONFIG] [--section.field VALUE ...]

Print how `ratchet run` reads this environment: how many pods and ranks, the options of torchrun, the
variables it sets. Starts nothing and asks no store.

  --json                  for programs
{_ARGUMENTS}

examples:
  ratchet plan
  PET_NNODES=1:3 PET_RDZV_BACKEND=c10d PET_RDZV_ENDPOINT=job-worker-0:23456 ratchet plan"""),
    "config": Command(_config, "print the resolved settings as TOML", f"""\
usage: ratchet config [--reference] [CONFIG] [--section.field VALUE ...]

Print every setting as it would be taken: defaults, then the file, then RATCHET_SECTION__FIELD of the
environment, then the command line. The output is itself a file that `ratchet run` reads.

  --reference             print the table of all settings with their meaning
{_ARGUMENTS}

examples:
  ratchet config vowels > my.toml
  RATCHET_TRAIN__EPOCHS=3 ratchet config digits --optimizer.lr 0.01"""),
    "doctor": Command(_doctor, "check that this machine or image can train", f"""\
usage: ratchet doctor [--json] [CONFIG] [--section.field VALUE ...]

Try what a run needs: the imports, a collective over two processes, the store, the user id, the
folders that are written to, the memory. The exit code is 0 if all of it works, else 1.

  --json                  for programs
{_ARGUMENTS}

examples:
  ratchet doctor
  docker run --rm IMAGE doctor --store.url s3://bucket/experiments"""),
    "checkpoints": Command(_checkpoints, "list, verify, compare, export, import or prune checkpoints", f"""\
usage: ratchet checkpoints ls [--json] [CONFIG] [--section.field VALUE ...]
       ratchet checkpoints show [--step N] [--json] ...
       ratchet checkpoints verify [--step N] [--json] ...
       ratchet checkpoints diff A B [--json] ...
       ratchet checkpoints export FILE [--step N] [--prefix TEXT] [--average] [--json] ...
       ratchet checkpoints import FILE [--prefix TEXT] [--json] ...
       ratchet checkpoints prune --keep-last N [--keep-every STEPS] [--keep-best N] [--keep-spaced]
                                 [--yes] [--json] ...

Look at what the store holds of a run. `show` lists the tensors of one checkpoint (the newest, unless
--step is given); `verify` reads every byte and ends with code 1 if any has changed; `diff` tells
which tensors, generators and settings two checkpoints (STEP, or RUN/STEP) do not have alike, and by
how much, and ends with code 1 if there are any; `prune` only tells what it would delete unless
--yes is given, and never deletes the two newest, nor the one that the newest attempt began from; it
takes leftovers of dead attempts along. `checkpoint.keep_last` and its like do the same in the run.

`export` writes the model as FILE: .safetensors, or .pt, a plain state_dict. `import` begins the run,
which must have no checkpoint yet, from such a file (or a Lightning .ckpt, or the index of Hugging
Face's .safetensors); the settings must build the model that the weights are of.

  --prefix TEXT           export: put before every name (`module.` for DistributedDataParallel);
                          import: take only names that begin so, without it (a prefix that all
                          names share is found by itself)
  --average               export the moving average of the weights (train.ema_decay)
  --json                  for programs
{_ARGUMENTS}

examples:
  ratchet checkpoints ls digits
  ratchet checkpoints verify my.toml --step 1200
  ratchet checkpoints export model.safetensors my.toml
  ratchet checkpoints import pretrained.pt my.toml --run.name tuned
  ratchet checkpoints prune my.toml --keep-last 3 --keep-every 1000 --yes"""),
    "history": Command(_history, "print what a run has measured, as JSON lines", f"""\
usage: ratchet history [CONFIG] [--section.field VALUE ...]

Print the losses and measures of a run in the order of its steps, one JSON object a line: each step
once, however often the run was killed. Needs `jsonl` among `track.to`.

{_ARGUMENTS}

examples:
  ratchet run digits --track.to console,jsonl && ratchet history digits"""),
    "audit": Command(_audit, "prove from the store that no sample was lost or seen twice", f"""\
usage: ratchet audit [--json] [CONFIG] [--section.field VALUE ...]

Follow the run's checkpoints from the newest back to the start, through every restart, and count how
often each sample was trained on. Needs `data.ledger = true` from the run's first step on.
The exit code is 0 if every sample was seen exactly once, else 1.

  --json                  for programs
{_ARGUMENTS}

examples:
  ratchet run digits --data.ledger true && ratchet audit digits"""),
}
"""Every command by name, in the order of the overview."""
