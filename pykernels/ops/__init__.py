"""The public functions, one file per family."""
