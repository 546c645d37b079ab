"""Triton kernels that cost nothing until one is launched, and little then.

Triton is optional, and importing it takes longer than loading a small model: on a machine that computes on
the CPU it is never touched. A function under `@kernel` is handed to `triton.jit` at its first launch, and the
names `triton` and `tl` that its body uses are bound in its module then. With TRITON_INTERPRET=1 in the
environment before that moment the kernels run on CPU tensors: so they are tested without a GPU.

Compiled kernels are kept here, and not in Triton's own cache, which takes several times as long to find one. What a
binary depends on is fewer things as well: dtypes, constants, and whether pointers and `widths` are multiples of 16. All
other integers may change from step to step without a compilation.
"""

from __future__ import annotations

import functools
import logging
import operator
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor

INTERPRETING = os.environ.get("TRITON_INTERPRET", "0") == "1"
"""Kernels run in Python on CPU tensors. `tl.dot` on bfloat16 is wrong there: they compute in float32."""

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")

_POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}
_SCALARS = {int: "i32", float: "fp32"}
_ALIGNED = [["tt.divisibility", 16]]


class KernelCompileError(Exception):
    """A kernel that cannot be compiled for the GPU, or takes more of a multiprocessor than it has.

    It never leaves the launchers of layers, whose references take over; those of steps are tried before a GPU is used.
    """


# Of a tensor its dtype, of a number its class.
ArgType = Any


@attrs.frozen
class KernelVariant:
    """One binary of a kernel: what a launch must have in common with another one to share it."""

    kernel: Kernel
    types: tuple[ArgType, ...]
    is_aligned: bool  # all pointers and widths are multiples of 16
    constants: tuple[tuple[str, Any], ...]
    num_warps: int
    num_stages: int

    @property
    def label(self) -> str:
        """Describe it in one line."""
        dtypes = dict.fromkeys(_POINTERS[kind] for kind in self.types if kind in _POINTERS)
        constants = " ".join(f"{name}={value}" for name, value in self.constants)
        shape = f"aligned={self.is_aligned} warps={self.num_warps} stages={self.num_stages}"
        return f"{self.kernel.name} {','.join(dtypes)} {shape} {constants}"

    def compile(self, target: Any = None) -> Any:
        """Compile it for a `GPUTarget`; None is the current device. Triton keeps binaries on disk."""
        import triton
        from triton.compiler import ASTSource

        function = self.kernel.jitted()
        names = self.kernel.argument_names
        signature = {
            name: _SCALARS.get(kind) or _POINTERS[kind] for name, kind in zip(names, self.types, strict=True)
        } | {name: "constexpr" for name, _ in self.constants}
        aligned = {
            (place,): _ALIGNED
            for place, (name, kind) in enumerate(zip(names, self.types, strict=True))
            if self.is_aligned and (kind in _POINTERS or name in self.kernel.widths)
        }
        source = ASTSource(function, signature, constexprs=dict(self.constants), attrs=aligned)
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        # Said aloud, because Triton's own default differs between versions, and the results with it.
        return triton.compile(
            source, target=target, options={"enable_fp_fusion": self.kernel.may_fuse, **options}
        )


@attrs.frozen(eq=False)
class _Loaded:
    """Binary on a device, with what its launcher wants in front of the arguments."""

    run: Callable[..., object]
    function: Any
    metadata: Any
    constants: tuple[Any, ...]  # behind the arguments


