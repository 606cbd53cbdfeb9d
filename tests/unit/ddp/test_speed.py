"""What torch.compile needs is told before a step is taken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trainer.config import Config, ConfigError
from trainer.config.tree import Train
from trainer.ddp.speed import prepare


@pytest.mark.parametrize(("variable", "value"), [("PATH", ""), ("CXX", "no-such-compiler")])
def test_a_missing_compiler_is_one_line(variable: str, value: str, tmp_path: Path,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv(variable, value or str(tmp_path))
    line = r"train.compile = .static. needs a C\+\+ compiler \(g\+\+, or what CXX names\), and there is none: install"
    with pytest.raises(ConfigError, match=line):
        prepare(torch.nn.Linear(1, 1), Config(train=Train(compile="static")))
