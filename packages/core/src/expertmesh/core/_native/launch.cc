// The module `_host`: XLA's custom call that launches one kernel, whose machine code is an attribute of the call.
//
//   initialize: loads the machine code, once for each device of the process
//   execute:    makes TMA's descriptors of this call's buffers, zeroes those that ask for it, and launches
//
// An execution allocates nothing and waits for nothing, so that it can be part of a command buffer. Kernels are known by
// the digest of all that loading depends on; launcher.py makes both.

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "driver.h"
#include "unpack.h"
#include "xla/ffi/api/ffi.h"

namespace expertmesh {

// `shape`: of the grid, of a cluster, then threads of a block and bytes of shared memory.
// `parameters`: one after the other, each a kind and what follows it; see `Parameters`.
struct Attributes {
  std::string_view name, image, digest;
  xla::ffi::Span<const int64_t> shape, parameters;
};

}  // namespace expertmesh

using xla::ffi::StructMember;
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(expertmesh::Attributes, StructMember<std::string_view>("name"),
                                      StructMember<std::string_view>("image"),
                                      StructMember<std::string_view>("digest"),
                                      StructMember<xla::ffi::Span<const int64_t>>("shape"),
                                      StructMember<xla::ffi::Span<const int64_t>>("parameters"));

namespace expertmesh {
namespace {

namespace ffi = xla::ffi;
namespace py = pybind11;
using Args = ffi::RemainingArgs;
using Rets = ffi::RemainingRets;

// One kernel on the devices of this process.
struct Loaded {
  Driver::Kernel kernel = nullptr;
  std::map<int, Driver::Function> functions;  // by device
};

struct State {
  std::mutex mutex;
  std::map<std::string, Loaded, std::less<>> kernels;  // by digest
};

State& Process() {
  static State* state = new State;  // never destroyed: devices may still run at exit
  return *state;
}

// A device's primary context, which is XLA's, while this lives.
class InContext {
 public:
  explicit InContext(int device) {
    Driver::Context context = nullptr;
    error = Cuda().DeviceGet(&handle, device);
    if (!error) error = Cuda().Retain(&context, handle);
    retained_ = !error;
    if (!error) error = Cuda().Push(context);
    pushed_ = !error;
  }
  ~InContext() {
    Driver::Context context;
    if (pushed_) Cuda().Pop(&context);
    if (retained_) Cuda().Release(handle);
  }
  InContext(const InContext&) = delete;
  InContext& operator=(const InContext&) = delete;
  int error = 0, handle = 0;

