"""A TPU that computes on the CPU: an out-of-tree device under the name that torch-tpu gives it, in Python alone.

Its tensors are tensors of torch's PrivateUse1 backend, whose memory is the host's. Each operation runs on the CPU's
kernels, with its arguments as CPU tensors of the same memory. So results are those of the CPU to the bit, and views,
in-place operations, autograd and autocast are torch's own for such a device. What a TPU cannot do, or does only by
waiting for the device, is an error here.

`REFUSED` has a source for each refusal: the wheel of torch-tpu 0.2.0 (paths in it, texts of its libraries).
`GUESSED` has what neither its code nor its documentation says.
"""

import functools
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "tpu"
BACKEND = "tpu_dist"  # of process groups: torch_tpu/_loader.py, _init_device_impl

# Operations that are refused at any time -> why, and where torch-tpu says so.
REFUSED = {
    "nonzero": "its shape depends on values: csrc/ops/nonzero/nonzero_aten_kernels.cc reads GetNumNonZeroElements",
    "masked_select": "its shape depends on values (as nonzero)",
    "_unique2": "its shape depends on values (as nonzero)",
    "unique_dim": "its shape depends on values (as nonzero)",
    "unique_consecutive": "its shape depends on values (as nonzero)",
    "_sparse_coo_tensor_with_dims_and_tensors": "TpuSparseOpFallback: sparse operators are not supported on TPU yet",
    "_to_sparse": "TpuSparseOpFallback: sparse operators are not supported on TPU yet",
    "bincount": "its shape depends on values (as nonzero)",
}
# Operations that are refused in a training step: all of them "force" a compilation and a synchronization
# (torch_tpu/_internal/sync/__init__.py: accessing the data of a deferred tensor, through .cpu(), .item(), or similar).
READS = frozenset({"_local_scalar_dense", "item", "equal", "is_nonzero"})
# What is refused here although torch-tpu does not say that it is; or done in a way that it may not be.
GUESSED = (
    "float64 is refused: the wheel has float64 (ElementType F64), which TPUs only emulate",
    "memory is not pinned: the wheel registers no host allocator by name",
    "there are no fused optimizer kernels: the wheel names none (_fused_adamw_, _fused_sgd_)",
    "random numbers are the CPU's, so that runs can be compared; a TPU has a generator of its own",
    "one process has one device, whose index is 0",
)


class Refused(RuntimeError):
    """What a TPU would not do, or only after a wait."""


class Device:
    """What has happened on the device."""

    def __init__(self):
        self.in_step = False
        self.signatures: set[Any] = set()  # operations with shapes and types: each would be compiled once


STATE = Device()
_OF_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_SET = torch.ops.aten.set_.source_Storage_storage_offset


