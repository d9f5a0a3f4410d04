"""A GGUF file, memory-mapped: metadata by key, tensors by name.

The header is parsed here, over the map, because every length in it must be checked against the file before it is used
(a damaged count must be an error line, not minutes of work or an exhausted memory), and because `gguf.GGUFReader` takes
three seconds over a 49,152-token vocabulary, which a user waits for. The types' block sizes and the dequantisation are
those of the `gguf` package. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import itertools
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from .errors import ModelFileError

T = TypeVar("T")

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # version 1 had 32-bit counts and no longer occurs
MAX_DIMS = 4
MAX_NAME_BYTES = 65535
STRING, ARRAY, BOOL = 8, 9, 7
INTEGERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 10: "<u8", 11: "<i8"}
SCALARS = {**INTEGERS, 6: "<f4", BOOL: "?", 12: "<f8"}
MIN_KEY_BYTES = 8 + 4 + 1  # the least that a metadata entry, and a tensor's entry, can occupy
MIN_TENSOR_BYTES = 8 + 4 + 4 + 8


@dataclass(frozen=True)
class TensorInfo:
    """One tensor's entry: `shape` is logical and row-major ([out, in] for a matrix), `offset` is in the file."""

    name: str
    type_name: str  # gguf's name: "F32", "Q4_1", ...
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def _quote(name: str) -> str:
    """A name for a message; in a damaged file it can be megabytes long."""
    return repr(name if len(name) <= 64 else name[:61] + "...")


class _Cursor:
    """A position in the header; every read is checked against the end of the file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.offset = data, path, 0

    def fail(self, problem: str) -> ModelFileError:
        return ModelFileError(self.path, problem)

    def take(self, nbytes: int, what: str) -> int:
        """Moves past `nbytes` and returns where they start."""
        start = self.offset
        if nbytes > len(self.data) - start:
            left = len(self.data) - start
            raise self.fail(f"truncated: {what} at byte {start} needs {nbytes} bytes, {left} are left")
        self.offset = start + nbytes
        return start

    def u32(self, what: str) -> int:
        return int(struct.unpack_from("<I", self.data, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(struct.unpack_from("<Q", self.data, self.take(8, what))[0])

    def string(self, what: str) -> str:
        size = self.u64(f"the length of {what}")
        start = self.take(size, what)
        try:
            return self.data[start : start + size].decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} at byte {start} is not UTF-8 text") from None

    def name(self, what: str) -> str:
        """A key or a tensor's name, which the format limits in length."""
        name = self.string(what)
        if not name or len(name) > MAX_NAME_BYTES:
            raise self.fail(f"corrupt: {what} is {len(name)} characters long")
        return name

    def value(self, kind: int, what: str) -> Any:
        """A metadata value: int, float, bool, str, a list of str, or a numpy array of numbers."""
        if kind == STRING:
            return self.string(what)
        if kind == ARRAY:
            return self.array(what)
        return self.numbers(kind, 1, what)[0].item()

    def numbers(self, kind: int, count: int, what: str) -> np.ndarray:
        if kind not in SCALARS:
            raise self.fail(f"{what} has the unknown value type {kind}")
        dtype = np.dtype(SCALARS[kind])
        start = self.take(count * dtype.itemsize, what)
        if kind == BOOL:
            return np.frombuffer(self.data, np.uint8, count, start) != 0
        return np.frombuffer(self.data, dtype, count, start).copy()

    def array(self, what: str) -> list[str] | np.ndarray:
        kind, count = self.u32(f"the element type of {what}"), self.u64(f"the length of {what}")
        if kind != STRING:
            return self.numbers(kind, count, what)
        if count * 8 > len(self.data) - self.offset:
            raise self.fail(f"truncated: {what} claims {count} strings, more than the rest of the file can hold")
        return self.strings(count, what)

    def strings(self, count: int, what: str) -> list[str]:
        """`string` in a loop, written flat: a vocabulary has 100,000 of them and a user waits for it."""
        data, position, end, unpack = self.data, self.offset, len(self.data), struct.Struct("<Q").unpack_from
        result = []
        for i in range(count):
            size = unpack(data, position)[0] if position + 8 <= end else end
            position += 8
            if size > end - position:
                raise self.fail(f"truncated: entry {i} of {what} at byte {position} ends past the end of the file")
            try:
                result.append(str(data[position : position + size], "utf-8"))
            except UnicodeDecodeError:
                raise self.fail(f"entry {i} of {what} at byte {position} is not UTF-8 text") from None
            position += size
        self.offset = position
        return result


