// How our kernels for Hopper are launched, and instructions that several use. Those of attention are compiled with HEAD_DIM.

#pragma once

#include <cuda_bf16.h>

#include <cmath>

#include "tvm_ffi_utils.h"

namespace hopper {

#ifdef HEAD_DIM
constexpr int kHeadDim = HEAD_DIM;
static_assert(kHeadDim % 8 == 0 && kHeadDim <= 128, "tensor maps want strides of 16 bytes");
#endif

inline void check(cudaError_t status) { TVM_FFI_ICHECK(status == cudaSuccess) << "kernel: " << cudaGetErrorString(status); }

// Launches a kernel that begins while the one ahead ends: it must call `wait_for_kernel_ahead` before it reads or writes what that may write
// or read. `cluster` blocks that are neighbours along x run at once and reach each other's shared memory.
template <typename Params>
void launch_early(void (*kernel)(Params), Params const& params, dim3 grid, int num_threads, size_t num_bytes, DLDevice device, int cluster = 1) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(num_bytes)));
  if (cluster > 8) check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t const config{grid, dim3(num_threads), num_bytes, get_stream(device), attributes, cluster > 1 ? 2u : 1u};
  check(cudaLaunchKernelEx(&config, kernel, params));
}

__device__ __forceinline__ void wait_for_kernel_ahead() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void launch_kernel_behind() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// c (16, 8) += a (16, 16) b (16, 8). A thread's values of c: the first two are of row lane / 4, the others of the row 8 below.
__device__ __forceinline__ void multiply(float (&c)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t pack(float low, float high) {
  __nv_bfloat162 const pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<uint32_t const*>(&pair);
}

// The exponent of a power of two.
inline int log2_of(int64_t power) {
  TVM_FFI_ICHECK(power > 0 && (power & (power - 1)) == 0) << "attention: " << power << " heads that share keys or tokens of a page";
  int log2 = 0;
  while (int64_t{1} << log2 < power) ++log2;
  return log2;
}

}  // namespace hopper
