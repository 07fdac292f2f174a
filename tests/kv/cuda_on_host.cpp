// SPDX-License-Identifier: Apache-2.0
// The body of the CUDA kernel, lane after lane on the host: its arithmetic without a GPU.
#include "../../csrc/cuda/copy_pages.cuh"

extern "C" void walk(const llumnix::BlockCopy* copy, int64_t groups, int64_t lanes) {
  for (int64_t group = 0; group < groups; ++group)
    for (int64_t lane = 0; lane < lanes; ++lane) llumnix::copy_pages(*copy, group, groups, lane, lanes);
}