 private:
  bool retained_ = false, pushed_ = false;
};

struct Wanted {
  std::string_view name, digest;
  int64_t shared;
};

void Check(int error) {
  if (error) throw std::runtime_error(Cuda().Text(error));
}

// Machine code until `kept`: unloaded where it has no such kernel, or where another thread was faster.
struct Library {
  explicit Library(const void* code) {
    Check(Cuda().LibraryLoad(&library, code, nullptr, nullptr, 0, nullptr, nullptr, 0));
  }
  ~Library() {
    if (!kept) Cuda().LibraryUnload(library);
  }
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  Driver::Library library = nullptr;
  bool kept = false;
};

// The kernel of the process, loaded if it is not there yet; `code` makes the machine code.
template <typename Code>
Driver::Kernel KernelOf(const Wanted& wanted, Code code) {
  State& state = Process();
  {
    std::lock_guard<std::mutex> lock(state.mutex);
    const auto found = state.kernels.find(wanted.digest);
    if (found != state.kernels.end()) return found->second.kernel;
  }
  Library made(code().data());
  Driver::Kernel kernel = nullptr;
  Check(Cuda().LibraryKernel(&kernel, made.library, std::string(wanted.name).c_str()));
  std::lock_guard<std::mutex> lock(state.mutex);
  const auto [at, inserted] = state.kernels.try_emplace(std::string(wanted.digest), Loaded{kernel, {}});
  made.kept = inserted;
  return at->second.kernel;
}

// The function on a device, loaded if it is not there yet; `code` makes the machine code. Throws what went wrong.
// Nothing is locked while it loads: others may have to launch what loading waits for.
template <typename Code>
Driver::Function FunctionOn(int device, const Wanted& wanted, Code code) {
  const Driver& cuda = Cuda();
  if (!cuda.problem.empty()) throw std::runtime_error(cuda.problem);
  State& state = Process();
  {
    std::lock_guard<std::mutex> lock(state.mutex);
    const auto found = state.kernels.find(wanted.digest);
    if (found != state.kernels.end()) {
      const auto here = found->second.functions.find(device);
      if (here != found->second.functions.end()) return here->second;
    }
  }
  const InContext context(device);
  Check(context.error);
  const Driver::Kernel kernel = KernelOf(wanted, code);
  Check(cuda.SetAttribute(Driver::kMaxDynamicSharedBytes, static_cast<int>(wanted.shared), kernel, context.handle));
  Driver::Function function = nullptr;
  Check(cuda.GetFunction(&function, kernel));
  // Not at its first launch, which may be recorded.
  if (cuda.LoadFunction != nullptr) Check(cuda.LoadFunction(function));
  std::lock_guard<std::mutex> lock(state.mutex);
  return state.kernels.find(wanted.digest)->second.functions.try_emplace(device, function).first->second;
}

Driver::Function FunctionOf(int device, const Attributes& a) {
  return FunctionOn(device, Wanted{a.name, a.digest, a.shape[7]}, [&] { return Unpack(a.image); });
}

ffi::Error Fail(const Attributes& a, const std::string& what) {
  return ffi::Error(ffi::ErrorCode::kInternal,
                    "expertmesh: kernel " + std::string(a.name) + " cannot be launched: " + what);
}

struct Buffer {
  void* data;
  size_t bytes;
};

// What the kernel is called with. Kinds: 0 a null pointer; 1 a buffer, by its number among operands and results; 2 a
// word of 32 bits and 3 one of 64, by value; 4 TMA's descriptor of a buffer: its number, element type, swizzle and rank,
// then sizes, strides in bytes (of all dimensions but the last, first ones first) and the box; 5 a buffer as 1, of zeros
// when the kernel begins.
class Parameters {
 public:
  Parameters(const std::vector<Buffer>& buffers, ffi::Span<const int64_t> coded) : buffers_(buffers), coded_(coded) {
    // No more than there are numbers; what a pointer shows must not move.
    words_.reserve(coded.size());
    maps_.reserve(coded.size() / 8 + 1);
    while (at_ < coded_.size()) Add(Next());
  }

  void** data() { return pointers_.data(); }
  const std::vector<Buffer>& zeroed() const { return zeroed_; }

 private:
  static constexpr int kMaxRank = 5;

  int64_t Next() {
    if (at_ >= coded_.size()) throw std::runtime_error("its parameters are cut off");
    return coded_.begin()[at_++];
  }

  const Buffer& Numbered() {
    const int64_t number = Next();
    if (number < 0 || number >= static_cast<int64_t>(buffers_.size())) throw std::runtime_error("no such buffer");
    return buffers_[number];
  }

  void Word(uint64_t value) {
    words_.push_back(value);
    pointers_.push_back(&words_.back());
  }

  void Pointer(const Buffer& buffer) { Word(reinterpret_cast<uint64_t>(buffer.data)); }

  void Add(int64_t kind) {
    switch (kind) {
      case 0: return Word(0);
      case 1: return Pointer(Numbered());
      case 2:  // of a little-endian word the lower half comes first
      case 3: return Word(static_cast<uint64_t>(Next()));
      case 4: return Map();
      case 5: zeroed_.push_back(Numbered()); return Pointer(zeroed_.back());
      default: throw std::runtime_error("unknown kind of parameter");
    }
  }

  void Map() {
    void* base = Numbered().data;
    const int type = static_cast<int>(Next()), swizzle = static_cast<int>(Next());
    const int rank = static_cast<int>(Next());
    if (rank < 1 || rank > kMaxRank) throw std::runtime_error("a descriptor has 1 to 5 dimensions");
    uint64_t sizes[kMaxRank], strides[kMaxRank];
    uint32_t box[kMaxRank], ones[kMaxRank];
    // The driver counts dimensions from the last one on.
    for (int i = rank - 1; i >= 0; --i) sizes[i] = static_cast<uint64_t>(Next());
    for (int i = rank - 2; i >= 0; --i) strides[i] = static_cast<uint64_t>(Next());
    for (int i = rank - 1; i >= 0; --i) box[i] = static_cast<uint32_t>(Next());
    std::fill_n(ones, rank, 1u);
    maps_.emplace_back();
    const int error = Cuda().Encode(&maps_.back(), type, static_cast<uint32_t>(rank), base, sizes, strides, box, ones,
                                    Driver::kNoInterleave, swizzle, Driver::kPromote128, Driver::kZeros);
    if (error) throw std::runtime_error("TMA has no descriptor for a buffer: " + Cuda().Text(error));
    pointers_.push_back(&maps_.back());
  }

