"""Benchmarks against named peers: one package and one `make` target each, ending in one JSON line."""
