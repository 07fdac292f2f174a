// SPDX-License-Identifier: Apache-2.0
// The body of the CUDA kernel, lane after lane on the host: its arithmetic without a GPU.
#include <cstdint>

static int64_t misaligned;
#define LLUMNIX_EXPECT_ALIGNED(address) \
  misaligned += reinterpret_cast<uintptr_t>(address) % sizeof(*address) != 0

#include "../../csrc/cuda/copy_pages.cuh"

// Returns the number of misaligned accesses.
extern "C" int64_t walk(const llumnix::BlockCopy* copy, int64_t groups, int64_t lanes) {
  misaligned = 0;
  for (int64_t group = 0; group < groups; ++group)
    for (int64_t lane = 0; lane < lanes; ++lane) llumnix::copy_pages(*copy, group, groups, lane, lanes);
  return misaligned;
}
