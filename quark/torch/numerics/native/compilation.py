"""Functions that numba compiles to machine code for the CPU, when the first of them is called.

Numba is optional: ``pip install "quark-quantizer[fast]"``. Without it, or with the environment
variable ``QUARK_KERNELS=torch``, operations of torch compute the same bits. A kernel is one pass
over memory where torch makes ten.

A file of kernels holds plain functions of scalars and arrays, marked with ``native_function``. They
may call each other, and take instructions from other files, but no functions: numba keeps machine
code on the disk until the file itself changes. Its folder is ``__pycache__`` beside the file, or
one of the user's; if it cannot be written, each process compiles anew. Numba cannot run several of
its own parallel loops at the same time, so threads of Python take parts of the rows instead:
kernels hold no lock.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from threading import RLock
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from quark.torch.numerics.native.memory import spares_memory

logger = logging.getLogger(__name__)

SWITCH = "QUARK_KERNELS"
CHOICES = ("auto", "torch")
LEAST_ELEMENTS = 1 << 18  # of a tensor: for less, torch is done before numba is imported
_MEMORY = 120 << 20  # bytes of numba, LLVM and the kernels of a run
_PIECE = 1 << 18  # elements that are worth a thread
# Integers that stand for the bits of types without arithmetic in numba; see ``array``.
_BITS = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.uint16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}
_lock = RLock()


class NativeFunction:
    """A function that is compiled when it is first called.

    Args:
        function: A function in the part of Python that numba compiles.
        reorders_sums: Whether sums may be added in any order, which vector instructions need.
    """

    def __init__(self, function: Callable[..., Any], reorders_sums: bool = False) -> None:
        self.python, self.reorders_sums = function, reorders_sums
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        """Run the machine code for these types of arguments; the function must not keep state."""
        compiled = self._compiled
        if compiled is None:
            compiled = self._compiled = self._compile(keeps=True)
        try:
            return compiled(*args)
        except OSError as error:  # the disk is full, or the folder cannot be written any more
            logger.warning("Machine code is not kept on the disk: %s.", error)
            self._compiled = self._compile(keeps=False)
            return self._compiled(*args)

    def _compile(self, keeps: bool) -> Callable[..., Any]:
        with _lock:
            compiled: Callable[..., Any] = _compile(self.python.__module__, keeps)[
                self.python.__name__
            ]
        return compiled


class ByType:
    """A function of one scalar with an implementation for each type.

    Args:
        choose: Returns the implementation, given the name of a type, such as "int16".
    """

    def __init__(self, choose: Callable[[str], Callable[..., Any]]) -> None:
        self.choose = choose

    def __call__(self, x: Any) -> Any:
        """Return the value for a scalar."""
        return self.choose(str(x.dtype))(x)


class Instruction(NamedTuple):
    """A function of one or three scalars in instructions of LLVM.

    It keeps narrow types narrow, where numba would compute with 64 bits, and has types that numba
    does not have.

    Attributes:
        build: Returns the result, given a builder, the module ``llvmlite.ir`` and the arguments.
        result: Name of the type of the result, such as "float32".
        arguments: Names of the types of the arguments.
    """

    build: Callable[..., Any]
    result: str
    arguments: tuple[str, ...]

    def __call__(self, *args: Any) -> Any:
        """Raise an error: Python has no such function.

        Raises:
            TypeError: Always.
        """
        raise TypeError("Only compiled functions can call an instruction.")


class Operand(NamedTuple):
    """An array of numpy that instructions of LLVM read or write.

    Attributes:
        address: Address of its first element, an integer of 64 bits.
        kind: Name of the type of its elements, such as "float32".
        shape: Number of its elements along each axis, integers of 64 bits.
    """

    address: Any
    kind: str
    shape: tuple[Any, ...]


class ArrayInstruction(NamedTuple):
    """A function of a tuple of contiguous arrays in instructions of LLVM, for loops on vectors.

    Attributes:
        build: Writes the instructions, given a builder, the module ``llvmlite.ir``, and an
            ``Operand`` for each array, or None for None.
    """

    build: Callable[..., None]

    def __call__(self, operands: tuple[Any, ...]) -> None:
        """Raise an error: Python has no such function.

        Raises:
            TypeError: Always.
        """
        raise TypeError("Only compiled functions can call an instruction.")


def native_function(function: Callable[..., Any]) -> NativeFunction:
    """Mark a function that numba compiles."""
    return NativeFunction(function)


def native_sum(function: Callable[..., Any]) -> NativeFunction:
    """Mark a function that numba compiles, and whose sums may be added in any order."""
    return NativeFunction(function, reorders_sums=True)


def native_instruction(result: str, *arguments: str) -> Callable[[Callable[..., Any]], Instruction]:
    """Mark a function that builds instructions; see ``Instruction``."""
    return lambda build: Instruction(build, result, arguments)


def native_array_instruction(build: Callable[..., None]) -> ArrayInstruction:
    """Mark a function that builds instructions on arrays; see ``ArrayInstruction``."""
    return ArrayInstruction(build)


def native_by_type(choose: Callable[[str], Callable[..., Any]]) -> ByType:
    """Mark a function that chooses by the type of a scalar; compiled functions call it with one."""
    return ByType(choose)


@cache
def _compile(module: str, keeps: bool) -> dict[str, Any]:
    """Return the functions of a module for numba, which compiles them for types of arguments.

    Args:
        module: Name of the module.
        keeps: Whether machine code is kept on the disk.
    """
    numba, extending = import_module("numba"), import_module("numba.extending")
    namespace = dict(vars(sys.modules[module]))
    functions = {n: f for n, f in namespace.items() if isinstance(f, NativeFunction)}
    for name, member in list(namespace.items()):
        if isinstance(member, ByType):
            namespace[name] = _overloaded(member, extending.overload, namespace)
        elif isinstance(member, Instruction):
            namespace[name] = _intrinsic(member, extending.intrinsic)
        elif isinstance(member, ArrayInstruction):
            namespace[name] = _array_intrinsic(member, extending.intrinsic)
    for name, function in functions.items():
        own = _moved(function.python, namespace)
        namespace[name] = _jitted(own, numba.njit, keeps, function.reorders_sums)
    return {name: namespace[name] for name in functions}


def _moved(function: Callable[..., Any], namespace: dict[str, Any]) -> Callable[..., Any]:
    """Return a copy of a function whose names lead to compiled functions."""
    assert isinstance(function, FunctionType)
    own = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__)
    own.__module__, own.__qualname__ = function.__module__, function.__qualname__
    return own


def _jitted(function: Callable[..., Any], njit: Any, keeps: bool, reorders_sums: bool) -> Any:
    # Bits are those of torch, except of sums. Divisions by zero give infinity, as there.
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    if reorders_sums:
        options["fastmath"] = {"reassoc", "contract", "nsz"}
    if keeps:
        try:
            return njit(cache=True, **options)(function)
        except RuntimeError as error:  # no folder can be written
            logger.info("Machine code is not kept on the disk: %s.", error)
    return njit(**options)(function)


def _overloaded(member: ByType, overload: Any, namespace: dict[str, Any]) -> Callable[[Any], Any]:
    def call(x):  # type: ignore[no-untyped-def]  # numba compares signatures
        return member(x)

    overload(call)(lambda x: _moved(member.choose(str(x)), namespace))
    return call


def _intrinsic(member: Instruction, intrinsic: Any) -> Callable[..., Any]:
    types, ir = import_module("numba.core.types"), import_module("llvmlite.ir")
    signature = getattr(types, member.result)(*(getattr(types, a) for a in member.arguments))

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return member.build(builder, ir, *args)

    def of_one(context: Any, x: Any) -> Any:
        return signature, generate

    def of_three(context: Any, x: Any, y: Any, z: Any) -> Any:
        return signature, generate

    made: Callable[..., Any] = intrinsic(of_one if len(member.arguments) == 1 else of_three)
    return made


def _array_intrinsic(member: ArrayInstruction, intrinsic: Any) -> Callable[..., Any]:
    types, ir = import_module("numba.core.types"), import_module("llvmlite.ir")

    def operand(context: Any, builder: Any, kind: Any, value: Any) -> Operand | None:
        if isinstance(kind, types.NoneType):
            return None
        if not isinstance(kind, types.Array) or kind.layout != "C":
            raise TypeError(f"An instruction takes contiguous arrays and None, not {kind}.")
        made = context.make_array(kind)(context, builder, value)
        shape = tuple(builder.extract_value(made.shape, i) for i in range(kind.ndim))
        return Operand(builder.ptrtoint(made.data, ir.IntType(64)), str(kind.dtype), shape)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (kinds,), (values,) = signature.args, args
        members = [builder.extract_value(values, i) for i in range(len(kinds))]
        pairs = zip(kinds, members, strict=True)
        member.build(builder, ir, *(operand(context, builder, *pair) for pair in pairs))
        return context.get_dummy_value()

    def of_arrays(context: Any, operands: Any) -> Any:
        return types.void(operands), generate

    made: Callable[..., Any] = intrinsic(of_arrays)
    return made


@cache
def _has_numba() -> bool:
    """Import numba; whether it is there and compiles."""
    if find_spec("numba") is None:
        return False
    try:
        numba = import_module("numba")
    except Exception as error:  # it imports much, of which any part may not fit this Python
        logger.warning("numba cannot be imported, so operations of torch take its place: %s", error)
        return False
    return not numba.config.DISABLE_JIT


def is_in_memory() -> bool:
    """Whether the process has imported numba, which takes seconds and memory."""
    return "numba" in sys.modules


def can_run(*tensors: torch.Tensor | None, least: int | None = None) -> bool:
    """Whether kernels may process tensors: on the CPU, large enough, without gradients or tracing.

    Args:
        tensors: The tensors, the one with the most elements first; None for those that are absent.
        least: Fewest elements of the first one; ``LEAST_ELEMENTS`` by default.

    Raises:
        ValueError: ``QUARK_KERNELS`` has none of its values.
    """
    choice = os.environ.get(SWITCH, CHOICES[0])
    if choice not in CHOICES:
        raise ValueError(f"{SWITCH}={choice!r} is unknown: give {' or '.join(CHOICES)}.")
    first = tensors[0]
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]  # it has no types
        return False
    fewest = LEAST_ELEMENTS if least is None else least
    if choice == "torch" or first is None or first.numel() < fewest:
        return False
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    are_plain = all(
        t is None or (type(t) in (torch.Tensor, torch.nn.Parameter) and t.device.type == "cpu")
        for t in tensors
    )
    # Of this thread: the flag of ``is_in_torch_dispatch_mode`` is shared, and threads that leave
    # modes in another order than they entered them leave it set.
    if needs_grad or not are_plain or _get_current_dispatch_mode() is not None:
        return False
    return not spares_memory() and _has_numba()


@cache
def has_feature(name: str) -> bool:
    """Whether numba makes instructions of an extension of the processor, such as "avx512f"."""
    if not _has_numba():
        return False
    features = import_module("numba.core.registry").cpu_target.target_context.codegen()
    return f"+{name}" in str(features.magic_tuple()[-1]).split(",")


def expected_memory() -> int:
    """Return the bytes that numba and kernels will take once the first large tensor comes."""
    is_left_out = spares_memory() or os.environ.get(SWITCH) == "torch"
    if is_left_out or "numba" in sys.modules or find_spec("numba") is None:
        return 0
    return _MEMORY


def array(x: torch.Tensor) -> Any:
    """Return a tensor as an array of numpy in the same memory.

    bfloat16 is int16 there, float16 uint16, and float8 uint8: their bits. Kernels tell types of
    values by these.
    """
    x = x.detach()
    bits = _BITS.get(x.dtype)
    return (x if bits is None else x.view(bits)).numpy()


def run_rows(
    function: Callable[..., None], tensors: Sequence[torch.Tensor | None], *constants: object
) -> None:
    """Run a kernel over the rows of tensors; see ``run_arrays``.

    Args:
        function: See ``run_arrays``.
        tensors: The tensors, contiguous, the largest first. None is passed on.
        constants: Passed on.
    """
    run_arrays(function, [None if t is None else array(t) for t in tensors], *constants)


def run_arrays(function: Callable[..., None], arrays: Sequence[Any], *constants: object) -> None:
    """Run a kernel over the rows of arrays, by as many threads as torch has.

    Args:
        function: It takes arrays whose first axis is the same, then the constants, and returns
            nothing.
        arrays: The arrays, see ``array``, contiguous, the largest first. None is passed on.
        constants: Passed on.
    """
    largest, threads = arrays[0], torch.get_num_threads()
    if threads > 1:
        rows = largest.shape[0]
        threads = max(1, min(threads, largest.size // _PIECE, rows))
    if threads == 1:
        function(*arrays, *constants)
        return
    ends = [rows * i // threads for i in range(threads + 1)]

    def run(start: int, stop: int) -> None:
        function(*[None if a is None else a[start:stop] for a in arrays], *constants)

    list(_pool(threads, os.getpid()).map(run, ends[:-1], ends[1:]))


@cache
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Return the threads of a process, which serve all calls: a forked process has none."""
    return ThreadPoolExecutor(threads, thread_name_prefix="quark-kernels")
