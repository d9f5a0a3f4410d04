"""The bench: how fast each op is on this machine, under which roof, and whether a change made it slower.

`harness` times one case, `suite/` is the pytest-benchmark suite. Installs as `pykernels.bench`.
"""
