"""An accelerator for machines without one: a device type of torch, written in Python.

Its tensors lie in main memory, and operations run on the CPU, so results are those of the CPU. It
is as strict as an accelerator: an operation that mixes its tensors with those of the CPU, or of
another one of its devices, is refused. It counts what costs time on an accelerator: launches of
operations, and synchronizations, where the CPU waits for the device.
"""

import threading
from collections import Counter
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from typing import NamedTuple

import torch
from torch.overrides import TorchFunctionMode

try:
    from torch.utils import backend_registration as registration

    register_backend = registration._setup_privateuseone_for_python_backend
except (ImportError, AttributeError):  # before torch 2.10
    register_backend = None

TYPE = "standin"
COUNT = 3  # devices

# The CPU waits for their results: the size of the output, or a value for Python, depends on them.
READS = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::bincount",
    "aten::_linalg_check_errors",
    "aten::linalg_eigh",
}
COPIES = {"aten::copy_", "aten::_to_copy"}  # between devices; all but asynchronous ones wait
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
EMPTY = {"aten::empty", "aten::empty_strided", "aten::new_empty", "aten::empty_like"}
# They make tensors without reading any. The others are made of these.
FACTORIES = [
    "empty.memory_format",
    "empty_strided",
    "arange",
    "arange.start",
    "arange.start_step",
    "eye",
    "eye.m",
    "linspace",
    "randperm",
    "tril_indices",
    "triu_indices",
]


class MixedDevicesError(RuntimeError):
    """An operation got tensors of several devices."""


class Counts(NamedTuple):
    """Operations since counting began, by name."""

    launches: Counter
    synchronizations: Counter
    places: Counter  # the same by number of the device

    def launch(self, name, device):
        if not _is_counting:
            return
        with _lock:
            self.launches[name] += 1
            self.places[device.index, "launches"] += 1

    def synchronize(self, name, device):
        if not _is_counting:
            return
        with _lock:
            self.synchronizations[name] += 1
            self.places[device.index, "synchronizations"] += 1

    def by_device(self):
        """Return launches and synchronizations by number of the device."""
        kinds = ("launches", "synchronizations")
        return {n: tuple(self.places[n, k] for k in kinds) for n, _ in self.places}


_lock = threading.Lock()
_counts = Counts(Counter(), Counter(), Counter())
_is_counting = False


@contextmanager
def counted():
    """Count the operations inside the context."""
    global _is_counting
    for counter in _counts:
        counter.clear()
    _is_counting = True
    try:
        yield _counts
    finally:
        _is_counting = False


def count_kernel(name, device):
    """Count a launch of a kernel that is no operation of torch."""
    _counts.launch(name, device)


