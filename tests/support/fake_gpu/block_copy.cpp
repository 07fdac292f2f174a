// SPDX-License-Identifier: Apache-2.0
// The copy kernel of csrc/cuda for the fake GPU, whose memory is the host's: its body, lane by lane, behind its entry.
#include "../../../csrc/cuda/copy_pages.cuh"

extern "C" __attribute__((visibility("default"))) int llumnix_copy_blocks_cuda_1(const llumnix::BlockCopy* copy,
                                                                                 int64_t max_sms, void*) {
  // One lane for each of few thread blocks: what it copies does not depend on how many there are.
  for (int64_t group = 0; group < max_sms; ++group) llumnix::copy_pages(*copy, group, max_sms, 0, 1);
  return 0;
}
