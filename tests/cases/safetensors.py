"""The safetensors format by hand: the header's size, the header, the bytes."""

import json

import ml_dtypes
import numpy as np

NAMES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
}


def write_file(path, arrays):
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, array in arrays.items():
        place = [at, at + array.nbytes]
        dtype = NAMES[array.dtype.name]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": place}
        at += array.nbytes
    text = json.dumps(header).encode()
    data = b"".join(array.tobytes() for array in arrays.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_folder(folder, config, *files):
    """`config.json`, files of arrays, and where there are several an index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    places = {}
    for i, arrays in enumerate(files):
        write_file(folder / f"weights-{i}.safetensors", arrays)
        places |= {name: f"weights-{i}.safetensors" for name in arrays}
    if len(files) > 1:
        text = json.dumps({"metadata": {}, "weight_map": places})
        (folder / "model.safetensors.index.json").write_text(text)
    return folder


def read_folder(folder):
    """(name -> array of all files, name -> file)."""
    dtypes = {
        short: np.dtype(getattr(ml_dtypes, long, None) or long) for long, short in NAMES.items()
    }
    arrays, files = {}, {}
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, about in json.loads(data[8:start]).items():
            if name == "__metadata__":
                assert about == {"format": "pt"}
                continue
            first, stop = about["data_offsets"]
            numbers = np.frombuffer(data[start + first : start + stop], dtypes[about["dtype"]])
            assert first % numbers.itemsize == 0 and start % 8 == 0
            arrays[name], files[name] = numbers.reshape(about["shape"]), path.name
    return arrays, files
