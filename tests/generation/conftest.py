import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def no_grad():
    with torch.no_grad():
        yield
