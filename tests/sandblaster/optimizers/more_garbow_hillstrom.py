"""The problems of More, Garbow & Hillstrom: sums of squares, from the formulae.

Testing Unconstrained Optimization Software, 1981; the numbers are those given there.
Gradients are torch's, in float64. `minima` are the values of the known minima, to six
digits as the paper has them where they are not 0; a run may end in any of them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


Doubles = NDArray[np.float64]
Residuals = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Problem:
    name: str
    residuals: Residuals
    x0: Doubles
    minima: tuple[float, ...] = (0.0,)

    def __call__(self, x: Doubles) -> tuple[float, Doubles]:
        point = torch.tensor(x, requires_grad=True)
        value = self.residuals(point).square().sum()
        value.backward()
        assert point.grad is not None
        return value.item(), point.grad.numpy()

    def digits(self, value: float) -> float:
        """The log relative error of a value, to the nearest known minimum."""
        errors = [abs(value - m) / (abs(m) or 1.0) for m in self.minima]
        return -math.log10(max(min(errors), 1e-16)) if math.isfinite(value) else -99.0


def _v(*values: float) -> Doubles:
    return np.array(values, dtype=np.float64)


def _t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _range(first: int, last: int) -> Tensor:
    return torch.arange(first, last + 1, dtype=torch.float64)


def rosenbrock(x: Tensor) -> Tensor:  # 1 and 21
    odd, even = x[0::2], x[1::2]
    return torch.cat([10.0 * (even - odd**2), 1.0 - odd])


def freudenstein_roth(x: Tensor) -> Tensor:  # 2
    a, b = x
    return torch.stack([-13 + a + ((5 - b) * b - 2) * b, -29 + a + ((b + 1) * b - 14) * b])


def powell_badly_scaled(x: Tensor) -> Tensor:  # 3
    return torch.stack([1e4 * x[0] * x[1] - 1, (-x).exp().sum() - 1.0001])


def brown_badly_scaled(x: Tensor) -> Tensor:  # 4
    return torch.stack([x[0] - 1e6, x[1] - 2e-6, x[0] * x[1] - 2])


def beale(x: Tensor) -> Tensor:  # 5
    return _t(1.5, 2.25, 2.625) - x[0] * (1 - x[1] ** _range(1, 3))


def jennrich_sampson(x: Tensor) -> Tensor:  # 6
    i = _range(1, 10)
    return 2 + 2 * i - ((i * x[0]).exp() + (i * x[1]).exp())


def helical_valley(x: Tensor) -> Tensor:  # 7
    theta = torch.atan2(x[1], x[0]) / (2 * math.pi)
    theta = torch.where(theta < -0.25, theta + 1.0, theta)
    radius = torch.hypot(x[0], x[1])
    return torch.stack([10 * (x[2] - 10 * theta), 10 * (radius - 1), x[2]])


def bard(x: Tensor) -> Tensor:  # 8
    y = _t(
        *(0.14, 0.18, 0.22, 0.25, 0.29, 0.32, 0.35, 0.39),
        *(0.37, 0.58, 0.73, 0.96, 1.34, 2.10, 4.39),
    )
    u = _range(1, 15)
    v = 16 - u
    w = torch.minimum(u, v)
    return y - (x[0] + u / (v * x[1] + w * x[2]))


def gaussian(x: Tensor) -> Tensor:  # 9
    half = (0.0009, 0.0044, 0.0175, 0.0540, 0.1295, 0.2420, 0.3521)
    y = _t(*half, 0.3989, *reversed(half))
    t = (8 - _range(1, 15)) / 2
    return x[0] * (-x[1] * (t - x[2]) ** 2 / 2).exp() - y


def meyer(x: Tensor) -> Tensor:  # 10
    y = _t(
        *(34780, 28610, 23650, 19630, 16370, 13720, 11540, 9744),
        *(8261, 7030, 6005, 5147, 4427, 3820, 3307, 2872),
    )
    return x[0] * (x[1] / (45 + 5 * _range(1, 16) + x[2])).exp() - y


def gulf(x: Tensor) -> Tensor:  # 11
    t = _range(1, 99) / 100
    y = 25 + (-50 * t.log()) ** (2 / 3)
    return (-((y - x[1]).abs() ** x[2]) / x[0]).exp() - t


def box(x: Tensor) -> Tensor:  # 12
    t = _range(1, 10) / 10
    return (-t * x[0]).exp() - (-t * x[1]).exp() - x[2] * ((-t).exp() - (-10 * t).exp())


def powell_singular(x: Tensor) -> Tensor:  # 13 and 22
    a, b, c, d = x[0::4], x[1::4], x[2::4], x[3::4]
    return torch.cat(
        [a + 10 * b, math.sqrt(5) * (c - d), (b - 2 * c) ** 2, math.sqrt(10) * (a - d) ** 2]
    )


def wood(x: Tensor) -> Tensor:  # 14
    a, b, c, d = x
    return torch.stack(
        [
            10 * (b - a**2),
            1 - a,
            math.sqrt(90) * (d - c**2),
            1 - c,
            math.sqrt(10) * (b + d - 2),
            (b - d) / math.sqrt(10),
        ]
    )


def kowalik_osborne(x: Tensor) -> Tensor:  # 15
    y = _t(
        *(0.1957, 0.1947, 0.1735, 0.1600, 0.0844, 0.0627), *(0.0456, 0.0342, 0.0323, 0.0235, 0.0246)
    )
    u = _t(4, 2, 1, 0.5, 0.25, 0.167, 0.125, 0.1, 0.0833, 0.0714, 0.0625)
    return y - x[0] * (u**2 + u * x[1]) / (u**2 + u * x[2] + x[3])


def brown_dennis(x: Tensor) -> Tensor:  # 16
    t = _range(1, 20) / 5
    return (x[0] + t * x[1] - t.exp()) ** 2 + (x[2] + x[3] * t.sin() - t.cos()) ** 2


def osborne_1(x: Tensor) -> Tensor:  # 17
    y = _t(
        *(0.844, 0.908, 0.932, 0.936, 0.925, 0.908, 0.881, 0.850, 0.818, 0.784, 0.751),
        *(0.718, 0.685, 0.658, 0.628, 0.603, 0.580, 0.558, 0.538, 0.522, 0.506, 0.490),
        *(0.478, 0.467, 0.457, 0.448, 0.438, 0.431, 0.424, 0.420, 0.414, 0.411, 0.406),
    )
    t = 10 * (_range(1, 33) - 1)
    return y - (x[0] + x[1] * (-t * x[3]).exp() + x[2] * (-t * x[4]).exp())


def biggs(x: Tensor) -> Tensor:  # 18
    t = _range(1, 13) / 10
    y = (-t).exp() - 5 * (-10 * t).exp() + 3 * (-4 * t).exp()
    first = x[2] * (-t * x[0]).exp() - x[3] * (-t * x[1]).exp()
    return first + x[5] * (-t * x[4]).exp() - y


def osborne_2(x: Tensor) -> Tensor:  # 19
    y = _t(
        *(1.366, 1.191, 1.112, 1.013, 0.991, 0.885, 0.831, 0.847, 0.786, 0.725, 0.746),
        *(0.679, 0.608, 0.655, 0.616, 0.606, 0.602, 0.626, 0.651, 0.724, 0.649, 0.649),
        *(0.694, 0.644, 0.624, 0.661, 0.612, 0.558, 0.533, 0.495, 0.500, 0.423, 0.395),
        *(0.375, 0.372, 0.391, 0.396, 0.405, 0.428, 0.429, 0.523, 0.562, 0.607, 0.653),
        *(0.672, 0.708, 0.633, 0.668, 0.645, 0.632, 0.591, 0.559, 0.597, 0.625, 0.739),
        *(0.710, 0.729, 0.720, 0.636, 0.581, 0.428, 0.292, 0.162, 0.098, 0.054),
    )
    t = (_range(1, 65) - 1) / 10
    bells = sum(x[k] * (-((t - x[k + 7]) ** 2) * x[k + 4]).exp() for k in (1, 2, 3))
    return y - (x[0] * (-t * x[4]).exp() + bells)


def watson(x: Tensor) -> Tensor:  # 20
    j = _range(1, len(x))
    t = (_range(1, 29) / 29)[:, None]
    slope = ((j[1:] - 1) * x[1:] * t ** (j[1:] - 2)).sum(1)
    value = (x * t ** (j - 1)).sum(1)
    ends = torch.stack([x[0], x[1] - x[0] ** 2 - 1])
    return torch.cat([slope - value**2 - 1, ends])


def penalty_1(x: Tensor) -> Tensor:  # 23
    return torch.cat([math.sqrt(1e-5) * (x - 1), (x.square().sum() - 0.25)[None]])


def penalty_2(x: Tensor) -> Tensor:  # 24
    n, root = len(x), math.sqrt(1e-5)
    i = _range(2, n)
    e = (x / 10).exp()
    y = (i / 10).exp() + ((i - 1) / 10).exp()
    weights = n - _range(1, n) + 1
    return torch.cat(
        [
            (x[0] - 0.2)[None],
            root * (e[1:] + e[:-1] - y),
            root * (e[1:] - math.exp(-0.1)),
            ((weights * x.square()).sum() - 1)[None],
        ]
    )


def variably_dimensioned(x: Tensor) -> Tensor:  # 25
    total = (_range(1, len(x)) * (x - 1)).sum()
    return torch.cat([x - 1, total[None], total[None] ** 2])


def trigonometric(x: Tensor) -> Tensor:  # 26
    n = len(x)
    return n - x.cos().sum() + _range(1, n) * (1 - x.cos()) - x.sin()


def brown_almost_linear(x: Tensor) -> Tensor:  # 27
    return torch.cat([x[:-1] + x.sum() - (len(x) + 1), (x.prod() - 1)[None]])


def _neighbours(x: Tensor) -> tuple[Tensor, Tensor]:
    zero = x.new_zeros(1)
    return torch.cat([zero, x[:-1]]), torch.cat([x[1:], zero])


def boundary_value(x: Tensor) -> Tensor:  # 28
    h = 1 / (len(x) + 1)
    left, right = _neighbours(x)
    return 2 * x - left - right + h**2 * (x + h * _range(1, len(x)) + 1) ** 3 / 2


def integral_equation(x: Tensor) -> Tensor:  # 29
    n = len(x)
    h = 1 / (n + 1)
    t = h * _range(1, n)
    cube = (x + t + 1) ** 3
    below = torch.cumsum(t * cube, 0)
    above = ((1 - t) * cube).sum() - torch.cumsum((1 - t) * cube, 0)
    return x + h * ((1 - t) * below + t * above) / 2


def broyden_tridiagonal(x: Tensor) -> Tensor:  # 30
    left, right = _neighbours(x)
    return (3 - 2 * x) * x - left - 2 * right + 1


def broyden_banded(x: Tensor) -> Tensor:  # 31
    n = len(x)
    i, j = np.indices((n, n))
    near = torch.from_numpy(((i - j <= 5) & (j - i <= 1) & (i != j)).astype(float))
    return x * (2 + 5 * x**2) + 1 - near @ (x * (1 + x))


def linear(x: Tensor) -> Tensor:  # 32, m = 2 n
    m = 2 * len(x)
    rest = x.new_zeros(len(x))
    return torch.cat([x, rest]) - 2 / m * x.sum() - 1


def linear_rank_1(x: Tensor) -> Tensor:  # 33, m = n
    n = len(x)
    return _range(1, n) * (_range(1, n) * x).sum() - 1


def linear_rank_1_zeros(x: Tensor) -> Tensor:  # 34, m = n
    n = len(x)
    factors = torch.cat([x.new_zeros(1), _range(1, n - 2), x.new_zeros(1)])
    return factors * (_range(2, n - 1) * x[1:-1]).sum() - 1


def chebyquad(x: Tensor) -> Tensor:  # 35
    n = len(x)
    i = _range(1, n)
    integrals = torch.where(i % 2 == 0, -1 / (i**2 - 1), 0.0)
    before, present = torch.ones_like(x), 2 * x - 1
    means = []
    for _ in range(n):
        means.append(present.mean())
        before, present = present, 2 * (2 * x - 1) * present - before
    return torch.stack(means) - torch.where(i == 1, 0.0, integrals)


def _counting(n: int) -> Doubles:
    return np.arange(1.0, n + 1)


def _problems() -> list[Problem]:
    t = _counting(10) / 11
    zeros_10_rank = (10 * 10 + 3 * 10 - 6) / (2 * (2 * 10 - 3))
    return [
        Problem("rosenbrock", rosenbrock, _v(-1.2, 1)),
        Problem("freudenstein roth", freudenstein_roth, _v(0.5, -2), (0.0, 48.98425368)),
        Problem("powell badly scaled", powell_badly_scaled, _v(0, 1)),
        Problem("brown badly scaled", brown_badly_scaled, _v(1, 1)),
        Problem("beale", beale, _v(1, 1)),
        Problem("jennrich sampson", jennrich_sampson, _v(0.3, 0.4), (124.3621824,)),
        Problem("helical valley", helical_valley, _v(-1, 0, 0)),
        Problem("bard", bard, _v(1, 1, 1), (8.214877307e-3, 17.42869333)),
        Problem("gaussian", gaussian, _v(0.4, 1, 0), (1.12793277e-8,)),
        Problem("meyer", meyer, _v(0.02, 4000, 250), (87.94585517,)),
        Problem("gulf", gulf, _v(5, 2.5, 0.15)),
        Problem("box", box, _v(0, 10, 20)),
        Problem("powell singular", powell_singular, _v(3, -1, 0, 1)),
        Problem("wood", wood, _v(-3, -1, -3, -1)),
        Problem(
            "kowalik osborne",
            kowalik_osborne,
            _v(0.25, 0.39, 0.415, 0.39),
            (3.075056038e-4, 1.027342949e-3),
        ),
        Problem("brown dennis", brown_dennis, _v(25, 5, -5, -1), (85822.20163,)),
        Problem("osborne 1", osborne_1, _v(0.5, 1.5, -1, 0.01, 0.02), (5.464894697e-5,)),
        Problem("biggs", biggs, _v(1, 2, 1, 1, 1, 1), (0.0, 5.655649925e-3)),
        Problem(
            "osborne 2",
            osborne_2,
            _v(1.3, 0.65, 0.65, 0.7, 0.6, 3, 5, 7, 2, 4.5, 5.5),
            (4.013773629e-2,),
        ),
        Problem("watson 6", watson, np.zeros(6), (2.287670054e-3,)),
        Problem("watson 9", watson, np.zeros(9), (1.399760138e-6,)),
        Problem("rosenbrock 40", rosenbrock, np.tile(_v(-1.2, 1), 20)),
        Problem("powell singular 40", powell_singular, np.tile(_v(3, -1, 0, 1), 10)),
        Problem("penalty 1 4", penalty_1, _counting(4), (2.249977500e-5,)),
        Problem("penalty 1 10", penalty_1, _counting(10), (7.087651467e-5,)),
        Problem("penalty 2 4", penalty_2, np.full(4, 0.5), (9.376293263e-6,)),
        Problem("penalty 2 10", penalty_2, np.full(10, 0.5), (2.936605374e-4,)),
        Problem("variably dimensioned", variably_dimensioned, 1 - _counting(10) / 10),
        Problem("trigonometric", trigonometric, np.full(10, 0.1), (0.0, 2.795056122e-5)),
        Problem("brown almost linear", brown_almost_linear, np.full(10, 0.5), (0.0, 1.0)),
        Problem("boundary value", boundary_value, t * (t - 1)),
        Problem("integral equation", integral_equation, t * (t - 1)),
        Problem("broyden tridiagonal", broyden_tridiagonal, np.full(10, -1.0)),
        Problem("broyden banded", broyden_banded, np.full(10, -1.0), (0.0, 3.057278430)),
        Problem("linear", linear, np.ones(10), (10.0,)),
        Problem("linear rank 1", linear_rank_1, np.ones(10), (90 / 42,)),
        Problem("linear rank 1 zeros", linear_rank_1_zeros, np.ones(10), (zeros_10_rank,)),
        Problem("chebyquad 8", chebyquad, _counting(8) / 9, (3.516873726e-3,)),
        Problem("chebyquad 9", chebyquad, _counting(9) / 10),
        Problem("chebyquad 10", chebyquad, _counting(10) / 11, (6.503954800e-3, 4.772713667e-3)),
    ]


PROBLEMS = _problems()
