"""Which layers have a backward pass."""

from distbelief.graph.graph import INPUT, Layer, LayerGraph
from distbelief.graph.ops.norms import running_averages
from distbelief.program.compiler import with_gradient
from tests.distbelief.program.plans import captured, chain


def test_all_layers_that_train_have_a_gradient_and_no_input() -> None:
    assert with_gradient(chain([3, 2, 4])) == {"fc0", "fc1"}


def test_a_layer_that_no_output_depends_on_has_none() -> None:
    graph = chain([3, 2, 4])
    assert with_gradient(LayerGraph(graph.layers, ("fc0",))) == {"fc0"}


def test_a_layer_before_all_that_trains_has_none() -> None:
    x = Layer(name="x", kind=INPUT, shape=(3,))
    relu = Layer(name="relu", kind="relu", inputs=("x",), input_shapes=((3,),), shape=(3,))
    assert with_gradient(LayerGraph((x, relu), ("relu",))) == frozenset()


def test_running_averages_have_none() -> None:
    _, graph = captured("resnet18")
    averages = set(running_averages(graph).values())
    assert averages
    assert averages.isdisjoint(with_gradient(graph))


def test_maxima_of_a_softmax_have_none_but_its_sums_do() -> None:
    _, graph = captured("mobilenet")
    found = with_gradient(graph)
    assert "loss" in found
    assert "loss.maximum" in graph.by_name
    assert "loss.maximum" not in found
    assert "targets" not in found
