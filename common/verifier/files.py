"""A verifier's files, in its folder or by its hub name."""

from pathlib import Path
from typing import Any

from common.artifacts import decode_json
from common.errors import UserError
from common.tensor_files import read_header

OTHER_WEIGHTS = ("*.gguf", "pytorch_model*.bin", "consolidated*.pth")


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object of the verifier's; UserError naming the file."""
    try:
        found = decode_json(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise UserError(f"{path}: not JSON ({e}); download the file again") from None
    if not isinstance(found, dict):
        raise UserError(f"{path}: not a JSON object; download the file again")
    return found


def model_file(model_path: str, name: str) -> Path:
    """Path of a verifier's file: in its folder, or fetched from the hub by name."""
    folder = Path(model_path)
    if folder.is_dir():
        path = folder / name
        if not path.is_file():
            other = next((p.name for form in OTHER_WEIGHTS for p in folder.glob(form)), None)
            there = f" but {other}; save the model as safetensors, with its config.json"
            raise UserError(f"--model-path {model_path}: has no {name}{there if other else ''}")
        return path
    if folder.exists() or model_path.count("/") != 1 or model_path.startswith((".", "/", "~")):
        raise UserError(f"--model-path {model_path}: no such folder")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model_path, name))
    except Exception as e:  # a dozen hub and network errors, one remedy
        raise UserError(
            f"--model-path {model_path}: no such folder, and {name} could not be fetched from the"
            f" hub ({type(e).__name__}); download the model and pass its folder"
        ) from None


def optional_file(model_path: str, name: str) -> Path | None:
    """As `model_file`, or None where the verifier does not ship that file."""
    folder = Path(model_path)
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    try:
        return model_file(model_path, name)
    except UserError:
        return None


def weight_map(model_path: str) -> dict[str, str]:
    """Tensor name → safetensors file name, from the index or, without one, from the files."""
    index = optional_file(model_path, "model.safetensors.index.json")
    if index is not None:
        found = read_object(index).get("weight_map")
        if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
            raise UserError(f"{index}: has no weight_map; download the file again")
        return found
    files = [*Path(model_path).glob("*.safetensors")]
    if not files or any(p.name == "model.safetensors" for p in files):
        files = [model_file(model_path, "model.safetensors")]
    return {name: path.name for path in files for name in read_header(path)}
