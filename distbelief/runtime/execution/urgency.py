"""Which gradients others wait for: those of inputs before those of tensors.

    machine 0   (nothing to do)          x3 x2 x1 ...       x: gradient of an input
    machine 1   x8 x7 x6 x5 x4 --------^  w8 w7 w6 w5 w4    w: of a tensor

A message that goes back to another machine is worked out along a path of gradients of
inputs. What lies on such a path is urgent, however long it is; but where a gradient of
a tensor travels too, it does not wait for the end of the path.
"""

from distbelief.program.compilation import Compiled


def urgent(compiled: Compiled) -> frozenset[str]:
    """Return the layers of which gradients of inputs come first.

    The same for all machines, those that send none of them included.
    """
    sent, reduced = set[str](), set[str]()
    for way in compiled.traffic:
        if way.kind in {"gradient", "partial_gradient"}:
            sent.add(way.name)
        elif way.kind == "parameter_gradient":
            reduced.add(way.name)
    path, found = set[str](), set[str]()
    for layer in compiled.graph.layers:  # inputs before those that read them
        is_last = not sent.isdisjoint(layer.inputs)
        if not is_last and path.isdisjoint(layer.inputs):
            continue
        path.add(layer.name)
        if is_last or reduced.isdisjoint(use.name for use in layer.tensors.values()):
            found.add(layer.name)
    return frozenset(found)
