"""Lowering rule for recurrent layers: one layer per time step, unless there are many."""

from typing import Final

from distbelief.graph.graph import GraphError, Layer, Option
from distbelief.graph.lowering.layers import refuse_integers
from distbelief.graph.lowering.operation import Operation, lowers, plain_name
from distbelief.graph.lowering.values import Held, Made, NotSplitError, Results, Value
from distbelief.graph.lowering.views import joined, sliced
from distbelief.graph.ops.recurrent import N_GATES, by_gate


# 3 layers of both directions with so many steps are captured and planned in 15 s.
N_STEPS_MAX: Final = 128

# With fewer, a step of 64 samples on one rank takes torch less time than its half on two ranks and
# the messages between them: 0.4 ms with 128 units. torch has a faster kernel for an LSTM alone.
N_UNITS_MIN: Final = {"lstm": 512, "gru": 256, "rnn_tanh": 256, "rnn_relu": 256}


@lowers(*(f"{cell}.input" for cell in N_GATES))
def recurrent(op: Operation) -> object:
    value, n_directions = op.value("input"), 1 + op["bidirectional"]
    refuse_integers(op, value)
    if value.batch == op["batch_first"]:
        how = "transpose its input" if op["batch_first"] else "give it batch_first=True"
        raise GraphError(f"{op.name} mixes samples, because they are its steps: {how}")
    Value(value.layer, batch=1 - op["batch_first"]).refuse_others(value)
    if value.layer.shape[0] > N_STEPS_MAX:
        raise NotSplitError(f"it has more than {N_STEPS_MAX} steps")
    params, n_params = op["params"], 4 if op["has_biases"] else 2
    if len(params) != n_params * op["num_layers"] * n_directions:
        raise NotSplitError("it projects its states")
    n_units_min = N_UNITS_MIN[plain_name(op.target).partition(".")[0]]
    if op.result[0].shape[2] < n_units_min * n_directions:
        raise NotSplitError(f"it has fewer than {n_units_min} units")
    given = op["hx"] if isinstance(op["hx"], list) else [op["hx"]]
    before = [] if all(isinstance(x, Made) and x.number == 0 for x in given) else given
    values = [op.context.as_value(x) for x in before]
    Value(value.layer, batch=1).refuse_others(*values)
    x, ends = value.layer, list[Layer]()
    for number in range(op["num_layers"]):
        if number and op["train"] and op["dropout"]:
            options: dict[str, Option] = {"probability": op["dropout"], "n_shared": 0, "batch": 1}
            x = op.builder.add(f"{op.name}.dropout", "dropout", [x], x.shape, options=options)
        found = []
        for back in range(n_directions):
            own = params[len(ends) * n_params :][:n_params]
            state = [sliced(op, v, 0, len(ends), len(ends) + 1).layer for v in values]
            name = f"{op.name}.{len(ends)}"
            steps = _steps(op, name, x, own, state, backwards=bool(back))
            ends.append(steps[0 if back else -1])
            shape, rows = (len(steps), steps[0].shape[1]), {"dim": 0, "each": 1}
            found.append(op.builder.add(f"{name}.states", "cat", steps, shape, options=rows))
        x = joined(op, found, 1) if len(found) > 1 else found[0]

    def make(index: int) -> Value:
        if not index:
            return value.to(x)
        rows = [sliced(op, Value(end), 0, index - 1, index).layer for end in ends]
        return Value(joined(op, rows, 0) if len(rows) > 1 else rows[0], batch=1)

    return Results(make)


def _steps(
    op: Operation, name: str, x: Layer, params: list[object], state: list[Layer], *, backwards: bool
) -> list[Layer]:
    # The states of one layer in one direction, in the order of its inputs.
    tensors = [param.use for param in params if isinstance(param, Held) and not param.turned]
    if len(tensors) != len(params):
        raise NotSplitError("its weights are computed")
    cell, add = plain_name(op.target).partition(".")[0], op.builder.add
    n_units, n_gates, n_rows = tensors[1].shape[1], N_GATES[cell], 1 + (cell == "lstm")
    of_inputs, of_states = (by_gate(tensors[i::2], n_gates) for i in (0, 1))
    n_steps, shape = x.shape[0], (n_rows, n_units)
    gates = add(f"{name}.gates", "gates", [x], (n_steps, n_gates, n_units), tensors=of_inputs)
    found: list[Layer] = []
    for step in reversed(range(n_steps)) if backwards else range(n_steps):
        which: dict[str, Option] = {"cell": cell, "step": step}
        read, title = [gates, *state], f"{name}.step{step}"
        layer = add(title, "recurrent", read, shape, options=which, tensors=of_states)
        found.append(layer)
        state = [layer] * n_rows
    return found[::-1] if backwards else found
