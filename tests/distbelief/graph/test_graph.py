import pytest

from distbelief.graph.graph import Builder, GraphError, Layer, LayerGraph, TensorUse, below


def relu(builder: Builder, name: str, source: Layer) -> Layer:
    return builder.add(name, "call", [source], source.shape, options={"along": ()})


def test_names_are_made_unique_and_shapes_are_those_of_the_inputs() -> None:
    builder = Builder()
    x = builder.input("x", (3, 4))
    names = [relu(builder, "relu", x).name for _ in range(3)]
    assert names == ["relu", "relu.2", "relu.3"]
    assert builder["relu.3"].input_shapes == ((3, 4),)
    with pytest.raises(GraphError, match=r"two layers have the name 'relu.2'"):
        builder.add_layer(builder["relu.2"])


def test_what_no_output_depends_on_is_left_out_but_inputs_and_effects() -> None:
    builder = Builder()
    x, _ = builder.input("x", (4,)), builder.input("y", (4,))
    kept, _ = relu(builder, "kept", x), relu(builder, "unused", x)
    counted = relu(builder, "counted", x)
    builder.add("average", "running_average", [counted], (4,))
    graph = builder.finish([kept.name])
    names = [layer.name for layer in graph.layers]
    assert names == ["x", "y", "kept", "counted", "average"]
    assert graph.outputs == ("kept",)


def test_a_part_of_a_graph_is_all_that_its_outputs_depend_on() -> None:
    builder = Builder()
    x, y = builder.input("x", (4,)), builder.input("y", (4,))
    both = builder.add("both", "call", [x, y], (4,), options={"along": ()})
    ends = [relu(builder, "one", x), relu(builder, "other", both)]
    graph = builder.finish([end.name for end in ends])
    assert [layer.name for layer in graph.only(["one"]).layers] == ["x", "one"]
    assert graph.only(["other"]).by_name.keys() == {"x", "y", "both", "other"}


def test_a_tensor_with_two_names_is_known_by_one() -> None:
    builder = Builder(aliases={"head.weight": "words.weight"})
    use = TensorUse(name="head.weight", shape=(2, 3))
    builder.add("p", "parameter", [], (2, 3), tensors={"value": use})
    assert builder["p"].tensors["value"].name == "words.weight"


def test_a_graph_can_be_built_on() -> None:
    x = Layer(name="x", kind="input", shape=(4,))
    builder = Builder.of(LayerGraph((x,), ("x",)))
    assert builder.finish([relu(builder, "y", x).name])["y"].inputs == ("x",)


def test_paths_of_the_root_are_those_of_its_parts() -> None:
    assert [below("", "weight"), below("a.b", "weight")] == ["weight", "a.b.weight"]
