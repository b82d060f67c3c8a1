// Warpgroup MMA over attend's lines in shared memory: sm_90a alone. Measured, it has mma's bits.
#pragma once
#include "common.cuh"

#ifdef WARPGROUP_MMA
// Lines of 128 bytes, swizzled, in groups of 8; `blocks` bytes lie between blocks of 64 values,
// where values are the MMA's columns. The address is the same in all lanes.
__device__ __forceinline__ u64 describe_lines(u32 addr, u32 blocks) {
  return (u64)(__shfl_sync(~0u, addr, 0) >> 4) | (u64)(blocks >> 4) << 16 | (u64)(1024 >> 4) << 32 |
         1ull << 62;
}
// c[64 x 32] += a[64 x 16] times b[32 x 16] transposed.
__device__ __forceinline__ void mma_async_scores(float4& c0, float4& c1, float4& c2, float4& c3,
                                                 u64 a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" SUMS4
               "}, %16, %17, 1, 1, 1, 0, 0;"
               : SUMS(c0), SUMS(c1), SUMS(c2), SUMS(c3)
               : "l"(a), "l"(b));
}
// c[64 x 256] += a[64 x 16] times b[16 x 256].
__device__ __forceinline__ void mma_async_values(float4 (&c)[32], const u32 (&a)[4], u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, "
      "%127}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;"
      : OUT12(c), SUMS(c[12]), SUMS(c[13]), SUMS(c[14]), SUMS(c[15]), SUMS(c[16]), SUMS(c[17]),
        SUMS(c[18]), SUMS(c[19]), SUMS(c[20]), SUMS(c[21]), SUMS(c[22]), SUMS(c[23]), SUMS(c[24]),
        SUMS(c[25]), SUMS(c[26]), SUMS(c[27]), SUMS(c[28]), SUMS(c[29]), SUMS(c[30]), SUMS(c[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#endif