class GGUFFile:
    """A memory-mapped GGUF file.

    `metadata` maps keys to int, float, bool, str, list[str] or a numpy array; `tensors` maps names to `TensorInfo`.
    Raises `ModelFileError` for every way in which the file can be unusable.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._data = _map(self.path)
        cursor = _Cursor(self._data, self.path)
        tensor_count, key_count = _read_preamble(cursor)
        self.metadata = _read_metadata(cursor, key_count)
        self.tensors = _read_tensor_table(cursor, tensor_count, self.get("general.alignment", int, 32))
        self._bytes = np.frombuffer(self._data, np.uint8)

    def require(self, key: str, kind: type[T]) -> T:
        """The metadata value of `key`, which must exist and be of `kind` (int is accepted for float)."""
        if key not in self.metadata:
            raise ModelFileError(self.path, f"the metadata has no {key}")
        value = self.metadata[key]
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            got = type(value).__name__
            raise ModelFileError(self.path, f"the metadata's {key} is of type {got}, expected {kind.__name__}")
        return value

    def get(self, key: str, kind: type[T], default: T) -> T:
        """The metadata value of `key`, or `default` where the file has none."""
        return self.require(key, kind) if key in self.metadata else default

    def tensor(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise ModelFileError(self.path, f"the file has no tensor {name}")
        return self.tensors[name]

    def raw(self, name: str) -> np.ndarray:
        """The stored bytes of a tensor, uint8 [rows, bytes per row]: a view of the map, nothing is copied.

        Writing to it changes this process's private copy only, never the file.
        """
        info = self.tensor(name)
        rows = math.prod(info.shape[:-1])
        return self._bytes[info.offset : info.offset + info.nbytes].reshape(rows, info.nbytes // rows)

    def float32(self, name: str) -> np.ndarray:
        """The tensor dequantised to float32, in its logical shape; exact for every type."""
        info = self.tensor(name)
        try:
            values = dequantize(self.raw(name), GGMLQuantizationType[info.type_name])
        except NotImplementedError:
            problem = f"tensor {name} is stored as {info.type_name}, which cannot be read"
            raise ModelFileError(self.path, problem) from None
        return np.ascontiguousarray(values, np.float32).reshape(info.shape)


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            if path.stat().st_size < 4 or file.read(4) != MAGIC:
                raise ModelFileError(path, "not a GGUF file")
            # Private copy-on-write pages: tensors can be handed to torch, which wants writable memory, without a copy.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise ModelFileError(path, (error.strerror or str(error)).lower()) from None


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    cursor.take(4, "the magic number")
    version = cursor.u32("the version")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        problem = "a big-endian GGUF file" if swapped in VERSIONS else f"GGUF version {version}"
        raise cursor.fail(f"{problem}: only little-endian versions {VERSIONS[0]} and {VERSIONS[1]} can be read")
    tensors, keys = cursor.u64("the tensor count"), cursor.u64("the metadata count")
    if keys * MIN_KEY_BYTES + tensors * MIN_TENSOR_BYTES > len(cursor.data):
        raise cursor.fail(f"truncated or corrupt: it claims {keys} metadata entries and {tensors} tensors")
    return tensors, keys


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.name("a metadata key")
        if key in metadata:
            raise cursor.fail(f"corrupt: the metadata key {_quote(key)} occurs twice")
        kind = cursor.u32(f"the type of {_quote(key)}")
        metadata[key] = cursor.value(kind, f"the metadata value {_quote(key)}")
    return metadata


def _read_tensor_table(cursor: _Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    if alignment < 1 or alignment & (alignment - 1):
        raise cursor.fail(f"corrupt: general.alignment is {alignment}, not a power of two")
    entries = [_read_tensor_entry(cursor) for _ in range(count)]
    start = -(-cursor.offset // alignment) * alignment  # the data begins at the next aligned byte
    tensors: dict[str, TensorInfo] = {}
    for entry in entries:
        if entry.name in tensors:
            raise cursor.fail(f"corrupt: the tensor {_quote(entry.name)} occurs twice")
        end = start + entry.offset + entry.nbytes
        if entry.offset % alignment:
            raise cursor.fail(f"corrupt: tensor {_quote(entry.name)} is not aligned to {alignment} bytes")
        if end > len(cursor.data):
            size = len(cursor.data)
            raise cursor.fail(f"truncated: tensor {_quote(entry.name)} ends at byte {end}, the file at {size}")
        tensors[entry.name] = TensorInfo(entry.name, entry.type_name, entry.shape, start + entry.offset, entry.nbytes)
    _check_overlap(cursor, list(tensors.values()))
    return tensors


def _read_tensor_entry(cursor: _Cursor) -> TensorInfo:
    """One entry of the table, its offset still relative to the data section."""
    name = cursor.name("a tensor name")
    dims = cursor.u32(f"the dimension count of {_quote(name)}")
    if not 1 <= dims <= MAX_DIMS:
        raise cursor.fail(f"corrupt: tensor {_quote(name)} has {dims} dimensions")
    stored = [cursor.u64(f"a dimension of {_quote(name)}") for _ in range(dims)]
    shape = tuple(reversed(stored))  # the file has the fastest dimension first
    code, offset = cursor.u32(f"the type of {_quote(name)}"), cursor.u64(f"the offset of {_quote(name)}")
    if code not in GGMLQuantizationType._value2member_map_:
        raise cursor.fail(f"tensor {_quote(name)} has the unknown type {code}")
    kind = GGMLQuantizationType(code)
    per_block, block_bytes = GGML_QUANT_SIZES[kind]
    if min(shape) < 1 or shape[-1] % per_block:
        raise cursor.fail(f"corrupt: tensor {_quote(name)} of type {kind.name} has the shape {list(shape)}")
    return TensorInfo(name, kind.name, shape, offset, math.prod(shape) // per_block * block_bytes)


def _check_overlap(cursor: _Cursor, tensors: list[TensorInfo]) -> None:
    tensors.sort(key=lambda t: t.offset)
    for before, after in itertools.pairwise(tensors):
        if before.offset + before.nbytes > after.offset:
            raise cursor.fail(f"corrupt: the data of tensors {_quote(before.name)} and {_quote(after.name)} overlap")
