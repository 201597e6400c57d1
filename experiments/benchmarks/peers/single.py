"""Plain training in a single process: what the target loss is picked from."""

import torch

from experiments.benchmarks.peers.course import Course, Entrant


def main(path: str) -> None:
    course = Course.read(path)
    entrant = Entrant(course, 0)
    parameters = list(entrant.net.parameters())
    kind = torch.optim.Adagrad if course.rule == "adagrad" else torch.optim.SGD
    optimizer = kind(parameters, lr=course.learning_rate)
    entrant.train(optimizer.step)
