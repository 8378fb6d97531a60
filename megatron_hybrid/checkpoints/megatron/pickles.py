"""Reading pickles without running what they say.

A pickle names functions and calls them. The reader here knows the few classes of the standard
library and torch that the files of a distributed checkpoint are made of. A class of another
package (an enum of Megatron's, say, which need not be installed) becomes an inert `Unknown`; any
other function or class of the standard library or torch is refused, before anything is called.
"""

import io
import pickle
import pickletools
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from megatron_hybrid.checkpoints.tensor_files import CheckpointError

_KNOWN = {
    "_codecs": ("encode",),
    "argparse": ("Namespace",),
    "builtins": ("bytearray", "complex", "frozenset", "range", "set", "slice"),
    "collections": ("OrderedDict",),
    "io": ("BytesIO",),
    "pathlib": ("Path", "PosixPath", "PurePosixPath"),
    "signal": ("Signals",),
    "torch": ("Size", "device"),
    "torch._utils": ("_rebuild_parameter", "_rebuild_tensor_v2"),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.serialization": ("_get_layout",),
    "types": ("SimpleNamespace",),
}
"""Module -> names in it that are what they are. None of them does more than to hold its
arguments."""

_OTHER_NAMES = {"pathlib._local": "pathlib"}
"""Module -> where each release of Python has its classes. 3.13 pickles paths by the first."""

_INERT_MODULES = ("torch.distributed.checkpoint.planner",)
"""Plans of the saving ranks, which core leaves in `.metadata` and which nothing here reads."""


class Unknown:
    """An instance of a class that is not known here; it keeps its name and arguments."""

    name = ""
    arguments: tuple = ()

    def __init__(self, *arguments: Any, **fields: Any):
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        """Ignore an item, as all content is ignored."""

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"{self.name}{self.arguments}"


def load_saved(file: io.BufferedIOBase, source: str) -> Any:
    """Read what `torch.save` wrote. Tensors come to the CPU.

    Args:
        source: its name in errors.

    Raises:
        CheckpointError: truncated, damaged, no such file, or one that asks for more than data.
    """
    module = SimpleNamespace(Unpickler=_Unpickler, load=load_pickle, __name__=__name__)
    with readable(source):
        if zipfile.is_zipfile(file):  # as all but very old files; torch does not compare its sums
            with zipfile.ZipFile(file) as parts:
                # All are 0 after torch.serialization.set_crc32_options(False).
                has_sums = any(part.CRC for part in parts.infolist())
                if has_sums and (damaged := parts.testzip()) is not None:
                    raise CheckpointError(f"{damaged} in it is damaged. Copy or save it again.")
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=False, pickle_module=module)


@contextmanager
def readable(source: str) -> Iterator[None]:
    """Turn all errors of reading a pickle into a CheckpointError that names `source`."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{source} is not read: {error}") from None
    except Exception as error:  # a damaged pickle raises errors of all kinds
        raise CheckpointError(
            f"{source} cannot be read ({type(error).__name__}: {error}). Copy or save it again."
        ) from error


def load_pickle(file: io.BufferedIOBase, **options: Any) -> Any:
    """Read a plain pickle.

    Raises:
        CheckpointError: it asks for more than data.
    """
    return _Unpickler(file, **options).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BufferedIOBase, **options: Any):
        start = file.tell()
        for opcode, number, place in pickletools.genops(file):
            if opcode.name.endswith("PUT") and number > place:  # it numbers what came before
                raise CheckpointError(f"it asks for the memory of {number} objects at {place}.")
        file.seek(start)
        super().__init__(file, **options)

    def find_class(self, module: str, name: str) -> Any:
        """Return what the pickle names: a known class, or an `Unknown` of its own."""
        module = _OTHER_NAMES.get(module, module)
        if name in _KNOWN.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        is_inert = module in _INERT_MODULES
        if not is_inert and module.partition(".")[0] in ("torch", *sys.stdlib_module_names):
            raise CheckpointError(
                f"it names {module}.{name}, which is no part of a checkpoint and could run code. "
                "Do not load it elsewhere either, unless you trust who made it."
            )
        return type("Unknown", (Unknown,), {"name": f"{module}.{name}"})


def _member(owner: Any, name: str) -> Any:
    """Stand in for `getattr`, by which some releases of Python pickle enums."""
    if isinstance(owner, type) and issubclass(owner, Unknown):
        return owner(name)
    raise CheckpointError(f"it reads the attribute {name!r} of {owner!r}, which no checkpoint does")
