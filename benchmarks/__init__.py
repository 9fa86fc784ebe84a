"""Benchmarks: ratios of alternating runs on this machine."""
