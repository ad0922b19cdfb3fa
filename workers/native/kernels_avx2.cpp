// AVX2 with FMA and F16C: a vector of 16 floats is two registers of 8, of which there are 16. Compiled with this
// level's flags alone; it includes no C++ standard header (see kernels_avx512.cpp).
#if defined(__x86_64__)
#include <immintrin.h>
#include <string.h>

#include "kernels.h"

namespace baton {
namespace {

#define INLINE static inline __attribute__((always_inline))
#define INLINE_METHOD inline __attribute__((always_inline))

struct F {
    __m256 a, b;
};
struct I {
    __m256i a, b;
};

constexpr int DENSE_ROWS = 6, DENSE_BLOCKS = 1;   // 12 sums, 2 weights, 1 input
constexpr int TILE_ROWS = 4, PAIR_ROWS = 0;   // 8 sums, 4 integer sums, the rest in the first cache
constexpr int KEY_VECTORS = 1, KEY_ROWS = 6;
constexpr int VALUE_VECTORS = 1, VALUE_ROWS = 6;

INLINE F load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void store(float *p, F v) {
    _mm256_storeu_ps(p, v.a);
    _mm256_storeu_ps(p + 8, v.b);
}
INLINE F load_part(const float *p, int n) {
    float whole[16] = {0};
    memcpy(whole, p, 4 * (size_t)n);
    return load(whole);
}
INLINE void store_part(float *p, F v, int n) {
    float whole[16];
    store(whole, v);
    memcpy(p, whole, 4 * (size_t)n);
}
INLINE F splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
INLINE F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
INLINE F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
INLINE F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
INLINE F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
INLINE F max_of(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }  // y where one is NaN
INLINE F min_of(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
INLINE F select_less(F x, F bound, F less, F otherwise) {
    return {_mm256_blendv_ps(otherwise.a, less.a, _mm256_cmp_ps(x.a, bound.a, _CMP_LT_OQ)),
            _mm256_blendv_ps(otherwise.b, less.b, _mm256_cmp_ps(x.b, bound.b, _CMP_LT_OQ))};
}

INLINE __m256 widen_bf16(const uint16_t *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
INLINE F load(const uint16_t *p) { return {widen_bf16(p), widen_bf16(p + 8)}; }  // bfloat16
INLINE __m256i round_bf16(__m256 v) {  // to nearest even, NaN stays NaN
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, up), 16);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), is_nan);
}
INLINE void store(uint16_t *p, F v) {
    const __m256i both = _mm256_packus_epi32(round_bf16(v.a), round_bf16(v.b));
    _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(both, 0xd8));
}
INLINE F load_f16(const void *p) {
    const __m128i *halves = (const __m128i *)p;
    return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}

