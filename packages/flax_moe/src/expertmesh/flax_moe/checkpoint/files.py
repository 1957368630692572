"""A folder of safetensors files, as Hugging Face publishes models: read by slices, written tensor by tensor.

    config.json, model.safetensors                                           one file
    config.json, model.safetensors.index.json, model-0000{i}-of-0000{n}.safetensors   n files (shards)

A file is the length of a header, the header (JSON: dtype, shape and place of each tensor) and the tensors' bytes. Read
and written here: the `safetensors` library gives NumPy no 8-bit floats, and writes a file from memory as a whole.
"""

import dataclasses
import json
import operator
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["Checkpoint", "Tensors", "read_file", "write_checkpoint", "write_file"]

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}


class Checkpoint(Mapping[str, np.ndarray]):
    """name -> array of a folder of safetensors files, mapped from disk: only what is sliced and copied is read.

    Attributes:
      folder: a pathlib.Path.
      config: the dict of `config.json`.

    Raises:
      ValueError: no safetensors files; a file or a tensor that the index names and that is not there; a file that is
        cut off, whose header is none, or that holds a dtype that NumPy lacks.
      FileNotFoundError: no `config.json`.
    """

    def __init__(self, folder: str | pathlib.Path) -> None:
        self.folder = pathlib.Path(folder)
        self._arrays: dict[str, np.ndarray] = {}
        index = _index(self.folder)
        for path in _files(self.folder, index):
            self._arrays |= read_file(path)
        if missing := [name for name in index if name not in self._arrays]:
            raise ValueError(
                f"Checkpoint: the files of {self.folder} must have all tensors that {INDEX} names; got no {missing[0]} "
                f"in {index[missing[0]]}, {len(missing)} of {len(index)} missing; download the file again"
            )
        self.config: dict[str, Any] = _mapping(self.folder / CONFIG)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def _mapping(path: pathlib.Path, text: bytes | None = None) -> dict[str, Any]:
    """The JSON object of a file, or of this part of it."""
    try:
        found = json.loads(path.read_bytes() if text is None else text)
    except ValueError as error:
        found = error
    if not isinstance(found, dict):
        raise ValueError(
            f"Checkpoint: {path} must have {'a header of ' if text else ''}JSON by names; got {found!r:.80}; "
            "download it again"
        )
    return found


def _index(folder: pathlib.Path) -> dict[str, str]:
    """The file of each tensor, {} where there is no index."""
    path = folder / INDEX
    if not path.exists():
        return {}
    found = _mapping(path).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise ValueError(
            f"Checkpoint: {path} must have a weight_map of names; got {found!r:.80}; download it again"
        )
    return found


def _files(folder: pathlib.Path, index: Mapping[str, str]) -> list[pathlib.Path]:
    """Those of the index, or where there is none all."""
    names = sorted(set(index.values()))
    paths = [folder / name for name in names] or sorted(folder.glob("*.safetensors"))
    missing = [path.name for path in paths if not path.exists()]
    if missing or not paths:
        raise ValueError(
            f"Checkpoint: {folder} must have *.safetensors, all that {INDEX} names; got "
            f"{f'no {missing[0]}, {len(missing)} of {len(paths)} missing' if missing else 'none'}; "
            "download them, or save the model with safe_serialization=True"
        )
    return paths


