"""The planner: costs, candidates and solvers that split a layer graph over machines."""
