"""One thread for all tests: the models are tiny, and the machine's other core may be busy."""

import sys
from pathlib import Path

import pytest
import torch
import xpress_drafter


sys.path.insert(0, str(Path(__file__).parent))  # for `import rig`

# The repository's root is a package, which pytest imports under its folder's name: no second copy of what is tested.
sys.modules.setdefault(Path(__file__).parents[1].name, xpress_drafter)


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
