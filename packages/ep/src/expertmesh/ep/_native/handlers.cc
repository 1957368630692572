// XLA's calls: each stage of a custom call gets XLA's own communicator, so that nothing has to be set up.
//
//   prepare:    asks for the communicator of the group
//   initialize: gives it a window that is large enough, which all ranks do together
//   execute:    launches the kernel

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "exchange.h"
#include "xla/ffi/api/collectives_api.h"
#include "xla/ffi/api/ffi.h"

namespace expertmesh {
namespace {

namespace ffi = xla::ffi;
using Groups = ffi::Span<const int64_t>;

// What is used of NCCL, whose functions come from the copy of the library that XLA has open.
using Comm = void*;
enum : int { kSuccess = 0, kInProgress = 7, kSymmetric = 1 };

struct Team {
  int ranks, rank, stride;
};

struct Nccl {
  int (*GetVersion)(int*);
  const char* (*GetErrorString)(int);
  int (*GetAsyncError)(Comm, int*);
  int (*Count)(Comm, int*);
  int (*UserRank)(Comm, int*);
  int (*Device)(Comm, int*);
  int (*Alloc)(void**, size_t);
  int (*Free)(void*);
  int (*Register)(Comm, void*, size_t, void**, int);
  int (*Deregister)(Comm, void*);
  Team (*Reachable)(Comm);  // the ranks that load from and store to each other's memory
  std::string problem;
};

Nccl OpenNccl() {
  Nccl nccl{};
  void* library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) {
    nccl.problem = "libnccl.so.2 is not open in this process";
    return nccl;
  }
  auto find = [&](const char* name, auto& function) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    if (function == nullptr) nccl.problem = std::string(name) + " is missing in libnccl.so.2; NCCL >= 2.28 has it";
  };
  find("ncclGetVersion", nccl.GetVersion);
  find("ncclGetErrorString", nccl.GetErrorString);
  find("ncclCommGetAsyncError", nccl.GetAsyncError);
  find("ncclCommCount", nccl.Count);
  find("ncclCommUserRank", nccl.UserRank);
  find("ncclCommCuDevice", nccl.Device);
  find("ncclMemAlloc", nccl.Alloc);
  find("ncclMemFree", nccl.Free);
  find("ncclCommWindowRegister", nccl.Register);
  find("ncclCommWindowDeregister", nccl.Deregister);
  find("ncclTeamLsa", nccl.Reachable);
  if (!nccl.problem.empty()) return nccl;
  int version = 0;
  nccl.GetVersion(&version);
  if (version / 100 != NcclHeaderVersion() / 100) {
    nccl.problem = "NCCL's headers are of version " + std::to_string(NcclHeaderVersion()) + ", its library of " +
                   std::to_string(version) + "; they must be of one minor version";
  }
  return nccl;
}

struct Window {
  char* memory = nullptr;
  void* handle = nullptr;
  int64_t bytes = 0, flags = 0, staging = 0, half = 0;
  int rank = 0, size = 0;
  char* peers[kMaxRanks] = {};
  Record* record = nullptr;
  cudaStream_t stream = nullptr;  // of the last launch
};

// Windows of this process by communicator. They live as long as the process; each rank of a communicator is of one
// device, and its calls come one after the other.
struct Windows {
  std::mutex mutex;
  std::map<Comm, Window> of;
  int64_t bytes = 0;
};

Windows& AllWindows() {
  static Windows* windows = new Windows;  // never destroyed: devices may still run at exit
  return *windows;
}

ffi::Error Fail(const std::string& what) {
  return ffi::Error(ffi::ErrorCode::kInternal, "expertmesh: transport 'nvlink': " + what);
}

ffi::Error FailCuda(const std::string& what, cudaError_t error) {
  return Fail(what + ": " + cudaGetErrorString(error));
}

// Runs on the communicator's device, and goes back to the thread's own.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    cudaGetDevice(&before_);
    cudaSetDevice(device);
  }
  ~OnDevice() { cudaSetDevice(before_); }

 private:
  int before_ = 0;
};

// XLA's communicators need not block: a call may only have begun when it returns.
int Finish(const Nccl& nccl, Comm comm, int result) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (result == kInProgress && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
    nccl.GetAsyncError(comm, &result);
  }
  return result;
}

