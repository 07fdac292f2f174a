// SPDX-License-Identifier: Apache-2.0
// Where the pages of a block copy lie: the same arithmetic on the host and on the device.
// Mirrors vllm_llumnix/kv/kernels/plan.py, which has checked everything that arrives here.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define LLUMNIX_HOST_DEVICE __host__ __device__
#else
#define LLUMNIX_HOST_DEVICE
#endif

namespace llumnix {

// A row of plan.region_table. Bytes, but for `first_layer`.
struct Region {
  int64_t first_layer;
  int64_t offset;
  int64_t layer_stride;
  int64_t block_stride;
  int64_t page_bytes;
  int64_t packed_offset;
};

// plan.BlockCopy. Passed by address from Python: a change here needs one in native.py, and another name of the entries.
struct BlockCopy {
  uint8_t* storage;
  uint8_t* buffer;
  const Region* regions;
  const int64_t* ids;
  int64_t num_regions;
  int64_t num_blocks;  // to copy
  int64_t num_layers;
  int64_t block_bytes;
  int64_t to_buffer;
};

struct Page {
  uint8_t* to;
  const uint8_t* from;
  int64_t bytes;
};

// Page `index` in the order of the buffer: block by block, layer by layer.
LLUMNIX_HOST_DEVICE inline Page page_of(const BlockCopy& copy, int64_t index) {
  const int64_t block = index / copy.num_layers;
  const int64_t layer = index % copy.num_layers;
  // The last region that begins at this layer or before: pages that are cut have thousands of them.
  int64_t at = 0, behind = copy.num_regions;
  while (behind - at > 1) {
    const int64_t middle = at + (behind - at) / 2;
    if (copy.regions[middle].first_layer <= layer)
      at = middle;
    else
      behind = middle;
  }
  const Region& region = copy.regions[at];
  const int64_t within = layer - region.first_layer;
  uint8_t* stored = copy.storage + region.offset + within * region.layer_stride + copy.ids[block] * region.block_stride;
  uint8_t* packed = copy.buffer + block * copy.block_bytes + region.packed_offset + within * region.page_bytes;
  if (copy.to_buffer) return {packed, stored, region.page_bytes};
  return {stored, packed, region.page_bytes};
}

}  // namespace llumnix
