// The module `_host`: XLA's calls, each stage of which gets XLA's own communicator, so that nothing has to be set up.
//
//   prepare:    asks for the communicator of the group
//   initialize: gives it a window that is large enough, which all ranks do together
//   execute:    launches the kernel
//
// Built by g++ alone (build.py); the kernels are handed over by `load`, as NVRTC compiled them for this process' GPUs.

#include <pybind11/pybind11.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "exchange.h"
#include "libraries.h"
#include "xla/ffi/api/collectives_api.h"
#include "xla/ffi/api/ffi.h"

namespace expertmesh {

// Of a call, the same in each of its stages.
struct Attributes {
  xla::ffi::Span<const int64_t> groups;
  int64_t size, rows, stride, slices, wire, senders, receivers, timeout_ms;
};

}  // namespace expertmesh

using xla::ffi::StructMember;
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(expertmesh::Attributes,
                                      StructMember<xla::ffi::Span<const int64_t>>("groups"),
                                      StructMember<int64_t>("size"), StructMember<int64_t>("rows"),
                                      StructMember<int64_t>("stride"), StructMember<int64_t>("slices"),
                                      StructMember<int64_t>("wire"), StructMember<int64_t>("senders"),
                                      StructMember<int64_t>("receivers"), StructMember<int64_t>("timeout_ms"));

namespace expertmesh {
namespace {

namespace ffi = xla::ffi;
namespace py = pybind11;
using Args = ffi::RemainingArgs;
using Rets = ffi::RemainingRets;
using Comm = Nccl::Comm;
using Stream = Driver::Stream;

// The kernels in exchange.cu by the types of rows and sums, as NVRTC takes their names, and by whether rows are whole
// words; then those that stage by row, which must be whole words, and sums float32.
constexpr const char* kTypes[] = {"float", "__nv_bfloat16", "__half"};

size_t DispatchKernel(bool wide) { return wide; }

size_t CombineKernel(Type rows, Type wire, bool wide) {
  return 2 + (static_cast<int>(rows) * std::size(kTypes) + static_cast<int>(wire)) * 2 + wide;
}

constexpr size_t kDispatchByRow = 2 + 2 * std::size(kTypes) * std::size(kTypes), kCombineByRow = kDispatchByRow + 1;

std::vector<std::string> KernelNames() {
  std::vector<std::string> names = {"expertmesh::Dispatch<expertmesh::AnyRows>",
                                    "expertmesh::Dispatch<expertmesh::BulkRows<expertmesh::ByToken>>"};
  for (const std::string rows : kTypes) {
    for (const std::string wire : kTypes) {
      for (const std::string sums : {"AnySums", "BulkSums"}) {
        const std::string types = rows + ", " + wire;
        names.push_back("expertmesh::Combine<" + types + ", expertmesh::" + sums + "<" + types + ">>");
      }
    }
  }
  names.push_back("expertmesh::Dispatch<expertmesh::BulkRows<expertmesh::ByRow>>");
  names.push_back("expertmesh::Combine<float, float, expertmesh::BulkSums<float, float>, expertmesh::ByRow>");
  return names;
}

// What NVRTC made for this process' GPUs.
struct Images {
  std::string exchange;
  std::vector<std::string> names;  // of its kernels in the order of KernelNames()
  std::string peers;               // of peers.cu, or empty
  int peers_version = 0;           // of the headers that it was compiled with
};

// On one device.
struct Kernels {
  std::vector<Driver::Function> exchange;
  Driver::Function query = nullptr;
  int query_version = 0;  // of NCCL's headers
};

struct Window {
  char* memory = nullptr;
  void* handle = nullptr;
  int64_t bytes = 0, flags = 0, staging = 0, half = 0;
  int rank = 0, size = 0;
  char* peers[kMaxRanks] = {};
  Record* record = nullptr;
  const Kernels* kernels = nullptr;
  Stream stream = nullptr;  // of the last launch
};

// Windows of this process by communicator. They live as long as the process; each rank of a communicator is of one
// device, and its calls come one after the other. A map's entries stay where they are.
struct State {
  std::mutex mutex;
  Images images;
  std::map<int, Kernels> kernels;  // by device
  std::map<Comm, Window> windows;
  int64_t bytes = 0;
};

State& Process() {
  static State* state = new State;  // never destroyed: devices may still run at exit
  return *state;
}

ffi::Error Fail(const std::string& what) {
  return ffi::Error(ffi::ErrorCode::kInternal, "expertmesh: transport 'nvlink': " + what);
}

ffi::Error FailCuda(const Driver& cuda, const std::string& what, int error) {
  return Fail(what + ": " + cuda.Text(error));
}

// Runs on the communicator's device, and goes back to the thread's own.
class OnDevice {
 public:
  OnDevice(const Driver& cuda, int device) : cuda_(cuda) {
    Driver::Context context = nullptr;
    cuda_.DeviceGet(&device_, device);
    cuda_.Retain(&context, device_);
    cuda_.Push(context);
  }
  ~OnDevice() {
    Driver::Context context = nullptr;
    cuda_.Pop(&context);
    cuda_.Release(device_);
  }

