"""A rank that compiles nothing does not load torch's compiler."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from trainer.ddp.lean import leave_compiler_alone

leave_compiler_alone()
store = torch._C._distributed_c10d.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
model = DistributedDataParallel(torch.nn.Linear(3, 1))
optimizer = torch.optim.AdamW([{"params": model.parameters()}], lr=0.1)
model(torch.ones(2, 3)).sum().backward()
optimizer.step()
optimizer.zero_grad()
optimizer.load_state_dict(optimizer.state_dict())
assert "torch._dynamo.eval_frame" not in sys.modules, "the compiler was imported"
compiled = torch.compile(torch.nn.Linear(3, 1), backend="eager")
assert compiled(torch.ones(2, 3)).shape == (2, 1), "and it is there for who wants it"
assert "torch._dynamo.eval_frame" in sys.modules
import torch._dynamo.config
assert torch._dynamo.config.suppress_errors is False
optimizer.step()
model(torch.ones(2, 3))
dist.destroy_process_group()
"""


IMPORTS = """
from trainer.ddp.lean import leave_compiler_alone
leave_compiler_alone()
{}
"""


@pytest.mark.parametrize("line", [
    "import torch._dynamo.config; torch._dynamo.config.verbose",
    "from torch._dynamo.utils import counters",
    "import torch; torch._dynamo.utils.counters; torch._dynamo.reset()",
])
def test_whatever_else_is_asked_of_it_loads_the_real_one(line):
    ended = subprocess.run([sys.executable, "-c", IMPORTS.format(line)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("line", [
    "import torch._dynamo.config as part",
    "from torch._dynamo.config import __spec__; import torch._dynamo.config as part",
    "import importlib; part = importlib.import_module('torch._dynamo.config')",
    "from torch._dynamo import config as part",
    "import torch; part = torch._dynamo.config",
])
def test_a_part_of_it_is_the_one_that_the_compiler_itself_uses_however_it_is_imported(line):
    look = ("import sys; from torch._dynamo import convert_frame; assert part is convert_frame.config;"
            "assert part is sys.modules['torch._dynamo.config']; assert part.__spec__.origin.endswith('config.py')")
    ended = subprocess.run([sys.executable, "-c", IMPORTS.format(f"{line}\n{look}")], capture_output=True, text=True,
                           check=False)
    assert ended.returncode == 0, ended.stderr


def test_a_training_step_does_not_import_the_compiler_and_one_can_still_compile():
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
