"""One Spark cluster for all tests of this folder."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest


if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def session() -> "Iterator[SparkSession]":
    from tests.spark.test_spark import new_session  # noqa: PLC0415 -- its module skips without Spark

    made = new_session()
    yield made
    made.stop()
