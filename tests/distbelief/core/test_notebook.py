"""Results as a notebook shows them: what the terminal shows, with no markup in it."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib import image
from msgspec.structs import replace
from rich.console import Console
from rich.text import Text

from distbelief.core import notebook
from distbelief.job.run.result import Run
from distbelief.plans.cluster_file import load_cluster
from distbelief.simulation.forecast.placed_cluster import constants_of
from distbelief.simulation.forecast.simulate import Forecast
from distbelief.simulation.forecast.sweep import Variant
from tests.distbelief.job.run.test_summary import a_summary
from tests.distbelief.simulation.forecast.jobs import small
from tests.distbelief.simulation.forecast.test_sweep import an_outcome


EVIL = "<script>alert(1)</script>"


def test_text_of_others_is_no_markup() -> None:
    shown = notebook.html(lambda console: console.print(Text(EVIL)))
    assert "<script" not in shown
    assert "&lt;script&gt;alert(1)" in shown


def test_it_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    def show(console: Console) -> None:
        console.print("hello")

    assert "hello" in notebook.html(show)
    assert capsys.readouterr().out == ""


def test_a_run_is_its_table_and_its_curve(tmp_path: Path) -> None:
    summary = replace(a_summary(), name=EVIL, error=EVIL)
    run = Run(directory=tmp_path, summary=summary, exit_code=0, job=small())
    assert "39.8 %" in run._repr_html_()
    assert "<img" not in run._repr_html_()
    image.imsave(tmp_path / "curve.png", np.zeros((2, 2)))
    assert '<img src="data:image/png;base64,iVBOR' in run._repr_html_()
    assert "<script" not in run._repr_html_()


def test_a_forecast_is_its_table_and_remarks() -> None:
    good, bad = an_outcome(rate=123_456.0), an_outcome(error=EVIL)
    variants = tuple(
        Variant(settings={"cluster.replicas": name}, job=small(), n_machines=3, outcomes=(each,))
        for name, each in (("2", good), (EVIL, bad))
    )
    constants = tuple(constants_of(load_cluster("rack-1g")))
    for shown in (variants, variants[:1], ()):
        forecast = Forecast(job=small(), cluster="rack-1g", variants=shown, constants=constants)
        page = forecast._repr_html_()
        assert ("123,456" in page) == bool(shown)
        assert ("failed: &lt;script" in page) == (len(shown) == 2)
        assert "<script" not in page