class Kernel:
    """A function that is compiled when it is first launched: `kernel[grid](*arguments, **constants)`.

    Its arguments come first, its constants behind them, by keyword.

    Args:
        function: the kernel.
        widths: integers that a model decides, such as strides: a binary may rely on them to be multiples of 16.
        may_fuse: whether a multiplication and an addition may be rounded once, which torch's operators never do.

    Raises:
        ImportError: at the launch, on a machine without triton.
    """

    def __init__(
        self, function: Callable[..., None], widths: tuple[str, ...] = (), *, may_fuse: bool = True
    ) -> None:
        self.__doc__ = function.__doc__
        self.name = function.__name__
        self.widths, self.may_fuse = widths, may_fuse
        self._function = function
        self._names = function.__code__.co_varnames[: function.__code__.co_argcount]
        if unknown := set(widths) - set(self._names):
            raise ValueError(f"widths must be arguments of {self.name}; got {sorted(unknown)}")
        self.argument_names = self._names  # without the constants, once it was launched
        self._jitted: Any = None
        self._loaded: dict[Any, _Loaded | KernelCompileError] = {}
        self._type_of: Callable[[tuple[Any, ...]], object] | None = None

    @classmethod
    def with_widths(cls, *widths: str) -> Callable[[Callable[..., None]], Kernel]:
        """Return the decorator of a kernel with `widths`."""
        return functools.partial(cls, widths=widths)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        return functools.partial(self._launch, grid)

    def _launch(
        self, grid: tuple[int, ...], *args: Any, num_warps: int = 4, num_stages: int = 3, **constants: Any
    ) -> None:
        if (recording := _state.recording) is not None:
            variant = self._variant(args, _has_aligned_offsets, constants, num_warps, num_stages)
            recording[variant] = None
            return
        if INTERPRETING:
            self.jitted()[grid](*args, **constants)
            return
        if self._type_of is None:
            self._type_of = _type_function(args, [name in self.widths for name in self._names[: len(args)]])
        driver = _driver()
        device = driver.get_current_device()
        key = self._type_of(args), tuple(constants.items()), num_warps, num_stages, device
        loaded = self._loaded.get(key)
        if loaded is None:
            variant = self._variant(args, _is_aligned, constants, num_warps, num_stages)
            loaded = self._loaded[key] = self._load(variant)
        if isinstance(loaded, KernelCompileError):
            raise loaded
        x, y, z = (*grid, 1, 1)[:3]
        loaded.run(
            x, y, z, driver.get_current_stream(device), loaded.function, loaded.metadata, None, None, None,
            *args, *loaded.constants,
        )  # fmt: skip

    def _variant(
        self,
        args: tuple[Any, ...],
        is_aligned: Callable[[Any], bool],
        constants: dict[str, Any],
        num_warps: int,
        num_stages: int,
    ) -> KernelVariant:
        self.argument_names, names = self._names[: len(args)], self._names[len(args) :]
        if set(names) != constants.keys():
            raise TypeError(f"{self.name} needs the constants {names}; got {sorted(constants)}")
        checked = [
            arg
            for name, arg in zip(self.argument_names, args, strict=True)
            if isinstance(arg, Tensor) or name in self.widths
        ]
        return KernelVariant(
            self,
            tuple(arg.dtype if isinstance(arg, Tensor) else type(arg) for arg in args),
            all(map(is_aligned, checked)),
            tuple((name, constants[name]) for name in names),
            num_warps,
            num_stages,
        )

    def _load(self, variant: KernelVariant) -> _Loaded | KernelCompileError:
        if _state.is_warm:
            logger.warning(
                "a kernel was compiled or loaded after the start, and a step waited: %s", variant.label
            )
        try:
            compiled = variant.compile()
        except ImportError:  # no triton: the installation lacks something, and not this kernel
            raise
        except Exception as error:
            return KernelCompileError(f"{self.name} cannot be compiled: {type(error).__name__}: {error}")
        try:
            run = compiled.run  # loads the binary
        except Exception as error:
            if (
                type(error).__name__ != "OutOfResources"
            ):  # Triton's; a driver that fails is no matter of one kernel
                raise
            return KernelCompileError(f"{self.name} cannot run: {error}")
        values = tuple(value for _, value in variant.constants)
        return _Loaded(run, compiled.function, compiled.packed_metadata, values)

    def jitted(self) -> Any:
        """Return the function under `triton.jit`."""
        if self._jitted is None:
            self._jitted = _jit(self._function)
        return self._jitted


