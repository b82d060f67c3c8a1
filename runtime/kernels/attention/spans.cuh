// How the keys of a row are cut into parts: a function of its position alone, so a row's bits are.
//
// Below the prefix boundary: spans of 1, 2, 4, … tiles of 64 positions, as short as leaves at most
// SPANS of them. From there on the window's up to 96 keys: a part of 64, then the rest.
//
// Compile-time: SPANS.
#pragma once
#include "common.cuh"

constexpr int kKeys = 64;  // of a tile

// Of a row's spans the tiles, as a power of two.
__device__ __forceinline__ int span_shift(int prefix) {
  return 32 - __clz((prefix / kKeys - 1) / SPANS);
}
__device__ __forceinline__ int spans_of(int prefix) {
  const int shift = span_shift(prefix);
  return (prefix / kKeys + (1 << shift) - 1) >> shift;
}
__device__ __forceinline__ int parts_of(int position, int prefix) {
  return spans_of(prefix) + (position - prefix) / kKeys + 1;
}
