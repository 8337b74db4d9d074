"""Memory as a tensor without torch or a copy: DLPack over an address, for `torch.from_dlpack(Exported(...))` or
`numpy.from_dlpack(...)`, as uint8.

Source: the DLPack specification, `dlpack.h` (DLManagedTensor, the unversioned form, which every reader knows).
"""

import ctypes
from dataclasses import dataclass
from typing import Any

CPU, CUDA = 1, 2  # DLDeviceType
_UINT, _BITS = 1, 8  # DLDataTypeCode kDLUInt


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_alive: dict[int, tuple[Any, ...]] = {}  # by address of a _Managed, until its reader deletes it


def _delete(address: int) -> None:
    _alive.pop(address, None)


_Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_deleter = _Destructor(_delete)
_NAME = b"dltensor"
_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, _Destructor]
_is_unread = ctypes.pythonapi.PyCapsule_IsValid
_is_unread.restype, _is_unread.argtypes = ctypes.c_int, [ctypes.c_void_p, ctypes.c_char_p]
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]


def _drop(capsule: int) -> None:
    """A read capsule is renamed and belongs to its reader."""
    if _is_unread(capsule, _NAME):
        _delete(_pointer(capsule, _NAME))


_destructor = _Destructor(_drop)


@dataclass(frozen=True, slots=True)
class Exported:
    """uint8 in one dimension; every tensor keeps `owner` alive."""

    address: int
    num_bytes: int
    owner: object
    device_type: int = CPU
    device_id: int = 0

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device_type, self.device_id

    def __dlpack__(self, **_: Any) -> Any:
        """Ignore the reader's stream, version and device: no work is under way here."""
        shape = (ctypes.c_int64 * 1)(self.num_bytes)
        managed = _Managed()
        managed.tensor = _Tensor(
            self.address, self.device_type, self.device_id, 1, _UINT, _BITS, 1, shape, None, 0
        )  # fmt: skip
        managed.deleter = ctypes.cast(_deleter, ctypes.c_void_p)
        at = ctypes.addressof(managed)
        _alive[at] = (managed, shape, self.owner)
        return _new(at, _NAME, _destructor)
