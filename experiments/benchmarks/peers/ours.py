"""`DownpourSGD` loops against a `ParameterServer` of one shard."""

import distbelief
from experiments.benchmarks.peers.course import Course, Entrant, run_together


def work(path: str, worker: int, address: str) -> None:
    course = Course.read(path)
    entrant = Entrant(course, worker)
    optimizer = distbelief.DownpourSGD(
        entrant.net.parameters(),
        server=address,
        n_fetch=course.every,
        n_push=course.every,
        learning_rate=course.learning_rate,
    )
    entrant.train(lambda: optimizer.step(samples=course.batch_size))
    optimizer.close()


def main(path: str) -> None:
    course = Course.read(path)
    make = distbelief.Adagrad if course.rule == "adagrad" else distbelief.SGD
    rule = make(learning_rate=course.learning_rate)
    with distbelief.ParameterServer(course.net().parameters(), rule=rule) as server:
        workers = [(path, k, server.address) for k in range(course.n_workers)]
        run_together(work, workers)
