import pytest

from distbelief.graph.capture import capture
from distbelief.graph.operator import operator_of
from tests.distbelief.graph.zoo.catalogue import ZOO
from tests.distbelief.graph.zoo.comparison import assert_same
from tests.elsewhere import answers


pytestmark = pytest.mark.untraced


@pytest.mark.parametrize("name", ZOO)
def test_a_captured_model_computes_what_the_model_computes_whole_and_cut(name: str) -> None:
    case = ZOO[name]
    model = case.model()
    graph = capture(model, case.specs)
    assert graph.n_parameters == sum(p.numel() for p in model.parameters())
    for training, seed in [(True, None), (False, None), (True, 1), (False, 2)]:
        assert_same(graph, model, case, training=training, seed=seed)
    # Layers are kept whole with a reason, and only where they must.
    whole = {layer.name: layer.whole for layer in graph.layers if layer.whole}
    expected = case.whole or {}
    assert whole.keys() == expected.keys()
    for layer, reason in expected.items():
        assert reason in whole[layer]
        assert graph[layer].kind in {"whole", "call"}
        assert operator_of(graph[layer]).work(graph[layer], graph[layer].region).forward > 0


@pytest.mark.parametrize("name", [n for n, case in ZOO.items() if case.dropping])
def test_dropout_is_a_layer_that_is_idle_outside_of_training(name: str) -> None:
    case = ZOO[name]
    model = case.model(dropping=True)
    graph = capture(model, case.specs)
    drops = [
        layer for layer in graph.layers if layer.kind == "dropout" or layer.options.get("dropout")
    ]
    assert len(drops) == (8 if name == "encoder" else 2)
    assert_same(graph, model, case, training=False)
    assert graph.fingerprint == capture(model.eval(), case.specs).fingerprint


NAMES = ("mobilenet", "encoder, causal, norm first", "vision transformer")


def fingerprints() -> list[str]:
    return [capture(ZOO[name].model(), ZOO[name].specs).fingerprint for name in NAMES]


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_every_process_gets_the_same_fingerprints() -> None:
    own = fingerprints()
    assert answers("tests.distbelief.graph.test_zoo", "t.fingerprints()") == own
    assert len(set(own)) == len(NAMES)
