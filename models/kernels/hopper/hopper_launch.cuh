// Launch of our kernels for Hopper, and instructions used by several. Attention kernels are compiled with HEAD_DIM.

#pragma once

#include <cuda_bf16.h>

#include <cmath>

#include "tvm_ffi_utils.h"

#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")

namespace hopper {

using View = ffi::TensorView;
using Optional = ffi::Optional<View>;
using BFloat16 = __nv_bfloat16;

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
struct Stored<BFloat16> : StoredAs<kDLBfloat, 16> {};
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

// Converts to the address of a tensor's values, of a type that they have; null without a tensor. All our kernels' tensors pass through here.
struct Values {
  Optional x;
  bool is_strided;

  template <typename T>
  operator T*() const {
    if (!x) return nullptr;
    DLDataType const type = (*x).dtype();
    TVM_FFI_ICHECK(Stored<std::remove_const_t<T>>::is(type)) << "kernel: a tensor of type " << int(type.code) << ", " << int(type.bits) << " bits";
    TVM_FFI_ICHECK(is_strided || (*x).IsContiguous()) << "kernel: a tensor that is not contiguous";
    return static_cast<T*>((*x).data_ptr());
  }
};

inline Values values_of(Optional x, bool is_strided = false) { return {x, is_strided}; }

// Address of values in float32 or bfloat16.
inline unsigned char* bytes_of(Optional x, bool is_float) {
  return is_float ? reinterpret_cast<unsigned char*>(static_cast<float*>(values_of(x)))
                  : reinterpret_cast<unsigned char*>(static_cast<BFloat16*>(values_of(x)));
}

inline bool is_float(View x) { return x.dtype().code == kDLFloat; }

// Sets address and bytes per weight, 0 without a norm, and eps.
template <typename Params>
void set_norm(Params& params, Optional weight, double eps) {
  bool const is_wide = weight && is_float(*weight);
  params.norm_weight = bytes_of(weight, is_wide), params.norm_bytes = !weight ? 0 : is_wide ? 4 : 2, params.eps = float(eps);
}

inline int num_multiprocessors(DLDevice device) {
  int count;
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device.device_id));
  return count;
}

// Launches a kernel that starts before the preceding one has finished (programmatic dependent launch): it must call
// `wait_for_preceding_kernel` before it accesses that one's data. `cluster` neighbouring blocks along x run concurrently and can access
// each other's shared memory.
template <typename Params>
void launch_early(void (*kernel)(Params), Params const& params, dim3 grid, int num_threads, size_t num_bytes, DLDevice device, int cluster = 1) {
  ffi::CUDADeviceGuard guard(device.device_id);
  cudaFuncAttributes found;
  check(cudaFuncGetAttributes(&found, kernel));
  if (found.maxDynamicSharedSizeBytes < int(num_bytes)) {  // never less: repeated launches with more do not pass here
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(num_bytes)));
  }
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

DEVICE void start() { wait_for_preceding_kernel(), launch_dependents(); }

// Blocks of a cluster: this one runs; all run, so that one may write to another's shared memory; all have written.
DEVICE void announce_block() { asm volatile("barrier.cluster.arrive.relaxed.aligned;"); }

DEVICE void wait_for_blocks() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

DEVICE void wait_for_writes() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

DEVICE uint32_t shared_address(void const* place) { return uint32_t(__cvta_generic_to_shared(place)); }

// Address of another block's counterpart.
DEVICE uint32_t address_in(int rank, void const* mine) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(mine)), "r"(rank));
  return there;
}

DEVICE void store_in(int rank, float* mine, float value) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address_in(rank, mine)), "f"(value) : "memory");
}

DEVICE void copy_async(void* to, void const* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

DEVICE void copy_float(float* to, float const* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

DEVICE void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kLeft groups of this thread's copies are pending.
template <int kLeft>
DEVICE void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory"); }

// An address as that of another type.
template <typename T>
DEVICE T* as(void* place) { return static_cast<T*>(place); }

template <typename T>
DEVICE T const* as(void const* place) { return static_cast<T const*>(place); }

// Bypasses L1: another kernel or block wrote it.
template <typename T>
DEVICE T load_new(void const* place) { return __ldcg(as<T>(place)); }

DEVICE uint32_t word_of(uint4 const& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

DEVICE float2 floats(uint32_t pair) { return __bfloat1622float2(*as<__nv_bfloat162>(&pair)); }

DEVICE float silu(float x) { return x / (1.f + __expf(-x)); }

// Writes a result, or adds it.
DEVICE void put(BFloat16* place, float value, bool adds) { *place = __float2bfloat16_rn(adds ? value + __bfloat162float(*place) : value); }

// c (16, 8) += a (16, 16) b (16, 8). The first two of a thread's values of c belong to row lane / 4, the others to the row 8 below.
#define MULTIPLY(name, type) \
  DEVICE void name(float (&c)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1) { \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1)); \
  }
MULTIPLY(multiply, "bf16")
MULTIPLY(multiply_halves, "f16")
#undef MULTIPLY

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
  return *as<uint32_t>(&pair);
}

// The maximum or the sum over lanes at distances kFirst, 2 kFirst, ... up to kEnd / 2.
template <int kFirst, int kEnd, bool kMaximum>
DEVICE float over_lanes(float value) {
  UNROLL for (int distance = kFirst; distance < kEnd; distance *= 2) {
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
