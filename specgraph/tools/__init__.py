"""Measures proposes and whole rounds in every lowering, against eager and against the floor."""

from specgraph.tools.floor import DeviceRates, measure_rates
from specgraph.tools.propose import BenchCase, bench_propose
from specgraph.tools.shapes import SHAPES, BenchShape, random_head

__all__ = ["SHAPES", "BenchCase", "BenchShape", "DeviceRates", "bench_propose", "measure_rates", "random_head"]
