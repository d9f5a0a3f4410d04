"""The one error that reading a model raises."""

from pathlib import Path


class ModelFileError(ValueError):
    """A model on disk cannot be used; the message is one line that names the file and what is wrong with it."""

    def __init__(self, path: str | Path, problem: str) -> None:
        super().__init__(f"{path}: {' '.join(problem.split())}")
        self.path = Path(path)
        self.problem = problem
