"""Memory that runs out: an allocation of numpy or torch, of the caller's choice, that fails.

numpy's own code does not survive every failed allocation, so none is made to fail inside of it:
its allocations are counted (through its data handler, NEP 49) to learn which lines of the package
allocate, and the chosen one of these lines raises before it runs. torch's operators are counted one
by one: each that returns a new tensor is an allocation, and fails before it runs.
"""

import ctypes
import sys
from pathlib import Path

import numpy as np
from torch.utils._python_dispatch import TorchDispatchMode

import megatron_hybrid

_PACKAGE = str(Path(megatron_hybrid.__file__).parent)
# numpy asks with Python's lock held, and its own functions rely on it.
_MALLOC = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_CALLOC = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
_GET_HANDLER, _SET_HANDLER = 305, 304
"""Their places in numpy's table of C functions."""
_CAPSULE_NAME = b"mem_handler"

_num_allocated = 0
"""Arrays, while the counting handler is set."""
_allocating_lines: set[tuple[object, int]] = set()
"""(code, line number), as far as seen."""


class _Handler(ctypes.Structure):
    """`PyDataMem_Handler` of numpy's C API."""

    _fields_ = (
        ("name", ctypes.c_char * 127),
        ("version", ctypes.c_uint8),
        ("context", ctypes.c_void_p),
        ("malloc", ctypes.c_void_p),
        ("calloc", ctypes.c_void_p),
        ("realloc", ctypes.c_void_p),
        ("free", ctypes.c_void_p),
    )


def _pointer_of(capsule, name: bytes | None) -> int:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return get(capsule, name)


def _numpy_function(index: int, *arguments):
    """A function of numpy's C API that returns an object."""
    table = _pointer_of(np._core._multiarray_umath._ARRAY_API, None)
    address = ctypes.cast(table, ctypes.POINTER(ctypes.c_void_p))[index]
    return ctypes.PYFUNCTYPE(ctypes.py_object, *arguments)(address)


def _make_counting_handler() -> tuple:
    """The usual handler, a counting one, and what both need. Arrays know the handler of their bytes
    for as long as they live, so there is one, for good."""
    usual = _numpy_function(_GET_HANDLER)()
    handler = _Handler.from_buffer_copy(_Handler.from_address(_pointer_of(usual, _CAPSULE_NAME)))
    malloc, calloc = _MALLOC(handler.malloc), _CALLOC(handler.calloc)

    def counting_malloc(context, size):
        global _num_allocated
        _num_allocated += 1
        return malloc(context, size)

    def counting_calloc(context, number, size):
        global _num_allocated
        _num_allocated += 1
        return calloc(context, number, size)

    callbacks = _MALLOC(counting_malloc), _CALLOC(counting_calloc)
    handler.malloc, handler.calloc = (
        ctypes.cast(callback, ctypes.c_void_p).value for callback in callbacks
    )
    make = ctypes.pythonapi.PyCapsule_New
    make.restype = ctypes.py_object
    make.argtypes = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
    return usual, make(ctypes.addressof(handler), _CAPSULE_NAME, None), (handler, callbacks)


_USUAL, _COUNTING, _kept = _make_counting_handler()
_set_handler = _numpy_function(_SET_HANDLER, ctypes.py_object)


class FailingAllocator(TorchDispatchMode):
    """Within `with`, counts the allocations of the package in this thread; the `fail_at`-th from
    then on fails, and some after it.

    Attributes:
        count: allocations since `arm`.
        has_failed: whether one failed since then.
        failed: in which line or operator.
    """

    def __init__(self, fail_at: int | None = None):
        super().__init__()
        self.arm(fail_at)

    def arm(self, fail_at: int | None, times: int = 1) -> None:
        """The `fail_at`-th allocation from now on (1: the next one) fails, with those behind it
        `times` together; None: none does."""
        self.count, self.fail_at, self.has_failed, self.failed = 0, fail_at, False, None
        self.times = times
        self._line, self._seen = None, _num_allocated

    def __enter__(self):
        _set_handler(_COUNTING)
        self._seen = _num_allocated
        sys.settrace(self._trace)
        sys.setprofile(self._profile)
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        sys.setprofile(None)
        sys.settrace(None)
        _set_handler(_USUAL)

    def _fails(self, where) -> bool:
        self.count += 1
        if self.fail_at is None or not 0 <= self.count - self.fail_at < self.times:
            return False
        self.has_failed, self.failed = True, self.failed or where
        return True

    def _profile(self, frame, event, argument):
        if event == "call" and sys.gettrace() is None:  # Python drops a trace that raised
            sys.settrace(self._trace)

    def _trace(self, frame, event, argument):
        return self._trace_line if frame.f_code.co_filename.startswith(_PACKAGE) else None

    def _trace_line(self, frame, event, argument):
        if _num_allocated != self._seen:
            self._seen = _num_allocated
            _allocating_lines.add(self._line)
        if event == "line":
            self._line = frame.f_code, frame.f_lineno
            if self._line in _allocating_lines and self._fails(self._line):
                raise MemoryError(f"no memory for an array at {frame.f_code.co_name}")
        elif event == "return":
            before = frame.f_back
            self._line = before.f_code, before.f_lineno
        return self._trace_line

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        returns = function._schema.returns
        is_new = returns and all(each.alias_info is None for each in returns)
        if is_new and self._fails(function):
            raise RuntimeError(f"DefaultCPUAllocator: can't allocate memory for {function}")
        return function(*args, **(kwargs or {}))
