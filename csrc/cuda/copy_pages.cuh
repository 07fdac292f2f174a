// SPDX-License-Identifier: Apache-2.0
// The body of the kernel. Compiles for the host too, where a test walks through its lanes one by one.
#pragma once

#include "../block_pages.h"

// A GPU faults at a misaligned address, a host need not: the test counts them.
#ifndef LLUMNIX_EXPECT_ALIGNED
#define LLUMNIX_EXPECT_ALIGNED(address)
#endif

namespace llumnix {

struct alignas(16) Vector16 {
  uint32_t words[4];
};

// Bytes that a decoding step will not ask for: they pass through L2 as the first to be evicted.
template <typename T>
LLUMNIX_HOST_DEVICE inline T load_once(const T* from) {
#ifdef __CUDA_ARCH__
  return __ldcs(from);
#else
  LLUMNIX_EXPECT_ALIGNED(from);
  return *from;
#endif
}

template <typename T>
LLUMNIX_HOST_DEVICE inline void store_once(T* to, T value) {
#ifdef __CUDA_ARCH__
  __stcs(to, value);
#else
  LLUMNIX_EXPECT_ALIGNED(to);
  *to = value;
#endif
}

#ifdef __CUDA_ARCH__
template <>
__device__ inline Vector16 load_once(const Vector16* from) {
  const uint4 value = __ldcs(reinterpret_cast<const uint4*>(from));
  return {{value.x, value.y, value.z, value.w}};
}

template <>
__device__ inline void store_once(Vector16* to, Vector16 value) {
  __stcs(reinterpret_cast<uint4*>(to), make_uint4(value.words[0], value.words[1], value.words[2], value.words[3]));
}
#endif

// Four loads are in flight before the first store.
template <typename T>
LLUMNIX_HOST_DEVICE inline void copy_elements(T* to, const T* from, int64_t count, int64_t lane, int64_t lanes) {
  constexpr int kAtOnce = 4;
  int64_t at = lane;
  for (; at + (kAtOnce - 1) * lanes < count; at += kAtOnce * lanes) {
    T held[kAtOnce];
    for (int i = 0; i < kAtOnce; ++i) held[i] = load_once(from + at + i * lanes);
    for (int i = 0; i < kAtOnce; ++i) store_once(to + at + i * lanes, held[i]);
  }
  for (; at < count; at += lanes) store_once(to + at, load_once(from + at));
}

// Scalars up to the first aligned address, elements of type T, scalars for the rest.
template <typename T>
LLUMNIX_HOST_DEVICE inline void copy_aligned_body(const Page& page, int64_t lane, int64_t lanes) {
  int64_t head = -reinterpret_cast<intptr_t>(page.to) & static_cast<int64_t>(sizeof(T) - 1);
  if (head > page.bytes) head = page.bytes;
  const int64_t elements = (page.bytes - head) / static_cast<int64_t>(sizeof(T));
  const int64_t body = head + elements * static_cast<int64_t>(sizeof(T));
  copy_elements(page.to, page.from, head, lane, lanes);
  copy_elements(reinterpret_cast<T*>(page.to + head), reinterpret_cast<const T*>(page.from + head), elements, lane,
                lanes);
  copy_elements(page.to + body, page.from + body, page.bytes - body, lane, lanes);
}

// Lane `lane` of `lanes` that copy every `groups`-th page from page `group` on.
LLUMNIX_HOST_DEVICE inline void copy_pages(const BlockCopy& copy, int64_t group, int64_t groups, int64_t lane,
                                           int64_t lanes) {
  const int64_t pages = copy.num_blocks * copy.num_layers;
  for (int64_t index = group; index < pages; index += groups) {
    const Page page = page_of(copy, index);
    const uintptr_t apart = reinterpret_cast<uintptr_t>(page.to) ^ reinterpret_cast<uintptr_t>(page.from);
    if (apart % 16 == 0)
      copy_aligned_body<Vector16>(page, lane, lanes);
    else if (apart % 4 == 0)
      copy_aligned_body<uint32_t>(page, lane, lanes);
    else
      copy_elements(page.to, page.from, page.bytes, lane, lanes);
  }
}

}  // namespace llumnix
