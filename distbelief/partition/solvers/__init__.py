"""The choice of one candidate per node, in numbers only: problems and their solvers."""