class DeviceTensor(torch.Tensor):
    """A tensor on the device; ``host`` holds its values in main memory."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host, device):
        # Views of common tensors are common tensors.
        mode = torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
        with mode:
            tensor = torch.Tensor._make_wrapper_subclass(
                cls,
                host.shape,
                strides=host.stride(),
                storage_offset=host.storage_offset(),
                dtype=host.dtype,
                device=device,
            )
        tensor.host = host
        return tensor

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():  # torch has not divided compound operations yet
            result = operation.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return _run(operation, args, kwargs)

    def __repr__(self):
        return f"{self.host!r} on {self.device}"

    @property
    def data(self):
        return self.detach()

    @data.setter
    def data(self, value):
        torch.Tensor.data.__set__(self, value)
        self.host = value.host

    def data_ptr(self):
        return self.host.data_ptr()

    def untyped_storage(self):
        return self.host.untyped_storage()

    def new_tensor(self, data, *, dtype=None, device=None, requires_grad=False):
        x = torch.tensor(data, dtype=dtype or self.dtype).to(device or self.device)
        return x.requires_grad_(requires_grad)

    def numpy(self, *, force=False):
        if not force:
            raise TypeError(f"a tensor on {TYPE} is no array: copy it to the CPU first")
        return self.detach().cpu().numpy()

    def tolist(self):
        _counts.synchronize("tolist", self.device)
        return self.host.tolist()


def _run(operation, args, kwargs):
    """Run an operation on the values of its tensors, if an accelerator would run it."""
    name = _name_of(operation)
    tensors = list(_tensors((*args, *kwargs.values())))
    ours = [x for x in tensors if isinstance(x, DeviceTensor)]
    _check_devices(operation, name, args, kwargs, tensors, ours)
    device = _output_device(name, args, kwargs, ours)
    if _is_counting:
        _count(operation, name, args, kwargs, device)
    host_kwargs = {key: _to_host(x) for key, x in kwargs.items()}
    if "device" in host_kwargs:
        host_kwargs["device"] = torch.device("cpu")
    if "pin_memory" in host_kwargs:
        host_kwargs["pin_memory"] = False
    result = operation(*_to_host(args), **host_kwargs)
    for x in ours:
        if x.shape != x.host.shape or x.stride() != x.host.stride():
            raise NotImplementedError(f"{operation.name()} changed the shape of a tensor in place")
    known = {id(x.host): x for x in ours}
    return _from_host(result, device, known)


@cache
def _name_of(operation):
    return operation.name().split(".")[0]


def _tensors(values):
    """Iterate over the tensors among arguments, and in lists there."""
    for x in values:
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from _tensors(x)


def _to_host(x):
    """Return an argument with the values of our tensors in their place."""
    if isinstance(x, DeviceTensor):
        return x.host
    return type(x)(map(_to_host, x)) if type(x) in (list, tuple) else x


def _from_host(x, device, known):
    """Return a result with our tensors in the place of their values, new ones where needed."""
    if isinstance(x, torch.Tensor):
        if id(x) in known or device.type != TYPE:
            return known.get(id(x), x)
        return DeviceTensor(x, device)
    return type(x)(_from_host(y, device, known) for y in x) if type(x) in (list, tuple) else x


def _check_devices(operation, name, args, kwargs, tensors, ours):
    """Raise if an accelerator refuses the devices of the arguments."""
    generator = kwargs.get("generator")
    if generator is not None and generator.device.type != TYPE:
        raise MixedDevicesError(f"{name}: a generator of {generator.device}")
    if name in COPIES:
        return
    devices = {x.device for x in ours}
    others = [x for x in tensors if not isinstance(x, DeviceTensor)]
    if others and (torch.Tag.pointwise in operation.tags or name in INDEXING):
        # Constants: tensors of the CPU without axes, which are only read.
        is_changed = operation._schema.is_mutable and any(x is args[0] for x in others)
        others = others if is_changed else [x for x in others if x.dim()]
    if name in INDEXING and isinstance(args[0], DeviceTensor):  # indices may lie on the CPU
        others = [x for x in others if not any(x is index for index in args[1])]
    if len(devices) > 1 or (ours and others):
        names = sorted({str(x.device) for x in (*ours, *others)})
        raise MixedDevicesError(f"{operation.name()} got tensors on {' and '.join(names)}")


def _output_device(name, args, kwargs, ours):
    if name == "aten::copy_":
        return args[0].device
    if kwargs.get("device") is not None:
        device = torch.device(kwargs["device"])
        return _numbered(device) if device.type == TYPE else device
    return ours[0].device


def _numbered(device):
    """Return a device with its number: without one, it is the current device of the thread."""
    return torch.device(TYPE, _module.current_device() if device.index is None else device.index)


def _count(operation, name, args, kwargs, device):
    """Count an operation, unless it only makes a view or reserves memory."""
    returns = operation._schema.returns
    alias = returns[0].alias_info if returns else None
    if name in EMPTY or (alias is not None and not alias.is_write):
        return
    source = args[1] if name == "aten::copy_" else args[0] if args else None
    place = device if device.type == TYPE else source.device
    _counts.launch(name, place)
    # Between two of the devices nothing waits.
    crosses = name in COPIES and source.device.type != device.type
    by_mask = name in INDEXING and any(
        isinstance(i, DeviceTensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1]
    )
    if by_mask and name != "aten::index" and args[2].dim() == 0:
        by_mask = False  # as masked_fill_
    if name in READS or by_mask or (crosses and not kwargs.get("non_blocking", False)):
        _counts.synchronize(f"{name} to {device}" if crosses else name, place)


class _Construction(TorchFunctionMode):
    """Makes tensors of Python values on the CPU, then moves them: torch cannot do so itself."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function not in (torch.tensor, torch.as_tensor):
            return function(*args, **kwargs)
        kwargs, device = dict(kwargs), kwargs.get("device")
        if device is None or torch.device(device).type != TYPE:
            return function(*args, **kwargs)
        requires_grad = kwargs.pop("requires_grad", False)
        x = function(*args, **(kwargs | {"device": None})).to(device)
        return x.requires_grad_() if requires_grad else x


class _Module:
    """Functions of ``torch.standin``; as long as it is not in use, there is no device."""

    is_in_use = False
    free = 1 << 40  # bytes
    current = threading.local()

    def is_initialized(self):
        return True

    def is_available(self):
        return self.is_in_use

    def device_count(self):
        return COUNT

    def current_device(self):
        return getattr(self.current, "index", 0)

    def set_device(self, device):
        self.current.index = (
            torch.device(TYPE, device).index
            if isinstance(device, int)
            else (torch.device(device).index)
        )

    def synchronize(self, device=None):
        _counts.synchronize("synchronize", _numbered(torch.device(device or TYPE)))

    def empty_cache(self):
        pass

    def mem_get_info(self, device=None):
        return self.free, 1 << 40

    def manual_seed_all(self, seed):
        pass

    def _is_in_bad_fork(self):
        return False

    def get_amp_supported_dtype(self):
        return [torch.bfloat16, torch.float16]


_module = _Module()


@cache
def _register():
    """Register the device type, once in a process, and return what must stay alive."""
    register_backend(TYPE, backend_module=_module)
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(lambda operation, *a, **k: _run(operation, a, k), "PrivateUse1")
    factories = torch.library.Library("aten", "IMPL")
    for name in FACTORIES:
        packet, _, overload = name.partition(".")
        operation = getattr(getattr(torch.ops.aten, packet), overload or "default")
        factories.impl(name, _factory(operation), "PrivateUse1")
    return fallback, factories


def _factory(operation):
    return lambda *args, **kwargs: _run(operation, args, kwargs)


@contextmanager
def stand_in():
    """Make the device available while the context is open."""
    _register()
    with ExitStack() as stack:
        stack.enter_context(_known_to_thread())
        stack.callback(setattr, threading.Thread, "run", threading.Thread.run)
        threading.Thread.run = _known(threading.Thread.run)
        _Module.is_in_use = True
        stack.callback(setattr, _Module, "is_in_use", False)
        yield


@contextmanager
def _known_to_thread():
    """Let this thread work with the device; torch has these settings for each thread."""
    # Threads of torch's gradients know one device of a type written in Python.
    with _Construction(), torch.autograd.set_multithreading_enabled(False):
        yield


def _known(run):
    """Return the function of threads that work with the device too."""

    def run_knowing(thread):
        with _known_to_thread():
            run(thread)

    return run_knowing