def is_ours(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == NAME


def host_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor of the same memory."""
    storage: Any = tensor.untyped_storage()
    host = torch.empty(0, dtype=tensor.dtype)
    return host.set_(storage.host, tensor.storage_offset(), tensor.size(), tensor.stride())


def tensor_of(host: torch.Tensor, storages: dict[int, Any]) -> torch.Tensor:
    """Return a tensor of the device with the memory of a CPU tensor.

    Args:
        storages: storages of the device by the address of the host's, for views; new ones are added.
    """
    if host.dtype in (torch.float64, torch.complex128):
        raise Refused(f"{host.dtype} on the device")
    return place_in_memory(torch._C._acc.create_empty_tensor((0,), host.dtype), host, storages)


def place_in_memory(tensor: torch.Tensor, host: torch.Tensor, storages: dict[int, Any]) -> torch.Tensor:
    """Give a tensor of the device the memory, shape and strides of a CPU tensor."""
    memory: Any = host.untyped_storage()
    if memory._cdata not in storages:
        size = memory.nbytes()
        storage: Any = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), torch.device(NAME, 0), size)
        storage.host = memory  # lives as long as the device's storage
        storages[memory._cdata] = storage
    place = host.storage_offset(), host.size(), host.stride()
    return _SET.redispatch(_OF_CPU, tensor, storages[memory._cdata], *place)


def copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy between or on devices; `aten::_copy_from`."""
    if is_ours(target):
        host_of(target).copy_(host_of(source) if is_ours(source) else source)
        return target
    if STATE.in_step:
        raise Refused("a copy to the host in a training step")
    return target.copy_(host_of(source))


def compute(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run any operation on the CPU; the kernel of the device for all of them."""
    name = op.overloadpacket.__name__
    if name == "_copy_from":
        return copy(*args, **kwargs)
    if name in REFUSED:
        raise Refused(f"{name}: {REFUSED[name]}")
    if name.startswith("_fused_"):
        raise NotImplementedError(f"{name} has no kernel on the device")
    if name in READS and STATE.in_step:
        raise Refused(f"{name} in a training step")
    takes_tensor = [str(argument.type) == "Tensor" for argument in op._schema.arguments]
    pairs = zip(takes_tensor, args, strict=False)
    args = tuple(torch.tensor(x) if is_tensor and isinstance(x, int | float) else x for is_tensor, x in pairs)
    flat, spec = pytree.tree_flatten((args, kwargs))
    storages: dict[int, Any] = {}
    tensors: dict[int, torch.Tensor] = {}  # the device's tensor of each CPU tensor
    hosts = []
    for value in flat:
        if is_ours(value):
            host = host_of(value)
            storages[host.untyped_storage()._cdata] = value.untyped_storage()
            tensors[id(host)] = value
            value = host
        elif isinstance(value, torch.device) and value.type == NAME:
            value = torch.device("cpu")
        hosts.append(value)
    signature = [
        (*value.shape, value.dtype) if isinstance(value, torch.Tensor) else str(type(value)) for value in hosts
    ]
    STATE.signatures.add((str(op), *signature))
    args, kwargs = pytree.tree_unflatten(hosts, spec)
    results, spec = pytree.tree_flatten(op(*args, **kwargs))
    for host in hosts:
        if id(host) in tensors and host.size() != tensors[id(host)].size():  # an `out` tensor was resized
            place_in_memory(tensors[id(host)], host, {})
    if name in READS:
        return pytree.tree_unflatten(results, spec)
    wrapped = []
    for result in results:
        if isinstance(result, torch.Tensor):
            result = tensors[id(result)] if id(result) in tensors else tensor_of(result, storages)
        wrapped.append(result)
    return pytree.tree_unflatten(wrapped, spec)


def convolve(*args: Any) -> Any:
    return compute(torch.ops.aten.convolution.default, *args)


def convolve_backward(gradient: Any, inputs: Any, weight: Any, *args: Any) -> Any:
    return compute(torch.ops.aten.convolution_backward.default, gradient, inputs, weight, [len(weight)], *args)


class Stream:
    """Everything is done at once, so there is nothing to wait for."""

    device_type, device_index, stream_id = 20, 0, 0

    def __init__(self, *_: Any, **__: Any):
        self.device = torch.device(NAME, 0)

    def wait_stream(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event or Event()


class Event:
    def __init__(self, *_: Any, **__: Any): ...
    def record(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


class Module:
    """`torch.tpu`, with what torch asks of such a module (torch/utils/backend_registration.py)."""

    Stream, Event = Stream, Event

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None: ...
    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None: ...
    def manual_seed(self, seed: int) -> None: ...
    def get_device_name(self, device: Any = None) -> str:
        return "simulated TPU"

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    def current_stream(self, device: Any = None) -> Stream:
        return Stream()

    @contextmanager
    def stream(self, stream: Any):
        yield

    @contextmanager
    def device(self, device: Any):
        yield

    def synchronize(self, device: Any = None) -> None: ...
    def empty_cache(self) -> None: ...


_LIBRARIES: list[torch.library.Library] = []


def register() -> None:
    """Make the device known to torch, as torch-tpu does when torch is imported on a machine with a TPU."""
    module = Module()
    _setup_privateuseone_for_python_backend(NAME, backend_module=module)
    library = torch.library.Library("_", "IMPL")
    library.fallback(compute, "PrivateUse1")
    convolutions = torch.library.Library("aten", "IMPL")  # torch leaves these to the device
    convolutions.impl("convolution_overrideable", convolve, "PrivateUse1")
    convolutions.impl("convolution_backward_overrideable", convolve_backward, "PrivateUse1")
    _LIBRARIES.extend([library, convolutions])
    torch.accelerator.synchronize = module.synchronize  # the C++ function asks a guard that Python cannot give
    dist.Backend.register_backend(BACKEND, create_process_group, devices=[NAME])


@contextmanager
def step():
    """A training step: nothing is read until it ends."""
    STATE.in_step = True
    try:
        yield
    finally:
        STATE.in_step = False


class ProcessGroup(dist.ProcessGroup):
    """Collectives of the device, over gloo on its memory."""

    def __init__(self, gloo: Any, rank: int, size: int):
        super().__init__(rank, size)
        self.gloo = gloo
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)

    def getBackendName(self) -> str:
        return BACKEND


def _forward(name: str):
    def collective(self: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map(lambda x: host_of(x) if is_ours(x) else x, (args, kwargs))
        return getattr(self.gloo, name)(*args, **kwargs)

    return collective


for _name in (
    "allgather allreduce allreduce_coalesced alltoall alltoall_base barrier broadcast gather reduce reduce_scatter "
    "scatter send recv _allgather_base _reduce_scatter_base allgather_into_tensor_coalesced "
    "reduce_scatter_tensor_coalesced"
).split():
    setattr(ProcessGroup, _name, _forward(_name))


def create_process_group(store: Any, rank: int, size: int, timeout: Any) -> ProcessGroup:
    return ProcessGroup(dist.ProcessGroupGloo(store, rank, size, timeout), rank, size)


def watch_steps() -> None:
    """Refuse reads in every optimizer step of a run but the first.

    The batch of the first is drawn. In the second, DistributedDataParallel reads its order of parameters, once (torch's
    `Reducer::rebuild_buckets`).
    """
    from hf_vit.training.trainer import Trainer

    train_step = Trainer.train_step

    @functools.wraps(train_step)
    def watched(self: Trainer, number: int) -> None:
        if number == 0 or (number == 1 and self.accelerator.num_processes > 1):
            train_step(self, number)
            return
        with step():
            train_step(self, number)

    Trainer.train_step = watched
