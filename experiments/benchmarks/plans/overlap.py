"""Which share of a plan's computing is done while other machines compute as well.

machine 0   [--------]        [----]         machines that share a host share memory
machine 1        [--------------]            and caches: two layers at once take
                 ^^^^^        ^^             longer each than one alone
"""

from distbelief.program.step_cost import StepCost


def overlap(price: StepCost) -> float:
    """Return the share, between 0 and 1, by the plan as it is played through."""
    n_tasks = price.simulated.n_tasks
    begins = [(float(begin), 1) for begin in price.simulated.starts[:n_tasks]]
    ends = [(float(end), -1) for end in price.simulated.ends[:n_tasks]]
    every = shared = last = 0.0
    n_computing = 0
    for time, change in sorted(begins + ends):
        computed = n_computing * (time - last)
        every += computed
        shared += computed if n_computing > 1 else 0.0
        n_computing += change
        last = time
    return shared / every if every else 0.0