  const std::vector<Buffer>& buffers_;
  ffi::Span<const int64_t> coded_;
  size_t at_ = 0;
  std::vector<uint64_t> words_;
  std::vector<TensorMap> maps_;
  std::vector<void*> pointers_;
  std::vector<Buffer> zeroed_;
};

Buffer BufferOf(ffi::AnyBuffer buffer) { return {buffer.untyped_data(), buffer.size_bytes()}; }

ffi::Error Initialize(int32_t device, Args, Rets, Attributes a) {
  if (device < 0) return ffi::Error::Success();  // XLA does not tell; it is loaded at the first launch
  try {
    FunctionOf(device, a);
  } catch (const std::exception& error) {
    return Fail(a, error.what());
  }
  return ffi::Error::Success();
}

ffi::Error Execute(Driver::Stream stream, int32_t device, Args args, Rets rets, Attributes a) {
  try {
    const Driver::Function function = FunctionOf(device, a);
    std::vector<Buffer> buffers;
    buffers.reserve(args.size() + rets.size());
    for (size_t i = 0; i < args.size(); ++i) buffers.push_back(BufferOf(*args.get<ffi::AnyBuffer>(i)));
    for (size_t i = 0; i < rets.size(); ++i) buffers.push_back(BufferOf(**rets.get<ffi::AnyBuffer>(i)));
    Parameters parameters(buffers, a.parameters);
    for (const Buffer& buffer : parameters.zeroed()) {
      const int error = Cuda().Zero(reinterpret_cast<uint64_t>(buffer.data), 0, buffer.bytes, stream);
      if (error) return Fail(a, Cuda().Text(error));
    }
    Driver::Attribute cluster{Driver::kClusterDimension, {}, {}};
    Driver::Config config{};
    for (int i = 0; i < 3; ++i) {
      config.grid[i] = static_cast<unsigned>(a.shape[i]);
      cluster.value[i] = static_cast<unsigned>(a.shape[3 + i]);
    }
    config.block[0] = static_cast<unsigned>(a.shape[6]), config.block[1] = config.block[2] = 1;
    config.shared_bytes = static_cast<unsigned>(a.shape[7]);
    config.stream = stream;
    config.attributes = &cluster;
    config.num_attributes = a.shape[3] * a.shape[4] * a.shape[5] > 1;
    const int error = Cuda().Launch(&config, function, parameters.data(), nullptr);
    return error ? Fail(a, Cuda().Text(error)) : ffi::Error::Success();
  } catch (const std::exception& error) {
    return Fail(a, error.what());
  }
}

auto Initializing() {
  return ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>().RemainingArgs().RemainingRets().Attrs<Attributes>();
}
auto Executing() {
  return ffi::Ffi::BindExecute().Ctx<ffi::PlatformStream<Driver::Stream>>().Ctx<ffi::DeviceOrdinal>().RemainingArgs()
      .RemainingRets().Attrs<Attributes>();
}

XLA_FFI_DEFINE_HANDLER(kInitialize, Initialize, Initializing(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kExecute, Execute, Executing(), {ffi::Traits::kCmdBufferCompatible});

// As jax.ffi.register_ffi_target takes it.
py::dict Stages() {
  const auto capsule = [](XLA_FFI_Handler* handler) {
    return py::capsule(reinterpret_cast<void*>(handler), "xla._CUSTOM_CALL_TARGET");
  };
  py::dict stages;
  stages["initialize"] = capsule(kInitialize);
  stages["execute"] = capsule(kExecute);
  return stages;
}

py::object Load(int device, const std::string& name, const std::string& digest, int64_t shared,
                const std::string& code) {
  std::string problem;
  {
    py::gil_scoped_release released;
    try {
      FunctionOn(device, Wanted{name, digest, shared}, [&]() -> const std::string& { return code; });
    } catch (const std::exception& error) {
      problem = error.what();
    }
  }
  return problem.empty() ? py::object(py::none()) : py::object(py::str(problem));
}

}  // namespace
}  // namespace expertmesh

PYBIND11_MODULE(_host, module) {
  using namespace expertmesh;
  module.attr("FFI_VERSION") = pybind11::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  module.attr("SOURCES") = EXPERTMESH_SOURCES;
  module.attr("LAUNCH") = Stages();
  module.def("load", &Load, "Loads a kernel's machine code on a device, as its first launch would; says why it cannot.");
  module.def("unpack", [](const std::string& text) { return pybind11::bytes(Unpack(text)); },
             "The machine code of a program's attribute `image`.");
}
