"""Benchmarks: ratios from one alternating run, for the machine at hand."""
