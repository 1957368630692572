// Asks NCCL for the peers' addresses; the only file that reads NCCL's device headers.

#include <nccl.h>
#include <nccl_device.h>

#include "exchange.h"

namespace expertmesh {
namespace {

__global__ void Query(ncclWindow_t window, int size, char** peers) {
  for (int r = 0; r < size; ++r) peers[r] = static_cast<char*>(ncclGetLsaPointer(window, 0, r));
}

}  // namespace

int NcclHeaderVersion() { return NCCL_VERSION_CODE; }

cudaError_t QueryPeers(void* window, int size, char** peers, cudaStream_t stream) {
  char** mapped = nullptr;
  cudaError_t error = cudaHostAlloc(reinterpret_cast<void**>(&mapped), size * sizeof(char*), cudaHostAllocMapped);
  if (error != cudaSuccess) return error;
  Query<<<1, 1, 0, stream>>>(static_cast<ncclWindow_t>(window), size, mapped);
  error = cudaGetLastError();
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  for (int r = 0; r < size; ++r) peers[r] = mapped[r];
  cudaFreeHost(mapped);
  return error;
}

}  // namespace expertmesh
