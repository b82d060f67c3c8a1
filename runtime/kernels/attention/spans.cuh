// How the keys of a row are cut into parts: a function of its position alone, so a row's bits are.
//
// Below the prefix boundary: spans of as few tiles of 64 positions as leave at most SPANS of them.
// From there on the window's up to 96 keys: a part of 64, then the rest.
//
// Compile-time: SPANS.
#pragma once
#include "common.cuh"

constexpr int kKeys = 64;  // of a tile

// Positions of each of a row's spans.
__device__ __forceinline__ int span_size(int prefix) {
  return max(1, (prefix / kKeys + SPANS - 1) / SPANS) * kKeys;
}
__device__ __forceinline__ int spans_of(int prefix) {
  const int size = span_size(prefix);
  return (prefix + size - 1) / size;
}
__device__ __forceinline__ int parts_of(int position, int prefix) {
  return spans_of(prefix) + (position - prefix) / kKeys + 1;
}

// Scores are in powers of two.
__device__ __forceinline__ float power_of_2(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}