class DeviceFunction:
    """A function that kernels call.

    Args:
        function: takes and returns what kernels compute with.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__doc__ = function.__doc__
        self._function = function
        self._jitted: Any = None

    def __call__(self, *args: Any) -> Any:
        raise TypeError(f"{self._function.__name__} is for kernels")

    def jitted(self) -> Any:
        """Return the function under `triton.jit`."""
        if self._jitted is None:
            self._jitted = _jit(self._function)
        return self._jitted


def _jit(function: Callable[..., Any]) -> Any:
    """Hand a function to Triton, with what it names in its module."""
    import triton
    import triton.language as tl

    module = function.__globals__
    module.update(triton=triton, tl=tl)
    for name in function.__code__.co_names:
        if isinstance(called := module.get(name), DeviceFunction):
            module[name] = called.jitted()
    return triton.jit(function)


kernel = Kernel
device_function = DeviceFunction
unfused_kernel = functools.partial(Kernel, may_fuse=False)


def _is_aligned(arg: Any) -> bool:
    return (arg.data_ptr() if isinstance(arg, Tensor) else arg) % 16 == 0


def _has_aligned_offsets(arg: Any) -> bool:
    # Memory that torch allocates is aligned, and a fake tensor has none.
    return (arg.storage_offset() * arg.itemsize if isinstance(arg, Tensor) else arg) % 16 == 0


def _type_function(args: tuple[Any, ...], are_widths: list[bool]) -> Callable[[tuple[Any, ...]], object]:
    """Return the function that tells the types of a launch's arguments, and whether they are aligned.

    Where they are is looked up once: telling tensors from numbers would take three times as long.
    """
    are_tensors = [isinstance(arg, Tensor) for arg in args]
    tensors_of = _places([index for index, is_tensor in enumerate(are_tensors) if is_tensor])
    numbers_of = _places([index for index, is_tensor in enumerate(are_tensors) if not is_tensor])
    widths_of = _places([index for index, is_width in enumerate(are_widths) if is_width])
    dtype_of = operator.attrgetter("dtype")

    def types_of(args: tuple[Any, ...]) -> object:
        tensors, bits = tensors_of(args), 0
        for tensor in tensors:
            bits |= tensor.data_ptr()
        for width in widths_of(args):
            bits |= width
        return tuple(map(dtype_of, tensors)), tuple(map(type, numbers_of(args))), bits & 15 == 0

    return types_of


def _places(indices: list[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    if len(indices) == 1:  # an itemgetter of one index gives no tuple
        indices = indices * 2
    return operator.itemgetter(*indices) if indices else lambda _: ()


@functools.cache
def _active_driver() -> Any:
    from triton.runtime.driver import driver

    return driver


def _driver() -> Any:
    return _active_driver().active


# ------------------------------------------------------------------------------------ what will be launched


@attrs.define(eq=False)
class _State:
    """State of all kernels of this process."""

    recording: dict[KernelVariant, None] | None = None
    is_warm: bool = False
    failed: dict[str, None] = attrs.field(factory=dict)  # what was said of kernels whose references took over


_state = _State()


@contextmanager
def record_launches() -> Iterator[dict[KernelVariant, None]]:
    """Collect the variants that are launched within, in order, and launch nothing.

    Tensors need no memory: those of torch's fake mode will do.
    """
    before, variants = _state.recording, dict[KernelVariant, None]()
    _state.recording = variants
    try:
        yield variants
    finally:
        _state.recording = before


def run_or_reference(
    run: Callable[..., _Result], reference: Callable[..., _Result], *args: Any, **kwargs: Any
) -> _Result:
    """Call a launcher; if its kernel cannot be compiled, say so once and call the reference in its place."""
    try:
        return run(*args, **kwargs)
    except KernelCompileError as error:
        if (problem := str(error)) not in _state.failed:
            _state.failed[problem] = None
            logger.warning("%s; torch computes in its place, slower and without graphs", problem)
        return reference(*args, **kwargs)


def has_failed_kernels() -> bool:
    """Tell whether a reference has taken over, which may wait for the device."""
    return bool(_state.failed)


def announce_warm() -> None:
    """Report every binary that is compiled from now on."""
    _state.is_warm = True


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is not below `n`; Triton's tiles need such sides."""
    return 1 << max(n - 1, 0).bit_length()
