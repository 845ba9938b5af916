"""What all Triton kernels share: they are made at their first launch, and their arguments are checked before it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cbserve.errors import CBServeError

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INDICES = (torch.int32, torch.int64)


class KernelError(CBServeError):
    """A kernel cannot run on these arguments, or not on this machine."""


class Kernel:
    """A Triton kernel that is made when it is first launched: `kernel[grid](...)`.

    Until then triton is not imported. So a module of kernels also serves machines without triton, and the interpreter
    can be chosen (TRITON_INTERPRET=1) as late as just before the first launch. The function finds `tl`, which is
    `triton.language`, among the globals of its module, and may call other kernels of that module.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._jitted: Any = None
        self.__doc__ = function.__doc__

    @property
    def jitted(self) -> Any:
        """What `triton.jit` makes of the function. Raises KernelError if triton is not installed."""
        if self._jitted is None:
            if importlib.util.find_spec("triton") is None:
                raise KernelError("triton is not installed; pip install triton (Linux), or use backend='torch'")
            import triton
            import triton.language as tl

            names = self.function.__globals__
            names["tl"] = tl
            for name in self.function.__code__.co_names:
                if isinstance(names.get(name), Kernel):
                    names[name] = names[name].jitted
            self._jitted = triton.jit(self.function)
        return self._jitted

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        if _recording is not None:
            launches = _recording.launches
            return lambda *args, **kwargs: launches.append(Launch(self, grid, args, kwargs))
        return self.jitted[grid]


@dataclass(frozen=True)
class Launch:
    kernel: Kernel
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class _Recording:
    capability: int
    launches: list[Launch]


_recording: _Recording | None = None


@contextmanager
def recording(capability: int) -> Iterator[list[Launch]]:
    """Inside, kernels are not run; their launches are noted, as for a GPU of this compute capability (80 is 8.0).

    So what would be launched for a shape can be compiled where there is no GPU. Tensors may be on any device, also on
    "meta", where they take no memory.
    """
    global _recording
    before, _recording = _recording, _Recording(capability, [])
    try:
        yield _recording.launches
    finally:
        _recording = before


def capability(device: torch.device) -> int:
    """75 for a T4, 80 for an A100, 90 for an H100; the interpreter plays a GPU with tensor cores."""
    if _recording is not None:
        return _recording.capability
    if device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes")


def check_tensor(
    name: str,
    x: Tensor,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...] = FLOATS,
    device: torch.device | None = None,
    contiguous: bool = True,
) -> None:
    """Raise KernelError unless a kernel can take `x`: a wrong shape or stride would read another tensor's memory.

    shape: None stands for any size. dtypes: those allowed. device: the one it must share, None for any that kernels run
    on. contiguous: of the whole tensor; otherwise only the last dimension must be.
    """
    if x.dim() != len(shape) or any(want is not None and size != want for size, want in zip(x.shape, shape)):  # noqa: B905
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise KernelError(f"{name} has shape {list(x.shape)}; it must be [{wanted}]")
    if x.dtype not in dtypes:
        raise KernelError(f"{name} is {x.dtype}; it must be {' or '.join(map(str, dtypes))}; convert it with .to()")
    if contiguous:
        if not x.is_contiguous():
            raise KernelError(f"{name} is not contiguous (strides {x.stride()}); use .contiguous()")
    elif x.dim() and x.shape[-1] > 1 and x.stride(-1) != 1:
        raise KernelError(f"the last dimension of {name} has stride {x.stride(-1)}; it must be 1: use .contiguous()")
    if device is not None:
        if x.device != device:
            raise KernelError(f"{name} is on {x.device}, the other arguments on {device}; move it with .to()")
    elif x.is_cuda:
        if interpreting():
            raise KernelError(f"{name} is on {x.device}, but TRITON_INTERPRET=1 runs kernels on CPU tensors; unset it")
        if x.device.index != torch.cuda.current_device():
            raise KernelError(
                f"{name} is on {x.device}, the current device is cuda:{torch.cuda.current_device()}; "
                "call torch.cuda.set_device first"
            )
    elif not (x.device.type == "cpu" and interpreting()) and _recording is None:
        raise KernelError(
            f"{name} is on {x.device}; Triton kernels need a CUDA device. On a CPU use backend='torch', or set "
            "TRITON_INTERPRET=1 before triton is imported"
        )


def check_no_bfloat16_dot(x: Tensor) -> None:
    """Raise KernelError where the interpreter would multiply the bits of bfloat16 numbers as if they were integers."""
    if x.dtype == torch.bfloat16 and interpreting():
        raise KernelError("Triton's interpreter computes wrong products of bfloat16; use float16 or float32 there")


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n: Triton's tiles have no other sizes."""
    return 1 << max(n - 1, 0).bit_length()
