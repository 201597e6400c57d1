import pytest
import torch

from experiments.benchmarks.plans.nets import NETS


@pytest.mark.parametrize(
    ("name", "n_parameters"), [("speech", 41_777_152), ("images 80M", 80_307_950)]
)
def test_nets_have_as_many_parameters_as_others_say(name: str, n_parameters: int) -> None:
    with torch.device("meta"):
        net = NETS[name].make()
    assert sum(parameter.numel() for parameter in net.parameters()) == n_parameters
