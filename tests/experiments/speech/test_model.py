import pytest
import torch
from torch import nn

from experiments.speech.model import acoustic_net, paper_net


def test_the_paper_net_has_the_papers_parameters() -> None:
    with torch.device("meta"):
        net = paper_net()
    assert sum(tensor.numel() for tensor in net.parameters()) == 41_777_152


def test_a_net_is_linear_layers_with_activations_between() -> None:
    net = acoustic_net([5, 6], 7, activation="relu", inputs=4)
    kinds = [type(layer) for layer in net]
    assert kinds == [nn.Linear, nn.ReLU, nn.Linear, nn.ReLU, nn.Linear]
    assert net(torch.zeros(3, 4)).shape == (3, 7)
    with pytest.raises(ValueError, match="'tanh' must be 'sigmoid' or 'relu'"):
        acoustic_net([5], 6, activation="tanh")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"not \[440, 0, 6\]"):
        acoustic_net([0], 6)


@pytest.mark.parametrize("activation", ["sigmoid", "relu"])
def test_signal_and_gradient_live_through_four_layers(activation: str) -> None:
    torch.manual_seed(0)
    net = acoustic_net([256] * 4, 32, activation=activation)  # type: ignore[arg-type]
    scores = net(torch.randn(512, 440))
    assert 0.1 < scores.std(dim=0).mean().item() < 10.0
    loss = nn.functional.cross_entropy(scores, torch.arange(512) % 32)
    loss.backward()
    first, last = net[0].weight.grad, net[-1].weight.grad
    assert isinstance(first, torch.Tensor)
    assert isinstance(last, torch.Tensor)
    assert (first.norm() / last.norm()).item() > 0.02
