"""Reads the weights of a file into a model: an upload, a merged model, any safetensors state_dict, or what torch saved.

Of a pickle only tensors are read (`torch.load(weights_only=True)`), so nothing in it can run.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from maecho import disk
from maecho.errors import InputError, text_of
from maecho.upload import storage
from maecho.upload.upload import Upload

INSIDE = ("state_dict", "model_state_dict", "model")
"""The entries of a checkpoint that may hold the state_dict."""
PREFIXES = ("module.", "_orig_mod.")
"""What DataParallel and torch.compile put before all names."""
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
SAVE = "save model.state_dict(), with torch.save or safetensors.torch.save_file"


def load(model: nn.Module, path: Path) -> None:
    """Load the weights of a file into a model."""
    found = _without_prefixes(_saved_by_torch(path) if _is_pickle(path) else _safetensors(path), model)
    try:
        model.load_state_dict(found)
    except RuntimeError as error:
        first = str(error).splitlines()[1].strip() if "\n" in str(error) else str(error)
        raise InputError(f"{path} must hold the weights of this model, got others: {first}") from error


def _safetensors(path: Path) -> dict[str, Tensor]:
    """The weights of any safetensors file. For an upload, tied names are included."""
    with storage.opened(path) as file:
        if file.kind != "upload":
            return file.read_all()
    return Upload.load(path, only=()).state_dict()


def _is_pickle(path: Path) -> bool:
    """Whether torch.save wrote the file: an archive, or a bare pickle in old files. A safetensors file has its header's
    length first, and then the header, which is JSON."""
    with disk.regular(path) as file:
        start = file.read(9)
    of_torch = start.startswith(b"PK\x03\x04") or bool(re.match(rb"\x80[\x02-\x05]", start))
    if start[8:] == b"{":
        return False
    if not of_torch and path.suffix in SUFFIXES:
        raise InputError(f"{path} must be a file of torch.save or a safetensors file, got neither")
    return of_torch


def _saved_by_torch(path: Path) -> dict[str, Tensor]:
    """The state_dict in a file of torch.save: all of it, or an entry of a checkpoint."""
    with disk.regular(path) as file:
        try:
            found = torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            what = re.search(r"(?:GLOBAL|global:?) ([\w.]+\.[\w.]+)", str(error))
            got = f"an object of {what[1]}" if what else "something else"
            raise InputError(
                f"{path} must hold tensors alone, since a pickle could run code, got {got}; {SAVE}"
            ) from error
        except (RuntimeError, EOFError, ValueError, KeyError, AttributeError, TypeError, IndexError) as error:
            why = text_of(error).partition(". ")[0] or type(error).__name__
            raise InputError(f"{path} must be a file of torch.save, got one that is damaged: {why}") from error
    entry = next((key for key in INSIDE if isinstance(found, Mapping) and isinstance(found.get(key), Mapping)), None)
    state: Any = found if entry is None else found[entry]
    if not isinstance(state, Mapping):
        raise InputError(f"{path} must hold a state_dict, got a {type(state).__name__}; {SAVE}")
    others = [key for key, value in state.items() if not (isinstance(key, str) and isinstance(value, Tensor))]
    if others or not state:
        got = f"the entries {', '.join(map(str, list(state)[:8]))}" if state else "nothing"
        raise InputError(
            f"{path} must hold a state_dict, alone or as its entry {', '.join(INSIDE[:-1])} or {INSIDE[-1]}, got {got}"
        )
    return dict(state)


def _without_prefixes(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The weights by the model's own names. A wrapper's prefix goes if all names have it, and the model's do not."""
    own = model.state_dict().keys()
    for prefix in PREFIXES * 2:
        if state and all(name.startswith(prefix) for name in state) and not all(n.startswith(prefix) for n in own):
            state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    return state