 private:
  const Driver& cuda_;
  int device_ = 0;
};

// XLA's communicators need not block: a call may only have begun when it returns.
int Finish(const Nccl& nccl, Comm comm, int result) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (result == Nccl::kInProgress && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
    nccl.GetAsyncError(comm, &result);
  }
  return result;
}

int64_t RoundUp(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

int LoadFunction(const Driver& cuda, Driver::Module module, const std::string& name, int shared,
                 Driver::Function& function) {
  int error = cuda.GetFunction(&function, module, name.c_str());
  if (!error && shared) error = cuda.SetAttribute(function, Driver::kMaxDynamicSharedBytes, shared);
  if (!error && cuda.LoadFunction != nullptr) error = cuda.LoadFunction(function);
  return error;
}

// Loads every kernel on the current device now: loading one may wait for kernels that run, and those for this device.
int LoadKernels(const Driver& cuda, const Images& images, Kernels& kernels) {
  Driver::Module module = nullptr;
  kernels.exchange.resize(images.names.size());
  int error = cuda.ModuleLoad(&module, images.exchange.data());
  for (size_t i = 0; !error && i < images.names.size(); ++i) {
    error = LoadFunction(cuda, module, images.names[i], kShared, kernels.exchange[i]);
  }
  if (!error && !images.peers.empty()) {
    error = cuda.ModuleLoad(&module, images.peers.data());
    if (!error) error = LoadFunction(cuda, module, "Query", 0, kernels.query);
    kernels.query_version = images.peers_version;
  }
  return error;
}

ffi::Error KernelsOn(const Driver& cuda, int device, const Kernels*& kernels) {
  State& state = Process();
  std::unique_lock<std::mutex> lock(state.mutex);
  auto found = state.kernels.find(device);
  if (found == state.kernels.end()) {
    const Images images = state.images;
    lock.unlock();  // others may have to launch what loading waits for
    Kernels loaded;
    if (int error = LoadKernels(cuda, images, loaded)) return FailCuda(cuda, "the kernels cannot be loaded", error);
    lock.lock();
    found = state.kernels.emplace(device, loaded).first;
  }
  kernels = &found->second;
  return ffi::Error::Success();
}

ffi::Error FindPeers(const Nccl& nccl, const Driver& cuda, Stream stream, Window& window) {
  if (nccl.PeerAddress != nullptr) {
    for (int r = 0; r < window.size; ++r) {
      const int result = nccl.PeerAddress(window.handle, 0, r, reinterpret_cast<void**>(&window.peers[r]));
      if (result != Nccl::kSuccess) return Fail(std::string("the peers' addresses: ") + nccl.GetErrorString(result));
    }
    return ffi::Error::Success();
  }
  const int headers = window.kernels->query_version;
  if (nccl.version / 100 != headers / 100) {
    return Fail("NCCL's headers are of version " + std::to_string(headers) + ", its library of " +
                std::to_string(nccl.version) + "; below 2.29 they must be of one minor version");
  }
  char** mapped = nullptr;
  int error = cuda.HostAlloc(reinterpret_cast<void**>(&mapped), sizeof(window.peers), Driver::kMapped);
  if (!error) {
    void* arguments[] = {&window.handle, &window.size, &mapped};
    error = cuda.Launch(window.kernels->query, 1, 1, 1, 1, 1, 1, 0, stream, arguments, nullptr);
    if (!error) error = cuda.StreamSynchronize(stream);
    if (!error) std::copy_n(mapped, window.size, window.peers);
    cuda.HostFree(mapped);
  }
  return error ? FailCuda(cuda, "the peers' addresses cannot be read", error) : ffi::Error::Success();
}

// What a window is made of until it is the communicator's: given back where something fails before.
struct Made {
  const Nccl& nccl;
  const Driver& cuda;
  Comm comm;
  void* memory = nullptr;
  void* handle = nullptr;  // of the registered memory
  Stream stream = nullptr;

  ~Made() {
    if (stream != nullptr) cuda.StreamDestroy(stream);
    if (handle != nullptr) Finish(nccl, comm, nccl.Deregister(comm, handle));
    if (memory != nullptr) nccl.Free(memory);
  }
};

// Of `rows` staging rows of the group, and `flags` of each rank.
ffi::Error Grow(const Nccl& nccl, const Driver& cuda, Comm comm, const Attributes& a, int64_t flags, Window& window) {
  int device = 0;
  nccl.Device(comm, &device);
  OnDevice on(cuda, device);
  nccl.UserRank(comm, &window.rank);
  nccl.Count(comm, &window.size);
  if (window.size > kMaxRanks) {
    return Fail("a group must have at most " + std::to_string(kMaxRanks) + " ranks; got " +
                std::to_string(window.size));
  }
  Window next = window;
  next.flags = std::max(window.flags, flags);
  next.staging = RoundUp(kFlags + next.size * next.flags * 4, 4096);
  next.half = std::max(window.half, RoundUp(a.rows * a.stride, 4096));
  next.bytes = RoundUp(next.staging + 2 * next.half, 1 << 21);
  int error = window.stream ? cuda.StreamSynchronize(window.stream) : Driver::kSuccess;
  if (error) return FailCuda(cuda, "an earlier exchange failed", error);
  if (auto failed = KernelsOn(cuda, device, next.kernels); failed.failure()) return failed;
  if (next.record == nullptr) {
    error = cuda.HostAlloc(reinterpret_cast<void**>(&next.record), sizeof(Record), Driver::kMapped | Driver::kPortable);
    if (error) return FailCuda(cuda, "no host memory for the error record", error);
    *next.record = Record{};
    window.record = next.record;
  }
  Made made{nccl, cuda, comm};
  int result = nccl.Alloc(&made.memory, next.bytes);
  if (result != Nccl::kSuccess) {
    return Fail("no " + std::to_string(next.bytes) + " bytes for the window: " + nccl.GetErrorString(result) +
                "; lower XLA_PYTHON_CLIENT_MEM_FRACTION");
  }
  next.memory = static_cast<char*>(made.memory);
  error = cuda.StreamCreate(&made.stream, Driver::kNonBlocking);
  if (!error) error = cuda.Memset(reinterpret_cast<Driver::Address>(next.memory), 0, next.staging, made.stream);
  if (!error) error = cuda.StreamSynchronize(made.stream);
  if (error) return FailCuda(cuda, "the window cannot be cleared", error);
  // All ranks come here before any of them goes on: windows are clear, and no kernel writes the old ones any more.
  result = Finish(nccl, comm, nccl.Register(comm, next.memory, next.bytes, &made.handle, Nccl::kSymmetric));
  next.handle = made.handle;
  if (result != Nccl::kSuccess || next.handle == nullptr) {
    return Fail(std::string("the window cannot be registered: ") +
                (result != Nccl::kSuccess ? nccl.GetErrorString(result)
                                          : "the ranks do not all reach each other's memory"));
  }
  const int reachable = nccl.Reachable(comm).ranks;
  if (reachable != next.size) {
    return Fail("all ranks of a group must reach each other's memory; " + std::to_string(reachable) + " of " +
                std::to_string(next.size) + " do; use transport='all_to_all'");
  }
  if (auto failed = FindPeers(nccl, cuda, made.stream, next); failed.failure()) return failed;
  if (next.peers[next.rank] == nullptr) return Fail("NCCL names no address for this rank");
  if (window.memory != nullptr) {
    Finish(nccl, comm, nccl.Deregister(comm, window.handle));
    nccl.Free(window.memory);
  }
  std::lock_guard<std::mutex> lock(Process().mutex);
  Process().bytes += next.bytes - window.bytes;
  window = next;
  made.memory = made.handle = nullptr;
  return ffi::Error::Success();
}

Window& WindowOf(Comm comm) {
  std::lock_guard<std::mutex> lock(Process().mutex);
  return Process().windows[comm];
}

// The communicator of this call's group, by XLA's C API; whatever minor version of it the runtime has.
struct Collectives : ffi::internal::CollectivesExtensionBase<
                         ffi::internal::CommunicatorContextBase<ffi::internal::ErrorPolicy>> {
  static bool Support(int32_t major, int32_t minor) { return major == 0 && minor >= 1; }
};
using CollectivesContext = Collectives::Type;
constexpr int64_t kCommunicationId = 0;

std::vector<std::vector<int64_t>> Groups(const Attributes& a) {
  std::vector<std::vector<int64_t>> groups;
  for (auto at = a.groups.begin(); at != a.groups.end(); at += a.size) groups.emplace_back(at, at + a.size);
  return groups;
}

ffi::ErrorOr<Comm> CommOf(CollectivesContext collectives, const Attributes& a) {
  auto comm = collectives.GetCommunicator(ffi::GroupMode::kFlattenedId, Groups(a), kCommunicationId);
  if (comm.has_error()) return comm.error();
  return reinterpret_cast<Comm>(comm.value());
}

ffi::Error Prepare(CollectivesContext collectives, Args, Rets, Attributes a) {
  return collectives.RequestCommunicator(ffi::GroupMode::kFlattenedId, Groups(a), kCommunicationId);
}

ffi::Error Initialize(CollectivesContext collectives, Args args, Rets, Attributes a) {
  auto comm = CommOf(collectives, a);
  if (comm.has_error()) return comm.error();
  Window& window = WindowOf(comm.value());
  const int64_t flags = args.get<ffi::AnyBuffer>(0)->dimensions()[0] * a.slices;  // of a rank's tokens
  if (window.memory != nullptr && flags <= window.flags && a.rows * a.stride <= window.half) {
    return ffi::Error::Success();
  }
  const Nccl& nccl = Opened<Nccl>();
  const Driver& cuda = Opened<Driver>();
  if (!nccl.problem.empty()) return Fail(nccl.problem);
  if (!cuda.problem.empty()) return Fail(cuda.problem);
  return Grow(nccl, cuda, comm.value(), a, flags, window);
}

template <typename T>
const T* Data(ffi::AnyBuffer array) {
  return static_cast<const T*>(array.untyped_data());
}

// What dispatch and combine have in common: the first three operands, and all that is not of a payload.
ffi::ErrorOr<Window*> Begin(CollectivesContext collectives, Stream stream, Args args, const Attributes& a,
                            Exchange& x) {
  auto comm = CommOf(collectives, a);
  if (comm.has_error()) return ffi::Unexpected(comm.error());
  Window& window = WindowOf(comm.value());
  if (window.memory == nullptr || window.size != a.size) {
    return ffi::Unexpected(Fail("there is no window for this group"));
  }
  window.stream = stream;
  const auto slot = *args.get<ffi::AnyBuffer>(0), source = *args.get<ffi::AnyBuffer>(1);
  std::copy_n(window.peers, window.size, x.window);
  x.record = window.record;
  x.slot = Data<int32_t>(slot);
  x.source = Data<int32_t>(source);
  x.row = Data<int32_t>(*args.get<ffi::AnyBuffer>(2));
  x.flags = window.flags;
  x.staging = window.staging;
  x.half = window.half;
  x.stride = a.stride;
  x.slices = static_cast<int32_t>(a.slices);
  x.timeout = static_cast<uint64_t>(a.timeout_ms) * 1000000;
  x.rank = window.rank;
  x.size = window.size;
  x.tokens = static_cast<int32_t>(slot.dimensions()[0]);
  x.choices = static_cast<int32_t>(slot.dimensions()[1]);
  x.capacity = static_cast<int32_t>(source.dimensions()[0]);
  // No more blocks than there is work for.
  const int64_t blocks = (a.rows * a.slices + kWarps - 1) / kWarps;
  x.senders = static_cast<int32_t>(std::min(a.senders, blocks));
  return &window;
}

ffi::Error Launch(const Window& window, size_t kernel, int64_t blocks, Stream stream, void** arguments) {
  const Driver& cuda = Opened<Driver>();
  const int error = cuda.Launch(window.kernels->exchange[kernel], static_cast<unsigned>(blocks), 1, 1, 32 * kWarps, 1,
                                1, kShared, stream, arguments, nullptr);
  return error ? FailCuda(cuda, "a kernel cannot be launched", error) : ffi::Error::Success();
}

template <bool by_row>
ffi::Error Dispatch(CollectivesContext collectives, Stream stream, Args args, Rets rets, Attributes a) {
  Exchange x{};
  auto window = Begin(collectives, stream, args, a, x);
  if (window.has_error()) return window.error();
  Parts parts{};
  parts.count = static_cast<int>(rets.size());
  int64_t offset = 0;
  bool wide = true;
  for (int p = 0; p < parts.count; ++p) {
    const auto tokens = *args.get<ffi::AnyBuffer>(3 + p);
    const auto result = *rets.get<ffi::AnyBuffer>(p);
    const int64_t bytes = tokens.dimensions()[1] * ffi::ByteWidth(tokens.element_type());
    parts.part[p] = Part{Data<char>(tokens), static_cast<char*>(result->untyped_data()), bytes, offset};
    offset += RoundUp(bytes, 16);
    wide = wide && bytes % 16 == 0;
  }
  if (by_row && !wide) return Fail("rows that are staged by row must be multiples of 16 bytes");
  void* arguments[] = {&x, &parts};
  return Launch(**window, by_row ? kDispatchByRow : DispatchKernel(wide), x.senders + a.receivers, stream, arguments);
}

bool TypeOf(ffi::DataType dtype, Type& type) {
  if (dtype == ffi::DataType::F32) type = Type::kF32;
  else if (dtype == ffi::DataType::BF16) type = Type::kBF16;
  else if (dtype == ffi::DataType::F16) type = Type::kF16;
  else return false;
  return true;
}

template <bool by_row>
ffi::Error Combine(CollectivesContext collectives, Stream stream, Args args, Rets rets, Attributes a) {
  Exchange x{};
  auto window = Begin(collectives, stream, args, a, x);
  if (window.has_error()) return window.error();
  const auto values = *args.get<ffi::AnyBuffer>(3);
  const auto result = *rets.get<ffi::AnyBuffer>(0);
  Type type;
  if (!TypeOf(values.element_type(), type)) return Fail("combine adds float32, bfloat16 and float16 only");
  const void* rows = values.untyped_data();
  void* out = result->untyped_data();
  int64_t features = values.dimensions()[1];
  const Type wire = static_cast<Type>(a.wire);
  const bool wide = features % 8 == 0;
  if (by_row && (type != Type::kF32 || wire != Type::kF32 || !wide)) {
    return Fail("rows that are staged by row must be float32, and multiples of 32 bytes");
  }
  const size_t kernel = by_row ? kCombineByRow : CombineKernel(type, wire, wide);
  void* arguments[] = {&x, &rows, &out, &features};
  return Launch(**window, kernel, x.senders + a.receivers, stream, arguments);
}

template <typename Binding>
auto AllOf(Binding binding) {
  return std::move(binding).RemainingArgs().RemainingRets().template Attrs<Attributes>();
}

auto Preparing() { return AllOf(ffi::Ffi::BindPrepare().Ctx<ffi::Extension<Collectives>>()); }
auto Initializing() { return AllOf(ffi::Ffi::BindInitialize().Ctx<ffi::Extension<Collectives>>()); }
auto Executing() {
  return AllOf(ffi::Ffi::BindExecute().Ctx<ffi::Extension<Collectives>>().Ctx<ffi::PlatformStream<Stream>>());
}

XLA_FFI_DEFINE_HANDLER(kPrepare, Prepare, Preparing());
XLA_FFI_DEFINE_HANDLER(kInitialize, Initialize, Initializing());
XLA_FFI_DEFINE_HANDLER(kDispatch, Dispatch<false>, Executing());
XLA_FFI_DEFINE_HANDLER(kCombine, Combine<false>, Executing());
XLA_FFI_DEFINE_HANDLER(kDispatchOfRows, Dispatch<true>, Executing());
XLA_FFI_DEFINE_HANDLER(kCombineOfRows, Combine<true>, Executing());

// As jax.ffi.register_ffi_target takes it.
py::dict Stages(XLA_FFI_Handler* execute) {
  const auto capsule = [](XLA_FFI_Handler* handler) {
    return py::capsule(reinterpret_cast<void*>(handler), "xla._CUSTOM_CALL_TARGET");
  };
  py::dict stages;
  stages["prepare"] = capsule(kPrepare);
  stages["initialize"] = capsule(kInitialize);
  stages["execute"] = capsule(execute);
  return stages;
}

py::list ListedNames() {
  py::list names;
  for (const std::string& name : KernelNames()) names.append(name);
  return names;
}

void Load(const py::bytes& exchange, const py::list& names, const py::bytes& peers, int peers_version) {
  Images images{exchange, {}, peers, peers_version};
  for (const auto& name : names) images.names.push_back(py::cast<std::string>(name));
  std::lock_guard<std::mutex> lock(Process().mutex);
  Process().images = std::move(images);
}

int64_t WindowBytes() {
  std::lock_guard<std::mutex> lock(Process().mutex);
  return Process().bytes;
}

py::object TakeStall() {
  std::lock_guard<std::mutex> lock(Process().mutex);
  for (auto& [comm, window] : Process().windows) {
    volatile Record* at = window.record;
    if (at == nullptr || at->epoch == 0) continue;
    py::object stall = py::make_tuple(uint32_t{at->epoch}, uint32_t{at->rank}, uint32_t{at->peer}, uint32_t{at->phase});
    at->epoch = 0;
    return stall;
  }
  return py::none();
}

}  // namespace
}  // namespace expertmesh

PYBIND11_MODULE(_host, module) {
  using namespace expertmesh;
  module.attr("FFI_VERSION") = pybind11::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  module.attr("SOURCES") = EXPERTMESH_SOURCES;
  module.attr("KERNELS") = ListedNames();
  module.attr("DISPATCH") = Stages(kDispatch);
  module.attr("COMBINE") = Stages(kCombine);
  module.attr("DISPATCH_BY_ROW") = Stages(kDispatchOfRows);
  module.attr("COMBINE_BY_ROW") = Stages(kCombineOfRows);
  module.def("load", &Load, "Takes the kernels for this process' GPUs: code and names in the order of KERNELS.");
  module.def("window_bytes", &WindowBytes, "Bytes of all windows of this process.");
  module.def("take_stall", &TakeStall, "Takes the record (epoch, rank, peer, phase) of a wait that timed out.");
}
