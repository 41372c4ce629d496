"""Measures proposes and whole rounds in every lowering, against eager and against the bandwidth floor."""

from specgraph.benchmarking.bandwidth import read_bandwidth
from specgraph.benchmarking.propose import BenchCase, bench_propose
from specgraph.benchmarking.shapes import SHAPES, BenchShape, random_head

__all__ = ["SHAPES", "BenchCase", "BenchShape", "bench_propose", "random_head", "read_bandwidth"]
