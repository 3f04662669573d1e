// Products of a warp group with 112 and 72 columns. CuTe has them in headers with all sizes, which take a compiler half a minute; its smaller
// headers lack them. Operands and layouts: PTX, `wgmma.mma_async`, bfloat16 with sums in float32.

#pragma once

#include <cute/tensor.hpp>

#include "hopper_launch.cuh"

namespace hopper {

using namespace cute;

template <int>
using Sum = float;

template <typename A, int NumSums>
struct Registers {
  using DRegisters = void;
  using ARegisters = A;
  using BRegisters = uint64_t[1];
  using CRegisters = float[NumSums];
};

#define SUMS8(i) "+f"(*c[i]), "+f"(*c[i + 1]), "+f"(*c[i + 2]), "+f"(*c[i + 3]), "+f"(*c[i + 4]), "+f"(*c[i + 5]), "+f"(*c[i + 6]), "+f"(*c[i + 7])
#define NAMES36 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, " \
  "%30, %31, %32, %33, %34, %35"
#define SUMS36 SUMS8(0), SUMS8(8), SUMS8(16), SUMS8(24), "+f"(*c[32]), "+f"(*c[33]), "+f"(*c[34]), "+f"(*c[35])

// c (64, 112) += a (64, 16) b (112, 16)': both from shared memory.
template <typename = make_int_sequence<56>>
struct Product112;

template <int... I>
struct Product112<int_sequence<I...>> : Registers<uint64_t[1], 56> {
  DEVICE static void fma(uint64_t const& a, uint64_t const& b, Sum<I>&... sums, GMMA::ScaleOut const scale) {
    float* const c[] = {&sums...};
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %58, 0;\nwgmma.mma_async.sync.aligned.m64n112k16.f32.bf16.bf16 {" NAMES36
        ", %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55}, %56, %57, p, 1, 1, 0, 0;\n}\n"
        : SUMS36, "+f"(*c[36]), "+f"(*c[37]), "+f"(*c[38]), "+f"(*c[39]), SUMS8(40), SUMS8(48)
        : "l"(a), "l"(b), "r"(int32_t(scale)));
  }
};

// c (64, 72) += a (64, 16) b (16, 72): a from registers, b from shared memory.
template <typename = make_int_sequence<36>>
struct Product72;

template <int... I>
struct Product72<int_sequence<I...>> : Registers<uint32_t[4], 36> {
  DEVICE static void fma(uint32_t const& a0, uint32_t const& a1, uint32_t const& a2, uint32_t const& a3, uint64_t const& b,
                                   Sum<I>&... sums, GMMA::ScaleOut const scale) {
    float* const c[] = {&sums...};
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %41, 0;\nwgmma.mma_async.sync.aligned.m64n72k16.f32.bf16.bf16 {" NAMES36
        "}, {%36, %37, %38, %39}, %40, p, 1, 1, 1;\n}\n"
        : SUMS36
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(int32_t(scale)));
  }
};

#undef NAMES36
#undef SUMS8
#undef SUMS36

template <int Columns, typename A>
struct ProductTraits {
  using ValTypeD = float;
  using ValTypeA = bfloat16_t;
  using ValTypeB = bfloat16_t;
  using ValTypeC = float;
  using Shape_MNK = Shape<_64, Int<Columns>, _16>;
  using ThrID = Layout<_128>;
  using ALayout = A;
  using BLayout = GMMA::ABLayout<Columns, 16>;
  using CLayout = GMMA::CLayout_64xN<Columns>;

  GMMA::ScaleOut accumulate_ = GMMA::ScaleOut::One;
};

}  // namespace hopper

namespace cute {

template <>
struct MMA_Traits<hopper::Product112<>> : hopper::ProductTraits<112, GMMA::ABLayout<64, 16>> {
  using FrgTypeA = GMMA::smem_desc<GMMA::Major::K>;
  using FrgTypeB = GMMA::smem_desc<GMMA::Major::K>;
};

template <>
struct MMA_Traits<hopper::Product72<>> : hopper::ProductTraits<72, GMMA::ALayout_64x16> {
  using FrgTypeB = GMMA::smem_desc<GMMA::Major::MN>;
};

}  // namespace cute