INLINE I to_int(F v) { return {_mm256_cvtps_epi32(v.a), _mm256_cvtps_epi32(v.b)}; }  // to nearest even
INLINE F to_float(I v) { return {_mm256_cvtepi32_ps(v.a), _mm256_cvtepi32_ps(v.b)}; }
INLINE void store_int8(int8_t *p, I v) {
    const __m256i shorts = _mm256_permute4x64_epi64(_mm256_packs_epi32(v.a, v.b), 0xd8);
    _mm_storeu_si128((__m128i *)p, _mm_packs_epi16(_mm256_castsi256_si128(shorts), _mm256_extracti128_si256(shorts, 1)));
}
INLINE I add_int(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
INLINE I max_int(I x, I y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
INLINE I magnitude_bits(F v) {
    const __m256i mask = _mm256_set1_epi32(0x7fffffff);
    return {_mm256_and_si256(_mm256_castps_si256(v.a), mask), _mm256_and_si256(_mm256_castps_si256(v.b), mask)};
}
INLINE __m256 power_of_two(__m256i n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
INLINE F power_of_two(I n) { return {power_of_two(n.a), power_of_two(n.b)}; }
INLINE int32_t sum_int(I v) {
    const __m256i eight = _mm256_add_epi32(v.a, v.b);
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
INLINE int32_t largest_int(I v) {
    const __m256i eight = _mm256_max_epi32(v.a, v.b);
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
INLINE float sum(F v) {
    const __m256 eight = _mm256_add_ps(v.a, v.b);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
INLINE float largest(F v) {
    const __m256 eight = _mm256_max_ps(v.a, v.b);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

// --- 32 inputs of 16 outputs as integers: 8 times 64 bytes, each of 4 inputs for every output -------------------------

constexpr int Q8_BIAS = 0;
constexpr int64_t PAIRS_FROM = 0, DIRECT_ROWS = 1;
int group_index(int k, int n) { return k / 4 * 64 + n * 4 + k % 4; }

struct Nibbles {
    const uint8_t *p;
};
struct Panel {  // unsigned or signed bytes where they lie: registers do not hold them
    const uint8_t *p;
};
INLINE __m256i load_half(const uint8_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
INLINE void unpack_halves(const uint8_t *halves, uint8_t *out) {
    const __m256i low = _mm256_set1_epi8(15);
    for (int i = 0; i < 8; i++) {
        const __m256i v = load_half(halves + 32 * i);
        _mm256_storeu_si256((__m256i *)(out + 32 * i), _mm256_and_si256(v, low));
        _mm256_storeu_si256((__m256i *)(out + 256 + 32 * i), _mm256_and_si256(_mm256_srli_epi16(v, 4), low));
    }
}
INLINE __m256i four(const int8_t *a) {
    int32_t x;
    memcpy(&x, a, 4);
    return _mm256_set1_epi32(x);
}
// 16-bit sums hold a whole group: 8 * 2 * 15 * 127 = 30,480.
INLINE I widen(__m256i low, __m256i high) {
    const __m256i one = _mm256_set1_epi16(1);
    return {_mm256_madd_epi16(low, one), _mm256_madd_epi16(high, one)};
}
INLINE I dot_unsigned(const uint8_t *w, const int8_t *a) {
    __m256i low = _mm256_setzero_si256(), high = low;
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        const __m256i x = four(a + 4 * i);
        low = _mm256_add_epi16(low, _mm256_maddubs_epi16(load_half(w + 64 * i), x));
        high = _mm256_add_epi16(high, _mm256_maddubs_epi16(load_half(w + 64 * i + 32), x));
    }
    return widen(low, high);
}
INLINE I dot_halves(const uint8_t *w, const int8_t *a) {
    const __m256i mask = _mm256_set1_epi8(15);
    __m256i sums[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m256i x = four(a + 4 * i), y = four(a + 4 * (i + 4));
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const __m256i v = load_half(w + 64 * i + 32 * half);
            const __m256i high = _mm256_and_si256(_mm256_srli_epi16(v, 4), mask);
            sums[half] = _mm256_add_epi16(sums[half], _mm256_maddubs_epi16(_mm256_and_si256(v, mask), x));
            sums[half] = _mm256_add_epi16(sums[half], _mm256_maddubs_epi16(high, y));
        }
    }
    return widen(sums[0], sums[1]);
}
// |w| times a with w's sign; a pair is at most 2 * 128 * 127 = 32,512, so it is widened before it is added.
INLINE __m256i dot_pairs(__m256i w, __m256i x) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
INLINE I dot_signed(const uint8_t *w, const int8_t *a) {
    I s = {_mm256_setzero_si256(), _mm256_setzero_si256()};
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        const __m256i x = four(a + 4 * i);
        s.a = _mm256_add_epi32(s.a, dot_pairs(load_half(w + 64 * i), x));
        s.b = _mm256_add_epi32(s.b, dot_pairs(load_half(w + 64 * i + 32), x));
    }
    return s;
}

template <Storage S>
INLINE I dot(const uint8_t *weights, const int8_t *a) {
    if constexpr (S == Storage::UNSIGNED) return dot_unsigned(weights, a);
    else if constexpr (S == Storage::SIGNED) return dot_signed(weights, a);
    else return dot_halves(weights, a);
}

// product[r][0] = a group's weights times row r of q, rows `stride` apart.
template <Storage S, int R, int C>
INLINE void multiply_group(const uint8_t *const *weights, const int8_t *q, int64_t stride, const int32_t *, int64_t,
                           I (&product)[R][C]) {
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) product[r][0] = dot<S>(weights[0], q + r * stride);
}

#include "kernels_rows.inl"
#include "kernels_linear.inl"
#include "kernels_attention.inl"
#include "kernels_sample.inl"

}  // namespace

#define KERNELS kernels_avx2
#include "kernels_table.inl"

}  // namespace baton
#endif
