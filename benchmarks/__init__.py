"""Benchmarks: ratios from alternating runs, for the machine at hand."""
