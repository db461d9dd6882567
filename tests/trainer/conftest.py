import sys
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).parent))  # for `import training`


@pytest.fixture
def no_grad():
    import torch

    with torch.no_grad():
        yield
