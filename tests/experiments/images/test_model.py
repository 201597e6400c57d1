import pytest
import torch
from torch.nn import functional

from distbelief.graph.append_loss import append_loss
from distbelief.graph.capture import InputSpec, capture
from distbelief.graph.graph import LayerGraph
from experiments.images.model import MAPS, Size, image_net, paper_net


def captured(size: Size) -> LayerGraph:
    with torch.device("meta"):
        net = paper_net(size)
    graph = capture(net, [InputSpec(shape=(3, 100, 100))])
    return append_loss(graph, "one_vs_all")


@pytest.mark.parametrize(
    ("size", "n_parameters", "nominal"),
    [("80M", 80_307_950, 80e6), ("330M", 329_388_454, 330e6), ("1.7B", 1_728_571_440, 1.7e9)],
)
def test_the_nets_have_the_papers_parameters(size: Size, n_parameters: int, nominal: float) -> None:
    with torch.device("meta"):
        net = paper_net(size)
    assert sum(tensor.numel() for tensor in net.parameters()) == n_parameters
    assert abs(n_parameters / nominal - 1) < 0.03
    assert all(tensor.is_meta for tensor in net.parameters())


def test_the_documented_layers_have_the_documented_parameters() -> None:
    counts = {
        "filter1": 89_732_916,
        "filter2": 788_705_424,
        "filter3": 547_712_100,
        "categories": 302_421_000,
    }
    with torch.device("meta"):
        net = paper_net()
    found = {
        name: sum(tensor.numel() for tensor in layer.parameters())
        for name, layer in net.named_children()
    }
    assert {name: n for name, n in found.items() if n} == counts


@pytest.mark.parametrize("size", list(MAPS))
def test_every_layer_is_captured_and_none_is_whole(size: Size) -> None:
    graph = captured(size)
    stages = ["locally_connected", "pool", "local_contrast"] * 3
    kinds = ["input", *stages, "reshape", "linear", "input", "place_loss"]
    assert [layer.kind for layer in graph.layers] == kinds
    assert not any(layer.whole for layer in graph.layers)
    with torch.device("meta"):
        net = paper_net(size)
    assert graph.n_parameters == sum(t.numel() for t in net.parameters())


def test_the_largest_net_has_the_documented_shapes() -> None:
    shapes = [layer.shape for layer in captured("1.7B").layers]
    places = [100, 91, 87, 87, 78, 74, 74, 65, 20, 20]
    maps = [3] + [36] * 9
    assert shapes[:10] == [(m, n, n) for m, n in zip(maps, places, strict=True)]
    assert shapes[10:] == [(14_400,), (21_000,), (), ()]


def test_signal_and_gradient_live_through_three_stages() -> None:
    torch.manual_seed(0)
    net = image_net((2, 3, 2), categories=5, size=44)
    images = torch.rand(4, 3, 44, 44)
    scores = net(images)
    assert scores.shape == (4, 5)
    targets = functional.one_hot(torch.arange(4), 5).float()
    functional.binary_cross_entropy_with_logits(scores, targets).backward()
    for name, tensor in net.named_parameters():
        assert tensor.grad is not None, name
        assert tensor.grad.isfinite().all(), name
        assert tensor.grad.norm() > 1e-5, name
    assert scores.std(dim=0).mean() > 1e-3


def test_an_image_too_small_is_told_the_least_size() -> None:
    with pytest.raises(ValueError, match=r"size = 40: .* at least 41 rows"):
        image_net((1, 1, 1), size=40)
    assert image_net((1, 1, 1), categories=2, size=41)(torch.rand(1, 3, 41, 41)).shape


def test_impossible_nets_are_refused() -> None:
    for maps in ((0, 1, 1), (1, 1), (1, 1, 1, 1)):
        with pytest.raises(ValueError, match="three numbers of maps"):
            image_net(maps)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="categories = 0"):
        image_net((1, 1, 1), categories=0)
    with pytest.raises(ValueError, match=r"'2B' must be one of 80M, 330M, 1\.7B"):
        paper_net("2B")  # type: ignore[arg-type]
