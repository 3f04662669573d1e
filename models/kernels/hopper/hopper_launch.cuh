// Launch of our kernels for Hopper, and instructions used by several. Attention kernels are compiled with HEAD_DIM.

#pragma once

#include <cuda_bf16.h>

#include <cmath>

#include "tvm_ffi_utils.h"

#define DEVICE __device__ __forceinline__

namespace hopper {

using View = ffi::TensorView;

#ifdef HEAD_DIM
constexpr int kHeadDim = HEAD_DIM;
static_assert(kHeadDim % 8 == 0 && kHeadDim <= 128, "tensor maps want strides of 16 bytes");
#endif

inline void check(cudaError_t status) { TVM_FFI_ICHECK(status == cudaSuccess) << "kernel: " << cudaGetErrorString(status); }

// Type of the tensors that a kernel reads and writes as T, which may be a vector of their values.
template <typename T>
struct Stored;
template <DLDataTypeCode kCode, int kBits>
struct StoredAs {
  static bool is(DLDataType type) { return type.code == kCode && type.bits == kBits && type.lanes == 1; }
};
template <>
struct Stored<__nv_bfloat16> : StoredAs<kDLBfloat, 16> {};
template <>
struct Stored<float> : StoredAs<kDLFloat, 32> {};
template <>
struct Stored<uint8_t> : StoredAs<kDLUInt, 8> {};
template <>
struct Stored<int64_t> : StoredAs<kDLInt, 64> {};
template <>
struct Stored<int> : StoredAs<kDLInt, 32> {};
template <>
struct Stored<int2> : Stored<int> {};
template <>
struct Stored<int4> : Stored<int> {};
template <>
struct Stored<uint32_t> : Stored<int> {};  // torch has packed codes as int32
template <>
struct Stored<uint4> : Stored<int> {};

// All tensors of our kernels pass through one of the three functions below, which check their types.
template <typename T>
T* strided_values_of(View x) {
  TVM_FFI_ICHECK(Stored<T>::is(x.dtype())) << "kernel: a tensor of type " << int(x.dtype().code) << " with " << int(x.dtype().bits) << " bits";
  return static_cast<T*>(x.data_ptr());
}

template <typename T>
T* values_of(View x) {
  TVM_FFI_ICHECK(x.IsContiguous()) << "kernel: a tensor that is not contiguous";
  return strided_values_of<T>(x);
}

// Weights of a norm: their address, and bytes per weight; 0 without weights.
struct NormWeight {
  unsigned char const* values;
  int num_bytes;
};

inline NormWeight norm_weight_of(View x) {
  bool const is_float = x.dtype().code == kDLFloat;
  void const* const values = is_float ? static_cast<void const*>(values_of<float>(x)) : values_of<__nv_bfloat16>(x);
  return {static_cast<unsigned char const*>(values), x.size(0) ? (is_float ? 4 : 2) : 0};
}

// Launches a kernel that starts before the preceding one has finished (programmatic dependent launch): it must call
// `wait_for_preceding_kernel` before it accesses that one's data. `cluster` neighbouring blocks along x run concurrently and can access
// each other's shared memory.
template <typename Params>
void launch_early(void (*kernel)(Params), Params const& params, dim3 grid, int num_threads, size_t num_bytes, DLDevice device, int cluster = 1) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(num_bytes)));
  if (cluster > 8) check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {unsigned(cluster), 1, 1};
  cudaLaunchConfig_t const config{grid, dim3(num_threads), num_bytes, get_stream(device), attributes, cluster > 1 ? 2u : 1u};
  check(cudaLaunchKernelEx(&config, kernel, params));
}

DEVICE void wait_for_preceding_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

DEVICE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// c (16, 8) += a (16, 16) b (16, 8). The first two of a thread's values of c belong to row lane / 4, the others to the row 8 below.
DEVICE void multiply(float (&c)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same of halves.
DEVICE void multiply_halves(float (&c)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four float8 values as two pairs of halves.
DEVICE uint2 to_halves(uint32_t four) {
  uint2 pairs;
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high; }"
      : "=r"(pairs.x), "=r"(pairs.y)
      : "r"(four));
  return pairs;
}

DEVICE uint32_t pack(float low, float high) {
  __nv_bfloat162 const pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<uint32_t const*>(&pair);
}

// The maximum or the sum over lanes at distances kFirst, 2 kFirst, ... up to kEnd / 2.
template <int kFirst, int kEnd, bool kMaximum>
DEVICE float over_lanes(float value) {
#pragma unroll
  for (int distance = kFirst; distance < kEnd; distance *= 2) {
    float const other = __shfl_xor_sync(~0u, value, distance);
    value = kMaximum ? fmaxf(value, other) : value + other;
  }
  return value;
}

constexpr float kLowest = -1e30f;  // below every score but finite: a row without a visible key in a tile gets weights of 0, not NaN

// Exponent of a power of two.
inline int log2_of(int64_t power) {
  TVM_FFI_ICHECK(power > 0 && (power & (power - 1)) == 0) << "attention: " << power << " heads that share keys or tokens of a page";
  int log2 = 0;
  while (int64_t{1} << log2 < power) ++log2;
  return log2;
}

}  // namespace hopper
