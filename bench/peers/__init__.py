"""pykernels beside other engines: whole models and single ops, interleaved in one run. `python -m pykernels.bench.peers --help`."""
