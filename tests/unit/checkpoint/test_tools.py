"""`ratchet checkpoints`, and what may be deleted."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.unit.checkpoint.conftest import Links
from tests.unit.checkpoint.test_save_restore import IDENTITY, training
from trainer.checkpoint.names import Place
from trainer.checkpoint.peers import Peers
from trainer.checkpoint.retention import delete
from trainer.checkpoint.save import Checkpointer
from trainer.checkpoint.survey import survey
from trainer.checkpoint.tools import damages, main
from trainer.config import Config, ConfigError, Resolved
from trainer.config.tree import Run, Store
from trainer.store import ObjectStore, StoreUnavailable

Tool = Callable[..., Any]


@pytest.fixture
def tool(store: ObjectStore, store_settings: Store, alone: Peers, link_to: Links,
         capsys: pytest.CaptureFixture[str]) -> Tool:
    """Run a command on a run with the checkpoints 1 to 4; returns the code and its JSON."""
    saver = Checkpointer(store=store, link=link_to(store), peers=alone, state=training(), run="r",
                         attempt="000001-aaaaaaaa", parent="", identity=IDENTITY, config={}, object_bytes=100,
                         ledger=False)
    for step in range(1, 5):
        assert not saver.save(step, step * 8).problem

    def load(words: Sequence[str]) -> Resolved:
        assert not words
        return Resolved(Config(run=Run(name="r"), store=store_settings), {}, "")

    def run(*words: str) -> tuple[int, Any]:
        code = main([*words, "--json"], load)
        return code, json.loads(capsys.readouterr().out)

    return run


def test_every_checkpoint_is_listed_shown_and_verified(tool: Tool) -> None:
    assert [(row["step"], row["samples"], row["world_size"]) for row in tool("ls")[1]] == [
        (4, 32, 1), (3, 24, 1), (2, 16, 1), (1, 8, 1)]
    names = [row["name"] for row in tool("show", "--step", "2")[1]]
    assert names[0] == "model.0.weight"
    assert "buffer.1.running_mean" in names
    assert tool("verify") == (0, [{"step": n, "checkpoint": f"r/step-00000000{n}/000001-aaaaaaaa", "problems": []}
                                  for n in (4, 3, 2, 1)])


def test_a_changed_byte_is_named_by_its_key(tool: Tool, store: ObjectStore) -> None:
    key = Place("r", 3, "000001-aaaaaaaa").slice(0, 1, 1)
    data = store.get(key)
    data[7] ^= 1
    store.put(key, data)
    code, rows = tool("verify", "--step", "3")
    assert code == 1
    assert rows[0]["problems"] == [f"{key}: its bytes have changed (CRC does not match)"]


def test_pruning_needs_a_yes_and_leaves_no_object_behind(tool: Tool, store: ObjectStore) -> None:
    before = dict(store.list("r/"))
    assert [(row["step"], row["deleted"]) for row in tool("prune", "--keep-last", "2")[1]] == [(1, False), (2, False)]
    assert dict(store.list("r/")) == before
    assert [row["step"] for row in tool("prune", "--keep-last", "1", "--keep-every", "2", "--yes")[1]] == [1]
    assert {int(key.split("/")[1][5:]) for key, _ in store.list("r/")} == {2, 3, 4}


def test_mistakes_are_told(tool: Tool) -> None:
    with pytest.raises(ConfigError, match=r"unknown command 'lst'; did you mean ls\?"):
        tool("lst")
    with pytest.raises(ConfigError, match=r"unknown command 'imprt'; did you mean import\?"):
        tool("imprt")
    with pytest.raises(ConfigError, match=r"unknown command 'frob' .there are ls, show, .*, export, import, prune"):
        tool("frob")
    with pytest.raises(ConfigError, match="--keep-last N"):
        tool("prune")
    with pytest.raises(ConfigError, match=r"--keep-best needs --best\.metric NAME"):
        tool("prune", "--keep-last", "2", "--keep-best", "1")
    with pytest.raises(ConfigError, match=r"no checkpoint of step 9 .*there are: 4, 3, 2, 1"):
        tool("show", "--step", "9")


def test_a_deletion_that_breaks_off_leaves_a_whole_checkpoint_or_none(tool: Tool, store: ObjectStore) -> None:
    place = Place("r", 4, "000001-aaaaaaaa")
    keys = [key for key, _ in store.list(f"{place.folder}/")]

    class Breaking:
        left = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def delete(self, key: str) -> None:
            if not self.left:
                raise StoreUnavailable(key)
            self.left -= 1
            store.delete(key)

    for count in range(len(keys)):
        breaking = Breaking()
        breaking.left = count
        if not any(key in keys for key, _ in store.list(f"{place.folder}/")):
            break
        with contextlib.suppress(StoreUnavailable):
            delete(breaking, place)  # type: ignore[arg-type]
        newest = survey(store, "r", mend=True).committed[0]
        assert newest.step == 3 or (newest == place and not damages(store, place)), "gone, or whole again"
    delete(store, place)
    assert [*store.list(f"{place.folder}/")] == []
