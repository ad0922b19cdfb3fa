// AVX-512 with VNNI: 16 floats or 64 bytes a register, 32 registers. Compiled with this level's flags alone; it includes
// no C++ standard header, whose inline functions the linker might share with code for older processors.
#if defined(__x86_64__)
#include <immintrin.h>
#include <string.h>

#include "kernels.h"

namespace baton {
namespace {

#define INLINE static inline __attribute__((always_inline))
#define INLINE_METHOD inline __attribute__((always_inline))

typedef __m512 F;
typedef __m512i I;

constexpr int DENSE_ROWS = 6, DENSE_BLOCKS = 4;   // 24 sums, 4 weights, 1 input
constexpr int TILE_ROWS = 8;                      // 8 sums, 8 integer sums, weights, 1 input, scales
constexpr int PAIR_ROWS = 6;                      // for 2 blocks: 12 sums, 12 integer sums, 4 weights, 1 input
constexpr int64_t PAIRS_FROM = 48;                // fewer rows do not fill tiles of pairs (measured)
constexpr int KEY_VECTORS = 2, KEY_ROWS = 12;
constexpr int VALUE_VECTORS = 4, VALUE_ROWS = 6;

INLINE F load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void store(float *p, F v) { _mm512_storeu_ps(p, v); }
INLINE F load_part(const float *p, int n) { return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p); }
INLINE void store_part(float *p, F v, int n) { _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), v); }
INLINE F splat(float x) { return _mm512_set1_ps(x); }
INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
INLINE F max_of(F a, F b) { return _mm512_max_ps(a, b); }  // b where one is NaN
INLINE F min_of(F a, F b) { return _mm512_min_ps(a, b); }
INLINE F select_less(F x, F bound, F less, F otherwise) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, bound, _CMP_LT_OQ), otherwise, less);
}

INLINE F load(const uint16_t *p) {  // bfloat16
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
INLINE void store(uint16_t *p, F v) {  // bfloat16, to nearest even, NaN stays NaN
    const I bits = _mm512_castps_si512(v);
    const I odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    I rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(rounded));
}
INLINE F load_f16(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }

INLINE I to_int(F v) { return _mm512_cvtps_epi32(v); }  // to nearest even
INLINE F to_float(I v) { return _mm512_cvtepi32_ps(v); }
INLINE void store_int8(int8_t *p, I v) { _mm_storeu_si128((__m128i *)p, _mm512_cvtsepi32_epi8(v)); }
INLINE I add_int(I a, I b) { return _mm512_add_epi32(a, b); }
INLINE I max_int(I a, I b) { return _mm512_max_epi32(a, b); }
INLINE I magnitude_bits(F v) { return _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(0x7fffffff)); }
INLINE F power_of_two(I n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
}
INLINE int32_t sum_int(I v) { return _mm512_reduce_add_epi32(v); }
INLINE int32_t largest_int(I v) { return _mm512_reduce_max_epi32(v); }
INLINE float sum(F v) { return _mm512_reduce_add_ps(v); }
INLINE float largest(F v) { return _mm512_reduce_max_ps(v); }

// --- 32 inputs of 16 outputs as integers: 8 vectors, each of 4 inputs for every output ------------------------------

constexpr int Q8_BIAS = 128;          // vpdpbusd multiplies unsigned by signed bytes: the offset takes 128 back
constexpr int64_t DIRECT_ROWS = 128;  // docs/adr/0012-halves-unpacked-in-registers.md
int group_index(int k, int n) { return k / 4 * 64 + n * 4 + k % 4; }

INLINE I four(const int8_t *a) {
    int32_t x;
    memcpy(&x, a, 4);
    return _mm512_set1_epi32(x);
}
INLINE I low_halves(I v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
INLINE I high_halves(I v) { return low_halves(_mm512_srli_epi16(v, 4)); }

INLINE void unpack_halves(const uint8_t *halves, uint8_t *out) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const I v = _mm512_loadu_si512(halves + 64 * i);
        _mm512_storeu_si512(out + 64 * i, low_halves(v));
        _mm512_storeu_si512(out + 256 + 64 * i, high_halves(v));
    }
}

// Adds 4 inputs of R rows times C vectors of weights.
template <int R, int C>
INLINE void multiply_four(const I (&weights)[C], const int8_t *q, int64_t stride, I (&product)[R][C]) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        const I input = four(q + r * stride);
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) product[r][c] = _mm512_dpbusd_epi32(product[r][c], weights[c], input);
    }
}

// product[r][c] = the group's weights of block c times row r of q; rows `stride` apart, their offsets `groups`.
template <Storage S, int R, int C>
INLINE void multiply_group(const uint8_t *const *weights, const int8_t *q, int64_t stride, const int32_t *offset,
                           int64_t groups, I (&product)[R][C]) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++)
            product[r][c] = S == Storage::SIGNED ? _mm512_set1_epi32(offset[r * groups]) : _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int i = 0; i < (S == Storage::HALVES ? 4 : 8); i++) {
        I bytes[C], high[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
            bytes[c] = _mm512_loadu_si512(weights[c] + 64 * i);
            if (S == Storage::HALVES) high[c] = high_halves(bytes[c]), bytes[c] = low_halves(bytes[c]);
        }
        multiply_four<R, C>(bytes, q + 4 * i, stride, product);
        if (S == Storage::HALVES) multiply_four<R, C>(high, q + 16 + 4 * i, stride, product);
    }
}

#include "kernels_rows.inl"
#include "kernels_linear.inl"
#include "kernels_attention.inl"
#include "kernels_sample.inl"

}  // namespace

#define KERNELS kernels_avx512
#include "kernels_table.inl"

}  // namespace baton
#endif
