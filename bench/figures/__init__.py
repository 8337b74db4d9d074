"""Figures of docs/figures.md and README.md as data: the benchmark of each, its result, and the pages that print it."""