def read_file(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Each tensor of a safetensors file, on no memory of its own."""
    data = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
    start = 8 + int(data[:8].view("<u8")[0]) if data.size >= 8 else 8
    if start > data.size:
        raise _cut_off(path, start, data.size)
    header = _mapping(path, bytes(data[8:start]))
    header.pop("__metadata__", None)
    for name, about in header.items():
        _check_place(path, name, about)
    end = start + max((about["data_offsets"][1] for about in header.values()), default=0)
    if end > data.size:
        raise _cut_off(path, end, data.size)
    return {name: _tensor(data[start:], about) for name, about in header.items()}


def _check_place(path: pathlib.Path, name: str, about: Any) -> None:
    """Raises ValueError unless a tensor is of a known dtype, and has as many bytes as that and its shape say."""
    try:
        (first, stop), dtype = about["data_offsets"], about["dtype"]
        shape = tuple(map(operator.index, about["shape"]))
        known = dtype in _DTYPES
        fits = not known or 0 <= first == stop - _nbytes(shape, np.dtype(_DTYPES[dtype]))
    except (KeyError, TypeError, ValueError):
        known = fits = False
    if not fits:
        raise ValueError(
            f"Checkpoint: each tensor of {path} must have dtype, shape, and data_offsets of as many bytes; got "
            f"{about!r} of {name}; download it again"
        )
    if not known:
        raise ValueError(
            f"Checkpoint: tensors must be of {', '.join(_DTYPES)}; got {name} of {dtype} in {path}; "
            "convert the checkpoint to one of these"
        )


def _cut_off(path: pathlib.Path, wanted: int, size: int) -> ValueError:
    return ValueError(
        f"Checkpoint: {path} must have the {wanted} bytes that its header names; got {size} bytes; "
        "it was cut off, or is no safetensors file: download it again"
    )


def _tensor(data: np.ndarray, about: dict[str, Any]) -> np.ndarray:
    first, stop = about["data_offsets"]
    numbers: np.ndarray = data[first:stop].view(_DTYPES[about["dtype"]])
    return numbers.reshape(about["shape"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensors:
    """Some tensors that are made together, when they are written.

    Attributes:
      types: name -> (shape, dtype), known beforehand.
      make: their arrays, by name.
    """

    types: dict[str, tuple[tuple[int, ...], np.dtype]]
    make: Callable[[], Mapping[str, np.ndarray]]

    @property
    def nbytes(self) -> int:
        """Of all."""
        return sum(_nbytes(*kind) for kind in self.types.values())


def _nbytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize


def write_checkpoint(
    folder: str | pathlib.Path,
    tensors: Sequence[Tensors],
    config: Mapping[str, Any],
    *,
    max_shard_size: int = 5 * 10**9,
    metadata: Mapping[str, str] | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> None:
    """Writes a folder that `Checkpoint` and `transformers` read; in memory is one Tensors at a time.

    Args:
      folder: a new or empty one.
      tensors: in their order.
      config: of `config.json`.
      max_shard_size: bytes of a file; one Tensors that is larger has a file of its own.
      metadata: of each file's header; None: `{"format": "pt"}`, which `transformers` asks for.
      progress: called with what was written, and which fraction of all bytes there is by now.

    Raises:
      ValueError: the folder is not empty.

    A file has its name only when it is whole, and the index and `config.json` are written last.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ValueError(
            f"write_checkpoint: the folder must be empty; got {folder} with {next(folder.iterdir()).name}; "
            "name a new one"
        )
    report = _Progress(sum(t.nbytes for t in tensors), progress)
    shards = list(_shards(tensors, max_shard_size))
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        name = name if len(shards) > 1 else "model.safetensors"
        _write_file(folder / name, shard, dict(metadata or {"format": "pt"}), report)
        places |= {key: name for t in shard for key in t.types}
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": report.total},
            "weight_map": dict(sorted(places.items())),
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    (folder / CONFIG).write_text(json.dumps(dict(config), indent=2) + "\n")


def write_file(path: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
    """A safetensors file of arrays, which has its name only when it is whole."""
    types = {name: (array.shape, array.dtype) for name, array in arrays.items()}
    tensors = Tensors(types=types, make=lambda: arrays)
    _write_file(path, [tensors], {"format": "pt"}, _Progress(tensors.nbytes, None))


@dataclasses.dataclass
class _Progress:
    total: int
    call: Callable[[str, float], None] | None
    done: int = 0

    def wrote(self, what: str, nbytes: int) -> None:
        self.done += nbytes
        if self.call is not None:
            self.call(what, self.done / max(self.total, 1))


def _shards(tensors: Iterable[Tensors], max_size: int) -> Iterator[list[Tensors]]:
    shard: list[Tensors] = []
    size = 0
    for each in tensors:
        if shard and size + each.nbytes > max_size:
            yield shard
            shard, size = [], 0
        shard.append(each)
        size += each.nbytes
    yield shard


def _write_file(
    path: pathlib.Path, shard: list[Tensors], metadata: dict[str, str], report: _Progress
) -> None:
    types = {name: kind for tensors in shard for name, kind in tensors.types.items()}
    offsets = _offsets(types)
    header = json.dumps({"__metadata__": metadata} | _header(types, offsets)).encode()
    header += b" " * (-len(header) % 8)
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        for tensors in shard:
            made = dict(tensors.make())
            while made:  # each is let go of before the next is made
                name, array = made.popitem()
                _check_type(name, array, types[name])
                stream.seek(8 + len(header) + offsets[name])
                stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
                del array
            report.wrote(next(iter(tensors.types)), tensors.nbytes)
    part.replace(path)


def _offsets(types: dict[str, tuple[tuple[int, ...], np.dtype]]) -> dict[str, int]:
    """Of each tensor; those of large numbers first, so that each begins at a multiple of its numbers' size."""
    offsets, at = {}, 0
    for name, kind in sorted(types.items(), key=lambda item: -item[1][1].itemsize):
        offsets[name], at = at, at + _nbytes(*kind)
    return offsets


def _header(
    types: dict[str, tuple[tuple[int, ...], np.dtype]], offsets: dict[str, int]
) -> dict[str, Any]:
    return {
        name: {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [offsets[name], offsets[name] + _nbytes(shape, dtype)],
        }
        for name, (shape, dtype) in types.items()
    }


def _check_type(name: str, array: np.ndarray, kind: tuple[tuple[int, ...], np.dtype]) -> None:
    if (array.shape, array.dtype) != kind:
        raise ValueError(
            f"write_checkpoint: {name} must be {kind[1]}{list(kind[0])}, as its types say; "
            f"got {array.dtype}{list(array.shape)}; make it so"
        )
