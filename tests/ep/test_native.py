"""The native part of "nvlink" where there is no GPU: what it says of itself, and what it compiles once."""

import dataclasses
import importlib
import pathlib
from types import SimpleNamespace

import pytest

from expertmesh.core import nvrtc
from expertmesh.ep import _native, is_supported, raise_stall
from expertmesh.ep._native import build, kernels
from expertmesh.ep.transports import nvlink

GPU = SimpleNamespace(platform="gpu", device_kind="NVIDIA A GPU")


@pytest.fixture
def capability(monkeypatch):
    """Sets the compute capability of a GPU that is not here."""
    return lambda value: monkeypatch.setattr(nvlink, "compute_capability", lambda: value)


def test_the_extension_runs_where_there_is_no_cuda():
    host = _native.host()
    if isinstance(host, str):
        pytest.skip(host)
    for stages in (getattr(host, name) for name in _native.TARGETS):
        assert set(stages) == {"prepare", "initialize", "execute"}
    assert len(set(host.KERNELS)) == 2 + 3 * 3 * 2 + 2
    assert host.window_bytes() == _native.window_bytes() == 0
    assert host.take_stall() is None
    raise_stall()


def without(monkeypatch, name):
    def refuse(wanted, *arguments):
        if wanted == name:
            raise ImportError(f"No module named {wanted}")
        return real(wanted, *arguments)

    real = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", refuse)


def test_without_the_extension_the_reason_has_the_remedy(monkeypatch, capability):
    without(monkeypatch, "expertmesh.ep._native._host")
    monkeypatch.setattr(_native, "host", _native.host.__wrapped__)
    capability(9.0)
    supported, reason = is_supported("nvlink", GPU)
    assert not supported and "not built" in reason and "python -m expertmesh.ep._native" in reason
    assert _native.take_stall() is None and _native.window_bytes() == 0
    with pytest.raises(RuntimeError, match="'nvlink' cannot run: the extension"):
        _native.load.__wrapped__("sm_90a")


@pytest.mark.parametrize(
    "change, reason",
    [({"SOURCES": "other"}, "other sources"), ({"FFI_VERSION": (0, 99)}, "newer jaxlib")],
)
def test_an_extension_that_does_not_fit(change, reason, monkeypatch):
    found = {"SOURCES": build.fingerprint(), "FFI_VERSION": (0, 1)}
    monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace(**found))
    assert not isinstance(_native.host.__wrapped__(), str)
    found |= change
    assert reason in _native.host.__wrapped__()


def test_older_gpus_are_named(capability):
    capability(8.0)
    assert is_supported("nvlink", GPU) == (
        False,
        "its kernels need compute capability 9.0, and the GPU has 8.0",
    )


def test_what_is_missing_has_a_remedy(monkeypatch):
    monkeypatch.setattr(nvrtc, "library", lambda: None)
    assert "NVRTC" in kernels.find_headers()
    monkeypatch.setattr(nvrtc, "library", lambda: "libnvrtc.so")
    monkeypatch.setattr(kernels, "find_cuda", lambda: None)
    assert "nvidia-cuda-runtime" in kernels.find_headers()
    monkeypatch.setattr(kernels, "find_cuda", lambda: pathlib.Path())
    monkeypatch.setattr(nvrtc, "in_wheels", lambda pattern: [])
    assert "nvidia-nccl-cu13" in kernels.find_headers()


@pytest.fixture
def headers(tmp_path):
    """Of a toolkit and NCCL 2.28.9 that are not here."""
    (tmp_path / "nccl_device/impl").mkdir(parents=True)
    for name in ("cuda_bf16.h", "nccl_device/impl/core__types.h"):
        (tmp_path / name).touch()
    version = "#define NCCL_MAJOR 2\n#define NCCL_MINOR 28\n#define NCCL_PATCH 9\n"
    (tmp_path / "nccl.h").write_text(version)
    return kernels.Headers(tmp_path, tmp_path)


def test_peers_are_asked_on_the_device_below_nccl_2_29(headers):
    assert headers.nccl_version == 22809
    assert "Query" in kernels.peers("sm_90a", headers).source
    text = (headers.nccl / "nccl.h").read_text()
    (headers.nccl / "nccl.h").write_text(text.replace("28", "29"))
    assert kernels.peers("sm_90a", headers) is None


def test_a_program_is_compiled_once_for_a_compiler_and_a_gpu(headers, monkeypatch, tmp_path):
    made = []

    def compile_program(source, *options, headers, kernels):
        made.append(options)
        return nvrtc.Compiled(b"code\n\0more", ("_Z1f", "_Z1g"))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(nvrtc, "compile_program", compile_program)
    monkeypatch.setattr(nvrtc, "version", lambda: "13.1")
    program = kernels.exchange("sm_90a", headers, ["f", "g"])
    for _ in range(2):
        compiled = kernels.compile_once(program)
        assert compiled == nvrtc.Compiled(b"code\n\0more", ("_Z1f", "_Z1g"))
    assert len(made) == 1
    kernels.compile_once(kernels.exchange("sm_100a", headers, ["f", "g"]))
    kernels.compile_once(dataclasses.replace(program, headers=(("bulk.h", "changed"),)))
    monkeypatch.setattr(nvrtc, "version", lambda: "13.2")
    kernels.compile_once(program)
    assert len(made) == 4
    assert len(list((tmp_path / "cache/expertmesh").glob("*[!k]"))) == 4