int64_t RoundUp(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Of `rows` staging rows of the group, and `flags` of each rank.
ffi::Error Grow(const Nccl& nccl, Comm comm, int64_t rows, int64_t stride, int64_t flags, Window& window) {
  int device = 0;
  nccl.Device(comm, &device);
  OnDevice on(device);
  nccl.UserRank(comm, &window.rank);
  nccl.Count(comm, &window.size);
  if (window.size > kMaxRanks) {
    return Fail("a group must have at most " + std::to_string(kMaxRanks) + " ranks; got " +
                std::to_string(window.size));
  }
  Window next = window;
  next.flags = std::max(window.flags, flags);
  next.staging = RoundUp(kFlags + next.size * next.flags * 4, 4096);
  next.half = std::max(window.half, RoundUp(rows * stride, 4096));
  next.bytes = RoundUp(next.staging + 2 * next.half, 1 << 21);
  cudaError_t error = window.stream ? cudaStreamSynchronize(window.stream) : cudaSuccess;
  if (error == cudaSuccess) error = LoadKernels();
  if (error != cudaSuccess) return FailCuda("the kernels cannot be loaded", error);
  if (next.record == nullptr) {
    error = cudaHostAlloc(reinterpret_cast<void**>(&next.record), sizeof(Record),
                          cudaHostAllocMapped | cudaHostAllocPortable);
    if (error != cudaSuccess) return FailCuda("no host memory for the error record", error);
    *next.record = Record{};
  }
  void* memory = nullptr;
  int result = nccl.Alloc(&memory, next.bytes);
  if (result != kSuccess) {
    return Fail("no " + std::to_string(next.bytes) + " bytes for the window: " + nccl.GetErrorString(result) +
                "; lower XLA_PYTHON_CLIENT_MEM_FRACTION");
  }
  next.memory = static_cast<char*>(memory);
  cudaStream_t stream = nullptr;
  error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (error == cudaSuccess) error = cudaMemsetAsync(next.memory, 0, next.staging, stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  if (error != cudaSuccess) return FailCuda("the window cannot be cleared", error);
  // All ranks come here before any of them goes on: windows are clear, and no kernel writes the old ones any more.
  result = Finish(nccl, comm, nccl.Register(comm, next.memory, next.bytes, &next.handle, kSymmetric));
  if (result != kSuccess || next.handle == nullptr) {
    return Fail(std::string("the window cannot be registered: ") +
                (result != kSuccess ? nccl.GetErrorString(result) : "the ranks do not all reach each other's memory"));
  }
  const int reachable = nccl.Reachable(comm).ranks;
  if (reachable != next.size) {
    return Fail("all ranks of a group must reach each other's memory; " + std::to_string(reachable) + " of " +
                std::to_string(next.size) + " do; use transport='all_to_all'");
  }
  error = QueryPeers(next.handle, next.size, next.peers, stream);
  cudaStreamDestroy(stream);
  if (error != cudaSuccess) return FailCuda("the peers' addresses cannot be read", error);
  if (next.peers[next.rank] == nullptr) return Fail("NCCL names no address for this rank");
  if (window.memory != nullptr) {
    Finish(nccl, comm, nccl.Deregister(comm, window.handle));
    nccl.Free(window.memory);
  }
  std::lock_guard<std::mutex> lock(AllWindows().mutex);
  AllWindows().bytes += next.bytes - window.bytes;
  window = next;
  return ffi::Error::Success();
}

Window& WindowOf(Comm comm) {
  std::lock_guard<std::mutex> lock(AllWindows().mutex);
  return AllWindows().of[comm];  // a map's entries stay where they are
}

const Nccl& OpenedNccl() {
  static std::mutex mutex;
  static Nccl* opened = nullptr;
  std::lock_guard<std::mutex> lock(mutex);
  // A failure is not kept: XLA may open the library later.
  if (opened == nullptr || !opened->problem.empty()) opened = new Nccl(OpenNccl());
  return *opened;
}

// The communicator of this call's group, by XLA's C API; whatever minor version of it the runtime has.
struct Collectives : ffi::internal::CollectivesExtensionBase<
                         ffi::internal::CommunicatorContextBase<ffi::internal::ErrorPolicy>> {
  static bool Support(int32_t major, int32_t minor) { return major == 0 && minor >= 1; }
};
using CollectivesContext = Collectives::Type;
constexpr int64_t kCommunicationId = 0;

std::vector<std::vector<int64_t>> Listed(Groups groups, int64_t size) {
  std::vector<std::vector<int64_t>> lists;
  for (size_t i = 0; i < groups.size(); i += size) lists.emplace_back(groups.begin() + i, groups.begin() + i + size);
  return lists;
}

// Every stage must name all attributes of a call.
struct Attributes {
  Groups groups;
  int64_t size, rows, stride, slices, wire, senders, receivers, timeout_ms;
};

ffi::ErrorOr<Comm> CommOf(CollectivesContext collectives, const Attributes& a) {
  auto comm = collectives.GetCommunicator(ffi::GroupMode::kFlattenedId, Listed(a.groups, a.size), kCommunicationId);
  if (comm.has_error()) return comm.error();
  return reinterpret_cast<Comm>(comm.value());
}

ffi::Error Prepare(CollectivesContext collectives, ffi::RemainingArgs, ffi::RemainingRets, Groups groups, int64_t size,
                   int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t) {
  return collectives.RequestCommunicator(ffi::GroupMode::kFlattenedId, Listed(groups, size), kCommunicationId);
}

ffi::Error Initialize(CollectivesContext collectives, ffi::RemainingArgs, ffi::RemainingRets, Groups groups,
                      int64_t size, int64_t rows, int64_t stride, int64_t slices, int64_t wire, int64_t senders,
                      int64_t receivers, int64_t timeout_ms) {
  auto comm = CommOf(collectives, {groups, size, rows, stride, slices, wire, senders, receivers, timeout_ms});
  if (comm.has_error()) return comm.error();
  Window& window = WindowOf(comm.value());
  const int64_t flags = rows / size * slices;
  if (window.memory != nullptr && flags <= window.flags && rows * stride <= window.half) {
    return ffi::Error::Success();
  }
  const Nccl& nccl = OpenedNccl();
  if (!nccl.problem.empty()) return Fail(nccl.problem);
  return Grow(nccl, comm.value(), rows, stride, flags, window);
}

// What dispatch and combine have in common.
ffi::Error Begin(CollectivesContext collectives, cudaStream_t stream, const Attributes& a, ffi::AnyBuffer slot,
                 ffi::AnyBuffer source, ffi::AnyBuffer row, Exchange& x) {
  auto comm = CommOf(collectives, a);
  if (comm.has_error()) return comm.error();
  Window& window = WindowOf(comm.value());
  if (window.memory == nullptr || window.size != a.size) return Fail("there is no window for this group");
  window.stream = stream;
  for (int r = 0; r < window.size; ++r) x.window[r] = window.peers[r];
  x.record = window.record;
  x.slot = static_cast<const int32_t*>(slot.untyped_data());
  x.source = static_cast<const int32_t*>(source.untyped_data());
  x.row = static_cast<const int32_t*>(row.untyped_data());
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
  return ffi::Error::Success();
}

int64_t RowBytes(ffi::AnyBuffer rows) { return rows.dimensions()[1] * ffi::ByteWidth(rows.element_type()); }

ffi::Error RunDispatch(CollectivesContext collectives, cudaStream_t stream, ffi::RemainingArgs args,
                       ffi::RemainingRets rets, Groups groups, int64_t size, int64_t rows, int64_t stride,
                       int64_t slices, int64_t wire, int64_t senders, int64_t receivers, int64_t timeout_ms) {
  Exchange x{};
  auto error = Begin(collectives, stream, {groups, size, rows, stride, slices, wire, senders, receivers, timeout_ms},
                     *args.get<ffi::AnyBuffer>(0), *args.get<ffi::AnyBuffer>(1), *args.get<ffi::AnyBuffer>(2), x);
  if (error.failure()) return error;
  Part parts[kMaxParts] = {};
  const int count = static_cast<int>(rets.size());
  int64_t offset = 0;
  for (int p = 0; p < count; ++p) {
    auto source = *args.get<ffi::AnyBuffer>(3 + p);
    auto result = *rets.get<ffi::AnyBuffer>(p);
    parts[p] = Part{static_cast<const char*>(source.untyped_data()), static_cast<char*>(result->untyped_data()),
                    RowBytes(source), offset};
    offset += RoundUp(parts[p].row_bytes, 16);
  }
  const int blocks = x.senders + static_cast<int>(receivers);
  const cudaError_t launched = LaunchDispatch(x, parts, count, blocks, stream);
  return launched == cudaSuccess ? ffi::Error::Success() : FailCuda("dispatch", launched);
}

bool TypeOf(ffi::DataType dtype, Type& type) {
  if (dtype == ffi::DataType::F32) type = Type::kF32;
  else if (dtype == ffi::DataType::BF16) type = Type::kBF16;
  else if (dtype == ffi::DataType::F16) type = Type::kF16;
  else return false;
  return true;
}

ffi::Error RunCombine(CollectivesContext collectives, cudaStream_t stream, ffi::RemainingArgs args,
                      ffi::RemainingRets rets, Groups groups, int64_t size, int64_t rows, int64_t stride,
                      int64_t slices, int64_t wire, int64_t senders, int64_t receivers, int64_t timeout_ms) {
  Exchange x{};
  auto error = Begin(collectives, stream, {groups, size, rows, stride, slices, wire, senders, receivers, timeout_ms},
                     *args.get<ffi::AnyBuffer>(0), *args.get<ffi::AnyBuffer>(1), *args.get<ffi::AnyBuffer>(2), x);
  if (error.failure()) return error;
  auto values = *args.get<ffi::AnyBuffer>(3);
  auto out = *rets.get<ffi::AnyBuffer>(0);
  Type type;
  if (!TypeOf(values.element_type(), type)) return Fail("combine adds float32, bfloat16 and float16 only");
  const int blocks = x.senders + static_cast<int>(receivers);
  const cudaError_t launched = LaunchCombine(x, values.untyped_data(), out->untyped_data(), values.dimensions()[1],
                                             type, static_cast<Type>(wire), blocks, stream);
  return launched == cudaSuccess ? ffi::Error::Success() : FailCuda("combine", launched);
}

template <typename Binding>
auto WithAttributes(Binding binding) {
  return std::move(binding)
      .RemainingArgs()
      .RemainingRets()
      .template Attr<Groups>("groups")
      .template Attr<int64_t>("size")
      .template Attr<int64_t>("rows")
      .template Attr<int64_t>("stride")
      .template Attr<int64_t>("slices")
      .template Attr<int64_t>("wire")
      .template Attr<int64_t>("senders")
      .template Attr<int64_t>("receivers")
      .template Attr<int64_t>("timeout_ms");
}

auto Executing() {
  return WithAttributes(ffi::Ffi::BindExecute().Ctx<ffi::Extension<Collectives>>().Ctx<ffi::PlatformStream<cudaStream_t>>());
}

}  // namespace
}  // namespace expertmesh

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    expertmesh_prepare, expertmesh::Prepare,
    expertmesh::WithAttributes(xla::ffi::Ffi::BindPrepare().Ctx<xla::ffi::Extension<expertmesh::Collectives>>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    expertmesh_initialize, expertmesh::Initialize,
    expertmesh::WithAttributes(xla::ffi::Ffi::BindInitialize().Ctx<xla::ffi::Extension<expertmesh::Collectives>>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(expertmesh_dispatch, expertmesh::RunDispatch, expertmesh::Executing());
XLA_FFI_DEFINE_HANDLER_SYMBOL(expertmesh_combine, expertmesh::RunCombine, expertmesh::Executing());

// Bytes of all windows of this process.
extern "C" int64_t expertmesh_window_bytes() {
  std::lock_guard<std::mutex> lock(expertmesh::AllWindows().mutex);
  return expertmesh::AllWindows().bytes;
}

// Takes the record of a wait that timed out: epoch, rank, peer, phase. 0 if there is none.
extern "C" int expertmesh_take_stall(uint32_t* record) {
  std::lock_guard<std::mutex> lock(expertmesh::AllWindows().mutex);
  for (auto& [comm, window] : expertmesh::AllWindows().of) {
    volatile expertmesh::Record* at = window.record;
    if (at == nullptr || at->epoch == 0) continue;
    const uint32_t values[] = {at->epoch, at->rank, at->peer, at->phase};
    std::copy(std::begin(values), std::end(values), record);
    at->epoch = 0;
    return 1;
  }
  return 0;
}
#pragma GCC visibility pop
