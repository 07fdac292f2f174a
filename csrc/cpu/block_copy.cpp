// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <functional>
#include <system_error>
#include <thread>
#include <vector>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "../block_pages.h"

namespace {

using llumnix::BlockCopy;
using llumnix::Page;

// Past the caches: what is copied is read much later or by somebody else, and what they hold belongs to the model.
void copy_streaming(uint8_t* to, const uint8_t* from, size_t bytes) {
#ifdef __SSE2__
  const size_t head = std::min<size_t>(-reinterpret_cast<uintptr_t>(to) & 63, bytes);
  std::memcpy(to, from, head);
  to += head, from += head, bytes -= head;
  for (; bytes >= 64; to += 64, from += 64, bytes -= 64) {
    const auto* source = reinterpret_cast<const __m128i*>(from);
    auto* destination = reinterpret_cast<__m128i*>(to);
    const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(destination, a), _mm_stream_si128(destination + 1, b);
    _mm_stream_si128(destination + 2, c), _mm_stream_si128(destination + 3, d);
  }
#endif
  std::memcpy(to, from, bytes);
}

void copy_pages(const BlockCopy& copy, int64_t first, int64_t stop, int64_t streaming_from) {
  for (int64_t index = first; index < stop; ++index) {
    const Page page = llumnix::page_of(copy, index);
    if (page.bytes >= streaming_from)
      copy_streaming(page.to, page.from, page.bytes);
    else
      std::memcpy(page.to, page.from, page.bytes);
  }
#ifdef __SSE2__
  _mm_sfence();  // streaming stores are ordered by nothing else
#endif
}

}  // namespace

// Returns when all is copied. Pages of `streaming_from` bytes and more are written past the caches.
extern "C" __attribute__((visibility("default"))) int llumnix_copy_blocks_cpu_1(const BlockCopy* copy,
                                                                                int64_t num_threads,
                                                                                int64_t streaming_from) {
  const int64_t pages = copy->num_blocks * copy->num_layers;
  const int64_t shares = std::max<int64_t>(1, std::min(num_threads, pages));
  std::vector<std::thread> helpers;
  helpers.reserve(shares - 1);
  int64_t share = 1;
  try {
    for (; share < shares; ++share)
      helpers.emplace_back(copy_pages, std::cref(*copy), pages * share / shares, pages * (share + 1) / shares,
                           streaming_from);
  } catch (const std::system_error&) {
    // No more threads to be had: the rest is ours.
    copy_pages(*copy, pages * share / shares, pages, streaming_from);
  }
  copy_pages(*copy, 0, pages / shares, streaming_from);
  for (std::thread& helper : helpers) helper.join();
  return 0;
}
