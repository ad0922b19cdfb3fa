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
constexpr int GROUPED_ROWS = 8;                   // 8 bytes of a group, 8 sums, 2 integer sums, scales
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
constexpr int64_t DIRECT_ROWS = 24;
int group_index(int k, int n) { return k / 4 * 64 + n * 4 + k % 4; }

struct Bytes {
    I v[8];
};

INLINE Bytes load_bytes(const uint8_t *p) {
    Bytes b;
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) b.v[i] = _mm512_loadu_si512(p + 64 * i);
    return b;
}
INLINE Bytes load_nibbles(const uint8_t *p) {
    const I low = _mm512_set1_epi8(15);
    Bytes b;
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const I v = _mm512_loadu_si512(p + 64 * i);
        b.v[i] = _mm512_and_si512(v, low);
        b.v[i + 4] = _mm512_and_si512(_mm512_srli_epi16(v, 4), low);
    }
    return b;
}
INLINE void store_bytes(uint8_t *p, const Bytes &b) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) _mm512_storeu_si512(p + 64 * i, b.v[i]);
}
INLINE I four(const int8_t *a) {
    int32_t x;
    memcpy(&x, a, 4);
    return _mm512_set1_epi32(x);
}
INLINE I dot(const Bytes &b, const int8_t *a, I total) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) total = _mm512_dpbusd_epi32(total, b.v[i], four(a + 4 * i));
    return total;
}
INLINE I dot_unsigned(const Bytes &b, const int8_t *a) { return dot(b, a, _mm512_setzero_si512()); }
INLINE I dot_signed(const Bytes &b, const int8_t *a, int32_t offset) { return dot(b, a, _mm512_set1_epi32(offset)); }
typedef Bytes Panel;
INLINE Panel load_panel(const uint8_t *p) { return load_bytes(p); }

#include "kernels_rows.inl"
#include "kernels_linear.inl"
#include "kernels_attention.inl"
#include "kernels_sample.inl"

}  // namespace

#define KERNELS kernels_avx512
#include "kernels_table.inl"

}  // namespace baton
#endif
