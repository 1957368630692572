// Tells the host the peers' addresses of a symmetric window, which NCCL 2.28 tells to device code only. Compiled by
// NVRTC with the installed headers, for the window is laid out as they say.

#include <nccl.h>

// They declare functions of the host too, which NVRTC refuses.
#undef __host__
#define __host__
#include <nccl_device/impl/core__types.h>

// What ncclGetLsaPointer computes; the header that defines it does not pass NVRTC.
extern "C" __global__ void Query(ncclWindow_t window, int size, char** peers) {
  const size_t stride = static_cast<size_t>(window->stride4G) << 32;
  for (int r = 0; r < size; ++r) peers[r] = window->lsaFlatBase + r * stride;
}
