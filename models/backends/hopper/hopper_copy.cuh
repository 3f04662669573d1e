// How our attention kernels for Hopper are launched and copy heads into shared memory. Included by sources that are compiled with HEAD_DIM.
//
// A row of a head lies there in chunks of 64 values, 128 bytes swizzled: of its eight pieces of 16 bytes, piece p of row r is at p ^ r % 8.

#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/cuda_host_adapter.hpp>
#include <cutlass/numeric_types.h>

#include <cute/tensor.hpp>

#include "tvm_ffi_utils.h"

namespace hopper {

using namespace cute;
using BFloat16 = cutlass::bfloat16_t;

constexpr int kHeadDim = HEAD_DIM;
static_assert(kHeadDim % 8 == 0 && kHeadDim <= 128, "tensor maps want strides of 16 bytes");
constexpr int kSteps = (kHeadDim + 15) / 16;  // instructions along a head
constexpr int kChunk = 64, kChunks = (kHeadDim + kChunk - 1) / kChunk;
constexpr int kLastBox = kSteps * 16 - (kChunks - 1) * kChunk;  // columns copied into the last chunk

// A tensor (rows, heads, kHeadDim) for the copy engine, chunk by chunk. What lies outside of the tensor reads as zero.
struct Source {
  CUtensorMap chunks[kChunks];
};

// x (rows, heads, kHeadDim): strides of whole 16 bytes, values side by side. A copy takes a box of it.
inline Source source_of(ffi::TensorView x, int box_heads, int box_rows) {
  TVM_FFI_ICHECK(x.size(2) == kHeadDim && x.stride(2) == 1);
  Source source;
  cuuint64_t const shape[3] = {kHeadDim, static_cast<cuuint64_t>(x.size(1)), static_cast<cuuint64_t>(x.size(0))};
  cuuint64_t const strides[2] = {x.stride(1) * sizeof(BFloat16), x.stride(0) * sizeof(BFloat16)};  // of heads and rows
  cuuint32_t const steps[3] = {1, 1, 1};
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    int const width = chunk == kChunks - 1 ? kLastBox : kChunk;
    cuuint32_t const box[3] = {static_cast<cuuint32_t>(width), static_cast<cuuint32_t>(box_heads), static_cast<cuuint32_t>(box_rows)};
    CUresult const status = CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeTiled)(
        &source.chunks[chunk], CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, x.data_ptr(), shape, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    TVM_FFI_ICHECK(status == CUDA_SUCCESS) << "attention: tensor map, error " << status;
  }
  return source;
}

// Launches a kernel that begins while the one ahead ends: it must call `wait_for_kernel_ahead` before it reads or writes what that may write or read.
template <typename Params>
void launch_early(void (*kernel)(Params), Params const& params, dim3 grid, int num_threads, size_t num_bytes, DLDevice device) {
  cudaError_t const prepared = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(num_bytes));
  TVM_FFI_ICHECK(prepared == cudaSuccess) << "attention: " << num_bytes << " bytes of shared memory: " << cudaGetErrorString(prepared);
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t const config{grid, dim3(num_threads), num_bytes, get_stream(device), &early, 1};
  cudaError_t const status = cudaLaunchKernelEx(&config, kernel, params);
  TVM_FFI_ICHECK(status == cudaSuccess) << "attention: " << cudaGetErrorString(status);
}

CUTLASS_DEVICE void wait_for_kernel_ahead() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

CUTLASS_DEVICE void launch_kernel_behind() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// The exponent of a power of two.
inline int log2_of(int64_t power) {
  TVM_FFI_ICHECK(power > 0 && (power & (power - 1)) == 0) << "attention: " << power << " heads that share keys or tokens of a page";
  int log2 = 0;
  while (int64_t{1} << log2 < power) ++log2;
  return log2;
}

}  // namespace hopper
