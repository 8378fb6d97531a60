"""Counts the GPUs for `make test-gpu`, or says what the machine lacks; needs no package.

python3 tests/helpers/gpu_machine.py CONTAINER      # an image that has what the tests need
"""

import ctypes
import sys
from importlib.util import find_spec


def num_gpus() -> int:
    """The GPUs that CUDA shows to this process."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0  # no driver
    count = ctypes.c_int(0)
    if cuda.cuInit(0) == 0:
        cuda.cuDeviceGetCount(ctypes.byref(count))
    return count.value


def main(container: str) -> None:
    gpus = num_gpus()
    missing = ([] if gpus else ["no NVIDIA GPU"]) + ([] if find_spec("torch") else ["no torch"])
    if missing:
        sys.exit(
            "make test-gpu needs an NVIDIA GPU, and torch in the Python that starts it; here: "
            f"{', '.join(missing)}.\nIn a container that has them, and Transformer Engine: "
            f'docker run --gpus all --ipc=host -v "$PWD":/src -w /src {container} make test-gpu'
        )
    print(gpus)


if __name__ == "__main__":
    main(*sys.argv[1:])
