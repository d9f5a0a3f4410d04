"""The pytest-benchmark suite, one file per family: `pytest bench/suite -k decode`."""
