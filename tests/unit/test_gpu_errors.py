"""Errors that say that a GPU cannot be used, or that memory is full, are told from others."""

from __future__ import annotations

from queue_workflows.model_cache import loading
from tests.support import tabled


class OutOfMemoryError(RuntimeError):
    """An error with the name of torch's."""


class Group(Exception):
    """An error with others in it, as `ExceptionGroup` of later Pythons."""

    exceptions: tuple[Exception, ...] = ()


NO_GPU = [
    RuntimeError("CUDA error: no CUDA-capable device is detected\nCUDA kernel errors might be"),
    RuntimeError("No CUDA GPUs are available"),
    RuntimeError("No HIP GPUs are available"),
    RuntimeError("Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU"),
    RuntimeError("Unable to determine the device handle for GPU0: GPU is lost. Reboot the system"),
]
NO_MEMORY = [
    MemoryError(),
    OutOfMemoryError("Tried to allocate 20.00 GiB"),
    RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB (GPU 0; 23.69 GiB total"),
    RuntimeError("RESOURCE_EXHAUSTED: failed to allocate 12 bytes"),
    RuntimeError("CUDA error: out of memory"),
]
OTHERS = [RuntimeError("CUDA error: an illegal memory access"), ValueError("no weights"), OSError()]


def test_an_error_is_known_by_its_text_and_so_is_what_it_has_caused() -> None:
    for error in (*NO_GPU, *NO_MEMORY, *OTHERS):
        with tabled.case(error):
            wrapped = ValueError("no picture")
            wrapped.__cause__ = error
            error.__context__ = wrapped  # a circle ends the search, too
            group = Group()
            group.exceptions = KeyError("x"), wrapped
            for each in (error, wrapped, group):
                assert loading.sees_no_gpu(each) == (error in NO_GPU)
                assert loading.lacks_memory(each) == (error in NO_MEMORY)
