// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include "copy_pages.cuh"

namespace {

// 32 KiB in flight for each SM that is used.
constexpr int kThreads = 512;

__global__ void __launch_bounds__(kThreads, 1) copy_blocks(const __grid_constant__ llumnix::BlockCopy copy) {
  llumnix::copy_pages(copy, blockIdx.x, gridDim.x, threadIdx.x, blockDim.x);
}

}  // namespace

// Enqueues the copy; regions and ids are in device memory. At most `max_sms` thread blocks, hence SMs, for all pages.
// Returns a cudaError_t.
extern "C" __attribute__((visibility("default"))) int llumnix_copy_blocks_cuda_1(const llumnix::BlockCopy* copy,
                                                                                 int64_t max_sms, void* stream) {
  const int64_t pages = copy->num_blocks * copy->num_layers;
  if (pages == 0) return cudaSuccess;
  if (max_sms < 1) return cudaErrorInvalidValue;
  const auto grid = static_cast<unsigned>(max_sms < pages ? max_sms : pages);
  copy_blocks<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(*copy);
  return cudaGetLastError();
}
